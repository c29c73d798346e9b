"""What a plan will take: seconds of a step, and where they go, from its own program played on paper.

    computing   blocks and the loss                     within     messages within blocks
    stepping    norm, clipping, the optimizer           meeting    messages between acts, as far as nothing
                                                                   hides them
                                                        waiting    all else: for other ranks, and what an
                                                                   order leaves empty

The five of a role add up to the step. What ranks of one role do alike is priced once, for the first of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.plan.plan import Plan
from meshwright.plan.step.action import Action, Program
from meshwright.plan.step.simulator import SimulatedAction, SimulationDeadlock, qualified_name
from meshwright.planner.program_cost.action_cost import ActionCost, ActionCosts
from meshwright.planner.program_cost.core_contention import SharedCores, simulate_shared
from meshwright.planner.program_cost.device_time import ExecutionTarget
from meshwright.planner.program_cost.stragglers import with_straggler_waits

OPTIMIZER_KINDS = ("CLIP", "LOCAL_NORM", "STEP", "GRAD_SQNORM", "STASH", "LOAD_STASHED", "LOAD_LATEST")
NO_TRIAL_NOTE = (
    "the model's operations were not seen on a trial, so blocks are priced by their number "
    "alone, "
    "at the best of products: "
    "expect the step to take up to twice as long"
)


@dataclass(frozen=True)
class StepBreakdown:
    """Seconds of a step of one role."""

    compute_s: float = 0.0
    inner_comm_s: float = 0.0
    exposed_comm_s: float = 0.0
    idle_s: float = 0.0
    optimizer_s: float = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.compute_s + self.inner_comm_s + self.exposed_comm_s + self.idle_s + self.optimizer_s


@dataclass(frozen=True)
class StepPrediction:
    """Seconds of a step on the ground that is called `on`, those of each role, and what is to be known of
    them.

    `flops` are the model's in a step, a backward counted as two forwards; `mfu` is their share of the peak,
    None where none is known.
    """

    target_name: str
    step_s: float
    roles: Mapping[str, StepBreakdown]
    flops: float
    mfu: float | None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            **asdict(self),
            "roles": {role: asdict(each) for role, each in self.roles.items()},
            "notes": list(self.notes),
        }


def predict_step(plan: Plan, target: ExecutionTarget) -> StepPrediction:
    """What a step of `plan` takes on `ground`."""
    program, costs, seen = with_collective_waits(plan.program), dict[int, ActionCost](), True
    each = plan.mesh.world_size // len(program.roles)
    for number, (_, actions) in enumerate(program.roles):
        prices = ActionCosts(plan, number * each, target)
        seen = seen and prices.ops_known
        costs |= with_straggler_waits(prices, actions)
    shared = None
    if target.cores_per_host:
        shared = SharedCores(
            target.cores_per_host,
            {role: each / target.num_hosts for role, _ in program.roles},
            target.threads_per_rank,
        )
    step_s, roles = step_breakdown(program, costs, shared)
    flops = float(plan.model_spec.train_flops * plan.job.train.batch)
    peak = target.peak_flops.get(plan.job.precision.compute)
    mfu = flops / (step_s * plan.mesh.world_size * peak) if peak and step_s else None
    notes = (*target.notes, *(() if seen else (NO_TRIAL_NOTE,)))
    return StepPrediction(target.name, step_s, roles, flops, mfu, notes)


def step_breakdown(
    program: Program, costs: Mapping[int, ActionCost], shared_cores: SharedCores | None = None
) -> tuple[float, dict[str, StepBreakdown]]:
    """The seconds of a step of `program`, and where those of each role go; `costs` are those of its actions,
    by identity.
    """
    ticks = simulate_shared(
        program,
        lambda action: costs[id(action)].seconds,
        shared_cores,
        lambda action: costs[id(action)].comm_delay_s,
    )
    end = max((tick.end for tick in ticks), default=0.0)
    ended = {qualified_name(tick.role, tick.action.name): tick for tick in ticks}
    return end, {
        role: _role_breakdown([tick for tick in ticks if tick.role == role], ended, costs, end)
        for role, _ in program.roles
    }


def with_collective_waits(program: Program) -> Program:
    """`program`, in which a collective among several roles starts when the last of them has come to it."""
    named: dict[str, dict[str, Action]] = {}
    for role, actions in program.roles:
        for action in actions:
            if action.stream == "comm" and action.transfer is not None and "pp" in action.transfer.axes:
                named.setdefault(action.name, {})[role] = action
    if not any(len(roles) > 1 for roles in named.values()):
        return program
    changed = []
    for role, actions in program.roles:
        own = []
        for action in actions:
            others = {other: each for other, each in named.get(action.name, {}).items() if other != role}
            waits = (qualified_name(other, wait) for other, each in others.items() for wait in each.waits)
            own.append(
                replace(action, waits=tuple(dict.fromkeys((*action.waits, *waits)))) if others else action
            )
        changed.append((role, tuple(own)))
    met = Program(tuple(changed))
    try:
        simulate_shared(met, lambda action: 1.0, None)
    except SimulationDeadlock:  # it meets in another order than its waits say
        return program
    return met


def _role_breakdown(
    ticks: Sequence[SimulatedAction],
    tick_by_name: Mapping[str, SimulatedAction],
    costs: Mapping[int, ActionCost],
    end: float,
) -> StepBreakdown:
    """Where the seconds of one role go."""
    computing = within = met = waiting = stepping = now = 0.0
    for tick in (tick for tick in ticks if tick.action.stream == "compute"):
        gap = max(0.0, tick.start - now)
        sent = min(gap, _message_s(tick, tick_by_name)) if gap else 0.0
        length, cost = tick.end - tick.start, costs[id(tick.action)]
        inner = length * cost.comm_s / cost.seconds if cost.seconds else 0.0
        within, met, waiting, now = within + inner, met + sent, waiting + gap - sent, tick.end
        if tick.action.kind in OPTIMIZER_KINDS:
            stepping += length - inner
        else:
            computing += length - inner
    behind = max((tick.end for tick in ticks), default=now) - now
    return StepBreakdown(computing, within, met + behind, waiting + end - now - behind, stepping)


def _message_s(tick: SimulatedAction, tick_by_name: Mapping[str, SimulatedAction]) -> float:
    """How long the message lasts that `tick` waits for last; 0 where it waits for another rank's act."""
    waits = [tick_by_name[qualified_name(tick.role, wait)] for wait in tick.action.waits]
    last = max(waits, key=lambda each: each.end, default=None)
    if last is None or last.action.stream == "compute":
        return 0.0
    if last.action.stream != "recv":
        return last.end - last.start
    sends = [tick_by_name[qualified_name(last.role, wait)] for wait in last.action.waits]
    return max((each.end - each.start for each in sends), default=0.0)
