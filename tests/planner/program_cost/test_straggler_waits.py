"""Straggler waits at collectives: for the work done since the ranks were last synchronized."""

from collections.abc import Mapping, Sequence

import pytest

from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action, Transfer
from meshwright.planner.program_cost.action_cost import ActionCost, ActionCosts
from meshwright.planner.program_cost.core_contention import SharedCores
from meshwright.planner.program_cost.prediction import predict_step, step_breakdown
from meshwright.planner.program_cost.straggler_waits import with_straggler_waits
from tests.paper_model import program_of
from tests.parallel.tensor.odd_llama import analyzed_llama, planned
from tests.planner.simple_machine import ground

LATE = 0.1
SUM, WITHIN = Transfer("all_reduce", ("dp_shard",), 8), Transfer("all_reduce", ("tp",), 8)


class Priced(ActionCosts):
    """A plan of two copies of two tensor ranks, seen from rank 0, on which an action of each kind computes so
    long.
    """

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self.target, self.seconds = ground(late=LATE), seconds

    def cost(self, action: Action) -> ActionCost:
        return ActionCost(self.seconds.get(action.kind, 0.0))

    def member_ranks(self, transfer: Transfer) -> tuple[int, ...]:
        return {("dp_shard",): (0, 2), ("tp",): (0, 1), ("dp_shard", "tp"): (0, 1, 2, 3)}[transfer.axes]

    def member_axes(self, transfer: Transfer) -> frozenset[str]:
        return frozenset(transfer.axes)


def wait_times(actions: Sequence[Action], seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns how late each of these starts, or what it waits within."""
    found = with_straggler_waits(Priced(seconds), actions)
    return {action.name: found[id(action)].comm_delay_s + found[id(action)].comm_s for action in actions}


def wire(kind: str, subject: str, *waits: str, move: Transfer = SUM) -> Action:
    return Action(kind, subject, stream="comm", waits=waits, transfer=move)


def test_a_sum_of_gradients_waits_for_all_that_was_done_before_it():
    actions = [
        Action("F", "a", 0),
        Action("B", "a", 0),
        wire("REDUCE", "a", "B(a, 0)"),
        Action("STEP", waits=("REDUCE(a)",)),
        wire("GATHER", "a"),
    ]
    found = wait_times(actions, {"F": 2.0, "B": 4.0, "STEP": 1.0})
    assert found["REDUCE(a)"] == pytest.approx(LATE * 6.0)
    assert found["GATHER(a)"] == pytest.approx(LATE * 1.0)  # behind the sum they were level
    assert found["F(a, 0)"] == found["B(a, 0)"] == found["STEP()"] == 0.0


def test_a_prefetched_message_synchronizes_only_up_to_its_start():
    actions = [
        wire("UNSHARD", "a"),
        Action("F", "a", 0, waits=("UNSHARD(a)",)),
        wire("UNSHARD", "b"),
        Action("F", "b", 0),  # nobody waits for it here
        Action("F", "c", 0, waits=("UNSHARD(b)",)),
        wire("UNSHARD", "d"),
    ]
    found = wait_times(actions, {"F": 2.0})
    assert found["UNSHARD(a)"] == 0.0
    assert found["UNSHARD(b)"] == pytest.approx(LATE * 2.0)
    assert found["UNSHARD(d)"] == pytest.approx(LATE * 4.0)


def test_a_block_with_collectives_waits_once_for_each():
    actions = [
        Action("F", "a", 0, inner_transfers=(WITHIN, WITHIN)),
        Action("F", "b", 0, inner_transfers=(WITHIN,)),
    ]
    found = wait_times(actions, {"F": 2.0})
    assert found["F(a, 0)"] == pytest.approx(2 * LATE * 1.0)
    assert found["F(b, 0)"] == pytest.approx(LATE * 2.0)


def test_replicas_do_not_synchronize_at_collectives_of_tensor_parallel_ranks():
    blocks = [Action("F", "a", 0, inner_transfers=(WITHIN,)), Action("B", "a", 0, inner_transfers=(WITHIN,))]
    alone = wait_times([*blocks, wire("REDUCE", "a", "B(a, 0)")], {"F": 2.0, "B": 4.0})
    assert alone["REDUCE(a)"] == pytest.approx(LATE * 6.0)
    norm = wire("GLOBAL_NORM", "", "B(a, 0)", move=Transfer("all_reduce", ("dp_shard", "tp"), 8))
    found = wait_times(
        [*blocks, norm, Action("CLIP", waits=("GLOBAL_NORM()",)), wire("REDUCE", "a")],
        {"F": 2.0, "B": 4.0, "CLIP": 1.0},
    )
    assert found["GLOBAL_NORM()"] == pytest.approx(3 * LATE * 6.0)
    assert found["REDUCE(a)"] == pytest.approx(LATE * 1.0)


def test_ranks_are_synchronized_since_the_oldest_collective_of_the_two_axes():
    norm = wire("GLOBAL_NORM", "", "LOCAL_NORM()", move=Transfer("all_reduce", ("dp_shard", "tp"), 8))
    actions = [
        Action("B", "a", 0, inner_transfers=(WITHIN,)),
        wire("REDUCE", "a", "B(a, 0)"),
        Action("F", "a", 1, inner_transfers=(WITHIN,)),
        Action("LOCAL_NORM", waits=("REDUCE(a)",)),
        norm,
    ]
    found = wait_times(actions, {"B": 4.0, "F": 2.0, "LOCAL_NORM": 1.0})
    assert found["REDUCE(a)"] == pytest.approx(LATE * 4.0)
    assert found["GLOBAL_NORM()"] == pytest.approx(3 * LATE * 3.0)  # not of the whole step again


def test_two_sums_behind_each_other_wait_once_and_one_that_is_hidden_costs_nothing():
    two = [
        Action("B", "a", 0),
        wire("REDUCE", "a", "B(a, 0)"),
        wire("LOSS_SUM", ""),
        Action("STEP", waits=("REDUCE(a)", "LOSS_SUM()")),
    ]
    costs = with_straggler_waits(Priced({"B": 4.0, "STEP": 1.0}), two)
    assert step_breakdown(program_of({"pp0": two}), costs)[0] == pytest.approx(4.0 + LATE * 4.0 + 1.0)
    hidden = [
        Action("B", "a", 0),
        wire("REDUCE", "a", "B(a, 0)"),
        Action("B", "b", 0),
        Action("STEP", waits=("REDUCE(a)",)),
    ]
    costs = with_straggler_waits(Priced({"B": 4.0, "STEP": 1.0}), hidden)
    for cores in (None, SharedCores(2, {"pp0": 2})):
        assert step_breakdown(program_of({"pp0": hidden}), costs, cores)[0] == pytest.approx(9.0)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp_shard=3), Mesh(tp=2), Mesh(cp=2)], ids=str)
def test_uneven_devices_take_longer_where_they_meet_and_one_alone_does_not(mesh: Mesh):
    _, plan = planned(analyzed_llama(), mesh, samples=6)
    even, uneven = (
        predict_step(plan, ground(flops=1e9, moved=1e9, late=late)).step_s for late in (0.0, LATE)
    )
    most = (mesh.world_size - 1) * LATE
    assert (
        uneven == even
        if mesh.world_size == 1
        else (1 + 0.5 * most) * even < uneven < (1 + 1.01 * most) * even
    )
