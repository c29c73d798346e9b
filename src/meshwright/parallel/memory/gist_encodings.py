"""Encodes what autograd saves of ReLU and max pooling while a block runs, and decodes it in the backward.

    result of relu        a bit per element: whether its gradient passes, so whether it is not <= 0
    the same, also saved  a bit per element: whether it is anything but +0; and these elements, in order
    by what reads it      (on a CPU one bit serves both if no result is -0; elsewhere the host would wait)
    positions of maxima   their place in the pooling window, as uint8

Both runs of a block call the same kernels on the same bits; only what rests between them differs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from meshwright.comm.shared_memory import marked_elements

_RELU = {F.relu, F.relu_, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_}
_SQUARE = {torch.square, torch.Tensor.square}
_POWER = {torch.pow, torch.Tensor.pow, torch.Tensor.__pow__}
_PRODUCT = {torch.mul, torch.Tensor.mul, torch.Tensor.__mul__}
_POOL = {F.max_pool2d, F.max_pool2d_with_indices, torch.max_pool2d}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers as wide as a float
MAX_PLACES = 256  # in a window that a uint8 tells apart

Key = tuple[int, int]  # storage and version
Packed = Callable[[], torch.Tensor] | torch.Tensor


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """Returns a bool tensor as bits, 8 to a byte, the first in its lowest, padded with zeros: uint8
    [ceil(numel / 8)].
    """
    flat = mask.flatten().view(torch.uint8)
    bits = F.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    packed = bits[:, 7].clone()
    for place in range(6, -1, -1):
        packed.mul_(2).add_(bits[:, place])
    return packed


def unpack_bits(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Returns the flat bool tensor of `numel` elements that `pack_bits` packed."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return packed.unsqueeze(1).bitwise_right_shift(shifts).bitwise_and_(1).flatten()[:numel].view(torch.bool)


@dataclass
class ReluResult:
    """The encoded result of a ReLU, or the square of one, which `values` are added to when needed."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    passes: torch.Tensor | None = None  # bits: where the gradient passes
    nonzero: torch.Tensor | None = None  # bits: where a value is kept
    values: torch.Tensor | None = None
    is_in_c: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of bits and values; bits that are used twice count once."""
        parts = {id(each): each for each in (self.passes, self.nonzero, self.values) if each is not None}
        return sum(each.nbytes for each in parts.values())

    def keep_sign(self, result: torch.Tensor) -> None:
        """Keeps what the backward of ReLU needs: whether a gradient passes, so whether it is not <= 0."""
        self.is_in_c = marked_elements.can_mark(result)
        if self.is_in_c:
            self.passes = marked_elements.mark_positive(result.flatten())
        else:
            self.passes = pack_bits((result <= 0).logical_not_())

    def keep_values(self, result: torch.Tensor) -> int:
        """Keeps every bit of `result`; returns the number of values that this takes."""
        flat, self.is_in_c = result.flatten(), marked_elements.can_mark(result)
        if self.is_in_c:
            bits, number = marked_elements.mark_nonzero(flat)
            same = self.passes is not None and torch.equal(bits, self.passes)
            self.nonzero = self.passes if same else bits
            self.values = marked_elements.take_marked(flat, bits, number)
        else:
            mask = flat.view(_BITS[flat.itemsize]) != 0
            self.nonzero = pack_bits(mask)
            self.values = flat.index_select(0, _places(mask))
        return len(self.values)

    def signs(self) -> torch.Tensor:
        """Returns 0 and 1 in place of the result, of which the backward of ReLU needs the sign."""
        if self.passes is None:
            raise RuntimeError("the signs of this result were not kept: call keep_sign in the forward")
        numel = self.shape.numel()
        if self.is_in_c:
            flat = marked_elements.put_ones(self.passes, numel, self.dtype)
        else:
            flat = unpack_bits(self.passes, numel).view(torch.uint8).to(self.dtype)
        return self._strided(flat)

    def decoded(self) -> torch.Tensor:
        """Returns the result."""
        if self.nonzero is None or self.values is None:
            raise RuntimeError("the values of this result were not kept: call keep_values in the forward")
        numel = self.shape.numel()
        if self.is_in_c:
            flat = marked_elements.put_marked(self.values, self.nonzero, numel)
        else:
            places = _places(unpack_bits(self.nonzero, numel), len(self.values))
            flat = self.values.new_zeros(numel).scatter_(0, places, self.values)
        return self._strided(flat)

    def _strided(self, flat: torch.Tensor) -> torch.Tensor:
        tensor = flat.view(self.shape)
        if tensor.stride() == self.stride:
            return tensor
        return torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )


def _places(mask: torch.Tensor, number: int | None = None) -> torch.Tensor:
    """Returns where `mask` is set, in `number` places if that is known: then no host waits for a GPU. Of fake
    tensors half are set.
    """
    flat = mask.flatten()
    if isinstance(flat, FakeTensor):
        return flat.new_zeros(flat.numel() // 2, dtype=torch.int64)
    return (flat.nonzero() if number is None else flat.nonzero_static(size=number)).squeeze(1)


@dataclass(frozen=True)
class PoolWindow:
    """The windows of a max pooling of planes that are `width` wide: (height, width) each."""

    width: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def is_narrow(self) -> bool:
        """Whether a uint8 tells the places in a window apart, and none is wider than the planes."""
        span = self.dilation[1] * (self.kernel[1] - 1)
        return self.kernel[0] * self.kernel[1] <= MAX_PLACES and span < self.width

    def encode(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns positions in a plane [..., rows, columns] as places in their windows, in uint8."""
        ahead = self._place_offsets(positions.device)
        place = ahead.new_zeros(int(ahead[-1]) + 1, dtype=torch.uint8)
        place[ahead] = torch.arange(len(ahead), dtype=torch.uint8, device=ahead.device)
        offsets = positions.to(torch.int32).sub_(self._first(positions).to(torch.int32))
        return place.index_select(0, offsets.flatten()).view(positions.shape)

    def decode(self, places: torch.Tensor) -> torch.Tensor:
        """Returns the positions."""
        ahead = self._place_offsets(places.device).index_select(0, places.flatten().to(torch.int32))
        return ahead.view(places.shape).add_(self._first(places))

    def _place_offsets(self, device: torch.device) -> torch.Tensor:
        """How far each place of a window is ahead of its first, in elements of a plane."""
        rows, columns = (torch.arange(size, device=device) for size in self.kernel)
        return (rows.unsqueeze(1) * (self.dilation[0] * self.width) + columns * self.dilation[1]).flatten()

    def _first(self, windows: torch.Tensor) -> torch.Tensor:
        """The position of the first place of each window; in padding it is that of no element."""
        rows, columns = (
            torch.arange(size, device=windows.device) * stride - padding
            for size, stride, padding in zip(windows.shape[-2:], self.stride, self.padding, strict=True)
        )
        return rows.unsqueeze(1) * self.width + columns


