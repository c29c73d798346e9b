"""The schedules by name: what makes the lists of each, how many parts of the model a rank has in it, and what it refuses.

1f1b, gpipe, model_parallel, zb_*    part k on rank k
interleaved                          part k on rank k modulo the ranks; as many per rank as `chunks` says
zb_v, zb_v_half, zb_v_min, dualpipev part k on rank k, and on 2 ranks - 1 - k behind the turn
dualpipe                             part k on rank k, and on ranks - 1 - k for the other half of the micro-batches
automatic                            part k on rank k; with chunks = 2 as zb_v, with more as interleaved
file.csv, file.py:function           as it says (given.py)
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshwright.parallel.pipeline.schedules import (
    custom,
    dualpipe,
    gpipe,
    interleaved,
    model_parallel,
    one_f_one_b,
    search,
    zb_v,
    zero_bubble,
)
from meshwright.parallel.pipeline.schedules.schedule import Costs, Order, Stage, count_faults
from meshwright.plan.job.errors import Fault, PlanError

Make = Callable[[int, int, int, Costs], Order]  # of ranks, micro-batches, parts per rank and what the parts cost
Refuse = Callable[[int, int], Iterator[Fault]]


@dataclass(frozen=True)
class Schedule:
    """A way to make lists. `chunks` are the parts per rank, 0 where that is for the plan to say, which has `usual` otherwise.

    `source` is the file that says what it is, if one does: that says the parts too.
    """

    make: Make
    refuse: Refuse
    chunks: int = 1
    usual: int = 1
    source: str = ""

    def stages(self, ranks: int, chunks: int) -> tuple[Stage, ...]:
        """Which part lies where, for any number of micro-batches."""
        if self.source:
            return custom.stages(self.source, ranks)
        return self.make(ranks, 1, chunks, Costs.equal(ranks * chunks)).stages


def _plain(order: Callable[[int, int], Order], refuse: Refuse, chunks: int = 1) -> Schedule:
    return Schedule(lambda ranks, micros, _chunks, _costs: order(ranks, micros), refuse, chunks)


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "model_parallel": _plain(model_parallel.order, model_parallel.faults),
        "gpipe": _plain(gpipe.order, gpipe.faults),
        "1f1b": _plain(one_f_one_b.order, one_f_one_b.faults),
        "interleaved": Schedule(
            lambda ranks, micros, chunks, _costs: interleaved.order(ranks, micros, chunks), interleaved.faults, chunks=0, usual=2
        ),
        "zb_h1": _plain(zero_bubble.h1, zero_bubble.faults),
        "zb_h2": _plain(zero_bubble.h2, zero_bubble.faults),
        "zb_2p": Schedule(lambda ranks, micros, _chunks, costs: zero_bubble.two_p(ranks, micros, costs), zero_bubble.faults),
        "zb_v": _plain(zb_v.v, zb_v.faults, chunks=2),
        "zb_v_half": _plain(zb_v.v_half, zb_v.faults, chunks=2),
        "zb_v_min": _plain(zb_v.v_min, zb_v.faults, chunks=2),
        "dualpipe": _plain(dualpipe.dualpipe, dualpipe.faults),
        "dualpipev": _plain(dualpipe.dualpipev, count_faults, chunks=2),
        "automatic": Schedule(search.order, count_faults, chunks=0),
    }
)


def schedule_of(name: str) -> Schedule | None:
    """The schedule of that name, or the one that a file gives; None where there is none."""
    if name in SCHEDULES or not custom.is_source(name):
        return SCHEDULES.get(name)

    def refuse(ranks: int, micros: int) -> Iterator[Fault]:
        try:
            custom.stages(name, ranks)
        except PlanError as error:
            yield from error.faults

    return Schedule(lambda ranks, micros, _chunks, _costs: custom.order(name, ranks, micros), refuse, source=name)
