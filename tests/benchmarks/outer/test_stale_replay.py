"""A small run is recorded and replayed; what a result needs to hold."""

from dataclasses import replace
from itertools import islice

import pytest

from benchmarks.outer import stale_replay
from meshwright.parallel.server.stale_updates import ServerUpdates


def test_a_small_run_is_replayed_and_one_that_ignores_its_record_is_noticed(monkeypatch: pytest.MonkeyPatch):
    some = list(islice(stale_replay.draws(), stale_replay.NUM_RUNS))
    assert {each.bound for each in some} == {0, 1, 3, None}
    assert {each.optimizer for each in some} == set(stale_replay.OPTIMIZERS)
    run = replace(some[2], model="llama", workers=2, servers=1, bound=None, num_microbatches=1, slow=True)
    verdict = stale_replay.verify(
        stale_replay.analyzed_model(run.model), run.plan(), stale_replay.MODELS[run.model].batches(1, 2)
    )
    row = stale_replay.compare(run)
    assert stale_replay.holds(row), row
    monkeypatch.setattr(ServerUpdates, "_known_worker", lambda self: None)
    monkeypatch.setattr(stale_replay, "verify", lambda *given: verdict)
    assert not stale_replay.compare(run)["replayed"]  # the other worker is slow in the replay


ROW = {
    "case": "",
    "bound": "1",
    "replayed": True,
    "free": False,
    "staleness": {"0": 3, "2": 1},
    "most": 2,
    "law": 3,
    "verified": True,
    "error": 1e-15,
}


@pytest.mark.parametrize("wrong", [{"replayed": False}, {"most": 4}, {"verified": False}], ids=str)
def test_a_result_holds_only_if_every_run_does_and_other_timings_give_other_bits(wrong: dict[str, object]):
    rows = [ROW] * stale_replay.NUM_RUNS
    found = stale_replay.result(rows)
    assert found.holds
    assert found.detail["updates_by_bound_and_staleness"] == {"1": {0: 150, 2: 50}}
    assert not stale_replay.result([*rows[1:], {**ROW, **wrong}]).holds
    assert not stale_replay.result([{**each, "free": True} for each in rows]).holds
