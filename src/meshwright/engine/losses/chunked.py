"""LM head and loss for a chunk of tokens at a time: the full logits are never materialized.

    the model   ... norm ---> [head] ---> outputs          the LM head returns its input
    the loss    for each chunk of tokens:    logits = head(hidden)    loss += total(logits, their labels)
                                             hidden' = logits' W      W' += logits'^T hidden    (': gradient)

The sums come out as one scalar, and its backward returns gradients that exist already. They are those of the
loss times `state.step.loss_factor`, so that a scale that protects half-precision gradients also works inside.
Outside of steps and evaluations the LM head runs as usual.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch.overrides import TorchFunctionMode

from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.blocks.block_forward_backward import seed_like
from meshwright.model.loss.loss_definition import Batch, Loss
from meshwright.model.tensors.pytree import copy_containers, replace_tensors, storage_id
from meshwright.plan.job.errors import PlanError
from meshwright.plan.step.chunked_loss_cost import chunk_sizes

CHUNKED_LOSS_FIX = "remove the strategy chunked_loss"
TOKEN_DIM = 1  # the dim of them


class ChunkedLossRuntime:
    """The LM head and the loss of one rank.

    Does nothing where the plan computes all logits at once.
    """

    def __init__(self, state: RankState) -> None:
        self._state, self._full_logits_enabled, self._head_inputs = state, False, set[int]()
        self._autocast_dtype: torch.dtype | None = None
        call = state.plan.view.work_share.chunked_head_call
        if call is None:
            return
        loss, self._head = state.loss, state.trained_module.module.get_submodule(call.name)
        check_is_token_sum(loss)
        self._num_chunks, self._loss = state.plan.sharding.num_loss_chunks, loss
        state.patches.wrap_forward(call.name, self._head_forward)
        state.loss = replace(loss, total=self._loss_sum)

    @contextmanager
    def full_logits(self) -> Iterator[None]:
        """Makes the LM head return logits meanwhile."""
        before, self._full_logits_enabled = self._full_logits_enabled, True
        try:
            yield
        finally:
            self._full_logits_enabled = before

    def _head_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._full_logits_enabled:
            return forward(*args, **kwargs)
        with _SkipHeadProduct(self._head._parameters["weight"]):
            hidden = forward(*args, **kwargs)
        kind = hidden.device.type
        self._autocast_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._head_inputs.add(storage_id(hidden))
        return hidden

    def _loss_sum(self, outputs: Any, batch: Batch) -> torch.Tensor:
        hidden = (
            self._loss.vocab_parallel.logits(outputs) if self._loss.vocab_parallel is not None else outputs
        )
        if storage_id(hidden) not in self._head_inputs or hidden.ndim <= TOKEN_DIM:
            text = (
                f"the input of the loss, {list(hidden.shape)}, was changed after the LM head, whose product "
                "chunked_loss computes inside the loss"
            )
            raise PlanError(
                text,
                fix=f"return the LM head's output from the model unchanged, or {CHUNKED_LOSS_FIX}",
                location="model",
            )
        self._head_inputs.discard(storage_id(hidden))
        weight, bias = self._head.get_parameter("weight"), self._head._parameters.get("bias")
        call = _ChunkedLossCall(self._loss, outputs, hidden, batch, self._autocast_dtype)
        if not torch.is_grad_enabled():
            return call.compute(hidden, weight, bias, self._num_chunks).total
        return _ChunkedLossFunction.apply(
            hidden, weight, bias, call, self._num_chunks, self._state.step.loss_factor
        )


def check_is_token_sum(loss: Loss) -> None:
    """Raises PlanError for a loss that cannot be computed for a chunk of tokens."""
    if not loss.is_token_sum or loss.vocab_parallel is None:
        text = (
            "the loss does not say that it is a sum over tokens (by_token), and which logits it takes (split)"
        )
        raise PlanError(text, fix=f"say so in Loss(...), or {CHUNKED_LOSS_FIX}", location="loss")


class _SkipHeadProduct(TorchFunctionMode):
    """Replaces the product with `weight` by its input."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self._weight = weight

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and len(args) > 1 and args[1] is self._weight:
            return args[0].view_as(args[0])
        return func(*args, **(kwargs or {}))


