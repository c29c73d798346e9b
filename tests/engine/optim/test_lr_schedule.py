"""Learning-rate schedules: the factor at the steps where it changes."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.optim import lr_scheduler
from transformers import (
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
)

from meshwright.engine.optim.lr_schedule import TorchLRSchedule, as_lr_scheduler_factory, lr_factor
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.errors import Diagnostic, PlanError, diagnostics_in
from meshwright.plan.job.job import Job, LRScheduleConfig, TrainConfig


def factors(schedule: LRScheduleConfig, steps: int) -> list[float]:
    return [lr_factor(schedule, step, steps) for step in range(steps)]


def test_constant_is_one_throughout_and_beyond():
    assert factors(LRScheduleConfig("constant"), 3) == [1.0] * 3
    assert lr_factor(LRScheduleConfig("constant"), 100, 3) == 1.0


@pytest.mark.parametrize("name", ["constant", "cosine", "wsd"])
def test_warm_up_rises_linearly_to_one(name: str):
    assert factors(LRScheduleConfig(name, warmup=4), 20)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_cosine_is_half_way_in_the_middle_and_ends_at_its_floor():
    schedule = LRScheduleConfig("cosine", warmup=10, floor=0.1)
    found = factors(schedule, 111)
    assert found[10] == 1.0
    assert found[60] == pytest.approx(0.55)
    assert found[110] == pytest.approx(0.1)
    assert lr_factor(schedule, 500, 111) == pytest.approx(0.1)
    assert found[35] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert all(later < earlier for earlier, later in pairwise(found[10:]))


def test_wsd_is_stable_and_then_falls_linearly_to_its_floor():
    schedule = LRScheduleConfig("wsd", warmup=2, decay=4, floor=0.2)
    assert factors(schedule, 10) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert lr_factor(schedule, 99, 10) == pytest.approx(0.2)


def test_wsd_without_decay_stays_at_one_beyond_the_last_step():
    assert [lr_factor(LRScheduleConfig("wsd"), step, 5) for step in (0, 4, 5, 9)] == [1.0] * 4


@pytest.mark.parametrize(
    "schedule",
    [LRScheduleConfig("cosine"), LRScheduleConfig("wsd", decay=1), LRScheduleConfig("cosine", warmup=1)],
)
def test_a_run_of_one_step_has_a_factor(schedule: LRScheduleConfig):
    assert 0 <= lr_factor(schedule, 0, 1) <= 1


def transformers_factors(name: str, warmup: int, steps: int, **options: float) -> list[float]:
    """The learning rates that a scheduler of transformers sets from a base of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if name == "linear":
        scheduler = get_linear_schedule_with_warmup(optimizer, warmup, steps)
    elif name == "polynomial":
        scheduler = get_polynomial_decay_schedule_with_warmup(optimizer, warmup, steps, **options)
    else:
        scheduler = get_inverse_sqrt_schedule(optimizer, warmup, **options)
    found = []
    for _ in range(steps + 3):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (LRScheduleConfig("linear"), {}),
        (LRScheduleConfig("polynomial", floor=0.1, power=2.0), {"lr_end": 0.1, "power": 2.0}),
        (LRScheduleConfig("polynomial", floor=1e-7), {}),
        (LRScheduleConfig("inverse_sqrt"), {}),
        (LRScheduleConfig("inverse_sqrt", timescale=13), {"timescale": 13}),
    ],
)
def test_schedules_of_transformers_have_its_factors_at_every_step_and_beyond(
    warmup: int, schedule: LRScheduleConfig, options: dict[str, float]
):
    ours = replace(schedule, warmup=warmup)
    found = [lr_factor(ours, step, 20) for step in range(23)]
    assert found == pytest.approx(transformers_factors(schedule.name, warmup, 20, **options), rel=1e-12)


