"""Overlaps collectives of sharded layers with matmuls, and sums the outputs of several layers in one
collective.

    backward of colwise     dX = dY W     sum of dX over the ranks ............
                                          dW = dY X of all layers that took X     during the sum
    forward of rowwise      Y_0 = X_0 W    sum of Y_0 ....    sum of Y_1 ....
                                           Y_1 = X_1 W        Y_2 = X_2 W         in chunks of samples

Why it works: nothing needs the gradient of a weight before the block's backward ends; all earlier blocks need
that of an input. So the weight gradients wait until the sum of the input gradient is on its way.

    seconds of a layer and direction: max(sum, products) instead of sum + products

Joint sums: layers whose outputs meet in additions alone (model/tensor_parallel/shared_sum_trace.py) end in
one collective. Each passes its summand on and returns zeros, and the last one sums what all have added up:

    a = A(x)     summand of a, on every rank ----+             returns zeros
    m = M(x)     summand of m, on every rank ----+--> sum --> + the biases of both
    y = x + a + m                                              (the model's own line, unchanged)

Cost: dY of the colwise layers is kept a moment longer. Chunks cost smaller messages and products, and a sum
over chunks of the weight gradients: they pay on links on which a message takes longer than that. Two ranks of
one host over gloo (2 cores, which the messages need too; 25 M Llama, 2 x 128 tokens): nothing gained in CPU,
and 4 % lost with 2 chunks. A joint sum costs zeros of the size of the residual stream, and the summand while
it waits.
Limits: a weight that is cast, or whose rows are selected, has its gradient at once. Chunks are samples: one
has none.
Paper: Narayanan et al. 2021, arXiv 2104.04473 (Megatron-LM's asynchronous tensor-parallel all-reduce); Wang
et al. 2022, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models" (ASPLOS 2023).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from meshwright.comm.collectives.redistribute import DeferredCalls, OverlapFn
from meshwright.plan.sharding.tensor_placements import Placement

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
    x: torch.Tensor, num_chunks: int, compute: Callable[[torch.Tensor], torch.Tensor], send: SendFn
) -> torch.Tensor:
    """Returns `send(compute(x), None)` in chunks of samples: each is computed while the one before is sent.

    `send(y, overlap)` sends y, and calls `overlap()` meanwhile.
    """
    parts = split_samples(x, num_chunks)
    if len(parts) == 1:
        return send(compute(x), None)
    mode, ready = torch.is_grad_enabled(), [compute(parts[0])]

    def compute_next(part: torch.Tensor) -> None:
        with torch.set_grad_enabled(mode):  # a tensor is sent where gradients are off
            ready.append(compute(part))

    sent = [send(ready.pop(), partial(compute_next, following)) for _, following in pairwise(parts)]
    return torch.cat([*sent, send(ready.pop(), None)])


def split_samples(x: torch.Tensor, num_chunks: int) -> tuple[torch.Tensor, ...]:
    """Returns `x` in chunks of samples."""
    num_chunks = min(num_chunks, x.shape[0])
    return (x,) if num_chunks <= 1 else x.tensor_split(num_chunks)


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


@dataclass
class JointSum:
    """The summands that `layers`, in the order in which they run, have contributed in one forward of their
    block.
    """

    layers: tuple[str, ...]
    contributors: tuple[str, ...] = ()
    summand: torch.Tensor | None = None
    biases: tuple[torch.Tensor, ...] = ()

    def clear(self) -> None:
        """Forgets all contributions."""
        self.contributors, self.summand, self.biases = (), None, ()


@dataclass(frozen=True)
class JointSumMember:
    """One layer of a joint sum."""

    layer: str
    joint_sum: JointSum

    @property
    def defers_sum(self) -> bool:
        """Whether a later layer runs the sum."""
        return self.layer != self.joint_sum.layers[-1]

    def contribute(
        self, summand: torch.Tensor, biases: Iterable[torch.Tensor], placement: Placement, num_ranks: int
    ) -> torch.Tensor:
        """Returns zeros in place of the output of the layer; they may be written into.

        Args:
            summand: the layer's product, whose sum over `num_ranks` ranks would have `placement`.
            biases: added once, to the sum.
        """
        joint = self.joint_sum
        if self.layer == joint.layers[0]:  # a forward that has failed may have left something
            joint.clear()
        joint.contributors += (self.layer,)
        joint.summand = add_summand(summand, joint.summand)
        joint.biases += tuple(biases)
        shape = list(summand.shape)
        if placement.dim is not None:
            shape[placement.dim] //= num_ranks
        return summand.new_zeros(shape)

    def collect(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Returns the summands of the other layers since the first of them ran, added up, and their
        biases.
        """
        joint = self.joint_sum
        given, summand, biases = joint.contributors, joint.summand, joint.biases
        joint.clear()
        if summand is None or given != joint.layers[:-1]:
            text = (
                f"{self.layer} ends the sum of {', '.join(joint.layers)}, and {', '.join(given) or 'none'} "
                f"ran before it"
            )
            raise RuntimeError(
                f"{text}: needed are all, in the order of the trial. Call them in every forward of the block"
            )
        return summand, biases


def joint_sum_members(sums: Mapping[str, tuple[str, ...]]) -> dict[str, JointSumMember]:
    """Returns the members of joint sums by layer; `sums` has, by layer, all layers that end in one sum with
    it.
    """
    joints = {layers: JointSum(layers) for layers in sums.values()}
    return {layer: JointSumMember(layer, joints[layers]) for layer, layers in sums.items()}


def add_summand(summand: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    """Returns `summand`, which nobody else holds, with `other` added in place."""
    return summand if other is None else summand.add_(other)
