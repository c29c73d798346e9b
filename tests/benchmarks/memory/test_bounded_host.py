"""The benchmark without a limit: the bits are equal; and what its bars refuse."""

from pathlib import Path

from benchmarks.memory import bounded_host

TINY = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
GOOD = {
    "page_cache": [0, 1 << 20],
    "ratio": 4.0,
    **dict.fromkeys(("ended", "same_bits", "offload_is_killed"), True),
}


def test_all_runs_end_with_the_same_bits(tmp_path: Path):
    runs = [bounded_host.trained(kind, TINY, str(tmp_path), 0) for kind in ("disk", "host", "memory")]
    assert len({run.digest for run in runs}) == 1
    assert runs[0].cached == (0,) * bounded_host.STEPS


def test_every_bar_counts():
    assert bounded_host.holds(GOOD)
    worse = {"page_cache": [(1 << 20) + 1], "ratio": 3.9, "ended": False, "same_bits": False}
    worse["offload_is_killed"] = False
    for name, value in worse.items():
        assert not bounded_host.holds({**GOOD, name: value}), name
