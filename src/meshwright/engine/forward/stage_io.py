"""What one rank takes from other parts of the model and gives to them: values forward, their gradients back.

    RECEIVE x ---> [ a part of the model ] ---> SEND y          x is a leaf where the part begins, y one where it ends
    SEND_GRAD dx <--- [ its backwards ] <--- RECEIVE_GRAD dy    dx is what x's leaf has collected when the part's last one ended

A value that is received, used, and sent on collects its gradient here too: that of those who come later is added to what this
part makes of it. Parts on the same rank hand their leaves to each other. Where ranks have slices of a value, each sends its own;
where they have the same and send a piece each, JOIN puts what has come together: RECEIVE piece ---> JOIN ---> x.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import torch

from meshwright.comm.collectives.group import Work
from meshwright.engine.forward.sequence_sharding import AllTokens
from meshwright.engine.runtime.comm_groups import way
from meshwright.engine.runtime.state import State
from meshwright.model.analysis.pipeline_trial import Courses
from meshwright.model.blocks.driver import Drive, Reach, backward, run_backward
from meshwright.model.pipeline.forward_graph import Course
from meshwright.model.pipeline.replay_script import Scripts
from meshwright.model.pipeline.stage_forward import Ran, run
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.stage_boundaries import Part, Value
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.stage_values import Crossed, Dims
from meshwright.plan.step.action import Action, Transfer

SHAPES = 4096  # of values that are remembered; where rows have more lengths than that, some are found again


@dataclass
class _Held:
    """Of one micro-batch: values by name, as they came or were made, what parts have left, and gradients that have come."""

    came: dict[str, torch.Tensor] = field(default_factory=dict)
    ran: dict[str, Ran] = field(default_factory=dict)  # by the first visit of the part
    gradients: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    pieces: dict[str, torch.Tensor] = field(default_factory=dict)  # by what JOIN is about
    sent: dict[str, list[Work]] = field(default_factory=dict)  # forward
    course: Course | None = None

    def total(self, name: str) -> torch.Tensor:
        """The sum of the gradients that have come for a value, which are let go of."""
        first, *rest = self.gradients.pop(name)
        return sum(rest, start=first)


def crossing(plan: Plan, state: State, drive: Drive, dealing: AllTokens) -> "Crossing | None":
    """What this rank's parts take and give; None where it runs the whole model."""
    if not plan.space.stages:
        return None
    parts, courses = plan.space.parts, state.subject.courses
    if not parts or courses is None:
        raise RuntimeError("a plan has stages, and nothing is known of the borders between them")
    return Crossing(plan, state, drive, dealing, parts, courses)


