"""Products and collectives side by side: what a rank computes while a tensor of its layer is under way.

    backward of columns     dX = dY W     sum of dX over the ranks ............
                                          dW = dY X of all layers that took X     while the sum is under way
    forward of rows         Y_0 = X_0 W    sum of Y_0 ....    sum of Y_1 ....
                                           Y_1 = X_1 W        Y_2 = X_2 W         in chunks of samples, where a plan asks for them

Why it works: the gradient of a weight is wanted by nobody before the block's backward ends, that of an input by all blocks before
it. So products of the one kind wait until a sum of the other is on its way: always, where columns layers take in what was moved.

    seconds of a layer and direction: max(sum, products) for sum + products

Cost: dY of the columns layers is kept a moment longer. `chunks` cost smaller messages and products, and a sum over chunks of the
weights' gradients: they are for links on which a message takes longer than that. Two ranks of one host over gloo (2 cores, which
the messages need themselves; 25 M Llama, 2 x 128 tokens): nothing gained in CPU, and with 2 chunks 4 % lost.
Limits: a weight that is cast, or whose rows are picked, has its gradient at once. Chunks are samples: one has none.
Paper: Megatron-LM's "async tensor-parallel all-reduce" (Narayanan et al. 2021, arXiv 2104.04473); chunks: Wang et al. 2022,
"Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models" (ASPLOS 2023).
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.comm.moves import Later

Meanwhile = Callable[[], None] | None
Send = Callable[[torch.Tensor, Meanwhile], torch.Tensor]


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, later: Later, *, transposed: bool) -> torch.Tensor:
    """The product x W^T + b, whose backward leaves the gradient of W to `later`; with `transposed`, W has a row per input."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return _Product.apply(x, weight, bias, transposed, later)


def in_chunks(x: torch.Tensor, chunks: int, compute: Callable[[torch.Tensor], torch.Tensor], send: Send) -> torch.Tensor:
    """What `send(compute(x), None)` gives, in chunks of samples: each is computed while the one before is under way.

    `send(y, meanwhile)` moves y, and calls `meanwhile()` while it is under way.
    """
    parts = chunked(x, chunks)
    if len(parts) == 1:
        return send(compute(x), None)
    mode, ready = torch.is_grad_enabled(), [compute(parts[0])]

    def ahead(part: torch.Tensor) -> None:
        with torch.set_grad_enabled(mode):  # a tensor is sent where gradients are off
            ready.append(compute(part))

    sent = [send(ready.pop(), partial(ahead, following)) for _, following in pairwise(parts)]
    return torch.cat([*sent, send(ready.pop(), None)])


def chunked(x: torch.Tensor, chunks: int) -> tuple[torch.Tensor, ...]:
    """`x` in chunks of samples."""
    chunks = min(chunks, x.shape[0])
    return (x,) if chunks <= 1 else x.tensor_split(chunks)


def sizes(rows: int, chunks: int) -> list[int]:
    """The samples in each chunk of `rows`: the first have one more."""
    chunks = max(1, min(chunks, rows))
    each, more = divmod(rows, chunks)
    return [each + (number < more) for number in range(chunks)]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool, later: Later
    ) -> torch.Tensor:
        ctx.save_for_backward(x.flatten(0, -2), weight)
        ctx.leaf, ctx.transposed, ctx.later = weight if weight.is_leaf else None, transposed, later
        y = F.linear(x.flatten(0, -2), weight.t() if transposed else weight, bias)
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))  # no view: a model may write into it in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        needed, weighted, biased, *_ = ctx.needs_input_grad
        into = grad @ (weight.t() if ctx.transposed else weight) if needed else None
        of_bias = grad.flatten(0, -2).sum(0) if biased else None
        of_weight = partial(_of_weight, x, grad, transposed=ctx.transposed)
        if weighted and ctx.leaf is not None and needed:
            ctx.later.append(partial(_add_to, ctx.leaf, of_weight))
            return into, None, of_bias, None, None
        return into, of_weight() if weighted else None, of_bias, None, None


def _of_weight(x: torch.Tensor, grad: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    grad = grad.flatten(0, -2)
    return x.t() @ grad if transposed else grad.t() @ x


@torch.no_grad()
def _add_to(leaf: torch.Tensor, gradient: Callable[[], torch.Tensor]) -> None:
    """As autograd accumulates the gradient of a leaf."""
    leaf.grad = gradient() if leaf.grad is None else leaf.grad.add_(gradient())
