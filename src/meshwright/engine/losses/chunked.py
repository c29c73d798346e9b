"""A loss whose logits are never all there: the head is left to the loss, which multiplies some tokens at a time.

    the model   ... norm ---> [head] ---> logits                  the head gives out what went into it, and nothing is multiplied
    the loss    for some tokens after others:    logits = head(hidden)    loss += total(logits, their labels)
                                                 hidden' = logits' W      W' += logits'^T hidden     (x': the gradient of x)

The sums come out as one scalar, and its backward hands out the gradients that are there already. They were taken of the loss
times `state.seed`, so that a scale that keeps halves from vanishing works within, too. Outside of steps and evaluations the head
is itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch.overrides import TorchFunctionMode

from meshwright.engine.runtime.loss import Batch, Loss
from meshwright.engine.runtime.module_patches import ModulePatches
from meshwright.engine.runtime.state import RankState
from meshwright.model.tensors.pytree import copy_containers, replace_tensors, storage_id
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.rank_share import chunked_head_call
from meshwright.plan.step.chunked_loss import chunk_sizes

CHUNKED_LOSS_FIX = "leave out the strategy that takes the loss in pieces"
TOKEN_DIM = 1  # the dim of them


class ChunkedLossRuntime:
    """The head and the loss of one rank under `plan`; where that takes all logits at once, nothing is done."""

    def __init__(self, plan: Plan, state: RankState, module_patches: ModulePatches) -> None:
        self._state, self._whole, self._given = state, False, set[int]()
        self._cast: torch.dtype | None = None
        call = chunked_head_call(plan.sharding)
        if call is None:
            return
        loss, self._head = state.loss, state.trained_module.module.get_submodule(call.name)
        check_is_token_sum(loss)
        self._pieces, self._loss = plan.sharding.num_loss_chunks, loss
        module_patches.wrap_forward(call.name, self._left)
        state.loss = replace(loss, total=self._total)

    @contextmanager
    def full_logits(self) -> Iterator[None]:
        """Meanwhile the head gives out logits."""
        before, self._whole = self._whole, True
        try:
            yield
        finally:
            self._whole = before

    def _left(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._whole:
            return forward(*args, **kwargs)
        with _SkipHeadProduct(self._head._parameters["weight"]):
            taken = forward(*args, **kwargs)
        kind = taken.device.type
        self._cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._given.add(storage_id(taken))
        return taken

    def _total(self, outputs: Any, batch: Batch) -> torch.Tensor:
        taken = (
            self._loss.vocab_parallel.logits(outputs) if self._loss.vocab_parallel is not None else outputs
        )
        if storage_id(taken) not in self._given or taken.ndim <= TOKEN_DIM:
            text = f"what the loss takes, {list(taken.shape)}, was changed behind the head, which leaves its product to the loss"
            raise PlanError(
                text,
                fix=f"return the head's output from the model as it is, or {CHUNKED_LOSS_FIX}",
                location="model",
            )
        self._given.discard(storage_id(taken))
        weight, bias = self._head.get_parameter("weight"), self._head._parameters.get("bias")
        one = _ChunkedLossCall(self._loss, outputs, taken, batch, self._cast)
        if not torch.is_grad_enabled():
            return one.compute(taken, weight, bias, self._pieces).total
        return _ChunkedLossFunction.apply(taken, weight, bias, one, self._pieces, self._state.loss_factor)


def check_is_token_sum(loss: Loss) -> None:
    """Raise PlanError for a loss that cannot be taken for some tokens at a time."""
    if not loss.is_token_sum or loss.vocab_parallel is None:
        text = (
            "the loss does not say that it is a sum over tokens (by_token), and which logits it takes (split)"
        )
        raise PlanError(text, fix=f"say so in Loss(...), or {CHUNKED_LOSS_FIX}", location="loss")


class _SkipHeadProduct(TorchFunctionMode):
    """Meanwhile a product with `weight` is what is multiplied."""

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
    """A loss, and the gradients of what went into the head, of its weight and of its bias; None: nobody needs it."""

    total: torch.Tensor
    hidden: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class _ChunkedLossCall:
    """How the loss of some tokens is taken: `taken` stands where logits belong among `outputs`, and is multiplied in `cast`."""

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
        loss_factor: float | None = None,
    ) -> _LossAndGradients:
        """The loss of `taken`; with a `seed`, the gradients of it times that, too."""
        found, at = _LossAndGradients(torch.zeros((), device=hidden.device)), 0
        if loss_factor is not None:
            found.hidden = torch.empty_like(hidden)
            found.weight = torch.zeros_like(weight) if weight.requires_grad else None
            found.bias = torch.zeros_like(bias) if bias is not None and bias.requires_grad else None
        held = [
            None if each is None else each.detach().to(self.compute_dtype or each.dtype)
            for each in (weight, bias)
        ]
        for size in chunk_sizes(self.length, num_chunks):
            some = slice(at, at + size)
            x = hidden[:, some].detach().to(self.compute_dtype or hidden.dtype)
            total = self._loss_of(x, held, some, found, loss_factor)
            found.total = found.total + total if at else total
            at += size
        return found

    def _loss_of(
        self, x: torch.Tensor, held: list[Any], some: slice, found: _LossAndGradients, seed: float | None
    ) -> torch.Tensor:
        """The loss of the tokens `some`, whose part of `taken` is `x`; their gradients are added to what is `found`."""
        batch = {key: self._some(value, some) for key, value in self.batch.items()}
        if seed is None:
            return self.loss.total(
                replace_tensors(copy_containers(self.outputs), {id(self.hidden): F.linear(x, *held)}), batch
            )

        def learnt(gradient: torch.Tensor) -> None:
            if found.hidden is not None:
                found.hidden[:, some] = gradient @ held[0]
            gradient = gradient.flatten(0, -2)
            if found.weight is not None:
                _add_product(found.weight, gradient, x.flatten(0, -2))
            if found.bias is not None:
                found.bias += gradient.sum(0)

        with torch.enable_grad():
            total = self._through(x.requires_grad_(), held, batch, learnt)
            if total.requires_grad:
                torch.autograd.backward([total], [torch.full_like(total, seed)])
        return total.detach()

    def _through(
        self, x: torch.Tensor, held: list[Any], batch: Batch, learnt: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """The loss, of logits that nobody here keeps: of what the loss keeps of them they may go before its backward."""
        return self.loss.total(
            replace_tensors(
                copy_containers(self.outputs), {id(self.hidden): _LogitsProduct.apply(x, *held, learnt)}
            ),
            batch,
        )

    def _some(self, value: torch.Tensor, some: slice) -> torch.Tensor:
        return value[:, some] if value.ndim > TOKEN_DIM and value.shape[TOKEN_DIM] == self.length else value


class _LogitsProduct(torch.autograd.Function):
    """A product; its backward tells `learnt` the gradient of what came of it, and gives none."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, learnt: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        ctx.learnt = learnt
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        ctx.learnt(grads[0])
        return None, None, None, None


class _ChunkedLossFunction(torch.autograd.Function):
    """The loss as a scalar whose gradients are there with it."""

    @staticmethod
    def forward(
        ctx: Any,
        taken: torch.Tensor,
        weight: torch.Tensor,
        bias: Any,
        one: _ChunkedLossCall,
        pieces: int,
        seed: float,
    ) -> torch.Tensor:
        found = one.compute(taken, weight, bias, pieces, seed)
        ctx.found, ctx.seed = found, torch.full_like(found.total, seed)
        return found.total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found, ctx.found = ctx.found, None
        factor = grads[0] / ctx.seed  # 1, to the bit, where it is what was said
        for each in (found.taken, found.weight, found.bias):
            if each is not None:
                each *= factor.to(each.dtype)
        return found.taken, found.weight, found.bias, None, None, None


def _add_product(to: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor) -> None:
    if gradient.dtype == to.dtype:
        to.addmm_(gradient.t(), x)
    else:
        to += gradient.t() @ x
