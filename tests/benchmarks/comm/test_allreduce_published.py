"""Published times have sources, and the comparison of the models can fail."""

import csv

from benchmarks.comm.allreduce_published import DATA, LEAST_SIZES, compare, errors, series

SIZES = [1 << power for power in range(10, 26)]


def test_every_row_of_the_data_has_a_source():
    with DATA.open(encoding="utf-8", newline="") as file:
        assert all(row["source"] for row in csv.DictReader(file))


def test_series_are_long_enough_and_their_sizes_rise():
    found = series()
    assert len(found) >= 10
    for nbytes, took in found.values():
        assert len(nbytes) == len(took) >= LEAST_SIZES
        assert nbytes == sorted(nbytes)
        assert all(0 < each < 1 for each in took)


def test_two_parameters_predict_what_two_parameters_made():
    took = [1e-5 + nbytes / 1e9 for nbytes in SIZES]
    assert max(errors(SIZES, took, 1)) < 1e-6


def test_bands_win_where_a_protocol_switches_and_the_claim_says_so():
    switch = [1e-5 + nbytes / 1e8 if nbytes <= 1 << 16 else 2e-3 + nbytes / 1e10 for nbytes in SIZES]
    plain = [1e-5 + nbytes / 1e9 * (1.3 if index % 2 else 0.7) for index, nbytes in enumerate(SIZES)]
    assert compare({"switch": (SIZES, switch)}).holds is True
    assert compare({"noise": (SIZES, plain)}).holds is False


def test_the_claim_holds_on_the_published_times():
    result = compare(series())
    assert result.holds is True
    assert result.median < result.bar
