"""Enumerates the parallel configurations that a request allows.

    meshes           tp on one host, pp up to the number of layers, cp for long sequences, dp the rest; the
                     number of cp ranks that exchange tokens for heads; the dp ranks with different experts,
                     which cp ranks join where dp has no such divisor; tp ranks with all experts, with
                     different ones, or with slices of each
    microbatches     every divisor of the samples of a replica
    on each mesh     ZeRO stages 0 to 3, over all replicas or over those of some hosts; recomputation;
                     pipeline schedules; where it is asked for, model states in host memory or on disk, and
                     activations in host memory; where it is allowed, gradients summed as codes

The least memory of a mesh is known without enumerating its configurations, and larger microbatches need
more memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.sharding.mesh import divisors
from meshwright.planner.analytic.closed_form_memory import MemoryEstimate, estimate_memory
from meshwright.planner.analytic.compression_cost import is_codable
from meshwright.planner.analytic.offload_cost import LEAST_ZERO_STAGE, is_possible
from meshwright.planner.analytic.parallel_config import ParallelConfig, ScheduleProfile
from meshwright.planner.search.request import SearchRequest

VIRTUAL_STAGE_COUNTS = (2, 4, 8)  # for a schedule that takes any number
NamedSchedule = tuple[str, ScheduleProfile, int]  # name, profile, virtual stages per rank
ZERO_GROUP_HOSTS = (1, 4, 16)  # the hosts of a ZeRO group


def candidate_meshes(request: SearchRequest) -> Iterator[ParallelConfig]:
    """Yields every mesh of the machine's devices that the shape allows, with one sample per microbatch."""
    shape, machine = request.shape, request.machine
    tensor = [
        size
        for size in divisors(machine.num_devices)
        if size <= machine.devices_per_host and shape.heads % size == 0
    ]
    stages = [size for size in divisors(machine.num_devices) if size <= shape.layers]
    context = [
        size
        for size in divisors(machine.num_devices)
        if size == 1 or shape.sequence / size >= max(2, request.min_tokens_per_rank)
    ]
    choices = {"tp": tensor, "pp": stages, "cp": context}
    size_lists = [
        [request.fixed[axis]] if axis in request.fixed else sizes for axis, sizes in choices.items()
    ]
    for tp, pp, cp in product(*size_lists):
        dp, rest = divmod(machine.num_devices, tp * pp * cp)
        if rest or request.fixed.get("dp", dp) != dp or request.batch % dp or dp > request.batch:
            continue
        if any(size == 1 for axis, size in (("pp", pp), ("cp", cp)) if axis in request.required_axes):
            continue
        if any(each % (tp * pp * cp) for each in request.devices_by_kind):
            continue
        # refused beside ep, and whole experts compute every token of a tensor rank
        sequence_parallel = tp > 1 and shape.sequence % (tp * cp) == 0 and not shape.experts
        mesh = replace(
            request.base_config,
            dp=dp,
            tp=tp,
            pp=pp,
            cp=cp,
            sequence_parallel=sequence_parallel,
            micro_batch=1,
            num_microbatches=request.batch // dp,
        )
        for ulysses_degree, each in product(_ulysses_degrees(request, mesh), _with_experts(request, mesh)):
            yield replace(each, ulysses_degree=ulysses_degree)


