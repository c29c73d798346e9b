"""What a run before the comparison has shown of the ranks, which one device cannot know: losses of codes, and
the order of arrivals.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.comm.collectives.group import World
from meshwright.verifier.one_device.arrival_replay import Arrivals, record_arrivals
from meshwright.verifier.one_device.lost_steps import LostStep, record_lost
from meshwright.verifier.one_device.parity_case import ParityCase


@dataclass(frozen=True)
class RecordedRun:
    """What sums of codes left out, by step, and the order in which servers took gradients; empty where a plan
    has neither.
    """

    lost: Sequence[LostStep] = ()
    arrivals: Arrivals = field(default_factory=dict)


NOTHING_RECORDED = RecordedRun()


def record_run(parity_case: ParityCase, world: World, num_steps: int) -> RecordedRun:
    """Trains one rank of the plan, if anything is to be recorded of it; the same on every rank. All ranks
    call it.
    """
    lost = record_lost(parity_case, world, num_steps)
    return RecordedRun(lost, record_arrivals(parity_case, world, num_steps))
