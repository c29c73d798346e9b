"""Both sides of the speed benchmark attend to the same tokens."""

from benchmarks.context_parallel.context_speed import HOW, dealt, one
from benchmarks.harness.rank_processes import Ranks
from benchmarks.models.llama_steps import fresh_store


def test_both_sides_step() -> None:
    with (
        Ranks("one", one, 1, tokens=64, threads=2) as alone,
        Ranks("ring", dealt, 2, tokens=64, how="ring", store=fresh_store()) as ring,
    ):
        assert len(alone.step().notes) == 1
        assert len(ring.step().notes) == 2


def test_techniques_are_timed_on_two_and_four_processes() -> None:
    assert {how: sizes for how, (_, sizes) in HOW.items()} == {
        "ring": (2, 4),
        "ulysses": (2, 4),
        "hybrid": (4,),
    }
