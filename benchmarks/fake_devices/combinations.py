"""The combinations that `fake_cuda` runs: layouts of small models, each in several precisions; optimizers;
and families of transformers.

A layout is a small model, a mesh and strategies. The last rank is run, and of a pipeline under autocast the
first one and one in the middle too: the first stage, an inner one and the last.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType

import transformers

from benchmarks.fake_devices.families import FAMILIES, analyzed_family
from benchmarks.random_plans import random_models
from benchmarks.random_plans.random_models import MODELS
from benchmarks.tensor_parallel.tensor_families import analyzed_model as two_layers
from meshwright.api import default_strategies, make_plan
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.parallel.data.sync_batch_norm import SyncBatchNorm
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.expert.expert_parallel import ExpertParallel
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.memory.gist import Gist
from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.parallel.memory.tiled_mlp import TiledMLP
from meshwright.parallel.pipeline.pipedream import PipeDream
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.parallel.tensor.cube_3d import TensorParallel3D
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.tesseract_25d import TensorParallel25D
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.job import (
    Job,
    LossGuard,
    OptimizerConfig,
    OptimizerName,
    PrecisionConfig,
    TrainConfig,
)
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

PRECISIONS = MappingProxyType(
    {
        "float32": PrecisionConfig(),
        "bfloat16 autocast": PrecisionConfig(compute="bfloat16"),
        "bfloat16, master": PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32"),
        "float16, loss scale": PrecisionConfig(compute="float16"),
    }
)
OPTIMIZERS: tuple[OptimizerName, ...] = (
    "sgd",
    "adamw_bf16",
    "adamw_8bit",
    "lion",
    "lion_bf16",
    "adafactor",
    "muon",
)
WITH_LOSS_SCALE = (
    *("one device", "ddp", "ddp, loss guard", "zero 1", "zero 3", "hsdp 3", "checkpointing", "chunked loss"),
    *("tp", "tp 2d", "ring, zigzag", "ulysses", "pipeline 1f1b", "pipeline zb_h1", "pipeline, tp, ddp"),
)
Strategies = tuple[Strategy, ...]
FOUR = "llama, even"  # four layers: a stage has at least one
REPLICAS, SHARDS = BatchSplit(), BatchSplit("dp_shard")


@dataclass(frozen=True)
class Layout:
    """A model by its name, a mesh and strategies; two microbatches of one sample on each rank. Without
    strategies (None), those by default.
    """

    mesh: Mesh
    strategies: Strategies | None = ()
    model: str = "llama, 2 layers"
    train: TrainConfig = field(default_factory=lambda: TrainConfig(clip=0.5))
    guard: LossGuard = field(default_factory=LossGuard)
    num_microbatches: int = 2


@dataclass(frozen=True)
class Combination:
    """A layout in a precision, stepped by an optimizer."""

    layout: Layout
    precision: PrecisionConfig
    optimizer: OptimizerName = "adamw"

    @property
    def analyzed(self) -> AnalyzedModel:
        """The analysis of the model."""
        name = self.layout.model
        if name in MODELS:
            return random_models.analyzed_model(name)
        return two_layers("llama", even=True) if name == "llama, 2 layers" else analyzed_family(name)

    def plan(self) -> Plan:
        """Returns the plan, for a job of one global batch per step."""
        layout, mesh, strategies = self.layout, self.layout.mesh, self.layout.strategies
        if strategies is None:
            strategies = default_strategies(mesh, self.analyzed.model_spec)
        split = {each.axis for each in strategies if isinstance(each, BatchSplit)}
        train = replace(layout.train, batch=layout.num_microbatches * mesh.group_size(split))
        optimizer = OptimizerConfig(
            self.optimizer, momentum=0.9 if self.optimizer in ("sgd", "muon") else 0.0
        )
        job = Job(train=train, optimizer=optimizer, precision=self.precision, guard=layout.guard)
        return make_plan(self.analyzed, job, mesh, strategies, 1)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The last rank; of a pipeline under autocast also the first one, and one in the middle."""
        last = self.layout.mesh.world_size - 1
        has_inner = self.layout.mesh.pp > 1 and self.precision == PRECISIONS["bfloat16 autocast"]
        return tuple(sorted({0, (last + 1) // 2, last})) if has_inner else (last,)


def _data_parallel() -> Iterator[tuple[str, Layout]]:
    three, shards = Mesh(dp_replicate=3), Mesh(dp_shard=3)
    yield "one device", Layout(Mesh())
    yield "ddp", Layout(three, (REPLICAS, DDP()))
    yield "ddp, small buckets, tree", Layout(three, (REPLICAS, DDP(bucket_mb=0.01, algorithm="tree")))
    yield "ddp, ring", Layout(three, (REPLICAS, DDP(algorithm="ring")))
    yield "naive ddp", Layout(three, (REPLICAS, NaiveDDP()))
    yield "data parallel master", Layout(three, (REPLICAS, DataParallelMaster()), num_microbatches=1)
    yield "ddp, noise scale", Layout(three, (REPLICAS, DDP()), train=TrainConfig(clip=0.5, noise_scale=True))
    yield "ddp, loss guard", Layout(three, (REPLICAS, DDP()), guard=LossGuard("skip", window=2))
    yield "ddp, dropout", Layout(three, (REPLICAS, DDP()), "gpt2, dropout")
    yield "ddp, no clipping", Layout(three, (REPLICAS, DDP()), train=TrainConfig(clip=0.0))
    batch_norms = (REPLICAS, DDP(), SyncBatchNorm())
    yield "ddp, batch norms", Layout(three, batch_norms, "batch norms", num_microbatches=1)
    for stage in (1, 2, 3):
        yield f"zero {stage}", Layout(shards, (SHARDS, ZeRO(stage=stage)))
        hsdp = (REPLICAS, SHARDS, ZeRO(stage=stage, replicate_axis="dp_replicate"))
        yield f"hsdp {stage}", Layout(Mesh(dp_replicate=2, dp_shard=2), hsdp)
    for gather in ("microbatch", "step"):
        yield f"zero 3, gather {gather}", Layout(shards, (SHARDS, ZeRO(gather=gather)))
    yield "zero 3, keep, prefetch 3", Layout(shards, (SHARDS, ZeRO(keep_mb=0.01, prefetch=3)))
    yield "zero 3, loss guard", Layout(shards, (SHARDS, ZeRO()), guard=LossGuard("skip", window=2))
    yield "zero 3, noise scale", Layout(shards, (SHARDS, ZeRO()), train=TrainConfig(noise_scale=True))


def _pipelines() -> Iterator[tuple[str, Layout]]:
    for name, schedule in SCHEDULES.items():
        ranks = (
            2 if schedule.num_virtual_stages == 2 or name in ("interleaved", "dualpipe", "automatic") else 3
        )
        yield f"pipeline {name}", Layout(Mesh(pp=ranks), (Pipeline(schedule=name),), FOUR, num_microbatches=4)
    no_clipping = TrainConfig(clip=0.0)
    yield "pipedream", Layout(Mesh(pp=3), (PipeDream(),), FOUR, train=no_clipping, num_microbatches=4)
    one_f_one_b = Pipeline()
    yield "pipeline, t5", Layout(Mesh(pp=3), (one_f_one_b,), "t5")
    yield "pipeline, two inputs", Layout(Mesh(pp=2), (one_f_one_b,), "two inputs")
    yield "pipeline, dropout", Layout(Mesh(pp=3), (one_f_one_b,), "gpt2, dropout")
    yield "pipeline, loss guard", Layout(Mesh(pp=3), (one_f_one_b,), FOUR, guard=LossGuard("skip", window=2))
    yield "pipeline, checkpointing", Layout(Mesh(pp=3), (one_f_one_b, ActivationCheckpointing()), FOUR)


def _tensor_parallel() -> Iterator[tuple[str, Layout]]:
    two, square, zero = Mesh(tp=2), Mesh(dp_shard=2, tp=2), (SHARDS, ZeRO())
    tensor = TensorParallel()
    yield "tp", Layout(two, (tensor,))
    yield "tp 3, odd sizes", Layout(Mesh(tp=3), (tensor,), "llama")
    yield "tp, overlap", Layout(two, (TensorParallel(num_overlap_chunks=2),))
    yield "tp, vocab", Layout(two, (tensor, VocabParallel()))
    yield "tp, sequence", Layout(two, (tensor, SequenceParallel()))
    yield (
        "tp, sequence, regather, vocab",
        Layout(two, (tensor, SequenceParallel(regather=True), VocabParallel())),
    )
    yield "tp, chunked loss", Layout(two, (tensor, VocabParallel(), ChunkedLoss(3)))
    yield "tp, t5", Layout(two, (tensor,), "t5")
    yield "tp, dropout", Layout(two, (tensor,), "gpt2, dropout")
    yield "tp 2d", Layout(square, (*zero, TensorParallel2D()))
    yield "tp 2d, vocab", Layout(square, (*zero, TensorParallel2D(regather=False), VocabParallel()))
    depth = (REPLICAS, SHARDS, ZeRO(replicate_axis="dp_replicate"), TensorParallel25D())
    yield "tp 2.5d", Layout(Mesh(dp_replicate=2, dp_shard=2, tp=2), depth)
    yield "tp 3d", Layout(Mesh(dp_shard=2, tp_depth=2, tp=2), (*zero, TensorParallel3D()))


def _context_parallel() -> Iterator[tuple[str, Layout]]:
    three, over_tokens = Mesh(cp=3), DDP("cp")
    for balance in ("zigzag", "striped"):
        yield f"ring, {balance}", Layout(three, (RingAttention(load_balance=balance), over_tokens))
    biased = RingAttention(load_balance="contiguous")
    yield "ring, contiguous", Layout(three, (biased, over_tokens), "t5")  # learned biases
    yield "ulysses", Layout(Mesh(cp=2), (Ulysses(), over_tokens), "llama")  # 3 key heads
    yield (
        "hybrid context parallel",
        Layout(Mesh(cp=4), (HybridContextParallel(ulysses_degree=2), over_tokens)),
    )
    yield "ring, zero 3 along cp", Layout(three, (RingAttention(), ZeRO("cp")))
    yield "ring, tp", Layout(Mesh(cp=2, tp=2), (RingAttention(), over_tokens, TensorParallel()))
    yield "ulysses, dropout", Layout(Mesh(cp=2), (Ulysses(), over_tokens), "gpt2, dropout")


def _memory() -> Iterator[tuple[str, Layout]]:
    yield "checkpointing", Layout(Mesh(), (ActivationCheckpointing(),))
    yield "memory budget", Layout(Mesh(), (MemoryBudget(),))
    yield "chunked loss", Layout(Mesh(), (ChunkedLoss(3),))
    yield "gist", Layout(Mesh(), (Gist(backward_dtype="bfloat16"),))
    yield "tiled mlp", Layout(Mesh(), (TiledMLP(2), ChunkedLoss(2)))
    sharded = (SHARDS, ZeRO(), ActivationCheckpointing())
    yield "zero 3, checkpointing", Layout(Mesh(dp_shard=3), sharded)
    yield "zero 3, checkpointing, dropout", Layout(Mesh(dp_shard=3), sharded, "gpt2, dropout")


def _together() -> Iterator[tuple[str, Layout]]:
    tensor, pipeline = TensorParallel(), Pipeline()
    yield "tp, ddp", Layout(Mesh(dp_replicate=3, tp=2), (REPLICAS, DDP(), tensor))
    yield "tp, zero 3", Layout(Mesh(dp_shard=3, tp=2), (SHARDS, ZeRO(), tensor, VocabParallel()))
    yield "pipeline, ddp", Layout(Mesh(pp=3, dp_replicate=2), (pipeline, REPLICAS, DDP()), FOUR)
    yield "pipeline, zero 3", Layout(Mesh(pp=2, dp_shard=3), (pipeline, SHARDS, ZeRO()), FOUR)
    scattered = (Pipeline(scatter=True), tensor, VocabParallel())
    yield "pipeline, tp, scatter", Layout(Mesh(pp=3, tp=2), scattered, FOUR)
    cube = (Pipeline(schedule="interleaved"), REPLICAS, DDP(), tensor, SequenceParallel())
    yield "pipeline, tp, ddp", Layout(Mesh(pp=2, dp_replicate=2, tp=2), cube, FOUR)
    hybrid = (pipeline, SHARDS, ZeRO(), RingAttention())
    yield "pipeline, ring, zero 3", Layout(Mesh(pp=2, dp_shard=2, cp=2), hybrid, FOUR)
    every = (Pipeline(schedule="zb_h1"), SHARDS, ZeRO(stage=1), RingAttention(), tensor)
    yield "pipeline, ring, tp, zero 1", Layout(Mesh(pp=2, dp_shard=2, cp=2, tp=2), every, FOUR)
    replicated = (REPLICAS, SHARDS, ZeRO(replicate_axis="dp_replicate"), RingAttention())
    yield "ring, hsdp", Layout(Mesh(dp_replicate=2, dp_shard=2, cp=2), replicated)
    experts, squares = (ExpertParallel(), BatchSplit("ep"), SHARDS), Mesh(dp_shard=2, ep=2)
    yield "experts, ddp", Layout(squares, (*experts, DDP("dp_shard")), "mixtral")
    yield "experts, zero 3", Layout(squares, (*experts, ZeRO()), "mixtral")


def layouts() -> dict[str, Layout]:
    """Returns the layouts by name."""
    parts = (_data_parallel, _pipelines, _tensor_parallel, _context_parallel, _memory, _together)
    return dict(row for part in parts for row in part())


def _optimizer_layouts(found: Mapping[str, Layout]) -> Iterator[tuple[str, Layout]]:
    names = ("one device", "zero 1", "zero 3", "tp, zero 3", "pipeline 1f1b")
    yield from ((name, found[name]) for name in names)


def _family_combinations() -> Iterator[tuple[str, Combination]]:
    for family in FAMILIES:
        for mesh in (Mesh(), Mesh(dp_shard=3), Mesh(tp=2), Mesh(pp=2)):
            combination = Combination(Layout(mesh, None, family), PRECISIONS["bfloat16 autocast"])
            yield f"{family}, {mesh}, bfloat16 autocast", combination
        yield f"{family}, float32", Combination(Layout(Mesh(), None, family), PRECISIONS["float32"])


@cache
def combinations() -> Mapping[str, Combination]:
    """Returns all combinations by name."""
    transformers.utils.logging.set_verbosity_error()
    found = {
        f"{name}, {precision}": Combination(layout, config)
        for name, layout in layouts().items()
        for precision, config in PRECISIONS.items()
        if (name in WITH_LOSS_SCALE or not config.scales_loss)
        and not (layout.model == "batch norms" and config.parameters == "bfloat16")  # it takes float32 images
    }
    for name, layout in _optimizer_layouts(layouts()):
        for optimizer in OPTIMIZERS:
            combination = Combination(layout, PRECISIONS["bfloat16 autocast"], optimizer)
            found[f"{name}, {optimizer}"] = combination
    return MappingProxyType(found | dict(_family_combinations()))
