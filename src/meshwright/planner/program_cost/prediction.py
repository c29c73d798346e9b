"""Predicts the seconds of a step of a plan, and their breakdown, by simulating its program.

    compute_s         blocks and the loss
    inner_comm_s      collectives inside blocks
    exposed_comm_s    communication between actions that no computation hides
    idle_s            waits for other ranks, and gaps of the schedule
    optimizer_s       gradient norm, clipping, the optimizer

The five of a role add up to the step. Ranks of one role do the same, so only the first of them is estimated.
Where sites meet in rounds of H steps, both kinds of step are simulated, and a step is their mean: H - 1 steps
between, and one that ends a round.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from meshwright.plan.hardware.streams import STREAMS, Resource
from meshwright.plan.job.errors import Diagnostic, raise_diagnostics
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action, Period, Program, Role, Transfer, with_waits
from meshwright.plan.step.simulator import SimulatedAction, SimulationDeadlock, qualified_name
from meshwright.planner.program_cost.action_cost import ActionCost, ActionCosts
from meshwright.planner.program_cost.compression_gain import compression_notes
from meshwright.planner.program_cost.core_contention import SharedCores, simulate_shared
from meshwright.planner.program_cost.device_time import ExecutionTarget
from meshwright.planner.program_cost.straggler_waits import with_straggler_waits

OPTIMIZER_KINDS = ("CLIP", "LOCAL_NORM", "STEP", "GRAD_SQNORM", "STASH", "LOAD_STASHED", "LOAD_LATEST")
NO_TRIAL_NOTE = (
    "no trial of the model recorded its operations, so a block is estimated by its FLOPs alone, at the speed "
    "of large matmuls: expect the step to take up to twice as long"
)


@dataclass(frozen=True)
class StepBreakdown:
    """Seconds of a step of one role, by category (see the module)."""

    compute_s: float = 0.0
    inner_comm_s: float = 0.0
    exposed_comm_s: float = 0.0
    idle_s: float = 0.0
    optimizer_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum of all categories."""
        return self.compute_s + self.inner_comm_s + self.exposed_comm_s + self.idle_s + self.optimizer_s

    def mean_with(self, other: "StepBreakdown", weight: float) -> "StepBreakdown":
        """Returns the mean of both, in which this one weighs `weight` and `other` the rest of 1."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return StepBreakdown(*(weight * mine + (1 - weight) * theirs for mine, theirs in pairs))


@dataclass(frozen=True)
class StepPrediction:
    """Seconds of a step on the target `target_name`, and the breakdown of each role.

    `flops` are those of the model in a step, a backward counted as two forwards; `mfu` is the model FLOPs
    utilization, None if the peak is not known. `notes` say what limits the prediction. With rounds, all are
    means over a round, and `round_end_s` are the seconds of the step that ends it.
    """

    target_name: str
    step_s: float
    roles: Mapping[str, StepBreakdown]
    flops: float
    mfu: float | None
    notes: tuple[str, ...] = ()
    round_end_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns the same as plain values."""
        values = {
            **asdict(self),
            "roles": {role: asdict(each) for role, each in self.roles.items()},
            "notes": list(self.notes),
        }
        return {key: value for key, value in values.items() if key != "round_end_s" or value is not None}