def test_linear_and_inverse_sqrt_stay_above_their_floor():
    assert lr_factor(LRScheduleConfig("linear", floor=0.25), 99, 10) == 0.25
    assert lr_factor(LRScheduleConfig("linear", floor=0.5), 5, 10) == 0.75
    assert lr_factor(LRScheduleConfig("inverse_sqrt", warmup=1, floor=0.25), 99, 100) == 0.25


def of_schedule(spec: LRScheduleConfig) -> list[Diagnostic]:
    job = Job(train=TrainConfig(steps=10), lr_schedule=spec)
    return diagnostics_in("lr_schedule", job.diagnostics(RunConfig()))


def test_an_option_of_another_schedule_is_refused_with_the_schedule_that_has_it():
    for key, value, owner in (
        ("decay", 3, "wsd"),
        ("power", 2.0, "polynomial"),
        ("timescale", 5, "inverse_sqrt"),
    ):
        (found,) = of_schedule(LRScheduleConfig("cosine", **{key: value}))
        assert found.location == f"lr_schedule.{key}"
        assert f'name = "{owner}"' in found.fix
        assert not of_schedule(LRScheduleConfig(owner, **{key: value}))


def optimizer_and_schedule(make: object) -> tuple[torch.optim.Optimizer, TorchLRSchedule]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0, momentum=0.9)
    return optimizer, TorchLRSchedule(as_lr_scheduler_factory(make), [optimizer])  # type: ignore[arg-type]


def learning_rates(optimizer: torch.optim.Optimizer, schedule: TorchLRSchedule, steps: int) -> list[float]:
    rates = []
    for step in range(steps):
        rates.append(schedule.begin_step(step))
        optimizer.step()
        schedule.end_step()
    return rates


SCHEDULERS = {
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.CosineAnnealingLR(optimizer, 8)],
        [2],
    ),
    "lambda": lambda step: 1 / (1 + step),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_torch_goes_on_from_its_saved_state(name: str):
    unbroken, schedule = optimizer_and_schedule(SCHEDULERS[name])
    wanted = learning_rates(unbroken, schedule, 10)
    assert len(set(wanted)) > 3
    first, before = optimizer_and_schedule(SCHEDULERS[name])
    assert learning_rates(first, before, 4) == wanted[:4]
    second, after = optimizer_and_schedule(SCHEDULERS[name])
    after.load_state_dict(before.state_dict())
    assert learning_rates(second, after, 6) == wanted[4:]
    group, end = second.param_groups[0], unbroken.param_groups[0]
    assert {key: group[key] for key in ("lr", "momentum")} == {key: end[key] for key in ("lr", "momentum")}


def test_a_plateau_is_told_a_metric_and_not_stepped():
    optimizer, schedule = optimizer_and_schedule(
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    )
    assert learning_rates(optimizer, schedule, 3) == [1.0, 1.0, 1.0]
    for loss in (1.0, 2.0):
        schedule.report_metric(loss)
    assert schedule.begin_step(3) == pytest.approx(0.1)


def test_a_scheduler_that_was_made_for_another_optimizer_is_refused():
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    with pytest.raises(PlanError, match="lr_scheduler is a ExponentialLR, made for an optimizer of your own"):
        as_lr_scheduler_factory(lr_scheduler.ExponentialLR(other, 0.5))  # type: ignore[arg-type]


def test_a_checkpoint_without_a_scheduler_is_refused():
    _, schedule = optimizer_and_schedule(SCHEDULERS["lambda"])
    with pytest.raises(PlanError, match="holds no state of a scheduler, and lr_scheduler was passed"):
        schedule.load_state_dict({})


def test_state_that_is_not_plain_is_refused():
    class Odd(lr_scheduler.LambdaLR):
        def state_dict(self) -> dict:
            return {"odd": object()}

    _, schedule = optimizer_and_schedule(lambda optimizer: Odd(optimizer, lambda step: 1.0))
    with pytest.raises(PlanError, match="the state of the scheduler cannot be saved"):
        schedule.state_dict()
