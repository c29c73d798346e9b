"""Lossy results of a search: never unless they are allowed; then marked, with the link speed at which they
pay.
"""

from dataclasses import replace

import pytest

from meshwright.planner.analytic.compression_cost import codec_gain
from meshwright.planner.analytic.model_shape import ModelShape, parse_shape
from meshwright.planner.analytic.parallel_config import GRADIENT_CODECS, ScheduleProfile
from meshwright.planner.machine.machine import Machine, make_machine, with_nic
from meshwright.planner.search.lossy_when_allowed import lossy_notes
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import search
from meshwright.report.search.search_result import config_text

SHAPE = parse_shape("1b: layers 16 hidden 2048 heads 16 vocab 32000")
ORDERS = {"1f1b": (ScheduleProfile(), 1)}
SLOW, FAST = 1e9, 500e9


def machine(nic_rate: float, coding_s: float = 2e-11) -> Machine:
    return replace(with_nic(make_machine("h100", 32), nic_rate), codings={"int8": coding_s})


def request(nic_rate: float = SLOW, shape: ModelShape = SHAPE, **given: object) -> SearchRequest:
    settings: dict[str, object] = {"codecs": GRADIENT_CODECS} | given
    return SearchRequest(shape, machine(nic_rate), 256, ORDERS, **settings)


def test_nothing_is_lossy_unless_it_is_allowed():
    for nic_rate in (SLOW, FAST):
        found = search(request(nic_rate, codecs=("",)), 20)
        assert not any(each.config.is_lossy for each in found.best)


def test_over_slow_links_the_first_result_sums_codes_between_hosts_and_is_marked():
    best = search(request()).best
    assert best[0].config.compress == "int8"
    assert best[0].config.zero_group_size == 8  # one group per host
    for each in best:
        assert each.config.is_lossy == ("(lossy)" in config_text(each))
    exact = search(request(codecs=("",))).best[0]
    assert best[0].seconds < exact.seconds


@pytest.mark.parametrize("nic_rate", [SLOW, 5e9])
def test_the_bounds_leave_no_lossy_result_out(nic_rate: float):
    for fixed in ({}, {"zero_stage": 0}, {"tp": 2}):
        asked = request(nic_rate, fixed=fixed)
        short, whole = search(asked), search(asked, prune=False)
        assert [each.config for each in short.best] == [each.config for each in whole.best]
        assert any(each.config.is_lossy for each in whole.best)


def test_the_link_speed_that_is_said_decides():
    asked = request()
    found = search(asked)
    (note,) = lossy_notes(asked, found)
    rate = codec_gain(SHAPE, found.best[0].config, asked.machine).break_even_rate
    assert rate is not None
    assert f"int8 codes pay over links slower than {8 * rate / 1e9:.3g} Gbit/s" in note
    assert "on these links coded sums take" in note
    assert not search(request(FAST)).best[0].config.is_lossy
    (note,) = lossy_notes(request(FAST), search(request(FAST)))
    assert "int8 codes" in note  # of the best exact result, as if it were coded


def test_ranks_that_share_hosts_are_told_where_codes_pay():
    asked = request(fixed={"zero_stage": 1, "dp_shard": 32, "tp": 1, "pp": 1, "cp": 1})
    (note,) = lossy_notes(asked, search(asked))
    assert note.startswith("int8 codes send no less than exact sums")


def test_what_the_search_cannot_price_is_said():
    experts = replace(SHAPE, experts=8, top_k=2, expert_ffn=1024)
    asked = request(shape=experts)
    found = search(asked)
    assert not any(each.config.is_lossy for each in found.best)
    (note,) = lossy_notes(asked, found)
    assert note.startswith("int8 codes are not proposed")


def test_codecs_without_measured_seconds_are_refused_with_the_repair():
    unknown = replace(request(), machine=make_machine("h100", 32))
    (lacking,) = unknown.diagnostics()
    assert "the seconds to code are not known on H100: int8" in lacking.problem
    assert "bench device" in lacking.fix
    assert not list(request().diagnostics())