class GistEncoder(TorchFunctionMode):
    """Encodes what autograd saves of ReLU and max pooling in one call of a block, while it is active.

    `on_values(number)` is told how many values each tensor kept that another operation needs;
    `backward_dtype` is that of what else autograd saves in wider floats, but for `kept_storages`.
    """

    def __init__(
        self,
        on_values: Callable[[int], None],
        backward_dtype: torch.dtype | None = None,
        kept_storages: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self._on_values, self._backward_dtype, self._kept = on_values, backward_dtype, kept_storages
        self._in_relu: list[ReluResult] | None = None
        self._window: PoolWindow | None = None
        self._results: dict[Key, tuple[StorageWeakRef, ReluResult]] = {}
        self._narrow: dict[tuple[object, ...], tuple[StorageWeakRef, torch.Tensor]] = {}  # by view

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Context manager around the call of the block."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack), self:
            yield
        self._results.clear()
        self._narrow.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RELU:
            return self._relu(func, args, kwargs)
        if func in _POOL:
            return self._pool(func, args, kwargs)
        out = func(*args, **kwargs)
        if self._is_square(func, args):
            self._note_result(out, ReluResult(out.shape, out.stride(), out.dtype))
        return out

    def _relu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        self._in_relu = []
        try:
            out = func(*args, **kwargs)
            for result in self._in_relu:
                self._note_result(out, result)
        finally:
            self._in_relu = None
        return out

    def _note_result(self, tensor: torch.Tensor, result: ReluResult) -> None:
        if _fills_storage(tensor):
            self._results[_key(tensor)] = StorageWeakRef(tensor.untyped_storage()), result

    def _pool(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._window = _window(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            self._window = None

    def _is_square(self, func: Any, args: tuple[Any, ...]) -> bool:
        if func in _POWER:
            squares = len(args) > 1 and isinstance(args[1], (int, float)) and args[1] == 2
        else:
            squares = func in _SQUARE or (func in _PRODUCT and len(args) > 1 and args[1] is args[0])
        if not squares or not args or not isinstance(args[0], torch.Tensor):
            return False
        return self._find_result(args[0]) is not None

    def _find_result(self, tensor: torch.Tensor) -> ReluResult | None:
        storage, result = self._results.get(_key(tensor), (None, None))
        return None if storage is None or storage.expired() else result

    def _pack(self, tensor: torch.Tensor) -> Packed:
        if type(tensor) is torch.nn.Parameter:
            return tensor
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if self._in_relu is not None:
                result = ReluResult(tensor.shape, tensor.stride(), tensor.dtype)
                result.keep_sign(tensor)
                self._in_relu.append(result)
                return result.signs
            if self._window is not None and tensor.dtype == torch.int64:
                window, places = self._window, self._window.encode(tensor)
                return lambda: window.decode(places)
            result = self._find_result(tensor)
            if result is None:
                return self._narrowed(tensor)
            if result.values is None:
                self._on_values(result.keep_values(tensor.as_strided(result.shape, result.stride, 0)))
            view = tensor.shape, tensor.stride(), tensor.storage_offset()
            return lambda: result.decoded().as_strided(*view)

    def _narrowed(self, tensor: torch.Tensor) -> Packed:
        narrow, dtype = self._backward_dtype, tensor.dtype
        if narrow is None or not dtype.is_floating_point or dtype.itemsize <= narrow.itemsize:
            return tensor
        if isinstance(tensor, torch.nn.Parameter) or tensor.untyped_storage()._cdata in self._kept:
            return tensor
        view = _key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
        storage, cast = self._narrow.get(view, (None, None))
        if storage is None or storage.expired() or cast is None:
            cast = tensor.to(narrow)
            self._narrow[view] = StorageWeakRef(tensor.untyped_storage()), cast
        return lambda: cast.to(dtype)


def _unpack(packed: Packed) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    with torch.no_grad():
        return packed()


def _key(tensor: torch.Tensor) -> Key:
    return tensor.untyped_storage()._cdata, tensor._version


def _fills_storage(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _window(
    planes: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> PoolWindow | None:
    """Returns the windows of a max pooling with these arguments; None if they are too large to encode."""
    kernel = _pair(kernel_size)
    window = PoolWindow(planes.shape[-1], kernel, _pair(stride or kernel), _pair(padding), _pair(dilation))
    return window if window.is_narrow else None


def _pair(value: Any) -> tuple[int, int]:
    first, second = (value, value) if isinstance(value, int) else value if len(value) == 2 else value * 2
    return int(first), int(second)
