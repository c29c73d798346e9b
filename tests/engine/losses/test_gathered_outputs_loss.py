"""Losses of the global batch: a contrastive loss on 2, 3 and 4 ranks equals one device, with every message
stated.

A contrastive loss on 2, 3 and 4 ranks is that of one device, to the last message.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan, parallelize, select_local_batch, trace, verify
from meshwright.comm.collectives.group import World
from meshwright.engine.losses.gathered_outputs_loss import GlobalBatchLoss
from meshwright.engine.runtime.rank_state import Metrics
from meshwright.model.loss.loss_definition import Loss
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import LossGuard, PrecisionConfig, TrainConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.testing.ranks import ProcessPool, run_on_threads
from meshwright.verifier.static_checks import static_checks
from meshwright.verifier.verdict_and_cause import Verdict
from tests.engine.two_tower_model import (
    CONTRASTIVE,
    Towers,
    analyzed_towers,
    global_batches,
    info_nce,
    pairs,
    towers_plan,
)
from tests.paper_model import FIRST_ROLE
from tests.tiny_model import TOKENS, edited, tiny_job, token_samples

ANALYZED = analyzed_towers()
MESHES = [Mesh(dp_replicate=2), Mesh(dp_replicate=3), Mesh(dp_replicate=4), Mesh(dp_shard=3)]


def strategies_on(mesh: Mesh) -> tuple[BatchSplit, DDP]:
    axis = "dp_shard" if mesh.dp_shard > 1 else "dp_replicate"
    return BatchSplit(axis), DDP(axis)


def passed(verdict: Verdict) -> None:
    assert verdict.passed, str(verdict)
    assert verdict.num_steps == 2


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("count", [24, 13, 17])
def test_a_contrastive_loss_equals_one_device_also_where_the_last_batch_is_short(mesh: Mesh, count: int):
    """Of 13 rows the second batch has 1, so all ranks but one stand in.

    Of 17 it has 5, which no mesh divides.
    """
    plan = towers_plan(ANALYZED, mesh, strategies_on(mesh))
    assert static_checks(plan) == []
    passed(verify(ANALYZED, plan, global_batches(count), loss=CONTRASTIVE))


@pytest.mark.parametrize("count", [24, 17])
def test_a_parameter_that_the_model_returns_gets_its_part_of_the_gradient(count: int):
    analyzed = analyzed_towers(bare=True)
    passed(
        verify(analyzed, towers_plan(analyzed, Mesh(dp_replicate=3)), global_batches(count), loss=CONTRASTIVE)
    )


@pytest.mark.parametrize("mesh", [Mesh(pp=2, dp_replicate=2), Mesh(pp=2, dp_shard=3)], ids=str)
@pytest.mark.parametrize("count", [24, 17])
def test_the_last_stage_of_a_pipeline_gathers_the_samples_of_all_data_ranks(mesh: Mesh, count: int):
    plan = towers_plan(ANALYZED, mesh)
    assert static_checks(plan) == []
    gathering = [
        plan.mesh.coordinate(rank)["pp"]
        for rank in range(mesh.world_size)
        if any(action.kind == "GATHER" for action in plan.for_rank(rank).actions)
    ]
    assert set(gathering) == {1}
    passed(verify(ANALYZED, plan, global_batches(count), loss=CONTRASTIVE))


class Merged(nn.Module):
    """Returns a row per token, of all samples one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(13, 6), nn.Linear(6, 6)])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](input_ids)).flatten(0, 1)


def test_rows_of_samples_and_tokens_are_refused_where_ranks_gather_samples_and_only_there():
    loss = Loss(
        lambda outputs, batch: (outputs @ outputs.T).logsumexp(1).sum() / len(batch["labels"]),
        lambda batch: torch.tensor(len(batch["labels"])),
        whole_batch=True,
    )
    batch = token_samples(12)
    analyzed = analyze(Merged, batch, loss=loss)
    (output,) = analyzed.model_spec.outputs
    assert (output.shape, output.rows_per_sample) == ((6,), TOKENS)
    passed(verify(analyzed, make_plan(analyzed, tiny_job(), Mesh(pp=2)), [batch, batch], loss=loss))
    for mesh in (Mesh(dp_replicate=2), Mesh(dp_shard=3), Mesh(pp=2, dp_replicate=2)):
        with pytest.raises(
            PlanError,
            match=rf"output0 of the model has {TOKENS} rows of shape \[6\] along dim 0 for each sample"
            r"(?s:.*)repair: return it with samples along dim 0: x\.unflatten",
        ):
            make_plan(analyzed, tiny_job(), mesh)


