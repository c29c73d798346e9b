"""expert_parallel over other axes than ep: what comes out equals one device, and gradients are complete."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.expert_load import expert_ranges_by_layer
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Program
from meshwright.report.terminal.params_table import param_rows
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.parallel.checkpoint_crossing import loads_under_other_plan
from tests.parallel.expert.mixture_model import (
    analyzed_mixtral,
    assert_equals_one_device,
    batch_of,
    expert_strategies,
    sgd_job,
)

DATA, TOKENS, BOTH = ("dp_shard",), ("cp",), ("dp_shard", "cp")
TP = mw.TensorParallel()
HYBRID = expert_strategies(
    mw.BatchSplit(),
    mw.ZeRO(stage=3, replicate_axis="dp_replicate"),
    mw.ActivationCheckpointing(),
    over=DATA,
)
PLANS = {
    "dp_shard": (mw.Mesh(dp_shard=3), expert_strategies(over=DATA), 2),
    "dp_shard, naive ddp": (mw.Mesh(dp_shard=2), expert_strategies(mw.NaiveDDP("dp_shard"), over=DATA), 0),
    "dp_shard, zero 1": (mw.Mesh(dp_shard=3), expert_strategies(mw.ZeRO(stage=1), over=DATA), 2),
    "dp_shard, hybrid, recomputed": (
        mw.Mesh(dp_replicate=2, dp_shard=3),
        HYBRID,
        1,
    ),
    "dp_shard, replicas along it": (
        mw.Mesh(dp_replicate=3, dp_shard=2),
        expert_strategies(
            mw.BatchSplit(), mw.ZeRO("dp_replicate", stage=3, replicate_axis="dp_shard"), over=DATA
        ),
        1,
    ),
    "dp_shard, 1f1b": (
        mw.Mesh(pp=2, dp_shard=3),
        expert_strategies(mw.Pipeline(), mw.ZeRO(stage=2), over=DATA),
        2,
    ),
    "dp_shard, slices along tp": (
        mw.Mesh(dp_shard=2, tp=2),
        expert_strategies(mw.TensorParallel(), mw.ExpertTensorParallel(), mw.ZeRO(stage=2), over=DATA),
        2,
    ),
    "ep and dp_shard": (mw.Mesh(dp_shard=2, ep=2), expert_strategies(over=("ep", "dp_shard")), 0),
    "cp": (mw.Mesh(cp=3), expert_strategies(over=TOKENS), 4),
    "cp, zero 3 along dp_shard, recomputed": (
        mw.Mesh(dp_shard=3, cp=2),
        expert_strategies(mw.ZeRO(stage=3), mw.ActivationCheckpointing(), over=TOKENS),
        2,
    ),
    "cp, zero 2, 1f1b": (
        mw.Mesh(pp=2, cp=3),
        expert_strategies(mw.Pipeline(), mw.ZeRO(stage=2), over=TOKENS),
        4,
    ),
    "tp": (mw.Mesh(tp=3), (mw.ExpertParallel(("tp",)),), 4),
    "tp, zero 3, recomputed": (
        mw.Mesh(dp_shard=3, tp=2),
        expert_strategies(TP, mw.ZeRO(stage=3), mw.ActivationCheckpointing(), over=("tp",)),
        2,
    ),
    "tp, 1f1b": (mw.Mesh(pp=2, tp=2), (TP, mw.ExpertParallel(("tp",)), mw.Pipeline()), 4),
    "ep and tp": (mw.Mesh(ep=2, tp=2), expert_strategies(TP, mw.ZeRO(stage=2), over=("ep", "tp")), 2),
    "cp and tp": (mw.Mesh(cp=2, tp=2), expert_strategies(TP, over=("cp", "tp")), 4),
    "dp_shard and cp": (mw.Mesh(dp_shard=2, cp=2), expert_strategies(mw.ZeRO(stage=3), over=BOTH), 2),
}


@pytest.mark.parametrize("name", PLANS)
def test_it_equals_one_device(name: str):
    assert_equals_one_device(*PLANS[name])


@pytest.mark.parametrize("name", ["dp_shard, hybrid, recomputed", "dp_shard and cp", "tp", "cp and tp"])
def test_a_trace_on_fake_tensors_issues_what_the_plan_states(name: str):
    mesh, strategies, micro_batch = PLANS[name]
    plan = mw.make_plan(analyzed_mixtral(), sgd_job(), mesh, strategies, micro_batch)
    assert not static_checks(plan)
    assert mw.trace(analyzed_mixtral(), plan).passed


def experts_shapes(world: World, plan: mw.Plan) -> tuple[int, ...]:
    with mw.parallelize(analyzed_mixtral(), plan, world=world) as trainer:
        trainer.step(trainer.local_batch(batch_of(12)))
        experts = trainer.executor.state.trained_module.parameters["model.layers.0.mlp.experts.down_proj"]
        return tuple(experts.shape)


def test_a_rank_has_the_experts_of_its_index_along_all_axes():
    mesh, strategies, _ = PLANS["dp_shard and cp"]
    plan = mw.make_plan(analyzed_mixtral(), sgd_job(), mesh, strategies)
    shapes = run_on_threads(lambda world: experts_shapes(world, plan), mesh)
    assert shapes == [(2, 16, 12), (1, 16, 12), (1, 16, 12), (1, 16, 12)]


def test_the_table_of_parameters_names_the_axes_of_experts_together():
    mesh, strategies, _ = PLANS["ep and tp"]
    plan = mw.make_plan(analyzed_mixtral(), sgd_job(), mesh, strategies)
    rows = {row.pattern: row.config for row in param_rows(plan.sharding, "float32")}
    assert rows["model.layers.*.mlp.experts.down_proj"].startswith("ep tp: 5 experts")
    ranges = expert_ranges_by_layer(plan.sharding)["model.layers.0.mlp.experts"]
    assert ranges == [(0, 2), (2, 3), (3, 4), (4, 5)]  # of which a run reports the load


def counts_of_step(world: World, plan: mw.Plan) -> tuple[list[torch.Tensor], int]:
    """The choices of this rank's tokens by layer, and the rows that it sent."""
    chosen: list[torch.Tensor] = []
    with mw.parallelize(analyzed_mixtral(), plan, world=world) as trainer:
        for layer in trainer.executor.state.trained_module.module.model.layers:
            layer.mlp.gate.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
        world.ledger.is_recording = True
        trainer.step(trainer.local_batch(batch_of(12)))
        counts = world.ledger.counts
        return chosen, sum(number for name, number in counts.items() if name.startswith("rows to"))


