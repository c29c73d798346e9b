"""The training loop of the command, called from Python with an engine."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import meshwright
import meshwright as mw
from meshwright.api import make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.oom_advice import OutOfMemory, is_out_of_memory
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import EvalConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.telemetry.callbacks import STOP, Callback, CallbackEvent
from meshwright.run.training.train_loop import TrainResult
from meshwright.testing.ranks import run_on_threads
from tests.engine.one_device import sample_range
from tests.tiny_model import analyzed_model, tiny_job, token_samples

ANALYZED = analyzed_model(p=0.1)
DATA = token_samples(31)
Rows = Mapping[str, torch.Tensor]


def plan_in(folder: Path, evaluate: EvalConfig | None = None, steps: int = 6) -> Plan:
    job = tiny_job(evaluate=evaluate or EvalConfig())
    job = replace(job, train=replace(job.train, steps=steps))
    return make_plan(ANALYZED, job, Mesh(dp_replicate=2), run=RunConfig(str(folder), save_every=0, keep=9))


def played(plan: Plan, **more: object) -> list[TrainResult]:
    def rank(world: World) -> TrainResult:
        with parallelize(ANALYZED, plan, world=world) as engine:
            return meshwright.train(engine, DATA, **more)

    return run_on_threads(rank, plan.mesh)


def test_a_run_is_trained_evaluated_and_saved(tmp_path):
    shown: list[float] = []
    spy = Callback(on_evaluate=lambda moment: shown.append(moment.evaluation["loss"]))
    (ended, other) = played(plan_in(tmp_path, EvalConfig(hold_out=7, every=2)), callbacks=[spy])
    assert (ended.step, ended.stopped, other.step) == (6, False, 6)
    assert len(shown) == 3
    assert ended.eval_history.best_loss == min(shown)
    assert ended.checkpoint.name == "step-00000006"


def test_a_scheduler_that_follows_a_metric_hears_of_every_evaluation(tmp_path):
    heard: list[float] = []

    class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: float, epoch: int | None = None) -> None:
            heard.append(float(metrics))
            super().step(metrics, epoch)

    plan = plan_in(tmp_path, EvalConfig(hold_out=7, every=2))

    def rank(world: World) -> list[float]:
        with parallelize(ANALYZED, plan, world=world, lr_scheduler=Plateau) as engine:
            return [meshwright.train(engine, DATA).eval_history.best_loss]

    (best,) = run_on_threads(rank, plan.mesh)[0]
    assert len(heard) == 2 * 3  # on both ranks
    assert min(heard) == best


def test_the_same_call_continues_where_the_last_one_stopped(tmp_path):
    def enough(moment: CallbackEvent) -> str | None:
        return STOP if moment.step == 2 else None

    plan = plan_in(tmp_path / "two")
    (first, _) = played(plan, callbacks=[Callback(on_step_end=enough)])
    assert (first.step, first.stopped) == (3, True)
    (second, _) = played(plan)
    (straight, _) = played(plan_in(tmp_path / "one"))
    assert (second.step, second.loss) == (6, straight.loss)


def test_samples_held_out_elsewhere_are_evaluated_and_all_others_trained_on(tmp_path):
    (own, _) = played(plan_in(tmp_path / "own"), eval_data=sample_range(DATA, 0, 5))
    assert own.eval_history.best_loss is not None
    (without, _) = played(plan_in(tmp_path / "without"))
    assert (without.eval_history.best_loss, own.loss) == (None, without.loss)


def test_evaluations_without_samples_are_refused(tmp_path):
    with pytest.raises(
        Exception, match=r"the plan asks for evaluations, and no samples were passed"
    ) as caught:
        played(plan_in(tmp_path, EvalConfig("val.txt")))
    assert isinstance(caught.value, PlanError) or isinstance(caught.value.__cause__, PlanError)


def test_samples_that_would_be_evaluated_in_the_middle_of_a_round_are_refused(tmp_path):
    job = replace(tiny_job(), evaluate=EvalConfig(every=2))
    plan = make_plan(ANALYZED, job, Mesh(outer=2), (mw.LocalSGD(sync_every=3),), run=RunConfig(str(tmp_path)))
    with pytest.raises(Exception, match="multiple of 3") as caught:
        played(plan, eval_data=sample_range(DATA, 0, 5))
    assert isinstance(caught.value, PlanError) or isinstance(caught.value.__cause__, PlanError)


def test_an_engine_evaluates_batches_of_its_own(tmp_path):
    plan = plan_in(tmp_path)
    batches = [sample_range(DATA, 0, 12), sample_range(DATA, 12, 24), sample_range(DATA, 24, 31)]

    def rank(world: World) -> float:
        with parallelize(ANALYZED, plan, world=world) as engine:
            return engine.evaluate(engine.local_batch(batch) for batch in batches).loss

    with parallelize(ANALYZED, make_plan(ANALYZED, plan.job)) as alone:
        expected = alone.evaluate(batches).loss
    assert run_on_threads(rank, plan.mesh) == [pytest.approx(expected, rel=1e-12)] * 2


def test_several_optimizers_from_python_train_as_one_that_does_the_same(tmp_path):
    def trained(optimizer: object) -> float:
        with parallelize(ANALYZED, make_plan(ANALYZED, plan_in(tmp_path).job), optimizer=optimizer) as engine:
            return [engine.step(sample_range(DATA, 0, 12)).loss for _ in range(3)][-1]

    def two(groups: list[dict]) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([group]) for group in groups]

    assert trained(two) == trained(torch.optim.SGD)


def test_a_rank_that_runs_out_of_memory_says_what_takes_less_as_under_the_command(tmp_path):
    def greedy() -> bool:
        return bool(torch.empty(1 << 60).any())

    words = r"rank \d ran out of memory(?s:.*)planned +\d(?s:.*)live +\d(?s:.*)takes less"
    with pytest.raises(OutOfMemory, match=words) as caught:
        played(plan_in(tmp_path), should_stop=greedy)
    assert is_out_of_memory(caught.value.__cause__)


def test_another_error_of_a_rank_is_left_as_it_is(tmp_path):
    def broken() -> bool:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken") as caught:
        played(plan_in(tmp_path), should_stop=broken)
    assert (type(caught.value), str(caught.value)) == (RuntimeError, "broken")


class Regression(nn.Module):
    """One layer, for samples that are no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def squares() -> mw.Loss:
    return mw.Loss(
        total=lambda outputs, batch: ((outputs[:, 0] - batch["y"]) ** 2).sum(),
        count=lambda batch: torch.tensor(len(batch["y"])),
        targets=("y",),
    )


