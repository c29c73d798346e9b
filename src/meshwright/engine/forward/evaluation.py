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

from meshwright.engine.forward.pipelined_eval import Micro, Relay
from meshwright.engine.forward.sequence_sharding import AllTokens
from meshwright.engine.runtime.loss import Loss
from meshwright.engine.runtime.microbatches import Rows, micro_batches
from meshwright.engine.runtime.state import State
from meshwright.model.blocks.driver import Drive
from meshwright.model.rng.dropout_mode import StatelessDropout
from meshwright.model.rng.sites import Dice
from meshwright.plan.job.errors import Fault, PlanError, raise_faults
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES

ACTION = "EVALUATE"  # what the ledger calls what is sent
DRAWS = "an evaluation, in which the forward draws random numbers: pass training=self.training to F.dropout"


@dataclass(frozen=True)
class Evaluation:
    """A loss and how many tokens it was taken over (what metrics call tokens), the same on every rank."""

    loss: float
    tokens: int
    per_token: bool = True

    @property
    def perplexity(self) -> float | None:
        """The exponential of the loss, where that is one per token; None where it is not."""
        if not self.per_token:
            return None
        return exp(self.loss) if self.loss < 700 else inf

    def as_dict(self) -> dict[str, float]:
        """The numbers by name; no perplexity where there is none."""
        perplexity = {} if self.perplexity is None else {"perplexity": self.perplexity}
        return {"loss": self.loss, **perplexity, "tokens": self.tokens}


def evaluate(
    plan: Plan,
    state: State,
    drive: Drive,
    dice: Dice | None,
    dealing: AllTokens,
    autocast: AbstractContextManager,
    batches: Iterable[Rows],
    *,
    together: bool = False,
) -> Evaluation:
    """The loss over this rank's rows in `batches` and those of all other ranks; every rank calls it.

    Each batch holds this rank's rows of a global one (None: it has none), as for a step. `together`: ranks meet within a
    forward, so one that has run out of batches takes part in those of others, which costs 8 bytes per batch. Ranks that have
    different parts of the model call it with the same rows. Parameters, buffers, modes and random streams are untouched. Raises
    PlanError when nothing counts in any batch of any rank, and for a loss of the whole batch, which has no meaning over batches.
    """
    raise_faults(whole_batch_faults(state.loss))
    module, parts = state.subject.module, bool(plan.space.stages)
    sums = torch.zeros(3, dtype=torch.float64, device=state.world.device)
    with torch.no_grad(), untouched(module), autocast, _no_draws(dice):
        module.eval()
        micros = _micros(_as_long_as_any(batches, state, plan) if together else batches, plan, state)
        for micro, outputs in (
            Relay(plan, state, drive, dealing, micros, ACTION).outputs() if parts else _outputs(micros, state, dealing)
        ):
            if micro.real:
                sums[0] += dealing.total(outputs, micro.batch)
                counted = state.loss.counted(micro.batch) if dealing.first else (0.0, 0.0)
                sums[1:] += torch.tensor(counted, dtype=torch.float64, device=sums.device)
    axes = (*plan.space.summed_axes, *(("pp",) if parts else ()))
    state.world.group(axes).all_reduce(sums, action=ACTION).wait()
    total, count, tokens = sums.tolist()
    if not count > 0:
        text = "no token of the evaluation counts: all labels are ignored, or there are no samples"
        raise PlanError(text, fix="point evaluate.source at samples with labels, or hold out others", where="evaluate")
    return Evaluation(total / count, int(tokens), per_token=state.loss.per_token)


def _micros(batches: Iterable[Rows], plan: Plan, state: State) -> Iterator[Micro]:
    """The micro-batches of all `batches`."""
    for batch in batches:
        micros, rows = micro_batches(batch, plan, state.subject.stand_in, state.world.device)
        yield from (Micro(micro, real=index * plan.micro_batch < rows) for index, micro in enumerate(micros))


def _outputs(micros: Iterable[Micro], state: State, dealing: AllTokens) -> Iterator[tuple[Micro, Any]]:
    """Each micro-batch with what the whole model gives out."""
    for micro in micros:
        with dealing.during(micro.batch):
            outputs = dealing.call(state.subject.module, state.loss.inputs(micro.batch))
        yield micro, outputs


def _as_long_as_any(batches: Iterable[Rows], state: State, plan: Plan) -> Iterator[Rows]:
    """`batches`, and then None until all ranks have had theirs. Ranks with other parts of the model have the same ones."""
    group = state.world.group(axis for axis in AXES if not (axis == "pp" and plan.space.stages))
    for batch, here in chain(((batch, 1.0) for batch in batches), repeat((None, 0.0))):
        ranks = torch.full((1,), here, dtype=torch.float64, device=state.world.device)
        group.all_reduce(ranks, action=ACTION).wait()
        if not ranks.item():
            return
        yield batch


def whole_batch_faults(loss: Loss) -> Iterator[Fault]:
    """What is wrong with evaluating `loss`, if it needs the whole batch."""
    if loss.whole_batch:
        text = "the loss compares all rows of a batch, so there is no loss over the batches of an evaluation"
        yield Fault(text, "remove [evaluate], and evaluate in a callback", "evaluate")


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Whatever happens inside, the modes and buffers of `module` are afterwards what they were, to the last bit."""
    modes = [(part, part.training) for part in module.modules()]
    buffers = [(part, name, buffer) for part in module.modules() for name, buffer in part._buffers.items() if buffer is not None]
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


def _no_draws(dice: Dice | None) -> AbstractContextManager:
    """Refuse randomness: it would depend on how the rows are divided."""
    if dice is None:
        return nullcontext()
    dice.enter(DRAWS)
    return StatelessDropout(dice)
