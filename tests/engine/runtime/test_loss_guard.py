"""The loss guard: which steps are harmful, that a skipped step leaves no trace, and which rank is named."""

from dataclasses import replace
from math import inf, nan

import pytest
import torch

from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.loss_guard import LossSpikeError, SpikeDetector
from meshwright.engine.runtime.rank_state import Metrics
from meshwright.engine.step.executor import StepExecutor
from meshwright.plan.job.job import LossGuard, OptimizerConfig
from meshwright.plan.strategy_state import guard_states
from meshwright.testing.ranks import run_on_threads
from tests.engine.one_device import bits, job_of, pair, sample_range
from tests.tiny_model import Tiny, analyzed_model, executor_of, plan_of, tensors_of, tiny_job, token_samples

DATA = token_samples(uneven=False)


def harmful_steps(guard: LossGuard, *steps: tuple[float, float]) -> list[tuple[str, ...]]:
    spikes = SpikeDetector(guard, tensors_of(guard_states(guard)))
    return [spikes.check_step(*step) for step in steps]


def test_a_loss_that_is_not_finite_is_harmful_from_the_first_step():
    assert harmful_steps(LossGuard("skip"), (nan, 1.0), (1.0, inf), (1.0, 1.0)) == [
        ("the loss is nan",),
        ("the gradient norm is inf",),
        (),
    ]


def test_a_number_far_above_its_median_is_harmful_once_the_window_is_full():
    steps = [(1.0, 2.0), (90.0, 2.0), (1.0, 2.0), (3.9, 2.0), (1.0, 8.5), (3.9, 7.9), (4.1, 7.9)]
    found = harmful_steps(LossGuard("skip", factor=4.0, window=3), *steps)
    assert found[:3] == [(), (), ()], "three good steps fill the window"
    assert found[3] == ()
    assert found[4] == ("the gradient norm 8.5 is 4.25 times its median 2 of 3 steps",)
    assert found[5] == ()
    assert found[6] == (), "3.9 is usual by now"


def test_harmful_steps_do_not_become_usual():
    guard = LossGuard("skip", factor=2.0, window=2)
    spikes = SpikeDetector(guard, tensors_of(guard_states(guard)))
    assert [bool(spikes.check_step(1.0, norm)) for norm in (1.0, 1.0, 5.0, 5.0, 5.0, 1.5)] == [
        False,
        False,
        True,
        True,
        True,
        False,
    ]


def test_a_factor_of_0_acts_on_what_is_not_finite_only():
    assert harmful_steps(
        LossGuard("skip", factor=0.0, window=2), (1.0, 1.0), (1.0, 1.0), (1e9, 1e9), (nan, 1.0)
    )[2:] == [
        (),
        ("the loss is nan",),
    ]


def test_a_loss_below_0_is_never_far_above():
    assert (
        harmful_steps(
            LossGuard("skip", factor=2.0, window=2), (-9.0, 1.0), (-9.0, 1.0), (-1.0, 1.0), (3.0, 1.0)
        )
        == [()] * 4
    )


def test_the_window_comes_back_as_it_was_and_a_shorter_one_keeps_the_newest():
    saved = tensors_of(guard_states(LossGuard(window=3)))
    first = SpikeDetector(LossGuard("skip", factor=4.0, window=3), saved)
    for step in ((1.0, 2.0), (0.1, 3.0), (1 / 3, 4.0), (1.1, 5.0), (nan, 1.0)):
        first.check_step(*step)
    assert saved["window"].tolist() == [[0.1, 3.0], [1 / 3, 4.0], [1.1, 5.0]]
    assert saved["num_skipped_in_a_row"].item() == 1
    for window in (2, 4):
        done = pair(job=job_of(**guarded("skip", factor=4.0, window=window)), micro_batch=4)
        state_dict = done.executor.state_dict()
        assert state_dict["state/guard/window"].isinf().all()
        saved_names = {f"state/guard/{name}": tensor.clone() for name, tensor in saved.items()}
        done.executor.load_state_dict({**state_dict, **saved_names}, 4)
        resumed = done.executor.state_dict()["state/guard/window"]
        rows = [[0.1, 3.0], [1 / 3, 4.0], [1.1, 5.0]][-window:]
        assert resumed[-len(rows) :].tolist() == rows
        assert resumed[: -len(rows)].isinf().all()


def guarded(action: str, **more: float) -> dict[str, LossGuard]:
    return {"guard": LossGuard(action, **more)}


