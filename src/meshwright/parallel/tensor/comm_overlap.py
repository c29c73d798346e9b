"""Overlaps collectives of sharded layers with matmuls.

    backward of colwise     dX = dY W     sum of dX over the ranks ............
                                          dW = dY X of all layers that took X     during the sum
    forward of rowwise      Y_0 = X_0 W    sum of Y_0 ....    sum of Y_1 ....
                                           Y_1 = X_1 W        Y_2 = X_2 W         in chunks of samples

Why it works: nothing needs the gradient of a weight before the block's backward ends; all earlier blocks need
that of an input. So the weight gradients wait until the sum of the input gradient is on its way.

    seconds of a layer and direction: max(sum, products) instead of sum + products

Cost: dY of the colwise layers is kept a moment longer. Chunks cost smaller messages and products, and a sum
over chunks of the weight gradients: they pay on links on which a message takes longer than that. Two ranks of
one host over gloo (2 cores, which the messages need too; 25 M Llama, 2 x 128 tokens): nothing gained in CPU,
and 4 % lost with 2 chunks.
Limits: a weight that is cast, or whose rows are selected, has its gradient at once. Chunks are samples, also
where a model merges samples and tokens (Ernie's and Qwen2's shared experts, OPT): one has none.
Paper: Narayanan et al. 2021, arXiv 2104.04473 (Megatron-LM's asynchronous tensor-parallel all-reduce); Wang
et al. 2022, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models" (ASPLOS 2023).
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from meshwright.comm.collectives.redistribute import DeferredCalls, OverlapFn

SendFn = Callable[[torch.Tensor, OverlapFn], torch.Tensor]


def linear_deferring_weight_grad(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    deferred: DeferredCalls,
    *,
    transposed: bool,
) -> torch.Tensor:
    """Returns X W^T + b; its backward appends the computation of W's gradient to `deferred`. `transposed`: W
    is [in, out].
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return _DeferredWeightGradLinear.apply(x, weight, bias, transposed, deferred)


def run_in_chunks(
    x: torch.Tensor, sizes: Sequence[int], compute: Callable[[torch.Tensor], torch.Tensor], send: SendFn
) -> torch.Tensor:
    """Returns `send(compute(x), None)` in chunks of `sizes` samples: each is computed while the one before is
    sent.

    `send(y, overlap)` sends y, and calls `overlap()` meanwhile.
    """
    parts = split_samples(x, sizes)
    if len(parts) == 1:
        return send(compute(x), None)
    mode, ready = torch.is_grad_enabled(), [compute(parts[0])]

    def compute_next(part: torch.Tensor) -> None:
        with torch.set_grad_enabled(mode):  # a tensor is sent where gradients are off
            ready.append(compute(part))

    sent = [send(ready.pop(), partial(compute_next, following)) for _, following in pairwise(parts)]
    return torch.cat([*sent, send(ready.pop(), None)])


def split_samples(x: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Returns `x` in chunks of `sizes` samples. A model may have merged samples and tokens: then each sample
    has several rows of x.
    """
    ends = [len(x) * end // sum(sizes) for end in accumulate(sizes)]
    return (x,) if len(sizes) == 1 else x.tensor_split(ends[:-1])


def chunk_sizes(num_samples: int, num_chunks: int) -> list[int]:
    """Returns the number of samples in each chunk; the first have one more."""
    num_chunks = max(1, min(num_chunks, num_samples))
    each, more = divmod(num_samples, num_chunks)
    return [each + (number < more) for number in range(num_chunks)]


class _DeferredWeightGradLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        later: DeferredCalls,
    ) -> torch.Tensor:
        ctx.save_for_backward(x.flatten(0, -2), weight)
        ctx.leaf, ctx.transposed, ctx.later = weight if weight.is_leaf else None, transposed, later
        y = F.linear(x.flatten(0, -2), weight.t() if transposed else weight, bias)
        return torch.ops.aten._unsafe_view(
            y, (*x.shape[:-1], y.shape[-1])
        )  # no view: a model may write into it in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        needed, weighted, biased, *_ = ctx.needs_input_grad
        into = grad @ (weight.t() if ctx.transposed else weight) if needed else None
        of_bias = grad.flatten(0, -2).sum(0) if biased else None
        of_weight = partial(_weight_grad, x, grad, transposed=ctx.transposed)
        if weighted and ctx.leaf is not None and needed:
            ctx.later.append(partial(_accumulate_grad, ctx.leaf, of_weight))
            return into, None, of_bias, None, None
        return into, of_weight() if weighted else None, of_bias, None, None


def _weight_grad(x: torch.Tensor, grad: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    grad = grad.flatten(0, -2)
    return x.t() @ grad if transposed else grad.t() @ x


@torch.no_grad()
def _accumulate_grad(leaf: torch.Tensor, gradient: Callable[[], torch.Tensor]) -> None:
    leaf.grad = gradient() if leaf.grad is None else leaf.grad.add_(gradient())
