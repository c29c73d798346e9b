"""Plans by chance: a model, a mesh of up to 24 ranks, and any techniques on it, each with options of its own.

A plan follows from a seed and a number alone, so that one can be drawn again by itself. What is plainly
impossible is not drawn (more parts than a model has, tokens in slices that they do not divide into, a square
with unlike sides): else most of what is drawn would be refused, and for a few reasons. One in `SPOILT` is
spoilt on purpose, by leaving out a technique, adding one, or by another size of an axis or of the batch: such
a plan may be refused, with a repair, or it works all the same.

Of some the last batch is `missing` rows, as an epoch's may be, and some have a guard, whose last step does
harm.

`DEALT` are the strategies that deal out the tokens of a sample along cp: each makes itself from a generator
and the ranks there, and says whether it exchanges heads, which must then divide.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType
from typing import Literal

from benchmarks.random_plans.random_models import KNOWN, Known, reading_of
from meshwright.api import make_plan
from meshwright.parallel.context.hybrid import HybridContextParallel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.chunked_loss import ChunkedLoss
from meshwright.parallel.memory.tiled_mlp import TiledMLP
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.parallel.tensor.cube_3d import TensorParallel3D
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.tesseract_25d import TensorParallel25D
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.job.data_source import DataConfig, ModelConfig
from meshwright.plan.job.job import Job, LossGuard, OptimizerConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.plan.strategy import Strategy

MOST_RANKS, CHEAP_RANKS, STEPS, SPOILT = 24, 5, 2, 8
WATCHED = LossGuard("skip", window=STEPS)  # judges the step behind STEPS
DATA_AXES = ("dp_replicate", "dp_shard")
SIZES = {  # how many ranks, and how often
    "pp": ((1, 2, 3, 4), (7, 5, 3, 1)),
    "dp_replicate": ((1, 2, 3), (7, 4, 1)),
    "dp_shard": ((1, 2, 3), (6, 4, 1)),
    "cp": ((1, 2, 3, 4), (6, 4, 3, 1)),
    "tp": ((2, 3, 4, 6), (6, 3, 1, 1)),
}
ALGORITHMS = ("backend", "backend", "ring", "tree", "root", "naive", "parallel", "tree <= 1 KiB, else ring")
BALANCES: tuple[Literal["zigzag", "contiguous", "striped"], ...] = ("zigzag", "contiguous", "striped")
DEALT: tuple[tuple[Callable[[Random, int], Strategy], bool], ...] = (
    (lambda rng, ranks: RingAttention(load_balance=rng.choice(BALANCES)), False),
    (lambda rng, ranks: Ulysses(), True),
    (
        lambda rng, ranks: HybridContextParallel(
            ulysses_degree=2 if ranks % 2 == 0 else ranks, load_balance=rng.choice(BALANCES)
        ),
        True,
    ),
)
SQUARES: Mapping[str, Callable[[Random], Strategy]] = MappingProxyType(
    {
        "tensor_parallel 2d": lambda rng: TensorParallel2D(regather=rng.random() < 0.5),
        "tensor_parallel 2.5d": lambda rng: TensorParallel25D(regather=rng.random() < 0.5),
        "tensor_parallel 3d": lambda rng: TensorParallel3D(),
    }
)
TECHNIQUES: Mapping[str, str] = (
    MappingProxyType(  # what may meet in a plan: by the kind of which a plan has one
        {
            **{name: name for name in ("ddp", "naive_ddp", "data_parallel_master", "replicate_axis")},
            **dict.fromkeys(("zero 1", "zero 2", "zero 3"), "zero"),
            **{
                name: name
                for name in (
                    *("tensor_parallel 1d", "sequence_parallel", "vocab_parallel", *SQUARES),
                    *("ulysses", "ring", "hybrid_context_parallel"),
                )
            },
            **dict.fromkeys(SCHEDULES, "pipeline"),
            **{name: name for name in ("scatter", "activation_checkpointing", "microbatches", "clipping")},
            **{name: name for name in ("chunked_loss", "tiled_mlp", "dropout", "guard", "missing rows")},
        }
    )
)
Sizes = dict[str, int]


@dataclass(frozen=True)
class Draw:
    """One plan that was drawn: what is trained, on what mesh, with which strategies as a user might list
    them.
    """

    seed: int
    number: int
    model: str
    mesh: Mesh
    strategies: tuple[Strategy, ...]
    micros: int
    micro_batch: int
    clip: float
    spoilt: str = ""
    missing: int = 0
    guard: bool = False

    def __str__(self) -> str:
        said = "; ".join(map(str, self.strategies))
        batch = f"{self.micros} x {self.micro_batch} rows" + (f", clip {self.clip}" if self.clip else "")
        batch += (f", {self.missing} missing" if self.missing else "") + (", guard" if self.guard else "")
        spoilt = f" ({self.spoilt})" if self.spoilt else ""
        return f"{self.number} of seed {self.seed}: {self.model} on {self.mesh}, {batch}: {said}{spoilt}"

    @property
    def rows(self) -> int:
        """The samples of a global batch."""
        split = {strategy.axis for strategy in self.strategies if isinstance(strategy, BatchSplit)}
        return self.micros * self.micro_batch * self.mesh.group_size(split) + (self.spoilt == "one row more")

    @property
    def steps(self) -> int:
        """How many are compared; a guard judges the last one."""
        return STEPS + self.guard

    @property
    def techniques(self) -> tuple[str, ...]:
        """What meets in it: strategies (stages of ZeRO and schedules by themselves), and what the job asks of
        all of them.
        """
        found = [named for strategy in self.strategies for named in _names(strategy)]
        found += ["microbatches"] if self.micros > 1 else []
        found += ["clipping"] if self.clip else []
        found += ["dropout"] if KNOWN[self.model].random else []
        found += ["guard"] if self.guard else []
        found += ["missing rows"] if self.missing else []
        return tuple(dict.fromkeys(found))

    def plan(self) -> Plan:
        """The plan. Raises PlanError where it is refused."""
        known = KNOWN[self.model]
        job = Job(
            ModelConfig(known.name),
            DataConfig("random", sequence=known.tokens[0]),
            TrainConfig(batch=self.rows, clip=self.clip),
            OptimizerConfig("sgd", lr=0.1, weight_decay=0.1, momentum=0.5),
            guard=WATCHED if self.guard else LossGuard(),
        )
        return make_plan(reading_of(self.model), job, self.mesh, self.strategies, self.micro_batch)


def _names(strategy: Strategy) -> tuple[str, ...]:
    match strategy:
        case BatchSplit():
            return ()
        case ZeRO():
            return (f"zero {strategy.stage}", *(("replicate_axis",) if strategy.replicate_axis else ()))
        case Pipeline():
            return (strategy.schedule, *(("scatter",) if strategy.scatter else ()))
    return (f"{strategy.name} {strategy.mode}".strip(),)


def draw(seed: int, number: int) -> Draw:
    """The plan of that number under `seed`."""
    rng = Random(f"{seed}/{number}")
    while True:
        known = rng.choice(tuple(KNOWN.values()))
        matrices = rng.choices(
            ("", "tensor_parallel 1d", *SQUARES), (3, 4, *((4, 3, 4) if known.even else (0, 0, 0)))
        )[0]
        sizes = _sizes(rng, known, matrices)
        mesh = Mesh(**sizes)
        if (
            1 < mesh.world_size <= MOST_RANKS and rng.random() < CHEAP_RANKS / mesh.world_size
        ):  # of large ones fewer: they take longer
            break
    strategies, micros = _strategies(rng, known, matrices, sizes)
    rng.shuffle(strategies)
    micro_batch, clip = rng.choice((1, 1, 2)), rng.choice((0.0, 0.5, 0.5))
    led = any(
        isinstance(strategy, DataParallelMaster) for strategy in strategies
    )  # then no other rank has a loss that a guard could look at
    guard = rng.random() < 0.2 and not led
    drawn = Draw(seed, number, known.name, mesh, tuple(strategies), micros, micro_batch, clip, guard=guard)
    if rng.random() < 0.25 and drawn.rows > 1:
        drawn = replace(drawn, missing=rng.randint(1, drawn.rows - 1))
    return _spoilt(rng, drawn) if rng.randrange(SPOILT) == 0 else drawn


def _sizes(rng: Random, known: Known, matrices: str) -> Sizes:
    """How many ranks there are along each axis; two of three have one rank where nothing asks for more."""
    sizes = {axis: rng.choices(*SIZES[axis])[0] for axis in ("pp", *DATA_AXES)}
    sizes["pp"] = min(sizes["pp"], known.parts)
    if known.heads and matrices in ("", "tensor_parallel 1d"):
        sizes["cp"] = rng.choices(*SIZES["cp"])[0]
    if matrices == "tensor_parallel 1d":
        sizes["tp"] = min(rng.choices(*SIZES["tp"])[0], known.ranks)
    elif matrices:
        side = rng.choice((2, 2, 3)) if matrices == "tensor_parallel 2d" else 2
        sizes |= {"dp_shard": side, "tp": side}
        sizes |= {"tp_depth": side} if matrices == "tensor_parallel 3d" else {}
        sizes |= {"dp_replicate": rng.choice((2, 3))} if matrices == "tensor_parallel 2.5d" else {}
    return sizes


def _strategies(rng: Random, known: Known, matrices: str, sizes: Sizes) -> tuple[list[Strategy], int]:
    """The strategies for a mesh of these sizes, and how many microbatches they are given."""
    found: list[Strategy] = [BatchSplit(axis) for axis in DATA_AXES if sizes[axis] > 1]
    micros = rng.choice((1, 1, 2, 3))
    if sizes["pp"] > 1:
        pipeline, micros = _pipeline(rng, known, sizes["pp"])
        found.append(pipeline)
    if sizes.get("cp", 1) > 1:
        whole = known.heads % (sizes["cp"] * sizes.get("tp", 1)) == 0
        make, _ = rng.choice([each for each in DEALT if whole or not each[1]])
        found.append(make(rng, sizes["cp"]))
    if matrices == "tensor_parallel 1d":
        found += _line(rng, known, sizes["tp"], sizes.get("cp", 1))
        alike = not any(isinstance(strategy, SequenceParallel) for strategy in found)
        found = [
            replace(s, scatter=rng.random() < 0.3) if isinstance(s, Pipeline) and alike else s for s in found
        ]
    elif matrices:
        found.append(SQUARES[matrices](rng))
        found += [VocabParallel()] if matrices != "tensor_parallel 3d" and rng.random() < 0.4 else []
    found += _store(rng, matrices, sizes)
    if rng.random() < 0.35:
        found.append(ActivationCheckpointing(keep_mb=rng.choice((0.0, 0.0, 0.01, 0.1))))
    if matrices in ("", "tensor_parallel 1d") and known.words and rng.random() < 0.3:
        found += _tiles(rng, known, matrices)
    if any(isinstance(strategy, DataParallelMaster) for strategy in found):
        micros = 1
    return found, micros


def _line(rng: Random, known: Known, ranks: int, dealt: int) -> list[Strategy]:
    """Divided matrices, and what goes with them; slices of tokens where what each of the ranks along cp has
    divides too.
    """
    least = ranks if dealt == 1 else 2 * ranks * dealt
    found: list[Strategy] = [TensorParallel(num_overlap_chunks=rng.choice((1, 1, 2, 3)))]
    if all(tokens % least == 0 for tokens in known.tokens) and rng.random() < 0.6:
        found.append(SequenceParallel(regather=rng.random() < 0.5))
    if known.words and rng.random() < 0.5:
        found.append(VocabParallel())
    return found


def _tiles(rng: Random, known: Known, matrices: str) -> list[Strategy]:
    """A chunked loss, or tiled MLPs that are not sharded and have no dropout, or both."""
    mlp = rng.choice((1, 2, 3)) if not matrices and not known.random else 1
    chunks = rng.choice((1, 2, 8)) if mlp > 1 else rng.choice((2, 3, 8))
    found: list[Strategy] = [ChunkedLoss(chunks)] if chunks > 1 else []
    return [*found, TiledMLP(mlp)] if mlp > 1 else found


def _pipeline(rng: Random, known: Known, ranks: int) -> tuple[Strategy, int]:
    """A pipeline of so many ranks whose parts the model has, and microbatches that its schedule takes."""
    most = known.parts // ranks
    fitting = [name for name, schedule in SCHEDULES.items() if max(1, schedule.num_virtual_stages) <= most]
    schedule = rng.choice([name for name in fitting if not list(SCHEDULES[name].check(ranks, 1))])
    chunks = 0 if SCHEDULES[schedule].num_virtual_stages else rng.randint(1, most)
    least = 2 if schedule == "dualpipe" else 1  # half of them from either end
    return Pipeline(schedule=schedule, virtual_stages=chunks), rng.randint(least, ranks + 3)


def _store(rng: Random, matrices: str, sizes: Sizes) -> list[Strategy]:
    """Who keeps which weights, where several ranks have other samples or tokens."""
    axes = [axis for axis in (*DATA_AXES, "cp") if sizes.get(axis, 1) > 1]
    split = [axis for axis in axes if axis in DATA_AXES]
    if not axes:
        return []
    if matrices in SQUARES:
        return [_zero(rng, "dp_shard", "dp_replicate" if "dp_replicate" in axes else "", 3)]
    if len(split) == 2:
        axis, across = rng.sample(split, 2)
        return [_zero(rng, axis, across, rng.choice((1, 2, 3, 3)))]
    axis = split[0] if split else axes[0]
    alone = axis in split and all(size == 1 for each, size in sizes.items() if each != axis)
    kinds = ("replicate", "replicate", "naive", "zero", "zero", "zero", *(("master",) if alone else ()))
    match rng.choice(kinds):
        case "replicate":
            return [DDP(axis, rng.choice((25.0, 0.01, 0.001)), rng.choice(ALGORITHMS))]
        case "naive":
            return [NaiveDDP(axis, rng.choice(ALGORITHMS))]
        case "master":
            return [DataParallelMaster(axis)]
    return [_zero(rng, axis, "", rng.choice((1, 2, 3, 3)))]


def _zero(rng: Random, axis: str, across: str, stage: int) -> Strategy:
    made = ZeRO(axis, stage, across)
    if stage < 3:
        return made
    return replace(
        made,
        gather=rng.choice(("use", "microbatch", "step")),
        keep_mb=rng.choice((0.0, 0.01)),
        prefetch=rng.choice((0, 1, 3)),
    )


def _spoilt(rng: Random, drawn: Draw) -> Draw:
    """`drawn` with something that a user might get wrong."""
    listed = drawn.strategies
    shards = (
        TensorParallel(),
        SequenceParallel(),
        VocabParallel(),
        TensorParallel2D(),
        TensorParallel3D(),
        RingAttention(),
        Ulysses(),
    )
    more = (
        *shards,
        DDP(),
        NaiveDDP(),
        ZeRO(),
        DataParallelMaster(),
        Pipeline(),
        ActivationCheckpointing(),
        ChunkedLoss(),
    )
    match rng.choice(("one less", "one more", "one more", "another size", "one row more")):
        case "one less" if listed:
            left = rng.choice(listed)
            return replace(
                drawn, strategies=tuple(s for s in listed if s is not left), spoilt=f"without {left.name}"
            )
        case "another size":
            axis = rng.choice(AXES)
            sizes = {each: drawn.mesh.size(each) for each in AXES}
            mesh = Mesh(**{**sizes, axis: sizes[axis] % 3 + 1})
            return (
                replace(drawn, mesh=mesh, spoilt=f"another size of {axis}")
                if mesh.world_size <= MOST_RANKS
                else drawn
            )
        case "one row more" if drawn.rows > 1:
            return replace(drawn, spoilt="one row more")
    added = rng.choice([each for each in more if type(each) not in {type(strategy) for strategy in listed}])
    return replace(drawn, strategies=(*listed, added), spoilt=f"with {added.name}")
