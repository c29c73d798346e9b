"""Ring attention: each rank has some tokens of every sample; keys and values travel round, queries and their outputs stay.

Why it works: all of a block but attention treats each token by itself, so a rank runs it on the tokens that it has. Attention is
a softmax over all keys, and that follows from softmaxes over some of them, if each says what it has divided by (kernel.py). So a
rank merges what its queries make of the keys that pass by, one rank's after the other, and never has those of more than two.

    tokens, zigzag, 4 ranks     0 1 2 3 4 5 6 7 in chunks    rank 0: 0 7   rank 1: 1 6   rank 2: 2 5   rank 3: 3 4
    step s                      rank r computes with the keys of rank r - s, while those of r - s - 1 are on their way
    causal                      every step but the first looks at half of all pairs, on every rank: no rank waits for another

    layouts: tokens S(1), weights R, their gradients P: summed with those of other samples, in one collective
    sent per rank, micro-batch and layer, in elements; k of a heads have keys, b rows, N tokens of width h:
      forward     2 b (N/P) h (k/a) (P-1)     P-1 shifts of keys and values, one message each
      backward    4 b (N/P) h (k/a) (P-1)     the same again, and P-1 shifts of their gradients, in float32 at least
    activations: 1/P of those of one device, and two travelling blocks; backward four more, of gradients

N/P is what the rank with most tokens has: all send as much. `balance` says who has which:

    zigzag        an early chunk and a late one each: even under a causal mask
    striped       every P-th token: of each window and each packed document, wherever it begins in its row, a rank has its share,
                  so all masks are even; in a step a document of L tokens is a causal square of L/P
    contiguous    neighbouring tokens: under a causal mask the last computes (2 P - 1) / P times the mean

With `wire = "bfloat16"` keys and values travel in that; a rank's own are as they are, and gradients too, so that is the only
rounding: keys and values are off by u = 2^-9 at most, so a score s by u |s|, and what attention gives by (1 + 2 |s|) u of the
largest value. With |s| up to 1.5, as models begin, these are 4 u per call of attention, which add up: `verify` allows so much of
the largest number of a block.
Cost: a step's transfer hides behind its computation where that takes longer: from some thousands of tokens per rank on. Where
each query looks at neighbouring keys (causal, window, packed documents, padding, prefix), what a mask leaves nothing of is not
computed (regions.py); its messages are sent all the same. Layers that are handed the same mask have it looked at once.
Limits: attention is what calls F.scaled_dot_product_attention within a block; with dropout, by plain products. A mask has rows
of own queries and columns of all keys: n x N elements per rank. A row that a float mask hides whole by a large number is a mean
of all keys, as on one device, by plain products. Few tokens per rank do not hide messages: where heads suffice, ulysses sends
fewer bytes.
Paper: Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv 2310.01889; Brandon et al. 2023, "Striped Attention",
arXiv 2311.09431 (balance under causal masks); Grattafiori et al. 2024, "The Llama 3 Herd of Models", arXiv 2407.21783, section
3.3.2 (2 P chunks, an early and a late one each).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch

from meshwright.model.sequence_parallel.attention_call import Asked
from meshwright.parallel.context.attention_inputs import Circle, fitted, kept
from meshwright.parallel.context.conv_halo import convolved
from meshwright.parallel.context.mask_blocks import Recent
from meshwright.parallel.context.memory_model import of_ring, with_room
from meshwright.parallel.context.ring_attention import around
from meshwright.parallel.context.sequence_sharding import Deals, local_heads, met, token_faults
from meshwright.plan.job.errors import Fault, nearest
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import NBYTES
from meshwright.plan.model_spec.sequence_info import Attend, Deal
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Program, Transfer
from meshwright.plan.step.single_device import added_along
from meshwright.plan.strategy import Handler, Runtime

BALANCES = ("zigzag", "contiguous", "striped")
WIRES = ("", "bfloat16")


@dataclass(frozen=True)
class Ring(Deals):
    """Tokens of each sample dealt along `axis`; keys and values travel round it, in the dtype `wire` where that is not empty."""

    name: ClassVar[str] = "ring"
    balance: Literal["zigzag", "contiguous", "striped"] = "zigzag"
    wire: Literal["", "bfloat16"] = ""

    @property
    def exact(self) -> bool:  # type: ignore[override]  # it depends on a field
        """Whether keys and values travel as they are."""
        return not self.wire

    def tolerance(self, space: Space) -> float:
        return rounding(space, self.wire)

    def check(self, job: Job, space: Space) -> Iterator[Fault]:
        yield from token_faults(self.name, self.axis, space, self.deal)
        yield from ring_faults(self.name, self.balance, self.wire)

    def deal(self, ranks: int) -> Deal:
        return dealt(self.balance, ranks)

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        forth, back = (partial(moves, space, job) for moves in (self._forth, self._back))
        program = added_along(met(program, space, job, forth, back), self.axis)
        ranks = space.mesh.size(self.axis)
        return with_room(program, space, job, partial(travelling, ranks), partial(of_ring, space, job, self.deal(ranks)))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        runtime.convolve(partial(convolved, runtime, self.axis))
        runtime.attend(partial(self._answer, runtime, Recent()))
        return {}

    def _forth(self, space: Space, job: Job, attend: Attend, rows: int) -> list[Transfer]:
        """The shifts of one forward: keys and values."""
        return self._shifts(space, job, attend, rows)[0]

    def _back(self, space: Space, job: Job, attend: Attend, rows: int) -> list[Transfer]:
        """Those of one backward."""
        return self._shifts(space, job, attend, rows)[1]

    def _shifts(self, space: Space, job: Job, attend: Attend, rows: int) -> tuple[list[Transfer], list[Transfer]]:
        ranks = space.mesh.size(self.axis)
        most = max(self.deal(ranks).counts(attend.keys))
        _, groups = local_heads(space, attend)
        return shifts(rows * groups * most * (attend.width + attend.values), ranks - 1, self.axis, self.wire, job)

    def _answer(self, runtime: Runtime, recent: Recent, asked: Asked) -> torch.Tensor:
        given, space = fitted(asked, self.name), runtime.plan.space
        deal = self.deal(space.mesh.size(self.axis))
        said = {"scale": asked.scale, "causal": asked.causal, "drop": given.drop}
        circle = recent.circle(
            (asked.queries.length, asked.keys.length, *said.values()),
            lambda: Circle(
                index=dict(space.coordinate)[self.axis],
                queries=asked.queries.spans,
                keys=tuple(deal.spans(asked.keys.length, index) for index in range(deal.ranks)),
                shift=lambda output, tensor: runtime.shift(output, tensor, self.axis),
                wire=torch.bfloat16 if self.wire else None,
                **said,
            ),
        )
        keep, keeps = kept(asked, circle.queries), asked.queries.keeps
        view = recent.view(circle, given.mask, given.query.device, asked.mask, keeps=keeps)
        return given.back(around(circle, given.query, given.key, given.value, given.mask, keep, view))


def dealt(balance: str, ranks: int, inner: int = 1) -> Deal:
    """The deal of that name."""
    return Deal(ranks, inner, folded=balance == "zigzag", striped=balance == "striped")


def ring_faults(name: str, balance: str, wire: str) -> Iterator[Fault]:
    """What is wrong with what the technique `name` is told of its ring."""
    if balance not in BALANCES:
        yield Fault(f"balance = '{balance}'", nearest(balance, BALANCES), f"strategies.{name}.balance")
    if wire not in WIRES:
        text = f"keys and values cannot travel in '{wire}'"
        yield Fault(text, 'write wire = "bfloat16", or leave it out: they travel as they are', f"strategies.{name}.wire")


def rounding(space: Space, wire: str) -> float:
    """How far off what a model computes may be where keys and values travel in `wire` (see above)."""
    tokens = (space.whole or space).anatomy.tokens
    return 4 * 2.0**-9 * len(tokens.attends) if wire and tokens is not None else 0.0


def shifts(numel: int, steps: int, axis: str, wire: str, job: Job) -> tuple[list[Transfer], list[Transfer]]:
    """Those of one forward and of one backward round a ring of so many steps; each message has `numel` elements.

    Backwards each message of gradients stands behind the next one of keys and values.
    """
    wide = "float64" if job.precision.compute == "float64" else "float32"
    dtypes = (wire or job.precision.compute, wide)
    keys, gradients = ([Transfer("shift", (axis,), numel * NBYTES[dtype], dtype=dtype)] * steps for dtype in dtypes)
    return keys, [*keys[:1], *(each for pair in zip(keys[1:], gradients, strict=False) for each in pair), *gradients[:1]]


def travelling(ranks: int, action: Action) -> int:
    """Bytes that travel in a backward, in a ring of so many ranks: messages of keys, home, and those of gradients."""
    sent = [move.nbytes for move in action.inner if move.collective == "shift"]
    return 2 * sent[0] + min(ranks + 1, 4) * sent[-1] if sent else 0
