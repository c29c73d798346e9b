"""A schedule as SVG: a titled box per action, shaded bubbles, and memory as areas."""

import re
from xml.etree import ElementTree

import pytest

from meshwright.parallel.pipeline.schedules import one_f_one_b
from meshwright.parallel.pipeline.schedules.schedule import StageCosts, schedule_spans, simulate
from meshwright.plan.step.simulator import TimelineSpan
from meshwright.report.timeline.gantt_svg import KIND_COLOURS, LEFT, MEMORY_HEIGHT, RIGHT, gantt_svg
from meshwright.report.timeline.gantt_text import DrawingUnits

SVG = "{http://www.w3.org/2000/svg}"


def drawn(parts: dict, **options: object) -> ElementTree.Element:
    return ElementTree.fromstring(gantt_svg(parts, **options))


def boxes(svg: ElementTree.Element) -> list[tuple[str, float, float, str]]:
    found = [(box, box.find(f"{SVG}title")) for box in svg.iter(f"{SVG}rect")]
    return [
        (title.text, float(box.get("x")), float(box.get("width")), box.get("fill"))
        for box, title in found
        if title is not None
    ]


@pytest.fixture(scope="module")
def parts() -> dict:
    order, costs = one_f_one_b.one_f_one_b_schedule(3, 4), StageCosts.uniform(3, transfer=0.5)
    late = StageCosts.uniform(3, 2, 2, 2)
    return {
        "planned": schedule_spans(simulate(order, costs), costs),
        "measured": schedule_spans(simulate(order, late), late),
    }


def test_every_act_is_a_box_at_its_time_and_in_its_colour(parts):
    svg = drawn(parts, units=DrawingUnits(format_time="{:.4g} ms".format))
    found = boxes(svg)
    spans = [span for rows in parts.values() for row in rows for span in row]
    assert len(found) == len(spans)
    scale = (1100 - LEFT - RIGHT) / max(span.end for span in spans)
    for (title, x, width, fill), span in zip(found, spans, strict=True):
        assert x == pytest.approx(LEFT + span.begin * scale, abs=0.01)
        assert width == pytest.approx((span.end - span.begin) * scale, abs=0.01)
        assert fill == KIND_COLOURS[span.kind][0]
        assert f"{span.begin:.4g} ms .. {span.end:.4g} ms" in title


def test_panels_are_stacked_with_their_captions_and_fit_the_frame(parts):
    svg = drawn(parts, width=800)
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    (first, second) = [text for text in texts if "bubble" in text and ":" in text]
    assert first.startswith("planned: ")
    assert second.startswith("measured: ")
    assert {"forward", "backward", "exposed communication", "bubble", "memory, and its peak"} <= set(texts)
    assert svg.get("width") == "800"
    assert max(float(text.get("y")) for text in svg.iter(f"{SVG}text")) <= float(svg.get("height"))
    assert len(list(svg.iter(f"{SVG}path"))) == 6


def test_a_memory_area_is_as_high_as_the_memory(parts):
    svg = drawn({"planned": parts["planned"]})
    heights = []
    for path in (path.get("d") for path in svg.iter(f"{SVG}path")):
        ys = [float(y) for y in re.findall(r"V([0-9.]+)", path)]
        heights.append(max(ys) - min(ys))
    assert heights[0] == pytest.approx(MEMORY_HEIGHT - 1, abs=0.01)
    assert heights[2] == pytest.approx((MEMORY_HEIGHT - 1) / 3, abs=0.01)


def test_later_virtual_stages_of_a_rank_are_darker_and_names_are_escaped():
    row = [
        TimelineSpan("F", 0, 1, 0),
        TimelineSpan("F", 1, 2, 0, virtual_stage=1),
        TimelineSpan("W", 2, 3, 0, virtual_stage=7),
    ]
    svg = drawn({"<planned>": [row]})
    assert [fill for _, _, _, fill in boxes(svg)] == [
        KIND_COLOURS["F"][0],
        KIND_COLOURS["F"][1],
        KIND_COLOURS["W"][2],
    ]
    assert [title for title, *_ in boxes(svg)][1] == "forward of microbatch 0, virtual stage 1: 1 .. 2"
    assert "<planned>" in next(svg.iter(f"{SVG}text")).text
    assert list(svg.iter(f"{SVG}path")) == [], "nothing is known of memory"
