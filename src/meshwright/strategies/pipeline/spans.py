"""A schedule that was played on paper as spans, to be drawn: its slots, the waits for messages between them, what ranks hold."""

from meshwright.core.spans import Span
from meshwright.strategies.pipeline.order import Costs, Timeline, held


def planned(found: Timeline, costs: Costs) -> list[list[Span]]:
    """The spans of a schedule on paper. Where a rank is free and waits for a transfer, this is a span of its own."""
    order = found.order
    ended = {
        order.gives(slot): (end, rank)
        for rank, (slots, spans) in enumerate(zip(order.slots, found.spans, strict=True))
        for slot, (_, end) in zip(slots, spans, strict=True)
    }
    rows: list[list[Span]] = []
    for rank, (slots, spans) in enumerate(zip(order.slots, found.spans, strict=True)):
        mine = sorted(number for number, stage in enumerate(order.stages) if stage.rank == rank)
        holds = held(order, costs, rank) or [(0.0, 0.0)] * len(slots)
        row: list[Span] = []
        free, now = 0.0, 0.0
        for slot, (begin, end), (during, after) in zip(slots, spans, holds, strict=True):
            sent = max((ended[need][0] for need in order.needs(slot) if ended[need][1] != rank), default=begin)
            if max(free, sent) < begin:
                row.append(Span("~", max(free, sent), begin, held=now, left=now))
            row.append(Span(slot.kind, begin, end, slot.micro, mine.index(slot.stage), during, after))
            free, now = end, after
        rows.append(row)
    return rows
