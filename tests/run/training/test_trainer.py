"""A trainer's evaluations and predictions: global batches shared among ranks, each sample counted once."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.plan.job.errors import PlanError
from meshwright.run.training.trainer import Trainer
from meshwright.testing.ranks import run_on_threads
from tests.engine.late_copies import LateCopies
from tests.test_api import JOB, Regression, batch, module, plan_for, squares
from tests.tiny_model import analyzed_model, token_samples

MESHES = {
    "ddp": mw.Mesh(dp_replicate=3),
    "zero": mw.Mesh(dp_shard=3),
    "vocabulary": mw.Mesh(tp=3),
    "pp x zero": mw.Mesh(pp=2, dp_shard=2),
}
NUM_SAMPLES = 11


def trainer_of(
    world: World, mesh: mw.Mesh, micro_batch: int = 2, strategies: Sequence[mw.Strategy] | None = None
) -> Trainer:
    job = mw.Job(
        train=mw.TrainConfig(steps=2, batch=12), precision=mw.PrecisionConfig("float64", "float64", "float64")
    )
    analyzed = analyzed_model()
    strategies = [mw.VocabParallel()] if mesh.tp > 1 else strategies
    plan = mw.make_plan(analyzed, job, mesh, strategies, micro_batch)
    return mw.parallelize(analyzed, plan, world=world)


def correct(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """How many labels are the most likely token, and how many labels there are."""
    counts = batch["labels"] != -100
    return ((outputs.argmax(-1) == batch["labels"]) & counts).sum(), counts.sum()


def loader_of(num: int = NUM_SAMPLES, size: int = 4) -> list[dict[str, torch.Tensor]]:
    samples = token_samples(num)
    return [{key: value[i : i + size] for key, value in samples.items()} for i in range(0, num, size)]


def evaluate(
    world: World, mesh: mw.Mesh, strategies: Sequence[mw.Strategy] | None = None
) -> tuple[mw.Evaluation, dict[str, torch.Tensor]]:
    with trainer_of(world, mesh, 0 if strategies else 2, strategies) as trainer:
        plain = trainer.evaluate(loader_of())
        found = trainer.evaluate(loader_of(), metrics={"accuracy": correct})
        assert found.loss == pytest.approx(plain.loss, rel=1e-12)
        assert found.tokens == plain.tokens
        predicted = trainer.predict(
            loader_of(), lambda outputs, batch: {"tokens": outputs.argmax(-1), "labels": batch["labels"]}
        )
        return found, predicted


@pytest.mark.parametrize("name", MESHES)
def test_ranks_that_pass_the_same_batches_count_every_sample_once(name: str):
    alone, predicted = run_on_threads(lambda world: evaluate(world, mw.Mesh()), mw.Mesh())[0]
    assert alone.tokens == int((token_samples(NUM_SAMPLES)["labels"] != -100).sum())
    assert 0 < alone.metrics["accuracy"] < 1
    assert alone.as_dict()["accuracy"] == alone.metrics["accuracy"]
    torch.testing.assert_close(predicted["labels"], token_samples(NUM_SAMPLES)["labels"])
    mesh = MESHES[name]
    for found, others in run_on_threads(lambda world: evaluate(world, mesh), mesh):
        assert found.loss == pytest.approx(alone.loss, rel=1e-12)
        assert found.metrics == pytest.approx(alone.metrics)
        assert found.tokens == alone.tokens
        assert all(torch.equal(others[key], predicted[key]) for key in predicted)


def test_local_batches_are_evaluated_as_they_are():
    def body(world: World) -> float:
        with trainer_of(world, MESHES["ddp"]) as trainer:
            return trainer.evaluate(trainer.local_batch(each) for each in loader_of()).loss

    alone, _ = run_on_threads(lambda world: evaluate(world, mw.Mesh()), mw.Mesh())[0]
    assert run_on_threads(body, MESHES["ddp"]) == pytest.approx([alone.loss] * 3, rel=1e-12)


def test_where_the_first_rank_reads_all_samples_every_rank_has_all_predictions():
    alone, predicted = run_on_threads(lambda world: evaluate(world, mw.Mesh()), mw.Mesh())[0]
    mesh, strategies = mw.Mesh(dp_replicate=3), [mw.BatchSplit(), mw.DataParallelMaster()]
    for found, tokens in run_on_threads(lambda world: evaluate(world, mesh, strategies), mesh):
        assert (found.loss, found.metrics) == (pytest.approx(alone.loss), pytest.approx(alone.metrics))
        assert torch.equal(tokens["tokens"], predicted["tokens"])


class DrawsAlways(Regression):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(x, 0.5, training=True))


def test_an_evaluation_with_metrics_draws_no_numbers_either():
    analyzed = mw.analyze(DrawsAlways, batch(0), loss=squares())
    with mw.parallelize(analyzed, mw.make_plan(analyzed, JOB, mw.Mesh()), loss=squares()) as trainer:
        for metrics in (None, {"sum": lambda outputs, batch: (outputs.sum(), 1)}):
            with pytest.raises(PlanError, match="an evaluation, in which the forward draws random numbers"):
                trainer.evaluate([batch(0)], metrics=metrics)


def test_batches_that_differ_between_ranks_are_refused():
    def body(world: World) -> None:
        with trainer_of(world, MESHES["ddp"]) as trainer:
            trainer.evaluate([loader_of()[world.rank]])

    with pytest.raises(PlanError, match="the ranks passed different batches to an evaluation") as error:
        run_on_threads(body, MESHES["ddp"])
    assert "trainer.local_batch(batch)" in str(error.value)


class Samples(Dataset):
    """A dataset of samples of the regression."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: value[index] for key, value in batch(3, 8).items()}


