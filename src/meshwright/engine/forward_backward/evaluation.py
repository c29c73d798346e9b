"""The loss on samples that are not trained on, exact over all ranks.

    loss = sum over batches, microbatches and ranks of total(outputs, batch) / the same sum of count(batch)

One division at the very end, as in training; so it is what one device would find, up to rounding, however the
samples are distributed. Every rank runs the same number of forwards per batch, on dummy samples where it has
none, and one collective at the end sums the losses. In a pipeline, microbatches follow each other through the
stages (forward_backward/pipelined_eval.py), and the rank of the last stage computes their losses. The model
runs in eval mode and without gradients; its state is restored.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, repeat
from math import exp, inf
from typing import Any

import torch
from torch import nn

from meshwright.engine.forward_backward.context_parallel_forward import FullSequenceRunner
from meshwright.engine.forward_backward.pipelined_eval import EvalMicrobatch, PipelinedEvaluation
from meshwright.engine.runtime.microbatches import LocalBatch, split_microbatches
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.analysis.forward_errors import explain_forward_errors
from meshwright.model.blocks.block_forward_backward import ForwardDriver
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.rng.stateless_dropout import StatelessDropout
from meshwright.model.rng.stateless_rng import StatelessRNG
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics
from meshwright.plan.plan import Plan, RankPlan
from meshwright.plan.sharding.mesh import AXES

EVALUATION_ACTION = "EVALUATE"  # name in the ledger
EVALUATION_DRAW_SITE = (
    "an evaluation, in which the forward draws random numbers: pass training=self.training to F.dropout"
)


@dataclass(frozen=True)
class Evaluation:
    """A loss, its number of tokens (as in the metrics), and metrics of the user; the same on every rank."""

    loss: float
    tokens: int
    is_token_nll: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float | None:
        """The exponential of the loss, where it is a loss per token; else None."""
        if not self.is_token_nll:
            return None
        return exp(self.loss) if self.loss < 700 else inf

    def as_dict(self) -> dict[str, float]:
        """Returns the numbers by name; no perplexity where there is none."""
        perplexity = {} if self.perplexity is None else {"perplexity": self.perplexity}
        return {"loss": self.loss, **perplexity, "tokens": self.tokens, **self.metrics}


def evaluate(
    plan: RankPlan,
    state: RankState,
    driver: ForwardDriver,
    stateless_rng: StatelessRNG | None,
    sequence_runner: FullSequenceRunner,
    autocast: AbstractContextManager,
    batches: Iterable[LocalBatch],
    *,
    forward_is_collective: bool = False,
) -> Evaluation:
    """Returns the loss over the samples in `batches` of all ranks; every rank calls it.

    Each batch holds this rank's samples of a global one (None: it has none), as for a step.
    `forward_is_collective`: ranks communicate within a forward, so one that has run out of batches takes part
    in those of others, which costs 8 bytes per batch. Pipeline ranks call it with the same samples.
    Parameters, buffers, modes and random streams are unchanged. Raises PlanError when nothing counts in any
    batch of any rank, and for a loss of the whole batch, which has no meaning over batches.
    """
    raise_diagnostics(whole_batch_diagnostics(state.loss))
    module, is_pipelined = state.trained_module.module, bool(plan.sharding.block_calls_by_pp_rank)
    sums = torch.zeros(3, dtype=torch.float64, device=state.world.device)
    with evaluation_mode(module, autocast, stateless_rng):
        microbatches = _microbatches(
            _until_all_end(batches, state, plan) if forward_is_collective else batches, plan, state
        )
        for microbatch, outputs in (
            PipelinedEvaluation(
                plan, state, driver, sequence_runner, microbatches, EVALUATION_ACTION
            ).outputs()
            if is_pipelined
            else _outputs(microbatches, state, sequence_runner)
        ):
            if microbatch.has_samples:
                sums[0] += sequence_runner.loss_sum(outputs, microbatch.batch)
                counted = (
                    state.loss.count_weight_and_tokens(microbatch.batch)
                    if sequence_runner.is_first_rank
                    else (0.0, 0.0)
                )
                sums[1:] += torch.tensor(counted, dtype=torch.float64, device=sums.device)
    group = state.world.group((*plan.sharding.grad_sum_axes, *plan.sharding.stage_axes))
    group.all_reduce(sums, action=EVALUATION_ACTION).wait()
    total, count, tokens = sums.tolist()
    if not count > 0:
        raise no_samples_error()
    return Evaluation(total / count, int(tokens), is_token_nll=state.loss.is_token_nll)


@contextmanager
def evaluation_mode(
    module: nn.Module, autocast: AbstractContextManager, stateless_rng: StatelessRNG | None
) -> Iterator[None]:
    """Puts `module` into eval mode, without gradients and draws; its state is restored afterwards."""
    with torch.no_grad(), preserve_module_state(module), autocast, _forbid_draws(stateless_rng):
        module.eval()
        yield


def no_samples_error() -> PlanError:
    """Returns the error of an evaluation in which nothing counts."""
    text = "no token of the evaluation counts: all labels are ignored, or there are no samples"
    fix = "point evaluate.source at samples with labels, or hold out others"
    return PlanError(text, fix=fix, location="evaluate")


def _microbatches(batches: Iterable[LocalBatch], plan: Plan, state: RankState) -> Iterator[EvalMicrobatch]:
    for batch in batches:
        microbatches, num_samples = split_microbatches(
            batch, plan, state.trained_module.dummy_batch, state.world.device
        )
        yield from (
            EvalMicrobatch(microbatch, has_samples=index * plan.micro_batch < num_samples)
            for index, microbatch in enumerate(microbatches)
        )


def _outputs(
    microbatches: Iterable[EvalMicrobatch], state: RankState, dealing: FullSequenceRunner
) -> Iterator[tuple[EvalMicrobatch, Any]]:
    for microbatch in microbatches:
        module, inputs = state.trained_module.module, state.loss.model_inputs(microbatch.batch)
        example = state.loss.model_inputs(state.trained_module.dummy_batch)
        with explain_forward_errors(module, inputs, example), dealing.forward_context(microbatch.batch):
            outputs = dealing.run_model(module, inputs)
        yield microbatch, outputs


def _until_all_end(batches: Iterable[LocalBatch], state: RankState, plan: Plan) -> Iterator[LocalBatch]:
    """Yields `batches`, and then None until all ranks have had theirs.

    Pipeline ranks have the same batches.
    """
    group = state.world.group(set(AXES).difference(plan.sharding.stage_axes))
    for batch, has_batch in chain(((batch, 1.0) for batch in batches), repeat((None, 0.0))):
        num_ranks_left = torch.full((1,), has_batch, dtype=torch.float64, device=state.world.device)
        group.all_reduce(num_ranks_left, action=EVALUATION_ACTION).wait()
        if not num_ranks_left.item():
            return
        yield batch


def whole_batch_diagnostics(loss: Loss) -> Iterator[Diagnostic]:
    """Yields a diagnostic for evaluating a `loss` that needs the whole batch."""
    if loss.whole_batch:
        text = (
            "the loss compares all samples of a batch, so there is no loss over the batches of an evaluation"
        )
        yield Diagnostic(text, "remove [evaluate], and evaluate in a callback", "evaluate")


@contextmanager
def preserve_module_state(module: nn.Module) -> Iterator[None]:
    """Restores the modes and buffers of `module` afterwards, to the last bit, whatever happens inside."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    buffers = [
        (submodule, name, buffer)
        for submodule in module.modules()
        for name, buffer in submodule._buffers.items()
        if buffer is not None
    ]
    saved = [(buffer, buffer._version, buffer.clone()) for _, _, buffer in buffers]
    try:
        yield
    finally:
        for submodule, mode in modes:
            submodule.training = mode
        for submodule, name, buffer in buffers:
            submodule._buffers[name] = buffer  # a forward may have replaced it
        with torch.no_grad():
            for buffer, version, value in saved:
                if buffer._version != version:
                    buffer.copy_(value)


def _forbid_draws(rng: StatelessRNG | None) -> AbstractContextManager:
    """Refuses draws, which would depend on how the samples are distributed."""
    if rng is None:
        return nullcontext()
    rng.enter_block(EVALUATION_DRAW_SITE)
    return StatelessDropout(rng)
