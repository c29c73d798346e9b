"""expert_tensor_parallel: slices of experts equal one device, and are summed as the law says."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.plan.job.errors import PlanError
from meshwright.testing.ranks import run_on_threads
from tests.parallel.checkpoint_crossing import loads_under_other_plan
from tests.parallel.expert.mixture_model import (
    TOKENS,
    analyzed_gpt_oss,
    analyzed_mixtral,
    assert_equals_one_device,
    batch_of,
    expert_strategies,
    sgd_job,
)
from tests.tiny_model import analyzed_model

BATCHES = [batch_of(12), batch_of(12, 1)]
SLICED, TENSOR = mw.ExpertTensorParallel(), mw.TensorParallel()
PLANS = {
    "tp 3": (mw.Mesh(tp=3), (SLICED,), 0),
    "tp 2, with tensor_parallel, 3 microbatches": (mw.Mesh(tp=2), (TENSOR, SLICED), 4),
    "ep 2, tp 3": (mw.Mesh(ep=2, tp=3), expert_strategies(SLICED), 3),
    "ep 3, tp 2, written first": (mw.Mesh(ep=3, tp=2), (SLICED, *expert_strategies(TENSOR)), 0),
    "zb_v, zero 1, recomputed": (
        mw.Mesh(pp=2, ep=2, tp=2),
        expert_strategies(
            SLICED, mw.ZeRO(stage=1), mw.ActivationCheckpointing(), mw.Pipeline(schedule="zb_v")
        ),
        2,
    ),
    "cp": (mw.Mesh(cp=3, tp=2), (SLICED, mw.RingAttention(), mw.DDP(axis="cp")), 0),
}


@pytest.mark.parametrize("name", PLANS)
def test_it_equals_one_device(name: str):
    assert_equals_one_device(*PLANS[name])


@pytest.mark.parametrize("mesh", [mw.Mesh(tp=3), mw.Mesh(ep=3, tp=2)], ids=str)
def test_biases_are_counted_once_and_pairs_stay_together(mesh: mw.Mesh):
    strategies = expert_strategies(SLICED) if mesh.ep > 1 else (SLICED,)
    plan = mw.make_plan(analyzed_gpt_oss(), sgd_job(), mesh, strategies)
    verdict = mw.verify(analyzed_gpt_oss(), plan, BATCHES)
    assert verdict.passed, str(verdict)


def step_of(world: World, plan: mw.Plan) -> tuple[dict[str, tuple[int, ...]], Counter[tuple[str, str]]]:
    """The shapes of a rank's experts, and the bytes that it sends along tp by kind of action and dtype."""
    with mw.parallelize(analyzed_gpt_oss(), plan, world=world) as trainer:
        world.ledger.is_recording = True
        trainer.step(trainer.local_batch(BATCHES[0]))
        parameters = trainer.executor.state.trained_module.parameters
        shapes = {
            name.rpartition(".")[2]: tuple(each.shape)
            for name, each in parameters.items()
            if "0.mlp.e" in name
        }
        sent = Counter[tuple[str, str]]()
        for entry in world.ledger.entries:
            if entry.axes == ("tp",) and entry.action[0] in "FB":
                sent[entry.action[0], entry.collective] += int(entry.sent_nbytes)
        return shapes, sent


def test_ranks_have_slices_and_send_what_the_law_says():
    plan = mw.make_plan(analyzed_gpt_oss(), sgd_job(), mw.Mesh(ep=2, tp=2), expert_strategies(SLICED))
    found = run_on_threads(lambda world: step_of(world, plan), plan.mesh)
    rows, layers = 6 * TOKENS, 2
    for rank, (shapes, sent) in enumerate(found):
        experts, features = 3 - rank // 2, (8, 4)[rank % 2]
        assert shapes == {
            "gate_up_proj": (experts, 16, 2 * features),
            "gate_up_proj_bias": (experts, 2 * features),
            "down_proj": (experts, features, 16),
            "down_proj_bias": (experts, 8),
        }
        assert sent == {
            ("F", "all_reduce"): layers * rows * 16 * 4,
            ("B", "all_reduce"): layers * rows * (16 * 4 + 2 * 4),
        }


def test_the_operations_of_a_rank_are_those_of_its_slices():
    analyzed = analyzed_mixtral()
    whole, sliced = (
        mw.make_plan(analyzed, sgd_job(), mw.Mesh(tp=2), strategies).for_rank(0).view.work_share.block_shares
        for strategies in ((TENSOR,), (TENSOR, SLICED))
    )
    per_feature = 2 * 2 * TOKENS * 3 * 16
    for block_call in ("model.layers.0", "model.layers.1"):
        assert whole[block_call].flops - sliced[block_call].flops == per_feature * (12 - 8)


@pytest.mark.parametrize("mesh", [mw.Mesh(tp=2), mw.Mesh(ep=2, tp=3)], ids=str)
def test_a_trace_on_fake_tensors_issues_what_the_plan_states(mesh: mw.Mesh):
    strategies = expert_strategies(SLICED) if mesh.ep > 1 else (SLICED,)
    plan = mw.make_plan(analyzed_gpt_oss(), sgd_job(), mesh, strategies)
    assert mw.trace(analyzed_gpt_oss(), plan).passed
    program = plan.program.edit(
        lambda actions: [replace(action, inner_transfers=action.inner_transfers[1:]) for action in actions]
    )
    assert not mw.trace(analyzed_gpt_oss(), replace(plan, program=program)).passed


def test_a_checkpoint_is_loaded_on_other_ranks(tmp_path: Path):
    job = mw.Job(train=mw.TrainConfig(steps=4, batch=12))
    saved = mw.make_plan(analyzed_gpt_oss(), job, mw.Mesh(ep=2, tp=2), expert_strategies(SLICED))
    taken = mw.make_plan(analyzed_gpt_oss(), job, mw.Mesh(tp=3), (SLICED,))
    loads_under_other_plan(analyzed_gpt_oss(), saved, taken, tmp_path)


def refusal(analyzed: mw.AnalyzedModel, mesh: mw.Mesh, *strategies: mw.Strategy) -> str:
    with pytest.raises(PlanError) as caught:
        mw.make_plan(analyzed, sgd_job(), mesh, strategies)
    return str(caught.value)


def test_what_it_cannot_slice_is_refused_by_name():
    text = refusal(analyzed_mixtral(), mw.Mesh(tp=4), SLICED)
    assert "the features inside each expert divide into 3 units, and tp has 4 ranks" in text
    assert "set mesh.tp to at most 3" in text
    text = refusal(analyzed_mixtral(), mw.Mesh(tp=2), TENSOR, SLICED, mw.SequenceParallel())
    assert "slices of experts take whole tokens, and the residual stream is sharded along tp" in text
    text = refusal(analyzed_mixtral(), mw.Mesh(tp=2, tp_depth=2), mw.TensorParallel2D(), SLICED)
    assert "use tensor_parallel in mode 1d, without sequence_parallel" in text
    assert "no module of this model is called as experts are" in refusal(
        analyzed_model(), mw.Mesh(tp=2), SLICED
    )
