"""The gradient noise scale: computed by hand from each microbatch's gradient, on known noise, and without
effect on training.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan, select_local_batch, trace
from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.build_module import make_trained_module
from meshwright.engine.runtime.rank_state import Metrics, RankState
from meshwright.engine.step.executor import StepExecutor
from meshwright.engine.step.gradient_noise import AVERAGE_DECAY, estimate_signal_and_noise, simple_noise_scale
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.job import Job, LossGuard
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.gradient_noise_actions import REDUCE_SQNORM_NBYTES
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.engine.one_device import bits, job_of, pair, sample_range
from tests.paper_model import FIRST_ROLE
from tests.tiny_model import (
    Tiny,
    analyzed_model,
    case_of,
    executor_of,
    first_of,
    plan_of,
    tiny_job,
    token_samples,
    verdict_of,
)

Rows = dict[str, torch.Tensor]
SMALL_BUCKETS = (BatchSplit(), DDP(bucket_mb=1e-4))
LOSS = token_cross_entropy()
ANALYZED = analyzed_model()


def noisy(job: Job) -> Job:
    return replace(job, train=replace(job.train, noise_scale=True))


def squared(model: nn.Module, total: torch.Tensor) -> float:
    """The squared norm of the gradient of `total`, by autograd alone."""
    grads = torch.autograd.grad(total, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    return sum((grad**2).sum().item() for grad in grads if grad is not None)


def by_hand(model: nn.Module, parts: list[Rows], small: list[Rows]) -> tuple[float, float]:
    """|G|^2 and S of one step: `parts` are the whole batch, `small` those of them that are
    compared with it.
    """

    def total(batch: Rows) -> torch.Tensor:
        return LOSS.total(model(batch["input_ids"]), batch)

    def count(batch: Rows) -> float:
        return LOSS.count(batch).item()

    all_counts, num_rows = sum(map(count, parts)), sum(len(batch["labels"]) for batch in parts)
    big = squared(model, sum(map(total, parts)) / all_counts)
    norms = [squared(model, total(batch) / count(batch)) for batch in small]
    shares = [count(batch) / all_counts for batch in small]
    square = sum(share * norm for share, norm in zip(shares, norms, strict=True)) / sum(shares)
    size = num_rows * sum(shares) / len(small)
    return (num_rows * big - size * square) / (num_rows - size), (square - big) / (1 / size - 1 / num_rows)


def averaged(found: Iterable[tuple[float, float]]) -> list[float]:
    """The ratio of the two averages after each step."""
    g, s, ratios = 0.0, 0.0, []
    for square, variance in found:
        g, s = (
            AVERAGE_DECAY * g + (1 - AVERAGE_DECAY) * square,
            AVERAGE_DECAY * s + (1 - AVERAGE_DECAY) * variance,
        )
        ratios.append(s / g)
    return ratios


def train_and_record(plan: Plan, steps: int = 4) -> list[tuple[list[Metrics], list[nn.Module]]]:
    """Each rank's metrics, and its model as it was before each step."""

    def rank(world: World) -> tuple[list[Metrics], list[nn.Module]]:
        executor, local_batches = (
            executor_of(ANALYZED, plan, world),
            open_local_batches(ExampleDataset(token_samples()), plan, world.rank),
        )
        models, metrics = [], []
        for step in range(steps):
            models.append(make_trained_module(ANALYZED, world.device, torch.float64).module)
            models[-1].load_state_dict(copy.deepcopy(executor.state.trained_module.module.state_dict()))
            metrics.append(executor.step(local_batches.batch(step)))
        executor.close()
        return metrics, models

    return run_on_threads(rank, plan.mesh)


