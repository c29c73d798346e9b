"""The benchmark without a limit: the bits are equal; and what its bars refuse."""

from dataclasses import replace
from pathlib import Path

from benchmarks.memory import bounded_host
from benchmarks.memory.bounded_host import Figures

TINY = 16, 20, 2
GOOD = Figures(
    parameters=100,
    states=1_200,
    host=300,
    device=400,
    limit=770,
    peak=700,
    page_cache=(0, 1 << 20),
    ended=True,
    same_bits=True,
    offload_is_killed=True,
)


def test_all_runs_end_with_the_same_bits(tmp_path: Path):
    runs = [bounded_host.trained(kind, TINY, str(tmp_path), 0) for kind in ("disk", "host", "memory")]
    assert len({run.digest for run in runs}) == 1
    assert runs[0].cached == (0,) * bounded_host.STEPS


def test_every_bar_counts():
    assert GOOD.holds
    worse = {"page_cache": (0, (1 << 20) + 1), "host": 301, **dict.fromkeys(("ended", "same_bits"), False)}
    for name, value in {**worse, "offload_is_killed": False}.items():
        assert not replace(GOOD, **{name: value}).holds, name
