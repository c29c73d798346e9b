"""The link speed below which codes pay, and what is said of it."""

import pytest

from meshwright.planner.machine.compression_gain import CompressionGain, break_even_text, comparison_text

GAIN = CompressionGain(saved_nbytes=3 << 20, coding_s=0.002, exact_s=0.010, coded_s=0.007)


def test_codes_pay_below_the_rate_at_which_what_is_saved_takes_as_long_as_coding():
    assert GAIN.break_even_rate == (3 << 20) / 0.002
    assert GAIN.pays
    assert not CompressionGain(3 << 20, 0.004, 0.010, 0.007).pays
    text = "over links slower than 12.6 Gbit/s: each rank sends 3 MiB less in a step, and coding takes 2 ms"
    assert break_even_text(GAIN) == text
    assert comparison_text(GAIN) == "on these links coded sums take 9 ms, and exact ones 10 ms"


@pytest.mark.parametrize("gain", [CompressionGain(1.0, None, 1.0, 0.5), CompressionGain(1.0, 0.5)])
def test_what_is_not_known_is_not_said(gain: CompressionGain):
    assert gain.pays is None


def test_without_seconds_to_code_there_is_no_rate():
    assert CompressionGain(1.0, None).break_even_rate is None
