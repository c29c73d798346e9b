"""The list of one device: every block call twice, memory returned, work proportional to samples."""

from collections import Counter
from dataclasses import replace

import pytest

from meshwright.plan.job.job import Job, PrecisionConfig, TrainConfig
from meshwright.plan.model_spec.model_spec import ROOT, ModelSpec, ParamSpec
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import S
from meshwright.plan.step.program import Action
from meshwright.plan.step.simulator import simulate
from meshwright.plan.step.single_device_program import (
    samples_per_microbatch,
    sequential_stage_calls,
    single_device_program,
)
from tests.paper_model import FIRST_ROLE

WEIGHTS = (
    ParamSpec("a.weight", (6,), ("a", "c"), aliases=("c.weight",)),
    ParamSpec("b.weight", (4,), ("b",)),
    ParamSpec("s", (2,), (ROOT,)),
)
MODEL = ModelSpec("model", ("a", "b", "c"), WEIGHTS, (10, 20, 30), (100, 200, 300))


def view_of(model_spec: ModelSpec) -> RankView:
    """The view of a rank that has the whole model."""
    return RankView(ShardingPlan.one_device(Mesh(), model_spec), Mesh().coordinate(0))


def listed(num_micro: int = 2, micro_batch: int = 3, job: Job | None = None) -> tuple[Action, ...]:
    return single_device_program(
        view_of(MODEL),
        job or Job(),
        micro_batch,
        sequential_stage_calls(MODEL.block_calls, num_micro),
    ).actions(FIRST_ROLE)


def held_after(actions: tuple[Action, ...]) -> list[dict[str, int]]:
    """Returns what is held after each action, by name."""
    held: dict[str, int] = {}
    history = []
    for action in actions:
        for name in action.frees:
            del held[name]
        held |= {hold.name: hold.nbytes for hold in action.allocations}
        history.append(dict(held))
    return history


@pytest.mark.parametrize("num_micro", [1, 2, 3])
def test_every_micro_batch_runs_every_block_forward_and_backward(num_micro: int):
    actions = listed(num_micro)
    for microbatch in range(num_micro):
        assert [a.subject for a in actions if a.kind == "F" and a.microbatch == microbatch] == ["a", "b", "c"]
        assert [a.subject for a in actions if a.kind == "B" and a.microbatch == microbatch] == ["c", "b", "a"]
    assert Counter(a.kind for a in actions) == {
        "TOKEN_COUNT": 1,
        "F": 3 * num_micro,
        "LOSS": num_micro,
        "B": 3 * num_micro,
        "LOSS_SUM": 1,
        "CLIP": 1,
        "STEP": 1,
    }


def test_no_action_waits_forever():
    assert len(
        simulate(
            single_device_program(view_of(MODEL), Job(), 1, sequential_stage_calls(MODEL.block_calls, 3))
        )
    ) == len(listed(3))


def test_all_memory_is_returned_and_a_second_micro_batch_needs_no_more():
    assert held_after(listed())[-1] == {}
    peaks = [max(sum(held.values()) for held in held_after(listed(num_micro))) for num_micro in (2, 3)]
    assert peaks[0] == peaks[1]


def test_a_gradient_is_held_from_the_first_backward_that_adds_to_it():
    actions = listed()
    history = held_after(actions)
    first = next(i for i, action in enumerate(actions) if action.kind == "B")
    assert history[first]["gradient(a+c)"] == 6 * 4
    assert history[first][f"gradient({ROOT})"] == 2 * 4
    assert "gradient(b)" not in history[first]
    assert "gradient(b)" in history[first + 1]


def test_activations_are_counted_in_the_dtype_of_compute_and_gradients_in_that_of_parameters():
    taken = {
        h.name: h.nbytes
        for a in listed(1, 3, Job(precision=PrecisionConfig("float32", "bfloat16")))
        for h in a.allocations
    }
    assert taken["output(b, 0)"] == 20 * 3 * 2
    assert taken["gradient(b)"] == 4 * 4


def test_saved_activations_are_held_from_forward_to_backward():
    model = replace(MODEL, saved_numel=(0, 7, 9))
    actions = single_device_program(
        view_of(model), Job(), 2, sequential_stage_calls(model.block_calls, 1)
    ).actions(FIRST_ROLE)
    assert {h.name: h.nbytes for a in actions if a.kind == "F" for h in a.allocations}[
        "saved activations(b, 0)"
    ] == 7 * 2 * 4
    assert held_after(actions)[-1] == {}


def test_backward_costs_twice_its_forward_and_both_grow_with_the_samples():
    flops = {(a.kind, a.subject): a.flops for a in listed(1, 3)}
    assert flops["F", "b"] == 200 * 3
    assert flops["B", "b"] == 2 * flops["F", "b"]


@pytest.mark.parametrize(("num_micro", "rows"), [(1, 12), (3, 4)])
def test_a_micro_batch_has_an_equal_part_of_the_samples_of_a_rank(num_micro: int, rows: int):
    sharding = ShardingPlan.one_device(Mesh(dp_shard=2), MODEL).with_batch_placement("dp_shard", S(0))
    assert samples_per_microbatch(listed(num_micro), sharding, Job(train=TrainConfig(batch=24))) == rows
