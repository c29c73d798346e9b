"""Loss-free balancing: a bias on the scores that choose experts moves tokens to experts with few of them.

Why it works: an auxiliary loss balances experts by gradients that disturb what the model learns. A bias that
is added to scores only when experts are chosen, and not to the weights of what they compute, has no gradient.
After each step it falls for experts with more tokens than the mean, and rises for the others, so the next
tokens go elsewhere. The counts are those of the global batch: the bias is the same under every plan.

    scores + bias --> the k best --> experts       counts 5 1 3 3   mean 3    bias -.001 +.001 0 0

    b_e after = b_e + rate x sign(mean of c - c_e)    c_e: how often expert e is chosen in the global batch

    before   F F F  LOSS  B B B                          CLIP  STEP
    after    F F F  BALANCE(all-reduce)  LOSS  B B B     CLIP  STEP, and the biases

    sent per rank and step: 8 bytes per expert and layer (float64: counts are exact)

BALANCE (sums how often each expert was chosen in the global batch) is between the ranks with other samples or
tokens; those of a pipeline stage have the same layers. Counts are integers, and a sign has no rounding, so
every rank takes the same step to the bit. Tokens of all microbatches count once: a forward that is run again,
an evaluation, and samples that only fill a microbatch do not. The bias changes after STEP, when no forward of
the step is run again, and stays where a step is skipped. It is a buffer of the model, in checkpoints and
exports.

Cost: one small message per step, hidden behind the backwards; tokens x k additions per layer.
Limits: the model has a bias for it: a buffer `e_score_correction_bias` (DeepSeek-V3, GLM-4-MoE and others of
transformers) or `choice_bias` (`meshwright.nn.SigmoidGroups`) beside its experts. One update per step.
Paper: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", arXiv
2408.15664 (algorithm 1); DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437 (section 2.1.2: rate 0.001).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.field_constraints import above
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import ChoiceBias, ModelSpec
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sequence_sharding import MIN_TOKENS
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Action, Program, Transfer, with_waits
from meshwright.plan.step.single_device_program import FORWARD_KINDS
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

COUNT_NBYTES = 8


@dataclass(frozen=True)
class LossFreeBalancing(Strategy):
    """Steps the biases that choose experts by `rate`, from how often each was chosen in the global batch."""

    name: ClassVar[str] = "loss_free_balancing"
    phase: ClassVar[StrategyPhase] = "comm"  # the last: it sees the choice before other techniques
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
        if not view.model_spec.choice_biases:  # of this stage
            return program
        return program.edit(lambda actions: self._add_balance(actions, view))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        if not runtime.state.plan.view.model_spec.choice_biases:
            return {}
        balancer = _Balancer(runtime, self.rate)
        runtime.wrap("TOKEN_COUNT", balancer.reset_before)
        runtime.wrap("STEP", balancer.step_after)
        return {"BALANCE": balancer.sum_counts}

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

    def _add_balance(self, actions: list[Action], view: RankView) -> list[Action]:
        if any(action.kind == "STEP" and action.microbatch is not None for action in actions):
            text = (
                "every microbatch is an update of its own, and biases are stepped once, from the whole batch"
            )
            raise PlanError(text, fix='use the strategy "pipeline"', location=f"strategies.{self.name}")
        at = max(at for at, action in enumerate(actions) if action.kind in FORWARD_KINDS)
        balance = Action("BALANCE", waits=(actions[at].name,))
        sharding = view.plan
        axes = [axis for axis in (*sharding.data_axes, *sharding.token_axes) if sharding.mesh.size(axis) > 1]
        if axes:
            nbytes = COUNT_NBYTES * sum(bias.num_experts for bias in view.model_spec.choice_biases)
            transfer = Transfer("all_reduce", tuple(axes), nbytes, dtype="float64")
            balance = replace(balance, stream="comm", transfer=transfer)
        first_step = next(at for at, action in enumerate(actions) if action.kind == "STEP")
        actions[first_step] = with_waits(actions[first_step], [balance.name])
        return [*actions[: at + 1], balance, *actions[at + 1 :]]


class ChoiceCounts:
    """How often each expert was chosen, for the experts of `biases` one after another."""

    def __init__(self, biases: Sequence[ChoiceBias], device: torch.device) -> None:
        self.values = torch.zeros(sum(each.num_experts for each in biases), dtype=torch.int64, device=device)
        self._parts = self.values.split([each.num_experts for each in biases])

    def add(self, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Adds the choice that the experts at `index` are called with; no expert is one behind the last."""
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
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


class _Balancer:
    """The counts of one rank, their sums, and its biases."""

    def __init__(self, runtime: Runtime, rate: float) -> None:
        self._state, self._rate = runtime.state, rate
        plan = self._state.plan
        self._biases = plan.view.model_spec.choice_biases
        self._counts = ChoiceCounts(self._biases, self._state.world.device)
        self._sums: torch.Tensor | None = None
        self._microbatches = {
            action.name: action.microbatch for action in plan.actions if action.kind in FORWARD_KINDS
        }
        for index, bias in enumerate(self._biases):
            if self._counts_tokens_of(bias):
                runtime.state.patches.wrap_forward(bias.experts, partial(self._run_experts, index))

    def _counts_tokens_of(self, bias: ChoiceBias) -> bool:
        """Returns whether this rank counts: where ranks along cp have all tokens, the first of them does."""
        view = self._state.plan.view
        tokens = view.plan.model_spec.sequence_info
        has_all = tokens is None or not tokens.num_sharded_tokens(bias.block_call)
        return not has_all or not any(view.coordinate[axis] for axis in view.plan.token_axes)

    def _run_experts(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        microbatch = self._microbatches.get(self._state.current_action)
        if microbatch is not None and microbatch < self._state.step.num_real_microbatches:
            self._counts.add(index, args, kwargs)
        return forward(*args, **kwargs)

    def reset_before(self, handler: Handler) -> Handler:
        """Returns a handler that forgets the counts of the last step, which may have failed, first."""

        def begin(action: Action) -> None:
            self._counts.values.zero_()
            handler(action)

        return begin

    def sum_counts(self, action: Action) -> None:
        """Starts the sum of the counts over ranks."""
        self._sums = self._counts.values.double()
        self._state.start_collective(action, self._sums)

    def step_after(self, handler: Handler) -> Handler:
        """Returns a handler of STEP that steps the biases too, unless the step is skipped."""

        def step(action: Action) -> None:
            handler(action)
            sums, self._sums = self._sums, None
            if sums is not None and self._state.step.updates:
                module = self._state.trained_module.module
                step_biases(module, self._biases, sums, self._rate)

        return step
