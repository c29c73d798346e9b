"""The hybrid of both: neighbouring ranks exchange tokens for heads, whose keys and values travel round the other neighbourhoods.

Why it works: Ulysses turns some tokens of all heads into more tokens of some heads, and a ring asks only that each rank has some
of the tokens of the heads that it computes. So one stands inside of the other, and each where it is good: the exchange, which
nothing hides, between the ranks of a host; the ring, whose messages hide behind computation, between hosts. The exchange gives
the ring more tokens per rank, which it wants; the ring takes more ranks than there are heads.

    6 ranks, inner = 2, zigzag     chunks 0 1 2 3 4 5        ranks 0 1: chunks 0 5     ranks 2 3: 1 4     ranks 4 5: 2 3
    exchange                       0 with 1, 2 with 3, 4 with 5: each half of the heads, of all tokens of both
    ring                           0 -> 2 -> 4 -> 0 with the first half of the heads, 1 -> 3 -> 5 -> 1 with the others

    layouts: tokens S(1), weights R, their gradients P: summed with those of other samples, in one collective
    sent per rank, micro-batch and layer, in elements; k of a heads have keys, B rows, N tokens of width h, P = u r, u = inner:
      exchange    (2 + 2 k/a) B N h / P x (u-1)/u     forward, if u divides k; backward as much
      ring        2 B N h / P x (k/a) (r-1)           forward; backward twice that, gradients in float32 at least
    activations: 1/P of one rank's, and two travelling blocks

`balance` is that of the ring: chunks, or with "striped" single tokens, go to the groups, and what one gets lies straight on it.
`inner` neighbours in mesh order are one group of the exchange: on one host, where hosts have a multiple of that many ranks.
Cost: nothing hides the exchange, and computation the ring's messages, but for the last of a backward. Of a mask that a block
makes for own queries those of neighbours are gathered: B N N / r x (u-1)/u elements in every layer; of others nothing is sent.
Limits: `inner` divides the heads of a rank, and the ranks along the axis. Attention is what calls F.scaled_dot_product_attention
within a block; with dropout, by plain products.
Paper: Fang and Zhao 2024, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI", arXiv 2405.07719
(section 3); Gu et al. 2024, "LoongTrain", arXiv 2406.18485.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch

from meshwright.model.sequence_parallel.attention_call import Asked
from meshwright.parallel.context.attention_inputs import Circle, fitted, kept
from meshwright.parallel.context.conv_halo import convolved
from meshwright.parallel.context.head_exchange import Exchange, Needs, exchanged, head_faults
from meshwright.parallel.context.mask_blocks import Recent
from meshwright.parallel.context.memory_model import of_exchange, of_ring, with_room
from meshwright.parallel.context.ring import dealt, ring_faults, rounding, shifts, travelling
from meshwright.parallel.context.ring_attention import around
from meshwright.parallel.context.sequence_sharding import AXIS, Deals, local_heads, met, token_faults
from meshwright.plan.job.errors import Fault
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.sequence_info import Attend, Deal
from meshwright.plan.sharding.mesh import divisors
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Program, Transfer
from meshwright.plan.step.single_device import added_along
from meshwright.plan.strategy import Handler, Runtime


@dataclass(frozen=True)
class Hybrid(Deals):
    """Tokens of each sample dealt along `axis`: `inner` neighbours exchange them for heads, whose keys travel round the rest."""

    name: ClassVar[str] = "hybrid"
    inner: int = 2
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
        if self.axis == AXIS and not self._divides(space):
            ranks = space.mesh.size(AXIS)
            sizes = " or ".join(map(str, divisors(ranks)))
            text = f"inner = {self.inner}, and {AXIS} has {ranks} ranks, which are to be groups of so many neighbours"
            yield Fault(text, f"set inner to {sizes}", f"strategies.{self.name}.inner")
        yield from ring_faults(self.name, self.balance, self.wire)

    def partners(self, space: Space) -> Iterator[Fault]:
        if self.axis == AXIS and self._divides(space):
            yield from head_faults(space, self.name, self.inner, "inner", divisors(space.mesh.size(AXIS)))

    def deal(self, ranks: int) -> Deal:
        return dealt(self.balance, ranks, self.inner if self.inner > 0 and ranks % self.inner == 0 else 1)

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        deal = self.deal(space.mesh.size(self.axis))

        def forth(attend: Attend, rows: int) -> list[Transfer]:
            taken, given, *_ = exchanged(space, job, self.axis, deal, attend, rows)
            return taken + self._shifts(space, job, attend, rows)[0] + given

        def back(attend: Attend, rows: int) -> list[Transfer]:
            *_, of_given, of_taken = exchanged(space, job, self.axis, deal, attend, rows)
            return of_given + self._shifts(space, job, attend, rows)[1] + of_taken

        program = added_along(met(program, space, job, forth, back), self.axis)
        of = partial(of_exchange if deal.inner > 1 else of_ring, space, job, deal)  # groups of one exchange nothing
        return with_room(program, space, job, partial(travelling, deal.ranks // deal.inner), of)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        exchange = Exchange.along(self.axis, self.deal(runtime.plan.space.mesh.size(self.axis)), runtime)
        runtime.convolve(partial(convolved, runtime, self.axis))
        runtime.attend(partial(self._answer, runtime, exchange, Recent()))
        return {}

    def _answer(self, runtime: Runtime, exchange: Exchange, recent: Recent, asked: Asked) -> torch.Tensor:
        """[.., heads, own queries, width of values]."""
        given, deal = fitted(asked, self.name), exchange.deal
        mine = exchange.taken(given, asked, self.name)
        said = {"scale": asked.scale, "causal": asked.causal, "drop": given.drop}
        circle = recent.circle(
            (asked.queries.length, asked.keys.length, *said.values()),
            lambda: Circle(
                index=exchange.index // deal.inner,
                queries=deal.together(asked.queries.length, exchange.index),
                keys=tuple(deal.together(asked.keys.length, first) for first in range(0, deal.ranks, deal.inner)),
                shift=lambda output, tensor: runtime.shift(output, tensor, self.axis, by=deal.inner),
                wire=torch.bfloat16 if self.wire else None,
                **said,
            ),
        )
        keep = kept(asked, circle.queries, exchange.heads(given))
        view = recent.view(circle, mine.mask, mine.query.device, asked.mask, keeps=asked.queries.keeps)
        out = around(circle, mine.query, mine.key, mine.value, mine.mask, keep, view)
        return given.back(exchange.to_tokens(out, asked.queries.length))

    def _shifts(self, space: Space, job: Job, attend: Attend, rows: int) -> tuple[list[Transfer], list[Transfer]]:
        """Those of one forward, and of one backward."""
        deal = self.deal(space.mesh.size(self.axis))
        heads, groups = local_heads(space, attend)
        needs, counts = Needs.of(heads, groups, deal.inner), deal.counts(attend.keys)
        most = max(sum(counts[first : first + deal.inner]) for first in range(0, deal.ranks, deal.inner))
        numel = rows * (heads // deal.inner if needs.uses else needs.most) * most * (attend.width + attend.values)
        return shifts(numel, deal.ranks // deal.inner - 1, self.axis, self.wire, job)

    def _divides(self, space: Space) -> bool:
        return self.inner > 0 and space.mesh.size(AXIS) % self.inner == 0
