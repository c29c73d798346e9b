"""The host steps beside the next step: gradients at weights that lack one update, the same bits in every
run.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.func import functional_call

from meshwright.api import make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.engine.optim.make_optimizers import make_param_groups
from meshwright.engine.optim.optimizer_step import OptimizerUpdate
from meshwright.engine.optim.sharded_state_dict import TensorShard
from meshwright.engine.params.delayed_steps import DelayedSteps
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import LossGuard, OptimizerConfig, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.float64_parity_setup import make_parity_case
from meshwright.verifier.parity import compare_rank, make_verdict
from meshwright.verifier.reference import run_reference
from meshwright.verifier.static_checks import static_checks
from tests.engine.one_device import bits
from tests.parallel.tensor.odd_llama import analyzed_llama, batches
from tests.tiny_model import (
    NUM_SAMPLES,
    analyzed_model,
    case_of,
    edited,
    executor_of,
    plan_of,
    tiny_job,
    token_samples,
    verdict_of,
)

ANALYZED, BATCH = analyzed_model(), token_samples(NUM_SAMPLES)
ROWS = {key: value[:12] for key, value in BATCH.items()}  # of one step
DELAYED, SPLIT = Offload(step_on="host", delay=1), BatchSplit("dp_replicate")
ADAMW = OptimizerConfig("adamw", lr=0.01)
MIXED = PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32")
STORES: dict[str, tuple[Strategy, ...]] = {
    "ddp": (SPLIT, DDP(bucket_mb=300 / 2**20)),
    **{f"zero {stage}": (SPLIT, ZeRO("dp_replicate", stage)) for stage in (1, 2, 3)},
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("store", STORES)
def test_it_equals_a_replay_of_its_weights(store: str, ranks: int):
    plan = plan_of(ANALYZED, ranks, (*STORES[store], DELAYED), micro_batch=2)
    assert static_checks(plan) == []
    assert not plan.exact
    verdict = verdict_of(case_of(ANALYZED, plan), steps=4)
    assert verdict.passed, str(verdict)
    assert "replay" in verdict.reference


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (Mesh(pp=2, dp_replicate=2), (SPLIT, Pipeline(schedule="1f1b"), DDP())),
        (Mesh(pp=2), (Pipeline(schedule="zb_h1"), ActivationCheckpointing())),
        (Mesh(dp_replicate=2, tp=2), (SPLIT, TensorParallel(), ZeRO("dp_replicate", 2))),
    ],
    ids=["1f1b", "zb_h1, recompute", "tp, zero 2"],
)
def test_it_equals_a_replay_beside_others(mesh: Mesh, strategies: tuple[Strategy, ...]):
    analyzed, data = analyzed_llama(), batches(4, 12)
    plan = make_plan(analyzed, tiny_job(), mesh, (*strategies, DELAYED), 2)

    def read_batch(plan: Plan, rank: int) -> Callable[[int], Any]:
        rows = torch.tensor(plan.samples_read(rank))
        return lambda step: {key: value[rows] for key, value in data[step].items()}

    case = make_parity_case(analyzed, plan, token_cross_entropy(), read_batch)
    reference = run_reference(case, 4)
    reports = run_on_threads(lambda world: compare_rank(case, world, reference), plan.mesh)
    verdict = make_verdict(case, reports, "threads", {})
    assert verdict.passed, str(verdict)


def trained(
    plan: Plan, steps: int, folder: Path | None = None, into: Path | None = None, first: int = 0
) -> list[dict[str, bytes]]:
    """What each rank holds after `steps` steps from batch `first`, from what is in `folder`, saved `into`."""

    def body(world: World) -> dict[str, bytes]:
        with parallelize(ANALYZED, plan, world=world) as trainer:
            if folder is not None:
                trainer.load(folder)
            losses = []
            for step in range(first, first + steps):
                rows = (torch.arange(12) + 5 * step) % NUM_SAMPLES
                batch = {key: value[rows] for key, value in BATCH.items()}
                losses.append(trainer.step(trainer.local_batch(batch)).loss)
            if into is not None:
                trainer.save(into)
            saved = trainer.executor.state_dict().items()
            held = {name: each.values if isinstance(each, TensorShard) else each for name, each in saved}
            weights = {f"weight {name}": w for name, w in trainer.executor.gather_parameters().items()}
            return bits({**held, **weights, "loss": torch.tensor(losses[-1:])})

    return run_on_threads(body, plan.mesh)


def mixed_plan(store: str, ranks: int, *strategies: Strategy) -> Plan:
    job = tiny_job(optimizer=ADAMW, precision=MIXED)
    return plan_of(ANALYZED, ranks, (*STORES[store], *strategies), job=job)


def slow_step(step: Callable[..., None]) -> Callable[..., None]:
    def stepped(self: OptimizerUpdate, *args: Any) -> None:
        sleep(0.02)
        step(self, *args)

    return stepped


@pytest.mark.parametrize("store", ["ddp", "zero 3"])
def test_bits_do_not_depend_on_the_time_that_the_host_takes(store: str):
    plan = mixed_plan(store, 2, DELAYED)
    wanted = trained(plan, 4)
    with patch.object(OptimizerUpdate, "step", slow_step(OptimizerUpdate.step)):
        assert trained(plan, 4) == wanted


def test_no_step_is_under_way_while_pages_are_moved():
    """A gradient that the thread sets free under a reader ended the process."""
    under_way, seen, run = [], [], DelayedSteps.run

    def submit(self: DelayedSteps, name: str, step: Callable[[], None]) -> None:
        def stepped() -> None:
            step()
            sleep(0.05)
            under_way.remove(name)

        under_way.append(name)
        run(self, name, stepped)

    plan = mixed_plan("zero 3", 1, DELAYED)
    with (
        patch.object(DelayedSteps, "run", submit),
        patch("meshwright.engine.step.executor.use_huge_pages", lambda _: seen.append(list(under_way))),
    ):
        trained(plan, 3)
    assert seen == [[]]


@pytest.mark.parametrize("store", STORES)
def test_a_run_resumes_to_the_bit(store: str, tmp_path: Path):
    plan = mixed_plan(store, 2, DELAYED)
    wanted = trained(plan, 5)
    trained(plan, 3, into=tmp_path)
    assert trained(plan, 2, next(tmp_path.glob("*/")), first=3) == wanted


def test_other_ranks_take_up_both_kinds_of_weights(tmp_path: Path):
    held = trained(mixed_plan("zero 3", 3, DELAYED), 3, into=tmp_path)[0]
    found = trained(mixed_plan("zero 2", 2, DELAYED), 1, next(tmp_path.glob("*/")), first=3)
    again = trained(mixed_plan("zero 3", 3, DELAYED), 1, next(tmp_path.glob("*/")), first=3)
    names = [name for name in held if name.startswith("weight ")]
    assert len(names) > 5
    # what the step after the load leaves on the device is what had been stepped before it
    assert [found[0][name] for name in names] == [again[0][name] for name in names]


def test_a_plan_without_delay_continues_from_the_stepped_weights(tmp_path: Path):
    """It has the weights of the masters: nothing is owed."""
    delayed, plain = mixed_plan("zero 1", 2, DELAYED), mixed_plan("zero 1", 2)
    trained(delayed, 2, into=tmp_path)
    folder = next(tmp_path.glob("*/"))

    def body(world: World) -> bool:
        with parallelize(ANALYZED, plain, world=world) as trainer:
            trainer.load(folder)
            weights = trainer.executor.gather_parameters()
            masters = trainer.executor.gather_parameters(use_masters=True)
            return all(torch.equal(weights[name], masters[name].bfloat16()) for name in weights)

    assert run_on_threads(body, plain.mesh) == [True, True]


def test_adamw_steps_with_gradients_of_older_weights():
    """Against torch's AdamW by hand, with clipping that always clips."""
    job = tiny_job(optimizer=replace(ADAMW, weight_decay=0.1))
    plan = plan_of(ANALYZED, 1, (DELAYED,), job=job)

    def body(world: World) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        executor = executor_of(ANALYZED, plan, world)
        model, loss = executor.state.trained_module.module, token_cross_entropy()
        stepped = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        groups, config = make_param_groups(job.optimizer, stepped), job.optimizer
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        used = {name: p.detach().clone() for name, p in stepped.items()}
        for _ in range(4):
            leaves = {name: value.clone().requires_grad_() for name, value in used.items()}
            output = functional_call(model, leaves, (ROWS["input_ids"],))
            (loss.total(output, ROWS) / loss.count(ROWS)).backward()
            used = {name: p.detach().clone() for name, p in stepped.items()}
            for name, parameter in stepped.items():
                parameter.grad = leaves[name].grad
            torch.nn.utils.clip_grad_norm_(stepped.values(), job.train.clip)
            optimizer.step()
        for _ in range(4):
            executor.step(ROWS)
        found = executor.gather_parameters(use_masters=True), stepped
        executor.close()
        return found

    ((found, wanted),) = run_on_threads(body, plan.mesh)
    assert {name for name in wanted if not torch.allclose(found[name], wanted[name], rtol=1e-10)} == set()