def poison(executor: StepExecutor, at: int, micro: int | None = None) -> None:
    """Makes the loss of step `at` NaN on this executor's samples (one microbatch); later steps are right."""
    usual = executor.state.loss

    def total(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found = usual.total(outputs, batch)
        bad = executor.steps_done == at and (
            micro is None or batch is executor.state.step.microbatches[micro]
        )
        return found * nan if bad else found

    executor.state.loss = replace(usual, total=total)


@pytest.mark.parametrize(
    "optimizer", [OptimizerConfig("sgd", lr=0.1, momentum=0.9), OptimizerConfig("adamw", lr=0.1)]
)
def test_a_skipped_step_leaves_everything_as_it_was_and_the_next_one_goes_on(optimizer: OptimizerConfig):
    done = pair(lambda: Tiny(p=0.2), job=job_of(optimizer=optimizer, clip=0.1, **guarded("skip")))
    poison(done.executor, at=1)
    assert not done.executor.step(sample_range(DATA, 0, 12)).is_skipped
    before = bits(
        {
            name: value
            for name, value in done.executor.state_dict().items()
            if not name.startswith("state/guard/")
        }
    )
    metrics = done.executor.step(sample_range(DATA, 0, 12))
    after = bits(
        {
            name: value
            for name, value in done.executor.state_dict().items()
            if not name.startswith("state/guard/")
        }
    )
    assert metrics.is_skipped
    assert metrics.spike is not None
    assert after == before
    assert metrics.step == done.executor.steps_done == 2
    assert done.executor.step(sample_range(DATA, 0, 12)).spike is None
    assert bits(done.executor.state_dict()) != before


def test_good_steps_under_guard_are_those_without():
    plain, watched = pair(job=job_of()), pair(job=job_of(**guarded("stop", window=2, factor=100.0)))
    for step in range(4):
        batch = sample_range(DATA, 6 * step, 6 * step + 6)
        assert plain.executor.step(batch) == watched.executor.step(batch)
    assert bits(plain.parameters) == bits(watched.parameters)


def test_a_harmful_step_stops_the_run_with_what_was_found():
    done = pair(job=job_of(**guarded("stop")))
    poison(done.executor, at=2)
    for _ in range(2):
        done.executor.step(sample_range(DATA, 0, 12))
    before = bits(done.parameters)
    with pytest.raises(LossSpikeError) as caught:
        done.executor.step(sample_range(DATA, 0, 12))
    assert str(caught.value).startswith(
        "step 3: the loss is nan and the gradient norm is nan\n  rank 0: loss nan"
    )
    assert "the forward is finite and the loss is not" in str(caught.value)
    assert "repair: lower optimizer.lr" in str(caught.value)
    assert done.executor.steps_done == 2
    assert bits(done.parameters) == before


def test_skipping_a_whole_window_of_steps_stops_the_run():
    done = pair(job=job_of(**guarded("skip", window=3)))
    done.parameters["head.weight"].data.fill_(nan)
    skipped = [done.executor.step(sample_range(DATA, 0, 12)).is_skipped for _ in range(2)]
    assert skipped == [True, True]
    with pytest.raises(
        LossSpikeError, match=r"the last 3 steps were all skipped, so this is not a transient spike"
    ):
        done.executor.step(sample_range(DATA, 0, 12))


def test_a_step_in_which_nothing_counts_is_not_judged():
    done = pair(job=job_of(**guarded("stop")))
    metrics = done.executor.step({**sample_range(DATA, 0, 12), "labels": torch.full((12, 5), -100)})
    assert metrics.is_skipped
    assert metrics.spike is None


@pytest.mark.parametrize("micro_batch", [0, 2])
def test_all_ranks_skip_the_step_of_one_and_name_it(micro_batch: int):
    analyzed = analyzed_model(p=0.1)
    plan = plan_of(analyzed, 3, micro_batch=micro_batch, job=tiny_job(**guarded("skip")))

    def rank(world: World) -> tuple[list[Metrics], dict[str, bytes]]:
        executor = executor_of(analyzed, plan, world)
        if world.rank == 1:
            poison(executor, at=1, micro=plan.num_microbatches - 1)
        mine = sample_range(DATA, 4 * world.rank, 4 * world.rank + 4)
        metrics = [executor.step(mine) for _ in range(3)]
        executor.close()
        return metrics, bits(executor.state_dict())

    found = run_on_threads(rank, plan.mesh)
    assert [[metrics.is_skipped for metrics in each] for each, _ in found] == [[False, True, False]] * 3
    assert found[0][1] == found[1][1] == found[2][1]
    spikes = {str(each[1].spike) for each, _ in found}
    assert len(spikes) == 1
    spike = found[2][0][1].spike
    assert [report.phase for report in spike.rank_reports] == ["", "loss", ""]
    assert spike.culprit is spike.rank_reports[1]
