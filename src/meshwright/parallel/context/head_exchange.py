"""Tokens for heads: ranks that have some of the tokens of every head get all of their tokens, of some heads; and back.

    6 heads, 3 ranks, one all_to_all        heads 0 1 | 2 3 | 4 5                          heads 0 1     2 3     4 5
        rank 0, tokens 0..3                 to 0      to 1  to 2                tokens 0..3  from 0     from 0  from 0
        rank 1, tokens 4..6                 to 0      to 1  to 2        --->    tokens 4..6  from 1     from 1  from 1
        rank 2, tokens 7..9                 to 0      to 1  to 2                tokens 7..9  from 2     from 2  from 2

A head of keys and values goes to every rank that has heads of queries which share it, so it may travel several times, and its
gradients are summed where it came from. Each rank is sent as many:

    6 heads share 3, 2 ranks                rank 0 needs 0 1, rank 1 needs 1 2             4 travel
    6 heads share 2, 3 ranks                0 | 0 1 | 1                                    each rank is sent 2, one of them idle

Shares of tokens are as long as the longest; what fills them up is dropped as it arrives. Of a mask every rank needs the rows of
all queries. One that glue has made is there on every rank, so nobody sends it; whether a batch has one makes no difference then.
Of one that a block makes of its tokens, or learns, those of other ranks come: by head, by an all_to_all; else by an all_gather.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.model.sequence_parallel.attention_call import Asked, superposed
from meshwright.parallel.context.attention_inputs import Fitted
from meshwright.parallel.context.sequence_sharding import local_heads
from meshwright.plan.job.errors import Fault, PlanError
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import NBYTES, NBYTES_WHOLE
from meshwright.plan.model_spec.sequence_info import Attend, Deal
from meshwright.plan.sharding.placement import Place, R, S
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Transfer
from meshwright.plan.strategy import Runtime

SHOWN = 3  # visits in a message
UNEVEN = "attention has {} heads on a rank, and they go to {} ranks in equal number"
HEADS, TOKENS = S(1), S(2)  # of [rows, heads, tokens, width]

Move = Callable[[torch.Tensor, Place, Place], torch.Tensor]


@dataclass(frozen=True)
class Needs:
    """Which heads of keys and values each rank is sent, all as many; `uses` are those that its own heads of queries use of them.

    Without `uses` neighbouring heads of queries share one, on every rank as many.
    """

    sent: tuple[tuple[int, ...], ...]
    uses: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, heads: int, groups: int, ranks: int) -> "Needs":
        """Where `heads` of queries, which share `groups` of keys and values, go to so many ranks; they divide evenly."""
        each, shared = heads // ranks, heads // groups
        found = [tuple(dict.fromkeys(head // shared for head in _mine(rank, each))) for rank in range(ranks)]
        most = max(map(len, found))
        sent = tuple((*own, *own[-1:] * (most - len(own))) for own in found)
        uses = tuple(tuple(own.index(head // shared) for head in _mine(rank, each)) for rank, own in enumerate(found))
        even = each % most == 0 and all(used == tuple(head * most // each for head in range(each)) for used in uses)
        return cls(sent, () if even else uses)

    @property
    def most(self) -> int:
        """How many heads of keys and values a rank is sent."""
        return len(self.sent[0])

    @property
    def plain(self) -> bool:
        """Whether each head is sent once, in order."""
        return [head for own in self.sent for head in own] == list(range(len(self.sent) * self.most))


@dataclass(frozen=True)
class Exchange:
    """What the rank at `index` and its neighbours, `deal.inner` of them, make of a call of attention; `move` moves among those.

    `by_query` tells whether masks that are sent have a row for each query: of a rank with one token that cannot be seen.
    """

    deal: Deal
    index: int
    move: Move
    by_query: bool

    @classmethod
    def along(cls, axis: str, deal: Deal, runtime: Runtime) -> "Exchange":
        """That of the rank which is `runtime`."""
        near = deal.inner if deal.inner < deal.ranks else 0

        def move(tensor: torch.Tensor, src: Place, dst: Place) -> torch.Tensor:
            return runtime.exchange(tensor, axis, src, dst, near) if deal.inner > 1 else tensor

        space = runtime.plan.space
        return cls(deal, dict(space.coordinate)[axis], move, masks_by_query(space))

    def taken(self, given: Fitted, asked: Asked, name: str) -> Fitted:
        """What `name` is asked, with the tokens of all neighbours, and this rank's heads of it."""
        heads, near = given.query.shape[1], self.deal.inner
        if heads % near:
            raise PlanError(UNEVEN.format(heads, near), fix="take ring, which leaves heads together", where=f"strategies.{name}")
        needs = Needs.of(heads, given.key.shape[1], near)
        query = self.to_heads(given.query, asked.queries.length)
        key, value = (self._shared(each, asked.keys.length, needs) for each in (given.key, given.value))
        return replace(given, query=query, key=key, value=value, mask=self._masked(given, asked.queries.length, name))

    def heads(self, given: Fitted) -> tuple[int, int]:
        """Which of the heads of queries that were `given` this rank computes."""
        each, place = given.query.shape[1] // self.deal.inner, self.index % self.deal.inner
        return place * each, (place + 1) * each

    def to_heads(self, tensor: torch.Tensor, length: int) -> torch.Tensor:
        """[B, h, own tokens, w] -> [B, h / near, tokens of all neighbours, w], of samples of `length` tokens."""
        return self._without_filling(self.move(_filled(tensor, self._most(length)), TOKENS, HEADS), length)

    def to_tokens(self, tensor: torch.Tensor, length: int) -> torch.Tensor:
        """The way back: [B, h / near, tokens of all neighbours, w] -> [B, h, own tokens, w]."""
        counts, most = self._counts(length), self._most(length)
        even = min(counts) == most
        filled = tensor if even else torch.cat([_filled(piece, most) for piece in tensor.split(counts, 2)], 2)
        return _first(self.move(filled, HEADS, TOKENS), counts[self.index % self.deal.inner])

    def _shared(self, tensor: torch.Tensor, length: int, needs: Needs) -> torch.Tensor:
        """Keys, or values: the heads that this rank needs."""
        if not needs.plain:
            sent = [head for own in needs.sent for head in own]
            tensor = tensor.index_select(1, torch.tensor(sent, device=tensor.device))
        moved = self.to_heads(tensor, length)
        if not needs.uses:
            return moved
        return moved.index_select(1, torch.tensor(needs.uses[self.index % self.deal.inner], device=tensor.device))

    def _masked(self, given: Fitted, length: int, name: str) -> torch.Tensor | None:
        """The mask for all queries of the neighbours, and this rank's heads."""
        if given.mask is None or self.deal.inner == 1:
            return given.mask
        if given.together is None:
            return self._sent(_wide_as(given.mask, given.query), given, length, name)
        known = _wide_as(given.together, given.query)
        if given.bias is None:
            return known
        return superposed(self._sent(_wide_as(given.bias, given.query), given, length, name), known)

    def _sent(self, mask: torch.Tensor, given: Fitted, length: int, name: str) -> torch.Tensor:
        """A mask that each rank has for its own queries, for those of all neighbours and this rank's heads."""
        if not self.by_query:
            if mask.shape[2] > 1:
                text = f"attention takes a mask of shape {list(mask.shape)}, made in a block, and in the trial run there was none"
                fix = "make the plan from an example batch that needs one; or make the mask outside of the block"
                raise PlanError(text, fix=fix, where=f"strategies.{name}")
            first, end = self.heads(given)
            return mask if mask.shape[1] == 1 else mask.narrow(1, first, end - first)
        mask = mask.expand(-1, -1, given.query.shape[2], -1)
        if mask.shape[1] > 1:
            return self.to_heads(mask, length)
        return self._without_filling(self.move(_filled(mask, self._most(length)), TOKENS, R), length)

    def _without_filling(self, tensor: torch.Tensor, length: int) -> torch.Tensor:
        counts, most = self._counts(length), self._most(length)
        if min(counts) == most or len(counts) == 1:
            return _first(tensor, sum(counts))
        return torch.cat([tensor.narrow(2, place * most, count) for place, count in enumerate(counts)], 2)

    def _counts(self, length: int) -> tuple[int, ...]:
        first = self.index - self.index % self.deal.inner
        return self.deal.counts(length)[first : first + self.deal.inner]

    def _most(self, length: int) -> int:
        return max(self.deal.counts(length))