def predict_step(plan: Plan, target: ExecutionTarget) -> StepPrediction:
    """Returns the predicted seconds of a step of `plan` on `target`.

    Raises PlanError if the plan copies over something whose rate `target` does not know.
    """
    raise_diagnostics(_unknown_copy_rates(plan.program, target))
    program, costs, ops_known = with_collective_waits(plan.program, plan.mesh), dict[int, ActionCost](), True
    for role in program.roles:
        action_costs = ActionCosts(plan, role.ranks[0], target)
        ops_known = ops_known and action_costs.ops_known
        costs |= with_straggler_waits(action_costs, role.actions)
    cores = shared_cores_of(program, target)
    step_s, roles = step_breakdown(program, costs, cores)
    round_end_s, period = None, program.longest_period
    if period is not None:
        round_end_s, weight = step_s, 0.0
        between_s = step_breakdown(program.with_ends(()), costs, cores)[0]
        for ends, share in _shares_of_ends(program, period):
            ending = program.with_ends(ends)
            late = {} if len(ends) == len(program.periods) else _late_costs(ending, costs, between_s)
            of_step_s, of_step = step_breakdown(ending, {**costs, **late}, cores)
            weight += share
            step_s += (of_step_s - step_s) * share / weight
            roles = {name: each.mean_with(roles[name], share / weight) for name, each in of_step.items()}
    flops = float(plan.model_spec.train_flops * plan.job.train.batch)
    peak = target.peak_flops.get(plan.job.precision.compute)
    mfu = flops / (step_s * plan.mesh.world_size * peak) if peak and step_s else None
    notes = (*target.notes, *(() if ops_known else (NO_TRIAL_NOTE,)), *compression_notes(plan, target))
    return StepPrediction(target.name, step_s, roles, flops, mfu, notes, round_end_s)


def shared_cores_of(program: Program, target: ExecutionTarget) -> SharedCores | None:
    """Returns the cores of `target` that the ranks of `program` share; None if each has its own device."""
    if not target.cores_per_host:
        return None
    num_ranks = {role.name: len(role.ranks) / target.num_hosts for role in program.roles}
    return SharedCores(target.cores_per_host, num_ranks, target.threads_per_rank)


def _shares_of_ends(program: Program, period: Period) -> list[tuple[frozenset[Period], float]]:
    """Returns the sets of rounds that steps of the run end, each with its share of the steps."""
    steps = range(period.run_steps or period.num_steps)
    return [(ends, num / len(steps)) for ends, num in Counter(map(program.ends, steps)).items()]


def _late_costs(program: Program, costs: Mapping[int, ActionCost], between_s: float) -> dict[int, ActionCost]:
    """Returns what is left, in a step of `program`, of the costs of transfers that an earlier step has begun;
    `between_s` are the seconds of each step between.
    """
    found = dict[int, ActionCost]()
    for role in program.roles:
        by_name = {action.name: action for action in role.actions}
        for action in role.actions:
            for begun in (by_name[name] for name in action.previous_waits if action.period is not None):
                if action.period is not None and begun.period is not None:
                    num_steps = action.period.steps_behind(begun.period)
                    cost, hidden_s = costs[id(begun)], (num_steps - 1) * between_s
                    found[id(begun)] = replace(
                        cost, comm_s=max(0.0, cost.comm_s - hidden_s), comm_delay_s=0.0
                    )
    return found


def _unknown_copy_rates(program: Program, target: ExecutionTarget) -> Iterator[Diagnostic]:
    """Yields for each resource of unknown rate the first action that copies over it."""
    copies: dict[Resource, Action] = {}
    for action in (action for role in program.roles for action in role.actions):
        stream = STREAMS[action.stream]
        if stream.copies and action.transfer is not None and stream.resource not in target.copy_rates:
            copies.setdefault(stream.resource, action)
    for resource, action in copies.items():
        key = resource.replace(" ", "_")
        yield Diagnostic(
            f"{action.name} copies on {action.stream}, and {target.name} has no rate for its {resource}",
            f"write {key}_gb_s in a [device] table (docs/howto/choose_a_plan.md), or {key}_rate, bytes per "
            "second, in the file of bench device",
            "hardware",
        )


def step_breakdown(
    program: Program, costs: Mapping[int, ActionCost], shared_cores: SharedCores | None = None
) -> tuple[float, dict[str, StepBreakdown]]:
    """Returns the seconds of a step of `program`, and the breakdown of each role.

    `costs` are those of its actions, by identity.
    """
    events = simulate_shared(
        program,
        lambda action: costs[id(action)].seconds,
        shared_cores,
        lambda action: costs[id(action)].comm_delay_s,
    )
    end = max((event.end for event in events), default=0.0)
    ended = {qualified_name(event.role, event.action.name): event for event in events}
    return end, {
        role.name: _role_breakdown([event for event in events if event.role == role.name], ended, costs, end)
        for role in program.roles
    }


