"""Measured activation memory is divided among ranks as elements are; scratch is counted beside new
gradients.
"""

from dataclasses import replace
from fractions import Fraction

import pytest

import meshwright as mw
from meshwright.plan.job.job import Job
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.model_spec.model_spec import ModelSpec, ParamSpec
from meshwright.plan.model_spec.op_sizes_and_memory import BlockMemory, LinearInSamples, ModelMemory
from meshwright.plan.model_spec.param_dim_split import DimSplit
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.param_sharding import ParamSharding
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import Layout, S
from meshwright.plan.step.memory.block_call_memory import (
    ActivationMemory,
    activation_memory,
    block_memories,
)
from meshwright.plan.step.memory.memory_names import SCRATCH
from meshwright.plan.step.single_device_program import sequential_stage_calls, single_device_program
from tests.nn.test_mixture_of_experts import analyzed_decoder
from tests.parallel.expert.mixture_model import sgd_job

BODY, HEAD = ParamSpec("body.weight", (3, 2), ("body",)), ParamSpec("head.weight", (5, 2), ("head",))
PLAIN = ModelSpec(
    "model", ("body", "head"), (BODY, HEAD), (20, 8), (50, 80), saved_numel=(25, 4), loss_saved_numel=8
)
LOADS = (
    BlockMemory(
        "body",
        LinearInSamples(0, 80),
        LinearInSamples(12, 100),
        LinearInSamples(0, 200),
        LinearInSamples(0, 210),
    ),
    BlockMemory(
        "head", LinearInSamples(0, 32), LinearInSamples(0, 16), LinearInSamples(0, 0), LinearInSamples(0, 0)
    ),
)
WEIGHED = replace(PLAIN, memory=ModelMemory(LOADS, glue=LinearInSamples(7, 1), loss=LinearInSamples(0, 64)))


def view_of(model_spec: ModelSpec) -> RankView:
    """The view of a rank that has the whole model."""
    return RankView(ShardingPlan.one_device(Mesh(), model_spec), Mesh().coordinate(0))


def test_fixed_and_per_sample_bytes_add_up_and_never_go_below_zero():
    line = LinearInSamples(10, 10)
    assert (
        line.total(1),
        line.total(10),
        (line + line).total(1),
        (line - LinearInSamples(3, 1)).total(2),
    ) == (20, 110, 40, 25)
    assert LinearInSamples(-5, 1).total(2) == 0


def test_without_measurements_memory_is_elements_in_the_compute_dtype():
    found = activation_memory(view_of(PLAIN), Job(precision=PrecisionConfig("float32", "bfloat16")), 3)
    assert found == {
        "body": ActivationMemory(20 * 3 * 2, 25 * 3 * 2),
        "head": ActivationMemory(8 * 3 * 2, 4 * 3 * 2),
    }


def test_measured_memory_is_used_and_glue_lasts_from_the_first_block_call_to_its_backward():
    found = activation_memory(view_of(WEIGHED), Job(), 3)
    assert found == {"body": ActivationMemory(240 + 10, 312, 600, 630), "head": ActivationMemory(96, 48)}


@pytest.mark.parametrize(
    ("added", "new", "scratch"),
    [(0, 0, 600), (700, 0, 700), (0, 24, 606), (0, 1000, 0), (50, 1000, 50)],
    ids=[
        "nothing",
        "a larger gradient is added",
        "gradients are made",
        "as many as there is room",
        "and one is added",
    ],
)
def test_backward_scratch_is_the_measured_memory_minus_the_gradients_it_leaves(
    added: int, new: int, scratch: int
):
    assert (
        ActivationMemory(0, 0, backward_nbytes=600, backward_with_grads_nbytes=630).scratch_nbytes(added, new)
        == scratch
    )


def test_tensors_of_weight_size_are_sharded_like_the_weights():
    head = replace(HEAD, dim_splits=(DimSplit(0, 5, (5,)),))
    load = BlockMemory(
        "head",
        LinearInSamples(0, 32),
        LinearInSamples(0, 16, 40),
        LinearInSamples(0, 4, 40),
        LinearInSamples(1, 4, 80),
    )
    known = replace(
        WEIGHED,
        params=(BODY, head),
        memory=ModelMemory((LOADS[0], load), LinearInSamples(), LinearInSamples()),
    )
    sharding = ShardingPlan(
        Mesh(tp=2), known, (ParamSharding(BODY), ParamSharding(head, Layout.from_dict({"tp": S(0)})))
    )
    first, second = (
        activation_memory(RankView(sharding, sharding.mesh.coordinate(rank)), Job(), 3) for rank in (0, 1)
    )
    assert first["body"] == second["body"] == ActivationMemory(240, 312, 600, 630)
    assert first["head"] == ActivationMemory(96, 48 + 24, 12 + 24, 13 + 48)  # three of five words
    assert second["head"] == ActivationMemory(96, 48 + 16, 12 + 16, 13 + 32)


def test_the_program_holds_the_measured_memory():
    actions = single_device_program(
        view_of(WEIGHED), Job(), 2, sequential_stage_calls(WEIGHED.block_calls, 2)
    ).actions("pp0")
    held = {action.name: {hold.name: hold.nbytes for hold in action.allocations} for action in actions}
    assert held["F(body, 0)"] == {"output(body, 0)": 160 + 9, "saved activations(body, 0)": 212}
    assert held["LOSS(0)"][SCRATCH] == 128
    assert held["B(body, 0)"][SCRATCH] == 420 - 6 * 4
    assert held["B(body, 1)"][SCRATCH] == 400


@pytest.mark.parametrize(("routing", "rows"), [("top-k", Fraction(1, 3)), ("expert choice", Fraction(2, 3))])
def test_experts_that_choose_tokens_save_a_row_for_each_choice_that_a_rank_may_have(
    routing: str, rows: Fraction
):
    strategies = mw.RingAttention(), mw.DDP("cp")  # 6 tokens: 2 of them with 4 experts each, of 12 choices
    plan = mw.make_plan(analyzed_decoder(routing), sgd_job(), mw.Mesh(cp=3), strategies, 4)
    view, block_call = plan.rank_view(0), "layers.1"
    measured = block_memories(view.model_spec)[block_call]
    around, whole = measured.around_experts, Fraction(1)
    assert around is not None
    rest = measured.saved_activations - around.saved_by_experts
    expected = rest.local_total(4, Fraction(1, 3), whole)
    expected += around.saved_by_experts.local_total(4, rows, whole)
    found = activation_memory(view, plan.job, 4)[block_call].saved_nbytes
    assert found == pytest.approx(expected, rel=1e-3)  # elements are whole
