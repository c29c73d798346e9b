"""Micro-batches of a step played again, one after the other, to look at every block: `Whole` models, and `Parts` of them.

Weights that are kept in shards are fetched for every block, forward and backward, and no whole gradient outlives its block.
Between parts values and gradients are sent once more, under the names that they have in the step, and the gradient of a weight
that several of them use is added up for each micro-batch.

Where a harmful step came from: each rank plays its own micro-batches again, alone, and looks at every block.

The parameters have not changed and dropout is stateless, so the second playing has the numbers of the first, before
anything was summed over ranks. It costs one more forward and backward, and only when a step is harmful. The ranks then
tell each other what they found in one small message, GUARD, which is in no program: good steps do not send it.

Weights that are stored in shards are brought together once more for each block, forward and backward, in the plan's order of
blocks: so all ranks meet, also one that has no rows or whose forward leaves a block out. No whole gradient outlives its block.
Ranks that have slices of the same weights, or parts of the model, play the same rows: what they find they add up first, in a
GUARD of their own. Parts play one micro-batch after the other, and send each other what they take once more.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any, Protocol

import torch

from meshwright.engine.forward.evaluation import untouched
from meshwright.engine.forward.stage_io import Crossing
from meshwright.engine.params.summon_full import in_order
from meshwright.engine.runtime.loss import Batch
from meshwright.engine.runtime.loss_guard import Stage, Suspect
from meshwright.engine.runtime.state import State
from meshwright.model.blocks.driver import Reach, Visit, backward, backward_from
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.step.single_device import BACKWARDS, FORWARDS
from meshwright.plan.strategy import Handler

Fetch = Callable[[str], None]  # has the weights of a block whole
CROSS = ("SEND", "RECEIVE", "JOIN")  # and their gradients' kinds, which begin so


class Forward(Protocol):
    """Runs the model's forward on a micro-batch, or the part of it that begins with a visit; leaves the pass in the state."""

    def __call__(self, micro: int, reach: Reach, leave: Callable[[], None] | None = None, first: str = "") -> None: ...


class Replay(Protocol):
    """One rank's way to play its micro-batches again; `seen` is what it finds."""

    seen: "Seen"

    def play(self, micro: int) -> None:
        """Play one that has rows."""

    def stand_in(self, micro: int) -> None:
        """Take part in one for which this rank has no rows."""


class Seen:
    """What was seen so far: the loss over `count`, squares of gradients, and where a number first was not finite.

    `first` is the micro-batch of that, with its stage and block. Squares are taken in float64 so as not to overflow, by name.
    `total` takes the loss of what a forward gave out and its rows. `shared` are the weights that several ranks along pp use, with
    the indices of those.
    """

    def __init__(self, plan: Plan, state: State, count: float, total: Callable[[Any, Batch], torch.Tensor]) -> None:
        self._state, self._anatomy, self._count, self._total = state, plan.space.anatomy, count or 1.0, total
        self._completed: dict[str | None, list[str]] = defaultdict(list)  # by the visit whose backward completes them
        users = {home.weight.name: plan.space.users(home.weight) for home in plan.space.logical if home.weight.trainable}
        self.shared = {name: indices for name, indices in users.items() if len(indices) > 1}
        for weight in self._anatomy.trainable:
            if weight.name not in self.shared:
                self._completed[self._anatomy.last_backward([weight])].append(weight.name)
        self.loss, self.squares = 0.0, defaultdict[str, float](float)
        self.first: tuple[int, Stage, str] | None = None

    def outputs(self, micro: int, visits: Mapping[str, Visit]) -> None:
        """Look at what visits have given out."""
        if self.first is None:
            odd = (name for name, visit in visits.items() if any(_odd(leaf) for _, leaf in visit.outputs))
            self.first = next(((micro, "forward", name) for name in odd), None)

    def take_loss(self, micro: int) -> None:
        """Take the loss of a micro-batch whose forward has ended, and its gradient down to the last blocks' outputs."""
        outputs, closing = self._state.closings.pop(micro)
        total = self._total(outputs, self._state.micros[micro])
        if self.first is None and _odd(total):
            self.first = micro, "loss", ""
        self.loss += total.item() / self._count
        if total.requires_grad:
            backward_from(total, 1.0 / self._count)
        backward(closing)

    def gradients(self, micro: int, name: str) -> None:
        """Look at the gradients of a visit whose backward has ended; those that it completes are squared, and let go of."""
        grads = (self._state.subject.parameters[weight.name].grad for weight in self._anatomy.of(name))
        if self.first is None and any(grad is not None and _odd(grad) for grad in grads):
            self.first = micro, "backward", name
        self.square(self._completed[name])

    def square(self, names: Iterable[str]) -> None:
        """Square the gradients of `names`, as far as they are there, and let go of them."""
        for name in names:
            parameter = self._state.subject.parameters[name]
            if parameter.grad is not None:
                self.squares[name] += parameter.grad.double().square().sum().item()
                parameter.grad = None


