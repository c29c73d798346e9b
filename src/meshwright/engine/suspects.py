"""Where a harmful step came from: each rank plays its own micro-batches again, alone, and looks at every block.

The parameters have not changed and dropout is stateless, so the second playing has the numbers of the first, before
anything was summed over ranks. It costs one more forward and backward, and only when a step is harmful. The ranks then
tell each other what they found in one small message, GUARD, which is in no program: good steps do not send it.

Weights that are stored in shards are brought together once more for each block, forward and backward, in the plan's order of
blocks: so all ranks meet, also one that has no rows or whose forward leaves a block out. No whole gradient outlives its block.
Ranks that have slices of the same weights play the same rows: what they find they add up first, in a GUARD of their own.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import isfinite

import torch

from meshwright.core.mesh import AXES
from meshwright.core.plan import Plan
from meshwright.engine.evaluation import untouched
from meshwright.engine.spikes import Stage, Suspect
from meshwright.engine.state import State
from meshwright.engine.whole import in_order
from meshwright.model.drive import backward, backward_from

STAGES: tuple[Stage, ...] = ("", "forward", "loss", "backward")
WIDTH = 5  # numbers that each rank tells: loss, norm, stage, block, parameter


Forward = Callable[[int, Callable[[str], None]], None]


def find_suspects(plan: Plan, state: State, forward: Forward, fetch: Callable[[str], None], count: float) -> tuple[Suspect, ...]:
    """What the samples of each rank did in this step, by rank; every rank calls it and gets the same.

    `forward(micro, reach)` runs the model's forward, calls `reach(visit)` before each block, and leaves its pass in `state`;
    `fetch(block)` has the weights of a block whole, and all ranks call it; `count` is what the loss is divided by.
    """
    for parameter in state.subject.trainable.values():
        parameter.grad = None
    loss, stage, block = 0.0, "", ""
    replay = _Replay(plan, state, fetch)
    with untouched(state.subject.module):
        for micro in range(len(state.micros)):
            share, found, where = replay.play(forward, micro, count) if micro < state.num_real else replay.stand_in()
            loss += share
            stage, block = (stage, block) if stage else (found, where)
    names, visits = list(state.subject.trainable), plan.space.anatomy.visits
    squares, stage, block = _joined(plan, state, replay.squares, stage, block)
    norms = {name: squares[name] ** 0.5 for name in names}
    odd = [name for name in names if not isfinite(norms[name])]
    if stage == "backward":
        odd = [name for name in odd if name in {weight.name for weight in plan.space.anatomy.of(block)}] or odd
    largest = odd[0] if odd else max(names, key=lambda name: norms[name])
    if not stage and odd:
        stage, block = "backward", ""
    if not block:
        block = next((w.visits[0] for w in plan.space.anatomy.weights if w.name == largest and w.visits[0] in visits), "")
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    place = visits.index(block) if block in visits else -1
    mine = [loss, total, STAGES.index(stage), place, names.index(largest) if state.num_real else -1]
    told = _exchanged(state, mine)
    return tuple(_suspect(rank, row, visits, names) for rank, row in enumerate(told))


class _Replay:
    """Micro-batches played again; `squares` adds up the squared norm of each gradient, taken in float64 so as not to overflow."""

    def __init__(self, plan: Plan, state: State, fetch: Callable[[str], None]) -> None:
        self._plan, self._state, self._fetch = plan, state, fetch
        self._visits = plan.space.anatomy.visits
        self._completed: dict[str | None, list[str]] = defaultdict(list)  # by the visit whose backward completes them
        for weight in plan.space.anatomy.trainable:
            self._completed[plan.space.anatomy.last_backward([weight])].append(weight.name)
        self.squares: dict[str, float] = defaultdict(float)

    def play(self, forward: Forward, micro: int, count: float) -> tuple[float, Stage, str]:
        """The share of one micro-batch in the loss, and where a number first was not finite: the stage and the block."""
        state = self._state
        with in_order(self._visits, self._fetch) as reach:
            forward(micro, reach)
        outputs, closing = state.closings.pop(micro)
        visits = state.passes.pop(micro).visits
        stage: Stage = ""
        block = next((name for name, visit in visits.items() if any(_odd(leaf) for _, leaf in visit.outputs)), "")
        total = state.loss.total(outputs, state.micros[micro])
        if block:
            stage = "forward"
        elif _odd(total):
            stage = "loss"
        share = total.item() / (count or 1.0)
        if total.requires_grad:
            backward_from(total, 1.0 / (count or 1.0))
        backward(closing)
        with in_order(self._visits[::-1], self._fetch) as reach:
            for name in reversed(list(visits)):
                reach(name)
                backward(visits[name])
                grads = (state.subject.parameters[weight.name].grad for weight in self._plan.space.anatomy.of(name))
                if not stage and any(grad is not None and _odd(grad) for grad in grads):
                    stage, block = "backward", name
                self._take(self._completed[name])
        self._take(state.subject.trainable)
        return share, stage, block

    def stand_in(self) -> tuple[float, Stage, str]:
        """Take part in a micro-batch for which this rank has no rows."""
        for order in (self._visits, self._visits[::-1]):
            with in_order(order, self._fetch):
                pass
        return 0.0, "", ""

    def _take(self, names: Iterable[str]) -> None:
        """Take the squared norms of the gradients of `names`, which are complete, and let go of them."""
        for name in names:
            parameter = self._state.subject.parameters[name]
            if parameter.grad is not None:
                self.squares[name] += parameter.grad.double().square().sum().item()
                parameter.grad = None


def _joined(
    plan: Plan, state: State, squares: Mapping[str, float], stage: Stage, block: str
) -> tuple[Mapping[str, float], Stage, str]:
    """The squares of whole gradients, of which ranks have slices, and where the first of these ranks met what is not finite."""
    space, names, visits = plan.space, list(state.subject.trainable), plan.space.anatomy.visits
    if not space.cut_axes:
        return squares, stage, block
    counted = set(space.told_first(plan.mesh.coordinate(state.world.rank)))
    mine = [squares[name] if name in counted else 0.0 for name in names]
    mine += [STAGES.index(stage), visits.index(block) if block in visits else -1]
    group = state.world.group(space.cut_axes)
    told = torch.tensor(mine, dtype=torch.float64, device=state.world.device)
    gathered = told.new_empty(group.size * len(told))
    group.all_gather(gathered, told, action="GUARD").wait()
    rows = gathered.view(group.size, -1)
    met = [(int(kind), int(place)) for kind, place in rows[:, -2:].tolist() if kind]
    last = STAGES.index("backward")
    kind, place = min(met, key=lambda each: (each[0], -each[1] if each[0] == last else each[1]), default=(0, -1))
    return dict(zip(names, rows[:, :-2].sum(0).tolist(), strict=True)), STAGES[kind], visits[place] if place >= 0 else ""


def _odd(tensor: torch.Tensor) -> bool:
    return not bool(tensor.isfinite().all())


def _exchanged(state: State, mine: list[float]) -> list[list[float]]:
    group = state.world.group(AXES)
    told = torch.tensor(mine, dtype=torch.float64, device=state.world.device)
    gathered = torch.empty(group.size * WIDTH, dtype=torch.float64, device=state.world.device)
    group.all_gather(gathered, told, action="GUARD").wait()
    return gathered.view(-1, WIDTH).tolist()


def _suspect(rank: int, row: list[float], visits: tuple[str, ...], names: list[str]) -> Suspect:
    loss, norm, (stage, block, parameter) = row[0], row[1], map(int, row[2:])
    return Suspect(
        rank,
        loss,
        norm,
        STAGES[stage],
        visits[block] if block >= 0 else "",
        names[parameter] if parameter >= 0 else "",
    )