def _with_experts(request: SearchRequest, mesh: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yields `mesh` with each number of ranks with different experts, and of what tensor ranks have."""
    shape, fixed = request.shape, request.fixed
    dispatch = sorted({size * more for size in divisors(mesh.dp) for more in (1, mesh.cp)})
    along_tp = [(1, 1), (mesh.tp, 1), (1, mesh.tp)] if mesh.tp > 1 else [(1, 1)]
    for size, (ep_tp, expert_tp) in product(dispatch, along_tp) if shape.experts else [(1, (1, 1))]:
        ep = size * ep_tp
        fits = ep <= max(1, shape.experts) and (expert_tp == 1 or shape.expert_ffn_dim >= 8 * expert_tp)
        if fits and (fixed.get("ep", ep), fixed.get("expert_tp", expert_tp)) == (ep, expert_tp):
            yield replace(mesh, ep=ep, ep_tp=ep_tp, expert_tp=expert_tp)


def _ulysses_degrees(request: SearchRequest, mesh: ParallelConfig) -> Iterator[int]:
    allowed = {"": range(mesh.cp + 1), "none": (1,), "all": (mesh.cp,), "some": range(2, mesh.cp)}[
        request.head_exchange
    ]
    for size in divisors(mesh.cp):
        if request.shape.heads // mesh.tp % size == 0 and size in allowed:
            yield size


def with_microbatch_sizes(request: SearchRequest, mesh: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yields `mesh` with each allowed number of samples per microbatch, in ascending order."""
    num_samples = request.batch // mesh.dp
    for micro_batch in divisors(num_samples):
        if request.fixed.get("micro_batch", micro_batch) == micro_batch and (
            not request.single_wave or num_samples // micro_batch <= mesh.pp
        ):
            yield replace(mesh, micro_batch=micro_batch, num_microbatches=num_samples // micro_batch)


def configs_on_mesh(
    request: SearchRequest,
    sized_mesh: ParallelConfig,
    allowed_schedules: Sequence[NamedSchedule] | None = None,
) -> Iterator[tuple[ParallelConfig, str]]:
    """Yields all configurations of a mesh with its microbatches, each with its schedule's name.

    `allowed_schedules` are the pipeline schedules to use; None: all that are valid.
    """
    allowed_schedules = (
        list(valid_schedules(request, sized_mesh)) if allowed_schedules is None else allowed_schedules
    )
    for zero_stage, zero_group_size in zero_options(request, sized_mesh):
        for recompute in request.recompute_modes:
            base = replace(
                sized_mesh, zero_stage=zero_stage, zero_group_size=zero_group_size, recompute=recompute
            )
            yield from (
                (coded, schedule)
                for each in with_offload(request, base)
                for schedule, profile, virtual_stages in allowed_schedules
                for coded in with_codecs(
                    request, replace(each, schedule_profile=profile, virtual_stages=virtual_stages)
                )
            )


def with_offload(request: SearchRequest, config: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yields `config` with each allowed mode of offload, and activations where they may be; one rank alone
    has shards only where a mode needs them.
    """
    for mode, activations in product(request.offload_modes, request.activation_offload):
        if config.zero_stage and config.data_parallel_size == 1 and mode not in LEAST_ZERO_STAGE:
            continue
        if (mode, activations) == (config.offload, config.activation_offload):
            yield config
            continue
        other = replace(config, offload=mode, activation_offload=activations)
        if is_possible(request.shape, other, mode):
            yield other


def with_codecs(request: SearchRequest, config: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yields `config` with each allowed codec of gradients."""
    for codec in request.codecs:
        if codec == config.compress:
            yield config
        elif is_codable(request.shape, config):
            yield replace(config, compress=codec)


def empty_search_diagnostic(request: SearchRequest) -> Diagnostic | None:
    """Returns the reason why no mesh of `request` has a configuration.

    None if there is no mesh at all, or if a mesh has one.
    """
    zero_valid, first = False, None
    for mesh in candidate_meshes(request):
        for sized in with_microbatch_sizes(request, mesh):
            if not any(zero_options(request, sized)):
                continue
            zero_valid = True
            if any(configs_on_mesh(request, sized)):
                return None
            for _, profile, virtual_stages in all_schedules(request) if sized.pp > 1 else ():
                first = first or next(
                    replace(sized, schedule_profile=profile, virtual_stages=virtual_stages).diagnostics(
                        request.shape
                    ),
                    None,
                )
    labels = {"zero_stage": "ZeRO stage", "dp_shard": "ZeRO groups of"}
    settings = [f"{labels[name]} {size}" for name, size in request.fixed.items() if name in labels]
    if settings and not zero_valid and any(candidate_meshes(request)):
        return Diagnostic(
            f"no mesh has the data-parallel replicas for {', '.join(settings)}",
            "set fewer axes, or no ZeRO stage",
        )
    return first


def zero_options(request: SearchRequest, sized_mesh: ParallelConfig) -> Iterator[tuple[int, int]]:
    """Yields the allowed ZeRO stages, each with the number of replicas in a ZeRO group (0: all)."""
    stages = range(4) if sized_mesh.data_parallel_size > 1 else _stages_of_one(request)
    stages = range(1, 4) if sized_mesh.ep_dp > 1 else stages  # the other weights are sharded along ep too
    for stage in stages:
        if request.fixed.get("zero_stage", stage) != stage:
            continue
        if "dp_shard" in request.fixed:
            size = request.fixed["dp_shard"] * sized_mesh.ep_dp
            if stage and sized_mesh.dp % size == 0:
                yield stage, size
            continue
        yield stage, 0
        if stage == 3 or (stage and len(request.codecs) > 1):  # codes pay between groups of one host each
            groups = [
                hosts * request.machine.devices_per_host // (sized_mesh.tp * sized_mesh.cp)
                for hosts in ZERO_GROUP_HOSTS
            ]
            yield from (
                (stage, size)
                for size in groups
                if 1 < size < sized_mesh.dp and sized_mesh.dp % size == size % sized_mesh.ep_dp == 0
            )


def _stages_of_one(request: SearchRequest) -> tuple[int, ...]:
    """The ZeRO stages of one data-parallel rank: only those that make the shards of a mode of offload."""
    stages = {LEAST_ZERO_STAGE.get(mode, 0) for mode in request.offload_modes}
    return tuple(sorted({0, *stages}))


def valid_schedules(request: SearchRequest, sized_mesh: ParallelConfig) -> Iterator[NamedSchedule]:
    """Yields the pipeline schedules that are valid for the mesh."""
    if sized_mesh.pp == 1:
        yield "", sized_mesh.schedule_profile, sized_mesh.virtual_stages
        return
    for schedule, profile, virtual_stages in all_schedules(request):
        if not any(
            replace(sized_mesh, schedule_profile=profile, virtual_stages=virtual_stages).diagnostics(
                request.shape
            )
        ):
            yield schedule, profile, virtual_stages


def all_schedules(request: SearchRequest) -> Iterator[NamedSchedule]:
    """Yields the pipeline schedules of `request`, with the virtual stages per rank."""
    fixed = request.fixed.get("virtual_stages", 0)
    for schedule, (profile, required) in request.schedules.items():
        for virtual_stages in [required] if required else [fixed] if fixed else VIRTUAL_STAGE_COUNTS:
            if fixed in (0, virtual_stages):
                yield schedule, profile, virtual_stages


def low_memory_configs(request: SearchRequest, sized_mesh: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yields the configurations that need least memory on a mesh, the smallest first."""
    profiles = (
        [profile for profile, _ in request.schedules.values()]
        if sized_mesh.pp > 1
        else [sized_mesh.schedule_profile]
    )
    profile = min(
        profiles, key=lambda profile: (profile.is_bidirectional, profile.in_flight, profile.uniform_memory)
    )
    for zero_stage in (3, 2, 1, 0):
        if zero_stage == 0 and sized_mesh.ep_dp > 1:
            continue
        if request.fixed.get("zero_stage", zero_stage) == zero_stage or sized_mesh.data_parallel_size == 1:
            for recompute in reversed(request.recompute_modes):
                base = replace(
                    sized_mesh, zero_stage=zero_stage, recompute=recompute, schedule_profile=profile
                )
                yield from with_offload(request, base)


def may_fit(request: SearchRequest, sized_mesh: ParallelConfig) -> bool:
    """Returns whether any configuration of a mesh with its microbatches may fit."""
    return any(request.fits(config) for config in low_memory_configs(request, sized_mesh))


def min_memory_config(
    request: SearchRequest, sized_mesh: ParallelConfig
) -> tuple[ParallelConfig, MemoryEstimate]:
    """Returns the configuration of a mesh with its microbatches that needs least memory."""
    return min(
        (
            (config, estimate_memory(request.shape, config))
            for config in low_memory_configs(request, sized_mesh)
        ),
        key=lambda each: each[1].total,
    )
