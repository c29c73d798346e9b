"""The bytes that leave a rank in each collective, by the formula."""

import pytest

from meshwright.comm.collectives.comm_volume import min_max_sent_nbytes, sent_nbytes
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Transfer


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


@pytest.mark.parametrize("collective", ["broadcast", "scatter", "gather", "reduce", "all_reduce"])
def test_of_a_rank_that_sends_nothing_nothing_is_counted(collective: str) -> None:
    mesh, transfer = Mesh(dp_replicate=3, tp=2), Transfer(collective, ("dp_replicate",), 12, root=1)
    sent = sent_nbytes(collective, 12, 3)
    roots = [mesh.coordinate(rank)["dp_replicate"] == 1 for rank in range(6)]
    senders = {"broadcast": roots, "scatter": roots, "all_reduce": [True] * 6}
    sends = senders.get(collective, [not is_root for is_root in roots])
    assert [min_max_sent_nbytes(transfer, mesh, rank) for rank in range(6)] == [
        (sent * each, sent * each) for each in sends
    ]
    assert min_max_sent_nbytes(transfer, mesh) == (sent, sent)
