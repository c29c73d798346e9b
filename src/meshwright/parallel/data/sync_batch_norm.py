"""Synchronized batch norm: mean and variance over the samples of all ranks, as one device computes them.

Why it works: mean and variance of a batch follow from those of its parts. With n_r values per channel on rank
r, their mean m_r and the sum M_r of their squared deviations from it:

    n = sum_r n_r      m = sum_r n_r m_r / n      M = sum_r M_r + sum_r n_r (m_r - m)^2      variance = M / n

so ranks send each other 2 c + 1 numbers for c channels, and no activations. Deviations are taken from a
rank's own mean first: a difference of large sums, E[x^2] - E[x]^2, would lose all digits. In backward the
gradient of x needs two sums over the whole batch; weight and bias get the sums of this rank, which are
reduced with all other gradients.

    y  = w x' + b                                       x' = (x - m) / s      s = sqrt(M / n + eps)
    dx = w / s (dy - sum dy / n - x' sum (dy x') / n)   db = sum_r dy         dw = sum_r dy x'

    rank 0   x_0 -> n_0 m_0 M_0 --+                 +--> m M -> y_0
                                  +-- all_gather ---+
    rank 1   x_1 -> n_1 m_1 M_1 --+                 +--> m M -> y_1

    sent per rank and batch norm of c channels, in float32 (float64 in a float64 job), over n ranks:
      forward     (2 c + 1) (n-1)         one all_gather
      backward    4 c (n-1)/n             one all_reduce of 2 c numbers

All ranks combine the same numbers in the same order, so running statistics have the same bits everywhere.
Their variance is that of the whole batch, M / (n - 1), as on one device. A rank without samples counts 0.

Cost: two exposed messages per batch norm and step, of a few hundred bytes: latency, not bandwidth. Frozen
batch norms (in eval mode), group and layer norm send nothing.
Limits: one microbatch per step (micro_batch = 0): the statistics of all samples are known only when all have
run, and microbatches run one after the other. Batch norms without running statistics are refused, and those
that run between blocks. `torch.nn.SyncBatchNorm` is taken for a batch norm; its `process_group` is not read.
Paper: Ioffe and Szegedy 2015, "Batch Normalization", arXiv 1502.03167; Peng et al. 2018, "MegDet", arXiv
1711.07240 (statistics across devices); Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise
Algorithm for Computing Sample Variances" (the combination).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch.overrides import TorchFunctionMode

from meshwright.comm.collectives.group import Group
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, block_of
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Action, Program, Transfer
from meshwright.plan.step.single_device_program import FORWARD_KINDS, runs_input_backward
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase


@dataclass(frozen=True)
class SyncBatchNorm(Strategy):
    """Makes batch norms take the statistics of the samples of all ranks along the data axes."""

    name: ClassVar[str] = "sync_batch_norm"
    phase: ClassVar[StrategyPhase] = "shard"

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        return replace(sharding, syncs_batch_norm=True)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        if view.plan.mesh.group_size(view.plan.site_data_axes) == 1:
            return program
        return program.edit(lambda actions: [_with_transfers(action, view, job) for action in actions])

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        view = runtime.state.plan.view
        if view.plan.mesh.group_size(view.plan.site_data_axes) > 1:
            for block in {block_of(call.block_call) for call in view.model_spec.batch_norm_calls}:
                runtime.state.patches.wrap_forward(block, partial(_run_block, runtime))
        return {}


def _with_transfers(action: Action, view: RankView, job: Job) -> Action:
    calls = [call for call in view.model_spec.batch_norm_calls if call.block_call == action.subject]
    if not calls:
        return action
    if action.kind in FORWARD_KINDS:
        return action.with_inner_transfers(
            [
                _transfer("all_gather", 2 * call.num_channels + 1, at, view.plan, job)
                for at, call in enumerate(calls)
            ]
        )
    if not runs_input_backward(action, view.plan):
        return action
    backward = [(at, call) for at, call in enumerate(calls) if call.input_needs_grad]
    return action.with_inner_transfers(
        [
            _transfer("all_reduce", 2 * call.num_channels, -at, view.plan, job)
            for at, call in reversed(backward)
        ]
    )


def _transfer(collective: str, numel: int, position: int, sharding: ShardingPlan, job: Job) -> Transfer:
    dtype = "float64" if job.precision.compute == "float64" else "float32"
    return Transfer(
        collective, sharding.site_data_axes, numel * FLOAT_NBYTES[dtype], dtype=dtype, position=position
    )


def _run_block(runtime: Runtime, forward: Any, *args: Any, **kwargs: Any) -> Any:
    with _BatchNormMode(runtime):
        return forward(*args, **kwargs)


class _BatchNormMode(TorchFunctionMode):
    """While active, batch norms that take the statistics of their batch take those of all ranks."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.batch_norm:
            return self._functional(*args, **(kwargs or {}))
        if func is torch.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _functional(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        return self._batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)

    def _batch_norm(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool = True,
    ) -> torch.Tensor:
        if not training:
            return torch.batch_norm(
                input,
                weight,
                bias,
                running_mean,
                running_var,
                training,
                momentum,
                eps,
                cudnn_enabled,
            )
        state = self._runtime.state
        group = state.world.group(state.plan.sharding.site_data_axes)
        is_empty = bool(state.step.microbatches) and state.step.num_samples == 0  # it runs on a stand-in
        output, mean, variance = _SyncBatchNorm.apply(
            input, weight, bias, eps, group, lambda: state.current_action, is_empty
        )
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_(variance.to(running_var.dtype), momentum)
        return output