@pytest.mark.parametrize("strategies", [None, SMALL_BUCKETS, (BatchSplit(), NaiveDDP())])
@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 0), (3, 2)])
def test_it_is_what_the_formula_gives_for_every_ranks_own_gradient(ranks: int, micro_batch: int, strategies):
    plan = plan_of(ANALYZED, ranks, strategies, micro_batch, noisy(tiny_job()))
    outcome = train_and_record(plan)
    batches_by_rank = [
        open_local_batches(ExampleDataset(token_samples()), plan, rank) for rank in range(ranks)
    ]
    steps = [[local_batches.batch(step) for local_batches in batches_by_rank] for step in range(4)]
    counts = {LOSS.count(batch).item() for parts in steps for batch in parts}
    assert len(counts) > 1, "the parts must differ in what counts in them"
    expected = averaged(
        by_hand(model, parts, parts) for model, parts in zip(outcome[0][1], steps, strict=True)
    )
    for metrics, _ in outcome:
        assert [each.noise_scale for each in metrics] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("micro_batch", [3, 4])
def test_one_rank_compares_its_first_micro_batch_with_the_whole(micro_batch: int):
    plan = plan_of(ANALYZED, 1, micro_batch=micro_batch, job=noisy(tiny_job()))
    ((metrics, models),) = train_and_record(plan)
    local_batches = open_local_batches(ExampleDataset(token_samples()), plan, 0)
    batches = [local_batches.batch(step) for step in range(4)]
    found = [
        by_hand(model, [b], [sample_range(b, 0, micro_batch)])
        for model, b in zip(models, batches, strict=True)
    ]
    expected = averaged(found)
    assert [each.noise_scale for each in metrics] == pytest.approx(expected, rel=1e-9)


def half_frozen() -> nn.Module:
    model = Tiny()
    for module in (*model.layers[1:], model.head):
        module.requires_grad_(False)
    return model


def test_a_stage_without_trained_parameters_takes_part():
    analyzed = analyze(half_frozen, token_samples(2))

    def noise_scales(mesh: Mesh, *strategies: Strategy) -> list[list[float | None]]:
        plan = make_plan(analyzed, noisy(tiny_job()), mesh, strategies, 3)

        def rank(world: World) -> list[float | None]:
            executor = executor_of(analyzed, plan, world)
            local_batches = open_local_batches(ExampleDataset(token_samples()), plan, world.rank)
            return [executor.step(local_batches.batch(step)).noise_scale for step in range(3)]

        return run_on_threads(rank, mesh)

    (alone,) = noise_scales(Mesh())
    assert noise_scales(Mesh(pp=2), Pipeline()) == [pytest.approx(alone)] * 2


def test_gradients_that_travel_in_another_dtype_are_measured_before_they_are_cast():
    job = noisy(tiny_job())
    job = replace(job, precision=replace(job.precision, reduce="float32"))
    (metrics, models), *_ = train_and_record(plan_of(ANALYZED, 3, job=job), steps=1)
    batches_by_rank = [
        open_local_batches(ExampleDataset(token_samples()), plan_of(ANALYZED, 3, job=job), rank)
        for rank in range(3)
    ]
    parts = [local_batches.batch(0) for local_batches in batches_by_rank]
    (expected,) = averaged([by_hand(models[0], parts, parts)])
    assert metrics[0].noise_scale == pytest.approx(expected, rel=1e-5)


