"""Which gradients are summed as codes, what is refused, and what a plan says about them."""

import pytest
import torch

import meshwright as mw
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.parallel.compression.codecs.powersgd import PowerSGDCompression
from meshwright.parallel.compression.gradient_compression import GradientCompression
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import LossGuard
from meshwright.plan.step.memory.memory_names import are_new_states
from meshwright.verifier.messages import planned_messages
from tests.parallel.compression.coded_plans import ANALYZED, DDP3, check_plan, coded_plan
from tests.parallel.tensor.even_llama import analyzed_even_llama
from tests.parallel.tensor.odd_llama import batches
from tests.tiny_model import case_of, tiny_job, verdict_of


def coded_params(plan: mw.Plan) -> set[str]:
    return {
        name for a in plan.for_rank(0).actions for name in a.tensors if a.transfer and a.transfer.carried_by
    }


def test_parameters_are_chosen_by_pattern_and_size():
    names = {param.name for param in ANALYZED.model_spec.trainable}
    assert coded_params(coded_plan(Int8Compression())) == names
    assert coded_params(coded_plan(Int8Compression(params=("layers.*",)))) == {
        name for name in names if name.startswith("layers.")
    }
    large = coded_params(coded_plan(Int8Compression(min_numel=30)))
    assert large == {param.name for param in ANALYZED.model_spec.trainable if param.numel >= 30}


def test_the_first_steps_are_exact():
    plan = coded_plan(Int8Compression(exact_steps=2)).for_rank(0)
    dtypes = [
        {each.dtype for each in planned_messages(plan, step=step) if each.action.startswith("REDUCE")}
        for step in range(3)
    ]
    assert dtypes == [{"float64"}, {"float64"}, {"uint8"}]
    check_plan(Int8Compression(exact_steps=1), "zero 2")


@pytest.mark.parametrize(
    ("codec", "told"),
    [
        (Int8Compression(params=("laiers.*",)), "'laiers.*' matches no parameter"),
        (Int8Compression(axis="dp_shard"), "no gradient is summed along dp_shard"),
        (Int8Compression(min_numel=10**6), "no gradient that is summed along dp_replicate is chosen"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_with_a_repair(codec: Int8Compression, told: str):
    strategies, mesh = DDP3
    with pytest.raises(PlanError) as refused:
        mw.make_plan(ANALYZED, tiny_job(), mesh, (*strategies, codec))
    assert told in str(refused.value)
    assert all(each.fix for each in refused.value.diagnostics)


def test_sums_on_one_rank_are_refused():
    strategies = mw.BatchSplit(), mw.DataParallelMaster(), Int8Compression()
    with pytest.raises(PlanError, match='use the strategy "ddp"'):
        mw.make_plan(ANALYZED, tiny_job(), mw.Mesh(dp_replicate=3), strategies)


def test_two_codecs_are_refused_on_one_axis_and_on_two():
    split = mw.BatchSplit(), mw.BatchSplit("dp_shard"), mw.ZeRO(replicate_axis="dp_replicate")
    for others in (("", ""), ("dp_replicate", "dp_shard")):
        codecs = (
            mw.Int8Compression(axis) if i else mw.SignCompression(axis) for i, axis in enumerate(others)
        )
        with pytest.raises(PlanError, match=r"compress is listed twice, with other options(?s:.*)keep one"):
            mw.make_plan(ANALYZED, tiny_job(), mw.Mesh(dp_replicate=2, dp_shard=2), (*split, *codecs))


def test_a_codec_goes_with_offload():
    strategies, mesh = DDP3
    plan = mw.make_plan(ANALYZED, tiny_job(), mesh, (*strategies, mw.Offload(), Int8Compression()))
    assert coded_params(plan) == {param.name for param in ANALYZED.model_spec.trainable}


def test_one_rank_has_nothing_to_code():
    plan = mw.make_plan(ANALYZED, tiny_job(), mw.Mesh(), (mw.DDP(), mw.BatchSplit(), Int8Compression()))
    assert coded_params(plan) == set()


def test_residuals_are_in_the_plan_and_twice_where_a_step_may_be_left_out():
    numel = sum(param.numel for param in ANALYZED.model_spec.trainable)
    plan = coded_plan(Int8Compression()).for_rank(0)
    (specs,) = plan.states.values()
    assert {spec.param for spec in specs} == {param.name for param in ANALYZED.model_spec.trainable}
    pending = [a for each in plan.actions for a in each.allocations if are_new_states(a.name)]
    assert pending == []
    guarded = coded_plan(Int8Compression(), guard=LossGuard("skip")).for_rank(0)
    pending = [a for each in guarded.actions for a in each.allocations if are_new_states(a.name)]
    assert sum(each.nbytes for each in pending) == 8 * numel
    assert torch.float64.itemsize == 8


@pytest.mark.parametrize("codec", [Int8Compression, PowerSGDCompression])
def test_what_a_rank_has_of_a_parameter_may_be_smaller_than_min_numel(codec: type[GradientCompression]):
    analyzed = analyzed_even_llama()
    largest = max(each.numel for each in analyzed.model_spec.params)
    strategies = mw.TensorParallel(), mw.BatchSplit(), mw.DDP(), codec(min_numel=largest)
    plan = mw.make_plan(analyzed, tiny_job(), mw.Mesh(dp_replicate=2, tp=2), strategies)
    for rank in range(plan.mesh.world_size):
        view = plan.rank_view(rank)
        coded = {each.param.name: each.param.numel for each in view.param_shardings if each.is_compressed}
        states = plan.for_rank(rank).states["compress"]
        owed = {spec.param for spec in states if spec.name == "residual"}
        assert owed == set(coded)
        assert min(coded.values()) < largest, "the slice of a rank is smaller"
    verdict = verdict_of(case_of(analyzed, plan, batches(1, plan.job.train.batch)[0]), steps=2)
    assert verdict.passed, verdict
