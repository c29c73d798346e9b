"""What one rank takes from other parts of the model and gives to them: values forward, their gradients back.

    RECEIVE x ---> [ a part of the model ] ---> SEND y          x is a leaf where the part begins, y one where it ends
    SEND_GRAD dx <--- [ its backwards ] <--- RECEIVE_GRAD dy    dx is what x's leaf has collected when the part's last one ended

A value that is received, used, and sent on collects its gradient here too: that of those who come later is added to what this
part makes of it. Parts on the same rank hand their leaves to each other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.core.borders import Part, Value
from meshwright.core.plan import Plan
from meshwright.core.program import Action
from meshwright.engine.state import State
from meshwright.model.courses import Courses
from meshwright.model.drive import Drive, Reach, backward
from meshwright.model.parts import Ran, run


@dataclass
class _Held:
    """Of one micro-batch: values by name, as they came or were made, what parts have left, and gradients that have come."""

    came: dict[str, torch.Tensor] = field(default_factory=dict)
    ran: dict[str, Ran] = field(default_factory=dict)  # by the first visit of the part
    gradients: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def total(self, name: str) -> torch.Tensor:
        """The sum of the gradients that have come for a value, which are let go of."""
        first, *rest = self.gradients.pop(name)
        return sum(rest, start=first)


def crossing(plan: Plan, state: State, drive: Drive) -> "Crossing | None":
    """What this rank's parts take and give; None where it runs the whole model."""
    if not plan.space.stages:
        return None
    borders, courses = plan.anatomy.borders, state.subject.courses
    if borders is None or courses is None:
        raise RuntimeError("a plan has stages, and nothing is known of the borders between them")
    return Crossing(plan, state, drive, borders.parts(plan.space.cuts), courses)


class Crossing:
    """The values of the micro-batches that are under way on this rank, which runs `parts`."""

    def __init__(self, plan: Plan, state: State, drive: Drive, parts: tuple[Part, ...], courses: Courses) -> None:
        self._state, self._drive, self._courses = state, drive, courses
        own = set(plan.space.anatomy.visits)
        mine = [part for part in parts if part.visits[0] in own]
        self._first = {part.visits[0]: part for part in mine}
        self._last = {part.visits[-1]: part for part in mine}
        self._values = {value.name: value for part in parts for value in part.gives}
        self._held: dict[int, _Held] = {}

    @property
    def begins(self) -> frozenset[str]:
        """The visits with which the parts of this rank begin."""
        return frozenset(self._first)

    def forget(self) -> None:
        """Let go of all values: a step has ended, or has failed."""
        self._held.clear()

    def forward(
        self,
        first: str,
        micro: int,
        inputs: Mapping[str, torch.Tensor],
        call: Callable[[], Any],
        reach: Reach,
        leave: Callable[[], None] | None,
        skip: Callable[[str], None] | None,
    ) -> None:
        """Run the part that begins with `first` on a micro-batch; passes, and what the last part gives out, go into the state.

        `reach` and `leave` hear of its own visits, `skip` of those before them.
        """
        part, held = self._first[first], self._of(micro)
        course, rows = self._courses.of(inputs), len(next(iter(inputs.values())))
        given = {value.name: held.came[value.name] for value in part.takes}
        device = self._state.world.device
        ran = run(call, self._drive, course, part, rows, given, device, reach=reach, leave=leave, skip=skip)
        if ran.closing is None or ran.passed is None:
            raise RuntimeError("a part was run without gradients in a step")
        held.ran[first] = ran
        held.came |= {name: leaf.detach() for name, leaf in ran.given.items()}  # for other parts of this rank
        known = self._state.passes.setdefault(micro, ran.passed)
        if known is not ran.passed:
            known.visits |= ran.passed.visits
        if part.last:
            self._state.closings[micro] = ran.outputs, ran.closing

    def backward(self, last: str, micro: int) -> None:
        """Bring the gradients of what the part that ends with `last` has given to where they flow on, before its backwards."""
        part = self._last.get(last)
        if part is None:
            return
        held = self._of(micro)
        ran = held.ran[part.visits[0]]
        for name, leaf in (ran.given | ran.received).items():
            if name in held.gradients:
                leaf.grad = held.total(name)
        if not part.last and ran.closing is not None:
            backward(ran.closing)

    def ended(self, first: str, micro: int) -> None:
        """The backwards of the part that begins with `first` have ended: what it has received has its gradients."""
        part = self._first.get(first)
        if part is None:
            return
        held = self._of(micro)
        for name, leaf in held.ran.pop(first).received.items():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            held.gradients.setdefault(name, []).append(gradient)

    def cross(self, action: Action) -> None:
        """Start sending or receiving the value of `action`, or its gradient."""
        (name,), micro = action.tensors, action.micro or 0
        held = self._of(micro)
        match action.kind:
            case "SEND":
                self._sent(action, held.came[name])
            case "RECEIVE":
                held.came[name] = self._received(action, self._values[name], micro)
            case "SEND_GRAD":
                self._sent(action, held.total(name))
            case "RECEIVE_GRAD":
                held.gradients.setdefault(name, []).append(self._received(action, self._values[name], micro))
            case other:
                raise RuntimeError(f"{action.name}: nothing is known of a {other} between parts")

    def _of(self, micro: int) -> _Held:
        return self._held.setdefault(micro, _Held())

    def _sent(self, action: Action, tensor: torch.Tensor) -> None:
        move = action.transfer
        if move is not None and move.peer is not None:
            group = self._state.world.group(move.axes)
            self._state.works[action.name] = group.send(tensor.detach().contiguous(), target=move.peer, action=action.name)

    def _received(self, action: Action, value: Value, micro: int) -> torch.Tensor:
        rows = len(next(iter(self._state.micros[micro].values())))
        dtype = getattr(torch, value.dtype.removeprefix("torch."))
        tensor = torch.empty(value.shape(rows), dtype=dtype, device=self._state.world.device)
        move = action.transfer
        if move is not None and move.peer is not None:
            group = self._state.world.group(move.axes)
            self._state.works[action.name] = group.receive(tensor, source=move.peer, action=action.name)
        return tensor
