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

from meshwright.model.blocks.driver import LARGER_BLOCK_FIX, ForwardDriver
from meshwright.model.blocks.graph_check import reachable_leaf_names
from meshwright.model.blocks.loss_inputs import distinct_tensors
from meshwright.model.hf.output_capture import capture_marks
from meshwright.model.pipeline.forward_graph import (
    BlockCallStub,
    ForwardRecord,
    GlueOp,
    RecordedValue,
    ValueRef,
    with_value_refs,
)
from meshwright.model.sequence_parallel.sharded_activation import SequenceShardedTensor
from meshwright.model.sequence_parallel.sharded_forward import ShardedForward
from meshwright.model.tensors.fake_cache import clear_caches_with_fakes, lru_caches
from meshwright.model.tensors.function_modes import (
    RANDOM_GLUE_FIX,
    SHAPE_FROM_SECOND_ARG,
    SHAPE_ONLY_FACTORIES,
    VALUE_READS,
    ValueReadMode,
    caller_line,
    function_title,
    is_constant,
)
from meshwright.model.tensors.pytree import storage_id, tree_tensors, value_leaves
from meshwright.plan.model_spec.model_spec import block_call_name

TENSOR_HOOKS = frozenset(("register_hook",))
LATE_GRAD_FIX = f"begin no part behind that line, or {LARGER_BLOCK_FIX}"
HOOK_FIX = "hang it where the model is called, or on a tensor that the block makes"


class LateGrads:
    """Follows the values of `record`, and says which borders must stay closed."""

    def __init__(self, record: ForwardRecord) -> None:
        self._record = record
        self._made_without_grad: set[str] = set()  # values that were made while gradients were off
        self._found: list[
            tuple[str, str, str]
        ] = []  # a value, the visit behind which it was changed, and what happened

    def note_value(self, name: str, op: str) -> None:
        """The value `name` is made now by `op`: that of a scripted function is told below autograd, by its kernel."""
        if not torch.is_grad_enabled() or op.endswith(".default"):
            self._made_without_grad.add(name)

    def note_use(self, name: str, tensor: torch.Tensor) -> None:
        """The value `name` is used: it may have got its gradient since it was made."""
        seen = self._record.values[name]
        if (
            tensor.requires_grad
            and not seen.needs_grad
            and name in self._made_without_grad
            and torch.is_grad_enabled()
        ):
            self._record.values[name] = replace(seen, needs_grad=True)
            what = f"'{name}' ({seen.op} at {seen.source_line}) is made with gradients off (autograd.Function, script), and then needs one"
            self._found.append((name, seen.producer, what))

    def note_hook(self, names: Iterable[str], block_call: str, line: str) -> None:
        """Glue behind `visit` hangs a hook on the gradients of values."""
        self._found += (
            (name, block_call, f"a hook is hung on the gradient of '{name}' (at {line})") for name in names
        )

    def boundary_blockers(self) -> Iterator[tuple[str, str | None, str, str]]:
        """The borders from where values were made to the visit that follows what became of them; to the end, where both did."""
        visits, names = self._record.block_calls, [name for name, _, _ in self._found]
        for name, since, what in self._found:
            made, following = self._record.values[name].producer, visits.index(since) + 1
            if following < len(visits):
                last = visits[following] if names.count(name) == 1 else None
                yield made, last, f"{what}, which a part that ends in front of it would miss", LATE_GRAD_FIX


VALUE_READ_FIX = f"compute with tensors there, or {LARGER_BLOCK_FIX}"
IN_PLACE_FIX = "write x = x + y for x += y"


def record_forward(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    run_forward: Callable[[], Any],
    on_block_call: Callable[[str], None],
    count_draws: Callable[[], int] = lambda: 0,
    used_outputs: Container[int] | None = None,
    sharded_forward: ShardedForward | None = None,
) -> ForwardRecord:
    """What one forward of `module`, run by `call()`, shows of the values between its `blocks`; `enter` hears of each visit.

    In the mode of gradients in which it is called: without, every call of a block is a visit. `drawn` counts the draws of random
    numbers since the last visit was entered; `needed` are the places of the outputs that somebody takes (None: all). With `dealt`
    the forward runs as it does where a rank has some of the tokens.
    """
    drive, following = (
        ForwardDriver(blocks, cut_graph=False),
        _ForwardRecorder(module, on_block_call, count_draws, sharded_forward),
    )
    on_block_call("")
    try:
        with following, drive.use_interceptor(following.run_block):
            following.finish(run_forward(), used_outputs)
    finally:
        drive.detach()
    return following.record


