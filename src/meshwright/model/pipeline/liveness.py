"""Which values cross the borders between blocks: learnt by following one forward from operation to operation.

Whatever a block gives out is a value, and whatever glue computes with a value is one too; what glue computes without is not, for
every part of the model can compute it for itself. Names count the operations of glue behind each visit, those with values only: a
mask that is made once and kept, or not, changes no name.

    x = embed(ids)         embed          x.shape, mask_of(x.shape)      no values: nothing but the shape of x is looked at
    h = x * 8              embed+0        z = h.flatten(1)               a view: who has h makes it for himself
    y, bias = layer(h)     layer, layer:1

What cannot be said by values spoils borders, by name: numbers that the forward reads from a value, shapes that depend on one,
tensors that leave a block by an attribute, what a block writes into things that it was given.

What becomes of a value behind the line that makes it, which a part that is left as soon as all is there would miss.

    x = Flip.apply(x)                 an autograd.Function: its forward makes x with gradients off, and x gets its way back when
                                      that forward has ended
    x.register_hook(clip)             nothing is made, and the gradient of x is another

So the border behind such a line is closed: a part that ends there would leave in front of it. All others are as open as ever.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.model.blocks.driver import LARGER, Drive
from meshwright.model.blocks.graph_check import leaf_names
from meshwright.model.blocks.loss_inputs import distinct
from meshwright.model.hf.output_capture import marks
from meshwright.model.pipeline.forward_graph import Op, Place, Record, Seen, Stub, template
from meshwright.model.sequence_parallel.sharded_activation import Apart
from meshwright.model.sequence_parallel.sharded_forward import Dealt
from meshwright.model.tensors.fake_cache import caches, forget_in
from meshwright.model.tensors.function_modes import BY_SHAPE, DRAW, READS, SHAPED_AS, Reads, is_plain, title, where
from meshwright.model.tensors.pytree import leaves, storage_of, tensors
from meshwright.plan.model_spec.model_spec import visit_of

HOOKS = frozenset(("register_hook",))
FUNCTION = f"begin no part behind that line, or {LARGER}"
INSIDE = "hang it where the model is called, or on a tensor that the block makes"


class Late:
    """Follows the values of `record`, and says which borders must stay closed."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._off: set[str] = set()  # values that were made while gradients were off
        self._found: list[tuple[str, str, str]] = []  # a value, the visit behind which it was changed, and what happened

    def named(self, name: str, op: str) -> None:
        """The value `name` is made now by `op`: that of a scripted function is told below autograd, by its kernel."""
        if not torch.is_grad_enabled() or op.endswith(".default"):
            self._off.add(name)

    def used(self, name: str, tensor: torch.Tensor) -> None:
        """The value `name` is used: it may have got its gradient since it was made."""
        seen = self._record.seen[name]
        if tensor.requires_grad and not seen.needed and name in self._off and torch.is_grad_enabled():
            self._record.seen[name] = replace(seen, needed=True)
            what = (
                f"'{name}' ({seen.op} at {seen.where}) is made with gradients off (autograd.Function, script), and then needs one"
            )
            self._found.append((name, seen.made, what))

    def hooked(self, names: Iterable[str], visit: str, line: str) -> None:
        """Glue behind `visit` hangs a hook on the gradients of values."""
        self._found += ((name, visit, f"a hook is hung on the gradient of '{name}' (at {line})") for name in names)

    def spoils(self) -> Iterator[tuple[str, str | None, str, str]]:
        """The borders from where values were made to the visit that follows what became of them; to the end, where both did."""
        visits, names = self._record.visits, [name for name, _, _ in self._found]
        for name, since, what in self._found:
            made, following = self._record.seen[name].made, visits.index(since) + 1
            if following < len(visits):
                last = visits[following] if names.count(name) == 1 else None
                yield made, last, f"{what}, which a part that ends in front of it would miss", FUNCTION


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
