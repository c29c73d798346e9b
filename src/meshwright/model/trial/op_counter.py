"""What a model's operations are, noted while they run on a trial: products by their sizes, attention, and bytes of the rest.

The number of rows of the trial divides nothing else, so a size that it divides grows with the rows, and any other does not. The
notes go into the section that is open: the forward of a visit, its backward, glue, the loss. Views of memory count as operations
without bytes: they cost a call.

Counting the floating-point operations of matrix products, convolutions and attention, also on fake tensors.

torch.utils.flop_counter has the formulas; its own mode also tracks modules, by hooks that every thread of the process
would see and that forbid `torch.autograd.grad` in a forward. This mode only counts.
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

from meshwright.plan.model_spec.op_costs import (
    COMPUTE_HEAVY_OPS,
    AttentionOp,
    LinearInSamples,
    MatmulOp,
    MemoryOp,
    OpCounts,
)

Section = tuple[str, str]  # "forward", "backward", "glue" or "loss"; the visit, where it is one
Size = tuple[int, bool]  # a number, and whether it is one for each row
MeasureSize = Callable[[int], Size]
aten = torch.ops.aten
NO_COST_OPS = frozenset(  # they have memory, or none, and do nothing with it
    (
        aten.empty,
        aten.empty_like,
        aten.new_empty,
        aten.empty_strided,
        aten.new_empty_strided,
        aten._unsafe_view,
        aten.detach,
    )
)
LOOKUP_OPS = frozenset((aten.embedding, aten.index_select, aten.index, aten.gather))
CAUSAL_ARGUMENTS = MappingProxyType(  # of each kernel, where `is_causal` stands, and how many arguments stand before the query
    {
        aten._scaled_dot_product_flash_attention_for_cpu: (4, 0),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (7, 1),
    }
)


class OpCounter(TorchDispatchMode):
    """While active, notes what runs in the section that is open, in a trial of so many `rows`."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self._num_samples = num_samples
        self._open: Counter[Any] | None = None
        self._counts: dict[Section, Counter[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._open is not None:
            self._note(func, args, kwargs, out)
        return out

    def open_section(self, kind: str, block_call: str = "") -> None:
        """Open this section; what runs from now on is noted there."""
        self._open = self._counts.setdefault((kind, block_call), Counter())

    def close_section(self) -> None:
        """Close the section: what runs from now on is not noted."""
        self._open = None

    @contextmanager
    def section(self, kind: str, block_call: str = "") -> Iterator[None]:
        """Have this section open meanwhile, and none afterwards."""
        self.open_section(kind, block_call)
        try:
            yield
        finally:
            self.close_section()

    def section_work(self, kind: str, block_call: str = "") -> OpCounts:
        """What was noted in this section."""
        found = self._counts.get((kind, block_call), {})
        products = (_product(self._line, key, count) for key, count in found.items() if key[0] == "product")
        attention = (
            _attention(self._line, key, count) for key, count in found.items() if key[0] == "attention"
        )
        passed = (_memory_pass(key, count) for key, count in found.items() if key[0] == "passed")
        return OpCounts(tuple(products), tuple(attention), tuple(passed))

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, out: Any) -> None:
        kind, found = func._overloadpacket, self._open
        if found is None:
            return
        known = MATMUL_SHAPES.get(kind)
        if known is not None:
            for sizes in known(args, out):
                found["product", tuple(map(self._sized, sizes)), _dtype(args)] += 1
        elif kind in CAUSAL_ARGUMENTS:
            found[self._attention_key(kind, args)] += 1
        elif func.is_view or kind in NO_COST_OPS:
            found["passed", (0, 0.0), "", (0, 0.0)] += 1
        elif any(
            isinstance(each, torch.Tensor) for each in tree_leaves(out)
        ):  # others ask what a tensor is, where it lies
            rich = _rich_op_name(func, kwargs)
            made = next(each for each in tree_leaves(out) if isinstance(each, torch.Tensor))
            numbers = self._numel(made) if rich else (0, 0.0)
            passed = (
                (args[1:], out, out) if kind in LOOKUP_OPS else (args, kwargs, out)
            )  # of a table it reads what it gives out
            found["passed", self._bytes(tree_leaves(passed)), rich, numbers] += 1

    def _attention_key(self, kind: Any, args: Sequence[Any]) -> tuple[Any, ...]:
        at, first = CAUSAL_ARGUMENTS[kind]
        query, key = args[first], args[first + 1]
        causal = bool(args[at]) if len(args) > at else False
        rows, heads, queries, width = query.shape
        return (
            "attention",
            self._sized(rows),
            (heads, queries, key.shape[-2], width),
            _dtype(args),
            bool(first),
            causal,
        )

    def _bytes(self, values: Sequence[Any]) -> tuple[int, float]:
        """The bytes of all tensors among `values`: those that are there whatever the rows are, and those for each row."""
        fixed, each = 0, 0
        for value in values:
            if isinstance(value, torch.Tensor):
                nbytes = _nbytes(value)
                if nbytes // value.itemsize % self._num_samples:
                    fixed += nbytes
                else:
                    each += nbytes
        return fixed, each / self._num_samples

    def _numel(self, made: torch.Tensor) -> tuple[int, float]:
        """The numbers in `made`: those that are there whatever the rows are, and those for each row."""
        count = made.numel()
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
    _, rows, sizes, dtype, backward, causal = key
    heads, queries, keys, width = sizes
    return AttentionOp(line(rows), heads, queries, keys, width, dtype, backward, causal, count)


def _memory_pass(key: Any, count: int) -> MemoryOp:
    _, nbytes, rich, numbers = key
    return MemoryOp(LinearInSamples(*nbytes), count, rich, LinearInSamples(*numbers))


def _rich_op_name(func: Any, kwargs: Mapping[str, Any] | None) -> str:
    """The name in RICH of an operation, "" where it is none of them. GELU comes in two kinds."""
    name = func._overloadpacket.__name__
    if (kwargs or {}).get("approximate") == "tanh":
        name = name.replace("gelu", "gelu_tanh")
    return name if name in COMPUTE_HEAVY_OPS else ""


def _nbytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor in memory: one that is expanded lies there once."""
    if tensor.layout != torch.strided:
        return tensor.numel() * tensor.itemsize
    return (
        prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size < 2)
        * tensor.itemsize
    )


def _dtype(args: Sequence[Any]) -> str:
    return next(str(each.dtype).removeprefix("torch.") for each in args if isinstance(each, torch.Tensor))


def _matmul_shapes(first: torch.Tensor, second: torch.Tensor) -> Iterator[tuple[int, ...]]:
    batch = first.shape[0] if first.ndim == 3 else 1
    yield first.shape[-2], second.shape[-1], first.shape[-1], batch


def _convolution_shapes(
    into: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, groups: int, made: Sequence[bool]
) -> Any:
    """The products that a convolution is, or that two of its gradients are: what comes out, goes in, and learns."""
    places, kernel = out.shape[0] * prod(out.shape[2:]), prod(weight.shape[1:])
    channels = out.shape[1] // groups
    forth, back, learns = made
    yield from [(places, channels, kernel, groups)] * forth
    yield from [(places, kernel, channels, groups)] * back
    yield from [(channels, kernel, places, groups)] * learns


MATMUL_SHAPES = MappingProxyType(
    {
        aten.mm: lambda args, out: _matmul_shapes(args[0], args[1]),
        aten.bmm: lambda args, out: _matmul_shapes(args[0], args[1]),
        aten.addmm: lambda args, out: _matmul_shapes(args[1], args[2]),
        aten.baddbmm: lambda args, out: _matmul_shapes(args[1], args[2]),
        aten.convolution: lambda args, out: _convolution_shapes(
            args[0], args[1], out, args[8], (True, False, False)
        ),
        aten.convolution_backward: lambda args, out: _convolution_shapes(
            args[1], args[2], args[0], args[9], (False, args[10][0], args[10][1])
        ),
    }
)


class FlopCounter(TorchDispatchMode):
    """While active, adds the operations of what this thread runs to `total`; a multiply-add counts as two."""

    def __init__(self) -> None:
        super().__init__()
        self.total_flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._overloadpacket is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            self.total_flops += _sdpa_flops(args[0].shape, args[1].shape, args[2].shape)
        elif func._overloadpacket in flop_registry:
            self.total_flops += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        return out


def _sdpa_flops(query: torch.Size, key: torch.Size, value: torch.Size) -> int:
    """Two products, query with key and weights with value, counted as torch counts its other kernels: no mask saves any."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
