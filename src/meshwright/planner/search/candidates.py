"""Every layout there is for a wish: what a machine and a shape allow, before anybody asks what is best.

    for every mesh      tp on a host, pp up to the layers, cp where a row is long, dp the rest; who exchanges
                        tokens for heads
    micro-batches       every divisor of a copy's rows
    and what lies over  shares of states 0 .. 3, among all copies or those of some hosts; what is rerun;
                        orders along pp

Of a mesh, what holds least is known without looking at all that lies over it; and more rows at once hold
more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.sharding.mesh import divisors
from meshwright.planner.analytic.memory import MemoryEstimate, estimate_memory
from meshwright.planner.analytic.parallel_config import ParallelConfig, ScheduleProfile
from meshwright.planner.search.request import SearchRequest

VIRTUAL_STAGE_COUNTS = (2, 4, 8)  # of layers per rank along pp, where an order takes any number
NamedSchedule = tuple[str, ScheduleProfile, int]  # an order along pp by its name, with the chunks of a rank
ZERO_GROUP_HOSTS = (1, 4, 16)  # whose copies share states among themselves, where these lie in shards


def candidate_meshes(request: SearchRequest) -> Iterator[ParallelConfig]:
    """Every mesh of the machine's devices on which the shape can be laid, one row at a time."""
    shape, machine = request.shape, request.machine
    tensor = [
        size
        for size in divisors(machine.num_devices)
        if size <= machine.devices_per_host and shape.heads % size == 0
    ]
    stages = [size for size in divisors(machine.num_devices) if size <= shape.layers]
    rows = [
        size
        for size in divisors(machine.num_devices)
        if size == 1 or shape.sequence / size >= max(2, request.min_tokens_per_rank)
    ]
    choices = {"tp": tensor, "pp": stages, "cp": rows}
    lists = [[request.fixed[axis]] if axis in request.fixed else sizes for axis, sizes in choices.items()]
    for tp, pp, cp in product(*lists):
        dp, rest = divmod(machine.num_devices, tp * pp * cp)
        if rest or request.fixed.get("dp", dp) != dp or request.batch % dp or dp > request.batch:
            continue
        if any(size == 1 for axis, size in (("pp", pp), ("cp", cp)) if axis in request.required_axes):
            continue
        if any(each % (tp * pp * cp) for each in request.devices_by_kind):
            continue
        sequence = tp > 1 and shape.sequence % (tp * cp) == 0
        mesh = replace(
            request.base_config,
            dp=dp,
            tp=tp,
            pp=pp,
            cp=cp,
            sequence_parallel=sequence,
            micro_batch=1,
            num_microbatches=request.batch // dp,
        )
        for swaps in _ulysses_degrees(request, mesh):
            yield replace(mesh, ulysses_degree=swaps)


def _ulysses_degrees(request: SearchRequest, mesh: ParallelConfig) -> Iterator[int]:
    """How many ranks along cp may exchange tokens for heads."""
    allowed = {"": range(mesh.cp + 1), "none": (1,), "all": (mesh.cp,), "some": range(2, mesh.cp)}[
        request.head_exchange
    ]
    for size in divisors(mesh.cp):
        if request.shape.heads // mesh.tp % size == 0 and size in allowed:
            yield size


