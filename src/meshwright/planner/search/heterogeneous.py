"""Devices of several kinds: how work is laid on them, so that the fast ones wait little for the slow ones.

    copies     each on devices of one kind, all with the same rows: everybody waits for the slowest, and the
               least memory counts
    along pp   each rank along pp on devices of one kind; layers are dealt by speed, as far as memory allows.
               Kinds with more
               memory come first, where most micro-batches are under way
    alone      one kind does all, and the others stand still: what the two above are worth

No group of tensor ranks, and none of ranks that have tokens of the same rows, mixes kinds. Between hosts the
slower card counts.

    layers of a rank = argmin max_k l_k t_k,   sum_k n_k l_k = L,   l_k at most what the memory of kind k
                                                                    takes

t_k is what kind k takes for a layer of one micro-batch, n_k how many ranks along pp it has. Dealt one by one
to whoever is ready first with one more, which is optimal for equal layers. What ranks along pp wait is by the
formulas of equal ranks, of their mean.

Limits: unlike copies get as many rows each (a step is the sum over samples of all, and rows are not divided
by speed); orders whose parts go there and back, or lie twice, are not laid on unlike devices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from meshwright.planner.analytic.memory import MemoryEstimate, memory_by_pp_rank
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ParallelConfig, ScheduleProfile
from meshwright.planner.analytic.step_time import MicrobatchTime, microbatch_time, step_time
from meshwright.planner.machine.machine import Machine, with_nic
from meshwright.planner.search.candidates import (
    candidate_meshes,
    configs_on_mesh,
    leanest_configs,
    valid_schedules,
    zero_options,
)
from meshwright.planner.search.lower_bounds import (
    SAFETY_FACTOR,
    SampleBound,
    boundary_transfer_s,
    layer_time,
    pipeline_wait_bound_s,
    sample_bound,
    tail_bound_s,
)
from meshwright.planner.search.request import USABLE_MEMORY_FRACTION, SearchRequest
from meshwright.planner.search.search import Candidate, SearchResult, TopCandidates, price_meshes, search


@dataclass(frozen=True)
class DeviceKind:
    """The devices of one kind: the `first` of the ranks along pp that it has, how many these are, and the
    layers of each.

    `made`: what a micro-batch takes them, where that is counted already.
    """

    machine: Machine
    first_pp_rank: int
    num_pp_ranks: int
    layers_by_rank: tuple[int, ...] = ()
    microbatch: MicrobatchTime | None = None

    @property
    def max_layers(self) -> int:
        """Of the rank that has most."""
        return max(self.layers_by_rank)


def weakest_machine(machines: Sequence[Machine]) -> Machine:
    """All devices as if each were, in every respect, the worst of them: what copies that wait for each other
    come to.
    """
    slow = min(machines, key=lambda each: each.peak_flops("bfloat16") * each.rates.matmul)
    devices = [each.device for each in machines]
    shared = set.intersection(*(set(device.flops) for device in devices))
    device = replace(
        slow.device,
        name=" and ".join(f"{each.num_devices} {each.device.name}" for each in machines),
        flops={dtype: min(device.flops[dtype] for device in devices) for dtype in sorted(shared)},
        memory=min(device.memory for device in devices),
        memory_rate=min(device.memory_rate for device in devices),
        link_rate=min(device.link_rate for device in devices),
        nic_rate=min(device.nic_rate for device in devices),
        devices_per_host=min(device.devices_per_host for device in devices),
    )
    return replace(
        slow,
        device=device,
        num_devices=sum(each.num_devices for each in machines),
        host_size_override=min(each.devices_per_host for each in machines),
    )


def search_heterogeneous(
    request: SearchRequest, machines: Sequence[Machine], num_kept: int = 10, *, prune: bool = True
) -> SearchResult:
    """The best layouts on all of `machines`; `wish` says all but the devices.

    Without `prune` all are priced: the same.
    """
    together = replace(
        request,
        machine=weakest_machine(machines),
        devices_by_kind=tuple(each.num_devices for each in machines),
    )
    found = search(together, num_kept, prune=prune)
    best = TopCandidates(num_kept)
    for each in found.best:
        best.add(each)
    apart = HeterogeneousPricer(together, machines)
    seen = found.num_priced + price_meshes(apart.request, apart.meshes(), apart, best, prune=prune)
    return SearchResult(tuple(best.candidates), seen, None if best.candidates else found.nearest_miss)


def search_each_kind(
    request: SearchRequest, machines: Sequence[Machine]
) -> Iterator[tuple[Machine, Candidate | None]]:
    """Each kind with what it does by itself; None where nothing fits."""
    for each in machines:
        kept = {axis: size for axis, size in request.fixed.items() if axis != "dp"}
        found = search(replace(request, machine=each, fixed=kept), 1)
        yield each, next(iter(found.best), None)


class HeterogeneousPricer:
    """Ranks along pp on unlike kinds, each rank on one, those with most memory first."""

    def __init__(self, request: SearchRequest, machines: Sequence[Machine]) -> None:
        plain = {
            name: each
            for name, each in request.schedules.items()
            if each[1] == 1 and not (each[0].is_folded or each[0].is_bidirectional)
        }
        self.request = replace(
            request, devices_by_kind=(), required_axes=(*request.required_axes, "pp"), schedules=plain
        )
        ordered = sorted(machines, key=lambda each: -each.device.memory)
        self._device_counts = [each.num_devices for each in ordered]
        self._machines = [_on_slower_network(each, request.machine) for each in ordered]
        self._sample_bounds, self._microbatch_cache = (
            dict[tuple[float, ...], list[SampleBound]](),
            dict[tuple[float, ...], list[MicrobatchTime]](),
        )

    def meshes(self) -> Iterator[ParallelConfig]:
        """Those on which no group but that of ranks along pp mixes kinds."""
        for mesh in candidate_meshes(self.request) if self.request.schedules else ():
            if not any(count % (mesh.tp * mesh.data_parallel_size) for count in self._device_counts):
                yield mesh

    def mesh_bound_s(self, mesh: ParallelConfig) -> float:
        """Its rows, with layers dealt as if they could be cut, and what comes behind them."""
        key = mesh.tp, mesh.cp, mesh.ulysses_degree, mesh.tp_stride
        if key not in self._sample_bounds:
            self._sample_bounds[key] = [
                sample_bound(self.request.shape, mesh, machine) for machine in self._machines
            ]
        rows = self._sample_bounds[key]
        most = min(max(row.embedding, row.head) for row in rows)
        return SAFETY_FACTOR * (
            mesh.num_microbatches * (self._balanced_seconds(mesh, [row.layer for row in rows]) + most)
            + self._tail_bound(mesh)
        )

    def may_fit(self, sized_mesh: ParallelConfig) -> bool:
        """Whether all kinds together have room for all layers where these hold least."""
        kinds, shape = self._device_kinds(sized_mesh), self.request.shape
        for layout in leanest_configs(self.request, sized_mesh):
            rooms = [_max_layers(shape, layout, kind) for kind in kinds]
            if (
                all(rooms)
                and sum(room * kind.num_pp_ranks for room, kind in zip(rooms, kinds, strict=True))
                >= shape.layers
            ):
                return True
        return False

    def bound_s(self, sized_mesh: ParallelConfig) -> float:
        """Its layers, and the order in which ranks along pp wait least."""
        return min(
            (
                self.schedule_bound_s(sized_mesh, order, chunks)
                for _, order, chunks in valid_schedules(self.request, sized_mesh)
            ),
            default=inf,
        )

    def price(self, sized_mesh: ParallelConfig, top: TopCandidates, max_seconds: float) -> int:
        """Layers dealt, step and memory of each."""
        seen, kinds = 0, self._device_kinds(sized_mesh)
        allowed = [
            turn
            for turn in valid_schedules(self.request, sized_mesh)
            if self.schedule_bound_s(sized_mesh, *turn[1:]) <= max_seconds
        ]
        for layout, schedule in configs_on_mesh(self.request, sized_mesh, allowed):
            seen += 1
            dealt = assign_layers(self.request.shape, layout, kinds)
            candidate = None if dealt is None else _candidate(self.request.shape, layout, schedule, dealt)
            if candidate is not None and candidate.seconds <= top.cutoff_s:
                top.add(candidate)
        return seen

    def schedule_bound_s(self, sized_mesh: ParallelConfig, profile: ScheduleProfile, chunks: int) -> float:
        """Seconds that a step takes at least in which ranks along pp take turns in this `order`."""
        shape, made, ranks = (
            self.request.shape,
            self._microbatch_times(sized_mesh),
            self._pp_ranks_by_kind(sized_mesh),
        )
        layers = [
            layer_time(sized_mesh, machine, each) for machine, each in zip(self._machines, made, strict=True)
        ]
        found = sized_mesh.num_microbatches * self._balanced_seconds(
            sized_mesh, [each.total for each in layers]
        )
        found += sized_mesh.num_microbatches * min(
            max(each.embedding.total, each.head.total) for each in made
        ) + self._tail_bound(sized_mesh)
        one = min(
            pipeline_wait_bound_s(sized_mesh, profile, chunks, each) for each in layers
        )  # for each layer of a rank
        found += one * shape.layers / sized_mesh.pp
        sent = [boundary_transfer_s(shape, sized_mesh, machine, chunks) for machine in self._machines]
        return SAFETY_FACTOR * (
            found + sum(count * each for count, each in zip(ranks, sent, strict=True)) / sized_mesh.pp
        )

    def _balanced_seconds(self, mesh: ParallelConfig, layers: Sequence[float]) -> float:
        """Seconds of the slowest rank where a layer takes each kind as long as `layers` says."""
        return self.request.shape.layers / sum(
            count / each for count, each in zip(self._pp_ranks_by_kind(mesh), layers, strict=True)
        )

    def _tail_bound(self, mesh: ParallelConfig) -> float:
        wish = self.request
        return min(
            tail_bound_s(wish.shape, mesh, machine, zero_options(wish, mesh)) for machine in self._machines
        )

    def _microbatch_times(self, sized_mesh: ParallelConfig) -> list[MicrobatchTime]:
        key = (
            sized_mesh.tp,
            sized_mesh.cp,
            sized_mesh.ulysses_degree,
            sized_mesh.tp_stride,
            sized_mesh.micro_batch,
        )
        if key not in self._microbatch_cache:
            self._microbatch_cache[key] = [
                microbatch_time(self.request.shape, sized_mesh, machine) for machine in self._machines
            ]
        return self._microbatch_cache[key]

    def _pp_ranks_by_kind(self, mesh: ParallelConfig) -> list[int]:
        return [count // (mesh.tp * mesh.data_parallel_size) for count in self._device_counts]

    def _device_kinds(self, sized_mesh: ParallelConfig) -> tuple[DeviceKind, ...]:
        """The kinds with the ranks along pp that each has."""
        ranks, made = self._pp_ranks_by_kind(sized_mesh), self._microbatch_times(sized_mesh)
        each = enumerate(zip(self._machines, ranks, made, strict=True))
        return tuple(
            DeviceKind(machine, sum(ranks[:at]), count, microbatch=known)
            for at, (machine, count, known) in each
        )


def _on_slower_network(kind: Machine, together: Machine) -> Machine:
    """Devices of `kind` among all of them: on the slower network."""
    slower = min(kind.device.nic_rate, together.device.nic_rate)
    return with_nic(replace(kind, num_devices=together.num_devices), slower)


def assign_layers(
    shape: ModelShape, config: ParallelConfig, kinds: Sequence[DeviceKind]
) -> tuple[DeviceKind, ...] | None:
    """`kinds` with the layers of each of their ranks; None where memory does not take all."""
    takes = [_max_layers(shape, config, kind) for kind in kinds]
    if 0 in takes:
        return None
    paces = [_layer_seconds(shape, config, kind) for kind in kinds]
    layers, left = [[1] * kind.num_pp_ranks for kind in kinds], shape.layers - config.pp
    while left > 0:
        free = [at for at in range(len(kinds)) if max(layers[at]) < takes[at]]
        if not free:
            return None
        at = min(free, key=lambda at: (max(layers[at]) + 1) * paces[at])
        more = min(left, kinds[at].num_pp_ranks)  # a last few do not come out even
        layers[at] = [count + (rank < more) for rank, count in enumerate(layers[at])]
        left -= more
    return tuple(replace(kind, layers_by_rank=tuple(each)) for kind, each in zip(kinds, layers, strict=True))


def _max_layers(shape: ModelShape, config: ParallelConfig, kind: DeviceKind) -> int:
    """The most layers that the first rank of a kind takes; 0: none."""
    low, high = 0, shape.layers + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = (
            _fullest_memory(shape, config, replace(kind, layers_by_rank=(middle,))).total
            <= USABLE_MEMORY_FRACTION * kind.machine.device.memory
        )
        low, high = (middle, high) if fits else (low, middle)
    return low


def _fullest_memory(shape: ModelShape, config: ParallelConfig, kind: DeviceKind) -> MemoryEstimate:
    """What the fuller of the first and the last rank of a kind holds, with its layers."""
    even = replace(shape, layers=kind.max_layers * config.pp)
    ends = {kind.first_pp_rank, kind.first_pp_rank + kind.num_pp_ranks - 1}
    return max(
        (held for _, held in memory_by_pp_rank(even, config, pp_ranks=ends)), key=lambda each: each.total
    )


def _layer_seconds(shape: ModelShape, config: ParallelConfig, kind: DeviceKind) -> float:
    """Seconds that a rank of a kind is busy for each of its layers, without embedding and head."""
    less, more = (
        step_time(replace(shape, layers=layers * config.pp), config, kind.machine, kind.microbatch)
        for layers in (1, 2)
    )
    return more.compute + more.tp_comm - less.compute - less.tp_comm


def _candidate(
    shape: ModelShape, config: ParallelConfig, schedule: str, kinds: Sequence[DeviceKind]
) -> Candidate:
    """The step that everybody waits for: computed by the slowest, waited for by the mean."""
    steps = [
        step_time(replace(shape, layers=kind.max_layers * config.pp), config, kind.machine, kind.microbatch)
        for kind in kinds
    ]
    slowest = max(steps, key=lambda each: each.compute + each.tp_comm)
    waiting = (
        sum(kind.num_pp_ranks * each.pipeline_wait for kind, each in zip(kinds, steps, strict=True))
        / config.pp
    )
    taken = replace(
        slowest,
        pipeline_wait=waiting,
        dp_comm=max(each.dp_comm for each in steps),
        optimizer=max(each.optimizer for each in steps),
        fixed=max(each.fixed for each in steps),
    )
    fullest = max(
        kinds, key=lambda kind: _fullest_memory(shape, config, kind).total / kind.machine.device.memory
    )
    dealt = tuple((kind.machine.device.name, layers) for kind in kinds for layers in kind.layers_by_rank)
    return Candidate(config, schedule, taken, _fullest_memory(shape, config, fullest), dealt)
