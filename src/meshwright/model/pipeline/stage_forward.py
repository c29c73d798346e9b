"""One part of a model run by a call of the model's own forward, in which the blocks of all other parts are stubbed.

    part            visits    layers.4 layers.5          takes  layers.3          gives  layers.5
    the forward     embed --> layers.0 ... layers.3 --> layers.4 --> layers.5 --> (left here)
    runs            stub      stub         received     itself       itself

The forward runs from its beginning. A stub gives out `Foreign` tensors, which have a name and a shape and no numbers; glue that
computes with them gives more of them, as the course of the forward tells (model/course.py), and glue that does not (masks,
positions, rotary tables) computes as ever. Where a Foreign of this part's own time stands for a value that was received, that is
taken in its place. Behind the last visit the forward goes on until all values exist that later parts need, and is then left by an
exception; that of the last part runs to its end.

Gradients: a received value is a leaf, and so is a value that is given, with the edge where its gradient goes: in the visit that
made it, or in the closing visit where glue did. The order of a backward: what later parts sent is put into the leaves of `given`,
then the closing visit, then the visits in reverse; then `received` have theirs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily

from meshwright.model.blocks.driver import Drive, Pass, Reach, Visit
from meshwright.model.hf.output_capture import marks
from meshwright.model.pipeline.forward_graph import Course, Place, Stub
from meshwright.model.pipeline.replay_script import Script, Scripts, Writer
from meshwright.model.pipeline.stage_values import ANOTHER_WAY, Looks, Standing
from meshwright.model.sequence_parallel.sharded_activation import Apart
from meshwright.model.sequence_parallel.sharded_forward import Dealt
from meshwright.model.tensors.function_modes import Glue, plainly
from meshwright.model.tensors.grad_alias import Alias, leaf_of
from meshwright.model.tensors.pytree import leaves, tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_of, visit_of
from meshwright.plan.model_spec.stage_boundaries import Part

Heard = Callable[[str], None]


@dataclass(frozen=True)
class Ran:
    """What a run of a part left: the values `given` by name, the model's `outputs` where it is the last, and for a backward more.

    With gradients `received` are the leaves of the values that it took and that need one (`grad` None: nothing came of it),
    `closing` holds the glue behind the last visit and `passed` the visits. Where the drive does not cut, values have their graph.
    """

    given: dict[str, torch.Tensor]
    outputs: Any
    received: dict[str, torch.Tensor]
    closing: Visit | None = None
    passed: Pass | None = None


class Left(BaseException):
    """The forward is left: all that it was run for is there. No Exception, so that no model catches it."""


def run(
    call: Callable[[], Any],
    drive: Drive,
    course: Course,
    part: Part,
    rows: int,
    received: Mapping[str, torch.Tensor],
    device: torch.device | str = "cpu",
    *,
    reach: Reach,
    leave: Callable[[], None] | None = None,
    skip: Heard | None = None,
    scripts: Scripts | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    dealt: Dealt | None = None,
    looks: Looks = tuple,
) -> Ran:
    """Run `part` of the model whose forward `call()` runs on so many `rows`; `received` are the values that it takes, by name.

    `reach` and `leave` hear of the part's own visits, as in `Drive.forward`; `skip` of those of earlier parts, in their order.
    With `scripts` the model's forward runs on the first of equal `inputs`, and its script on those that follow (model/script.py).
    Where ranks have slices of the width, `looks` says the shape of values that are not there, for glue that asks them for it.
    Where a rank has some of the tokens, `dealt` says what is done round blocks: values are taken and given by their own tokens.
    Without gradients switched on it is an evaluation, by the course of one. Raises PlanError where something that the part needs
    was not received, and where the forward takes another way than its course.
    """
    for value in part.takes:
        if value.name not in received:
            text = f"the part of '{part.visits[0]}' takes the value '{value}', which was not received"
            raise PlanError(text, fix=f"hand it over from the part of '{value.made}'", where="received")
    grad = torch.is_grad_enabled()
    needed = {value.name for value in part.takes if value.needed and grad}
    taken = {value.name: received[value.name].detach().requires_grad_(value.name in needed) for value in part.takes}
    payload = {name: drive.stand_in(leaf) if name in needed else leaf for name, leaf in taken.items()}
    for name in course.rewritten.intersection(taken):  # somebody writes into it: into a copy, and never into a leaf
        copy = taken[name].detach().clone()
        payload[name] = Alias.apply(taken[name], copy) if name in needed else copy
    received = {name: taken[name] for name in needed}
    if dealt is not None:
        apart = ((each.name, each.along) for each in part.takes if each.along is not None)
        payload |= {name: dealt.apart(payload[name], along, course.shape(name, rows)[along]) for name, along in apart}
    seeds = (*(payload[value.name] for value in part.takes), *(inputs or {}).values())
    key = part.visits[0], *(inputs or ()), *((seed.shape, seed.dtype) for seed in seeds)
    script = scripts.find(key) if scripts is not None and grad else None
    if script is not None:
        return _ran(drive, part, received, *drive.forward(reach, partial(_again, drive, script, seeds), leave))
    writer = scripts.writer(key, seeds) if scripts is not None and grad else None
    standing = Standing(course, part, rows, torch.device(device), payload, plainly if writer is None else writer.call, looks)
    under_way = _Run(drive, course, part, standing, skip, writer, dealt)

    def whole() -> Any:
        outputs = under_way.play(call)
        if scripts is not None and writer is not None:
            scripts.keep(key, writer, outputs)
        return outputs

    with drive.guided(under_way.block):
        outputs, closing, passed = drive.forward(reach, whole, leave) if grad else (whole(), None, None)
    under_way.end()
    return _ran(drive, part, received, outputs, closing, passed)


def _ran(
    drive: Drive, part: Part, received: dict[str, torch.Tensor], outputs: Any, closing: Visit | None, passed: Pass | None
) -> Ran:
    if part.last:
        return Ran({}, outputs, received, closing, passed)
    given = {name: leaf_of(tensor) for name, tensor in outputs.items()} if drive.cut else outputs
    return Ran(given, None, received, closing, passed)


def _again(drive: Drive, script: Script, seeds: Sequence[torch.Tensor]) -> Any:
    for name in script.skipped:
        drive.skip(name)
    return script.play(seeds)


class _Run:
    """A run of a part that is under way."""

    def __init__(
        self,
        drive: Drive,
        course: Course,
        part: Part,
        standing: Standing,
        skip: Heard | None,
        writer: Writer | None,
        dealt: Dealt | None,
    ) -> None:
        self._drive, self._course, self._part, self._standing, self._skip = drive, course, part, standing, skip
        self._writer, self._dealt = writer, dealt
        self._place = course.borders.place
        self._first, self._last = self._place[part.visits[0]], self._place[part.visits[-1]]
        self._missing = {value.name for value in part.gives}
        self._made: dict[str, torch.Tensor] = {}
        self._counting = any(value.op for value in part.gives)  # glue makes some of what is to be given
        self._alive: dict[int, torch.Tensor] = {}  # tensors that are values, while counting
        self._objects: dict[str, torch.Tensor] = {}
        self._calls: dict[str, int] = {}
        self._grad = torch.is_grad_enabled()
        self._at, self._left = -1, False
        before = course.borders.visits[: self._first]
        follows = writer is not None or self._counting or any(course.ops[visit] for visit in before)
        self._mode = Glue(self.glue) if follows else None

    def play(self, call: Callable[[], Any]) -> Any:
        """The outputs of the forward, or, where it is left, the values that the part gives, by name."""
        try:
            with nullcontext() if self._mode is None else self._mode:
                outputs = call()
        except Left:
            return self._made
        if not self._part.last:
            return self._made  # somebody has caught what left it
        outputs = self._standing.known(outputs)
        return outputs if self._dealt is None else self._dealt.here(outputs)

    def end(self) -> None:
        """The forward has ended. Raises PlanError when values are missing that the part was to give."""
        self._standing.ended()
        self._alive.clear()
        self._objects.clear()
        self._mode = None  # it knows this run: together they would keep tensors until the garbage is collected
        if self._missing:
            text = f"the forward did not make the values {', '.join(sorted(self._missing))}, which it made in the trial run"
            raise PlanError(text, fix=ANOTHER_WAY, where="model")

    def block(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A block is called: the drive's guide."""
        if torch.is_grad_enabled() != self._grad:
            return run(*args, **kwargs)
        if self._left:  # and somebody has caught it
            raise Left
        count = self._calls[name] = self._calls.get(name, 0) + 1
        visit = visit_of(name, count)
        at = self._place.get(visit, -1)
        if at != self._at + 1:
            behind = f"behind '{self._course.borders.visits[self._at]}'" if self._at >= 0 else "first"
            text = f"the forward calls '{visit}' {behind}, which it did not in the trial run"
            raise PlanError(text, fix=ANOTHER_WAY, where="model")
        if at > self._last:
            raise Left
        self._at = at
        self._standing.reach(visit, begun=at >= self._first)
        if at >= self._first:
            return self._own(visit, run, (args, kwargs))
        if self._skip is not None:
            self._skip(visit)
        self._drive.skip(name)
        if self._writer is not None:
            self._writer.skip(name)
        return self._stub(self._course.stubs[visit], (args, kwargs))

    def _stub(self, stub: Stub, given: Any) -> Any:
        """What stands for the outputs of a visit of another part, and for what it captures."""
        if stub.captured:
            lists = {mark.channel: mark.found for mark in marks()}
            for channel, added in stub.captured:
                lists[channel].extend(self._standing.filled(added, given))
        return self._standing.filled(stub.outputs, given)

    def _own(self, visit: str, run: Callable[..., Any], given: Any) -> Any:
        """A visit of this part runs itself, on what was received for each Foreign that it is given."""
        given, dealt, capturing = self._standing.real(given, f"the block '{visit}' takes in"), self._dealt, marks()
        if self._writer is not None:
            name, captured = block_of(visit), lambda: [each for mark in capturing for each in mark.added]
            run = partial(self._writer.visit, name, run, captured, self._above())
        with self._apart():
            args, kwargs = given if dealt is None else dealt.enter(visit, given)
            outputs = run(*args, **kwargs)
            outputs = outputs if dealt is None else dealt.leave(outputs)
        self._bind(self._course.stubs[visit].places, tensors([outputs, *(mark.added for mark in capturing)]))
        return outputs

    def glue(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Glue calls `func`: where that is the next operation of the course, its values are noted."""
        standing, given = self._standing, (args, kwargs)
        if self._at < self._first:
            return standing.compute(func, args, kwargs) if standing.among(given) else standing.call(func, args, kwargs)
        op = standing.operation(func) if self._counting else None
        counts = op is not None and any(id(each) in self._alive for each in tensors(given))
        if standing.among(given):
            counts = op is not None
            outcome = standing.compute(func, args, kwargs)
        else:
            outcome = standing.call(func, args, kwargs)
        if op is None or not counts:
            return outcome
        standing.operated()
        for old, new in op.renamed:
            tensor = self._objects.pop(old) if old in self._objects else standing.payload[old]
            standing.rename(old, new)
            self._note(new, tensor)
        for number, name in op.became:
            self._note(name, leaves(given)[number])
        self._bind(op.places, tensors(outcome))
        return outcome

    def _bind(self, places: Sequence[Place], made: Sequence[torch.Tensor]) -> None:
        """Note the values among what was made, and leave the forward when nothing is missing any more."""
        for place, tensor in zip(places, made, strict=False):
            if place.name:
                self._note(place.name, tensor)
        if self._at == self._last and not self._missing and not self._part.last:
            self._left = True
            raise Left

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        if self._counting:
            self._alive[id(tensor)] = self._objects[name] = tensor
        if name in self._missing:
            self._missing.remove(name)
            self._made[name] = tensor.local if type(tensor) is Apart else tensor

    def _above(self) -> tuple[TorchFunctionMode, ...]:
        """The modes that the model has entered."""
        stack = _get_current_function_mode_stack()
        return tuple(stack[stack.index(self._mode) + 1 :]) if self._mode in stack else ()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Within a block, glue is not followed."""
        stack = _get_current_function_mode_stack() if self._mode is not None else []
        if stack and stack[-1] is self._mode:
            with _pop_mode_temporarily():
                yield
        elif self._mode is not None:  # the model has entered a mode of its own
            self._mode.quiet = True
            try:
                yield
            finally:
                self._mode.quiet = False
        else:
            yield