def with_micro_batches(request: SearchRequest, mesh: ParallelConfig) -> Iterator[ParallelConfig]:
    """`mesh` with every number of rows that may go through at once, fewest first."""
    rows = request.batch // mesh.dp
    for each in divisors(rows):
        if request.fixed.get("micro", each) == each and (not request.single_wave or rows // each <= mesh.pp):
            yield replace(mesh, micro_batch=each, num_microbatches=rows // each)


def configs_on_mesh(
    request: SearchRequest,
    sized_mesh: ParallelConfig,
    allowed_schedules: Sequence[NamedSchedule] | None = None,
) -> Iterator[tuple[ParallelConfig, str]]:
    """All that may lie over a mesh with its micro-batches, each with the name of its order; of these the
    `allowed`, or all.
    """
    allowed_schedules = (
        list(valid_schedules(request, sized_mesh)) if allowed_schedules is None else allowed_schedules
    )
    for shards, within in zero_options(request, sized_mesh):
        for reruns in request.recompute_modes:
            base = replace(sized_mesh, zero_stage=shards, zero_group_size=within, recompute=reruns)
            yield from (
                (replace(base, schedule_profile=order, virtual_stages=chunks), schedule)
                for schedule, order, chunks in allowed_schedules
            )


def empty_search_diagnostic(request: SearchRequest) -> Diagnostic | None:
    """Why nothing lies over any mesh of `wish`; None where there is no mesh, or something lies over one."""
    shared, first = False, None
    for mesh in candidate_meshes(request):
        for sized in with_micro_batches(request, mesh):
            if not any(zero_options(request, sized)):
                continue
            shared = True
            if any(configs_on_mesh(request, sized)):
                return None
            for _, order, chunks in all_schedules(request) if sized.pp > 1 else ():
                first = first or next(
                    replace(sized, schedule_profile=order, virtual_stages=chunks).diagnostics(request.shape),
                    None,
                )
    words = [f"{word} {size}" for word, size in request.fixed.items() if word in ("shards", "within")]
    if words and not shared and any(candidate_meshes(request)):
        return Diagnostic(
            f"no copies are left that share states as {', '.join(words)} says", "fix fewer axes, or no shares"
        )
    return first


def zero_options(request: SearchRequest, sized_mesh: ParallelConfig) -> Iterator[tuple[int, int]]:
    """Which states copies share, and among how many of them (0: all)."""
    stages = range(4) if sized_mesh.data_parallel_size > 1 else (0,)
    for shards in stages:
        if request.fixed.get("shards", shards) != shards:
            continue
        if "within" in request.fixed:
            if shards and sized_mesh.dp % request.fixed["within"] == 0:
                yield shards, request.fixed["within"]
            continue
        yield shards, 0
        if shards == 3:
            groups = [
                hosts * request.machine.devices_per_host // (sized_mesh.tp * sized_mesh.cp)
                for hosts in ZERO_GROUP_HOSTS
            ]
            yield from (
                (shards, size) for size in groups if 1 < size < sized_mesh.dp and sized_mesh.dp % size == 0
            )


def valid_schedules(request: SearchRequest, sized_mesh: ParallelConfig) -> Iterator[NamedSchedule]:
    """The orders in which ranks along pp may take turns."""
    if sized_mesh.pp == 1:
        yield "", sized_mesh.schedule_profile, sized_mesh.virtual_stages
        return
    for schedule, order, chunks in all_schedules(request):
        if not any(
            replace(sized_mesh, schedule_profile=order, virtual_stages=chunks).diagnostics(request.shape)
        ):
            yield schedule, order, chunks


def all_schedules(request: SearchRequest) -> Iterator[NamedSchedule]:
    """The orders along pp by name, with the chunks of a rank."""
    fixed = request.fixed.get("chunks", 0)
    for schedule, (order, chunks) in request.schedules.items():
        for each in [chunks] if chunks else [fixed] if fixed else VIRTUAL_STAGE_COUNTS:
            if fixed in (0, each):
                yield schedule, order, each


def leanest_configs(request: SearchRequest, sized_mesh: ParallelConfig) -> Iterator[ParallelConfig]:
    """What holds least over a mesh with its micro-batches, the leanest first; no more than any layout over
    it.
    """
    orders = (
        [order for order, _ in request.schedules.values()]
        if sized_mesh.pp > 1
        else [sized_mesh.schedule_profile]
    )
    order = min(orders, key=lambda order: (order.is_bidirectional, order.in_flight, order.uniform_memory))
    for shards in (3, 2, 1, 0):
        if request.fixed.get("shards", shards) == shards or sized_mesh.data_parallel_size == 1:
            for reruns in reversed(request.recompute_modes):
                yield replace(sized_mesh, zero_stage=shards, recompute=reruns, schedule_profile=order)


def may_fit(request: SearchRequest, sized_mesh: ParallelConfig) -> bool:
    """Whether anything that lies over a mesh with its micro-batches may fit."""
    return any(
        estimate_memory(request.shape, layout).total <= request.usable_memory
        for layout in leanest_configs(request, sized_mesh)
    )


def min_memory_config(
    request: SearchRequest, sized_mesh: ParallelConfig
) -> tuple[ParallelConfig, MemoryEstimate]:
    """Of all that may lie over a mesh with its micro-batches, what holds least."""
    return min(
        ((layout, estimate_memory(request.shape, layout)) for layout in leanest_configs(request, sized_mesh)),
        key=lambda each: each[1].total,
    )