def rows(num: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(3.0 * num).view(num, 3) / 10
    return x, x.sum(1)


def trained_on(data: object, folder: Path) -> list[torch.Tensor]:
    analyzed = mw.analyze(Regression, rows(), loss=squares())
    job = mw.Job(train=mw.TrainConfig(steps=3, batch=4))
    plan = mw.make_plan(analyzed, job, run=mw.RunConfig(folder=str(folder)))
    with mw.parallelize(analyzed, plan) as trainer:
        mw.train(trainer, data)  # type: ignore[arg-type]
        return [parameter.detach().clone() for parameter in trainer.module.parameters()]


def test_datasets_and_loaders_of_torch_train_like_tensors(tmp_path: Path):
    x, y = rows()
    wanted = trained_on({"x": x, "y": y}, tmp_path / "tensors")
    data = TensorDataset(x, y)
    for name, given in {"dataset": data, "loader": DataLoader(data, 5, shuffle=True)}.items():
        found = trained_on(given, tmp_path / name)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


class Endless(IterableDataset):
    """Samples without an index."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


def test_a_loader_whose_order_is_not_that_of_the_plan_is_refused(tmp_path: Path):
    data = TensorDataset(*rows())
    weighted = DataLoader(data, sampler=WeightedRandomSampler([1.0] * 8, 8))
    with pytest.raises(PlanError, match="a loader in the order of a WeightedRandomSampler; train"):
        trained_on(weighted, tmp_path)
    with pytest.raises(PlanError, match="an iterable dataset, which has no sample by index"):
        trained_on(DataLoader(Endless()), tmp_path)


@pytest.mark.parametrize(("size", "is_warned"), [(1, False), (12, False), (4, True)])
def test_a_loader_with_another_batch_size_is_warned_of(
    size: int, is_warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    plan = make_plan(ANALYZED, tiny_job(), run=RunConfig(str(tmp_path), save_every=0))
    samples = [{key: value[i] for key, value in DATA.items()} for i in range(len(DATA["input_ids"]))]
    with parallelize(ANALYZED, plan) as engine:
        meshwright.train(engine, DataLoader(samples, batch_size=size))
    warned = [
        text for text in caplog.messages if text.startswith("the DataLoader makes batches of 4 samples")
    ]
    assert len(warned) == is_warned
    assert all("write batch_size=12" in text for text in warned)


@pytest.mark.parametrize("samples", [[DATA], "text.txt"])
def test_samples_that_are_no_dataset_are_refused(samples: object, tmp_path: Path):
    plan = make_plan(ANALYZED, tiny_job(), run=RunConfig(str(tmp_path), save_every=0))
    with (
        parallelize(ANALYZED, plan) as engine,
        pytest.raises(PlanError, match=r"data: the samples are a (list|str)\n.*a dict of tensors"),
    ):
        meshwright.train(engine, samples)
