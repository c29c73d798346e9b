"""The loss on samples that are not trained on, exact over all ranks.

    loss = sum over all batches, micro-batches and ranks of total(outputs, batch) / the same sum of count(batch)

One division at the very end, as in training; so it is what one device would find, up to rounding, however the rows are
divided. Every rank runs the same number of forwards per batch, on stand-in rows where it has none, and meets the others
once, at the end. Where the model lies in parts on several ranks, micro-batches go through them one close behind the other
(engine/relay.py), and the rank of the last part takes their losses. The model runs in eval mode and without gradients; what it
was before, it is afterwards.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, repeat
from math import exp, inf
from typing import Any

import torch
from torch import nn

from meshwright.engine.forward.pipelined_eval import EvalMicrobatch, PipelinedEvaluation
from meshwright.engine.forward.sequence_sharding import FullSequenceRunner
from meshwright.engine.runtime.loss import Loss
from meshwright.engine.runtime.microbatches import LocalBatch, split_microbatches
from meshwright.engine.runtime.state import RankState
from meshwright.model.blocks.driver import ForwardDriver
from meshwright.model.rng.dropout_mode import StatelessDropout
from meshwright.model.rng.sites import StatelessRNG
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES

EVALUATION_ACTION = "EVALUATE"  # what the ledger calls what is sent
EVALUATION_DRAW_SITE = (
    "an evaluation, in which the forward draws random numbers: pass training=self.training to F.dropout"
)


@dataclass(frozen=True)
class Evaluation:
    """A loss and how many tokens it was taken over (what metrics call tokens), the same on every rank."""

    loss: float
    tokens: int
    is_token_nll: bool = True

    @property
    def perplexity(self) -> float | None:
        """The exponential of the loss, where that is one per token; None where it is not."""
        if not self.is_token_nll:
            return None
        return exp(self.loss) if self.loss < 700 else inf

    def as_dict(self) -> dict[str, float]:
        """The numbers by name; no perplexity where there is none."""
        perplexity = {} if self.perplexity is None else {"perplexity": self.perplexity}
        return {"loss": self.loss, **perplexity, "tokens": self.tokens}


def evaluate(
    plan: Plan,
    state: RankState,
    driver: ForwardDriver,
    stateless_rng: StatelessRNG | None,
    sequence_runner: FullSequenceRunner,
    autocast: AbstractContextManager,
    batches: Iterable[LocalBatch],
    *,
    forward_is_collective: bool = False,
) -> Evaluation:
    """The loss over this rank's rows in `batches` and those of all other ranks; every rank calls it.

    Each batch holds this rank's rows of a global one (None: it has none), as for a step. `together`: ranks meet within a
    forward, so one that has run out of batches takes part in those of others, which costs 8 bytes per batch. Ranks that have
    different parts of the model call it with the same rows. Parameters, buffers, modes and random streams are untouched. Raises
    PlanError when nothing counts in any batch of any rank, and for a loss of the whole batch, which has no meaning over batches.
    """
    raise_diagnostics(whole_batch_diagnostics(state.loss))
    module, parts = state.trained_module.module, bool(plan.sharding.block_calls_by_pp_rank)
    sums = torch.zeros(3, dtype=torch.float64, device=state.world.device)
    with torch.no_grad(), preserve_module_state(module), autocast, _no_draws(stateless_rng):
        module.eval()
        micros = _micros(
            _as_long_as_any(batches, state, plan) if forward_is_collective else batches, plan, state
        )
        for micro, outputs in (
            PipelinedEvaluation(plan, state, driver, sequence_runner, micros, EVALUATION_ACTION).outputs()
            if parts
            else _outputs(micros, state, sequence_runner)
        ):
            if micro.has_samples:
                sums[0] += sequence_runner.loss_sum(outputs, micro.batch)
                counted = (
                    state.loss.count_weight_and_tokens(micro.batch)
                    if sequence_runner.is_first_rank
                    else (0.0, 0.0)
                )
                sums[1:] += torch.tensor(counted, dtype=torch.float64, device=sums.device)
    axes = (*plan.sharding.grad_sum_axes, *(("pp",) if parts else ()))
    state.world.group(axes).all_reduce(sums, action=EVALUATION_ACTION).wait()
    total, count, tokens = sums.tolist()
    if not count > 0:
        text = "no token of the evaluation counts: all labels are ignored, or there are no samples"
        raise PlanError(
            text, fix="point evaluate.source at samples with labels, or hold out others", location="evaluate"
        )
    return Evaluation(total / count, int(tokens), is_token_nll=state.loss.is_token_nll)


def _micros(batches: Iterable[LocalBatch], plan: Plan, state: RankState) -> Iterator[EvalMicrobatch]:
    """The micro-batches of all `batches`."""
    for batch in batches:
        micros, rows = split_microbatches(batch, plan, state.trained_module.dummy_batch, state.world.device)
        yield from (
            EvalMicrobatch(micro, has_samples=index * plan.micro_batch < rows)
            for index, micro in enumerate(micros)
        )


def _outputs(
    micros: Iterable[EvalMicrobatch], state: RankState, dealing: FullSequenceRunner
) -> Iterator[tuple[EvalMicrobatch, Any]]:
    """Each micro-batch with what the whole model gives out."""
    for micro in micros:
        with dealing.forward_context(micro.batch):
            outputs = dealing.run_model(state.trained_module.module, state.loss.model_inputs(micro.batch))
        yield micro, outputs


def _as_long_as_any(batches: Iterable[LocalBatch], state: RankState, plan: Plan) -> Iterator[LocalBatch]:
    """`batches`, and then None until all ranks have had theirs. Ranks with other parts of the model have the same ones."""
    group = state.world.group(
        axis for axis in AXES if not (axis == "pp" and plan.sharding.block_calls_by_pp_rank)
    )
    for batch, here in chain(((batch, 1.0) for batch in batches), repeat((None, 0.0))):
        ranks = torch.full((1,), here, dtype=torch.float64, device=state.world.device)
        group.all_reduce(ranks, action=EVALUATION_ACTION).wait()
        if not ranks.item():
            return
        yield batch


def whole_batch_diagnostics(loss: Loss) -> Iterator[Diagnostic]:
    """What is wrong with evaluating `loss`, if it needs the whole batch."""
    if loss.whole_batch:
        text = "the loss compares all rows of a batch, so there is no loss over the batches of an evaluation"
        yield Diagnostic(text, "remove [evaluate], and evaluate in a callback", "evaluate")


@contextmanager
def preserve_module_state(module: nn.Module) -> Iterator[None]:
    """Whatever happens inside, the modes and buffers of `module` are afterwards what they were, to the last bit."""
    modes = [(part, part.training) for part in module.modules()]
    buffers = [
        (part, name, buffer)
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    kept = [(buffer, buffer._version, buffer.clone()) for _, _, buffer in buffers]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        for part, name, buffer in buffers:
            part._buffers[name] = buffer  # a forward may have put another in its place
        with torch.no_grad():
            for buffer, version, value in kept:
                if buffer._version != version:
                    buffer.copy_(value)


def _no_draws(dice: StatelessRNG | None) -> AbstractContextManager:
    """Refuse randomness: it would depend on how the rows are divided."""
    if dice is None:
        return nullcontext()
    dice.enter_block(EVALUATION_DRAW_SITE)
    return StatelessDropout(dice)
