"""The turns of a run through the parts of its model, as an SVG for its report: planned above measured, where that was traced."""

from meshwright.core.clock import Stuck
from meshwright.core.spans import Rows
from meshwright.core.units import size
from meshwright.report.order import Units
from meshwright.report.order_svg import order_svg
from meshwright.report.parts import row_word
from meshwright.report.reading import Record
from meshwright.report.timeline import lengths, steps_traced
from meshwright.report.turns import acts_on_paper, acts_traced, rows


def schedule_svg(record: Record) -> str:
    """The drawing; "" where each rank runs the whole model, or where the run has not said what its parts are."""
    program, parts = record.program, record.about.get("parts", [])
    if program is None or len(program.roles) < 2 or len(parts) < 2:
        return ""
    events, step = steps_traced(record)
    known = lengths(record, events) if step is not None else {}
    try:
        found: dict[str, Rows] = {"planned": rows(acts_on_paper(program, known), program, parts)}
    except Stuck:  # a damaged file: such a list has been refused long before
        return ""
    if step is not None:
        found[f"measured, step {step}"] = rows(acts_traced(program, events, step, record.world), program, parts)
    long = "{:.4g} ms".format if known else (lambda flops: f"{flops:.4g} operations")
    return order_svg(found, units=Units(long, size, row_word(record.world, len(program.roles))))