class Failed(Exception):
    """Raised by the step of an optimizer."""


def test_what_the_thread_raises_is_raised_by_the_next_step():
    plan = mixed_plan("ddp", 1, DELAYED)

    def body(world: World) -> None:
        executor = executor_of(ANALYZED, plan, world)
        with patch.object(executor.state.update, "step", side_effect=Failed):
            executor.step(ROWS)
            with pytest.raises(Failed):
                executor.step(ROWS)
        executor.step(ROWS)
        executor.close()

    run_on_threads(body, plan.mesh)


def test_a_scheduler_that_was_passed_is_refused():
    plan = mixed_plan("ddp", 1, DELAYED)
    with pytest.raises(PlanError, match="a scheduler that was passed changes the rates while the host steps"):
        run_on_threads(
            lambda world: executor_of(
                ANALYZED, plan, world, lr_scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1)
            ),
            plan.mesh,
        )


@pytest.mark.parametrize(
    ("offload", "more", "text"),
    [
        (Offload(delay=1), {}, "nothing runs beside its next step"),
        (
            Offload(("optimizer_states", "gradients"), "host", delay=1),
            {},
            "gradients on the host would be overwritten",
        ),
        (DELAYED, {"guard": LossGuard("skip")}, "the device has newer ones by then"),
    ],
)
def test_what_a_delay_cannot_stand_beside_is_refused(offload: Offload, more: dict[str, Any], text: str):
    with pytest.raises(PlanError, match=text) as refused:
        plan_of(ANALYZED, 2, (*STORES["zero 2"], offload), job=tiny_job(optimizer=ADAMW, **more))
    assert all(each.fix for each in refused.value.diagnostics)