class _SyncBatchNorm(torch.autograd.Function):
    """Returns (output, mean, unbiased variance): [samples, channels, ...], [channels], [channels]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: Group,
        action_name: Any,
        is_empty: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = _wide(x)
        count, mean, deviations = _statistics_of_all_ranks(wide, group, action_name(), is_empty)
        rstd = (deviations / count + eps).rsqrt()
        output = (wide - _per_channel(mean, x)) * _per_channel(rstd, x)
        if weight is not None:
            output = output * _per_channel(_wide(weight), x)
        if bias is not None:
            output = output + _per_channel(_wide(bias), x)
        variance = deviations / (count - 1)
        ctx.save_for_backward(x, weight, mean, rstd, count)
        ctx.mark_non_differentiable(mean, variance)
        ctx.group, ctx.action_name, ctx.is_empty = group, action_name, is_empty
        return output.to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            text = "a batch norm over several ranks has no gradient of its gradient"
            raise PlanError(text, fix="freeze the batch norms (norm.eval() in the factory)", location="model")
        x, weight, mean, rstd, count = ctx.saved_tensors
        grad, dims = _wide(grad_outputs[0]), _all_but_channels(x)
        normalized = (_wide(x) - _per_channel(mean, x)) * _per_channel(rstd, x)
        grad_bias, grad_weight = grad.sum(dims), (grad * normalized).sum(dims)
        grad_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([grad_bias, grad_weight])
            ctx.group.all_reduce(sums, action=ctx.action_name()).wait()
            mean_grad, mean_product = (sums / count).chunk(2)
            scale = rstd if weight is None else rstd * _wide(weight)
            grad_input = grad - _per_channel(mean_grad, x) - normalized * _per_channel(mean_product, x)
            grad_input = (grad_input * _per_channel(scale, x)).to(x.dtype)
            if ctx.is_empty:  # a stand-in has no part in the statistics
                grad_input.zero_()
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        dtype = x.dtype if weight is None else weight.dtype
        return (
            grad_input,
            grad_weight.to(dtype) if needs_weight else None,
            grad_bias.to(dtype) if needs_bias else None,
            *(None,) * 4,
        )


def _statistics_of_all_ranks(
    x: torch.Tensor, group: Group, action: str, is_empty: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the values per channel of all ranks [1], their mean [channels], and the sum of their squared
    deviations from it [channels].
    """
    num_channels = x.shape[1]
    count = x.new_full((1,), x.numel() / num_channels)
    variance, mean = torch.var_mean(x, _all_but_channels(x), correction=0)
    own = torch.cat([count, mean, variance * count])
    if is_empty:
        own.zero_()
    gathered = own.new_empty(group.size * own.numel())
    group.all_gather(gathered, own, action=action).wait()
    counts, means, deviations = gathered.view(group.size, -1).split([1, num_channels, num_channels], 1)
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total
    return total, mean, deviations.sum(0) + (counts * (means - mean).square()).sum(0)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _per_channel(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return vector.view(-1, *[1] * (x.ndim - 2))


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]
