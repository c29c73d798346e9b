"""sync_batch_norm: batch norms on several ranks have the statistics of one device, forward and backward."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.model.blocks.batch_coupling import localize_sync_batch_norm
from meshwright.plan.job.errors import PlanError
from meshwright.testing.ranks import run_on_threads
from tests.tiny_model import case_of, edited, tiny_job, verdict_of

PICTURE = (3, 5, 4)
CHANNELS = (5, 5, 7)


class NormAct(nn.BatchNorm2d):
    """A batch norm that calls F.batch_norm itself, and an activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.3, self.eps
        )
        return F.relu(normed)


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inner, outer, 3, padding=1, bias=False), NormAct(outer)
        self.shortcut, self.shortcut_norm = nn.Conv2d(inner, outer, 1), nn.SyncBatchNorm(outer, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)) + self.shortcut_norm(self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = zip((PICTURE[0], *CHANNELS), CHANNELS, strict=False)
        self.blocks = nn.ModuleList(Residual(inner, outer) for inner, outer in sizes)
        self.head = nn.Linear(CHANNELS[-1], 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3))).squeeze(1)


LOSS = mw.Loss(
    lambda outputs, batch: (outputs - batch["y"]).square().sum(),
    lambda batch: torch.tensor(len(batch["y"])),
    ("y",),
)


