"""Runs a model on one device in which layers take, and return, values that have been rounded.

Ranks that send codes inside a block compute with what the codes say, and so do the layers that take it. Here
one ordinary forward does the same, from what the codes have lost:

    q = q_proj(x), k = k_proj(x)     both take    x - lost(x)        its gradient less lost'(x), once
    y = o_proj(...)                  returns      y - lost(y)        its gradient less lost'(y)

A value is named by the layer that took it first in a block call; layers that take the same tensor have the
same value, so the gradient that comes back is rounded once. Attention is a layer without a name: each call of
F.scaled_dot_product_attention, which takes query, key and value and returns an output.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.model.tensors.function_modes import InterceptMode
from meshwright.plan.model_spec.model_spec import block_call_name
from meshwright.plan.strategy_interface import SUM_SLOT

# of a use of a value: the block call, the module, "input" or "output", its argument or index, and the number
# of the use in this run of the block call; attention has no module
UseKey = tuple[str, ...]
HEADS_NDIM = 4  # [samples, heads, tokens, width]
ATTENTION = ""  # in place of a module
ATTENTION_ARGS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True)
class Rounding:
    """What rounding took from a value before it was used, and from the gradient that came back from there;
    both have the shape of the value for the global batch. None: nothing.
    """

    lost: torch.Tensor | None = None
    lost_gradient: torch.Tensor | None = None

    def apply(self, value: torch.Tensor, samples: Sequence[int], num_samples: int) -> torch.Tensor:
        """Returns `value` of the `samples` out of `num_samples` less what was lost; its gradient likewise."""
        lost, lost_gradient = self.lost, self.lost_gradient
        if value.ndim == HEADS_NDIM and lost is not None and value.shape[1] % lost.shape[1] == 0:
            copies = value.shape[1] // lost.shape[1]  # that the model has made of each head for attention
            lost = lost.repeat_interleave(copies, 1)
        if value.ndim == HEADS_NDIM and lost_gradient is not None:
            copies = value.shape[1] // lost_gradient.shape[1]  # their gradients are added up
            of_first = torch.zeros_like(lost_gradient.repeat_interleave(copies, 1))
            of_first[:, ::copies] = lost_gradient
            lost_gradient = of_first
        lost, lost_gradient = (
            _of_samples(each, value, samples, num_samples) for each in (lost, lost_gradient)
        )
        return _Rounded.apply(value, lost, lost_gradient)


@dataclass(frozen=True)
class RoundedLayers:
    """What layers take and return in place of their values: `roundings` by use. `uses` are all uses of such
    values: those without a rounding take what another one has taken before, or a value that lost nothing.
    """

    roundings: Mapping[UseKey, Rounding]
    uses: frozenset[UseKey]
    num_samples: int

    def run(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        run_forward: Callable[[], Any],
        samples: Sequence[int] | None = None,
    ) -> Any:
        """Returns what `run_forward()`, a forward of `module`, returns on `samples` (None: all)."""
        values = _LayersInForward(self, range(self.num_samples) if samples is None else samples)
        replaced = list[tuple[nn.Module, Any]]()

        def replace_forward(layer: nn.Module, wrapper: Callable[..., Any]) -> None:
            replaced.append((layer, vars(layer).get("forward")))
            layer.forward = partial(wrapper, layer.forward)

        names = dict.fromkeys(use[1] for use in self.uses)
        has_attention = names.pop(ATTENTION, self) is None
        for name in names:
            layer = module.get_submodule(name)
            replace_forward(layer, partial(values.run_layer, name, layer))
        for name, block in blocks.items():
            replace_forward(block, partial(values.run_block, name))
        try:
            with InterceptMode(values.run_operation) if has_attention else nullcontext():
                return run_forward()
        finally:
            for layer, original in reversed(replaced):
                vars(layer).pop("forward", None)
                if original is not None:
                    layer.forward = original


class _LayersInForward:
    """What the layers of one forward take and return in place of their values."""

    def __init__(self, rounded: RoundedLayers, samples: Sequence[int]) -> None:
        self._rounded, self._samples = rounded, samples
        self._block_call = ""
        self._num_calls, self._num_uses = Counter[str](), Counter[tuple[str, str, str]]()
        # by id and version of a value, which must stay alive: the value, and what layers take in its place
        self._taken: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._slots: dict[str, dict[tuple[str, str], None]] = {}
        for _, name, side, slot, _ in sorted(rounded.uses):
            self._slots.setdefault(name, {})[side, slot] = None

    def run_block(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a block; one that another block calls is a part of that one."""
        if self._block_call or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        self._num_calls[name] += 1
        self._block_call = block_call_name(name, self._num_calls[name])
        self._num_uses.clear()
        self._taken.clear()
        try:
            return forward(*args, **kwargs)
        finally:
            self._block_call = ""

    def run_layer(
        self, name: str, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a layer with what it takes, and returns, rounded."""
        if not self._block_call:
            return forward(*args, **kwargs)
        given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        slots = self._slots[name]
        for slot in (slot for side, slot in slots if side == "input"):
            place = int(slot) if slot.isdigit() else slot
            given[place] = self._take((name, "input", slot), given[place])
        output = forward(*(given[at] for at in range(len(args))), **{key: given[key] for key in kwargs})
        for slot in (slot for side, slot in slots if side == "output"):
            if slot == SUM_SLOT:  # a bias is added behind: its gradient is exact
                bias = layer._parameters.get("bias")
                product = output if bias is None else output - bias
                output = self._take((name, "output", slot), product)
                output = output if bias is None else output + bias
                continue
            if not slot:
                output = self._take((name, "output", slot), output)
                continue
            several = list(output)
            several[int(slot)] = self._take((name, "output", slot), several[int(slot)])
            output = type(output)(several)
        return output

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a torch call; attention inside a block takes and returns rounded values."""
        if func is not F.scaled_dot_product_attention or not self._block_call:
            return func(*args, **kwargs)
        given = {**dict(zip(ATTENTION_ARGS, args, strict=False)), **kwargs}
        for slot in ATTENTION_ARGS[:3]:
            given[slot] = self._take((ATTENTION, "input", slot), given[slot])
        return self._take((ATTENTION, "output", "output"), func(**given))

    def _take(self, place: tuple[str, str, str], value: torch.Tensor) -> torch.Tensor:
        self._num_uses[place] += 1
        use = (self._block_call, *place, str(self._num_uses[place]))
        if use not in self._rounded.uses:
            return value
        key = id(value), value._version
        if key not in self._taken:
            rounding = self._rounded.roundings.get(use, Rounding())
            self._taken[key] = value, rounding.apply(value, self._samples, self._rounded.num_samples)
        return self._taken[key][1]


def _of_samples(
    lost: torch.Tensor | None, value: torch.Tensor, samples: Sequence[int], num_samples: int
) -> torch.Tensor | None:
    """Returns the part of `lost` that belongs to the `samples` of a forward."""
    if lost is None:
        return None
    for dim, (size, all_sizes) in enumerate(zip(value.shape, lost.shape, strict=True)):
        if size != all_sizes:
            per_sample = all_sizes // num_samples
            rows = [each * per_sample + at for each in samples for at in range(per_sample)]
            return lost.index_select(dim, torch.tensor(rows[:size], device=lost.device))
    return lost


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, lost: torch.Tensor | None, lost_gradient: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.lost_gradient = lost_gradient
        return value.clone() if lost is None else value - lost

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        return grad if ctx.lost_gradient is None else grad - ctx.lost_gradient, None, None
