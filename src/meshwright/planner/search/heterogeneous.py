"""Searches configurations on devices of several kinds, so that fast ones wait little for slow ones.

    data parallel    each replica on devices of one kind, all with as many samples: every replica waits for
                     the slowest, and the smallest memory counts
    pipeline         each pp rank on devices of one kind; layers are assigned by speed, as far as memory
                     allows. Kinds with more memory come first, where most microbatches are in flight
    one kind         only one kind is used: the reference for the two above

No tensor or context parallel group mixes kinds. Between hosts the slower network card counts.

    layers of a rank = argmin max_k l_k t_k,   sum_k n_k l_k = L,   l_k at most what fits on kind k

t_k is the time of a layer and microbatch on kind k, n_k the number of its pp ranks. Layers are assigned one
by one to the kind that would finish first with one more, which is optimal for equal layers. The pipeline wait
is that of equal ranks, averaged over the kinds.

Limits: replicas on different kinds have as many samples each; folded and bidirectional schedules are not
used on different kinds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from meshwright.planner.analytic.closed_form_memory import MemoryEstimate, memory_by_pp_rank
from meshwright.planner.analytic.closed_form_step_time import MicrobatchTime, microbatch_time, step_time
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ParallelConfig, ScheduleProfile
from meshwright.planner.machine.machine import Machine, with_nic
from meshwright.planner.search.candidates import (
    candidate_meshes,
    configs_on_mesh,
    low_memory_configs,
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
from meshwright.planner.search.search import Candidate, SearchResult, TopCandidates, estimate_meshes, search


@dataclass(frozen=True)
class DeviceKind:
    """The devices of one kind and its pp ranks: the first, their number, and the layers of each.

    `microbatch`: the time of a microbatch on it, if already known.
    """

    machine: Machine
    first_pp_rank: int
    num_pp_ranks: int
    layers_by_rank: tuple[int, ...] = ()
    microbatch: MicrobatchTime | None = None

    @property
    def max_layers(self) -> int:
        """The layers of the rank that has most."""
        return max(self.layers_by_rank)


def slowest_rates_machine(machines: Sequence[Machine]) -> Machine:
    """Returns all devices as if each had the slowest rates of all kinds: replicas that wait for each other
    run at that speed.
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
    """Returns the best configurations on all of `machines`; `request` has everything but the devices.

    Without `prune` all configurations are estimated, with the same result.
    """
    combined = replace(
        request,
        machine=slowest_rates_machine(machines),
        devices_by_kind=tuple(each.num_devices for each in machines),
    )
    found = search(combined, num_kept, prune=prune)
    top = TopCandidates(num_kept)
    for each in found.best:
        top.add(each)
    estimator = HeterogeneousEstimator(combined, machines)
    num_estimated = found.num_estimated + estimate_meshes(
        estimator.request, estimator.meshes(), estimator, top, prune=prune
    )
    return SearchResult(tuple(top.candidates), num_estimated, None if top.candidates else found.nearest_miss)


def search_each_kind(
    request: SearchRequest, machines: Sequence[Machine]
) -> Iterator[tuple[Machine, Candidate | None]]:
    """Yields each kind with the best configuration on it alone; None if nothing fits."""
    for each in machines:
        fixed = {axis: size for axis, size in request.fixed.items() if axis != "dp"}
        found = search(replace(request, machine=each, fixed=fixed), 1)
        yield each, next(iter(found.best), None)


