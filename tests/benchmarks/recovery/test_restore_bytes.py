"""A few plans, saved and loaded under each other; a read of more than what is kept fails the claim."""

import pytest

from benchmarks.recovery import restore_bytes
from meshwright.engine.params.tensor_parallel_slices import ParamSlices


def test_ranks_read_what_they_keep():
    found = restore_bytes.result(list(restore_bytes.compare(("ZeRO 3 on 3", "TP x ZeRO 3 on 2 x 2"))))
    assert found.holds is True
    assert found.median == 2 * 2 * 2
    for row in found.detail["cases"]:
        assert max(row["read"]) < 0.6 * row["checkpoint"]


def test_a_rank_that_reads_whole_tensors_fails_the_claim(monkeypatch: pytest.MonkeyPatch):
    def read_whole(slices, name, full_values, entry, begin, end):
        return slices.local_slice(name, full_values[entry]).reshape(-1)[begin:end]

    monkeypatch.setattr(ParamSlices, "read_shard", read_whole)
    rows = list(restore_bytes.compare(("ZeRO 3 on 3",)))
    assert restore_bytes.result(rows).holds is False
    assert min(float(row["off"]) for row in rows) > 0.5
