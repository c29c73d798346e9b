"""`plan CONFIG --devices N`: a plan for N devices, also of a config that names no mesh.

    the config has a mesh       its axis of -1 is inferred; other sizes must be N ranks
    no mesh, no hardware        data parallelism: dp_shard = N
    no mesh, with hardware      a search: data parallelism alone, or what the program of its plan shows to be
                                clearly faster

The search knows the sizes of a model only, the plan knows the model. So a configuration of the search can be
refused here, because a layer does not divide, or the peak does not fit; the reason is a note of the plan.
What was chosen is part of the plan that `--out` writes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from meshwright.commands.plan import ResolvedRequest, checked_request, resolve
from meshwright.commands.predict import predict_plan
from meshwright.commands.search.best_plan_to_config import mesh_sizes, strategy_tables
from meshwright.commands.search.constraints import SearchConstraints, base_config
from meshwright.commands.search.machine import search_machine
from meshwright.commands.search.no_result import no_result_error
from meshwright.commands.search.resolve_model_sizes import config_size, model_shape
from meshwright.parallel import STRATEGIES
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.planner.search.data_parallel_first import ESTIMATE_ERROR, compare_data_parallel
from meshwright.planner.search.offload_when_needed import offload_notes, search_or_offload
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import Candidate
from meshwright.report.search.search_result import config_text, data_parallel_reason, to_gib
from meshwright.report.terminal.memory_and_sent_bytes import fullest_rank
from meshwright.report.terminal.prediction import format_seconds
from meshwright.resolve_config import OpenedRequest, open_valid_request, plan_request
from meshwright.run.config.config_and_plan_files import PlanRequest
from meshwright.run.config.strategy_tables import strategies_from_tables

NUM_TRIED = 8
WHOLE_EXPERTS = {"ep": 1, "expert_tp": 1}  # sizes of a search that gives each rank all experts


@dataclass(frozen=True)
class _Choice:
    """A request with a mesh, its strategies and a micro-batch; `text` describes these.

    `divides_experts`: ranks have different experts, or slices of each.
    """

    request: PlanRequest
    text: str
    divides_experts: bool = False


@dataclass(frozen=True)
class _Allowed:
    """A choice whose plan is allowed; `seconds` of a step, 0 without hardware."""

    choice: _Choice
    resolved: ResolvedRequest
    seconds: float


@dataclass(frozen=True)
class _Devices:
    """Devices that a model is planned for."""

    opened: OpenedRequest
    count: int

    def resolve(self, choice: _Choice) -> ResolvedRequest:
        """Returns the resolved request of `choice`. Raises PlanError."""
        mesh = Mesh.infer(choice.request.mesh, self.count)
        return checked_request(choice.request, plan_request(choice.request, mesh, self.opened))


def resolve_for_devices(request: PlanRequest, count: int) -> ResolvedRequest:
    """Returns `request` resolved on `count` devices.

    Raises PlanError for a mesh of another size, and if no plan for so many devices is allowed.
    """
    if count == 1 or _has_mesh(request):
        return resolve(request, count, needs_data=False)
    devices = _Devices(open_valid_request(request, needs_data=False), count)
    dp_shard = _Choice(
        replace(request, mesh={"dp_shard": count}), f"dp_shard {count}, data parallelism with ZeRO 3"
    )
    why, notes = "", list[str]()
    if not request.run.hardware:
        why = "; --hardware h100 searches the fastest"
        allowed = _Allowed(dp_shard, devices.resolve(dp_shard), 0.0)
    else:
        try:
            allowed = _search_plan(request, devices, notes)
        except PlanError as error:
            if error.diagnostics[0].location != "MODEL":
                raise
            why = f", because {error.diagnostics[0].problem}"
            allowed = _Allowed(dp_shard, devices.resolve(dp_shard), 0.0)
    resolved, ready = allowed.resolved
    notes.insert(0, f"the config names no mesh; chosen: {allowed.choice.text}{why}")
    return resolved, replace(ready, notes=(*ready.notes, *notes))


def _has_mesh(request: PlanRequest) -> bool:
    """Whether `request` says how ranks are used: by axes, by strategies, or because it is a plan."""
    return bool(
        any(size != 1 for size in request.mesh.values())
        or request.strategies is not None
        or request.extra  # of a plan file
    )


def _search_plan(
    request: PlanRequest, devices: _Devices, notes: list[str], fixed: Mapping[str, int] | None = None
) -> _Allowed:
    """The best plan of a search, with sizes that are `fixed`; appends to `notes` what was refused, and why.

    If the job excludes experts on different ranks, which the search does not know, it is repeated without.
    """
    wanted = _search_request(request, devices)
    wanted = replace(wanted, fixed={**wanted.fixed, **(fixed or {})})
    wanted, found = search_or_offload(wanted, NUM_TRIED)
    if not found.best:
        raise no_result_error(wanted, found)
    notes += offload_notes(wanted, found)
    comparison = compare_data_parallel(wanted, found)
    alone = comparison.candidate if comparison is not None else None
    if comparison is not None and alone is None:
        notes += data_parallel_reason(wanted, comparison)
    errors: list[PlanError] = []
    others = [each for each in found.best if alone is None or each.config != alone.config]
    first, second = (
        _first_allowed(
            (
                _Choice(_with_candidate(request, each), config_text(each), _divides_experts(each))
                for each in candidates
            ),
            devices,
            wanted.usable_memory,
            notes,
            errors,
        )
        for candidates in ([alone] if alone else [], others)
    )
    are_divided = any(each.choice.divides_experts for each in (first, second) if each is not None)
    if errors and any(map(_divides_experts, found.best)) and not are_divided:
        return _search_plan(request, devices, notes, WHOLE_EXPERTS)
    if first is None or second is None:
        only = first or second
        if only is None:
            raise errors[0]
        return only
    difference = f"{format_seconds(first.seconds)} against {format_seconds(second.seconds)} a step"
    if first.seconds <= (1 + ESTIMATE_ERROR) * second.seconds:
        notes.append(f"not chosen: {second.choice.text}, not clearly faster ({difference})")
        return first
    notes.append(f"not chosen: {first.choice.text}, data parallelism alone is slower ({difference})")
    return second


def _search_request(request: PlanRequest, devices: _Devices) -> SearchRequest:
    job, run = request.job, request.run
    size = config_size(job.model, job.data.sequence)
    machine, _ = search_machine(run.hardware, devices.count, run.cluster, "", model_shape)
    config = replace(base_config(machine.device.flops), dtype=job.precision.compute)
    sizes = {"micro_batch": request.micro_batch} if request.micro_batch else {}
    wanted = SearchRequest(
        size.shape, machine, job.train.batch, max_positions=size.max_positions, base_config=config
    )
    return SearchConstraints(sizes).apply(wanted)


def _first_allowed(
    choices: Iterable[_Choice],
    devices: _Devices,
    usable_memory: float,
    notes: list[str],
    errors: list[PlanError],
) -> _Allowed | None:
    for choice in choices:
        try:
            resolved = devices.resolve(choice)
        except PlanError as error:
            errors.append(error)
            notes.append(f"not chosen: {choice.text}, because {error.diagnostics[0].problem}")
            continue
        plan = resolved[1].plan
        peak = fullest_rank(plan, at_most=True)[1]
        if peak <= usable_memory:
            prediction = predict_plan(plan, plan.run.hardware, plan.run.cluster)
            return _Allowed(choice, resolved, 0.0 if prediction is None else prediction.step_s)
        text = f"{choice.text} needs {to_gib(peak):.1f} GiB, and {to_gib(usable_memory):.1f} are usable"
        fix = "give more devices, shorter sequences, or a mesh of your own with activation_checkpointing"
        errors.append(PlanError(text, fix=fix, location="--devices"))
        notes.append(f"not chosen: {text}")
    return None


def _divides_experts(candidate: Candidate) -> bool:
    return candidate.config.ep * candidate.config.expert_tp > 1


def _with_candidate(request: PlanRequest, candidate: Candidate) -> PlanRequest:
    return replace(
        request,
        mesh=mesh_sizes(candidate.config),
        strategies=strategies_from_tables(strategy_tables(candidate), STRATEGIES),
        micro_batch=int(candidate.config.micro_batch),
    )
