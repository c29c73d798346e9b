"""Expert tensor parallelism: each rank along `tp` has a slice of the matrices of every expert.

Why it works: an expert is a pair of matrices with a function of single features between them, as an MLP is
(megatron_1d.py). So each rank has some columns of the first matrix and the same rows of the second, and
computes a summand of what the expert returns. The results of the k experts of a token are weighted and added
before ranks sum them: T rows travel, not k T. All ranks along `tp` have the same tokens and the same choice.

    x, index, weights --I -> R--> gate up_0 -> down_0 -> weighted sum over k --P -> I--> y          rank 0
    x, index, weights --I -> R--> gate up_1 -> down_1 -> weighted sum over k --P -> I--> y          rank 1

    with expert_parallel    experts S(0) along ep, and each S(features) along tp: tokens go along ep to the
                            rank with the same slice, and the sum along tp comes after they return

    weights: gate and up S(out), section by section or pair by pair; down S(in); the bias of the first product
    likewise; that of the second S too: a rank adds its elements of it, so each is counted once

    sent per rank, microbatch and call, for T tokens of D features, w bytes per element and t ranks:
      forward = 2 (t-1)/t T D w                 one all_reduce of the sums
      backward = 2 (t-1)/t T (D w + 4 k)        of the gradients of tokens and of weights of the choice

Rows travel in the compute dtype, gradients of weights of the choice in float32 (float64 in a float64 job).
Experts, their gradients and optimizer states are 1/t, and so is their compute; without this technique ranks
along `tp` have whole experts, which all compute the same. Features are divided in units of 8
(of 4 or fewer if 8 do not divide them: products of groups of rows need aligned rows), and the units need not
divide by the ranks: the first ranks get one more.
Cost: one sum forward and two backward per call, all exposed: this needs fast links. With small experts the
products get too narrow; `expert_parallel` keeps them whole.
Limits: experts of which the analysis knows how they split: it runs them on slices (transformers' experts
interface, `meshwright.nn.MixtureOfExperts`). Attention and dense MLPs are sharded by `tensor_parallel`, in
mode 1d. The memory in `plan` counts the activations of whole experts.
Paper: Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053 (section 3); Singh et al. 2023, "A Hybrid
Tensor-Expert-Data Parallelism Approach to Optimize Mixture-of-Experts Training", arXiv 2303.06318.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.comm.collectives.group import Group
from meshwright.parallel.expert.expert_parallel import NO_EXPERTS, divided_twice
from meshwright.parallel.expert.summed_experts import SummedExperts, add_sums
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import OUTPUT_BIAS, ExpertsCall
from meshwright.plan.model_spec.param_dim_split import DimSplit
from meshwright.plan.sharding.param_sharding import ParamSharding
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Program
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase


@dataclass(frozen=True)
class ExpertTensorParallel(Strategy):
    """Shards the matrices of each expert along `axis`."""

    name: ClassVar[str] = "expert_tensor_parallel"
    phase: ClassVar[StrategyPhase] = "shard"
    axis: str = field(default="tp", metadata=one_of("tp"))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        calls, num_ranks = sharding.model_spec.experts_calls, sharding.mesh.size(self.axis)
        location = f"strategies.{self.name}"
        if not calls:
            fix = "use a transformers mixture of experts or mw.nn.MixtureOfExperts; or leave the strategy out"
            yield Diagnostic(NO_EXPERTS, fix, location)
        whole = [call.name for call in calls if not call.inner_splits]
        if whole:
            text = f"the results of {whole[0]} on slices of its matrices do not add up to those on whole ones"
            text += f" (and {len(whole) - 1} more)" if len(whole) > 1 else ""
            fix = "leave the strategy out: ranks along tp then have whole experts; or distribute them with ep"
            yield Diagnostic(text, fix, location)
        splits = [split for call in calls for _, split in call.inner_splits if split.side != OUTPUT_BIAS]
        fewest = min(splits, key=lambda split: split.num_units, default=None)
        if fewest is not None and fewest.num_units < num_ranks:
            text = (
                f"the features inside each expert divide into {fewest.num_units} units, and {self.axis} has "
            )
            fix = f"set mesh.{self.axis} to at most {fewest.num_units}"
            yield Diagnostic(f"{text}{num_ranks} ranks", fix, f"mesh.{self.axis}")

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        if sharding.residual_layout.axes_with("S"):
            axes = " and ".join(sharding.residual_layout.axes_with("S"))
            text = f"slices of experts take whole tokens, and the residual stream is sharded along {axes}"
            fix = "use tensor_parallel in mode 1d, without sequence_parallel; or leave the strategy out"
            yield Diagnostic(text, fix, f"strategies.{self.name}")
        dims = {name: split.dim for name, split in _inner_splits(sharding).items()}
        placed = {name: each for each in sharding.param_shardings for name in each.param.names}
        if any(placed[name].sliced_dims.get(self.axis) != dim for name, dim in dims.items()):
            yield divided_twice(self.axis)

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        splits = _inner_splits(sharding)

        def slice_features(param_sharding: ParamSharding) -> ParamSharding:
            param = param_sharding.param
            split = next((splits[name] for name in param.names if name in splits), None)
            if split is None:
                return param_sharding
            known = replace(param_sharding, param=replace(param, dim_splits=(*param.dim_splits, split)))
            return known.sliced(self.axis, split.dim)

        return sharding.map_param_shardings(slice_features).map_param_shardings(slice_features, frozen=True)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        if view.plan.mesh.size(self.axis) == 1:
            return program
        return add_sums(program, view, job, self.axis)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        view = runtime.state.plan.view
        if view.plan.mesh.size(self.axis) > 1:
            calls = {call.name: call for call in view.model_spec.experts_calls}
            for name, call in calls.items():
                runtime.state.patches.wrap_forward(name, _SlicedExperts(runtime, self.axis, call).run)
        return {}


def _inner_splits(sharding: ShardingPlan) -> dict[str, DimSplit]:
    return {name: split for call in sharding.model_spec.experts_calls for name, split in call.inner_splits}


class _SlicedExperts:
    """Runs the module of `call` on slices of its parameters along `axis`, and sums the results."""

    def __init__(self, runtime: Runtime, axis: str, call: ExpertsCall) -> None:
        self._sum = SummedExperts(runtime, axis)
        self._module = runtime.state.trained_module.module.get_submodule(call.name)
        group: Group = runtime.state.world.group((axis,))
        self._zeros: dict[str, tuple[int, int]] = {}  # before and behind the slice of a bias
        for name, split in call.inner_splits:
            if split.side == OUTPUT_BIAS:
                first, end = split.units_of(group.index, group.size)
                self._zeros[name.rpartition(".")[2]] = first, split.num_units - end

    def run(self, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns what `forward` returns with whole parameters, for [tokens, features] and their choice."""
        return self._sum.run(partial(self._compute, forward), *args, **kwargs)

    def _compute(self, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        parameters: dict[str, Any] = self._module._parameters
        before = {leaf: parameters[leaf] for leaf in self._zeros}
        for leaf, zeros in self._zeros.items():
            parameters[leaf] = F.pad(before[leaf], zeros)
        try:
            return forward(*args, **kwargs)
        finally:
            parameters.update(before)