class Whole:
    """Of a rank that runs the whole model."""

    def __init__(self, plan: Plan, state: State, seen: Seen, forward: Forward, fetch: Fetch) -> None:
        self.seen, self._state, self._forward, self._fetch = seen, state, forward, fetch
        self._visits = plan.space.anatomy.visits

    def play(self, micro: int) -> None:
        """Play one that has rows; blocks that its forward leaves out are fetched all the same."""
        with in_order(self._visits, self._fetch) as reach:
            self._forward(micro, reach)
        visits = self._state.passes.pop(micro).visits
        self.seen.outputs(micro, visits)
        self.seen.take_loss(micro)
        with in_order(self._visits[::-1], self._fetch) as reach:
            for name in reversed(list(visits)):
                reach(name)
                backward(visits[name])
                self.seen.gradients(micro, name)
        self.seen.square(self._state.subject.trainable)

    def stand_in(self, micro: int) -> None:
        """Take part in one for which this rank has no rows."""
        for order in (self._visits, self._visits[::-1]):
            with in_order(order, self._fetch):
                pass


class Parts:
    """Of a rank that runs parts: what its list says of a micro-batch, in the order of the list."""

    def __init__(
        self, plan: Plan, state: State, seen: Seen, forward: Forward, fetch: Fetch, crossing: Crossing, flow: Handler
    ) -> None:
        self.seen, self._state, self._forward, self._fetch = seen, state, forward, fetch
        self._list, self._crossing, self._flow, self._pp = plan.actions, crossing, flow, plan.mesh.pp
        for work in state.works.values():  # what the step has sent was taken: the norm of all gradients is known
            work.wait()
        state.closings.clear()
        state.passes.clear()
        crossing.forget()

    def play(self, micro: int) -> None:
        """Play one that has rows: its turns, and what crosses between them."""
        state, begun = self._state, set[str]()
        for action in (action for action in self._list if action.micro == micro):
            for name in state.works.keys() & set(action.waits):
                state.works[name].wait()
            if action.kind in FORWARDS and action.subject in self._crossing.begins:
                self._forward(micro, lambda visit: self._fetch(block_of(visit)), first=action.subject)
                visits = state.passes[micro].visits
                self.seen.outputs(micro, {name: visit for name, visit in visits.items() if name not in begun})
                begun |= visits.keys()
            elif action.kind == "LOSS":
                self.seen.take_loss(micro)
            elif action.kind in BACKWARDS:
                self._fetch(block_of(action.subject))
                self._flow(action)
                self.seen.gradients(micro, action.subject)
            elif action.kind.partition("_")[0] in CROSS:
                self._crossing.cross(action)
        for work in state.works.values():
            work.wait()
        for name, users in self.seen.shared.items():
            parameter = state.subject.parameters[name]
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            group = state.world.group(("pp",), users if len(users) < self._pp else ())
            group.all_reduce(gradient, action="GUARD").wait()
            parameter.grad = gradient
        self.seen.square(state.subject.trainable)

    def stand_in(self, micro: int) -> None:
        """Take part in one for which this rank has no rows."""
        for action in (action for action in self._list if action.micro == micro and action.kind in (*FORWARDS, *BACKWARDS)):
            self._fetch(block_of(action.subject))