class Shift(nn.Module):
    """Rows minus a vector: with half the squared length as loss, the gradient is the vector minus the mean
    row.
    """

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.vector = nn.Parameter(values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.vector


class Shifts(nn.Module):
    """A model of one such block."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = Shift(torch.full((8,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shift(x)


HALF_SQUARES = Loss(
    total=lambda outputs, batch: 0.5 * (outputs**2).sum(),
    count=lambda batch: torch.tensor(len(batch["x"])),
    targets=("unused",),
)


@pytest.mark.parametrize(
    ("ranks", "micro_batch", "square_within", "variance_within"), [(3, 0, 0.12, 0.56), (1, 4, 0.16, 1.3)]
)
def test_noise_that_is_known_is_found(
    ranks: int, micro_batch: int, square_within: float, variance_within: float
):
    """Rows of variance 1 in 8 dims, a vector of squared length 1/2: S = 8, |G|^2 = 1/2, 16 samples.

    The means of the estimates of 400 steps of 12 samples have the standard errors 0.03 for |G|^2 and 0.14 for
    S on three ranks, 0.04 and 0.32 where one microbatch stands for all three; the bounds are four of them.
    """
    rows_of = {"x": torch.randn(4800, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))}
    analyzed = analyze(Shifts, {"x": rows_of["x"][:2]}, loss=HALF_SQUARES)
    job = noisy(job_of(steps=400))
    job = replace(job, optimizer=replace(job.optimizer, lr=1e-12))
    plan = make_plan(analyzed, job, Mesh(dp_replicate=ranks), None, micro_batch)

    def rank(world: World) -> tuple[torch.Tensor, float | None]:
        executor = StepExecutor(
            plan.for_rank(world.rank),
            RankState(make_trained_module(analyzed, world.device, torch.float64), world, HALF_SQUARES),
        )
        averages = [torch.zeros(2, dtype=torch.float64)]
        for step in range(400):
            metrics = executor.step(
                select_local_batch(sample_range(rows_of, 12 * step, 12 * step + 12), plan, world.rank)
            )
            averages.append(executor.state_dict()["state/noise_scale/averages"].clone())
        executor.close()
        each = [(new - AVERAGE_DECAY * old) / (1 - AVERAGE_DECAY) for old, new in pairwise(averages)]
        return torch.stack(each), metrics.noise_scale

    found, told = run_on_threads(rank, plan.mesh)[0]
    square, variance = found.mean(0).tolist()
    assert square == pytest.approx(0.5, abs=square_within)
    assert variance == pytest.approx(8, abs=variance_within)
    assert told == pytest.approx(16, rel=0.5)


def test_the_estimates_are_exact_where_norms_are_what_is_expected():
    square, variance, small, big = 3.0, 40.0, 5.0, 20.0
    found = estimate_signal_and_noise(square + variance / small, small, square + variance / big, big)
    assert found == pytest.approx((square, variance), rel=1e-12)


@pytest.mark.parametrize(
    ("small", "num_small", "big"),
    [(1.0, 4.0, 2.0), (float("nan"), 2.0, 1.0), (1.0, 2.0, float("inf")), (1.0, 4.5, 1.0)],
)
def test_one_size_and_what_is_not_finite_give_no_estimate(small: float, num_small: float, big: float):
    assert estimate_signal_and_noise(small, num_small, big, 4.0) is None


def test_a_ratio_that_is_no_batch_size_is_not_reported():
    assert [
        simple_noise_scale(2.0, 6.0),
        simple_noise_scale(2.0, 0.0),
        simple_noise_scale(0.0, 1.0),
        simple_noise_scale(-1.0, 1.0),
        simple_noise_scale(1.0, -1.0),
    ] == [3.0, 0.0, None, None, None]


def test_ranks_without_data_do_not_count_and_one_sample_group_gives_no_estimate():
    plan = plan_of(ANALYZED, 3, job=noisy(tiny_job()))
    given = [sample_range(token_samples(uneven=False), 4 * rank, 4 * rank + 4) for rank in range(3)]

    def rank(world: World) -> tuple[nn.Module, list[torch.Tensor], list[Metrics]]:
        executor = executor_of(ANALYZED, plan, world)
        model = copy.deepcopy(make_trained_module(ANALYZED, world.device, torch.float64).module)
        metrics, averages = [], []
        for with_data in (2, 1, 0):
            metrics.append(executor.step(given[world.rank] if world.rank < with_data else None))
            averages.append(executor.state_dict()["state/noise_scale/averages"])
        executor.close()
        return model, averages, metrics

    for model, averages, metrics in run_on_threads(rank, plan.mesh):
        square, variance = by_hand(model, given[:2], given[:2])
        assert averages[0].tolist() == pytest.approx(
            [square * (1 - AVERAGE_DECAY), variance * (1 - AVERAGE_DECAY)], rel=1e-9
        )
        assert torch.equal(averages[1], averages[0])
        assert torch.equal(averages[2], averages[0])
        assert metrics[2].is_skipped
        assert metrics[0].noise_scale == metrics[1].noise_scale == metrics[2].noise_scale


def test_a_step_that_the_guard_leaves_out_does_not_enter_the_averages():
    done = pair(job=noisy(job_of(guard=LossGuard("skip", factor=1.02, window=4))), micro_batch=4)
    data, skipped = token_samples(), 0
    for step in range(8):
        before = done.executor.state_dict()["state/noise_scale/averages"].clone()
        metrics = done.executor.step(sample_range(data, step, step + 12))
        assert (
            torch.equal(before, done.executor.state_dict()["state/noise_scale/averages"])
            == metrics.is_skipped
        )
        skipped += metrics.is_skipped
    assert 0 < skipped < 8


@pytest.mark.parametrize(("ranks", "micro_batch"), [(3, 2), (1, 4)])
@pytest.mark.parametrize("strategies", [SMALL_BUCKETS, (BatchSplit(), NaiveDDP())])
def test_it_changes_no_result_and_passes_the_static_checks(
    ranks: int, micro_batch: int, strategies: tuple[Strategy, ...]
):
    analyzed = analyzed_model(spare=True)
    plain, plan = (
        plan_of(analyzed, ranks, strategies, micro_batch, job) for job in (tiny_job(), noisy(tiny_job()))
    )
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed, plan))
    assert verdict.passed, str(verdict)

    def rank(world: World, plan: Plan) -> dict[str, bytes]:
        executor, local_batches = (
            executor_of(analyzed, plan, world),
            open_local_batches(ExampleDataset(token_samples()), plan, world.rank),
        )
        for step in range(3):
            executor.step(local_batches.batch(step))
        executor.close()
        return bits(
            {
                name: value
                for name, value in executor.state_dict().items()
                if not name.startswith("state/noise_scale/")
            }
        )

    off, on = (
        run_on_threads(lambda world, plan=plan: rank(world, plan), plan.mesh) for plan in (plain, plan)
    )
    assert off == on


def test_its_one_message_is_in_the_program_and_is_what_is_sent():
    plan = plan_of(ANALYZED, 3, SMALL_BUCKETS, job=noisy(tiny_job()))
    (move,) = [
        action.transfer for action in plan.program.actions(FIRST_ROLE) if action.kind == "REDUCE_SQNORM"
    ]
    assert (move.collective, move.nbytes, move.dtype, move.axes) == (
        "all_reduce",
        REDUCE_SQNORM_NBYTES,
        "float64",
        ("dp_replicate",),
    )
    found = trace(ANALYZED, plan, range(3))
    assert found.passed, str(found)
    assert found.planned_nbytes["REDUCE_SQNORM()"] == 24
    wrong = replace(move, nbytes=16)
    spoiled = plan.program.edit(
        lambda listed: [replace(a, transfer=wrong) if a.kind == "REDUCE_SQNORM" else a for a in listed]
    )
    assert not trace(ANALYZED, replace(plan, program=spoiled), [0]).passed
    assert first_of(verdict_of(case_of(ANALYZED, replace(plan, program=spoiled))))[1] == "ledger"


def test_the_averages_come_back_as_they_were_and_begin_anew_without():
    job = noisy(job_of())
    first, second, plain = (
        pair(job=job, micro_batch=4),
        pair(job=job, micro_batch=4),
        pair(job=job_of(), micro_batch=4),
    )
    for _ in range(3):
        first.executor.step(token_samples(12))
        plain.executor.step(token_samples(12))
    assert "state/noise_scale/averages" not in plain.executor.state_dict()
    second.executor.load_state_dict(
        {name: value.clone() for name, value in first.executor.state_dict().items()}, 3
    )
    assert first.executor.step(token_samples(12)) == second.executor.step(token_samples(12))
    second.executor.load_state_dict(plain.executor.state_dict(), 3)
    assert second.executor.state_dict()["state/noise_scale/averages"].tolist() == [0.0, 0.0]
    plain.executor.load_state_dict(first.executor.state_dict(), 3)
    assert plain.executor.step(token_samples(12)).noise_scale is None
