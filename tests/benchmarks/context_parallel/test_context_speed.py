"""Both sides of the speed benchmark run attention on the same tokens."""

from benchmarks.context_parallel.context_speed import TECHNIQUES, context_parallel_step, one_process_step
from benchmarks.harness.rank_processes import Ranks
from benchmarks.models.llama_steps import fresh_store


def test_one_process_and_ring_step() -> None:
    with (
        Ranks("one", one_process_step, 1, tokens=64, threads=2) as one_process,
        Ranks("ring", context_parallel_step, 2, tokens=64, technique="ring", store=fresh_store()) as ring,
    ):
        assert len(one_process.step().notes) == 1
        assert len(ring.step().notes) == 2


def test_techniques_are_timed_on_two_and_four_processes() -> None:
    assert {technique: sizes for technique, (_, sizes) in TECHNIQUES.items()} == {
        "ring": (2, 4),
        "ulysses": (2, 4),
        "hybrid": (4,),
    }