def test_beside_tp_a_token_is_sent_by_the_rank_with_the_index_of_its_expert():
    plan = mw.make_plan(analyzed_mixtral(), sgd_job(), *PLANS["ep and tp"][:2])
    found = run_on_threads(lambda world: counts_of_step(world, plan), plan.mesh)
    rank_of = [0, 0, 1, 2, 3]
    for rank, (chosen, num_sent) in enumerate(found):
        other = (rank + 2) % 4  # the other along ep, the same along tp
        assert num_sent == sum(
            other in {rank_of[each] for each in experts} for index in chosen for experts in index.tolist()
        )


def test_over_tp_alone_nothing_is_dispatched():
    plan = mw.make_plan(analyzed_mixtral(), sgd_job(), *PLANS["tp"][:2])
    sent = {each.collective for action in plan.for_rank(0).actions for each in action.inner_transfers}
    assert sent == {"all_reduce"}


def test_a_rank_along_tp_computes_its_share_of_the_experts():
    mesh, analyzed = mw.Mesh(tp=3), analyzed_mixtral(6)
    over_tp, sliced = (
        mw.make_plan(analyzed, sgd_job(), mesh, (strategy,)).rank_view(0).work_share.block_shares
        for strategy in (mw.ExpertParallel(("tp",)), mw.ExpertTensorParallel())
    )
    assert over_tp == sliced


def test_gradients_of_experts_are_summed_along_no_axis_that_divides_them():
    mesh, strategies, _ = PLANS["dp_shard, hybrid, recomputed"]
    plan = mw.make_plan(analyzed_mixtral(), sgd_job(), mesh, strategies)
    axes = {
        each.transfer.axes
        for each in plan.for_rank(0).actions
        if each.kind == "REDUCE" and each.transfer and any("experts" in name for name in each.tensors)
    }
    assert axes == {("dp_replicate",)}


