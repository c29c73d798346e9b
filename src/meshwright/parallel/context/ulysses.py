"""Ulysses: each rank has some tokens of every sample, but for attention, where it has all tokens, of some heads.

Why it works: all of a block but attention treats each token by itself, and attention treats each head by itself. So between the
two ranks swap: every one sends each other one its tokens of the heads that are computed there. On the whole row, in the order of
positions, attention is torch's own, with whatever mask; its heads do not know that others are elsewhere.

    rank i has      tokens of slice i                 heads of slice i                      tokens of slice i
    q, k, v         [B, a, N/P, w]   --all_to_all-->  [B, a/P, N, w]
                                                      attention  -->  o  --all_to_all-->    [B, a, N/P, w]

    layouts: tokens S(1), straight; weights R, their gradients P: summed with those of other samples, in one collective
    sent per rank, micro-batch and layer, in elements; k of a heads have keys, B rows, N tokens of width h = a w:
      forward     (2 + 2 k/a) B N h / P x (P-1)/P     four all_to_alls: q and o with a heads, k and v with k, if P divides k
      backward    as much
    activations: 1/P of one rank's, everywhere

Fewer heads of keys than ranks: each goes to all that need it, k = P in the formula (heads.py: what else does not come out even).
N/P is what the rank with most tokens has: all send as much.
Cost: nothing hides the exchange, so it needs fast links, as inside of a host; but it falls with 1/P, and what a ring sends does
not. Masks that the model makes outside of its blocks are there on every rank: nothing is sent of them, whether a batch has one or
not. Of one that a block makes (a relative bias), each rank has rows of own queries, and those of others come in every layer: by
head like q, else B N N (P-1)/P elements; in long rows that is more than q, k and v.
Limits: P divides the heads (those of a rank, with tensor parallelism), so P is at most a. A ring is not bound by that, and the
hybrid of both less. Attention is what calls F.scaled_dot_product_attention within a block; with dropout, by
plain products.
Paper: Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509 (section 3.1; 3.2 for the bytes).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.model.sequence_parallel.attention_call import Asked
from meshwright.parallel.context.attention_inputs import Circle, Coming, Fitted, fitted, kept
from meshwright.parallel.context.conv_halo import convolved
from meshwright.parallel.context.head_exchange import Exchange, exchanged, head_faults
from meshwright.parallel.context.memory_model import of_exchange, with_room
from meshwright.parallel.context.ring_attention import around
from meshwright.parallel.context.sequence_sharding import AXIS, Deals, met, token_faults
from meshwright.plan.job.errors import Fault
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.sequence_info import Attend, Deal
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Program, Transfer
from meshwright.plan.step.single_device import added_along
from meshwright.plan.strategy import Handler, Runtime


@dataclass(frozen=True)
class Ulysses(Deals):
    """Tokens of each sample dealt along `axis`, and in attention heads instead."""

    name: ClassVar[str] = "ulysses"

    def check(self, job: Job, space: Space) -> Iterator[Fault]:
        yield from token_faults(self.name, self.axis, space, self.deal)

    def partners(self, space: Space) -> Iterator[Fault]:
        if self.axis == AXIS:
            ranks = space.mesh.size(AXIS)
            yield from head_faults(space, self.name, ranks, f"mesh.{AXIS}", range(1, 2 * ranks))

    def deal(self, ranks: int) -> Deal:
        return Deal(ranks, inner=ranks, folded=False)

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        deal = self.deal(space.mesh.size(self.axis))

        def forth(attend: Attend, rows: int) -> list[Transfer]:
            taken, given, *_ = exchanged(space, job, self.axis, deal, attend, rows)
            return taken + given

        def back(attend: Attend, rows: int) -> list[Transfer]:
            *_, of_given, of_taken = exchanged(space, job, self.axis, deal, attend, rows)
            return of_given + of_taken

        program = added_along(met(program, space, job, forth, back), self.axis)
        return with_room(program, space, job, of=partial(of_exchange, space, job, deal))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        deal = self.deal(runtime.plan.space.mesh.size(self.axis))
        runtime.convolve(partial(convolved, runtime, self.axis))
        runtime.attend(partial(self._answer, Exchange.along(self.axis, deal, runtime)))
        return {}

    def _answer(self, exchange: Exchange, asked: Asked) -> torch.Tensor:
        """[.., heads, own queries, width of values]."""
        given = fitted(asked, self.name)
        if given.drop:
            return given.back(exchange.to_tokens(self._thinned(exchange, given, asked), asked.queries.length))
        mine = exchange.taken(given, asked, self.name)
        grouped = mine.query.shape[1] != mine.key.shape[1]
        out = F.scaled_dot_product_attention(
            *(mine.query, mine.key, mine.value, mine.mask), is_causal=asked.causal, scale=asked.scale, enable_gqa=grouped
        )
        return given.back(exchange.to_tokens(out, asked.queries.length))

    def _thinned(self, exchange: Exchange, given: Fitted, asked: Asked) -> torch.Tensor:
        """The same with dropout, whose masks are those of one device: torch's function would draw others."""
        mine, rows = exchange.taken(given, asked, self.name), ((0, asked.queries.length),)
        circle = Circle(0, rows, (((0, asked.keys.length),),), asked.scale, asked.causal, _alone, drop=given.drop)
        return around(circle, mine.query, mine.key, mine.value, mine.mask, kept(asked, rows, exchange.heads(given)))


def _alone(output: torch.Tensor, tensor: torch.Tensor) -> Coming:
    raise RuntimeError("a ring of one sends nothing")