def samples(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pictures = 3 * torch.randn(count, *PICTURE, generator=generator) + 20  # their mean is not small
    return {"x": pictures, "y": torch.randn(count, generator=generator)}


def doubles(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {key: value.double() for key, value in samples(count, seed).items()}


@pytest.fixture(scope="module")
def analyzed() -> mw.AnalyzedModel:
    return mw.analyze(ResNet, samples(4), loss=LOSS)


SHARDED = (mw.SyncBatchNorm(), mw.BatchSplit(axis="dp_shard"), mw.ZeRO(stage=3), mw.ActivationCheckpointing())
PIPELINES = {
    schedule: (mw.Pipeline(schedule=schedule), mw.SyncBatchNorm(), mw.BatchSplit(), mw.DDP())
    for schedule in ("naive_model_parallel", "zb_h1")
}
PLANS = {
    "ddp": (mw.Mesh(dp_replicate=3), None),
    "hsdp": (mw.Mesh(dp_replicate=2, dp_shard=3), None),
    "zero 3, checkpointing": (mw.Mesh(dp_shard=3), SHARDED),
    "pipeline": (mw.Mesh(pp=2, dp_replicate=3), PIPELINES["naive_model_parallel"]),
    "pipeline, split backward": (mw.Mesh(pp=2, dp_replicate=3), PIPELINES["zb_h1"]),
    "master": (mw.Mesh(dp_replicate=3), (mw.SyncBatchNorm(), mw.BatchSplit(), mw.DataParallelMaster())),
}


def planned(
    analyzed: mw.AnalyzedModel, mesh: mw.Mesh, strategies: Sequence[mw.Strategy] | None = None
) -> mw.Plan:
    micro_batch = 12 // (mesh.dp_replicate * mesh.dp_shard)
    return mw.make_plan(analyzed, tiny_job(), mesh, strategies, micro_batch)


@pytest.mark.parametrize("name", PLANS)
def test_it_equals_one_device(analyzed: mw.AnalyzedModel, name: str):
    verdict = mw.verify(analyzed, planned(analyzed, *PLANS[name]), [samples(12), samples(12, 1)], loss=LOSS)
    assert verdict.passed, str(verdict)


def test_it_sends_two_numbers_per_channel_and_their_count(analyzed: mw.AnalyzedModel):
    plan = planned(analyzed, mw.Mesh(dp_replicate=3))
    (actions,) = (role.actions for role in plan.program.roles)
    found = [
        (action.kind, move.collective, move.nbytes)
        for action in actions
        for move in action.inner_transfers
        if action.kind in "FB"
    ]
    forward = [("F", "all_gather", (2 * width + 1) * 8) for width in CHANNELS for _ in range(2)]
    backward = [("B", "all_reduce", 2 * width * 8) for width in reversed(CHANNELS) for _ in range(2)]
    assert found == forward + backward


@pytest.mark.parametrize("kind", ["F", "B"])
def test_a_message_that_is_not_planned_is_found(analyzed: mw.AnalyzedModel, kind: str):
    case = case_of(analyzed, planned(analyzed, mw.Mesh(dp_replicate=3)), doubles(36), LOSS)
    fewer = edited(
        case.plan,
        lambda actions: [
            replace(action, inner_transfers=action.inner_transfers[action.kind == kind :])
            for action in actions
        ],
    )
    assert verdict_of(case, 1).passed
    assert not verdict_of(replace(case, plan=fewer), 1).passed


def after_two_steps(
    analyzed: mw.AnalyzedModel, mesh: mw.Mesh, shares: Sequence[Sequence[int]]
) -> list[dict[str, torch.Tensor]]:
    """The state of each rank after two steps, of which the second has only the samples `shares[rank]`."""
    plan, full, short = planned(analyzed, mesh), doubles(12), doubles(12, 1)

    def body(world: World) -> dict[str, torch.Tensor]:
        with mw.parallelize(analyzed, plan, world=world, loss=LOSS) as trainer:
            trainer.step(trainer.local_batch(full))
            mine = list(shares[world.rank])
            trainer.step({key: value[mine] for key, value in short.items()} if mine else None)
            return {name: value.clone() for name, value in trainer.module.state_dict().items()}

    return run_on_threads(body, mesh)


def test_ranks_without_samples_do_not_change_the_statistics(analyzed: mw.AnalyzedModel):
    (alone,) = after_two_steps(analyzed, mw.Mesh(), [range(5)])
    for state in after_two_steps(analyzed, mw.Mesh(dp_replicate=3), [[0, 1, 2, 3], [4], []]):
        assert state.keys() == alone.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-11, atol=1e-11, msg=name)


def test_running_statistics_have_the_same_bits_on_all_ranks(analyzed: mw.AnalyzedModel):
    first, *others = after_two_steps(analyzed, mw.Mesh(dp_replicate=3), [[0, 1], [2], [3, 4]])
    for name in (name for name in first if "running" in name):
        assert all(torch.equal(first[name], each[name]) for each in others)


def test_a_loss_guard_finds_the_cause_although_a_rank_has_no_samples(analyzed: mw.AnalyzedModel):
    job = replace(tiny_job(), guard=mw.LossGuard("skip", window=2))
    plan = mw.make_plan(analyzed, job, mw.Mesh(dp_replicate=3))
    harmful = doubles(4, 1)
    harmful["y"][1] *= 1e6

    def body(world: World) -> tuple[mw.Metrics, bool]:
        with mw.parallelize(analyzed, plan, world=world, loss=LOSS) as trainer:
            for seed in range(2):
                trainer.step(trainer.local_batch(doubles(12, seed)))
            before = {name: value.clone() for name, value in trainer.module.state_dict().items()}
            metrics = trainer.step(harmful if world.rank == 1 else None)
            after = trainer.module.state_dict()
            names = [name for name, _ in trainer.module.named_parameters()]
            return metrics, all(torch.equal(before[name], after[name]) for name in names)

    for metrics, unchanged in run_on_threads(body, plan.mesh):
        assert metrics.is_skipped
        assert unchanged
        assert metrics.spike is not None
        assert [report.loss > 0 for report in metrics.spike.rank_reports] == [False, True, False]


def test_in_bfloat16_the_statistics_are_those_of_float32():
    job = mw.Job(train=mw.TrainConfig(steps=2, batch=12), precision=mw.PrecisionConfig(compute="bfloat16"))
    analyzed = mw.analyze(ResNet, samples(4), loss=LOSS)
    verdict = mw.verify(
        analyzed, mw.make_plan(analyzed, job, mw.Mesh(dp_replicate=3)), [samples(12)], loss=LOSS
    )
    assert verdict.passed, str(verdict)


def test_frozen_batch_norms_send_nothing():
    def frozen() -> nn.Module:
        model = ResNet().train()
        for block in model.blocks:
            block.norm.eval()
            block.shortcut_norm.eval()
        return model

    analyzed = mw.analyze(frozen, samples(4), loss=LOSS)
    plan = planned(analyzed, mw.Mesh(dp_replicate=3))
    assert not any(action.inner_transfers for role in plan.program.roles for action in role.actions)
    assert "sync_batch_norm" not in str(plan)


def test_microbatches_are_refused_and_the_repairs_are_accepted(analyzed: mw.AnalyzedModel):
    with pytest.raises(PlanError, match=r"run all samples of a rank at once \(micro_batch = 0\)"):
        mw.make_plan(analyzed, tiny_job(), mw.Mesh(dp_replicate=3), micro_batch=2)
    with pytest.raises(PlanError, match=r'add \[\[strategies\]\] name = "sync_batch_norm"'):
        planned(analyzed, mw.Mesh(dp_replicate=3), [mw.BatchSplit(), mw.DDP()])
    planned(analyzed, mw.Mesh(dp_replicate=3), [mw.SyncBatchNorm(), mw.BatchSplit(), mw.DDP()])


class Whitened(ResNet):
    """A ResNet with a batch norm in front of its first block."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(3))
        self.register_buffer("running_var", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.batch_norm(x, self.running_mean, self.running_var, training=True))


def test_a_batch_norm_between_blocks_is_refused():
    analyzed = mw.analyze(Whitened, samples(4), loss=LOSS)
    with pytest.raises(PlanError, match=r"F.batch_norm in glue runs between blocks(?s:.*)declare a block"):
        planned(analyzed, mw.Mesh(dp_replicate=3))
    assert planned(analyzed, mw.Mesh()).num_microbatches == 1


def test_the_batch_norm_of_torch_that_communicates_by_itself_does_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    norm, x = nn.SyncBatchNorm(3, process_group=object()), samples(4)["x"]
    with pytest.raises(Exception, match=r"GPU|process"):
        norm(x)
    localize_sync_batch_norm(norm)
    torch.testing.assert_close(norm(x), F.batch_norm(x, None, None, training=True))
