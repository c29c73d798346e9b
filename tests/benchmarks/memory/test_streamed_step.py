"""The reads and writes of `streamed_step` are those of the plan, and the ideal is the longer part."""

from benchmarks.harness.interleaved_timing import Cost, Rounds
from benchmarks.memory import streamed_step
from benchmarks.memory.bounded_host import batch_of, llama
from benchmarks.memory.streamed_step import FOLDER, NUM_BUFFERS, SIZES, ideals, plan_of, transfers_of
from meshwright.api import analyze
from meshwright.planner.program_cost.rank_memory import state_bytes


def test_every_record_is_read_and_written_once():
    plan = plan_of(analyze(lambda: llama(SIZES["small"]), batch_of(0)), FOLDER)
    transfers = transfers_of(plan)
    for writes in (False, True):
        places = sorted((each.begin, each.nbytes) for each in transfers if each.writes is writes)
        ends = [begin + nbytes for begin, nbytes in places]
        assert [begin for begin, _ in places] == [0, *ends[:-1]]
        assert ends[-1] == state_bytes(plan, 0, "disk").total
    assert {each.number for each in transfers} == set(range(NUM_BUFFERS))


def test_the_ideal_is_the_longer_part():
    cost = {"in memory": Cost(0, 0.3), "disk alone": Cost(0, 0.25), "streamed": Cost(0, 0.5, (0.125,))}
    rounds = Rounds((cost, cost | {"in memory": Cost(0, 0.5)}), 0, 1.0)
    assert ideals(rounds) == [0.375, 0.5]


def test_a_step_on_disk_notes_what_comes_before_its_reads():
    rounds, _ = streamed_step.measured("small", streamed_step.QUICK)
    assert all(
        0 < before < costs["streamed"].wall_s for costs in rounds.clean for before in costs["streamed"].notes
    )
    assert len(ideals(rounds)) == len(rounds.clean)
