"""Searches for the fastest parallel configurations that fit into memory.

Two bounds shorten the search without losing the best. If nothing on a mesh fits with one sample per
microbatch, nothing fits with more. And each mesh has a lower bound on its step time (lower_bounds.py): meshes
are evaluated in ascending order of their bounds, until a bound exceeds the slowest configuration kept.

Configurations with the same time and memory that differ only in the ZeRO stage, or in cp against
microbatches of equal tokens, are shown once, as the simplest of them. The time of a layer is computed once
per mesh. Configurations are evaluated in closed form (planner/analytic); the chosen one becomes a plan, whose
program is estimated action by action.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from meshwright.planner.analytic.closed_form_memory import MemoryEstimate, estimate_memory
from meshwright.planner.analytic.closed_form_step_time import (
    MicrobatchTime,
    StepTime,
    microbatch_time,
    step_time,
)
from meshwright.planner.analytic.parallel_config import OFFLOAD_MODES, ParallelConfig, ScheduleProfile
from meshwright.planner.search.candidates import (
    candidate_meshes,
    configs_on_mesh,
    may_fit,
    min_memory_config,
    valid_schedules,
    with_microbatch_sizes,
    zero_options,
)
from meshwright.planner.search.lower_bounds import (
    SAFETY_FACTOR,
    SampleBound,
    boundary_transfer_s,
    end_bound_s,
    layer_time,
    pipeline_wait_bound_s,
    sample_bound,
    slowest_rank_s,
    stage_time,
    tail_bound_s,
)
from meshwright.planner.search.request import SearchRequest


@dataclass(frozen=True)
class Candidate:
    """A configuration that fits, its schedule, the time of a step and the memory of the fullest rank.

    `layer_assignment`: on devices of several kinds, the kind and the number of layers of each pp rank.
    """

    config: ParallelConfig
    schedule: str
    step: StepTime
    memory: MemoryEstimate
    layer_assignment: tuple[tuple[str, int], ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.step.seconds

    @property
    def sort_key(self) -> tuple[float | str, ...]:
        """The key of the ranking: time, then memory, then the simpler configuration."""
        config = self.config
        simplicity = (
            config.tp,
            config.pp,
            config.cp,
            config.ulysses_degree,
            config.ep,
            config.expert_tp,
            config.micro_batch,
            config.virtual_stages,
            config.zero_stage,
            config.zero_group_size,
            OFFLOAD_MODES.index(config.offload),
            config.activation_offload,
            config.compress,
        )
        return float(f"{self.seconds:.10g}"), round(self.memory.total), *simplicity

    @property
    def display_key(self) -> tuple[object, ...]:
        """The key of what a user sees: of candidates with equal keys, one is shown."""
        config = self.config
        # more cp and as many more samples per microbatch: a rank has the same tokens and shards
        config_key = replace(
            config,
            zero_stage=0,
            zero_group_size=0,
            dp=config.data_parallel_size,
            cp=1,
            micro_batch=config.micro_batch / config.cp,
        )
        return (
            config_key,
            self.schedule,
            self.layer_assignment,
            f"{self.seconds:.3g}",
            f"{self.memory.total / 2**30:.1f}",
        )


@dataclass(frozen=True)
class SearchResult:
    """The best candidates, the fastest first, and the number of configurations that were estimated.

    `nearest_miss`: if nothing fits, the configuration that needs least memory.
    """

    best: tuple[Candidate, ...]
    num_estimated: int
    nearest_miss: tuple[ParallelConfig, MemoryEstimate] | None


class TopCandidates:
    """Keeps the `capacity` best candidates that take at most `max_seconds`.

    Of candidates with the same `display_key` it keeps the best.
    """

    def __init__(self, capacity: int, max_seconds: float = inf) -> None:
        self.capacity, self.max_seconds = capacity, max_seconds
        self.candidates: list[Candidate] = []

    @property
    def cutoff_s(self) -> float:
        """The seconds above which a candidate is not kept."""
        return self.candidates[-1].seconds if len(self.candidates) == self.capacity else self.max_seconds

    def add(self, candidate: Candidate) -> None:
        """Keeps `candidate` if it is among the best."""
        same_display = next(
            (each for each in self.candidates if each.display_key == candidate.display_key), None
        )
        if same_display is not None and same_display.sort_key <= candidate.sort_key:
            return
        if same_display is not None:
            self.candidates.remove(same_display)
        insort(self.candidates, candidate, key=lambda each: each.sort_key)
        del self.candidates[self.capacity :]


class ConfigEstimator(Protocol):
    """Bounds and evaluates configurations: on one kind of device, or on several (heterogeneous.py)."""

    def mesh_bound_s(self, mesh: ParallelConfig) -> float:
        """Returns a lower bound on the step time of all configurations on `mesh`."""

    def may_fit(self, sized_mesh: ParallelConfig) -> bool:
        """Returns whether any configuration of a mesh with its microbatches may fit.

        If none does, none fits with larger microbatches.
        """

    def bound_s(self, sized_mesh: ParallelConfig) -> float:
        """Returns a lower bound on the step time of a mesh with its microbatches."""

    def estimate(self, sized_mesh: ParallelConfig, top: TopCandidates, max_seconds: float) -> int:
        """Adds the configurations of a mesh with its microbatches to `top`; returns how many were estimated.

        Schedules whose bound is above `max_seconds` are skipped.
        """


def search(
    request: SearchRequest, num_kept: int = 10, *, prune: bool = True, max_seconds: float = inf
) -> SearchResult:
    """Returns the `num_kept` best configurations of `request`, none slower than `max_seconds`.

    Without `prune` all configurations are estimated, with the same result.
    """
    top, meshes = TopCandidates(num_kept, max_seconds), list(candidate_meshes(request))
    num_estimated = estimate_meshes(request, meshes, HomogeneousEstimator(request), top, prune=prune)
    if top.candidates or max_seconds < inf:
        return SearchResult(tuple(top.candidates), num_estimated, None)
    misses = [
        each for each in (min_memory_config(request, mesh) for mesh in meshes) if not request.fits(*each)
    ]
    return SearchResult((), num_estimated, min(misses, key=lambda each: each[1].total, default=None))


def estimate_meshes(
    request: SearchRequest,
    meshes: Iterable[ParallelConfig],
    estimator: ConfigEstimator,
    top: TopCandidates,
    *,
    prune: bool = True,
) -> int:
    """Adds to `top` all configurations of `meshes` that may be among the best; returns the number estimated.

    The meshes with the lowest bounds come first.
    """
    num_estimated = 0
    if not prune:
        return sum(
            estimator.estimate(sized, top, inf)
            for mesh in meshes
            for sized in with_microbatch_sizes(request, mesh)
        )
    for mesh_bound, mesh in sorted(
        ((estimator.mesh_bound_s(mesh), mesh) for mesh in meshes), key=lambda each: each[0]
    ):
        if mesh_bound > top.cutoff_s:
            break
        sizes = list(with_microbatch_sizes(request, mesh))
        fitting = sizes[: bisect_left(sizes, True, key=lambda sized: not estimator.may_fit(sized))]
        for bound, sized in sorted(
            ((estimator.bound_s(sized), sized) for sized in fitting), key=lambda each: each[0]
        ):
            if bound > top.cutoff_s:
                break
            num_estimated += estimator.estimate(sized, top, top.cutoff_s)
    return num_estimated


class HomogeneousEstimator:
    """Evaluates configurations on devices of one kind."""

    def __init__(self, request: SearchRequest) -> None:
        self._request = request
        self._schedule_profiles = [profile for profile, _ in request.schedules.values()]
        self._sample_bounds, self._microbatch_times = (
            dict[tuple[float, ...], SampleBound](),
            dict[tuple[float, ...], MicrobatchTime](),
        )
        self._tail_bounds = dict[tuple[int, ...], float]()

    def mesh_bound_s(self, mesh: ParallelConfig) -> float:
        """Returns a lower bound on the step time of all configurations on `mesh`."""
        request, key = self._request, mesh.layer_key
        if key not in self._sample_bounds:
            self._sample_bounds[key] = sample_bound(request.shape, mesh, request.machine)
        sample = self._sample_bounds[key]
        end_s = end_bound_s(mesh, self._schedule_profiles, sample.embedding, sample.head)
        return SAFETY_FACTOR * (
            mesh.num_microbatches * slowest_rank_s(request.shape, mesh, sample.layer, end_s)
            + self._tail_bound(mesh)
        )

    def may_fit(self, sized_mesh: ParallelConfig) -> bool:
        """Returns whether the configuration with least memory fits."""
        return may_fit(self._request, sized_mesh)

    def bound_s(self, sized_mesh: ParallelConfig) -> float:
        """Returns the lower bound of the schedule with the least wait."""
        return min(
            (
                self.schedule_bound_s(sized_mesh, profile, virtual_stages)
                for _, profile, virtual_stages in valid_schedules(self._request, sized_mesh)
            ),
            default=inf,
        )

    def schedule_bound_s(
        self, sized_mesh: ParallelConfig, profile: ScheduleProfile, virtual_stages: int
    ) -> float:
        """Returns a lower bound on the step time of a mesh under one schedule."""
        shape, machine, microbatch = (
            self._request.shape,
            self._request.machine,
            self._microbatch_time(sized_mesh),
        )
        layer = layer_time(sized_mesh, machine, microbatch)
        end_s = end_bound_s(sized_mesh, (profile,), microbatch.embedding.total, microbatch.head.total)
        bound = sized_mesh.num_microbatches * slowest_rank_s(
            shape, sized_mesh, layer.total, end_s
        ) + self._tail_bound(sized_mesh)
        if sized_mesh.pp > 1:
            load_ratio = sized_mesh.max_layers_per_rank(shape) * sized_mesh.pp / shape.layers
            bound += pipeline_wait_bound_s(
                sized_mesh, profile, virtual_stages, stage_time(shape, sized_mesh, layer), load_ratio
            ) + boundary_transfer_s(shape, sized_mesh, machine, virtual_stages)
        return SAFETY_FACTOR * bound

    def estimate(self, sized_mesh: ParallelConfig, top: TopCandidates, max_seconds: float) -> int:
        """Adds the configurations of a mesh to `top`; returns how many were estimated."""
        request, microbatch, num_estimated = self._request, self._microbatch_time(sized_mesh), 0
        allowed_schedules = [
            named_schedule
            for named_schedule in valid_schedules(request, sized_mesh)
            if self.schedule_bound_s(sized_mesh, *named_schedule[1:]) <= max_seconds
        ]
        for config, schedule in configs_on_mesh(request, sized_mesh, allowed_schedules):
            num_estimated += 1
            step = step_time(request.shape, config, request.machine, microbatch)
            if step.seconds > top.cutoff_s:
                continue
            memory = estimate_memory(request.shape, config)
            if request.fits(config, memory):
                top.add(Candidate(config, schedule, step, memory))
        return num_estimated

    def _microbatch_time(self, sized_mesh: ParallelConfig) -> MicrobatchTime:
        key = (*sized_mesh.layer_key, sized_mesh.micro_batch)
        if key not in self._microbatch_times:
            self._microbatch_times[key] = microbatch_time(
                self._request.shape, sized_mesh, self._request.machine
            )
        return self._microbatch_times[key]

    def _tail_bound(self, mesh: ParallelConfig) -> float:
        key = mesh.tp, mesh.pp, mesh.cp, mesh.dp, mesh.ep, mesh.ep_tp, mesh.expert_tp
        if key not in self._tail_bounds:
            request = self._request
            self._tail_bounds[key] = tail_bound_s(
                request.shape,
                mesh,
                request.machine,
                zero_options(request, mesh),
                request.offload_modes,
                request.codecs,
            )
        return self._tail_bounds[key]
