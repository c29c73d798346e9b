"""What a plan will take: seconds of a step, and where they go, from its own program played on paper.

    computing   blocks and the loss                     within     messages within blocks
    stepping    norm, clipping, the optimizer           meeting    messages between acts, as far as nothing hides them
                                                        waiting    all else: for other ranks, and what an order leaves empty

The five of a role add up to the step. What ranks of one role do alike is priced once, for the first of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.plan.plan import Plan
from meshwright.plan.step.action import Action, Program
from meshwright.plan.step.simulator import SimulatedAction, SimulationDeadlock, qualified_name
from meshwright.planner.program_cost.action_cost import Cost, Prices
from meshwright.planner.program_cost.core_contention import Shared, played
from meshwright.planner.program_cost.device_time import Ground
from meshwright.planner.program_cost.stragglers import lagging

STEPPING = ("CLIP", "LOCAL_NORM", "STEP", "GRAD_SQNORM", "STASH", "LOAD_STASHED", "LOAD_LATEST")
GUESSED = (
    "the model's operations were not seen on a trial, so blocks are priced by their number alone, at the best of products: "
    "expect the step to take up to twice as long"
)


@dataclass(frozen=True)
class Spent:
    """Seconds of a step of one role."""

    computing: float = 0.0
    within: float = 0.0
    meeting: float = 0.0
    waiting: float = 0.0
    stepping: float = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.computing + self.within + self.meeting + self.waiting + self.stepping


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step on the ground that is called `on`, those of each role, and what is to be known of them.

    `flops` are the model's in a step, a backward counted as two forwards; `mfu` is their share of the peak, None where none is
    known.
    """

    on: str
    step_s: float
    roles: Mapping[str, Spent]
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


def predict(plan: Plan, ground: Ground) -> Prediction:
    """What a step of `plan` takes on `ground`."""
    program, costs, seen = meeting(plan.program), dict[int, Cost](), True
    each = plan.mesh.world_size // len(program.roles)
    for number, (_, actions) in enumerate(program.roles):
        prices = Prices(plan, number * each, ground)
        seen = seen and prices.seen
        costs |= lagging(prices, actions)
    shared = None
    if ground.cores:
        shared = Shared(
            ground.cores, {role: each / ground.hosts for role, _ in program.roles}, ground.threads
        )
    step_s, roles = spent(program, costs, shared)
    flops = float(plan.model_spec.train_flops * plan.job.train.batch)
    peak = ground.peaks.get(plan.job.precision.compute)
    mfu = flops / (step_s * plan.mesh.world_size * peak) if peak and step_s else None
    notes = (*ground.notes, *(() if seen else (GUESSED,)))
    return Prediction(ground.name, step_s, roles, flops, mfu, notes)


def spent(
    program: Program, costs: Mapping[int, Cost], shared: Shared | None = None
) -> tuple[float, dict[str, Spent]]:
    """The seconds of a step of `program`, and where those of each role go; `costs` are those of its actions, by identity."""
    ticks = played(
        program, lambda action: costs[id(action)].seconds, shared, lambda action: costs[id(action)].late
    )
    end = max((tick.end for tick in ticks), default=0.0)
    ended = {qualified_name(tick.role, tick.action.name): tick for tick in ticks}
    return end, {
        role: _spent([tick for tick in ticks if tick.role == role], ended, costs, end)
        for role, _ in program.roles
    }


def meeting(program: Program) -> Program:
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
        played(met, lambda action: 1.0, None)
    except SimulationDeadlock:  # it meets in another order than its waits say
        return program
    return met


def _spent(
    own: Sequence[SimulatedAction],
    ended: Mapping[str, SimulatedAction],
    costs: Mapping[int, Cost],
    end: float,
) -> Spent:
    """Where the seconds of one role go."""
    computing = within = met = waiting = stepping = now = 0.0
    for tick in (tick for tick in own if tick.action.stream == "compute"):
        gap = max(0.0, tick.start - now)
        sent = min(gap, _message(tick, ended)) if gap else 0.0
        length, cost = tick.end - tick.start, costs[id(tick.action)]
        inner = length * cost.meeting / cost.seconds if cost.seconds else 0.0
        within, met, waiting, now = within + inner, met + sent, waiting + gap - sent, tick.end
        if tick.action.kind in STEPPING:
            stepping += length - inner
        else:
            computing += length - inner
    behind = max((tick.end for tick in own), default=now) - now
    return Spent(computing, within, met + behind, waiting + end - now - behind, stepping)


def _message(tick: SimulatedAction, ended: Mapping[str, SimulatedAction]) -> float:
    """How long the message lasts that `tick` waits for last; 0 where it waits for another rank's act."""
    waits = [ended[qualified_name(tick.role, wait)] for wait in tick.action.waits]
    last = max(waits, key=lambda each: each.end, default=None)
    if last is None or last.action.stream == "compute":
        return 0.0
    if last.action.stream != "recv":
        return last.end - last.start
    sends = [ended[qualified_name(last.role, wait)] for wait in last.action.waits]
    return max((each.end - each.start for each in sends), default=0.0)