def with_collective_waits(program: Program, mesh: Mesh) -> Program:
    """Returns `program` with collectives across roles that start when the last role reaches them.

    A program in which these waits would deadlock is returned unchanged.
    """
    sides = defaultdict[_CollectiveKey, dict[str, Action]](dict)
    for role in program.roles:
        for action in role.actions:
            if action.stream == "comm" and action.transfer is not None:
                sides[_collective_key(action, action.transfer, role, mesh)][role.name] = action
    if not any(len(roles) > 1 for roles in sides.values()):
        return program
    spanning = {(name, key[0]): side for key, side in sides.items() if len(side) > 1 for name in side}
    changed = []
    for role in program.roles:
        actions = []
        for action in role.actions:
            side = spanning.get((role.name, action.name), {})
            others = {name: each for name, each in side.items() if name != role.name}
            waits = (qualified_name(other, wait) for other, each in others.items() for wait in each.waits)
            actions.append(with_waits(action, waits) if others else action)
        changed.append(replace(role, actions=tuple(actions)))
    waiting = Program(tuple(changed))
    try:
        simulate_shared(waiting, lambda action: 1.0, None)
    except SimulationDeadlock:  # roles reach collectives in an order that contradicts the waits
        return program
    return waiting


_CollectiveKey = tuple[str, tuple[int, ...], tuple[int, ...]]


def _collective_key(action: Action, transfer: Transfer, role: Role, mesh: Mesh) -> _CollectiveKey:
    """Returns what the sides of a collective have in common: name, and which ranks take part."""
    coordinate = mesh.coordinate(role.ranks[0])
    others = tuple(index for axis, index in coordinate.items() if axis not in transfer.axes)
    return action.name, others, transfer.member_indices


def _role_breakdown(
    events: Sequence[SimulatedAction],
    tick_by_name: Mapping[str, SimulatedAction],
    costs: Mapping[int, ActionCost],
    end: float,
) -> StepBreakdown:
    compute_s = inner_comm_s = exposed_comm_s = idle_s = optimizer_s = now = 0.0
    for event in (event for event in events if event.action.stream == "compute"):
        gap = max(0.0, event.start - now)
        message_s = min(gap, _message_s(event, tick_by_name)) if gap else 0.0
        length, cost = event.end - event.start, costs[id(event.action)]
        inner_s = length * cost.comm_s / cost.seconds if cost.seconds else 0.0
        inner_comm_s, exposed_comm_s, idle_s, now = (
            inner_comm_s + inner_s,
            exposed_comm_s + message_s,
            idle_s + gap - message_s,
            event.end,
        )
        if event.action.kind in OPTIMIZER_KINDS:
            optimizer_s += length - inner_s
        else:
            compute_s += length - inner_s
    tail_s = max((event.end for event in events), default=now) - now
    return StepBreakdown(
        compute_s, inner_comm_s, exposed_comm_s + tail_s, idle_s + end - now - tail_s, optimizer_s
    )


def _message_s(event: SimulatedAction, tick_by_name: Mapping[str, SimulatedAction]) -> float:
    """Seconds of the message that `event` waits for last; 0 if that is an action of another rank."""
    waits = [tick_by_name[qualified_name(event.role, wait)] for wait in event.action.waits]
    last = max(waits, key=lambda each: each.end, default=None)
    if last is None or last.action.stream == "compute":
        return 0.0
    if last.action.stream != "recv":
        return last.end - last.start
    sends = [tick_by_name[qualified_name(last.role, wait)] for wait in last.action.waits]
    return max((each.end - each.start for each in sends), default=0.0)
