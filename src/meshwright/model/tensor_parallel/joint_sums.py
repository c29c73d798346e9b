"""Layers whose outputs end in one sum: what rows layers give out is followed through a trial run, as long as
it is only added to.

    h = norm(x);  a = attention(h);  m = mlp(h);  y = x + a + m        a and m are summands of one sum: y
    a = attention(norm(x));  y = x + a;  m = mlp(norm(y));  z = y + m  a is read before m is there: two sums

A tensor carries the outputs that it has as summands, each once. An addition joins what its operands carry.
Whatever else looks at a tensor (another operation, the end of the block, somebody who keeps it) sees all that
it carries at once. Outputs that are never seen one without the other may change places: one layer may hand
its output to the other, and give out zeros.

Limits: additions of equal shapes and dtypes, with factor one, where gradients are on; layers that are called
once in a forward. Who looks at an output in some steps only, and not in the trial run, sees zeros there.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.model.tensors.pytree import storage_id, tree_tensors
from meshwright.plan.model_spec.layer_calls import LayerCall

aten: Any = torch.ops.aten
ADD_OPS = (aten.add.Tensor, aten.add_.Tensor)
METADATA_OPS = (torch.ops.prim.device.default,)  # reads no values
# these keep the summands if the shape stays
COPY_OPS = (aten.alias, aten.view, aten._unsafe_view, aten.clone)
SummandIds = frozenset[int]


class JointSums(TorchDispatchMode):
    """Follows what layers give out through additions (`watching`), and tells which of them end in one sum
    (`marked`).
    """

    def __init__(self) -> None:
        super().__init__()
        # layer, and index of the block call in which it ran
        self._uses: list[tuple[str, int]] = []
        # by tensor: the layer uses that it contains as summands
        self._summands: Any = WeakTensorKeyDictionary()
        self._read_together: dict[SummandIds, None] = {}  # sets of summands that were read together, in order
        self._num_open_blocks, self._block = 0, 0

    @contextmanager
    def follow_layers(
        self, module: nn.Module, blocks: Mapping[str, nn.Module], layers: Iterable[str]
    ) -> Iterator[None]:
        """Meanwhile, what `layers` of `module` give out is followed to the ends of its `blocks`."""
        handles = [block.register_forward_pre_hook(self._before_block) for block in blocks.values()]
        handles += [block.register_forward_hook(self._after_block) for block in blocks.values()]
        for name in dict.fromkeys(layers):  # before other hooks change the output
            handles.append(
                module.get_submodule(name).register_forward_hook(
                    partial(self._after_layer, name), prepend=True
                )
            )
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def mark_calls(self, calls: Sequence[LayerCall]) -> tuple[LayerCall, ...]:
        """`calls`, those that end in one sum with its number."""
        names = [name for name, _ in self._uses]
        alike: dict[tuple[int, SummandIds], list[str]] = {}
        for use, (name, block) in enumerate(self._uses):
            seen = frozenset(number for number, parts in enumerate(self._read_together) if use in parts)
            once = names.count(name) == sum(call.name == name for call in calls) == 1
            if once and seen:
                alike.setdefault((block, seen), []).append(name)
        sums = [layers for layers in alike.values() if len(layers) > 1]
        numbers = {name: number for number, layers in enumerate(sums, 1) for name in layers}
        return tuple(replace(call, sum_id=numbers.get(call.name, 0)) for call in calls)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._summands:
            self._follow(func, args, kwargs or {}, out)
        return out

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        given = [tensor for tensor in tree_tensors((args, kwargs)) if tensor in self._summands]
        if not given or func in METADATA_OPS:
            return
        parts = [self._summands[tensor] for tensor in given]
        plain = torch.is_grad_enabled() and all(_same_shape_and_dtype(tensor, out) for tensor in given)
        if plain and func in ADD_OPS and kwargs.get("alpha", 1) == 1 and self._adds(func, args, parts):
            self._summands[out] = frozenset().union(*parts)
        elif plain and func._overloadpacket in COPY_OPS:
            self._summands[out] = parts[0]
        else:
            self._read_together |= dict.fromkeys(parts)

    def _adds(self, func: Any, args: tuple[Any, ...], parts: Sequence[SummandIds]) -> bool:
        """Whether every summand is one of the result once, and nobody else holds what is written into."""
        if len(frozenset().union(*parts)) < sum(map(len, parts)):
            return False
        if func is aten.add.Tensor:
            return True
        into = args[0]
        others = (tensor for tensor in self._summands if tensor is not into)
        return into in self._summands and not any(storage_id(tensor) == storage_id(into) for tensor in others)

    def _after_layer(self, name: str, layer: nn.Module, args: tuple[Any, ...], out: object) -> None:
        if isinstance(out, torch.Tensor) and torch.is_grad_enabled() and self._num_open_blocks:
            self._summands[out] = frozenset({len(self._uses)})
            self._uses.append((name, self._block))

    def _before_block(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        self._num_open_blocks += 1
        self._block += self._num_open_blocks == 1

    def _after_block(self, block: nn.Module, args: tuple[Any, ...], out: object) -> None:
        """What is still there at the end of a block is in somebody's hands."""
        self._num_open_blocks -= 1
        if not self._num_open_blocks:
            self._read_together |= dict.fromkeys(self._summands.values())
            self._summands = WeakTensorKeyDictionary()


def _same_shape_and_dtype(tensor: torch.Tensor, out: object) -> bool:
    return isinstance(out, torch.Tensor) and out.shape == tensor.shape and out.dtype == tensor.dtype