class HeterogeneousEstimator:
    """Evaluates pipelines over several kinds of devices, those with most memory first."""

    def __init__(self, request: SearchRequest, machines: Sequence[Machine]) -> None:
        schedules = {
            name: each
            for name, each in request.schedules.items()
            if each[1] == 1 and not (each[0].is_folded or each[0].is_bidirectional)
        }
        self.request = replace(
            request, devices_by_kind=(), required_axes=(*request.required_axes, "pp"), schedules=schedules
        )
        by_memory = sorted(machines, key=lambda each: -each.device.memory)
        self._device_counts = [each.num_devices for each in by_memory]
        self._machines = [_on_slower_network(each, request.machine) for each in by_memory]
        self._sample_bounds, self._microbatch_cache = (
            dict[tuple[float, ...], list[SampleBound]](),
            dict[tuple[float, ...], list[MicrobatchTime]](),
        )

    def meshes(self) -> Iterator[ParallelConfig]:
        """Yields the meshes on which only pp groups mix kinds."""
        for mesh in candidate_meshes(self.request) if self.request.schedules else ():
            if not any(count % (mesh.tp * mesh.data_parallel_size) for count in self._device_counts):
                yield mesh

    def mesh_bound_s(self, mesh: ParallelConfig) -> float:
        """Returns a lower bound on the step time, with layers split into fractions."""
        key = mesh.layer_key
        if key not in self._sample_bounds:
            self._sample_bounds[key] = [
                sample_bound(self.request.shape, mesh, machine) for machine in self._machines
            ]
        samples = self._sample_bounds[key]
        end_s = min(max(sample.embedding, sample.head) for sample in samples)
        return SAFETY_FACTOR * (
            mesh.num_microbatches
            * (self._balanced_seconds(mesh, [sample.layer for sample in samples]) + end_s)
            + self._tail_bound(mesh)
        )

    def may_fit(self, sized_mesh: ParallelConfig) -> bool:
        """Returns whether all kinds together hold all layers, with least memory per layer."""
        kinds, shape = self._device_kinds(sized_mesh), self.request.shape
        for config in low_memory_configs(self.request, sized_mesh):
            capacities = [_max_layers(shape, config, kind) for kind in kinds]
            if (
                all(capacities)
                and sum(
                    capacity * kind.num_pp_ranks for capacity, kind in zip(capacities, kinds, strict=True)
                )
                >= shape.layers
            ):
                return True
        return False

    def bound_s(self, sized_mesh: ParallelConfig) -> float:
        """Returns the lower bound of the schedule with the least wait."""
        return min(
            (
                self.schedule_bound_s(sized_mesh, profile, virtual_stages)
                for _, profile, virtual_stages in valid_schedules(self.request, sized_mesh)
            ),
            default=inf,
        )

    def estimate(self, sized_mesh: ParallelConfig, top: TopCandidates, max_seconds: float) -> int:
        """Assigns layers and adds the configurations to `top`; returns how many were estimated."""
        num_estimated, kinds = 0, self._device_kinds(sized_mesh)
        allowed_schedules = [
            named_schedule
            for named_schedule in valid_schedules(self.request, sized_mesh)
            if self.schedule_bound_s(sized_mesh, *named_schedule[1:]) <= max_seconds
        ]
        for config, schedule in configs_on_mesh(self.request, sized_mesh, allowed_schedules):
            num_estimated += 1
            assigned = assign_layers(self.request.shape, config, kinds)
            candidate = (
                None if assigned is None else _candidate(self.request.shape, config, schedule, assigned)
            )
            if candidate is not None and candidate.seconds <= top.cutoff_s:
                top.add(candidate)
        return num_estimated

    def schedule_bound_s(
        self, sized_mesh: ParallelConfig, profile: ScheduleProfile, virtual_stages: int
    ) -> float:
        """Returns a lower bound on the step time of a mesh under one schedule."""
        shape, microbatches, ranks = (
            self.request.shape,
            self._microbatch_times(sized_mesh),
            self._pp_ranks_by_kind(sized_mesh),
        )
        layers = [
            layer_time(sized_mesh, machine, each)
            for machine, each in zip(self._machines, microbatches, strict=True)
        ]
        bound = sized_mesh.num_microbatches * self._balanced_seconds(
            sized_mesh, [each.total for each in layers]
        )
        bound += sized_mesh.num_microbatches * min(
            max(each.embedding.total, each.head.total) for each in microbatches
        ) + self._tail_bound(sized_mesh)
        wait_per_layer = min(
            pipeline_wait_bound_s(sized_mesh, profile, virtual_stages, each) for each in layers
        )  # for each layer of a rank
        bound += wait_per_layer * shape.layers / sized_mesh.pp
        transfer_s = [
            boundary_transfer_s(shape, sized_mesh, machine, virtual_stages) for machine in self._machines
        ]
        return SAFETY_FACTOR * (
            bound + sum(count * each for count, each in zip(ranks, transfer_s, strict=True)) / sized_mesh.pp
        )

    def _balanced_seconds(self, mesh: ParallelConfig, layers: Sequence[float]) -> float:
        return self.request.shape.layers / sum(
            count / each for count, each in zip(self._pp_ranks_by_kind(mesh), layers, strict=True)
        )

    def _tail_bound(self, mesh: ParallelConfig) -> float:
        request = self.request
        return min(
            tail_bound_s(request.shape, mesh, machine, zero_options(request, mesh))
            for machine in self._machines
        )

    def _microbatch_times(self, sized_mesh: ParallelConfig) -> list[MicrobatchTime]:
        key = (*sized_mesh.layer_key, sized_mesh.micro_batch)
        if key not in self._microbatch_cache:
            self._microbatch_cache[key] = [
                microbatch_time(self.request.shape, sized_mesh, machine) for machine in self._machines
            ]
        return self._microbatch_cache[key]

    def _pp_ranks_by_kind(self, mesh: ParallelConfig) -> list[int]:
        return [count // (mesh.tp * mesh.data_parallel_size) for count in self._device_counts]

    def _device_kinds(self, sized_mesh: ParallelConfig) -> tuple[DeviceKind, ...]:
        ranks, microbatches = self._pp_ranks_by_kind(sized_mesh), self._microbatch_times(sized_mesh)
        each = enumerate(zip(self._machines, ranks, microbatches, strict=True))
        return tuple(
            DeviceKind(machine, sum(ranks[:index]), count, microbatch=microbatch)
            for index, (machine, count, microbatch) in each
        )


def _on_slower_network(kind: Machine, combined: Machine) -> Machine:
    slower = min(kind.device.nic_rate, combined.device.nic_rate)
    return with_nic(replace(kind, num_devices=combined.num_devices), slower)


def assign_layers(
    shape: ModelShape, config: ParallelConfig, kinds: Sequence[DeviceKind]
) -> tuple[DeviceKind, ...] | None:
    """Returns `kinds` with the layers of each of their ranks; None if they do not fit."""
    capacities = [_max_layers(shape, config, kind) for kind in kinds]
    if 0 in capacities:
        return None
    layer_seconds = [_layer_seconds(shape, config, kind) for kind in kinds]
    layers, num_left = [[1] * kind.num_pp_ranks for kind in kinds], shape.layers - config.pp
    while num_left > 0:
        with_space = [index for index in range(len(kinds)) if max(layers[index]) < capacities[index]]
        if not with_space:
            return None
        index = min(with_space, key=lambda index: (max(layers[index]) + 1) * layer_seconds[index])
        num_added = min(num_left, kinds[index].num_pp_ranks)  # a last few do not come out even
        layers[index] = [count + (rank < num_added) for rank, count in enumerate(layers[index])]
        num_left -= num_added
    return tuple(replace(kind, layers_by_rank=tuple(each)) for kind, each in zip(kinds, layers, strict=True))


def _max_layers(shape: ModelShape, config: ParallelConfig, kind: DeviceKind) -> int:
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
    equal_stages = replace(shape, layers=kind.max_layers * config.pp)
    ends = {kind.first_pp_rank, kind.first_pp_rank + kind.num_pp_ranks - 1}
    return max(
        (memory for _, memory in memory_by_pp_rank(equal_stages, config, pp_ranks=ends)),
        key=lambda each: each.total,
    )


def _layer_seconds(shape: ModelShape, config: ParallelConfig, kind: DeviceKind) -> float:
    one_layer, two_layers = (
        step_time(replace(shape, layers=layers * config.pp), config, kind.machine, kind.microbatch)
        for layers in (1, 2)
    )
    return two_layers.compute + two_layers.tp_comm - one_layer.compute - one_layer.tp_comm


def _candidate(
    shape: ModelShape, config: ParallelConfig, schedule: str, kinds: Sequence[DeviceKind]
) -> Candidate:
    steps = [
        step_time(replace(shape, layers=kind.max_layers * config.pp), config, kind.machine, kind.microbatch)
        for kind in kinds
    ]
    slowest = max(steps, key=lambda each: each.compute + each.tp_comm)
    wait_s = (
        sum(kind.num_pp_ranks * each.pipeline_wait for kind, each in zip(kinds, steps, strict=True))
        / config.pp
    )
    step = replace(
        slowest,
        pipeline_wait=wait_s,
        dp_comm=max(each.dp_comm for each in steps),
        optimizer=max(each.optimizer for each in steps),
        fixed=max(each.fixed for each in steps),
    )
    fullest = max(
        kinds, key=lambda kind: _fullest_memory(shape, config, kind).total / kind.machine.device.memory
    )
    layer_assignment = tuple(
        (kind.machine.device.name, layers) for kind in kinds for layers in kind.layers_by_rank
    )
    return Candidate(config, schedule, step, _fullest_memory(shape, config, fullest), layer_assignment)
