"""The loss on samples that are not trained on, exact over all ranks.

    loss = sum over batches, microbatches and ranks of total(outputs, batch) / the same sum of count(batch)

One division at the very end, as in training; so it is what one device would find, up to rounding, however the
samples are distributed. Every rank runs the same number of forwards per batch, on dummy samples where it has
none, and one collective at the end sums the losses. In a pipeline, microbatches follow each other through the
stages (forward_backward/pipelined_eval.py), and the rank of the last stage computes their losses. The model
runs in eval mode and without gradients; its state is restored.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, repeat
from math import exp, inf
from typing import Any

import torch
from torch import nn

from meshwright.engine.forward_backward.pipelined_eval import EvalMicrobatch, PipelinedEvaluation
from meshwright.engine.runtime.microbatches import LocalBatch, split_microbatches
from meshwright.engine.runtime.mixed_precision import autocast
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.analysis.forward_errors import explain_forward_errors
from meshwright.model.loss.loss_definition import Loss
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics
from meshwright.plan.sharding.mesh import AXES

EVALUATION_ACTION = "EVALUATE"  # name in the ledger


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


def evaluate(state: RankState, batches: Iterable[LocalBatch]) -> Evaluation:
    """Returns the loss over the samples in `batches` of all ranks; every rank calls it.

    Each batch holds this rank's samples of a global one (None: it has none), as for a step. Where ranks
    communicate within a forward, one that has run out of batches takes part in those of others, which costs
    8 bytes per batch. Pipeline ranks call it with the same samples.
    Parameters, buffers, modes and random streams are unchanged. Raises PlanError when nothing counts in any
    batch of any rank, and for a loss of the whole batch, which has no meaning over batches.
    """
    raise_diagnostics(whole_batch_diagnostics(state.loss))
    sums, sharding = local_evaluation_sums(state, batches), state.plan.sharding
    group = state.world.group((*sharding.varying_axes, *sharding.grad_sum_axes, *sharding.stage_axes))
    group.all_reduce(sums, action=EVALUATION_ACTION).wait()
    total, count, tokens = sums.tolist()
    if not count > 0:
        raise no_samples_error()
    return Evaluation(total / count, int(tokens), is_token_nll=state.loss.is_token_nll)


def local_evaluation_sums(state: RankState, batches: Iterable[LocalBatch]) -> torch.Tensor:
    """Returns what this rank adds to an evaluation, (3,): the loss, the weight and the tokens of the samples
    of `batches` whose loss it computes.
    """
    plan, sequence_runner = state.plan, state.sequence_runner
    is_pipelined = bool(plan.sharding.block_calls_by_pp_rank)
    sums = torch.zeros(3, dtype=torch.float64, device=state.world.device)
    with evaluation_mode(state):
        given = _until_all_end(batches, state) if state.flat_params.forward_is_collective else batches
        if plan.view.is_server:  # it runs no forward, and takes part until all ranks have had their batches
            _serve(given, state)
            given = ()
        microbatches = _microbatches(given, state)
        for microbatch, outputs in (
            PipelinedEvaluation(state, microbatches, EVALUATION_ACTION).outputs()
            if is_pipelined
            else _outputs(microbatches, state)
        ):
            if microbatch.has_samples:
                sums[0] += sequence_runner.loss_sum(outputs, microbatch.batch)
                counted = (
                    state.loss.count_weight_and_tokens(microbatch.batch)
                    if sequence_runner.is_first_rank
                    else (0.0, 0.0)
                )
                sums[1:] += torch.tensor(counted, dtype=torch.float64, device=sums.device)
    return sums


@contextmanager
def evaluation_mode(state: RankState) -> Iterator[None]:
    """Puts the module into eval mode, without gradients and draws; its state is restored afterwards."""
    module = state.trained_module.module
    with (
        torch.no_grad(),
        preserve_module_state(module),
        autocast(state.plan.job.precision, state.world.device),
        state.step_rng.forbid_evaluation_draws(),
    ):
        module.eval()
        try:
            yield
        finally:
            state.evaluated_batch = None


def no_samples_error() -> PlanError:
    """Returns the error of an evaluation in which nothing counts."""
    text = "no token of the evaluation counts: all labels are ignored, or there are no samples"
    fix = "point evaluate.source at samples with labels, or hold out others"
    return PlanError(text, fix=fix, location="evaluate")


def _serve(batches: Iterable[LocalBatch], state: RankState) -> None:
    """Gives workers what their forwards need of a server, for each of `batches`."""
    for _ in batches:
        if state.serve_forward is not None:
            for _ in range(state.plan.num_microbatches):
                state.serve_forward(EVALUATION_ACTION)


def _microbatches(batches: Iterable[LocalBatch], state: RankState) -> Iterator[EvalMicrobatch]:
    plan = state.plan
    for batch in batches:
        microbatches, num_samples = split_microbatches(batch, plan, state.trained_module.dummy_batch)
        yield from (
            EvalMicrobatch(microbatch, has_samples=index * plan.micro_batch < num_samples)
            for index, microbatch in enumerate(state.copies.batches_to_device(microbatches))
        )


def _outputs(
    microbatches: Iterable[EvalMicrobatch], state: RankState
) -> Iterator[tuple[EvalMicrobatch, Any]]:
    runner = state.sequence_runner
    for microbatch in microbatches:
        module, inputs = state.trained_module.module, state.loss.model_inputs(microbatch.batch)
        example = state.loss.model_inputs(state.trained_module.dummy_batch)
        state.evaluated_batch = microbatch.batch
        with explain_forward_errors(module, inputs, example), runner.forward_context(microbatch.batch):
            outputs = runner.run_model(module, inputs)
        yield microbatch, outputs


def _until_all_end(batches: Iterable[LocalBatch], state: RankState) -> Iterator[LocalBatch]:
    """Yields `batches`, and then None until all ranks have had theirs.

    Pipeline ranks have the same batches.
    """
    group = state.world.group(set(AXES).difference(state.plan.sharding.stage_axes))
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
