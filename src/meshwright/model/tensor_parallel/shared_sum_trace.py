"""Finds rowwise layers whose outputs end in one sum, by following them through a trial while they are
only added to.

    h = norm(x);  a = attention(h);  m = mlp(h);  y = x + a + m        a and m are summands of one sum: y
    a = attention(norm(x));  y = x + a;  m = mlp(norm(y));  z = y + m  a is read before m exists: two sums

A tensor carries the layer outputs that it contains as summands, each once; an addition joins those of its
operands. Any other reader (another operation, the end of the block, a tensor kept elsewhere) reads all of
them at once. Outputs that are never read separately may share one all-reduce: one layer adds its output to
the other's and returns zeros.

Limits: additions of equal shapes and dtypes with factor one, with gradients on; layers called once per
forward. Code that reads an output only in some steps, and not in the trial, sees zeros.
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
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall

aten: Any = torch.ops.aten
ADD_OPS = (aten.add.Tensor, aten.add_.Tensor)
METADATA_OPS = (torch.ops.prim.device.default,)  # reads no values
# these keep the summands if the shape stays
COPY_OPS = (aten.alias, aten.view, aten._unsafe_view, aten.clone)
SummandIds = frozenset[int]


class FusedAllReduces(TorchDispatchMode):
    """Follows layer outputs through additions (`follow_layers`), and marks those that end in one sum
    (`mark_calls`).
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
        """Follows the outputs of `layers` of `module` to the ends of its `blocks`."""
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
        """Returns `calls` with the number of the sum for those that end in one."""
        names = [name for name, _ in self._uses]
        layers_by_reads: dict[tuple[int, SummandIds], list[str]] = {}
        for index, (name, block) in enumerate(self._uses):
            reads = frozenset(
                number for number, summands in enumerate(self._read_together) if index in summands
            )
            is_single_call = names.count(name) == sum(call.name == name for call in calls) == 1
            if is_single_call and reads:
                layers_by_reads.setdefault((block, reads), []).append(name)
        joint_layers = [layers for layers in layers_by_reads.values() if len(layers) > 1]
        numbers = {name: number for number, layers in enumerate(joint_layers, 1) for name in layers}
        return tuple(replace(call, sum_id=numbers.get(call.name, 0)) for call in calls)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._summands:
            self._follow(func, args, kwargs or {}, out)
        return out

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        inputs = [tensor for tensor in tree_tensors((args, kwargs)) if tensor in self._summands]
        if not inputs or func in METADATA_OPS:
            return
        summands = [self._summands[tensor] for tensor in inputs]
        is_followed = torch.is_grad_enabled() and all(_same_shape_and_dtype(tensor, out) for tensor in inputs)
        if (
            is_followed
            and func in ADD_OPS
            and kwargs.get("alpha", 1) == 1
            and self._adds(func, args, summands)
        ):
            self._summands[out] = frozenset().union(*summands)
        elif is_followed and func._overloadpacket in COPY_OPS:
            self._summands[out] = summands[0]
        else:
            self._read_together |= dict.fromkeys(summands)

    def _adds(self, func: Any, args: tuple[Any, ...], summands: Sequence[SummandIds]) -> bool:
        """Whether every summand occurs once in the result, and nothing else holds the tensor that is
        written.
        """
        if len(frozenset().union(*summands)) < sum(map(len, summands)):
            return False
        if func is aten.add.Tensor:
            return True
        written = args[0]
        other_tensors = (tensor for tensor in self._summands if tensor is not written)
        return written in self._summands and not any(
            storage_id(tensor) == storage_id(written) for tensor in other_tensors
        )

    def _after_layer(self, name: str, layer: nn.Module, args: tuple[Any, ...], out: object) -> None:
        if isinstance(out, torch.Tensor) and torch.is_grad_enabled() and self._num_open_blocks:
            self._summands[out] = frozenset({len(self._uses)})
            self._uses.append((name, self._block))

    def _before_block(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        self._num_open_blocks += 1
        self._block += self._num_open_blocks == 1

    def _after_block(self, block: nn.Module, args: tuple[Any, ...], out: object) -> None:
        """Ends a block: everything still carried counts as read."""
        self._num_open_blocks -= 1
        if not self._num_open_blocks:
            self._read_together |= dict.fromkeys(self._summands.values())
            self._summands = WeakTensorKeyDictionary()


def _same_shape_and_dtype(tensor: torch.Tensor, out: object) -> bool:
    return isinstance(out, torch.Tensor) and out.shape == tensor.shape and out.dtype == tensor.dtype