def test_gradients_of_experts_that_are_summed_along_their_axis_too_are_found(monkeypatch: pytest.MonkeyPatch):
    rewrite = mw.DDP.rewrite

    def sums_all(ddp: mw.DDP, program: Program, view: RankView, job: mw.Job) -> Program:
        with monkeypatch.context() as patched:
            patched.setattr(ShardingPlan, "param_sum_axes", lambda plan, _, *axes: plan.sum_axes(*axes))
            return rewrite(ddp, program, view, job)

    monkeypatch.setattr(mw.DDP, "rewrite", sums_all)
    analyzed = analyzed_mixtral(4)
    plan = mw.make_plan(analyzed, sgd_job(), mw.Mesh(dp_shard=2), expert_strategies(over=DATA))
    verdict = mw.verify(analyzed, plan, [batch_of(12)])
    assert not verdict.passed
    assert "mlp.experts" in str(verdict)


@pytest.mark.parametrize(
    ("saved", "taken"),
    [("dp_shard and cp", None), (None, "dp_shard, zero 1"), ("cp", "dp_shard"), ("ep and tp", "tp")],
)
def test_a_checkpoint_is_loaded_on_other_ranks(saved: str | None, taken: str | None, tmp_path: Path):
    job = mw.Job(train=mw.TrainConfig(steps=4, batch=12))
    chosen = [PLANS[name][:2] if name else (mw.Mesh(ep=2), None) for name in (saved, taken)]
    plans = [mw.make_plan(analyzed_mixtral(), job, *each) for each in chosen]
    loads_under_other_plan(analyzed_mixtral(), *plans, tmp_path)


def test_muon_steps_each_expert_by_itself():
    muon = mw.OptimizerConfig("muon", lr=0.02, momentum=0.9)
    plan = mw.make_plan(
        analyzed_mixtral(), replace(sgd_job(), optimizer=muon), *PLANS["dp_shard, zero 1"][:2]
    )
    verdict = mw.verify(analyzed_mixtral(), plan, [batch_of(12)])
    assert verdict.passed, str(verdict)


def refusal(mesh: mw.Mesh, over: tuple[str, ...], *strategies: mw.Strategy) -> str:
    with pytest.raises(PlanError) as caught:
        mw.make_plan(analyzed_mixtral(), sgd_job(), mesh, (mw.ExpertParallel(over), *strategies))
    return str(caught.value)


def test_axes_that_do_not_fit_are_refused():
    split = mw.BatchSplit("dp_shard"), mw.DDP("dp_shard")
    text = refusal(mw.Mesh(dp_shard=2), ("dp_replicate",), *split)
    assert "over contains 'dp_replicate'; needed is 'ep', 'dp_shard', 'cp' or 'tp'" in text
    text = refusal(mw.Mesh(dp_shard=2), (), *split)
    assert "over contains no axis" in text
    text = refusal(mw.Mesh(dp_shard=2), ("dp_shard", "dp_shard"), *split)
    assert "over contains dp_shard twice" in text
    text = refusal(mw.Mesh(dp_shard=2, ep=2), DATA, *split, mw.BatchSplit("ep"))
    assert "over leaves ep out, an axis of experts alone, and mesh.ep is 2" in text
    text = refusal(mw.Mesh(dp_shard=2, cp=2), BOTH, *split)
    assert 'add [[strategies]] name = "ring", axis = "cp"' in text
    text = refusal(mw.Mesh(dp_shard=3, cp=2), BOTH, *split, mw.RingAttention())
    assert "6 ranks along dp_shard x cp, and a layer has 5 experts" in text
    assert "set mesh.dp_shard x mesh.cp to at most 5" in text


@pytest.mark.parametrize("order", [1, -1])
def test_experts_and_slices_of_each_along_one_axis_are_refused(order: int):
    both = (mw.ExpertParallel(("tp",)), mw.ExpertTensorParallel())[::order]
    with pytest.raises(PlanError, match="expert_tensor_parallel slices each along it"):
        mw.make_plan(analyzed_mixtral(4), sgd_job(), mw.Mesh(tp=2), both)


def test_tokens_that_are_slices_along_tp_are_refused():
    text = refusal(mw.Mesh(tp=2), ("tp",), TP, mw.SequenceParallel())
    assert "the residual stream is sharded along tp" in text


def test_experts_have_buckets_of_their_own_where_they_are_summed_along_fewer_axes():
    plan = mw.make_plan(analyzed_mixtral(4), sgd_job(), mw.Mesh(ep=2, dp_shard=2), expert_strategies())
    reduces = [each for each in plan.for_rank(0).actions if each.kind == "REDUCE" and each.transfer]
    axes = {("experts" in name, each.transfer.axes) for each in reduces for name in each.tensors}
    assert axes == {(True, ("dp_shard",)), (False, ("dp_shard", "ep"))}
