"""The plan's peak is what ranks hold at their fullest moment, every tensor counted: also where matrices are divided."""

from dataclasses import replace

import pytest

from benchmarks.peak import PeakLive
from meshwright.api import build, make_plan
from meshwright.comm.group import World
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.model.reading import Reading
from meshwright.planner.memory import peak_bytes
from meshwright.testing.spawn import on_threads
from tests.strategies.tensor.llama import batches, llama, planned

WORDS = {"vocab_size": 1999, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
DEEP = {"num_hidden_layers": 7, "intermediate_size": 301, "tie_word_embeddings": True}
ALLOWED = 0.05


def measured(reading: Reading, plan: Plan, rows: int) -> list[int]:
    """The most bytes that each rank holds in a third step; moments are made in the first."""

    def on_rank(world: World) -> int:
        with build(reading, plan, world=world) as engine:
            module = engine.player.state.subject.module
            with PeakLive([*module.parameters(), *module.buffers()]) as live:
                for batch in batches(3, rows):
                    live.again()
                    engine.step(engine.share(batch))
            return live.peak

    return on_threads(on_rank, plan.mesh)


@pytest.mark.parametrize(
    ("mesh", "micro", "sizes"),
    [(Mesh(tp=2), 0, WORDS), (Mesh(tp=2), 4, WORDS), (Mesh(tp=3), 0, DEEP), (Mesh(), 4, DEEP)],
    ids=["words", "words, micro-batches", "layers", "one device"],
)
def test_the_fullest_moment_is_the_plans(mesh: Mesh, micro: int, sizes: dict[str, int]):
    reading, plan = planned(llama(**sizes), mesh, micro=micro, rows=8)
    for rank, peak in enumerate(measured(reading, plan, 8)):
        assert peak_bytes(plan, rank) == pytest.approx(peak, rel=ALLOWED), rank


def test_blocks_taken_for_whole_would_be_noticed():
    reading, plan = planned(llama(**DEEP), Mesh(tp=2), rows=8)
    calls = tuple(replace(call, inside=0) for call in reading.anatomy.calls)
    whole = make_plan(replace(reading, anatomy=replace(reading.anatomy, calls=calls)), plan.job, plan.mesh)
    assert peak_bytes(whole, 0) > (1 + 2 * ALLOWED) * peak_bytes(plan, 0)
