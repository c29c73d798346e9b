"""Counts what the start of a job costs at its number of ranks, without starting it.

    splits       communicators of NCCL are split off that of all ranks; every rank takes part in each split
    store        requests to the store of the rendezvous, which one process answers
    agreement    bytes that a rank receives to compare plans, and collectives in the first step
    save         bytes of the lists of shards that all ranks exchange, and of the manifest
    restore      bytes that a rank reads: what it keeps, its share of the files for checksums, the manifest

Splits are those that `comm/disjoint_groups.py` makes. Of lists and manifest, rows and slices are made by the
code that saves, and their bytes are added up; no more than one at a time exists. The other numbers are
formulas; tests compare all of them with what ranks do at small sizes.
Seconds are an estimate from a published measurement of another machine (`SPLIT_SOURCE`).

States of the optimizer are counted as those of AdamW: two per element, and a step count.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from math import prod

import torch

from meshwright.comm.collectives.collective_call import POINT_TO_POINT
from meshwright.comm.disjoint_groups import communicator_splits, groups_of, needs_communicator, used_axes
from meshwright.engine.optim.sharded_state_dict import TensorShard
from meshwright.engine.runtime.comm_groups import group_keys
from meshwright.plan.model_spec.param_dim_split import DimRanges
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.rank_view import RankView
from meshwright.run.checkpoint.manifest import (
    Manifest,
    ShardFile,
    StoredSlice,
    TensorEntry,
    canonical_json,
    check_manifest_size,
    check_num_slices,
)
from meshwright.run.checkpoint.shard_io import dtype_name
from meshwright.run.checkpoint.write_plan import ShardRange, balance_by_size, list_shards, stored_boxes

SPLIT_S = 2.0  # seconds; an estimate
SPLIT_SOURCE = "8 communicators of 8 V100 took 16.3 s (NVIDIA/nccl issue 534); not measured at this size"
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
    checksum_nbytes: int

    @property
    def read_nbytes(self) -> int:
        """The bytes that a rank reads to resume."""
        return self.kept_nbytes + self.checksum_nbytes + self.manifest_nbytes

    def as_dict(self) -> dict[str, object]:
        """Returns the counts as plain values."""
        return {**asdict(self), "read_nbytes": self.read_nbytes}


def count_start_up(plan: Plan, ranks_per_host: int = 8) -> StartUpCost:
    """Returns what starting, saving and resuming `plan` costs on GPUs, `ranks_per_host` of them a host."""
    mesh, world, saved = plan.mesh, plan.mesh.world_size, SavedState(plan)
    keys = sorted(group_keys(plan, serializes_p2p=True))
    sets = [key for key in keys if not key[1]]
    splits, axis_splits = len(communicator_splits(mesh, keys)), len(communicator_splits(mesh, sets))
    used = {used_axes(mesh, key) for key in keys}
    made = [key for key in used if needs_communicator(mesh, key)]
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
        shard_lists_nbytes=max(saved.listings_nbytes) * world,
        manifest_nbytes=saved.manifest_nbytes,
        num_slices=saved.num_slices,
        kept_nbytes=max(saved.kept_nbytes),
        checksum_nbytes=saved.total_nbytes // world,
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
    compared = (
        sum(
            len(next(iter(message.member_groups(mesh)))) or mesh.group_size(message.axes)
            for action in role.actions
            for transfer in action.transfers
            for message in transfer.messages
            if message.collective not in POINT_TO_POINT
        )
        for role in plan.program.roles
    )
    return mesh.world_size * PLAN_DIGESTS_NBYTES + max(compared) * CALL_DIGEST_NBYTES


class SavedState:
    """The checkpoint of `plan` as its ranks write it, counted shard by shard: parameters, and the states of
    AdamW, which lie as their parameters do. Ranks with equal shards are counted once.

    `listings_nbytes` and `kept_nbytes` are, per rank, the bytes of the list of shards that it sends to all,
    and those that it keeps of the checkpoint and reads when it resumes.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._has_stages = plan, bool(plan.sharding.block_calls_by_pp_rank)
        self._params: dict[tuple[int, ...], _RankParams] = {}
        sharded = plan.sharding.param_shardings
        flat_axes = {axis for each in sharded for axis in each.flat_shard_axes}
        other_axes = {axis for each in sharded for axis in each.sliced_dims} | set(plan.sharding.stage_axes)
        self._flat_axes = [axis for axis in AXES if axis in flat_axes]
        self._other_axes = [axis for axis in AXES if axis in other_axes - flat_axes]
        self._dtype = getattr(torch, plan.job.precision.effective.master)
        self._slices: dict[tuple[str, ...], _SliceCount] = {}  # by the names of tensors that are cut alike
        self._known_ranges: set[tuple[str, int, int, tuple[DimRanges, ...]]] = set()
        self._writers: set[int] = set()
        distinct: dict[tuple[int, ...], tuple[int, int]] = {}
        counts: list[tuple[int, int]] = []
        for rank in range(plan.mesh.world_size):
            key = self._indices(rank, (*self._other_axes, *self._flat_axes))
            if key not in distinct:
                distinct[key] = self._count_rank(rank)
            counts.append(distinct[key])
        self._count_full_tensors()
        self.listings_nbytes = [nbytes for nbytes, _ in counts]
        self.kept_nbytes = [numel * self._dtype.itemsize for _, numel in counts]

    @property
    def num_slices(self) -> int:
        """The slices of all tensors of the checkpoint."""
        return sum(each.number * len(names) for names, each in self._slices.items())

    @property
    def total_nbytes(self) -> int:
        """The bytes of all tensors of the checkpoint."""
        numel = sum(prod(each.shape) * len(names) for names, each in self._slices.items())
        return numel * self._dtype.itemsize

    @cached_property
    def manifest_nbytes(self) -> int:
        """The bytes of the manifest. Raises CheckpointError if it could not be read back."""
        nbytes = len(Manifest(0, {}, {}, {}).dump())
        if self._writers:
            file = canonical_json({_file(0): vars(ShardFile(1 << 40, "0" * 64))})
            nbytes += (len(file) - 1) * len(self._writers) - 1  # a comma less than files
        for name, each in ((name, each) for names, each in self._slices.items() for name in names):
            check_num_slices(name, each.number)
            entry = {**vars(TensorEntry(each.shape, dtype_name(self._dtype), ())), "slices": []}
            nbytes += len(canonical_json({name: entry})) - 1
            nbytes += each.nbytes + each.number * (_json_len(name) + 1) - bool(each.number)
        nbytes -= bool(self._slices)
        check_manifest_size(nbytes, self.num_slices, sum(map(len, self._slices)))
        return nbytes

    def _count_rank(self, rank: int) -> tuple[int, int]:
        """Counts the slices that a rank is the first to have. Returns the bytes of its list of shards, and
        the elements that it keeps.
        """
        params, mesh = self._params_of(rank), self._plan.mesh
        coordinate, listing = mesh.coordinate(rank), 0
        kept = sum(each.numel for each in params.flat.values() if not each.is_stored_sharded)
        for param in params.others:
            kept += param.kept_numel(param.numel) + param.numel
            if self._has_stages or param.spans:
                listing += self._count_range(rank, param, 0, param.numel)
            if self._has_stages and param.trainable:
                listing += self._count_step(rank, param)
        for spec in params.flat_specs:
            for shard in spec.param_shards(mesh.index(coordinate, spec.axes)):
                param = params.flat[shard.name]
                kept += param.kept_numel(shard.numel) + shard.numel * param.is_stored_sharded
                if param.is_counted:
                    listing += self._count_range(rank, param, shard.begin, shard.numel)
                    listing += self._count_step(rank, param) if param.trainable else 0
        return listing + 1 if listing else 0, kept

    def _count_range(self, rank: int, param: "_SavedParam", begin: int, numel: int) -> int:
        """Counts elements of a parameter and its states, unless an earlier rank has them. Returns the bytes
        of their rows in the list of shards, each with a comma.
        """
        key = param.name, begin, numel, param.spans
        if key not in self._known_ranges:
            self._known_ranges.add(key)
            self._writers.add(rank)
            self._add_slices(param.value_names, param.shape, _slices(param.shape, param.spans, begin, numel))
        ends = len(str(begin)) + len(str(begin + numel))
        return param.rows_nbytes + ends * len(param.value_names)

    def _count_step(self, rank: int, param: "_SavedParam") -> int:
        """Counts the step count of a parameter; returns as `_count_range`."""
        key = param.step_name, 0, 1, ()
        if key not in self._known_ranges:
            self._known_ranges.add(key)
            self._writers.add(rank)
            self._add_slices((param.step_name,), (), _slices((), (), 0, 1))
        return param.step_row_nbytes

    def _count_full_tensors(self) -> None:
        """Counts the tensors that each rank has in full; they are written by ranks in turn."""
        nbytes: dict[str, int] = {}
        for param in () if self._has_stages else self._params_of(0).others:
            tensors = [] if param.spans else [(param.value_names, param.shape)]
            for names, shape in [*tensors, *([((param.step_name,), ())] if param.trainable else [])]:
                nbytes |= dict.fromkeys(names, prod(shape) * self._dtype.itemsize)
                slices = StoredSlice(_file(0), "", (0,) * len(shape), shape)
                self._add_slices(names, shape, (1, len(canonical_json(vars(slices)))))
        shares = balance_by_size(nbytes, self._plan.mesh.world_size)
        self._writers.update(rank for rank, names in enumerate(shares) if names)

    def _add_slices(self, names: tuple[str, ...], shape: tuple[int, ...], slices: tuple[int, int]) -> None:
        count = self._slices.setdefault(names, _SliceCount(shape))
        count.number += slices[0]
        count.nbytes += slices[1]

    def _params_of(self, rank: int) -> "_RankParams":
        """The parameters of a rank and of all with the same slices; they may have other shards of them."""
        key = self._indices(rank, self._other_axes)
        if key not in self._params:
            self._params[key] = _RankParams(self._plan.rank_view(rank), self._dtype)
        return self._params[key]

    def _indices(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        coordinate = self._plan.mesh.coordinate(rank)
        return tuple(coordinate[axis] for axis in axes)


@dataclass(eq=False)
class _SliceCount:
    """The slices of a tensor of `shape`, and their bytes in the manifest without its name and commas."""

    shape: tuple[int, ...]
    number: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class _SavedParam:
    """A parameter of `shape`, of which a rank has the slice `spans` of `numel` elements.

    `value_names` are those of its values and states in the checkpoint, `rows_nbytes` the bytes of their rows
    in the list of shards without the ends of the range, and `step_row_nbytes` those of its step count. If it
    is a part of a flat parameter, a rank keeps its shard alone when `is_stored_sharded`, and saves it when
    `is_counted`.
    """

    name: str
    shape: tuple[int, ...]
    spans: tuple[DimRanges, ...]
    numel: int
    trainable: bool
    value_names: tuple[str, ...]
    step_name: str
    rows_nbytes: int
    step_row_nbytes: int
    is_stored_sharded: bool
    is_counted: bool

    def kept_numel(self, numel: int) -> int:
        """Returns the elements of states that a rank keeps for `numel` elements."""
        return (len(STATES) * numel + (numel > 0)) if self.trainable else 0


class _RankParams:
    """The parameters of a rank: those in its flat parameters (`flat_specs`) by name, and all others."""

    def __init__(self, view: RankView, dtype: torch.dtype) -> None:
        self.flat_specs = list(view.flat_param_specs.values())
        in_flat = {name for spec in self.flat_specs for name, _, _ in spec.params}
        self.flat: dict[str, _SavedParam] = {}
        self.others: list[_SavedParam] = []
        for local, logical in zip(view.param_shardings, view.logical_param_shardings, strict=True):
            param, states = logical.param, STATES if logical.param.trainable else ()
            names = (f"model/{param.name}", *(f"optimizer/{state}/{param.name}" for state in states))
            step = f"optimizer/step/{param.name}"
            spans = tuple(shard.dim_ranges for shard in view.dim_shards(logical))
            saved = _SavedParam(
                param.name,
                param.shape,
                spans,
                local.param.numel,
                param.trainable,
                names,
                step,
                sum(_json_len(name) + _row_nbytes(param.shape, spans, dtype) for name in names),
                _json_len(step) + _row_nbytes((), (), dtype) + len("01"),
                local.is_stored_sharded,
                param.name in view.params_counted_in_sum,
            )
            if param.name in in_flat:
                self.flat[param.name] = saved
            else:
                self.others.append(saved)


def _row_nbytes(shape: tuple[int, ...], spans: tuple[DimRanges, ...], dtype: torch.dtype) -> int:
    """Returns the bytes of a row and a comma in a list of shards, without the name and the range's ends."""
    shard = TensorShard(torch.empty(0, dtype=dtype, device="meta"), 0, shape, spans)
    return len(list_shards({"": shard})) - len("[]") - len("00") + len(",")


@lru_cache(maxsize=4096)
def _slices(shape: tuple[int, ...], spans: tuple[DimRanges, ...], begin: int, numel: int) -> tuple[int, int]:
    """Returns the number of slices of a range of a tensor, and their bytes as in `_SliceCount`; equal layers
    have equal ones.
    """
    boxes = stored_boxes(ShardRange("", shape, "", begin, begin + numel, spans))
    found = [vars(StoredSlice(_file(0), key, box.start, box.size)) for key, box in boxes]
    return len(found), sum(len(canonical_json(each)) for each in found)


def _json_len(name: str) -> int:
    """Returns the length of `name` in JSON, without quotes."""
    return len(json.dumps(name)) - 2


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
