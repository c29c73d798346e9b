"""Which layout is best: of all there are (planner/choices.py), those that fit, in order of the seconds that a
step takes.

Two bounds keep this short, and neither can lose the best. A mesh of which nothing fits with one row at a time
fits with no more. And no step takes less than what is told of its mesh before anything over it is priced
(planner/least.py): meshes are looked at in that order, best first, so that where one takes more than the
worst that is kept, it is the last one.

Layouts that differ in nothing that anybody would feel (shares of other states, or half the copies of rows cut
twice as often with twice as many at once, in as many seconds and as much memory) are kept once, the plainest
of equals. What a layer takes is counted once for all that lies over a mesh. Layouts are sketched
(planner/sketch.py); the one that is chosen is made a plan, whose program is priced action by action.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from meshwright.planner.analytic.memory import MemoryEstimate, estimate_memory
from meshwright.planner.analytic.parallel_config import ParallelConfig, ScheduleProfile
from meshwright.planner.analytic.step_time import MicrobatchTime, StepTime, microbatch_time, step_time
from meshwright.planner.search.candidates import (
    candidate_meshes,
    configs_on_mesh,
    may_fit,
    min_memory_config,
    valid_schedules,
    with_micro_batches,
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
    """A layout that fits, the name of its order, the seconds of a step and the bytes of the fullest rank.

    `dealt`: where devices are unlike, the kind of device and the layers of each rank along pp.
    """

    config: ParallelConfig
    schedule: str
    step: StepTime
    memory: MemoryEstimate
    layer_assignment: tuple[tuple[str, int], ...] = ()

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.step.seconds

    @property
    def sort_key(self) -> tuple[float, ...]:
        """What candidates are ordered by: of two as fast and as small the one that divides less, whichever
        was found first.
        """
        laid = self.config
        plainest = (
            laid.tp,
            laid.pp,
            laid.cp,
            laid.ulysses_degree,
            laid.micro_batch,
            laid.virtual_stages,
            laid.zero_stage,
            laid.zero_group_size,
        )
        return float(f"{self.seconds:.10g}"), round(self.memory.total), *plainest

    @property
    def display_key(self) -> tuple[object, ...]:
        """What anybody sees of it: two that are alike in this are shown once."""
        laid = self.config
        # fewer copies of rows cut finer, with as many more rows at once: a rank has the same tokens and
        # shares
        alike = replace(
            laid,
            zero_stage=0,
            zero_group_size=0,
            dp=laid.data_parallel_size,
            cp=1,
            micro_batch=laid.micro_batch / laid.cp,
        )
        return (
            alike,
            self.schedule,
            self.layer_assignment,
            f"{self.seconds:.3g}",
            f"{self.memory.total / 2**30:.1f}",
        )


@dataclass(frozen=True)
class SearchResult:
    """The best candidates, the best one first; how many layouts were `seen`, and of those that do not fit the
    `nearest`.
    """

    best: tuple[Candidate, ...]
    num_priced: int
    nearest_miss: tuple[ParallelConfig, MemoryEstimate] | None


class TopCandidates:
    """The `keep` best candidates so far that take no more than `below` seconds, of those that are alike the
    first.
    """

    def __init__(self, capacity: int, max_seconds: float = inf) -> None:
        self.capacity, self.max_seconds = capacity, max_seconds
        self.candidates: list[Candidate] = []

    @property
    def cutoff_s(self) -> float:
        """Seconds that a candidate may take at most."""
        return self.candidates[-1].seconds if len(self.candidates) == self.capacity else self.max_seconds

    def add(self, candidate: Candidate) -> None:
        """Keep it, where it is one of the best."""
        twin = next((each for each in self.candidates if each.display_key == candidate.display_key), None)
        if twin is not None and twin.sort_key <= candidate.sort_key:
            return
        if twin is not None:
            self.candidates.remove(twin)
        insort(self.candidates, candidate, key=lambda each: each.sort_key)
        del self.candidates[self.capacity :]


class ConfigPricer(Protocol):
    """What layouts are priced on: one kind of device here, several in planner/unlike.py."""

    def mesh_bound_s(self, mesh: ParallelConfig) -> float:
        """Seconds that a step of any layout over `mesh` takes at least."""

    def may_fit(self, sized_mesh: ParallelConfig) -> bool:
        """Whether anything that lies over a mesh with its micro-batches may fit; if not, nothing with more
        rows at once does.
        """

    def bound_s(self, sized_mesh: ParallelConfig) -> float:
        """Seconds that a step of any layout over a mesh with its micro-batches takes at least."""

    def price(self, sized_mesh: ParallelConfig, top: TopCandidates, max_seconds: float) -> int:
        """Show `best` all that lies over a mesh with its micro-batches and may take `below` seconds; how many
        these were.
        """


def search(
    request: SearchRequest, num_kept: int = 10, *, prune: bool = True, max_seconds: float = inf
) -> SearchResult:
    """The `keep` best layouts of `wish`, none that takes more than `below` seconds.

    Without `prune` all are priced: the same.
    """
    best, laid = TopCandidates(num_kept, max_seconds), list(candidate_meshes(request))
    seen = price_meshes(request, laid, HomogeneousPricer(request), best, prune=prune)
    if best.candidates or max_seconds < inf:
        return SearchResult(tuple(best.candidates), seen, None)
    nearest = [
        each
        for each in (min_memory_config(request, mesh) for mesh in laid)
        if each[1].total > request.usable_memory
    ]
    return SearchResult((), seen, min(nearest, key=lambda each: each[1].total, default=None))


def price_meshes(
    request: SearchRequest,
    meshes: Iterable[ParallelConfig],
    pricer: ConfigPricer,
    top: TopCandidates,
    *,
    prune: bool = True,
) -> int:
    """Show `best` all over the meshes `laid` that may be among the best, those first that may be fastest; how
    many these were.
    """
    seen = 0
    if not prune:
        return sum(
            pricer.price(sized, top, inf) for mesh in meshes for sized in with_micro_batches(request, mesh)
        )
    for floor, mesh in sorted(
        ((pricer.mesh_bound_s(mesh), mesh) for mesh in meshes), key=lambda each: each[0]
    ):
        if floor > top.cutoff_s:
            break
        sizes = list(with_micro_batches(request, mesh))
        fitting = sizes[: bisect_left(sizes, True, key=lambda sized: not pricer.may_fit(sized))]
        for least, sized in sorted(
            ((pricer.bound_s(sized), sized) for sized in fitting), key=lambda each: each[0]
        ):
            if least > top.cutoff_s:
                break
            seen += pricer.price(sized, top, top.cutoff_s)
    return seen


class HomogeneousPricer:
    """Devices of one kind."""

    def __init__(self, request: SearchRequest) -> None:
        self._request = request
        self._schedule_profiles = [order for order, _ in request.schedules.values()]
        self._sample_bounds, self._microbatch_times = (
            dict[tuple[float, ...], SampleBound](),
            dict[tuple[float, ...], MicrobatchTime](),
        )
        self._tail_bounds = dict[tuple[int, ...], float]()

    def mesh_bound_s(self, mesh: ParallelConfig) -> float:
        """Its rows, and what comes behind them."""
        wish, key = self._request, (mesh.tp, mesh.cp, mesh.ulysses_degree, mesh.tp_stride)
        if key not in self._sample_bounds:
            self._sample_bounds[key] = sample_bound(wish.shape, mesh, wish.machine)
        row = self._sample_bounds[key]
        most = end_bound_s(mesh, self._schedule_profiles, row.embedding, row.head)
        return SAFETY_FACTOR * (
            mesh.num_microbatches * slowest_rank_s(wish.shape, mesh, row.layer, most) + self._tail_bound(mesh)
        )

    def may_fit(self, sized_mesh: ParallelConfig) -> bool:
        """Whether the leanest does."""
        return may_fit(self._request, sized_mesh)

    def bound_s(self, sized_mesh: ParallelConfig) -> float:
        """Its layers, and the order in which ranks along pp wait least."""
        return min(
            (
                self.schedule_bound_s(sized_mesh, order, chunks)
                for _, order, chunks in valid_schedules(self._request, sized_mesh)
            ),
            default=inf,
        )

    def schedule_bound_s(self, sized_mesh: ParallelConfig, profile: ScheduleProfile, chunks: int) -> float:
        """Seconds that a step takes at least in which ranks along pp take turns in this `order`."""
        shape, machine, made = self._request.shape, self._request.machine, self._microbatch_time(sized_mesh)
        one = layer_time(sized_mesh, machine, made)
        most = end_bound_s(sized_mesh, (profile,), made.embedding.total, made.head.total)
        found = sized_mesh.num_microbatches * slowest_rank_s(
            shape, sized_mesh, one.total, most
        ) + self._tail_bound(sized_mesh)
        if sized_mesh.pp > 1:
            share = sized_mesh.max_layers_per_rank(shape) * sized_mesh.pp / shape.layers
            found += pipeline_wait_bound_s(
                sized_mesh, profile, chunks, stage_time(shape, sized_mesh, one), share
            ) + boundary_transfer_s(shape, sized_mesh, machine, chunks)
        return SAFETY_FACTOR * found

    def price(self, sized_mesh: ParallelConfig, top: TopCandidates, max_seconds: float) -> int:
        """Step and memory of each."""
        wish, made, seen = self._request, self._microbatch_time(sized_mesh), 0
        allowed = [
            turn
            for turn in valid_schedules(wish, sized_mesh)
            if self.schedule_bound_s(sized_mesh, *turn[1:]) <= max_seconds
        ]
        for layout, schedule in configs_on_mesh(wish, sized_mesh, allowed):
            seen += 1
            taken = step_time(wish.shape, layout, wish.machine, made)
            if taken.seconds > top.cutoff_s:
                continue
            held = estimate_memory(wish.shape, layout)
            if held.total <= wish.usable_memory:
                top.add(Candidate(layout, schedule, taken, held))
        return seen

    def _microbatch_time(self, sized_mesh: ParallelConfig) -> MicrobatchTime:
        key = (
            sized_mesh.tp,
            sized_mesh.cp,
            sized_mesh.ulysses_degree,
            sized_mesh.tp_stride,
            sized_mesh.micro_batch,
        )
        if key not in self._microbatch_times:
            self._microbatch_times[key] = microbatch_time(
                self._request.shape, sized_mesh, self._request.machine
            )
        return self._microbatch_times[key]

    def _tail_bound(self, mesh: ParallelConfig) -> float:
        key = mesh.tp, mesh.pp, mesh.cp, mesh.dp
        if key not in self._tail_bounds:
            wish = self._request
            self._tail_bounds[key] = tail_bound_s(wish.shape, mesh, wish.machine, zero_options(wish, mesh))
        return self._tail_bounds[key]
