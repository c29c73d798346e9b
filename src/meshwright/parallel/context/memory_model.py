"""What attention has in memory where its tokens are dealt, beside a rank's share of what one device has.

    inside     heads of keys and values that are sent to several ranks; what comes out, which the next product keeps beside what
               attention's own backward keeps of it
    on top     in attention's own backward, the gradients of those heads, and what travels round a ring

What is on top counts from what is there at that moment, when most of what a block holds is gone already (core/load.py): the
fullest moment of a backward may well be another.
"""

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.parallel.context.head_exchange import Needs
from meshwright.parallel.context.sequence_sharding import local_heads
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import NBYTES
from meshwright.plan.model_spec.sequence_info import Attend, Deal
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Program, with_more
from meshwright.plan.step.activation_memory import taken
from meshwright.plan.step.single_device import BACKWARDS, FORWARDS, SCRATCH, inside, micro_rows


@dataclass(frozen=True)
class Room:
    """Bytes of one visit in a micro-batch: kept inside, and on top in its backward."""

    inside: int = 0
    on_top: int = 0


def of_ring(space: Space, job: Job, deal: Deal, attend: Attend, rows: int) -> Room:
    """What a ring adds to one call of attention: its output is copied for the product behind, which may write into that."""
    heads, _ = local_heads(space, attend)
    return Room(rows * max(deal.counts(attend.queries)) * heads * attend.values * NBYTES[job.precision.compute])


def of_exchange(space: Space, job: Job, deal: Deal, attend: Attend, rows: int) -> Room:
    """What an exchange of tokens for heads adds to one call of attention."""
    if deal.inner == 1:
        return Room()
    heads, groups = local_heads(space, attend)
    needs, keys = Needs.of(heads, groups, deal.inner), rows * max(deal.counts(attend.keys)) * NBYTES[job.precision.compute]
    sent = heads if needs.uses else deal.inner * needs.most
    more = keys * (sent - groups) * (attend.width + attend.values)
    return Room(more + of_ring(space, job, deal, attend, rows).inside, more)


def with_room(
    program: Program,
    space: Space,
    job: Job,
    travelling: Callable[[Action], int] = lambda action: 0,
    of: Callable[[Attend, int], Room] = lambda attend, rows: Room(),
) -> Program:
    """`program` with this memory: `of` a call of attention on so many rows, and what is `travelling` in a backward."""
    tokens = (space.whole or space).anatomy.tokens

    def roomy(actions: list[Action]) -> list[Action]:
        rows = micro_rows(actions, space, job)
        known, rooms = taken(space, job, rows), dict[str, Room]()
        for attend in tokens.attends if tokens is not None else ():
            before, own = rooms.get(attend.visit, Room()), of(attend, rows)
            rooms[attend.visit] = Room(before.inside + own.inside, max(before.on_top, own.on_top))
        return [_roomy(action, rooms.get(action.subject), known, travelling) for action in actions]

    return program.edit(roomy)


def _roomy(action: Action, room: Room | None, known: dict, travelling: Callable[[Action], int]) -> Action:
    if room is None:
        return action
    if action.kind in FORWARDS:
        return with_more(action, inside(action.subject, action.micro), room.inside)
    held = next((hold.nbytes for hold in action.takes if hold.name == SCRATCH), None)
    if action.kind not in BACKWARDS or held is None:
        return action
    late = known[action.subject].attending if action.subject in known else None
    on_top = room.on_top + travelling(action)
    return with_more(action, SCRATCH, on_top if late is None else max(0, late + on_top - held))