def without_previous_waits(kind: str) -> Callable[[list[Action]], list[Action]]:
    return lambda actions: [
        replace(each, previous_waits=()) if each.kind == kind else each for each in actions
    ]


def fetched_first(actions: list[Action]) -> list[Action]:
    fetches = [each for each in actions if each.kind == "FETCH_PARAM"]
    return [*fetches, *(each for each in actions if each.kind != "FETCH_PARAM")]


def of_no_step(actions: list[Action]) -> list[Action]:
    return [replace(each, previous_waits=("STEP(spam)",)) for each in actions]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without_previous_waits("FETCH_PARAM"), "FETCH_PARAM(head) does not wait for STEP(head) of the step"),
        (
            without_previous_waits("OFFLOAD_GRAD"),
            "OFFLOAD_GRAD(head) does not wait for STEP(head) of the step",
        ),
        (fetched_first, "replaces weights before B(embed, 0) has used them"),
        (of_no_step, "waits for STEP(spam) of the step before, which this rank does not run"),
    ],
)
def test_copies_that_meet_a_step_under_way_are_found(
    change: Callable[[list[Action]], list[Action]], text: str
):
    plan = plan_of(ANALYZED, 2, (*STORES["zero 2"], DELAYED), job=tiny_job(optimizer=ADAMW))
    assert static_checks(plan) == []
    assert text in "\n".join(str(each) for each in static_checks(edited(plan, change)))