def on_a_process(world: World) -> tuple[list[Metrics], dict[str, torch.Tensor]]:
    analyzed = analyzed_towers()
    plan = towers_plan(analyzed, world.mesh)
    with parallelize(analyzed, plan, loss=CONTRASTIVE, world=world) as engine:
        metrics = [engine.step(select_local_batch(batch, plan, world.rank)) for batch in global_batches(17)]
        return metrics, {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def test_processes_equal_threads(process_pool: ProcessPool):
    mesh = Mesh(dp_replicate=3)
    threads, processes = run_on_threads(on_a_process, mesh), process_pool.run(on_a_process, mesh)
    for (metrics, parameters), (others, twins) in zip(threads, processes, strict=True):
        assert [m.loss for m in metrics] == pytest.approx([m.loss for m in others], rel=1e-13)
        assert all(torch.allclose(value, twins[name], rtol=1e-12) for name, value in parameters.items())


def test_every_sample_that_the_loss_gathers_is_stated_to_the_byte():
    """3 ranks of 4 rows: a fact and a checksum, labels of 8 bytes, embeddings of 4 floats.

    In float32 half of it.
    """
    for parameters, width in (("float64", 8), ("float32", 4)):
        job = tiny_job(precision=PrecisionConfig(parameters, parameters, parameters))
        plan = towers_plan(ANALYZED, Mesh(dp_replicate=3), job=job)
        gathers = {
            a.subject: a.transfer.nbytes
            for a in plan.program.actions(FIRST_ROLE)
            if a.kind == "GATHER" and a.transfer
        }
        assert gathers == {
            "batch_info": 16,
            "kind": 4 * 8,
            "output0": 4 * 4 * width,
            "output1": 4 * 4 * width,
        }
    assert trace(ANALYZED, plan, [0, 1, 2], loss=CONTRASTIVE).passed
    assert trace(ANALYZED, plan, [1], loss=CONTRASTIVE, fake=False).passed


def test_samples_are_gathered_over_both_data_axes_at_once():
    split = (BatchSplit("dp_replicate"), BatchSplit("dp_shard"))
    program = split[0].rewrite(
        towers_plan(ANALYZED, Mesh()).program, towers_plan(ANALYZED, Mesh()).rank_view(0), tiny_job()
    )
    program = split[1].rewrite(program, towers_plan(ANALYZED, Mesh()).rank_view(0), tiny_job())
    gathers = [action for action in program.actions(FIRST_ROLE) if action.kind == "GATHER"]
    assert len({action.name for action in gathers}) == len(gathers) == 4
    assert {action.transfer.axes for action in gathers if action.transfer} == {("dp_replicate", "dp_shard")}


def test_one_device_gathers_nothing():
    assert not [
        action
        for action in towers_plan(ANALYZED, Mesh()).program.actions(FIRST_ROLE)
        if action.kind == "GATHER"
    ]
    passed(verify(ANALYZED, towers_plan(ANALYZED, Mesh()), global_batches(17), loss=CONTRASTIVE))


def test_a_step_without_any_sample_is_skipped_on_all_ranks():
    plan = towers_plan(ANALYZED, Mesh(dp_replicate=3))

    def body(world: World) -> tuple[bool, bool]:
        with parallelize(ANALYZED, plan, loss=CONTRASTIVE, world=world) as engine:
            before = [p.detach().clone() for p in engine.module.parameters()]
            metrics = engine.step(None)
            return metrics.is_skipped, all(map(torch.equal, before, engine.module.parameters()))

    assert run_on_threads(body, plan.mesh) == [(True, True)] * 3


@pytest.mark.parametrize(
    "planted", ["whole gradient of what is shared", "samples of the next rank", "loss added by every rank"]
)
def test_a_planted_bug_is_noticed(monkeypatch: pytest.MonkeyPatch, planted: str):
    if planted == "loss added by every rank":
        monkeypatch.setattr(GlobalBatchLoss, "reports_loss", True)
    elif planted == "samples of the next rank":
        monkeypatch.setattr(GlobalBatchLoss, "_samples_per_rank", lambda self: [4, 3, 5])
    else:
        kept = GlobalBatchLoss.backward_to_local_samples

        def triple_shared(self: GlobalBatchLoss) -> None:
            for place, leaf in enumerate(self._full_leaves.values()):
                if place == 2 and leaf.grad is not None:
                    leaf.grad *= 3
            kept(self)

        monkeypatch.setattr(GlobalBatchLoss, "backward_to_local_samples", triple_shared)
    verdict = verify(
        ANALYZED, towers_plan(ANALYZED, Mesh(dp_replicate=3)), global_batches(24), loss=CONTRASTIVE
    )
    assert not verdict.passed


def test_a_loss_that_does_not_wait_for_its_gather_fails_the_static_checks():
    plan = towers_plan(ANALYZED, Mesh(dp_replicate=3))

    def hasty(actions: list[Action]) -> list[Action]:
        return [replace(a, waits=("TOKEN_COUNT()",)) if a.kind == "LOSS" else a for a in actions]

    said = [fault.problem for fault in static_checks(edited(plan, hasty))]
    assert "LOSS(0) needs all samples of output0, output1, kind and waits for no GATHER of them" in said


class Pooling(Towers):
    """Hands out a mean over its rows where the scale was: another number on every rank."""

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, scale = super().forward(image, text)
        return first, second, scale + self.mean(first)

    def mean(self, first: torch.Tensor) -> torch.Tensor:
        return first.mean()


class PoolingWithoutGradient(Pooling):
    """Hands out a mean that no trial can tell from a learned scale."""

    def mean(self, first: torch.Tensor) -> torch.Tensor:
        return first.detach().mean()


def test_an_output_that_is_computed_over_all_samples_is_refused_by_the_plan():
    with pytest.raises(PlanError, match=r"the loss takes outputs\[2\], which the model computes over all"):
        towers_plan(analyzed_towers(model=Pooling), Mesh(dp_replicate=3))


def test_an_output_that_is_not_per_sample_and_differs_between_ranks_is_refused():
    analyzed = analyzed_towers(model=PoolingWithoutGradient)
    with pytest.raises(
        PlanError,
        match=r"(?s)takes an output that is not per sample, and the ranks do not hold the same.*repair:",
    ):
        verify(analyzed, towers_plan(analyzed, Mesh(dp_replicate=3)), global_batches(24), loss=CONTRASTIVE)


def test_a_similarity_inside_the_model_is_refused_by_the_analysis():
    inside = replace(CONTRASTIVE, total=lambda outputs, batch: outputs[0].sum())
    with pytest.raises(
        PlanError,
        match=r"(?s)output0 .*\[3, 3\], and \[5, 5\] for more samples: it compares the samples of one rank",
    ):
        analyzed_towers(inside, inside=True)
    outside = replace(
        CONTRASTIVE, total=lambda outputs, batch: info_nce((outputs[1], outputs[2], torch.ones(())), batch)
    )
    analyzed = analyzed_towers(outside, inside=True)  # the loss does not take it, so it may be there
    assert [column.used_by_loss for column in analyzed.model_spec.outputs] == [False, True, True]
    passed(verify(analyzed, towers_plan(analyzed, Mesh(dp_replicate=3)), global_batches(24), loss=outside))


def test_a_loss_that_reads_more_than_its_targets_is_refused_by_the_name_of_the_key():
    greedy = Loss(lambda outputs, batch: batch["image"].sum(), CONTRASTIVE.count, ("kind",), whole_batch=True)
    with pytest.raises(
        PlanError,
        match=r"(?s)reads 'image', which is not among its targets \['kind'\]\n  repair: name it in Loss",
    ):
        analyzed_towers(greedy)


def test_micro_batches_and_the_guard_are_refused_with_the_repair():
    with pytest.raises(
        PlanError, match=r"(?s)micro_batch = 2 splits a rank's 4 samples\n  repair: set micro_batch = 0"
    ):
        towers_plan(ANALYZED, Mesh(dp_replicate=3), micro_batch=2)
    with pytest.raises(
        PlanError, match=r'(?s)no rank has a loss of its own\n  repair: set guard.action = "off"'
    ):
        towers_plan(ANALYZED, Mesh(dp_replicate=3), job=tiny_job(guard=LossGuard("skip")))


def test_another_kind_of_loss_than_the_plan_knows_is_refused():
    plan = towers_plan(ANALYZED, Mesh(dp_replicate=3))
    for call in (
        lambda: verify(ANALYZED, plan, global_batches(24), loss=replace(CONTRASTIVE, whole_batch=False)),
    ):
        with pytest.raises(
            PlanError,
            match=r"(?s)the loss is a sum over samples, and the plan was made for one of the whole batch",
        ):
            call()


def test_samples_of_another_shape_than_the_plan_knows_are_refused():
    wide = replace(CONTRASTIVE, total=lambda outputs, batch: info_nce(outputs, {"kind": batch["kind"][:, 0]}))
    example = {
        key: value if key != "kind" else value[:, None].repeat(1, 2) for key, value in pairs(4).items()
    }
    analyzed = analyzed_towers(wide, example=example)
    batch = {key: value if key != "kind" else value[:, None].repeat(1, 3) for key, value in pairs(12).items()}
    plan = towers_plan(analyzed, Mesh(dp_replicate=3), job=replace(tiny_job(), train=TrainConfig(batch=12)))
    with pytest.raises(
        PlanError, match=r"(?s)kind has samples of the shape \[3\]; the plan was made for \[2\].*pad it"
    ):
        verify(analyzed, plan, [batch], loss=wide)
