"""When weights that are kept elsewhere are whole in memory: from before their first use to behind their last one.

    uses     F0     F1     F2   B2     B1     B0            b1 is used by F1 and by B1
    b1      (ahead)[ F1 ]            (ahead)[ B1 ]          two stays: it is fetched twice, and memory holds few at a time
    b2            (ahead)[ F2   B2 ]                        uses that follow each other are one stay

A *stay* lasts from a use to a use. Joining two stays of the same weights saves a fetch and costs memory in between: always where
nothing lies between, everywhere within a micro-batch or a step if so planned, and else as far as a budget of bytes allows, the
shortest gaps first. A stay is begun `ahead` uses early, so that the fetch runs beside them.

Memory is a fixed number of buffers: each weight has one buffer for good, and two whose stays overlap never share one. So
addresses do not change from step to step, and what autograd has saved of a weight is right again once it is back.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

JoinScope = Literal["use", "microbatch", "step"]


@dataclass(frozen=True)
class ParamUse:
    """What one action needs whole: it belongs to micro-batch `micro`, and needs `bundles`."""

    param_groups: tuple[str, ...]
    microbatch: int


@dataclass(frozen=True)
class UnshardWindow:
    """`bundle` is whole from before use `begin` (fetched before use `fetch`) to behind use `end`, all counted from 0."""

    param_group: str
    fetch_use: int
    first_use: int
    last_use: int


def unshard_windows(
    uses: Sequence[ParamUse],
    nbytes: Mapping[str, int],
    scope: JoinScope = "use",
    budget: float = 0.0,
    prefetch: int = 1,
) -> list[UnshardWindow]:
    """The stays of every bundle in `uses`, in the order in which they are fetched.

    `nbytes` are the bytes of each bundle when whole; `budget` is how many more than needed may be whole at any time.
    """
    spans: dict[str, list[list[int]]] = {}
    for at, use in enumerate(uses):
        for bundle in use.param_groups:
            mine = spans.setdefault(bundle, [])
            follows = bool(mine) and (at == mine[-1][1] + 1 or _same_scope(uses, mine[-1][1], at, scope))
            if follows:
                mine[-1][1] = at
            else:
                mine.append([at, at])
    _join_gaps(spans, nbytes, budget, len(uses))
    found = []
    for bundle, mine in spans.items():
        free = 0  # the first use before which it may be fetched: what it was fetched for last is over
        for begin, end in mine:
            found.append(UnshardWindow(bundle, max(free, begin - prefetch), begin, end))
            free = end + 1
    return sorted(found, key=lambda stay: (stay.fetch_use, stay.first_use))


def _same_scope(uses: Sequence[ParamUse], before: int, after: int, join: JoinScope) -> bool:
    return join == "step" or (join == "microbatch" and uses[before].microbatch == uses[after].microbatch)


def _join_gaps(
    spans: dict[str, list[list[int]]], nbytes: Mapping[str, int], budget: float, num_uses: int
) -> None:
    """Join stays over the shortest gaps, as long as no use sees more than `budget` bytes in joined gaps."""
    gaps = [(b[0] - a[1], bundle, a[1], b[0]) for bundle, mine in spans.items() for a, b in pairwise(mine)]
    extra = [0] * num_uses
    for _, bundle, last, first in sorted(gaps) if budget else ():
        inside = range(last + 1, first)
        if all(extra[at] + nbytes[bundle] <= budget for at in inside):
            for at in inside:
                extra[at] += nbytes[bundle]
            mine = spans[bundle]
            index = next(i for i, span in enumerate(mine) if span[1] == last)
            mine[index : index + 2] = [[mine[index][0], mine[index + 1][1]]]


def assign_buffers(
    windows: Iterable[UnshardWindow], nbytes: Mapping[str, int]
) -> tuple[dict[str, int], tuple[int, ...]]:
    """The number of each bundle's buffer, and the bytes of every buffer. Large ones choose first, so that sizes pair up."""
    whole: dict[str, int] = {}  # per bundle, the uses at which it takes memory, as bits
    for stay in windows:
        whole[stay.param_group] = (
            whole.get(stay.param_group, 0)
            | ((1 << (stay.last_use - stay.fetch_use + 1)) - 1) << stay.fetch_use
        )
    number: dict[str, int] = {}
    taken: list[int] = []
    sizes: list[int] = []
    for bundle in sorted(whole, key=lambda name: (-nbytes[name], name)):
        free = next((i for i, bits in enumerate(taken) if not bits & whole[bundle]), len(taken))
        if free == len(taken):
            taken.append(0)
            sizes.append(nbytes[bundle])
        taken[free] |= whole[bundle]
        number[bundle] = free
    return number, tuple(sizes)
