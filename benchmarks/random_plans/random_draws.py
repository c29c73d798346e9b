"""Draws random plans: a model, a mesh of up to 24 ranks, and any strategies on it, each with random options.

A plan is a function of a seed and a number, so that each one can be drawn again by itself. Plainly impossible
plans are not drawn (more pipeline stages than the model has blocks, sequence lengths that sequence
parallelism does not divide, a square mesh with unequal sides): otherwise most plans would be refused, for a
few reasons. One plan in `PERTURBED_ONE_IN` is perturbed on purpose: a strategy is left out or added, or an
axis or the batch gets another size. Such a plan may be refused, with a repair, or it matches like the others.

Half of the plans of the model with two inputs have a contrastive loss, which takes the whole batch at once,
and then one microbatch and no guard. Some plans of data parallelism alone get the model with batch norms, and
one microbatch. Some plans of T5, which has ReLU, encode what it saves.

Some plans have an incomplete last batch, as the last one of an epoch may be (`num_missing_samples`). Some
have a loss guard, and a last step whose loss is multiplied, so that the guard must skip it.

"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType

from benchmarks.random_plans.expert_draws import over_other_axes, with_experts
from benchmarks.random_plans.hpz_draws import with_hpz
from benchmarks.random_plans.offload_draws import with_offloads
from benchmarks.random_plans.random_models import MODELS, RandomModel, analyzed_model
from benchmarks.random_plans.strategy_draws import (
    DATA_AXES,
    MULTI_DIM_TENSOR_PARALLEL,
    Sizes,
    draw_strategies,
    with_servers,
)
from meshwright.api import make_plan
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.parallel.data.sync_batch_norm import SyncBatchNorm
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.embedding.embedding_host import EmbeddingHost
from meshwright.parallel.expert.loss_free_balancing import LossFreeBalancing
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.memory.gist import Gist
from meshwright.parallel.outer.rounds import RoundStrategy
from meshwright.parallel.outer.streaming_diloco import StreamingDiLoCo
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.parallel.server.parameter_server import ParameterServer
from meshwright.parallel.server.stale_server import AXIS, StaleServer
from meshwright.parallel.tensor.cube_3d import TensorParallel3D
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, LossGuard, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import SITE_AXES, Mesh
from meshwright.plan.strategy_interface import Strategy

MAX_RANKS, FULL_RATE_RANKS, NUM_STEPS, PERTURBED_ONE_IN = 24, 5, 2, 8
GUARD = LossGuard("skip", window=NUM_STEPS)  # checks the step after the first NUM_STEPS
SIZES = {  # per axis: numbers of ranks, and their weights in the drawing
    "pp": ((1, 2, 3, 4), (7, 5, 3, 1)),
    "dp_replicate": ((1, 2, 3), (7, 4, 1)),
    "dp_shard": ((1, 2, 3), (6, 4, 1)),
    "cp": ((1, 2, 3, 4), (6, 4, 3, 1)),
    "tp": ((2, 3, 4, 6), (6, 3, 1, 1)),
}
WHOLE_BATCH: Mapping[str, str] = MappingProxyType({"two inputs": "two inputs, contrastive"})
BESIDE_BATCH_NORMS = (BatchSplit, DDP, NaiveDDP, ZeRO, DataParallelMaster, ActivationCheckpointing)
TECHNIQUES: Mapping[str, str] = (
    MappingProxyType(  # techniques that a plan may combine -> kind; a plan has at most one of each kind
        {
            **{name: name for name in ("ddp", "naive_ddp", "data_parallel_master", "zero replicate_axis")},
            "parameter_server": "parameter_server",
            **dict.fromkeys(("zero 1", "zero 2", "zero 3"), "zero"),
            **{
                name: name
                for name in (
                    *(
                        "tensor_parallel 1d",
                        "sequence_parallel",
                        "vocab_parallel",
                        *MULTI_DIM_TENSOR_PARALLEL,
                    ),
                    *("ulysses", "ring", "hybrid_context_parallel"),
                )
            },
            **dict.fromkeys(SCHEDULES, "pipeline"),
            **{name: name for name in ("scatter", "microbatches", "clipping")},
            **dict.fromkeys(("activation_checkpointing", "memory_budget"), "recompute"),
            **{
                name: name
                for name in ("chunked_loss", "tiled_mlp", "dropout", "loss guard", "incomplete batch")
            },
            "whole-batch loss": "whole-batch loss",
            **{
                name: name
                for name in (
                    *("sync_batch_norm", "expert_parallel", "expert_tensor_parallel", "loss_free_balancing"),
                    *("offload", "disk_offload", "hpz"),
                    *("activation_offload", "partitioned_activations"),
                    "gist",
                )
            },
        }
    )
)


@dataclass(frozen=True)
class Draw:
    """A random plan: the model, the mesh, the strategies in the order in which a user might list them, and
    the sizes of the batch.

    `perturbation`: the deliberate change of a perturbed plan, in words, else "". `num_missing_samples`: how
    many samples the last batch lacks.
    """

    seed: int
    number: int
    model: str
    mesh: Mesh
    strategies: tuple[Strategy, ...]
    num_microbatches: int
    micro_batch: int
    clip: float
    perturbation: str = ""
    num_missing_samples: int = 0
    guard: bool = False

    def __str__(self) -> str:
        strategies = "; ".join(map(str, self.strategies))
        batch = f"{self.num_microbatches} x {self.micro_batch} samples" + (
            f", clip {self.clip}" if self.clip else ""
        )
        batch += (f", {self.num_missing_samples} missing" if self.num_missing_samples else "") + (
            ", guard" if self.guard else ""
        )
        change = f" ({self.perturbation})" if self.perturbation else ""
        return (
            f"{self.number} of seed {self.seed}: {self.model} on {self.mesh}, {batch}: {strategies}{change}"
        )

    @property
    def num_samples(self) -> int:
        """The number of samples of a global batch."""
        splits = BatchSplit, RoundStrategy
        split = {strategy.axis for strategy in self.strategies if isinstance(strategy, splits)}
        serving = dict(map(_ranks_that_serve, self.strategies))  # these read no samples
        split |= {AXIS} if any(isinstance(each, StaleServer) for each in self.strategies) else set()
        readers = self.mesh.group_size(split)
        for axis in split & serving.keys():
            size = self.mesh.size(axis)
            readers = readers // size * max(1, size - serving[axis])
        return self.num_microbatches * self.micro_batch * readers + (self.perturbation == "one more sample")

    @property
    def num_steps(self) -> int:
        """The number of steps that are compared, or of rounds, with those in which the last average travels;
        with a loss guard, one more, which it must skip.
        """
        rounds = [each.sync_every for each in self.strategies if isinstance(each, RoundStrategy)]
        delays = [each.delay for each in self.strategies if isinstance(each, StreamingDiLoCo)]
        return NUM_STEPS * max(rounds, default=1) + max(delays, default=0) + self.guard

    @property
    def techniques(self) -> tuple[str, ...]:
        """The techniques that the plan combines: its strategies (ZeRO by stage, a pipeline by schedule), and
        the options of the job.
        """
        found = [name for strategy in self.strategies for name in _technique_names(strategy)]
        found += ["microbatches"] if self.num_microbatches > 1 else []
        found += ["clipping"] if self.clip else []
        found += ["dropout"] if MODELS[self.model].has_dropout else []
        found += ["whole-batch loss"] if MODELS[self.model].whole_batch else []
        found += ["loss guard"] if self.guard else []
        found += ["incomplete batch"] if self.num_missing_samples else []
        return tuple(dict.fromkeys(found))

    def plan(self) -> Plan:
        """Makes the plan. Raises PlanError if it is refused."""
        model = MODELS[self.model]
        job = Job(
            ModelConfig(model.name),
            DataConfig("random", sequence=model.sequence_lengths[0]),
            TrainConfig(batch=self.num_samples, clip=self.clip),
            OptimizerConfig("sgd", lr=0.1, weight_decay=0.1, momentum=0.5),
            guard=GUARD if self.guard else LossGuard(),
        )
        return make_plan(analyzed_model(self.model), job, self.mesh, self.strategies, self.micro_batch)


def _ranks_that_serve(strategy: Strategy) -> tuple[str, int]:
    """Returns the axis along which ranks serve, and nothing else, and their number."""
    match strategy:
        case ParameterServer(dedicated=True):
            return strategy.axis, strategy.servers
        case StaleServer():
            return AXIS, strategy.servers
        case EmbeddingHost():
            return strategy.axis, strategy.hosts
    return "", 0


def _technique_names(strategy: Strategy) -> tuple[str, ...]:
    match strategy:
        case BatchSplit():
            return ()
        case ZeRO():
            return (f"zero {strategy.stage}", *(("zero replicate_axis",) if strategy.replicate_axis else ()))
        case Pipeline():
            return (strategy.schedule, *(("scatter",) if strategy.scatter else ()))
    return (f"{strategy.name} {strategy.mode}".strip(),)


def draw(seed: int, number: int, model_name: str = "") -> Draw:
    """Returns the random plan `number` of `seed`; with `model_name`, of this model or what is put in place of
    it.
    """
    rng = Random(f"{seed}/{number}")
    while True:
        of_any = [each for each in MODELS.values() if each.is_drawn]
        model = rng.choice([MODELS[model_name]] if model_name else of_any)
        tensor_parallel = rng.choices(
            ("", "tensor_parallel 1d", *MULTI_DIM_TENSOR_PARALLEL),
            (3, 4, *((4, 3, 4) if model.square_mesh else (0, 0, 0))),
        )[0]
        sizes = _sizes(rng, model, tensor_parallel)
        mesh = Mesh(**sizes)
        if (
            1 < mesh.world_size <= MAX_RANKS and rng.random() < FULL_RATE_RANKS / mesh.world_size
        ):  # large meshes are drawn less often, because they take longer
            break
    strategies, num_microbatches = draw_strategies(rng, model, tensor_parallel, sizes)
    rng.shuffle(strategies)
    micro_batch, clip = rng.choice((1, 1, 2)), rng.choice((0.0, 0.5, 0.5))
    has_master = any(
        isinstance(strategy, DataParallelMaster) for strategy in strategies
    )  # then no other rank has a loss that a guard could check
    guard = rng.random() < 0.2 and not has_master
    drawn = Draw(
        seed, number, model.name, mesh, tuple(strategies), num_microbatches, micro_batch, clip, guard=guard
    )
    if model.name in WHOLE_BATCH and Random(f"{seed}/{number}/loss").random() < 0.5:
        drawn = _with_whole_batch_loss(drawn)
    elif model.name == "llama" and Random(f"{seed}/{number}/experts").random() < 0.7:
        drawn = _with_experts(Random(f"{seed}/{number}/ep"), drawn)
    elif model.name.startswith("t5") and Random(f"{seed}/{number}/gist").random() < 0.3:
        drawn = replace(drawn, strategies=(*drawn.strategies, Gist()))  # T5 has ReLU
    elif Random(f"{seed}/{number}/norm").random() < 0.4:
        drawn = _with_batch_norms(drawn)
    drawn = replace(drawn, strategies=with_offloads(f"{seed}/{number}", drawn.strategies))
    hpz = with_hpz(Random(f"{seed}/{number}/hpz"), drawn.mesh, drawn.strategies)
    server = with_servers(Random(f"{seed}/{number}/server"), drawn.mesh, hpz)
    drawn = replace(drawn, strategies=server)
    if rng.random() < 0.25 and drawn.num_samples > 1:
        drawn = replace(drawn, num_missing_samples=rng.randint(1, drawn.num_samples - 1))
    return _perturbed(rng, drawn) if rng.randrange(PERTURBED_ONE_IN) == 0 else drawn


def _with_whole_batch_loss(drawn: Draw) -> Draw:
    """Returns `drawn` with a loss of the whole batch, unless its schedule needs several microbatches."""
    if any(isinstance(each, Pipeline) and each.schedule == "dualpipe" for each in drawn.strategies):
        return drawn
    return replace(drawn, model=WHOLE_BATCH[drawn.model], num_microbatches=1, guard=False)


def _with_experts(rng: Random, drawn: Draw) -> Draw:
    """Returns `drawn` with a mixture of experts, and these distributed, if its strategies allow it."""
    found = with_experts(rng, drawn.mesh, drawn.strategies, MAX_RANKS)
    if found is None or drawn.guard:
        return drawn
    fold = Random(f"{drawn.seed}/{drawn.number}/fold")
    mesh, strategies = over_other_axes(fold, *found) if fold.random() < 0.5 else found
    drawn = replace(drawn, mesh=mesh, strategies=strategies)
    if rng.random() < 0.3:
        return replace(drawn, model="mixture, biases", strategies=(*strategies, LossFreeBalancing()))
    return replace(drawn, model="mixture")


def _with_batch_norms(drawn: Draw) -> Draw:
    """Returns `drawn` with a model with batch norms, if its ranks differ by their samples alone."""
    if drawn.mesh.group_size(DATA_AXES) < drawn.mesh.world_size or not all(
        isinstance(each, BESIDE_BATCH_NORMS) for each in drawn.strategies
    ):
        return drawn
    strategies = (SyncBatchNorm(), *drawn.strategies)
    return replace(drawn, model="batch norms", strategies=strategies, num_microbatches=1)


def _sizes(rng: Random, model: RandomModel, tensor_parallel: str) -> Sizes:
    """Draws the number of ranks along each axis; about two of three axes have one rank, unless a technique
    needs more.
    """
    sizes = {axis: rng.choices(*SIZES[axis])[0] for axis in ("pp", *DATA_AXES)}
    sizes["pp"] = min(sizes["pp"], model.max_stages)
    if model.num_heads and tensor_parallel in ("", "tensor_parallel 1d"):
        sizes["cp"] = rng.choices(*SIZES["cp"])[0]
    if tensor_parallel == "tensor_parallel 1d":
        sizes["tp"] = min(rng.choices(*SIZES["tp"])[0], model.max_tp)
    elif tensor_parallel:
        side = rng.choice((2, 2, 3)) if tensor_parallel == "tensor_parallel 2d" else 2
        sizes |= {"dp_shard": side, "tp": side}
        sizes |= {"tp_depth": side} if tensor_parallel == "tensor_parallel 3d" else {}
        sizes |= {"dp_replicate": rng.choice((2, 3))} if tensor_parallel == "tensor_parallel 2.5d" else {}
    return sizes


def _perturbed(rng: Random, drawn: Draw) -> Draw:
    """Returns `drawn` with one mistake that a user might make."""
    strategies = drawn.strategies
    sharding = (
        TensorParallel(),
        SequenceParallel(),
        VocabParallel(),
        TensorParallel2D(),
        TensorParallel3D(),
        RingAttention(),
        Ulysses(),
    )
    more = (
        *sharding,
        DDP(),
        NaiveDDP(),
        ZeRO(),
        DataParallelMaster(),
        Pipeline(),
        ActivationCheckpointing(),
        ChunkedLoss(),
    )
    match rng.choice(
        (
            "one strategy less",
            "one strategy more",
            "one strategy more",
            "another axis size",
            "one more sample",
        )
    ):
        case "one strategy less" if strategies:
            left = rng.choice(strategies)
            return replace(
                drawn,
                strategies=tuple(s for s in strategies if s is not left),
                perturbation=f"without {left.name}",
            )
        case "another axis size":
            axis = rng.choice(SITE_AXES)
            sizes = {each: drawn.mesh.size(each) for each in SITE_AXES}
            mesh = Mesh(**{**sizes, axis: sizes[axis] % 3 + 1})
            return (
                replace(drawn, mesh=mesh, perturbation=f"another size of {axis}")
                if mesh.world_size <= MAX_RANKS
                else drawn
            )
        case "one more sample" if drawn.num_samples > 1:
            return replace(drawn, perturbation="one more sample")
    added = rng.choice(
        [each for each in more if type(each) not in {type(strategy) for strategy in strategies}]
    )
    return replace(drawn, strategies=(*strategies, added), perturbation=f"with {added.name}")
