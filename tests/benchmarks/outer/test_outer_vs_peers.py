"""A round of ours counts as fast only beside peers that ran, and as far as the noise tells."""

import pytest

from benchmarks.harness.interleaved_timing import Cost, Rounds
from benchmarks.outer import outer_vs_peers
from benchmarks.outer.outer_vs_peers import MAY_BE_MISSING, OURS, Turn


def rounds(ours: float, twin: float = 1.0, missing: tuple[str, ...] = ()) -> Rounds:
    """Three rounds in which peers take a second, all alike."""
    seconds = {**dict.fromkeys(OURS, 1.0), **dict.fromkeys(OURS.values(), ours), "twin": twin}
    costs = {
        name: Cost(wall, wall, (Turn(100, 5.0), Turn(90, 5.0)))
        for name, wall in seconds.items()
        if name not in missing
    }
    return Rounds((costs,) * 3, 0, 0.5)


@pytest.mark.parametrize(
    ("ours", "twin", "holds"), [(0.9, 1.0, True), (1.1, 1.0, False), (0.9, 1.2, "unresolved")]
)
def test_it_holds_if_no_peer_is_faster(ours: float, twin: float, holds: object):
    found = outer_vs_peers.result(rounds(ours, twin), 50, {})
    assert found.holds == holds
    assert found.median == ours
    assert found.detail["sent by the first site"]["diloco"] == 100


def test_a_peer_that_does_not_run_is_told_and_leaves_the_claim_open():
    missing = dict.fromkeys(MAY_BE_MISSING, "no wheel")
    found = outer_vs_peers.result(rounds(0.9, missing=MAY_BE_MISSING), 50, missing)
    assert (found.holds, found.detail["not measured"]) == ("unresolved", missing)
