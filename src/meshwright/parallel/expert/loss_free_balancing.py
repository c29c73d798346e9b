"""Loss-free balancing: a bias on the scores that choose experts moves tokens to experts with few of them.

Why it works: an auxiliary loss balances experts by gradients that disturb what the model learns. A bias that
is added to scores only when experts are chosen, and not to the weights of what they compute, has no gradient.
After each step it falls for experts with more tokens than the mean, and rises for the others, so the next
tokens go elsewhere. The counts are those of the global batch: the bias is the same under every plan.

    scores + bias --> the k best --> experts       counts 5 1 3 3   mean 3    bias -.001 +.001 0 0

    b_e after = b_e + rate x sign(mean of c - c_e)    c_e: how often expert e is chosen in the global batch

    F F F  LOSS  B B B  LOSS_SUM(loss, and how often each expert was chosen)  CLIP  STEP, and the biases

    sent per rank and step: nothing more; the counts travel with the sum of the loss (sharding/expert_load.py)

Counts are integers, exact in float64, and a sign has no rounding, so every rank takes the same step to the
bit. Tokens of all microbatches count once: a forward that is run again, an evaluation, and samples that only
fill a microbatch do not. The bias changes after STEP, when no forward of the step is run again, and stays
where a step is skipped. It is a buffer of the model, in checkpoints and exports.

Cost: E numbers per layer are read and written.
Limits: the model has a bias for it: a buffer `e_score_correction_bias` (DeepSeek-V3, GLM-4-MoE and others of
transformers) or `choice_bias` (`meshwright.nn.SigmoidGroups`) beside its experts. One update per step.
Paper: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", arXiv
2408.15664 (algorithm 1); DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437 (section 2.1.2: rate 0.001).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from meshwright.model.tensors.pytree import tree_tensors
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.field_constraints import above
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import ChoiceBias, ModelSpec
from meshwright.plan.sharding.expert_load import load_count_begins
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sequence_sharding import MIN_TOKENS
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Action, Program, with_waits
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase


@dataclass(frozen=True)
class LossFreeBalancing(Strategy):
    """Steps the biases that choose experts by `rate`, from how often each was chosen in the global batch."""

    name: ClassVar[str] = "loss_free_balancing"
    phase: ClassVar[StrategyPhase] = "comm"
    rate: float = field(default=0.001, metadata=above(0.0))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location, tokens = f"strategies.{self.name}", sharding.model_spec.sequence_info
        if not sharding.model_spec.choice_biases:
            text = (
                "no experts of this model have a bias for their choice, a buffer e_score_correction_bias or "
            )
            text += "choice_bias beside them"
            fix = (
                "use a model with one, as DeepSeek-V3 or mw.nn.SigmoidGroups; or balance by an auxiliary loss"
            )
            yield Diagnostic(text, fix, location)
        split = sharding.sequence_sharding
        if split is not None and tokens is not None:
            fewest = min(split.num_tokens_by_rank(tokens.length))
            if fewest < MIN_TOKENS:
                text = f"a rank along cp has {fewest} of {tokens.length} tokens, and padding would be counted"
                yield Diagnostic(text, "set a smaller mesh.cp, or a larger data.sequence", "mesh.cp")

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location = f"strategies.{self.name}"
        if sharding.primary_rank_axes:
            text = "with data_parallel_master one rank steps for all others, and each has its own biases"
            yield Diagnostic(text, "use ddp or zero in its place", location)
        if axes := sharding.residual_layout.axes_with("S"):
            text = (
                f"experts count whole tokens, and the residual stream is sharded along {' and '.join(axes)}"
            )
            yield Diagnostic(text, "use tensor_parallel in mode 1d, without sequence_parallel", location)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        return program.edit(self._step_after_counts)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        if runtime.state.plan.view.model_spec.choice_biases:  # of this stage
            runtime.wrap("STEP", partial(_with_biases, runtime, self.rate))
        return {}

    def on_one_device(self, module: nn.Module, model_spec: ModelSpec) -> Callable[[bool], None]:
        biases = model_spec.choice_biases
        counts = ChoiceCounts(biases, torch.device("cpu"))
        for index, bias in enumerate(biases):
            hook = partial(_count_call, counts, index)
            module.get_submodule(bias.experts).register_forward_pre_hook(hook, with_kwargs=True)

        def end_step(updates: bool) -> None:
            if updates:
                step_biases(module, biases, counts.values.double(), self.rate)
            counts.values.zero_()

        return end_step

    def _step_after_counts(self, actions: list[Action]) -> list[Action]:
        steps = [at for at, action in enumerate(actions) if action.kind == "STEP"]
        if any(actions[at].microbatch is not None for at in steps):
            text = (
                "every microbatch is an update of its own, and biases are stepped once, from the whole batch"
            )
            raise PlanError(text, fix='use the strategy "pipeline"', location=f"strategies.{self.name}")
        counted = [action.name for action in actions if action.kind == "LOSS_SUM"]
        actions[steps[-1]] = with_waits(actions[steps[-1]], counted)
        return actions


class ChoiceCounts:
    """How often each expert was chosen, for the experts of `biases` one after another."""

    def __init__(self, biases: Sequence[ChoiceBias], device: torch.device) -> None:
        self.values = torch.zeros(sum(each.num_experts for each in biases), dtype=torch.int64, device=device)
        self._parts = self.values.split([each.num_experts for each in biases])

    def add(self, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Adds the choice that the experts at `index` are called with; no expert is one behind the last."""
        given = tree_tensors((args, kwargs))
        chosen = next(each for each in given if not each.is_floating_point()).flatten().long()
        part = self._parts[index]
        part.add_(part.new_zeros(len(part) + 1).index_add_(0, chosen, torch.ones_like(chosen))[:-1])


def _count_call(counts: ChoiceCounts, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
    counts.add(index, args, kwargs)


@torch.no_grad()
def step_biases(module: nn.Module, biases: Sequence[ChoiceBias], counts: torch.Tensor, rate: float) -> None:
    """Moves each bias by `rate`: up where its expert was chosen less often than the mean, else down."""
    for bias, chosen in zip(biases, counts.split([each.num_experts for each in biases]), strict=True):
        buffer = module.get_buffer(bias.buffer)
        buffer.add_((chosen.sum() - chosen * len(chosen)).sign().to(buffer.dtype), alpha=rate)


def _with_biases(runtime: Runtime, rate: float, handler: Handler) -> Handler:
    """Returns a handler of STEP that steps the biases behind the last one, unless the step is skipped."""
    state, plan = runtime.state, runtime.state.plan
    module = state.trained_module.module
    last = [action.name for action in plan.actions if action.kind == "STEP"][-1]
    biases = plan.view.model_spec.choice_biases
    begin_of = load_count_begins(plan.sharding)

    def step(action: Action) -> None:
        handler(action)
        if action.name == last and state.step.updates:
            begins = [1 + begin_of[bias.experts] for bias in biases]  # behind the loss
            counts = [
                state.step.sums[begin : begin + bias.num_experts]
                for begin, bias in zip(begins, biases, strict=True)
            ]
            step_biases(module, biases, torch.cat(counts), rate)

    return step