def masks_by_query(space: Space) -> bool:
    """Whether any mask that is sent has a row for each query: all are sent as if they had."""
    tokens = (space.whole or space).anatomy.tokens
    masks = [each.mask for each in (tokens.attends if tokens else ()) if each.mask is not None]
    return any(mask.by_query and not mask.known for mask in masks)


def exchanged(
    space: Space, job: Job, axis: str, deal: Deal, attend: Attend, rows: int
) -> tuple[list[Transfer], list[Transfer], list[Transfer], list[Transfer]]:
    """What one call of attention moves: taking in, giving out; backwards, of what is given out, and of what was taken in."""
    if deal.inner == 1:
        return [], [], [], []
    heads, groups = local_heads(space, attend)
    dtype, near = job.precision.compute, deal.inner if deal.inner < deal.ranks else 0
    queries, keys = (rows * max(deal.counts(length)) for length in (attend.queries, attend.keys))
    sent = deal.inner * Needs.of(heads, groups, deal.inner).most

    def swap(numel: int, dtype: str = dtype, act: str = "all_to_all") -> Transfer:
        return Transfer(act, (axis,), numel * {**NBYTES, **NBYTES_WHOLE}[dtype], dtype=dtype, near=near)

    taken = [swap(queries * heads * attend.width), swap(keys * sent * attend.width), swap(keys * sent * attend.values)]
    given, mask = [swap(queries * heads * attend.values)], attend.mask
    back = [each for each, learns in zip(taken, attend.learns, strict=True) if learns][::-1]
    if mask is not None and not mask.known and masks_by_query(space):
        numel = queries // (1 if mask.by_row else rows) * attend.keys * (heads if mask.by_head else 1)
        kind = dtype if mask.adds else "bool"
        taken.append(swap(numel, kind, "all_to_all" if mask.by_head else "all_gather"))
        of_mask = swap(numel, kind) if mask.by_head else swap(numel * deal.inner, kind, "reduce_scatter")
        back = [of_mask, *back] if mask.needed else back
    return taken, given, given, back


