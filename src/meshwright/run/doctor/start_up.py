"""Counts what the start of a job costs at its number of ranks, without starting it.

    splits       communicators of NCCL are split off that of all ranks, and every rank takes part in each split
    store        requests to the store of the rendezvous, which one process answers
    agreement    bytes that a rank receives to compare plans, and collectives in the first step
    save         bytes of the lists of shards that all ranks exchange, and of the manifest
    restore      bytes that a rank reads: what it keeps, the manifest, and its share of the files for checksums

Splits are those that `comm/disjoint_groups.py` makes, and manifest and lists are made by the code that saves, of
tensors without memory. The other numbers are formulas; tests compare them with what ranks do at small sizes.
Seconds are an estimate from a published measurement of another machine (`SPLIT_SOURCE`).

States of the optimizer are counted as those of AdamW: two per element, and a step count.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property

import torch

from meshwright.comm.collectives.collective_call import POINT_TO_POINT
from meshwright.comm.disjoint_groups import communicator_splits, groups_of, needs_communicator, used_axes
from meshwright.engine.optim.sharded_state_dict import SavedTensor, TensorShard
from meshwright.engine.runtime.comm_groups import group_keys
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.rank_view import RankView
from meshwright.run.checkpoint.manifest import Manifest, ShardFile
from meshwright.run.checkpoint.write_plan import WritePlan, list_shards

SPLIT_S = 2.0  # seconds; an estimate
SPLIT_SOURCE = (
    "8 communicators of 8 V100 took 16.3 s (NVIDIA/nccl issue 534, 2021); not measured at this size"
)
ADMIT_REQUESTS = 5  # of rank 0, for each other rank, when it has come: here? come? its number; go; here?
ARRIVE_REQUESTS = 4  # of every other rank: come; go? its token; here
REGISTER_REQUESTS = 4  # of every rank for the watchdog: which world, the place on its host, how to observe it
NEIGHBOUR_REQUESTS = 2  # of every rank, for each rank of its host: is it there? how to observe it
PLAN_DIGESTS_NBYTES = 64  # of the plan and of the data
CALL_DIGEST_NBYTES = 8  # of a collective in the first step
STATES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StartUpCost:
    """The counts of one plan: requests of all ranks together, and bytes of the rank that has most.

    `groups` are the groups of more than one rank and fewer than all: calls without batching. `split_s` is an
    estimate.
    """

    mesh: str
    world_size: int
    axis_sets: int
    axis_splits: int
    pairs: int
    pair_splits: int
    groups: int
    split_s: float
    store_requests: int
    store_requests_rank_0: int
    agreement_nbytes: int
    shard_lists_nbytes: int
    manifest_nbytes: int
    num_slices: int
    kept_nbytes: int
    restore_nbytes: int

    @property
    def restore_ratio(self) -> float:
        """The bytes read of tensors and manifest to resume, per byte kept."""
        return (self.restore_nbytes + self.manifest_nbytes) / self.kept_nbytes

    def as_dict(self) -> dict[str, object]:
        """Returns the counts as plain values."""
        return {**asdict(self), "restore_ratio": self.restore_ratio}


def count_start_up(plan: Plan, ranks_per_host: int = 8) -> StartUpCost:
    """Returns what starting, saving and resuming `plan` costs on GPUs, `ranks_per_host` of them a host."""
    mesh, world = plan.mesh, plan.mesh.world_size
    keys = sorted(group_keys(plan, serializes_p2p=True))
    sets = [key for key in keys if not key[1]]
    splits, axis_splits = len(communicator_splits(mesh, keys)), len(communicator_splits(mesh, sets))
    used = {used_axes(mesh, key) for key in keys}
    made = [key for key in used if needs_communicator(mesh, key)]
    saved = SavedState(plan)
    rank_0, total = store_requests(world, ranks_per_host)
    return StartUpCost(
        str(mesh),
        world,
        axis_sets=sum(not key[1] for key in made),
        axis_splits=axis_splits,
        pairs=sum(bool(key[1]) for key in made),
        pair_splits=splits - axis_splits,
        groups=sum(len(groups_of(mesh, key)) for key in made),
        split_s=(1 + splits) * SPLIT_S,
        store_requests=total,
        store_requests_rank_0=rank_0,
        agreement_nbytes=agreement_nbytes(plan),
        shard_lists_nbytes=max(map(len, saved.listings), default=0) * len(saved.listings),
        manifest_nbytes=len(saved.manifest.dump()),
        num_slices=sum(len(entry.slices) for entry in saved.manifest.entries.values()),
        kept_nbytes=max(saved.kept_nbytes),
        restore_nbytes=max(saved.kept_nbytes) + saved.total_nbytes // world,
    )


def store_requests(world_size: int, ranks_per_host: int) -> tuple[int, int]:
    """Returns the requests to the store until all ranks have met and know those of their host: of rank 0, and
    of all ranks. Looks at who has not come yet are not counted.
    """
    watch = REGISTER_REQUESTS + NEIGHBOUR_REQUESTS * min(world_size, ranks_per_host) + 2
    rank_0 = ADMIT_REQUESTS * (world_size - 1) + watch
    return rank_0, rank_0 + (world_size - 1) * (ARRIVE_REQUESTS + watch)


def agreement_nbytes(plan: Plan) -> int:
    """Returns the bytes that a rank receives to compare plans and, in its first step, each collective."""
    mesh = plan.mesh

    def compared(role_messages: Iterator[int]) -> int:
        return sum(role_messages) * CALL_DIGEST_NBYTES

    first_step = max(
        compared(
            len(among) or mesh.group_size(message.axes)
            for action in role.actions
            for transfer in action.transfers
            for message in transfer.messages
            if message.collective not in POINT_TO_POINT
            for among in [next(iter(message.member_groups(mesh)))]
        )
        for role in plan.program.roles
    )
    return mesh.world_size * PLAN_DIGESTS_NBYTES + first_step


class SavedState:
    """The checkpoint of `plan` as its ranks write it: parameters, and the states of AdamW."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._views: dict[tuple[int, ...], RankView] = {}
        sharded = plan.sharding.param_shardings
        flat_axes = {axis for each in sharded for axis in each.flat_shard_axes}
        other_axes = {axis for each in sharded for axis in each.sliced_dims} | set(plan.sharding.stage_axes)
        self._flat_axes = [axis for axis in AXES if axis in flat_axes]
        self._other_axes = [axis for axis in AXES if axis in other_axes - flat_axes]
        self._dtype = getattr(torch, plan.job.precision.effective.master)
        distinct: dict[tuple[int, ...], _RankPart] = {}
        self._parts: list[_RankPart] = []
        for rank in range(plan.mesh.world_size):
            key = self._indices(rank, (*self._other_axes, *self._flat_axes))
            if key not in distinct:
                distinct[key] = _RankPart(dict(self._of_rank(rank)))
            self._parts.append(distinct[key])

    @property
    def listings(self) -> list[bytes]:
        """The list of shards that each rank sends to all."""
        return [part.listing for part in self._parts]

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest, with checksums that are all zero."""
        files = [f"rank-{rank:05d}.safetensors" for rank in range(len(self.listings))]
        parts = WritePlan.from_ranks(self._parts[0].tensors, self.listings)
        sums = {files[index]: ShardFile(1 << 40, "0" * 64) for index in parts.writer_indices()}
        return Manifest(0, parts.entries(files), sums, {})

    @property
    def kept_nbytes(self) -> list[int]:
        """The bytes that each rank keeps of the checkpoint, and reads when it resumes."""
        return [part.nbytes for part in self._parts]

    @property
    def total_nbytes(self) -> int:
        """The bytes of all tensors of the checkpoint."""
        numel = sum(torch.Size(entry.shape).numel() for entry in self.manifest.entries.values())
        return numel * self._dtype.itemsize

    def _of_rank(self, rank: int) -> Iterator[tuple[str, SavedTensor]]:
        view, coordinate = self._view(rank), self._plan.mesh.coordinate(rank)
        shards = {
            shard.name: shard
            for spec in view.flat_param_specs.values()
            for shard in spec.param_shards(self._plan.mesh.index(coordinate, spec.axes))
        }
        flat = {name for spec in view.flat_param_specs.values() for name, _, _ in spec.params}
        for local, logical in zip(view.param_shardings, view.logical_param_shardings, strict=True):
            name, shape = logical.param.name, logical.param.shape
            spans = tuple(shard.dim_ranges for shard in view.dim_shards(logical))
            if name not in flat:
                begin, numel = 0, local.param.numel
            elif name in shards and name in view.params_counted_in_sum:
                begin, numel = shards[name].begin, shards[name].numel
            else:
                continue
            value: SavedTensor = TensorShard(self._empty(numel), begin, shape, spans)
            step: SavedTensor = TensorShard(self._empty(1), 0, ())
            if name not in flat and not self._plan.sharding.block_calls_by_pp_rank:
                value = value if spans else self._empty(numel).view(shape)
                step = self._empty(1).view(())
            yield f"model/{name}", value
            if logical.param.trainable:
                yield from ((f"optimizer/{state}/{name}", value) for state in STATES)
                yield f"optimizer/step/{name}", step

    def _view(self, rank: int) -> RankView:
        """The view of a rank with the same parameters and slices: shards are told apart by the rank itself."""
        key = self._indices(rank, self._other_axes)
        if key not in self._views:
            self._views[key] = self._plan.rank_view(rank)
        return self._views[key]

    def _indices(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        coordinate = self._plan.mesh.coordinate(rank)
        return tuple(coordinate[axis] for axis in axes)

    def _empty(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=self._dtype, device="meta")


class _RankPart:
    """What a rank saves, and all its replicas."""

    def __init__(self, tensors: dict[str, SavedTensor]) -> None:
        self.tensors, self.listing = tensors, list_shards(tensors)
        self.nbytes = sum(
            (each.values if isinstance(each, TensorShard) else each).nbytes for each in tensors.values()
        )
