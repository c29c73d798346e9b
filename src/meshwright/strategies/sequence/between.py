"""What a program says of the tokens that glue brings together between blocks (model/together.py): within which actions they move.

    F(visit)     at its end, what the glue behind it needs: all_gather, or all_reduce where a sum will do
                 at its beginning what it needs itself, where a part of the model begins with it
    LOSS         what the loss needs; at its end the gradients of what the model gives out
    B(visit), I  at its end the gradients of what the visit took in first: reduce_scatter, all_reduce
                 at its beginning, where a part of the model ends with it, those of what later parts took in

Each rank gives as many tokens as the one that has most.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.core.anatomy import NBYTES, NBYTES_OWN
from meshwright.core.borders import Part
from meshwright.core.job import Job
from meshwright.core.program import Action, Program, Transfer, with_more
from meshwright.core.space import Space
from meshwright.core.steps import BACKWARDS, FORWARDS, micro_rows, stream
from meshwright.core.tokens import Together

LOSS = ""  # stands for it among visits
LATE = 1e9  # behind all that a visit itself moves


def glued(program: Program, space: Space, job: Job, axis: str) -> Program:
    """`program` with what glue brings together of the tokens that are dealt along `axis`."""
    tokens = (space.whole or space).anatomy.tokens
    if tokens is None or not tokens.met:
        return program

    def edited(actions: list[Action]) -> list[Action]:
        glue = _Glue.of(space, job, axis, micro_rows(actions, space, job))
        return [glue.within(action) for action in actions]

    return program.edit(edited)


@dataclass(frozen=True)
class _Glue:
    """By visit: the transfers before and behind its forward, their bytes, those of its backward, at its beginning and its end."""

    before: Mapping[str, Sequence[Transfer]]
    forth: Mapping[str, Sequence[Transfer]]
    more: Mapping[str, int]
    first: Mapping[str, Sequence[Transfer]]
    last: Mapping[str, Sequence[Transfer]]

    @classmethod
    def of(cls, space: Space, job: Job, axis: str, rows: int) -> "_Glue":
        """Those of the visits that the rank runs that sees `space`, on micro-batches of so many rows."""
        tokens = (space.whole or space).anatomy.tokens
        before, forth, first, last = (defaultdict[str, list[Transfer]](list) for _ in range(4))
        more = defaultdict[str, int](int)
        for each in tokens.met if tokens is not None else ():
            home = _home(each, space.parts)
            if not (home in space.anatomy.visits or (home == LOSS and space.takes_loss)):
                continue
            there, back, nbytes = _transfers(each, space, job, axis, rows)
            (before if home != each.visit else forth)[home].append(there)
            more[home] += nbytes
            for place, ends in dict.fromkeys(_places(each, home, space.parts)):
                (last if ends else first)[place].insert(0, back)  # what was made last flows first
        return cls(before, forth, more, first, last)

    def within(self, action: Action) -> Action:
        """`action` with what moves in it."""
        visit = LOSS if action.kind == "LOSS" else action.subject
        early, late = list[Transfer](), list[Transfer]()
        if action.kind in (*FORWARDS, "LOSS"):
            early += self.before.get(visit, ())
            late += self.forth.get(visit, ())
        if action.kind in (*BACKWARDS, "LOSS"):
            early += self.first.get(visit, ())
            late += self.last.get(visit, ())
        if not early and not late:
            return action
        inner = *_at(-LATE, early), *action.inner, *_at(LATE, late)
        held = stream(action.subject, action.micro or 0)
        more = self.more.get(visit, 0) if action.kind in FORWARDS else 0
        return replace(with_more(action, held, more), inner=inner)


def _at(time: float, moves: Iterable[Transfer]) -> Iterator[Transfer]:
    return (replace(move, at=time, between=True) for move in moves)


def _home(each: Together, parts: Sequence[Part]) -> str:
    """The visit in whose forward it moves: a part that begins with the one that is given it was handed each rank's own tokens."""
    begins = {part.visits[0] for part in parts}
    return each.into if each.into in begins else each.visit


def _places(each: Together, home: str, parts: Sequence[Part]) -> Iterator[tuple[str, bool]]:
    """Behind or before whose backwards a gradient goes back: the visit, and whether at its end.

    What another part took in first has its gradient when that has sent it.
    """
    mine = next((part for part in parts if home in part.visits), None)
    for visit in each.back:
        if mine is None or visit in mine.visits or (visit == LOSS and mine.last):
            yield visit, True
        else:
            yield mine.visits[-1], False


def _transfers(each: Together, space: Space, job: Job, axis: str, rows: int) -> tuple[Transfer, Transfer, int]:
    """The transfer of a forward, that of its gradient, and the bytes of what is there then, on so many rows."""
    numel, compute = each.numel * (rows if each.rows else 1), job.precision.compute
    mixed = compute != job.precision.parameters
    own = not each.dtype or (each.dtype in NBYTES and (mixed or compute == "float64"))
    dtype = compute if own else each.dtype
    if not each.tokens or space.deal is None:
        wide = "float64" if "float64" in ((each.dtype if not own or mixed else ""), compute) else "float32"
        move = Transfer("all_reduce", (axis,), numel * NBYTES[wide], dtype=wide)
        return move, move, numel * NBYTES[wide]
    share = numel // each.tokens * max(space.deal.counts(each.tokens)) * NBYTES_OWN[dtype]
    forth = Transfer("all_gather", (axis,), share, dtype=dtype)
    back = Transfer("reduce_scatter", (axis,), share * space.deal.ranks, dtype=dtype)
    return forth, back, numel * NBYTES_OWN[dtype]