@dataclass
class _LossAndGradients:
    """A loss, and the gradients of the LM head's input, weight and bias; None where no gradient is needed."""

    total: torch.Tensor
    hidden: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class _ChunkedLossCall:
    loss: Loss
    outputs: Any
    hidden: torch.Tensor
    batch: Batch
    compute_dtype: torch.dtype | None
    length: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", self.hidden.shape[TOKEN_DIM])

    @torch.no_grad()
    def compute(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        num_chunks: int,
        loss_factor: float | torch.Tensor | None = None,
    ) -> _LossAndGradients:
        """Returns the loss of `hidden`.

        With a `loss_factor`, also the gradients of the loss times that factor.
        """
        result, start = _LossAndGradients(torch.zeros((), device=hidden.device)), 0
        if loss_factor is not None:
            result.hidden = torch.empty_like(hidden)
            result.weight = torch.zeros_like(weight) if weight.requires_grad else None
            result.bias = torch.zeros_like(bias) if bias is not None and bias.requires_grad else None
        head_params = [
            None if each is None else each.detach().to(self.compute_dtype or each.dtype)
            for each in (weight, bias)
        ]
        for chunk_size in chunk_sizes(self.length, num_chunks):
            chunk = slice(start, start + chunk_size)
            x = hidden[:, chunk].detach().to(self.compute_dtype or hidden.dtype)
            total = self._chunk_loss(x, head_params, chunk, result, loss_factor)
            result.total = result.total + total if start else total
            start += chunk_size
        return result

    def _chunk_loss(
        self,
        x: torch.Tensor,
        head_params: list[Any],
        chunk: slice,
        result: _LossAndGradients,
        loss_factor: float | torch.Tensor | None,
    ) -> torch.Tensor:
        batch = {key: self._chunk_of(value, chunk) for key, value in self.batch.items()}
        if loss_factor is None:
            return self.loss.total(
                replace_tensors(copy_containers(self.outputs), {id(self.hidden): F.linear(x, *head_params)}),
                batch,
            )

        def on_logits_grad(gradient: torch.Tensor) -> None:
            if result.hidden is not None:
                result.hidden[:, chunk] = gradient @ head_params[0]
            gradient = gradient.flatten(0, -2)
            if result.weight is not None:
                _add_product(result.weight, gradient, x.flatten(0, -2))
            if result.bias is not None:
                result.bias += gradient.sum(0)

        with torch.enable_grad():
            total = self._loss_of_logits(x.requires_grad_(), head_params, batch, on_logits_grad)
            if total.requires_grad:
                torch.autograd.backward([total], [seed_like(total, loss_factor)])
        return total.detach()

    def _loss_of_logits(
        self,
        x: torch.Tensor,
        head_params: list[Any],
        batch: Batch,
        on_logits_grad: Callable[[torch.Tensor], None],
    ) -> torch.Tensor:
        return self.loss.total(
            replace_tensors(
                copy_containers(self.outputs),
                {id(self.hidden): _LogitsProduct.apply(x, *head_params, on_logits_grad)},
            ),
            batch,
        )

    def _chunk_of(self, value: torch.Tensor, chunk: slice) -> torch.Tensor:
        return value[:, chunk] if value.ndim > TOKEN_DIM and value.shape[TOKEN_DIM] == self.length else value


class _LogitsProduct(torch.autograd.Function):
    """A product whose backward passes the gradient of the logits to `on_logits_grad`, and returns none."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Any,
        on_logits_grad: Callable[[torch.Tensor], None],
    ) -> torch.Tensor:
        ctx.limited_by_positions = on_logits_grad
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        ctx.limited_by_positions(grads[0])
        return None, None, None, None


class _ChunkedLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: Any,
        call: _ChunkedLossCall,
        num_chunks: int,
        loss_factor: float | torch.Tensor,
    ) -> torch.Tensor:
        result = call.compute(hidden, weight, bias, num_chunks, loss_factor)
        ctx.result, ctx.seed = result, seed_like(result.total, loss_factor)
        return result.total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        result, ctx.result = ctx.result, None
        factor = grads[0] / ctx.seed  # exactly 1 where backward starts from loss_factor
        for each in (result.hidden, result.weight, result.bias):
            if each is not None:
                each *= factor.to(each.dtype)
        return result.hidden, result.weight, result.bias, None, None, None


def _add_product(to: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor) -> None:
    if gradient.dtype == to.dtype:
        to.addmm_(gradient.t(), x)
    else:
        to += gradient.t() @ x
