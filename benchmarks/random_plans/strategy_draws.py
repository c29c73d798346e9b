"""Draws the strategies of a random plan for a mesh: any that go with the model, each with random options.

`CONTEXT_PARALLEL` lists the strategies that shard the tokens of a sample along cp. Each entry makes a
strategy from a random generator and the number of cp ranks, and tells whether the strategy exchanges heads:
then the number of heads must be divisible.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from types import MappingProxyType
from typing import Literal

from benchmarks.random_plans.random_models import RandomModel
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
from meshwright.parallel.memory.memory_budget import MemoryBudget
from meshwright.parallel.memory.tiled_mlp import TiledMLP
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.parallel.server.parameter_server import ParameterServer
from meshwright.parallel.tensor.cube_3d import TensorParallel3D
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.optimus_2d import TensorParallel2D
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.parallel.tensor.tesseract_25d import TensorParallel25D
from meshwright.parallel.tensor.vocab_parallel import VocabParallel
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

DATA_AXES = ("dp_replicate", "dp_shard")
Sizes = dict[str, int]
ALGORITHMS = (
    "backend",
    "backend",
    "ring",
    "tree",
    "reduce_broadcast",
    "naive",
    "one_shot",
    "tree <= 1 KiB, else ring",
)
BALANCES: tuple[Literal["zigzag", "contiguous", "striped"], ...] = ("zigzag", "contiguous", "striped")
CONTEXT_PARALLEL: tuple[tuple[Callable[[Random, int], Strategy], bool], ...] = (
    (lambda rng, ranks: RingAttention(load_balance=rng.choice(BALANCES)), False),
    (lambda rng, ranks: Ulysses(), True),
    (
        lambda rng, ranks: HybridContextParallel(
            ulysses_degree=2 if ranks % 2 == 0 else ranks, load_balance=rng.choice(BALANCES)
        ),
        True,
    ),
)
MULTI_DIM_TENSOR_PARALLEL: Mapping[str, Callable[[Random], Strategy]] = MappingProxyType(
    {
        "tensor_parallel 2d": lambda rng: TensorParallel2D(regather=rng.random() < 0.5),
        "tensor_parallel 2.5d": lambda rng: TensorParallel25D(regather=rng.random() < 0.5),
        "tensor_parallel 3d": lambda rng: TensorParallel3D(),
    }
)


def draw_strategies(
    rng: Random, model: RandomModel, tensor_parallel: str, sizes: Sizes
) -> tuple[list[Strategy], int]:
    """Draws the strategies for a mesh of these sizes, and the number of microbatches."""
    found: list[Strategy] = [BatchSplit(axis) for axis in DATA_AXES if sizes[axis] > 1]
    num_microbatches = rng.choice((1, 1, 2, 3))
    if sizes["pp"] > 1:
        pipeline, num_microbatches = _pipeline(rng, model, sizes["pp"])
        found.append(pipeline)
    if sizes.get("cp", 1) > 1:
        divisible = model.num_heads % (sizes["cp"] * sizes.get("tp", 1)) == 0
        make, _ = rng.choice([each for each in CONTEXT_PARALLEL if divisible or not each[1]])
        found.append(make(rng, sizes["cp"]))
    if tensor_parallel == "tensor_parallel 1d":
        found += _tensor_parallel(rng, model, sizes["tp"], sizes.get("cp", 1))
        replicated = not any(isinstance(strategy, SequenceParallel) for strategy in found)
        found = [
            replace(s, scatter=rng.random() < 0.3) if isinstance(s, Pipeline) and replicated else s
            for s in found
        ]
    elif tensor_parallel:
        found.append(MULTI_DIM_TENSOR_PARALLEL[tensor_parallel](rng))
        found += [VocabParallel()] if tensor_parallel != "tensor_parallel 3d" and rng.random() < 0.4 else []
    found += _data_parallel(rng, tensor_parallel, sizes)
    if rng.random() < 0.35:
        found.append(rng.choice(2 * (ActivationCheckpointing(), MemoryBudget())))
    if tensor_parallel in ("", "tensor_parallel 1d") and model.vocab_parallel and rng.random() < 0.3:
        found += _chunking(rng, model, tensor_parallel)
    if any(isinstance(strategy, DataParallelMaster) for strategy in found):
        num_microbatches = 1
    return found, num_microbatches


def _tensor_parallel(rng: Random, model: RandomModel, ranks: int, cp: int) -> list[Strategy]:
    """Draws 1-D tensor parallelism with or without sequence and vocabulary parallelism; sequence parallelism
    only if it divides the tokens of each of the `cp` ranks.
    """
    least = ranks if cp == 1 else 2 * ranks * cp
    found: list[Strategy] = [TensorParallel(num_overlap_chunks=rng.choice((1, 1, 2, 3)))]
    if all(tokens % least == 0 for tokens in model.sequence_lengths) and rng.random() < 0.6:
        found.append(SequenceParallel(regather=rng.random() < 0.5))
    if model.vocab_parallel and rng.random() < 0.5:
        found.append(VocabParallel())
    return found


def _chunking(rng: Random, model: RandomModel, tensor_parallel: str) -> list[Strategy]:
    """A chunked loss, or tiled MLPs that are not sharded and have no dropout, or both."""
    mlp = rng.choice((1, 2, 3)) if not tensor_parallel and not model.has_dropout else 1
    chunks = rng.choice((1, 2, 8)) if mlp > 1 else rng.choice((2, 3, 8))
    found: list[Strategy] = [ChunkedLoss(chunks)] if chunks > 1 else []
    return [*found, TiledMLP(mlp)] if mlp > 1 else found


def _pipeline(rng: Random, model: RandomModel, ranks: int) -> tuple[Strategy, int]:
    """Draws a pipeline of `ranks` ranks with no more stages than the model has, and a number of microbatches
    that its schedule supports.
    """
    most = model.max_stages // ranks
    fitting = [name for name, schedule in SCHEDULES.items() if max(1, schedule.num_virtual_stages) <= most]
    schedule = rng.choice([name for name in fitting if not list(SCHEDULES[name].check(ranks, 1))])
    chunks = 0 if SCHEDULES[schedule].num_virtual_stages else rng.randint(1, most)
    least = 2 if schedule == "dualpipe" else 1  # half of the microbatches start at either end
    return Pipeline(schedule=schedule, virtual_stages=chunks), rng.randint(least, ranks + 3)


def _data_parallel(rng: Random, tensor_parallel: str, sizes: Sizes) -> list[Strategy]:
    """Draws the strategy that stores parameters and reduces gradients, if ranks have different samples or
    tokens.
    """
    axes = [axis for axis in (*DATA_AXES, "cp") if sizes.get(axis, 1) > 1]
    split = [axis for axis in axes if axis in DATA_AXES]
    if not axes:
        return []
    if tensor_parallel in MULTI_DIM_TENSOR_PARALLEL:
        return [_zero(rng, "dp_shard", "dp_replicate" if "dp_replicate" in axes else "", 3)]
    if len(split) == 2:
        axis, replicate_axis = rng.sample(split, 2)
        return [_zero(rng, axis, replicate_axis, rng.choice((1, 2, 3, 3)))]
    axis = split[0] if split else axes[0]
    alone = axis in split and all(size == 1 for each, size in sizes.items() if each != axis)
    kinds = ("ddp", "ddp", "naive_ddp", "zero", "zero", "zero", *(("data_parallel_master",) if alone else ()))
    match rng.choice(kinds):
        case "ddp":
            return [DDP(axis, rng.choice((25.0, 0.01, 0.001)), rng.choice(ALGORITHMS))]
        case "naive_ddp":
            return [NaiveDDP(axis, rng.choice(ALGORITHMS))]
        case "data_parallel_master":
            return [DataParallelMaster(axis)]
    return [_zero(rng, axis, "", rng.choice((1, 2, 3, 3)))]


def _zero(rng: Random, axis: str, replicate_axis: str, stage: int) -> Strategy:
    zero = ZeRO(axis, stage, replicate_axis)
    if stage < 3:
        return zero
    return replace(
        zero,
        gather=rng.choice(("use", "microbatch", "step")),
        keep_mb=rng.choice((0.0, 0.01)),
        prefetch=rng.choice((0, 1, 3)),
    )


OF_ALL_RANKS = ("sync_batch_norm", "expert_parallel", "loss_free_balancing", "local_sgd", "diloco")


def with_servers(rng: Random, mesh: Mesh, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Returns `strategies`, in some plans with servers in place of ddp, unless states rest on the host.

    In some of these the servers are no workers, if no ranks share the work on samples.
    """
    ddp = [each for each in strategies if isinstance(each, DDP)]
    is_offloaded = any(each.name in ("offload", "disk_offload") for each in strategies)
    if len(ddp) != 1 or is_offloaded or rng.random() < 0.7:
        return tuple(strategies)
    axis, size = ddp[0].axis, mesh.size(ddp[0].axis)
    server = ParameterServer(axis, rng.randint(1, min(2, size)))
    shares_samples = mesh.group_size(("ep", "cp")) > 1 or any(
        each.name in OF_ALL_RANKS for each in strategies
    )
    if server.servers < size and not shares_samples and rng.random() < 0.5:
        server = replace(server, dedicated=True)
    return tuple(server if isinstance(each, DDP) else each for each in strategies)
