"""What stands in a run of one part for the values of other parts: Foreign tensors, and what was received for some of them.

Say glue computes y = x * 8, where another part makes x:

    before the part begins    x is a Foreign, and y is another, as the course of the forward says: nothing is computed, but for
                              views of what was received, which everybody makes for himself
    afterwards                y is computed with what was received for x; where nothing was, a fault names x
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from meshwright.model.blocks.user_checkpointing import CHECKPOINTING, REPAIR, checkpointed
from meshwright.model.pipeline.forward_graph import Course, Op, Place
from meshwright.model.tensors.function_modes import BY_SHAPE, READS, SHAPED_AS, title, where
from meshwright.model.tensors.placeholder import Foreign, foreign, foreigns, natively
from meshwright.model.tensors.pytree import leaves, mapped, swap, tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.stage_boundaries import Part

Looks = Callable[[tuple[int, ...]], tuple[int, ...]]  # of the shape that a value has in the whole model, that which glue sees
ANOTHER_WAY = "let every forward take the way of the trial run, whatever the data are; or leave the model whole"


class Standing:
    """The values of other parts in a run of `part` on so many `rows`; `payload` holds what was received for them, by name.

    Glue that can be computed is, by `call(func, args, kwargs)`; it sees values of other parts in the shape that `looks` says.
    """

    def __init__(
        self,
        course: Course,
        part: Part,
        rows: int,
        device: torch.device,
        payload: dict[str, torch.Tensor],
        call: Callable[[Any, Any, Any], Any],
        looks: Looks,
    ) -> None:
        self.payload, self.call, self._looks = payload, call, looks
        self._course, self._part, self._rows, self._device = course, part, rows, device
        self._bearers: dict[str, torch.Tensor] = {}  # what the model holds for a value
        self._real: dict[int, str] = {}  # tensors that every part makes, by id, into which another part wrote values: the name
        self._begun = False
        self._visit = ""
        self._ops: Sequence[Op] = ()
        self._number = 0

    def reach(self, visit: str, *, begun: bool) -> None:
        """The forward reaches `visit`; the part has `begun`, or this belongs to an earlier one."""
        self._visit, self._begun = visit, begun
        self._ops, self._number = self._course.ops[visit], 0

    def ended(self) -> None:
        """The forward has ended."""
        self._visit = ""
        self.payload.clear()
        self._bearers.clear()
        self._real.clear()

    def operation(self, func: Any) -> Op | None:
        """The next operation of the course behind this visit, where `func` is that."""
        found = self._number < len(self._ops) and self._ops[self._number].func == title(func)
        return self._ops[self._number] if found else None

    def operated(self) -> None:
        """That operation has been done."""
        self._number += 1

    def filled(self, template: Any, given: Any) -> Any:
        """What a visit or an operation, which was given `given`, would have given out."""
        return self._leaf(given, template) if type(template) is Place else mapped(template, partial(self._leaf, given))

    def _leaf(self, given: Any, leaf: Any) -> Any:
        if type(leaf) is not Place:
            return leaf
        if not leaf.name:
            return leaves(given)[leaf.given]
        if leaf.name not in self._bearers:
            seen, shape = self._course.seen[leaf.name], self._looks(self._course.shape(leaf.name, self._rows))
            needed = seen.needed and torch.is_grad_enabled()
            self._bearers[leaf.name] = foreign(leaf.name, self, shape, seen.dtype, self._device, needed=needed)
        return self._bearers[leaf.name]

    def among(self, value: Any) -> dict[int, str]:
        """The values of other parts among the tensors in `value`: their names, by id."""
        found: dict[int, str] = {}
        for each in tensors(value):
            if type(each) is Foreign:
                found[id(each)] = each.value
            elif self._real and id(each) in self._real:
                found[id(each)] = self._real[id(each)]
        return found

    def real(self, given: Any, who: str) -> Any:
        """`given` with what was received in place of values of other parts. Raises PlanError for one that was not.

        And where a block that takes one runs again in backward, by the model's own doing: that run would be given the value anew.
        """
        found = self.among(given)
        if found and checkpointed():
            name = min(found.values())
            text = f"{who} '{name}', which comes from another part, and runs again in backward ({CHECKPOINTING})"
            raise PlanError(text, fix=REPAIR, where="model")
        for name in found.values():
            if name not in self.payload:
                raise self._not_received(name, who)
        return self._swapped(given, found)

    def known(self, value: Any) -> Any:
        """`value` with what was received in place of values of other parts, where something was."""
        return self._swapped(value, {key: name for key, name in self.among(value).items() if name in self.payload})

    def _swapped(self, value: Any, found: Mapping[int, str]) -> Any:
        return swap(value, {key: self.payload[name] for key, name in found.items()}) if found else value

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outcome of `func` on arguments among which there is a value of another part."""
        if func.__name__ in SHAPED_AS and isinstance(args[1], Foreign):
            args = (args[0], self._blank(args[1]))
        found = self.among((args, kwargs))
        if not found:
            return self.call(func, args, kwargs)
        ready = all(name in self.payload for name in found.values())
        op = None if self._begun else self.operation(func)
        if op is not None:
            return self._foretold(op, func, (args, kwargs), ready=ready)
        if ready and (self._begun or func.__name__ in READS):
            args, kwargs = self.known((args, kwargs))
            return self.call(func, args, kwargs)
        if func.__name__ in BY_SHAPE:
            args, kwargs = swap((args, kwargs), {id(each): self._blank(each) for each in foreigns((args, kwargs))})
            return self.call(func, args, kwargs)
        if func.__name__ in READS:
            raise self.unknown(title(func), min(found.values()))
        outcome = natively(func, args, kwargs)
        if self._real and tensors(outcome):  # a Foreign would have said so itself
            raise self.unknown(title(func), min(found.values()))
        return outcome

    def _blank(self, like: Foreign) -> torch.Tensor:
        """A tensor like that on memory of one element: for those who look at its shape."""
        return torch.empty((), dtype=like.dtype, device=self._device).expand(like.shape)

    def _foretold(self, op: Op, func: Any, given: Any, *, ready: bool) -> Any:
        """What `op`, which belongs to another part, gives; a view of what was received is made of that."""
        self.operated()
        for old, new in op.renamed:
            self.rename(old, new)
        for number, name in op.became:
            self._bearers[name] = leaves(given)[number]
            self._real[id(self._bearers[name])] = name
        outcome = self.filled(op.outcome, given)
        if ready and any(place.name and self._course.base(place.name) for place in op.places):
            args, kwargs = self.known(given)
            made = tensors(self.call(func, args, kwargs))
            self.payload |= {place.name: tensor for place, tensor in zip(op.places, made, strict=True)}
        return outcome

    def rename(self, old: str, new: str) -> None:
        """The tensor that was the value `old` is `new` from here on: somebody writes into it."""
        if old in self._bearers:
            bearer = self._bearers[new] = self._bearers.pop(old)
            if isinstance(bearer, Foreign):
                bearer.value = new
            else:
                self._real[id(bearer)] = new
            if self._begun and old in self.payload:
                self.payload[new] = self.payload[old]

    def unknown(self, what: str, name: str) -> Exception:
        """The error for `what`, a computation that needs the numbers of the value `name`."""
        if not self._visit:
            return self._not_received(name, f"behind the forward, {what} (at {where()}) takes")
        glue = f"the glue behind '{self._visit}' computes {what} (at {where()}) with"
        if self._begun:
            return self._not_received(name, glue)
        text = f"{glue} '{name}', which it did not in the trial run"
        return PlanError(text, fix=ANOTHER_WAY, where="model")

    def _not_received(self, name: str, who: str) -> PlanError:
        seen, first = self._course.seen[name], self._part.visits[0]
        value = f"'{name}'" + (f" ({seen.op} at {seen.where})" if seen.op else "")
        text = f"{who} the value {value}, made behind '{seen.made}', which the part that begins with '{first}' did not receive"
        fix = f"hand it over from the part of '{seen.made}', or begin the part with '{seen.made}'"
        return PlanError(text, fix=fix, where="received")