class Crossing:
    """The values of the micro-batches that are under way on this rank, which runs `parts`."""

    def __init__(
        self, plan: Plan, state: State, drive: Drive, dealing: AllTokens, parts: tuple[Part, ...], courses: Courses
    ) -> None:
        self._state, self._drive, self._courses, self._space, self._dealing = state, drive, courses, plan.space, dealing
        own = set(plan.space.anatomy.visits)
        mine = [part for part in parts if part.visits[0] in own]
        self._first = {part.visits[0]: part for part in mine}
        self._last = {part.visits[-1]: part for part in mine}
        self._values = {value.name: value for part in parts for value in part.gives}
        self._crossed, self._compute = Crossed(plan.space, self._values.values()), getattr(torch, plan.job.precision.compute)
        self._shapes: dict[tuple[str, Dims, int], tuple[int, ...]] = {}
        self._held: defaultdict[int, _Held] = defaultdict(_Held)
        self._scripts = Scripts(state.subject.module, state.subject.blocks)

    @property
    def begins(self) -> frozenset[str]:
        """The visits with which the parts of this rank begin."""
        return frozenset(self._first)

    def forget(self) -> None:
        """Let go of all values: a step has ended, or has failed."""
        self._held.clear()
        self._scripts.forget()

    def forward(
        self,
        first: str,
        micro: int,
        inputs: Mapping[str, torch.Tensor],
        reach: Reach,
        leave: Callable[[], None] | None,
        skip: Callable[[str], None] | None,
    ) -> None:
        """Run the part that begins with `first` on a micro-batch; passes, and what the last part gives out, go into the state.

        `reach` and `leave` hear of its own visits, `skip` of those before them.
        """
        part, held = self._first[first], self._held[micro]
        course, rows = self._course(micro), next(iter(inputs.values())).shape[0]
        given = {value.name: held.came[value.name] for value in part.takes}
        device, dealt = self._state.world.device, self._dealing.parts()
        call = partial(self._state.subject.module, **inputs)
        # what draws numbers draws them where the model's forward stands; and what stands for all tokens is made anew in each
        scripts = self._scripts if skip is None and dealt is None else None
        how = {"scripts": scripts, "inputs": inputs, "looks": self._crossed.looks, "dealt": dealt}
        ran = run(call, self._drive, course, part, rows, given, device, reach=reach, leave=leave, skip=skip, **how)
        if ran.closing is None or ran.passed is None:
            raise RuntimeError("a part was run without gradients in a step")
        held.ran[first] = ran
        held.came |= {name: leaf.detach() for name, leaf in ran.given.items()}  # for other parts of this rank
        known = self._state.passes.setdefault(micro, ran.passed)
        if known is not ran.passed:
            known.visits |= ran.passed.visits
        if part.last:
            self._state.closings[micro] = ran.outputs, ran.closing

    def concerns(self, visit: str) -> bool:
        """Whether a part begins or ends with `visit`, so that its backward has to do with what crosses."""
        return visit in self._first or visit in self._last

    def backward(self, last: str, micro: int) -> None:
        """Bring the gradients of what the part that ends with `last` has given to where they flow on, before its backwards."""
        part = self._last.get(last)
        if part is None:
            return
        held = self._held[micro]
        ran = held.ran[part.visits[0]]
        for name in ran.given.keys() & held.gradients.keys():  # who has sent all these gradients has the value
            for work in held.sent.pop(name, ()):
                work.wait()  # at once; it lets go of the value
        whole = {}  # what has the graph of the part: one backward is that of all its visits
        for name, leaf in (ran.given | ran.received).items():
            if name in held.gradients and leaf.is_leaf:
                leaf.grad = held.total(name)
            elif name in held.gradients:
                whole[leaf] = held.total(name)
        if whole:
            run_backward(tuple(whole), tuple(whole.values()), False, False, (), True, True)
        if not part.last and ran.closing is not None:
            backward(ran.closing)

    def ended(self, first: str, micro: int) -> None:
        """The backwards of the part that begins with `first` have ended: what it has received has its gradients."""
        part = self._first.get(first)
        if part is None:
            return
        held = self._held[micro]
        for name, leaf in held.ran.pop(first).received.items():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            held.gradients.setdefault(name, []).append(gradient)
        for value in (*part.takes, *part.gives):  # later parts have run by now, and earlier ones do not know it or have run too
            held.came.pop(value.name, None)

    def cross(self, action: Action) -> None:
        """Start sending or receiving the value of `action`, or its gradient, or putting the pieces of one together."""
        (name,), micro, move = action.tensors, action.micro or 0, action.transfer
        if move is None:
            raise RuntimeError(f"{action.name} says nothing of what it moves")
        held, value = self._held[micro], self._values[name]
        match action.kind:
            case "SEND":
                self._sent(action, move, held.came[name], value, micro)
            case "SEND_GRAD":
                self._sent(action, move, held.total(name), value, micro)
            case "RECEIVE" | "RECEIVE_GRAD" if move.over:
                held.pieces[action.subject] = self._received(action, move, self._piece(value, micro, move.over))
            case "RECEIVE":
                held.came[name] = self._received(action, move, self._blank(value, micro))
            case "RECEIVE_GRAD":
                held.gradients.setdefault(name, []).append(self._received(action, move, self._blank(value, micro)))
            case "JOIN":
                held.came[name] = self._joined(action, move, held.pieces.pop(action.subject), value, micro)
            case "JOIN_GRAD":
                joined = self._joined(action, move, held.pieces.pop(action.subject), value, micro)
                held.gradients.setdefault(name, []).append(joined)
            case other:
                raise RuntimeError(f"{action.name}: nothing is known of a {other} between parts")

    def _sent(self, action: Action, move: Transfer, tensor: torch.Tensor, value: Value, micro: int) -> None:
        shape, dtype = self._shape(value, micro), getattr(torch, value.dtype)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            text = f"{action.name} is to send {value.dtype} {list(shape)}, and the value '{value}' is {found} here"
            fix = "let the forward give out the same shapes and dtypes as in the trial run; or choose cuts that it does not cross"
            raise PlanError(text, fix=fix, where="model")
        tensor = tensor.detach().contiguous()
        if move.over:
            index, piece = self._state.world.group(move.over).index, self._piece(value, micro, move.over)
            mine = tensor.view(-1)[index * len(piece) : (index + 1) * len(piece)]
            if len(mine) < len(piece):
                piece.zero_()[: len(mine)].copy_(mine)
                mine = piece
            tensor = mine
        if move.peer is not None:
            group, peer = way(self._state.world, move.axes, move.peer, sends=True)
            self._state.works[action.name] = work = group.send(tensor, target=peer, action=action.name)
            if action.kind == "SEND":
                self._held[micro].sent.setdefault(value.name, []).append(work)

    def _received(self, action: Action, move: Transfer, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, which is filled."""
        if move.peer is not None:
            group, peer = way(self._state.world, move.axes, move.peer, sends=False)
            self._state.works[action.name] = group.receive(tensor, source=peer, action=action.name)
        return tensor

    def _joined(self, action: Action, move: Transfer, piece: torch.Tensor, value: Value, micro: int) -> torch.Tensor:
        """The whole value, in which the pieces of all ranks are put."""
        group, shape = self._state.world.group(move.axes), self._shape(value, micro)
        whole = piece.new_empty(group.size * len(piece))
        self._state.works[action.name] = group.all_gather(whole, piece, action=action.name)
        return whole[: prod(shape)].view(shape)

    def _course(self, micro: int) -> Course:
        """The course of a forward on this micro-batch: rows may be longer than those of the example, and be fewer."""
        held = self._held[micro]
        if held.course is None:
            state = self._state
            inputs = state.loss.inputs(state.micros[micro])
            # said, not looked at: what is received is asked for before any forward casts
            held.course = self._courses.of(inputs, self._compute, dealt=self._space.deal is not None)
            missing = sorted(self._values.keys() - held.course.dims.keys())
            if missing:
                shapes = ", ".join(f"{key} {list(value.shape[1:])}" for key, value in inputs.items())
                text = f"on rows of {shapes} the forward does not make '{missing[0]}', which crosses between parts"
                raise PlanError(text, fix="make the plan from such rows, or let the forward take one way", where="model")
        return held.course

    def _shape(self, value: Value, micro: int) -> tuple[int, ...]:
        """The shape that this rank has of it."""
        rows, dims = next(iter(self._state.micros[micro].values())).shape[0], self._course(micro).dims[value.name]
        key = value.name, dims, rows
        if key not in self._shapes:
            if len(self._shapes) >= SHAPES:
                self._shapes.clear()
            self._shapes[key] = self._crossed.shape(replace(value, dims=dims), rows)
        return self._shapes[key]

    def _blank(self, value: Value, micro: int) -> torch.Tensor:
        dtype = getattr(torch, value.dtype)
        return torch.empty(self._shape(value, micro), dtype=dtype, device=self._state.world.device)

    def _piece(self, value: Value, micro: int, over: tuple[str, ...]) -> torch.Tensor:
        """Memory for the piece that each rank along the axes `over` sends."""
        numel = -(-prod(self._shape(value, micro)) // self._space.mesh.extent(over))
        return torch.empty(numel, dtype=getattr(torch, value.dtype), device=self._state.world.device)
