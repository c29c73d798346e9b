"""Finds which values are live at the boundaries between blocks, by following one forward operation by
operation.

Every output of a block is a value, and so is everything that glue computes from values; what glue computes
without values is none, since every stage can compute it itself. Names count the glue operations on values
after each block call, so a mask that is cached or not changes no name.

    x = embed(ids)         embed          x.shape, mask_of(x.shape)      no values: only a shape is read
    h = x * 8              embed+0        z = h.flatten(1)               a view: whoever has h makes it
    y, bias = layer(h)     layer, layer:1

Operations that values cannot express close stage boundaries: reading a number of a value, shapes that depend
on values, tensors that leave a block through an attribute, writes of a block into its inputs.

Two effects on gradients come after the line that makes a value, and a stage that ends with that line would
miss them:

    x = Flip.apply(x)                 autograd.Function: made with gradients off, attached later
    x.register_hook(clip)             makes no value, but changes the gradient of x

The boundary after such a line is closed.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.model.blocks.autograd_partition import reachable_leaf_names
from meshwright.model.blocks.block_forward_backward import LARGER_BLOCK_FIX, ForwardDriver
from meshwright.model.context_parallel.block_input_sharding import ShardedForward
from meshwright.model.context_parallel.sharded_activation import SequenceShardedTensor
from meshwright.model.hf.captured_outputs import capture_marks
from meshwright.model.loss.loss_inputs import distinct_tensors
from meshwright.model.pipeline.forward_graph import (
    BlockCallStub,
    ForwardRecord,
    GlueOp,
    RecordedValue,
    ValueRef,
    with_value_refs,
)
from meshwright.model.recording.op_table import find_op
from meshwright.model.tensors.call_description import caller_line, function_title, is_constant
from meshwright.model.tensors.clear_fake_caches import clear_caches_with_fakes, lru_caches
from meshwright.model.tensors.function_modes import RANDOM_GLUE_FIX, ValueReadMode
from meshwright.model.tensors.pytree import storage_id, tree_tensors, value_leaves
from meshwright.plan.model_spec.model_spec import block_call_name

TENSOR_HOOKS = frozenset(("register_hook",))
LATE_GRAD_FIX = f"begin no stage after that line, or {LARGER_BLOCK_FIX}"
VALUE_READ_FIX = f"compute with tensors there, or {LARGER_BLOCK_FIX}"
IN_PLACE_FIX = "write x = x + y for x += y"
HOOK_FIX = "register it where the model is called, or on a tensor that the block makes"


ValueCallback = Callable[[str, torch.Tensor], None]


class LateGradientChanges:
    """Finds values whose gradient changes after the line that makes them, and closes the boundaries in
    between.
    """

    def __init__(self, record: ForwardRecord) -> None:
        self._record = record
        self._made_without_grad: set[str] = set()  # values that were made while gradients were off
        # value, block call before the change, and reason
        self._found: list[tuple[str, str, str]] = []

    def note_value(self, name: str, op: str) -> None:
        """Notes that `op` makes the value `name`. A scripted function makes its values below autograd, by
        its kernel.
        """
        if not torch.is_grad_enabled() or op.endswith(".default"):
            self._made_without_grad.add(name)

    def note_use(self, name: str, tensor: torch.Tensor) -> None:
        """Notes a use of the value `name`, which may have got its gradient since it was made."""
        seen = self._record.values[name]
        if (
            tensor.requires_grad
            and not seen.needs_grad
            and name in self._made_without_grad
            and torch.is_grad_enabled()
        ):
            self._record.values[name] = replace(seen, needs_grad=True)
            what = (
                f"'{name}' ({seen.op} at {seen.source_line}) is made with gradients off "
                f"(autograd.Function, script), and then needs one"
            )
            self._found.append((name, seen.producer, what))

    def note_hook(self, names: Iterable[str], block_call: str, line: str) -> None:
        """Notes that glue after `block_call` registers a hook on the gradients of values."""
        self._found += (
            (name, block_call, f"a hook is registered on the gradient of '{name}' (at {line})")
            for name in names
        )

    def close_boundaries(self) -> None:
        """Closes the boundaries from the producer of each such value to the block call after the change; to
        the end if it changes twice.
        """
        block_calls, names = self._record.block_calls, [name for name, _, _ in self._found]
        for name, later_producer, what in self._found:
            following = block_calls[block_calls.index(later_producer) + 1 :]
            if following:
                self._record.close_boundaries(
                    self._record.values[name].producer,
                    f"{what}, which a stage that ends before it would miss",
                    LATE_GRAD_FIX,
                    following[0] if names.count(name) == 1 else None,
                )


def record_forward(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    run_forward: Callable[[], Any],
    on_block_call: Callable[[str], None],
    count_draws: Callable[[], int] = lambda: 0,
    used_outputs: Container[int] | None = None,
    sharded_forward: ShardedForward | None = None,
    on_value: ValueCallback | None = None,
) -> ForwardRecord:
    """Returns the record of one forward of `module`, run by `run_forward()`, with the values between its
    `blocks`.

    It runs in the caller's gradient mode; without gradients every call of a block counts as a block call.
    `on_block_call` is called with each block call. `count_draws` returns the random draws since the last
    block call; `used_outputs` are the indices of the model outputs that are used (None: all). With
    `sharded_forward` the forward runs on a sequence shard. `on_value` is called with the name of each value
    and its tensor.
    """
    driver = ForwardDriver(blocks, cut_graph=False)
    recorder = _ForwardRecorder(module, on_block_call, count_draws, sharded_forward, on_value)
    on_block_call("")
    try:
        with recorder, driver.use_interceptor(recorder.run_block):
            recorder.finish(run_forward(), used_outputs)
    finally:
        driver.detach()
    return recorder.record


class _ForwardRecorder(TorchFunctionMode):
    def __init__(
        self,
        module: nn.Module,
        enter: Callable[[str], None],
        drawn: Callable[[], int],
        sharded_forward: ShardedForward | None,
        on_value: ValueCallback | None,
    ) -> None:
        super().__init__()
        self._on_value = on_value
        self.record, self._caches = ForwardRecord(), lru_caches(module)
        self._late_grads = LateGradientChanges(self.record)
        self._parameters = {id(parameter): name for name, parameter in module.named_parameters()}
        self._buffers = {id(buffer): name for name, buffer in module.named_buffers()}
        self._on_block_call, self._count_draws, self._sharded_forward = enter, drawn, sharded_forward
        self._last_draw = "", ""  # block call with the last draws (in it or in glue after it), and who drew
        self._grad_enabled, self._paused = torch.is_grad_enabled(), False
        self._calls, self._block_call = dict[str, int](), ""  # how often each block ran; the last block call
        self._input_ids: set[int] | None = None  # input ids of the running block call; None: glue runs
        self._names = WeakIdKeyDictionary()  # tensor -> name of the value
        self._made_in = WeakIdKeyDictionary()  # tensor -> block call that made it
        # values that must be sent together with a view: first and last block call, line
        self._inseparable: dict[str, tuple[str, str, str]] = {}
        self._written_storages: set[int] = set()  # storage ids

    def run_block(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs one block call and records its inputs and outputs."""
        if torch.is_grad_enabled() != self._grad_enabled:
            return run(*args, **kwargs)
        self._paused = True
        clear_caches_with_fakes(self._caches)  # every stage computes cached tables itself
        self._calls[name] = self._calls.get(name, 0) + 1
        self._block_call = block_call = block_call_name(name, self._calls[name])
        self.record.block_calls.append(block_call)
        for tensor in tree_tensors((args, kwargs)):
            self._record_use(tensor)
        if self._sharded_forward is not None:
            args, kwargs = self._sharded_forward.enter_block(block_call, (args, kwargs))
        inputs = tree_tensors((args, kwargs))
        input_leaves, side_channels = value_leaves((args, kwargs)), capture_marks()
        versions = [tensor._version for tensor in inputs]
        self._input_ids, self._paused = {id(tensor) for tensor in inputs}, False
        self._on_block_call(block_call)
        outputs = run(*args, **kwargs)
        self._input_ids, self._paused = None, True
        self._last_draw = (block_call, "the block draws") if self._count_draws() else self._last_draw
        if [tensor._version for tensor in inputs] != versions:
            what = f"'{block_call}' writes into an input, which other stages use too"
            self.record.close_boundaries(block_call, what, IN_PLACE_FIX)
        if [id(tensor) for tensor in tree_tensors((args, kwargs))] != [id(tensor) for tensor in inputs]:
            what = f"'{block_call}' writes into a list or dict among its inputs"
            self.record.close_boundaries(block_call, what, "return what it adds")
        outputs = outputs if self._sharded_forward is None else self._sharded_forward.leave_block(outputs)
        self._record_outputs(
            block_call, outputs, input_leaves, [(mark.channel, mark.added_tensors) for mark in side_channels]
        )
        self._paused = False
        return outputs

    def finish(self, outputs: Any, used_outputs: Container[int] | None) -> None:
        """Records the use of the outputs of the model."""
        self._paused = True
        for index, tensor in enumerate(distinct_tensors(outputs)):
            if used_outputs is None or index in used_outputs:
                self._record_use(tensor, glue=True)
        self._late_grads.close_boundaries()

    def _record_outputs(
        self, block_call: str, outputs: Any, inputs: Sequence[Any], captured: list[tuple[str, list[Any]]]
    ) -> None:
        results = tree_tensors([outputs, *(added for _, added in captured)])
        refs = self._value_refs(inputs, results, block_call)
        opaque = [leaf for leaf in value_leaves(outputs) if not is_constant(leaf) and id(leaf) not in refs]
        if opaque:
            what = f"'{block_call}' returns a {type(opaque[0]).__name__}, whose contents cannot be followed"
            fix = "return tensors bare, in tuples, lists, dicts or dataclasses"
            self.record.close_boundaries(block_call, what, fix)
        self.record.stubs[block_call] = BlockCallStub(
            with_value_refs(outputs, refs),
            tuple((channel, with_value_refs(added, refs)) for channel, added in captured),
            tuple(refs[id(tensor)] for tensor in results),
        )
        self.record.ops[block_call] = []

    def _value_refs(
        self,
        inputs: Sequence[Any],
        results: Sequence[torch.Tensor],
        name: str,
        func: str = "",
        source_line: str = "",
        values: Sequence[torch.Tensor] = (),
    ) -> dict[int, ValueRef]:
        """Returns references by id for the inputs and results of a call; new tensors become values `name`,
        `name`:1, ...
        """
        refs = {id(leaf): ValueRef(input_index=i) for i, leaf in enumerate(inputs) if not is_constant(leaf)}
        num_new = 0
        for tensor in results:
            if tensor not in self._names:
                if id(tensor) in refs:
                    continue
                new, base = f"{name}:{num_new}" if num_new else name, self._find_base(func, values, tensor)
                self._add_value(tensor, new, func, source_line, base)
                if self._on_value is not None:
                    self._on_value(new, tensor)
                num_new += 1
            refs[id(tensor)] = ValueRef(self._names[tensor])
        return refs

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused or not self._block_call:
            return func(*args, **kwargs)
        if self._input_ids is None:
            return self._run_glue(func, args, kwargs)
        if func.__name__ in TENSOR_HOOKS and id(args[0]) in self._input_ids:
            what = f"'{self._block_call}' registers a hook on the gradient of an input"
            self.record.close_boundaries(self.record.block_calls[0], what, HOOK_FIX)
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
        self._paused = True
        inputs, op = tree_tensors((args, kwargs)), find_op(func.__name__)
        looked = inputs[:1] if op.shape_operand == 2 else inputs
        values = {id(tensor): tensor for tensor in looked if tensor in self._names or tensor in self._made_in}
        num_draws = self._count_draws()
        if not values or op.shape_operand == 1:
            outcome = func(*args, **kwargs)
            if self._count_draws() > num_draws and self._last_draw[0] == self._block_call:
                what = (
                    f"the glue after '{self._block_call}' draws numbers for all stages (at {caller_line()}), "
                    f"after others that {self._last_draw[1]}, which later stages do not"
                )
                self.record.close_boundaries(self._block_call, what, RANDOM_GLUE_FIX)
            self._paused = False
            return outcome
        versions, value_reads = [tensor._version for tensor in inputs], ValueReadMode()
        with value_reads:
            outcome = func(*args, **kwargs)
        if self._count_draws() > num_draws:
            self._last_draw = self._block_call, "it draws for values"
        written_tensors = {
            id(t): t for t, version in zip(inputs, versions, strict=True) if t._version != version
        }
        if func.__name__ in TENSOR_HOOKS:
            hooked = [self._names[each] for each in values.values() if each in self._names]
            self._late_grads.note_hook(hooked, self._block_call, caller_line())
        if value_reads.reads_values or op.kind == "read":
            self._record_read(function_title(func), values)
        elif tree_tensors(outcome) or written_tensors:
            outcome = self._record_op(function_title(func), args, kwargs, values, written_tensors, outcome)
        self._paused = False
        return outcome

    def _record_read(self, func: str, values: Mapping[int, torch.Tensor]) -> None:
        for tensor in values.values():
            self._record_use(tensor, glue=True)
        names = ", ".join(str(self._names.get(tensor) or self._made_in[tensor]) for tensor in values.values())
        what = (
            f"the glue after '{self._block_call}' reads the value of {names} ({func} at {caller_line()}), "
            f"and every later stage needs it"
        )
        self.record.close_boundaries(self._block_call, what, VALUE_READ_FIX)

    def _record_op(
        self,
        func: str,
        args: Any,
        kwargs: Any,
        values: dict[int, Any],
        written_tensors: dict[int, Any],
        outcome: Any,
    ) -> Any:
        block_call, source_line = self._block_call, caller_line()
        ops, input_leaves = self.record.ops[block_call], value_leaves((args, kwargs))
        for tensor in values.values():
            self._record_use(tensor, glue=True)
        for leaf in input_leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in values:
                self._record_root_params(leaf)
        op_name = f"{block_call}+{len(ops)}"
        # one tensor per storage
        first_by_storage = {
            storage_id(tensor): tensor
            for tensor in reversed(written_tensors.values())
            if tensor in self._names
        }
        renamed: list[tuple[str, str]] = []
        for tensor in first_by_storage.values():
            renamed += self._rename_written(tensor, op_name, len(renamed), func, source_line)
        became = []
        for number, leaf in enumerate(input_leaves):
            if id(leaf) in written_tensors and leaf not in self._names:
                became.append((number, f"{op_name}={number}"))
                self._written_storages.add(storage_id(leaf))
                self._add_value(leaf, became[-1][1], func, source_line)
        results = tree_tensors(outcome)
        refs = self._value_refs(input_leaves, results, op_name, func, source_line, list(values.values()))
        ops.append(
            GlueOp(
                func,
                with_value_refs(outcome, refs),
                tuple(refs[id(tensor)] for tensor in results),
                tuple(renamed),
                tuple(became),
            )
        )
        return outcome

    def _rename_written(
        self, tensor: torch.Tensor, name: str, first_number: int, func: str, source_line: str
    ) -> list[tuple[str, str]]:
        storage = storage_id(tensor)
        self._written_storages.add(storage)
        same_storage = [t for t in self._names if storage_id(t) == storage]
        producers = {id(t): self.record.values[self._names[t]].producer for t in same_storage}
        views = [t for t in same_storage if t is not tensor]
        renamed = []
        for number, each in enumerate([tensor, *views], first_number):
            old, new = self._names[each], f"{name}~{number}" if number else f"{name}~"
            self._add_value(each, new, func, source_line)
            renamed.append((old, new))
            if each is not tensor:
                later_producer = self.record.in_order((producers[id(each)], producers[id(tensor)]))[-1]
                self._inseparable[new] = later_producer, self._block_call, source_line
        return renamed

    def _add_value(
        self, tensor: torch.Tensor, name: str, op: str = "", source_line: str = "", base: str = ""
    ) -> None:
        self._names[tensor] = name
        self._late_grads.note_value(name, op)
        needed = tensor.requires_grad and torch.is_grad_enabled()
        sequence_dim = tensor.sequence_dim if type(tensor) is SequenceShardedTensor else None
        self.record.values[name] = RecordedValue(
            self._block_call, tuple(tensor.shape), tensor.dtype, needed, op, source_line, base, sequence_dim
        )

    def _find_base(self, func: str, values: Sequence[torch.Tensor], tensor: torch.Tensor) -> str:
        """Returns the value of which `tensor` is a view with no fewer elements; "" if there is none."""
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
        made_in = self._made_in.get(tensor)
        if tensor in self._names:
            name = self._names[tensor]
            self._late_grads.note_use(name, tensor)
            if glue:
                self.record.read_by_glue.add(name)
            users = self.record.consumers.setdefault(name, [])
            if self._block_call not in users:
                users.append(self._block_call)
            if name in self._inseparable:
                first, last, source_line = self._inseparable[name]
                what = (
                    f"'{name}' and a view of it are written in place together after '{last}' "
                    f"({source_line}), and would be sent separately"
                )
                self.record.close_boundaries(first, what, IN_PLACE_FIX, last)
        elif made_in is not None and (glue or made_in != self._block_call):
            user = f"the glue after '{self._block_call}'" if glue else f"'{self._block_call}'"
            buffer = self._buffers.get(id(tensor))
            what = f"{user} uses a tensor that '{made_in}' made and did not return"
            fix = f"return it among the outputs, or {LARGER_BLOCK_FIX}"
            if buffer is not None:
                what = f"{user} uses the buffer '{buffer}', which '{made_in}' writes"
                fix = f"give each block a buffer of its own, or {LARGER_BLOCK_FIX}"
            self.record.close_boundaries(made_in, what, fix, None if glue else self._block_call)
        elif (
            self._written_storages
            and storage_id(tensor) in self._written_storages
            and not isinstance(tensor, nn.Parameter)
        ):
            what = (
                f"'{self._block_call}' uses a view, made before, of a tensor into which values were written"
            )
            self.record.close_boundaries(self.record.block_calls[0], what, IN_PLACE_FIX)
        else:
            self._record_root_params(tensor)

    def _record_root_params(self, tensor: torch.Tensor) -> None:
        if not tensor.requires_grad or self._input_ids is not None:
            return
        names = (
            {self._parameters.get(id(tensor))}
            if tensor.is_leaf
            else reachable_leaf_names(tensor, self._parameters)
        )
        for name in filter(None, names):
            self.record.root_params.setdefault(name, []).append(self._block_call)
