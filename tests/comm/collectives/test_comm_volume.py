"""The bytes that leave a rank in each collective, by the formula."""

import pytest

from meshwright.comm.collectives.comm_volume import sent_nbytes


@pytest.mark.parametrize(
    ("collective", "sent"),
    [
        *[
            ("all_reduce", 16),
            ("all_gather", 24),
            ("reduce_scatter", 8),
            ("all_to_all", 8),
            ("broadcast", 12),
            ("barrier", 0),
        ],
        *[("scatter", 24), ("gather", 12), ("reduce", 12), ("send", 12), ("shift", 12)],
    ],
)
def test_bytes_sent_follow_the_formula_at_three_ranks(collective: str, sent: float) -> None:
    assert sent_nbytes(collective, 12, 3) == sent


@pytest.mark.parametrize(
    "collective",
    [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "scatter",
        "gather",
        "reduce",
        "shift",
    ],
)
def test_a_single_rank_sends_nothing(collective: str) -> None:
    assert sent_nbytes(collective, 12, 1) == 0