@pytest.mark.parametrize(
    "data",
    [
        Samples(),
        DataLoader(Samples(), batch_size=5),
        DataLoader(TensorDataset(*batch(3, 8).values()), batch_size=3),
        batch(3, 8),
    ],
    ids=["dataset", "loader of dicts", "loader of tuples", "one batch"],
)
def test_loaders_datasets_and_tuples_are_evaluated(data: object):
    analyzed, plan = plan_for(1)
    with mw.parallelize(analyzed, plan) as trainer:
        whole = batch(3, 8)
        outputs = module()(whole["x"])
        wanted = squares().total(outputs, whole) / squares().count(whole)
        assert trainer.evaluate(data).loss == pytest.approx(wanted.item(), rel=1e-6)


def test_a_step_takes_the_tuples_of_a_loader():
    losses = []
    for samples in (batch(0), tuple(batch(0).values())):
        analyzed, plan = plan_for(1)
        with mw.parallelize(analyzed, plan) as trainer:
            losses.append(trainer.step(trainer.local_batch(samples)).loss)
            losses.append(trainer.step(samples).loss)
    assert losses[:2] == losses[2:]


class Scaled(Regression):
    """A forward with an option."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) * scale


def test_numbers_in_a_batch_reach_the_forward_and_must_not_change():
    model = Scaled()
    model.load_state_dict(module().state_dict())
    samples = batch(0)
    analyzed = mw.analyze(model, {**samples, "scale": 3.0, "mask": None}, loss=squares())
    plan = mw.make_plan(analyzed, JOB)
    with mw.parallelize(analyzed, plan) as trainer:
        wanted = squares().total(module()(samples["x"]) * 3.0, samples) / squares().count(samples)
        assert trainer.step({**samples, "scale": 3.0}).loss == pytest.approx(wanted.item(), rel=1e-6)
        with pytest.raises(PlanError, match="the constants none; the model was analyzed with"):
            trainer.step(samples)
    verdict = mw.verify(analyzed, plan, [{**samples, "scale": 3.0}])
    assert verdict.passed


def by_hand(
    make: Callable[[nn.Module], torch.optim.Optimizer], schedule: Callable[..., object] | None
) -> list[float]:
    model, losses = module(), []
    optimizer = make(model)
    scheduler = None if schedule is None else schedule(optimizer)
    for step in range(4):
        samples = batch(step)
        loss = squares().total(model(samples["x"]), samples) / squares().count(samples)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), JOB.train.clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()  # type: ignore[attr-defined]
        losses.append(loss.item())
    return losses


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, second = model.first, model.second  # type: ignore[attr-defined]
    groups = [
        {"params": first.parameters(), "lr": 0.2},
        {"params": second.parameters(), "weight_decay": 0.3},
    ]
    return torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.9))  # type: ignore[arg-type]


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
@pytest.mark.parametrize("schedule", [None, halving])
def test_an_optimizer_over_the_module_and_a_scheduler_train_like_the_ordinary_loop(
    axis: str, schedule: Callable[..., object] | None
):
    wanted = by_hand(two_groups, schedule)
    mesh = mw.Mesh(**{axis: 3})

    def body(world: World) -> list[float]:
        model = module()
        analyzed = mw.analyze(model, batch(0), loss=squares())
        plan = mw.make_plan(analyzed, JOB, mesh)
        trainer = mw.parallelize(
            model,
            plan,
            optimizer=two_groups(model),
            lr_scheduler=schedule,  # type: ignore[arg-type]
            loss=squares(),
            world=world,
            example=batch(0),
        )
        with trainer:
            return [trainer.step(trainer.local_batch(batch(step))).loss for step in range(4)]

    for losses in run_on_threads(body, mesh):
        assert losses == pytest.approx(wanted, rel=1e-5)


def test_a_scheduler_beside_the_schedule_of_the_job_is_refused():
    analyzed, _ = plan_for(1)
    job = replace(JOB, lr_schedule=mw.LRScheduleConfig("cosine"))
    plan = mw.make_plan(analyzed, job)
    with pytest.raises(PlanError, match="an lr_scheduler, and the plan has the schedule 'cosine'"):
        mw.parallelize(analyzed, plan, lr_scheduler=halving)


def test_an_optimizer_over_a_module_needs_that_module():
    analyzed, plan = plan_for(1)
    with pytest.raises(PlanError, match="the AdamW is over parameters of a module, and the model passed is"):
        mw.parallelize(analyzed, plan, optimizer=two_groups(module()))


def test_a_step_that_is_not_finite_is_warned_of_once_with_the_tensors_that_are_not(caplog):
    example = batch(0)
    analyzed = mw.analyze(module, example, loss=squares())
    harmful = {**example, "x": example["x"].clone()}
    harmful["x"][0, 0] = float("nan")
    with mw.parallelize(analyzed, mw.make_plan(analyzed, JOB)) as trainer:
        trainer.step(trainer.local_batch(example))
        assert not caplog.messages
        for _ in range(2):
            trainer.step(trainer.local_batch(harmful))
    (message,) = caplog.messages
    assert message.startswith(
        "step 2: the loss is nan and the gradient norm nan, and x of the batch is not finite"
    )
    assert 'guard.action = "skip"' in message


@pytest.mark.parametrize("after", ["step", "save", "end"])
def test_numbers_that_arrive_late_are_checked_at_the_next_chance(after, caplog, monkeypatch, tmp_path):
    monkeypatch.setattr("meshwright.engine.runtime.rank_state.DeviceCopies", LateCopies)
    example = batch(0)
    analyzed = mw.analyze(module, example, loss=squares())
    harmful = {**example, "x": torch.full_like(example["x"], float("nan"))}
    with mw.parallelize(analyzed, mw.make_plan(analyzed, JOB)) as trainer:
        trainer.step(trainer.local_batch(harmful))
        assert not caplog.messages
        if after != "end":
            trainer.save(tmp_path) if after == "save" else trainer.step(trainer.local_batch(example))
            assert len(caplog.messages) == 1
    (message,) = caplog.messages
    assert message.startswith("step 1: the loss is nan")


def test_a_step_that_changes_nothing_is_warned_of_once(caplog):
    analyzed, nothing = analyzed_model(), token_samples(12)
    nothing["labels"] = torch.full_like(nothing["labels"], -100)
    job = mw.Job(train=mw.TrainConfig(steps=2, batch=12))
    with mw.parallelize(analyzed, mw.make_plan(analyzed, job)) as trainer:
        for _ in range(2):
            assert trainer.step(trainer.local_batch(nothing)).is_skipped
    assert caplog.messages == [
        "step 1 changed nothing: no label of the batch counts (-100, or a weight of 0)"
    ]
