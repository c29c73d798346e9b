"""Orders made by the clock are whole, keep to the limits and cannot get stuck, whatever the rule."""

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.parallel.pipeline.schedules import one_f_one_b
from meshwright.parallel.pipeline.schedules.list_scheduler import (
    PriorityRule,
    fits_memory,
    greedy_schedule,
    longest_rank_time,
)
from meshwright.parallel.pipeline.schedules.schedule import StageCosts, VirtualStage, simulate
from meshwright.parallel.pipeline.schedules.zb_v import v_shaped_placement
from tests.parallel.pipeline.schedules.schedule_laws import hold, unlike

RULES = st.builds(
    PriorityRule,
    st.sampled_from(["IFW", "IWF", "FIW", "FWI", "WIF", "WFI"]),
    st.sampled_from([0.3, 0.5, 1.0, 2.0, inf]),
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    st.booleans(),
)


def line(ranks: int) -> list[VirtualStage]:
    return [VirtualStage(rank, rank) for rank in range(ranks)]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), rule=RULES, ranks=st.integers(1, 5), chunks=st.integers(1, 3), micros=st.integers(1, 9)
)
def test_no_order_is_stuck_and_none_holds_more_than_its_limit(
    data: st.DataObject, rule: PriorityRule, ranks: int, chunks: int, micros: int
):
    stages = [VirtualStage(part % ranks, part) for part in range(ranks * chunks)]
    if chunks == 2 and data.draw(st.booleans()):
        stages = list(v_shaped_placement(ranks))
    costs = data.draw(unlike(len(stages)))
    least = [
        sum(costs.activation_memory[stage.stage] for stage in stages if stage.pp_rank == rank)
        for rank in range(ranks)
    ]
    limits = [each + data.draw(st.integers(0, 20)) for each in least]
    assert fits_memory(hold(greedy_schedule(stages, micros, costs, rule, limits), costs), limits)


def test_gradients_first_and_one_forward_ahead_per_part_is_as_short_as_1f1b():
    costs = StageCosts.uniform(4, 2, 2, 2)
    made = simulate(greedy_schedule(line(4), 9, costs, PriorityRule("FIW", 1.0)), costs)
    assert longest_rank_time(made) <= longest_rank_time(
        simulate(one_f_one_b.one_f_one_b_schedule(4, 9), costs)
    )
    assert [made.schedule.actions[3][at].kind for at in range(4)] == ["F", "I", "F", "I"]


def test_patience_waits_for_a_gradient_that_comes_in_a_moment():
    costs = StageCosts(
        [4, 4], [5, 5], [4, 4]
    )  # the first gradient comes at 13; after three forwards it is 12
    made = {
        patience: greedy_schedule(line(2), 4, costs, PriorityRule("IFW", inf, patience)).actions[0]
        for patience in (0.0, 1.0)
    }
    assert [slot.kind for slot in made[0.0]][:4] == ["F", "F", "F", "F"]
    assert [slot.kind for slot in made[1.0]][:4] == ["F", "F", "F", "I"]
