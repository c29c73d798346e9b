"""Which values cross the borders between blocks: learnt by following one forward from operation to operation.

Whatever a block gives out is a value, and whatever glue computes with a value is one too; what glue computes without is not, for
every part of the model can compute it for itself. Names count the operations of glue behind each visit, those with values only: a
mask that is made once and kept, or not, changes no name.

    x = embed(ids)         embed          x.shape, mask_of(x.shape)      no values: nothing but the shape of x is looked at
    h = x * 8              embed+0        z = h.flatten(1)               a view: who has h makes it for himself
    y, bias = layer(h)     layer, layer:1

What cannot be said by values spoils borders, by name: numbers that the forward reads from a value, shapes that depend on one,
tensors that leave a block by an attribute, what a block writes into things that it was given.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.core.anatomy import visit_of
from meshwright.model.apart import Apart
from meshwright.model.captured import marks
from meshwright.model.course import Op, Place, Record, Seen, Stub, template
from meshwright.model.drive import LARGER, Drive
from meshwright.model.glue import BY_SHAPE, DRAW, READS, SHAPED_AS, Reads, is_plain, title, where
from meshwright.model.handed import distinct
from meshwright.model.late import HOOKS, INSIDE, Late
from meshwright.model.only import Dealt
from meshwright.model.paths import leaf_names
from meshwright.model.remembered import caches, forget_in
from meshwright.model.values import leaves, storage_of, tensors

REPAIR = f"compute with tensors there, or {LARGER}"
ALIASES = "write x = x + y for x += y"


def record(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    call: Callable[[], Any],
    enter: Callable[[str], None],
    drawn: Callable[[], int] = lambda: 0,
    needed: Container[int] | None = None,
    dealt: Dealt | None = None,
) -> Record:
    """What one forward of `module`, run by `call()`, shows of the values between its `blocks`; `enter` hears of each visit.

    In the mode of gradients in which it is called: without, every call of a block is a visit. `drawn` counts the draws of random
    numbers since the last visit was entered; `needed` are the places of the outputs that somebody takes (None: all). With `dealt`
    the forward runs as it does where a rank has some of the tokens.
    """
    drive, following = Drive(blocks, cut=False), _Following(module, enter, drawn, dealt)
    enter("")
    try:
        with following, drive.guided(following.block):
            following.end(call(), needed)
    finally:
        drive.detach()
    return following.record


class _Following(TorchFunctionMode):
    """Follows a forward; `record` is what it shows."""

    def __init__(self, module: nn.Module, enter: Callable[[str], None], drawn: Callable[[], int], dealt: Dealt | None) -> None:
        super().__init__()
        self.record, self._caches = Record(), caches(module)
        self._late = Late(self.record)
        self._parameters = {id(parameter): name for name, parameter in module.named_parameters()}
        self._buffers = {id(buffer): name for name, buffer in module.named_buffers()}
        self._enter, self._drawn, self._dealt = enter, drawn, dealt
        self._drew = "", ""  # the visit that drew random numbers last, or behind which glue drew them for values; and who did
        self._grad = torch.is_grad_enabled()
        self._calls, self._busy, self._visit = dict[str, int](), False, ""  # the visit that was called last
        self._given: set[int] | None = None  # tensors that the visit was given; None: it has ended
        self._names = WeakIdKeyDictionary()  # the value that a tensor is
        self._home = WeakIdKeyDictionary()  # the visit within which a tensor was made
        self._torn: dict[str, tuple[str, str, str]] = {}  # a value that must not cross apart from a view of it: from, to, where
        self._written: set[int] = set()  # storages

    def block(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A block is called: the drive's guide."""
        if torch.is_grad_enabled() != self._grad:
            return run(*args, **kwargs)
        self._busy = True
        forget_in(self._caches)  # a table that blocks ask a cache for is made by each of them
        self._calls[name] = self._calls.get(name, 0) + 1
        self._visit = visit = visit_of(name, self._calls[name])
        self.record.visits.append(visit)
        for tensor in tensors((args, kwargs)):
            self._use(tensor)
        if self._dealt is not None:
            args, kwargs = self._dealt.enter(visit, (args, kwargs))
        given = tensors((args, kwargs))
        everything, capturing = leaves((args, kwargs)), marks()
        versions = [tensor._version for tensor in given]
        self._given, self._busy = {id(tensor) for tensor in given}, False
        self._enter(visit)
        outputs = run(*args, **kwargs)
        self._given, self._busy = None, True
        self._drew = (visit, "the block draws") if self._drawn() else self._drew
        if [tensor._version for tensor in given] != versions:
            self._spoil(visit, None, f"'{visit}' writes into a tensor that it is given, which other parts have too", ALIASES)
        if [id(tensor) for tensor in tensors((args, kwargs))] != [id(tensor) for tensor in given]:
            self._spoil(visit, None, f"'{visit}' writes into a list or dict that it is given", "return what it adds")
        outputs = outputs if self._dealt is None else self._dealt.leave(outputs)
        self._gives(visit, outputs, everything, [(mark.channel, mark.added) for mark in capturing])
        self._busy = False
        return outputs

    def end(self, outputs: Any, needed: Container[int] | None) -> None:
        """The forward has ended with `outputs`, of which those at the places `needed` are."""
        self._busy = True
        for place, tensor in enumerate(distinct(outputs)):
            if needed is None or place in needed:
                self._use(tensor, glue=True)
        self.record.spoils += self._late.spoils()

    def _gives(self, visit: str, outputs: Any, given: Sequence[Any], captured: list[tuple[str, list[Any]]]) -> None:
        """Name what a visit gives out, and note what will stand for it."""
        places = {id(leaf): Place(given=number) for number, leaf in enumerate(given) if not is_plain(leaf)}
        found, number = tensors([outputs, *(added for _, added in captured)]), 0
        for tensor in found:
            if tensor in self._names:
                places[id(tensor)] = Place(self._names[tensor])
            elif id(tensor) not in places:
                name = f"{visit}:{number}" if number else visit
                number += 1
                self._name(tensor, name)
                places[id(tensor)] = Place(name)
        unseen = [leaf for leaf in leaves(outputs) if not is_plain(leaf) and id(leaf) not in places]
        if unseen:
            what = f"'{visit}' gives out a {type(unseen[0]).__name__}, into which nobody looks"
            self._spoil(visit, None, what, "return tensors bare, in tuples, lists, dicts or dataclasses")
        self.record.stubs[visit] = Stub(
            template(outputs, places),
            tuple((channel, template(added, places)) for channel, added in captured),
            tuple(places[id(tensor)] for tensor in found),
        )
        self.record.ops[visit] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._busy or not self._visit:
            return func(*args, **kwargs)
        if self._given is None:
            return self._glue(func, args, kwargs)
        if func.__name__ in HOOKS and id(args[0]) in self._given:
            self._spoil(self.record.visits[0], None, f"'{self._visit}' hangs a hook on the gradient of what it is given", INSIDE)
        for tensor in tensors((args, kwargs)):
            if id(tensor) not in self._given:
                self._busy = True
                self._use(tensor)
                self._busy = False
        outcome = func(*args, **kwargs)
        for tensor in tensors(outcome):
            if tensor not in self._names and tensor not in self._home and id(tensor) not in self._given:
                self._home[tensor] = self._visit
        return outcome

    def _glue(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Glue calls `func`: where it computes with values, it makes values."""
        self._busy = True
        given = tensors((args, kwargs))
        looked = given[:1] if func.__name__ in SHAPED_AS else given
        values = {id(tensor): tensor for tensor in looked if tensor in self._names or tensor in self._home}
        count = self._drawn()
        if not values or func.__name__ in BY_SHAPE:
            outcome = func(*args, **kwargs)
            if self._drawn() > count and self._drew[0] == self._visit:
                what = f"the glue behind '{self._visit}' draws numbers for all parts (at {where()}), after others that "
                self._spoil(self._visit, None, f"{what}{self._drew[1]}, which parts behind it do not", DRAW)
            self._busy = False
            return outcome
        versions, watch = [tensor._version for tensor in given], Reads()
        with watch:
            outcome = func(*args, **kwargs)
        self._drew = (self._visit, "it draws for values") if self._drawn() > count else self._drew
        written = {id(t): t for t, version in zip(given, versions, strict=True) if t._version != version}
        if func.__name__ in HOOKS:
            self._late.hooked([self._names[each] for each in values.values() if each in self._names], self._visit, where())
        if watch.reads or func.__name__ in READS:
            self._note_read(title(func), values)
        elif tensors(outcome) or written:
            outcome = self._make(title(func), args, kwargs, values, written, outcome)
        self._busy = False
        return outcome

    def _note_read(self, func: str, values: Mapping[int, torch.Tensor]) -> None:
        for tensor in values.values():
            self._use(tensor, glue=True)
        names = ", ".join(str(self._names.get(tensor) or self._home[tensor]) for tensor in values.values())
        what = f"the glue behind '{self._visit}' reads the value of {names} ({func} at {where()}), and every later part needs it"
        self._spoil(self._visit, None, what, REPAIR)

    def _make(self, func: str, args: Any, kwargs: Any, values: dict[int, Any], written: dict[int, Any], outcome: Any) -> Any:
        """Name what an operation of glue makes and what it writes into."""
        visit, line = self._visit, where()
        ops, everything = self.record.ops[visit], leaves((args, kwargs))
        for tensor in values.values():
            self._use(tensor, glue=True)
        for leaf in everything:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in values:
                self._note_roots(leaf)
        here = f"{visit}+{len(ops)}"
        first = {storage_of(tensor): tensor for tensor in reversed(written.values()) if tensor in self._names}  # of each storage
        renamed: list[tuple[str, str]] = []
        for tensor in first.values():
            renamed += self._rewritten(tensor, here, len(renamed), func, line)
        became = []
        for number, leaf in enumerate(everything):
            if id(leaf) in written and leaf not in self._names:
                became.append((number, f"{here}={number}"))
                self._written.add(storage_of(leaf))
                self._name(leaf, became[-1][1], func, line)
        places = {id(leaf): Place(given=number) for number, leaf in enumerate(everything) if not is_plain(leaf)}
        found, number = tensors(outcome), 0
        for tensor in found:
            if tensor in self._names:
                places[id(tensor)] = Place(self._names[tensor])
            elif id(tensor) not in places:
                name = f"{here}:{number}" if number else here
                number += 1
                self._name(tensor, name, func, line, self._base(func, list(values.values()), tensor))
                places[id(tensor)] = Place(name)
        ops.append(
            Op(func, template(outcome, places), tuple(places[id(tensor)] for tensor in found), tuple(renamed), tuple(became))
        )
        return outcome

    def _rewritten(self, tensor: torch.Tensor, name: str, count: int, func: str, line: str) -> list[tuple[str, str]]:
        """New names for all values that lie in the storage that was written by way of `tensor`; `count` are named."""
        place = {visit: number for number, visit in enumerate(self.record.visits)}
        storage = storage_of(tensor)
        self._written.add(storage)
        sharing = [t for t in self._names if storage_of(t) == storage]
        made = {id(t): self.record.seen[self._names[t]].made for t in sharing}
        renamed = []
        for number, other in enumerate([tensor, *(t for t in sharing if t is not tensor)], count):
            old, new = self._names[other], f"{name}~{number}" if number else f"{name}~"
            self._name(other, new, func, line)
            renamed.append((old, new))
            if other is not tensor:
                since = max(made[id(other)], made.get(id(tensor), ""), key=lambda visit: place.get(visit, -1))
                self._torn[new] = since, self._visit, line
        return renamed

    def _name(self, tensor: torch.Tensor, name: str, op: str = "", line: str = "", base: str = "") -> None:
        self._names[tensor] = name
        self._late.named(name, op)
        needed = tensor.requires_grad and torch.is_grad_enabled()
        along = tensor.along if type(tensor) is Apart else None
        self.record.seen[name] = Seen(self._visit, tuple(tensor.shape), tensor.dtype, needed, op, line, base, along)

    def _base(self, func: str, values: Sequence[torch.Tensor], tensor: torch.Tensor) -> str:
        """The value of which `tensor` is a view that has no fewer elements; "" where it is no such view."""
        if len(values) != 1 or func == "as_strided" or values[0] not in self._names or values[0].numel() > tensor.numel():
            return ""
        storage = storage_of(tensor)
        return self._names[values[0]] if storage == storage_of(values[0]) and storage not in self._written else ""

    def _use(self, tensor: torch.Tensor, *, glue: bool = False) -> None:
        """The visit that was called last uses `tensor`, or the `glue` behind it does."""
        home = self._home.get(tensor)
        if tensor in self._names:
            name = self._names[tensor]
            self._late.used(name, tensor)
            users = self.record.used.setdefault(name, [])
            if self._visit not in users:
                users.append(self._visit)
            if name in self._torn:
                first, last, line = self._torn[name]
                what = f"'{name}' and a view of it are written into as one behind '{last}' ({line}), and would cross apart"
                self._spoil(first, last, what, ALIASES)
        elif home is not None and (glue or home != self._visit):
            who = f"the glue behind '{self._visit}'" if glue else f"'{self._visit}'"
            buffer = self._buffers.get(id(tensor))
            what, fix = f"{who} uses a tensor that '{home}' made and did not give out", "return it among the outputs"
            if buffer is not None:
                what, fix = f"{who} uses the buffer '{buffer}', which '{home}' writes", "give each block a buffer of its own"
            self._spoil(home, None if glue else self._visit, what, f"{fix}, or {LARGER}")
        elif self._written and storage_of(tensor) in self._written and not isinstance(tensor, nn.Parameter):
            what = f"'{self._visit}' uses a view, made before, of a tensor into which values were written"
            self._spoil(self.record.visits[0], None, what, ALIASES)
        else:
            self._note_roots(tensor)

    def _note_roots(self, tensor: torch.Tensor) -> None:
        """The visit that was called last, or glue behind it, uses what glue has made of parameters, or a parameter itself."""
        if not tensor.requires_grad or self._given is not None:
            return
        names = {self._parameters.get(id(tensor))} if tensor.is_leaf else leaf_names(tensor, self._parameters)
        for name in filter(None, names):
            self.record.roots.setdefault(name, []).append(self._visit)

    def _spoil(self, first: str, last: str | None, why: str, fix: str) -> None:
        self.record.spoils.append((first, last, why, fix))
