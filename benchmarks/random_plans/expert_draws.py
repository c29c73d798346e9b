"""Distributes experts in a random plan: the same plan, with a mixture of experts along `ep` too, and with
slices of each expert along `tp`; or with experts over other axes of the plan, beside `ep` or without it.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.expert.expert_parallel import ExpertParallel
from meshwright.parallel.expert.expert_tensor_parallel import ExpertTensorParallel
from meshwright.parallel.memory.tiled_mlp import TiledMLP
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.parallel.tensor.sequence_parallel import SequenceParallel
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.plan.strategy_interface import Strategy

NOT_BESIDE = (DataParallelMaster, SequenceParallel, TiledMLP)
STORES = (DDP, NaiveDDP, ZeRO)
NUM_EXPERTS = 5  # of a layer, in all models


def with_experts(
    rng: Random, mesh: Mesh, strategies: Sequence[Strategy], max_ranks: int
) -> tuple[Mesh, tuple[Strategy, ...]] | None:
    """Returns the mesh with 2 or 3 ranks along ep, and its strategies; None if they cannot be combined.

    A plan in which ranks have the same samples gets DDP along dp_shard, which sums along ep.
    """
    larger = Mesh(**{axis: mesh.size(axis) for axis in AXES if axis != "ep"}, ep=rng.choice((2, 2, 3)))
    if any(isinstance(each, NOT_BESIDE) for each in strategies) or larger.world_size > max_ranks:
        return None
    more: list[Strategy] = [ExpertParallel(), BatchSplit("ep")]
    if not any(isinstance(each, STORES) for each in strategies):
        more += [BatchSplit("dp_shard"), DDP("dp_shard")]
    if any(isinstance(each, TensorParallel) for each in strategies) and rng.random() < 0.6:
        more.append(ExpertTensorParallel())
    mixed = [*strategies, *more]
    rng.shuffle(mixed)
    return larger, tuple(mixed)


def over_other_axes(
    rng: Random, mesh: Mesh, strategies: tuple[Strategy, ...]
) -> tuple[Mesh, tuple[Strategy, ...]]:
    """Returns the plan with experts over some of its other axes, if there are experts for all."""
    sliced = any(isinstance(each, ExpertTensorParallel) for each in strategies)
    axes = [axis for axis in ("dp_shard", "cp", *(() if sliced else ("tp",))) if mesh.size(axis) > 1]
    over = tuple(axis for axis in axes if rng.random() < 0.5)
    if over and rng.random() < 0.5:
        over = ("ep", *over)
    if not over or mesh.group_size(over) > NUM_EXPERTS:
        return mesh, strategies
    mesh = mesh if "ep" in over else replace(mesh, ep=1)
    kept = (each for each in strategies if "ep" in over or each != BatchSplit("ep"))
    return mesh, tuple(ExpertParallel(over) if isinstance(each, ExpertParallel) else each for each in kept)
