"""Experts of a mixture of experts, with their weights in 3-D parameters, and an expert that all tokens visit.

    token 0 -> experts 2, 0         rows, sorted by expert     0: t0 t1 | 1: | 2: t0 t2 | none: t2
    token 1 -> expert 0, none       one product per expert     y = down(activation(gate x) * up x)
    token 2 -> none, expert 2       every token                sum over its experts of weight x y

The interface is that of transformers' experts: `experts(hidden, top_k_index, top_k_weights)`, and parameters
`gate_up_proj` [E, 2I, D], `down_proj` [E, D, I]. An index of E means no expert: the token was dropped there.

No size depends on values: the rows are as many as tokens x k, those of no expert come last, and read and
write a row behind the tokens. An expert without a token has a gradient of zeros.

Cost: rows x (D + 3I) numbers of activations, and per parameter one gradient of its own size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.nn.grouped_linear import grouped_linear
from meshwright.plan.job.errors import Diagnostic, suggest_name

ACTIVATIONS = MappingProxyType(
    {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
    }
)


@dataclass(frozen=True)
class ExpertMLP:
    """What an expert computes: down(activation(gate x) * up x), or down(activation(up x)) if not `gated`."""

    activation: str = "silu"
    gated: bool = True
    bias: bool = False

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields what is wrong with the options."""
        if self.activation not in ACTIVATIONS:
            text = f"the activation is {self.activation!r}"
            yield Diagnostic(text, suggest_name(str(self.activation), ACTIVATIONS), "mlp.activation")

    def activate(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns [N, I] of the results [N, 2I] (gates, then ups) or [N, I] of the first product."""
        activation = ACTIVATIONS[self.activation]
        if not self.gated:
            return activation(hidden)
        gate, up = hidden.chunk(2, dim=-1)
        return activation(gate) * up


class Experts(nn.Module):
    """`num_experts` MLPs of `width` (D) and `intermediate` (I) features, for the tokens that choose them."""

    def __init__(self, width: int, intermediate: int, num_experts: int, mlp: ExpertMLP) -> None:
        super().__init__()
        self.num_experts, self.mlp = num_experts, mlp
        self._up_name = "gate_up_proj" if mlp.gated else "up_proj"
        shapes = {
            self._up_name: (num_experts, intermediate * (1 + mlp.gated), width),
            "down_proj": (num_experts, width, intermediate),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
            bias = nn.Parameter(torch.empty(shape[:2])) if mlp.bias else None
            self.register_parameter(f"{name}_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights of each expert as `nn.Linear` does: uniform within 1 / sqrt(inputs)."""
        for name in (self._up_name, "down_proj"):
            weight, bias = self.get_parameter(name), self._parameters[f"{name}_bias"]
            bound = weight.shape[2] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def forward(
        self,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Returns, for each token of `hidden` [T, D], the weighted sum of what its experts return, [T, D].

        `top_k_index` [T, k] are experts, or `num_experts` for none; `top_k_weights` [T, k] their weights.
        """
        num_tokens, k = top_k_index.shape
        no_expert = top_k_index == self.num_experts
        expert_of_row, order = top_k_index.flatten().sort(stable=True)
        each = torch.arange(self.num_experts, device=hidden.device)
        ends = torch.searchsorted(expert_of_row, each, right=True, out_int32=True)
        # undefined results of rows without an expert go to a row behind the tokens, and from there nowhere
        token = order.div(k, rounding_mode="floor")
        token = token.masked_fill(expert_of_row == self.num_experts, num_tokens)
        rows = _TakeRows.apply(hidden, token)
        rows = self.mlp.activate(self._product(self._up_name, rows, expert_of_row, ends))
        rows = self._product("down_proj", rows, expert_of_row, ends)
        weights = top_k_weights.masked_fill(no_expert, 0).flatten().index_select(0, order)
        rows = rows * weights.to(rows.dtype).unsqueeze(-1)
        return rows.new_zeros(num_tokens + 1, hidden.shape[1]).index_add_(0, token, rows)[:num_tokens]

    def _product(
        self, name: str, rows: torch.Tensor, expert_of_row: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        result, bias = grouped_linear(rows, self.get_parameter(name), ends), self._parameters[f"{name}_bias"]
        if bias is None:
            return result
        return result + F.pad(bias, (0, 0, 0, 1)).index_select(0, expert_of_row)

    def extra_repr(self) -> str:
        """Returns the options, as `print(model)` shows them."""
        return f"num_experts={self.num_experts}, mlp={self.mlp}"


class _TakeRows(torch.autograd.Function):
    """Returns the rows `token` of `hidden` [T, D]; for T any row, whose gradient goes nowhere.

    To pad `hidden` would copy it, and its gradient once more.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token)
        ctx.num_tokens = len(hidden)
        return hidden.index_select(0, token.clamp(max=len(hidden) - 1))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (token,), (grad,) = ctx.saved_tensors, grads
        total = grad.new_zeros(ctx.num_tokens + 1, grad.shape[1]).index_add_(0, token, grad)
        return total[: ctx.num_tokens], None


class SharedExpert(nn.Module):
    """An MLP of linear layers, for every token."""

    def __init__(self, width: int, intermediate: int, mlp: ExpertMLP) -> None:
        super().__init__()
        self.mlp = mlp
        self.gate_proj = nn.Linear(width, intermediate, mlp.bias) if mlp.gated else None
        self.up_proj = nn.Linear(width, intermediate, mlp.bias)
        self.down_proj = nn.Linear(intermediate, width, mlp.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns what the expert computes of `hidden` [.., D]."""
        activation, up = ACTIVATIONS[self.mlp.activation], self.up_proj(hidden)
        if self.gate_proj is None:
            return self.down_proj(activation(up))
        return self.down_proj(activation(self.gate_proj(hidden)) * up)
