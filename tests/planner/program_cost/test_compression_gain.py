"""From which link speed on compressed sums pay: against formulas by hand, and what a plan says about it."""

from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.parallel.compression.codecs.sign import SignCompression
from meshwright.planner.machine.compression_gain import CompressionGain
from meshwright.planner.program_cost.action_cost import ActionCosts
from meshwright.planner.program_cost.compression_gain import compression_gain, compression_notes
from meshwright.planner.program_cost.prediction import predict_step
from tests.parallel.compression.coded_plans import ANALYZED, coded_plan
from tests.planner.simple_machine import ground

NUMEL = sum(param.numel for param in ANALYZED.model_spec.trainable)
SLICE = -(-NUMEL // 3)
CODE_NBYTES = SLICE + 4 * -(-SLICE // 256)
SAVED = 2 * 2 / 3 * 8 * NUMEL - 2 * 2 * CODE_NBYTES  # of float64, over three ranks


def test_bytes_saved_and_seconds_to_code_are_those_by_hand():
    gain = compression_gain(coded_plan(Int8Compression()), ground(links=1e6, coding=2e-6))
    assert gain.saved_nbytes == pytest.approx(SAVED)
    assert gain.coding_s == pytest.approx(2e-6 * NUMEL)
    assert gain.break_even_rate == pytest.approx(SAVED / (2e-6 * NUMEL))
    assert gain.exact_s == pytest.approx(8e-6 * NUMEL)  # of these links: bytes put in
    assert gain.coded_s == pytest.approx(1e-6 * (3 * CODE_NBYTES + CODE_NBYTES))


def test_every_microbatch_that_is_reduced_counts():
    one = compression_gain(coded_plan(Int8Compression(), "zero 2", 4), ground(coding=1e-6))
    two = compression_gain(coded_plan(Int8Compression(), "zero 2", 2), ground(coding=1e-6))
    assert two.saved_nbytes == 2 * one.saved_nbytes
    assert two.coding_s == pytest.approx(2 * one.coding_s)


@pytest.mark.parametrize(("links", "pays"), [(1e5, True), (1e8, False)])
def test_a_plan_says_whether_coding_pays_on_its_links(links: float, pays: bool):
    plan, target = coded_plan(Int8Compression()), ground(links=links, coding=1e-6)
    assert compression_gain(plan, target).pays is pays
    first, second = compression_notes(plan, target)
    assert first.startswith("compressed sums pay over links slower than ")
    assert "Gbit/s" in first
    assert second.startswith("on these links coded sums take ")
    assert second.endswith("remove the strategy compress") is not pays
    assert predict_step(plan, target).notes[-2:] == (first, second)


def test_a_codec_that_was_not_measured_is_told_and_not_counted():
    plan, target = coded_plan(SignCompression()), ground(links=1e6)
    (note,) = compression_notes(plan, target)
    assert "the seconds to code are not known on even and not counted" in note
    assert "bench device" in note
    assert compression_gain(plan, target).break_even_rate is None


def test_an_exact_plan_says_nothing_of_it():
    plan = coded_plan(Int8Compression())
    exact = mw.make_plan(ANALYZED, plan.job, plan.mesh, plan.strategies[:-1], plan.micro_batch)
    assert list(compression_notes(exact, ground(links=1e6, coding=1e-6))) == []
    assert compression_gain(exact, ground(coding=1e-6)) == CompressionGain()


def test_a_sum_takes_the_seconds_of_its_messages_and_of_coding():
    plan, target = coded_plan(Int8Compression()), ground(links=1e6, coding=2e-6)
    (reduce,) = (each for each in plan.for_rank(0).actions if each.kind == "REDUCE")
    cost = ActionCosts(plan, 0, target).cost(reduce)
    assert cost.comm_s == pytest.approx(4e-6 * CODE_NBYTES + 2e-6 * NUMEL)
    slower = replace(target, slowdown=3.0)
    assert ActionCosts(plan, 0, slower).coding_seconds(reduce) == pytest.approx(6e-6 * NUMEL)
    without = ActionCosts(plan, 0, ground(links=1e6))
    assert without.coding_seconds(reduce) is None
    assert without.cost(reduce).comm_s == pytest.approx(4e-6 * CODE_NBYTES)