def head_faults(space: Space, name: str, ranks: int, where: str, sizes: Iterable[int] = ()) -> Iterator[Fault]:
    """Calls of attention whose heads do not divide by so many ranks; where other ranks have some of them, theirs.

    `where` is the key that says how many ranks these are, and could as well say one of `sizes`.
    """
    tokens, found = (space.whole or space).anatomy.tokens, dict[int, dict[str, None]]()
    ends = {(("tp_depth", depth), ("tp", place)) for depth in _ends(space, "tp_depth") for place in _ends(space, "tp")}
    for attend in tokens.attends if tokens else ():
        for coordinate in sorted(ends):
            heads, _ = local_heads(replace(space, coordinate=coordinate), attend)
            found.setdefault(heads, {})[attend.visit] = None
    good = [size for size in sizes if all(heads % size == 0 for heads in found)]
    fix = "take ring, which leaves heads together" + (f"; or set {where} to {' or '.join(map(str, good))}" if good else "")
    for heads, visits in sorted(found.items()):
        if heads % ranks:
            more = f" and {len(visits) - SHOWN} more" if len(visits) > SHOWN else ""
            yield Fault(f"{', '.join([*visits][:SHOWN])}{more}: {UNEVEN.format(heads, ranks)}", fix, f"strategies.{name}")


def _ends(space: Space, axis: str) -> set[int]:
    """Those that may have unlike numbers of heads: what does not divide goes to the first."""
    return {0, space.mesh.size(axis) - 1}


def _wide_as(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return mask.to(query.dtype) if mask.is_floating_point() else mask


def _mine(rank: int, each: int) -> range:
    return range(rank * each, (rank + 1) * each)


def _first(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The first tokens: where they are all, nothing is copied backwards."""
    return tensor if tensor.shape[2] == count else tensor.narrow(2, 0, count)


def _filled(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """`tensor` with so many tokens: zeros behind its own."""
    short = most - tensor.shape[2]
    return F.pad(tensor, (0, 0, 0, short)) if short else tensor