class _ForwardRecorder(TorchFunctionMode):
    """Follows a forward; `record` is what it shows."""

    def __init__(
        self,
        module: nn.Module,
        enter: Callable[[str], None],
        drawn: Callable[[], int],
        dealt: ShardedForward | None,
    ) -> None:
        super().__init__()
        self.record, self._caches = ForwardRecord(), lru_caches(module)
        self._late_grads = LateGrads(self.record)
        self._parameters = {id(parameter): name for name, parameter in module.named_parameters()}
        self._buffers = {id(buffer): name for name, buffer in module.named_buffers()}
        self._on_block_call, self._count_draws, self._sharded_forward = enter, drawn, dealt
        self._last_draw = (
            "",
            "",
        )  # the visit that drew random numbers last, or behind which glue drew them for values; and who did
        self._grad_enabled = torch.is_grad_enabled()
        self._calls, self._paused, self._block_call = (
            dict[str, int](),
            False,
            "",
        )  # the visit that was called last
        self._input_ids: set[int] | None = None  # tensors that the visit was given; None: it has ended
        self._names = WeakIdKeyDictionary()  # the value that a tensor is
        self._made_in = WeakIdKeyDictionary()  # the visit within which a tensor was made
        self._inseparable: dict[
            str, tuple[str, str, str]
        ] = {}  # a value that must not cross apart from a view of it: from, to, where
        self._written_storages: set[int] = set()  # storages

    def run_block(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A block is called: the drive's guide."""
        if torch.is_grad_enabled() != self._grad_enabled:
            return run(*args, **kwargs)
        self._paused = True
        clear_caches_with_fakes(self._caches)  # a table that blocks ask a cache for is made by each of them
        self._calls[name] = self._calls.get(name, 0) + 1
        self._block_call = visit = block_call_name(name, self._calls[name])
        self.record.block_calls.append(visit)
        for tensor in tree_tensors((args, kwargs)):
            self._record_use(tensor)
        if self._sharded_forward is not None:
            args, kwargs = self._sharded_forward.enter_block(visit, (args, kwargs))
        given = tree_tensors((args, kwargs))
        everything, capturing = value_leaves((args, kwargs)), capture_marks()
        versions = [tensor._version for tensor in given]
        self._input_ids, self._paused = {id(tensor) for tensor in given}, False
        self._on_block_call(visit)
        outputs = run(*args, **kwargs)
        self._input_ids, self._paused = None, True
        self._last_draw = (visit, "the block draws") if self._count_draws() else self._last_draw
        if [tensor._version for tensor in given] != versions:
            self._block_boundaries(
                visit,
                None,
                f"'{visit}' writes into a tensor that it is given, which other parts have too",
                IN_PLACE_FIX,
            )
        if [id(tensor) for tensor in tree_tensors((args, kwargs))] != [id(tensor) for tensor in given]:
            self._block_boundaries(
                visit, None, f"'{visit}' writes into a list or dict that it is given", "return what it adds"
            )
        outputs = outputs if self._sharded_forward is None else self._sharded_forward.leave_block(outputs)
        self._record_outputs(
            visit, outputs, everything, [(mark.channel, mark.added_tensors) for mark in capturing]
        )
        self._paused = False
        return outputs

    def finish(self, outputs: Any, used_outputs: Container[int] | None) -> None:
        """The forward has ended with `outputs`, of which those at the places `needed` are."""
        self._paused = True
        for place, tensor in enumerate(distinct_tensors(outputs)):
            if used_outputs is None or place in used_outputs:
                self._record_use(tensor, glue=True)
        self.record.boundary_blockers += self._late_grads.boundary_blockers()

    def _record_outputs(
        self, visit: str, outputs: Any, given: Sequence[Any], captured: list[tuple[str, list[Any]]]
    ) -> None:
        """Name what a visit gives out, and note what will stand for it."""
        places = {
            id(leaf): ValueRef(input_index=number)
            for number, leaf in enumerate(given)
            if not is_constant(leaf)
        }
        found, number = tree_tensors([outputs, *(added for _, added in captured)]), 0
        for tensor in found:
            if tensor in self._names:
                places[id(tensor)] = ValueRef(self._names[tensor])
            elif id(tensor) not in places:
                name = f"{visit}:{number}" if number else visit
                number += 1
                self._add_value(tensor, name)
                places[id(tensor)] = ValueRef(name)
        unseen = [leaf for leaf in value_leaves(outputs) if not is_constant(leaf) and id(leaf) not in places]
        if unseen:
            what = f"'{visit}' gives out a {type(unseen[0]).__name__}, into which nobody looks"
            self._block_boundaries(
                visit, None, what, "return tensors bare, in tuples, lists, dicts or dataclasses"
            )
        self.record.stubs[visit] = BlockCallStub(
            with_value_refs(outputs, places),
            tuple((channel, with_value_refs(added, places)) for channel, added in captured),
            tuple(places[id(tensor)] for tensor in found),
        )
        self.record.ops[visit] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused or not self._block_call:
            return func(*args, **kwargs)
        if self._input_ids is None:
            return self._run_glue(func, args, kwargs)
        if func.__name__ in TENSOR_HOOKS and id(args[0]) in self._input_ids:
            self._block_boundaries(
                self.record.block_calls[0],
                None,
                f"'{self._block_call}' hangs a hook on the gradient of what it is given",
                HOOK_FIX,
            )
        for tensor in tree_tensors((args, kwargs)):
            if id(tensor) not in self._input_ids:
                self._paused = True
                self._record_use(tensor)
                self._paused = False
        outcome = func(*args, **kwargs)
        for tensor in tree_tensors(outcome):
            if (
                tensor not in self._names
                and tensor not in self._made_in
                and id(tensor) not in self._input_ids
            ):
                self._made_in[tensor] = self._block_call
        return outcome

    def _run_glue(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Glue calls `func`: where it computes with values, it makes values."""
        self._paused = True
        given = tree_tensors((args, kwargs))
        looked = given[:1] if func.__name__ in SHAPE_FROM_SECOND_ARG else given
        values = {id(tensor): tensor for tensor in looked if tensor in self._names or tensor in self._made_in}
        count = self._count_draws()
        if not values or func.__name__ in SHAPE_ONLY_FACTORIES:
            outcome = func(*args, **kwargs)
            if self._count_draws() > count and self._last_draw[0] == self._block_call:
                what = f"the glue behind '{self._block_call}' draws numbers for all parts (at {caller_line()}), after others that "
                self._block_boundaries(
                    self._block_call,
                    None,
                    f"{what}{self._last_draw[1]}, which parts behind it do not",
                    RANDOM_GLUE_FIX,
                )
            self._paused = False
            return outcome
        versions, watch = [tensor._version for tensor in given], ValueReadMode()
        with watch:
            outcome = func(*args, **kwargs)
        self._last_draw = (
            (self._block_call, "it draws for values") if self._count_draws() > count else self._last_draw
        )
        written = {id(t): t for t, version in zip(given, versions, strict=True) if t._version != version}
        if func.__name__ in TENSOR_HOOKS:
            self._late_grads.note_hook(
                [self._names[each] for each in values.values() if each in self._names],
                self._block_call,
                caller_line(),
            )
        if watch.reads_values or func.__name__ in VALUE_READS:
            self._record_read(function_title(func), values)
        elif tree_tensors(outcome) or written:
            outcome = self._record_op(function_title(func), args, kwargs, values, written, outcome)
        self._paused = False
        return outcome

    def _record_read(self, func: str, values: Mapping[int, torch.Tensor]) -> None:
        for tensor in values.values():
            self._record_use(tensor, glue=True)
        names = ", ".join(str(self._names.get(tensor) or self._made_in[tensor]) for tensor in values.values())
        what = f"the glue behind '{self._block_call}' reads the value of {names} ({func} at {caller_line()}), and every later part needs it"
        self._block_boundaries(self._block_call, None, what, VALUE_READ_FIX)

    def _record_op(
        self, func: str, args: Any, kwargs: Any, values: dict[int, Any], written: dict[int, Any], outcome: Any
    ) -> Any:
        """Name what an operation of glue makes and what it writes into."""
        visit, line = self._block_call, caller_line()
        ops, everything = self.record.ops[visit], value_leaves((args, kwargs))
        for tensor in values.values():
            self._record_use(tensor, glue=True)
        for leaf in everything:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in values:
                self._record_root_params(leaf)
        here = f"{visit}+{len(ops)}"
        first = {
            storage_id(tensor): tensor for tensor in reversed(written.values()) if tensor in self._names
        }  # of each storage
        renamed: list[tuple[str, str]] = []
        for tensor in first.values():
            renamed += self._rename_written(tensor, here, len(renamed), func, line)
        became = []
        for number, leaf in enumerate(everything):
            if id(leaf) in written and leaf not in self._names:
                became.append((number, f"{here}={number}"))
                self._written_storages.add(storage_id(leaf))
                self._add_value(leaf, became[-1][1], func, line)
        places = {
            id(leaf): ValueRef(input_index=number)
            for number, leaf in enumerate(everything)
            if not is_constant(leaf)
        }
        found, number = tree_tensors(outcome), 0
        for tensor in found:
            if tensor in self._names:
                places[id(tensor)] = ValueRef(self._names[tensor])
            elif id(tensor) not in places:
                name = f"{here}:{number}" if number else here
                number += 1
                self._add_value(
                    tensor, name, func, line, self._find_base(func, list(values.values()), tensor)
                )
                places[id(tensor)] = ValueRef(name)
        ops.append(
            GlueOp(
                func,
                with_value_refs(outcome, places),
                tuple(places[id(tensor)] for tensor in found),
                tuple(renamed),
                tuple(became),
            )
        )
        return outcome

    def _rename_written(
        self, tensor: torch.Tensor, name: str, count: int, func: str, line: str
    ) -> list[tuple[str, str]]:
        """New names for all values that lie in the storage that was written by way of `tensor`; `count` are named."""
        place = {visit: number for number, visit in enumerate(self.record.block_calls)}
        storage = storage_id(tensor)
        self._written_storages.add(storage)
        sharing = [t for t in self._names if storage_id(t) == storage]
        made = {id(t): self.record.values[self._names[t]].producer for t in sharing}
        renamed = []
        for number, other in enumerate([tensor, *(t for t in sharing if t is not tensor)], count):
            old, new = self._names[other], f"{name}~{number}" if number else f"{name}~"
            self._add_value(other, new, func, line)
            renamed.append((old, new))
            if other is not tensor:
                since = max(made[id(other)], made.get(id(tensor), ""), key=lambda visit: place.get(visit, -1))
                self._inseparable[new] = since, self._block_call, line
        return renamed

    def _add_value(
        self, tensor: torch.Tensor, name: str, op: str = "", line: str = "", base: str = ""
    ) -> None:
        self._names[tensor] = name
        self._late_grads.note_value(name, op)
        needed = tensor.requires_grad and torch.is_grad_enabled()
        along = tensor.sequence_dim if type(tensor) is SequenceShardedTensor else None
        self.record.values[name] = RecordedValue(
            self._block_call, tuple(tensor.shape), tensor.dtype, needed, op, line, base, along
        )

    def _find_base(self, func: str, values: Sequence[torch.Tensor], tensor: torch.Tensor) -> str:
        """The value of which `tensor` is a view that has no fewer elements; "" where it is no such view."""
        if (
            len(values) != 1
            or func == "as_strided"
            or values[0] not in self._names
            or values[0].numel() > tensor.numel()
        ):
            return ""
        storage = storage_id(tensor)
        return (
            self._names[values[0]]
            if storage == storage_id(values[0]) and storage not in self._written_storages
            else ""
        )

    def _record_use(self, tensor: torch.Tensor, *, glue: bool = False) -> None:
        """The visit that was called last uses `tensor`, or the `glue` behind it does."""
        home = self._made_in.get(tensor)
        if tensor in self._names:
            name = self._names[tensor]
            self._late_grads.note_use(name, tensor)
            users = self.record.consumers.setdefault(name, [])
            if self._block_call not in users:
                users.append(self._block_call)
            if name in self._inseparable:
                first, last, line = self._inseparable[name]
                what = f"'{name}' and a view of it are written into as one behind '{last}' ({line}), and would cross apart"
                self._block_boundaries(first, last, what, IN_PLACE_FIX)
        elif home is not None and (glue or home != self._block_call):
            who = f"the glue behind '{self._block_call}'" if glue else f"'{self._block_call}'"
            buffer = self._buffers.get(id(tensor))
            what, fix = (
                f"{who} uses a tensor that '{home}' made and did not give out",
                "return it among the outputs",
            )
            if buffer is not None:
                what, fix = (
                    f"{who} uses the buffer '{buffer}', which '{home}' writes",
                    "give each block a buffer of its own",
                )
            self._block_boundaries(
                home, None if glue else self._block_call, what, f"{fix}, or {LARGER_BLOCK_FIX}"
            )
        elif (
            self._written_storages
            and storage_id(tensor) in self._written_storages
            and not isinstance(tensor, nn.Parameter)
        ):
            what = (
                f"'{self._block_call}' uses a view, made before, of a tensor into which values were written"
            )
            self._block_boundaries(self.record.block_calls[0], None, what, IN_PLACE_FIX)
        else:
            self._record_root_params(tensor)

    def _record_root_params(self, tensor: torch.Tensor) -> None:
        """The visit that was called last, or glue behind it, uses what glue has made of parameters, or a parameter itself."""
        if not tensor.requires_grad or self._input_ids is not None:
            return
        names = (
            {self._parameters.get(id(tensor))}
            if tensor.is_leaf
            else reachable_leaf_names(tensor, self._parameters)
        )
        for name in filter(None, names):
            self.record.root_params.setdefault(name, []).append(self._block_call)

    def _block_boundaries(self, first: str, last: str | None, why: str, fix: str) -> None:
        self.record.boundary_blockers.append((first, last, why, fix))
