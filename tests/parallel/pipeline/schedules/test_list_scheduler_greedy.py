"""Orders made by the clock are whole, keep to the limits and cannot get stuck, whatever the rule."""

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.parallel.pipeline.schedules import one_f_one_b
from meshwright.parallel.pipeline.schedules.list_scheduler import Rule, fits, greedy, longest
from meshwright.parallel.pipeline.schedules.schedule import Costs, Stage, play
from meshwright.parallel.pipeline.schedules.zb_v import folded
from tests.parallel.pipeline.schedules.schedule_laws import hold, unlike

RULES = st.builds(
    Rule,
    st.sampled_from(["IFW", "IWF", "FIW", "FWI", "WIF", "WFI"]),
    st.sampled_from([0.3, 0.5, 1.0, 2.0, inf]),
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    st.booleans(),
)


def line(ranks: int) -> list[Stage]:
    return [Stage(rank, rank) for rank in range(ranks)]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rule=RULES, ranks=st.integers(1, 5), chunks=st.integers(1, 3), micros=st.integers(1, 9))
def test_no_order_is_stuck_and_none_holds_more_than_its_limit(
    data: st.DataObject, rule: Rule, ranks: int, chunks: int, micros: int
):
    stages = [Stage(part % ranks, part) for part in range(ranks * chunks)]
    if chunks == 2 and data.draw(st.booleans()):
        stages = list(folded(ranks))
    costs = data.draw(unlike(len(stages)))
    least = [sum(costs.held[stage.part] for stage in stages if stage.rank == rank) for rank in range(ranks)]
    limits = [each + data.draw(st.integers(0, 20)) for each in least]
    assert fits(hold(greedy(stages, micros, costs, rule, limits), costs), limits)


def test_gradients_first_and_one_forward_ahead_per_part_is_as_short_as_1f1b():
    costs = Costs.equal(4, 2, 2, 2)
    made = play(greedy(line(4), 9, costs, Rule("FIW", 1.0)), costs)
    assert longest(made) <= longest(play(one_f_one_b.order(4, 9), costs))
    assert [made.order.slots[3][at].kind for at in range(4)] == ["F", "I", "F", "I"]


def test_patience_waits_for_a_gradient_that_comes_in_a_moment():
    costs = Costs([4, 4], [5, 5], [4, 4])  # the first gradient comes at 13; after three forwards it is 12
    made = {patience: greedy(line(2), 4, costs, Rule("IFW", inf, patience)).slots[0] for patience in (0.0, 1.0)}
    assert [slot.kind for slot in made[0.0]][:4] == ["F", "F", "F", "F"]
    assert [slot.kind for slot in made[1.0]][:4] == ["F", "F", "F", "I"]
