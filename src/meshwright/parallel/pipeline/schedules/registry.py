"""The schedules by name: how each is built, how many virtual stages a rank has in it, and what it refuses.

1f1b, gpipe, naive_model_parallel, zb_*    stage k on rank k
interleaved                          stage k on rank k modulo the ranks; `virtual_stages` per rank
zb_v, zb_v_half, zb_v_min, dualpipev stage k on rank k, and on 2 ranks - 1 - k behind the turn
dualpipe                             stage k on rank k, and on ranks - 1 - k for half of the microbatches
automatic                            stage k on rank k; virtual_stages = 2: as zb_v; more: as interleaved
file.csv, file.py:function           as the file says (custom.py)
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshwright.parallel.pipeline.schedules import (
    automatic,
    custom,
    dualpipe,
    gpipe,
    interleaved,
    naive_model_parallel,
    one_f_one_b,
    zb_v,
    zero_bubble,
)
from meshwright.parallel.pipeline.schedules.schedule import Schedule, StageCosts, VirtualStage, check_counts
from meshwright.plan.job.errors import Diagnostic, PlanError

ScheduleBuilder = Callable[
    [int, int, int, StageCosts], Schedule
]  # of ranks, microbatches, stages per rank and what the stages cost
CountCheck = Callable[[int, int], Iterator[Diagnostic]]


@dataclass(frozen=True)
class ScheduleEntry:
    """A schedule of the registry: how it is built, and what it refuses.

    `num_virtual_stages` is the number per rank; 0: the plan chooses, `default_virtual_stages` by default.
    `source` is the file that defines it, if any, which also places the stages.
    """

    build: ScheduleBuilder
    check: CountCheck = check_counts
    num_virtual_stages: int = 1
    default_virtual_stages: int = 1
    source: str = ""

    def virtual_stages(self, num_ranks: int, num_virtual_stages: int) -> tuple[VirtualStage, ...]:
        """Returns the placement of stages, for any number of microbatches."""
        if self.source:
            return custom.load_virtual_stages(self.source, num_ranks)
        return self.build(
            num_ranks, 1, num_virtual_stages, StageCosts.uniform(num_ranks * num_virtual_stages)
        ).virtual_stages


def _fixed_entry(
    schedule: Callable[[int, int], Schedule], check: CountCheck = check_counts, num_virtual_stages: int = 1
) -> ScheduleEntry:
    return ScheduleEntry(
        lambda num_ranks, num_microbatches, _num_virtual_stages, _costs: schedule(
            num_ranks, num_microbatches
        ),
        check,
        num_virtual_stages,
    )


SCHEDULES: Mapping[str, ScheduleEntry] = MappingProxyType(
    {
        "naive_model_parallel": _fixed_entry(naive_model_parallel.naive_model_parallel_schedule),
        "gpipe": _fixed_entry(gpipe.gpipe_schedule),
        "1f1b": _fixed_entry(one_f_one_b.one_f_one_b_schedule),
        "interleaved": ScheduleEntry(
            lambda ranks, num_microbatches, num_virtual_stages, _costs: interleaved.interleaved_schedule(
                ranks, num_microbatches, num_virtual_stages
            ),
            interleaved.check_interleaved,
            num_virtual_stages=0,
            default_virtual_stages=2,
        ),
        "zb_h1": _fixed_entry(zero_bubble.zb_h1_schedule),
        "zb_h2": _fixed_entry(zero_bubble.zb_h2_schedule),
        "zb_2p": ScheduleEntry(
            lambda ranks, num_microbatches, _num_virtual_stages, costs: zero_bubble.zb_2p_schedule(
                ranks, num_microbatches, costs
            ),
        ),
        "zb_v": _fixed_entry(zb_v.zb_v_schedule, num_virtual_stages=2),
        "zb_v_half": _fixed_entry(zb_v.zb_v_half_schedule, num_virtual_stages=2),
        "zb_v_min": _fixed_entry(zb_v.zb_v_min_schedule, num_virtual_stages=2),
        "dualpipe": _fixed_entry(dualpipe.dualpipe_schedule, dualpipe.check_dualpipe),
        "dualpipev": _fixed_entry(dualpipe.dualpipev_schedule, num_virtual_stages=2),
        "automatic": ScheduleEntry(automatic.automatic_schedule, num_virtual_stages=0),
    }
)


def find_schedule(name: str) -> ScheduleEntry | None:
    """Returns the schedule of that name, or the one of a file; None if there is none."""
    if name in SCHEDULES or not custom.is_schedule_source(name):
        return SCHEDULES.get(name)

    def refuse(ranks: int, num_microbatches: int) -> Iterator[Diagnostic]:
        try:
            custom.load_virtual_stages(name, ranks)
        except PlanError as error:
            yield from error.diagnostics

    return ScheduleEntry(
        lambda ranks, num_microbatches, _num_virtual_stages, _costs: custom.load_schedule(
            name, ranks, num_microbatches
        ),
        refuse,
        source=name,
    )