def _odd(tensor: torch.Tensor) -> bool:
    return not bool(tensor.isfinite().all())


STAGES: tuple[Stage, ...] = ("", "forward", "loss", "backward")
WIDTH = 5  # numbers that each rank tells: loss, norm, stage, block, parameter


def find_suspects(plan: Plan, state: State, replay: Replay) -> tuple[Suspect, ...]:
    """What the samples of each rank did in this step, by rank; every rank calls it and gets the same."""
    for parameter in state.subject.trainable.values():
        parameter.grad = None
    with untouched(state.subject.module):
        for micro in range(len(state.micros)):
            replay.play(micro) if micro < state.num_real else replay.stand_in(micro)
    names, visits = [weight.name for weight in plan.anatomy.trainable], plan.anatomy.visits
    loss, squares, stage, block = _joined(plan, state, replay.seen)
    norms = {name: squares[name] ** 0.5 for name in names}
    odd = [name for name in names if not isfinite(norms[name])]
    if stage == "backward":
        odd = [name for name in odd if name in {weight.name for weight in plan.anatomy.of(block)}] or odd
    largest = odd[0] if odd else max(names, key=lambda name: norms[name])
    if not stage and odd:
        stage, block = "backward", ""
    if not block:
        block = next((w.visits[0] for w in plan.anatomy.weights if w.name == largest and w.visits[0] in visits), "")
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    place = visits.index(block) if block in visits else -1
    mine = [loss, total, STAGES.index(stage), place, names.index(largest) if state.num_real else -1]
    told = _exchanged(state, mine)
    return tuple(_suspect(rank, row, visits, names) for rank, row in enumerate(told))


def _joined(plan: Plan, state: State, seen: Seen) -> tuple[float, Mapping[str, float], Stage, str]:
    """Of all ranks that play these rows the loss, the squares of whole gradients, and where a number first was not finite."""
    space, names, visits = plan.space, [weight.name for weight in plan.anatomy.trainable], plan.anatomy.visits
    if not space.weight_axes:
        _, stage, block = seen.first or (0, "", "")
        return seen.loss, seen.squares, stage, block
    coordinate = plan.mesh.coordinate(state.world.rank)
    counted = set(space.told_first(coordinate))
    tells = not any(coordinate[axis] for axis in space.weight_axes if axis != "pp")  # those with other slices have the same loss
    mine = [seen.squares[name] if name in counted else 0.0 for name in names]
    micro, stage, block = seen.first or (-1, "", "")
    mine += [seen.loss if tells else 0.0, micro, STAGES.index(stage), visits.index(block) if block in visits else -1]
    group = state.world.group(space.weight_axes)
    told = torch.tensor(mine, dtype=torch.float64, device=state.world.device)
    gathered = told.new_empty(group.size * len(told))
    group.all_gather(gathered, told, action="GUARD").wait()
    rows = gathered.view(group.size, -1)
    met = [(int(micro), int(kind), int(place)) for micro, kind, place in rows[:, -3:].tolist() if kind]
    last, none = STAGES.index("backward"), (-1, 0, -1)
    _, kind, place = min(met, key=lambda each: (*each[:2], -each[2] if each[1] == last else each[2]), default=none)
    *squares, loss = rows[:, :-3].sum(0).tolist()
    return loss, dict(zip(names, squares, strict=True)), STAGES[kind], visits[place] if place >= 0 else ""


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
