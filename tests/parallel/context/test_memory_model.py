"""The planned memory under context parallelism equals the measured one: ring, Ulysses and hybrid."""

import pytest

from benchmarks.context_parallel.context_memory import OFF, Case, measure_peak
from meshwright.parallel.context import memory_model, ring
from meshwright.parallel.context.memory_model import AttentionMemory, exchange_memory
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.model_spec.sequence_info import AttentionSpec
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sequence_sharding import SequenceSharding
from meshwright.plan.step.program import Action, Program, Transfer
from meshwright.planner.program_cost.rank_memory import peak_nbytes
from meshwright.testing.ranks import ProcessPool
from tests.parallel.context.attention_answers import sharding_of

NUM_SAMPLES, LENGTH, WIDTH = 2, 24, 8
JOB = Job(ModelConfig("tiny"), DataConfig("random", sequence=LENGTH), TrainConfig(batch=NUM_SAMPLES))


@pytest.mark.parametrize(
    ("heads", "groups", "sent"), [(4, 4, 4), (4, 2, 4), (8, 4, 4), (12, 6, 12), (12, 3, 12)]
)
def test_heads_that_several_ranks_need_are_counted_on_each(heads: int, groups: int, sent: int):
    attend = AttentionSpec("body", heads, groups, WIDTH, WIDTH, LENGTH, LENGTH)
    found = exchange_memory(
        RankView(sharding_of(Mesh(cp=4), [attend]), Mesh(cp=4).coordinate(0)),
        JOB,
        SequenceSharding(4, num_inner_ranks=4, zigzag=False),
        attend,
        NUM_SAMPLES,
    )
    own = NUM_SAMPLES * LENGTH // 4 * WIDTH * 4
    assert found == AttentionMemory(2 * own * (sent - groups) + own * heads, 2 * own * (sent - groups))


def test_without_an_exchange_no_memory_is_added():
    attend = AttentionSpec("body", 4, 2, WIDTH, WIDTH, LENGTH, LENGTH)
    view = RankView(sharding_of(Mesh(cp=4), [attend]), Mesh(cp=4).coordinate(0))
    assert exchange_memory(view, JOB, SequenceSharding(4), attend, NUM_SAMPLES) == AttentionMemory()


def planned_excess(pool: ProcessPool, how: str) -> list[float]:
    """Returns how much more than planned lived on each rank, as a share."""
    case = Case(1024, how, 0)
    plan, seen = case.plan(), pool.run(measure_peak, case.mesh, case, timeout_s=120)
    return [found.step / peak_nbytes(plan, rank) - 1 for rank, found in enumerate(seen) if found is not None]


@pytest.mark.parametrize("how", ["ring", "ulysses", "hybrid"])
def test_live_memory_equals_the_planned_memory(process_pool: ProcessPool, how: str):
    found = planned_excess(process_pool, how)
    assert len(found) == 4
    assert max(map(abs, found)) <= OFF


def test_messages_that_are_counted_at_the_wrong_moment_are_noticed(monkeypatch: pytest.MonkeyPatch):
    """The planted bug: what travels is put on top of the fullest moment, whenever that is."""
    case = Case(1024, "ring", 0)
    right = peak_nbytes(case.plan(), 0)

    def always(program: Program, *given: object, **said: object) -> Program:
        def more(action: Action) -> Action:
            return memory_model.with_extra_memory(
                action, memory_model.SCRATCH, ring.in_flight_nbytes(4, action) if action.kind == "B" else 0
            )

        return program.edit(lambda actions: [more(action) for action in actions])

    monkeypatch.setattr(ring, "add_attention_memory", always)
    assert peak_nbytes(case.plan(), 0) > (1 + OFF) * right


def test_a_ring_holds_two_messages_of_keys_and_up_to_four_of_gradients():
    keys, gradients = Transfer("shift", ("cp",), 100), Transfer("shift", ("cp",), 200)
    action = Action("B", "body", 0, inner_transfers=(keys, gradients))
    assert [ring.in_flight_nbytes(ranks, action) for ranks in (2, 3, 8)] == [200 + 600, 200 + 800, 200 + 800]
    assert ring.in_flight_nbytes(4, Action("B", "body", 0)) == 0
