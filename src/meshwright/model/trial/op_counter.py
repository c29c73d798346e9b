"""Counts a trial's operations: flops, sizes of matrix products and attention, bytes of the others.

`count_flops` uses the formulas of torch.utils.flop_counter.

`OpCounter` records sizes. The trial's number of samples is a prime that divides no other size, so a size that
it divides grows with the number of samples and any other size does not. Counts go to the open section: the
forward of a block call, its backward, glue, or the loss. Views count as operations without bytes: they cost a
call.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from meshwright.model.recording.forward_recording import AtenOp, TensorRecord
from meshwright.model.recording.op_table import find_op
from meshwright.model.tensors.fake_tensor_limits import asks_for_device
from meshwright.nn.grouped_linear import GROUPED_LINEAR, GROUPED_OUTER
from meshwright.plan.model_spec.op_sizes_and_memory import (
    COMPUTE_HEAVY_OPS,
    AttentionOp,
    LinearInSamples,
    MatmulOp,
    MemoryOp,
    OpCounts,
)

Section = tuple[str, str]  # ("forward" | "backward" | "glue" | "loss", block call or "")
Size = tuple[int, bool]  # (a number, whether it is per sample)
aten = torch.ops.aten
CAUSAL_ARGUMENTS = MappingProxyType(  # by kernel: the index of `is_causal`, and that of the query
    {
        aten._scaled_dot_product_flash_attention_for_cpu: (4, 0),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (7, 1),
    }
)


class OpCounter(TorchDispatchMode):
    """While active, counts what runs in the open section, in a trial of `num_samples` samples."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self._num_samples = num_samples
        self._open: Counter[Any] | None = None
        self._counts: dict[Section, Counter[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if asks_for_device(func, args):
            return args[0].device
        out = func(*args, **(kwargs or {}))
        if self._open is not None:
            self._note(func, args, kwargs, out)
        return out

    def open_section(self, kind: str, block_call: str = "") -> None:
        """Opens this section: what runs from now on is counted there."""
        self._open = self._counts.setdefault((kind, block_call), Counter())

    def close_section(self) -> None:
        """Closes the section: what runs from now on is not counted."""
        self._open = None

    @contextmanager
    def section(self, kind: str, block_call: str = "") -> Iterator[None]:
        """Context manager: opens this section on entry, and closes it on exit."""
        self.open_section(kind, block_call)
        try:
            yield
        finally:
            self.close_section()

    def section_work(self, kind: str, block_call: str = "") -> OpCounts:
        """Returns the operations counted in this section."""
        counts = self._counts.get((kind, block_call), {})
        matmuls = (_product(self._line, key, count) for key, count in counts.items() if key[0] == "matmul")
        attention = (
            _attention(self._line, key, count) for key, count in counts.items() if key[0] == "attention"
        )
        memory_ops = (_memory_pass(key, count) for key, count in counts.items() if key[0] == "memory")
        return OpCounts(tuple(matmuls), tuple(attention), tuple(memory_ops))

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, out: Any) -> None:
        kind, counts = func._overloadpacket, self._open
        if counts is None:
            return
        matmul_shapes, op = MATMUL_SHAPES.get(kind), find_op(kind.__name__)
        if matmul_shapes is not None:
            for sizes in matmul_shapes(args, out):
                counts["matmul", tuple(map(self._sized, sizes)), _dtype(args)] += 1
        elif kind in CAUSAL_ARGUMENTS:
            counts[self._attention_key(kind, args)] += 1
        elif func.is_view or op.is_uninitialized or op.is_alias or op.dims == "reshape":
            # it allocates or views memory, and does not touch it
            counts["memory", (0, 0.0), "", (0, 0.0)] += 1
        elif any(
            isinstance(each, torch.Tensor) for each in tree_leaves(out)
        ):  # other operations only query metadata
            op_name = _rich_op_name(func, kwargs)
            result = next(each for each in tree_leaves(out) if isinstance(each, torch.Tensor))
            numel = self._numel(result) if op_name else (0, 0.0)
            touched = (
                (args[1:], out, out) if op.kind == "lookup" else (args, kwargs, out)
            )  # a lookup reads of the table only what it returns
            counts["memory", self._bytes(tree_leaves(touched)), op_name, numel] += 1

    def _attention_key(self, kind: Any, args: Sequence[Any]) -> tuple[Any, ...]:
        causal_arg, query_arg = CAUSAL_ARGUMENTS[kind]
        query, key = args[query_arg], args[query_arg + 1]
        causal = bool(args[causal_arg]) if len(args) > causal_arg else False
        batch, heads, queries, width = query.shape
        return (
            "attention",
            self._sized(batch),
            (heads, queries, key.shape[-2], width),
            _dtype(args),
            bool(query_arg),
            causal,
        )

    def _bytes(self, values: Sequence[Any]) -> tuple[int, float]:
        """The bytes of all tensors among `values`: batch-independent ones, and those per sample."""
        fixed, each = 0, 0
        for value in values:
            if isinstance(value, torch.Tensor):
                nbytes = _nbytes(value)
                if nbytes // value.itemsize % self._num_samples:
                    fixed += nbytes
                else:
                    each += nbytes
        return fixed, each / self._num_samples

    def _numel(self, result: torch.Tensor) -> tuple[int, float]:
        """The elements of `result`: batch-independent ones, and those per sample."""
        count = result.numel()
        return (count, 0.0) if count % self._num_samples else (0, count / self._num_samples)

    def _sized(self, number: int) -> Size:
        return (number // self._num_samples, True) if number % self._num_samples == 0 else (number, False)

    @staticmethod
    def _line(size: Size) -> LinearInSamples:
        return LinearInSamples(0.0, size[0]) if size[1] else LinearInSamples(size[0], 0.0)


def _product(line: Callable[[Size], LinearInSamples], key: Any, count: int) -> MatmulOp:
    _, sizes, dtype = key
    m, n, k, batch = map(line, sizes)
    return MatmulOp(m, n, k, batch, dtype, count)


def _attention(line: Callable[[Size], LinearInSamples], key: Any, count: int) -> AttentionOp:
    _, batch, sizes, dtype, backward, causal = key
    num_heads, query_len, key_len, head_dim = sizes
    return AttentionOp(line(batch), num_heads, query_len, key_len, head_dim, dtype, backward, causal, count)


def _memory_pass(key: Any, count: int) -> MemoryOp:
    _, nbytes, rich, numbers = key
    return MemoryOp(LinearInSamples(*nbytes), count, rich, LinearInSamples(*numbers))


def _rich_op_name(func: Any, kwargs: Mapping[str, Any] | None) -> str:
    name = func._overloadpacket.__name__
    if (kwargs or {}).get("approximate") == "tanh":
        name = name.replace("gelu", "gelu_tanh")
    return name if name in COMPUTE_HEAVY_OPS else ""


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.layout != torch.strided:
        return tensor.numel() * tensor.itemsize
    # an expanded tensor is in memory once
    return (
        prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size < 2)
        * tensor.itemsize
    )


def _dtype(args: Sequence[Any]) -> str:
    return next(str(each.dtype).removeprefix("torch.") for each in args if isinstance(each, torch.Tensor))


def _matmul_shapes(first: torch.Tensor, second: torch.Tensor) -> Iterator[tuple[int, ...]]:
    batch = first.shape[0] if first.ndim == 3 else 1
    yield first.shape[-2], second.shape[-1], first.shape[-1], batch


def _grouped_shapes(first: torch.Tensor, second: torch.Tensor) -> Iterator[tuple[int, ...]]:
    """Yields the shape of one product with as many multiplications as the groups have together."""
    yield first.shape[-2], second.shape[-1], first.shape[-1], 1


def _convolution_shapes(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, groups: int, computed: Sequence[bool]
) -> Any:
    num_positions, kernel = out.shape[0] * prod(out.shape[2:]), prod(weight.shape[1:])
    channels = out.shape[1] // groups
    forward, input_grad, weight_grad = computed
    yield from [(num_positions, channels, kernel, groups)] * forward
    yield from [(num_positions, kernel, channels, groups)] * input_grad
    yield from [(channels, kernel, num_positions, groups)] * weight_grad


MATMUL_SHAPES = MappingProxyType(
    {
        aten.mm: lambda args, out: _matmul_shapes(args[0], args[1]),
        aten.bmm: lambda args, out: _matmul_shapes(args[0], args[1]),
        aten.addmm: lambda args, out: _matmul_shapes(args[1], args[2]),
        aten._grouped_mm: lambda args, out: _grouped_shapes(args[0], args[1]),
        GROUPED_LINEAR: lambda args, out: _grouped_shapes(args[0], args[1].mT),
        GROUPED_OUTER: lambda args, out: _grouped_shapes(args[0].mT, args[1]),
        aten.baddbmm: lambda args, out: _matmul_shapes(args[1], args[2]),
        aten.convolution: lambda args, out: _convolution_shapes(
            args[0], args[1], out, args[8], (True, False, False)
        ),
        aten.convolution_backward: lambda args, out: _convolution_shapes(
            args[1], args[2], args[0], args[9], (False, args[10][0], args[10][1])
        ),
    }
)


def count_flops(op: AtenOp) -> int:
    """Returns the flops of a recorded operation; a multiply-add is two."""
    if op.packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return _sdpa_flops(*(each.shape for each in op.args[:3]))
    if op.packet is GROUPED_LINEAR:
        return 2 * prod(op.args[0].shape) * op.args[1].shape[1]
    if op.packet not in flop_registry:
        return 0
    args, kwargs, out = (_shapes(each) for each in (op.args, op.kwargs, op.results))
    return flop_registry[op.packet](*args, **kwargs, out_val=out)


def _shapes(value: Any) -> Any:
    """Returns a recorded value with the shapes of its tensors."""
    if isinstance(value, TensorRecord):
        return value.shape
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(map(_shapes, value))
    return {key: _shapes(each) for key, each in value.items()} if isinstance(value, dict) else value


def _sdpa_flops(query: torch.Size, key: torch.Size, value: torch.Size) -> int:
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
