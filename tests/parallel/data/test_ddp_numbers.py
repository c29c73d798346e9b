"""DDP equals one device, all ranks are equal, and gradients in bfloat16 differ by rounding only."""

from dataclasses import replace
from functools import cache
from hashlib import sha256

import pytest
import torch

from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.rank_state import Metrics, RankState
from meshwright.model.loss.loss_definition import IGNORE_INDEX
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.job import OptimizerConfig, PrecisionConfig
from meshwright.plan.step.program import Action
from meshwright.testing.ranks import ProcessPool, run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import FIRST_ROLE
from tests.tiny_model import analyzed_model, case_of, executor_of, plan_of, tiny_job, verdict_of

SMALL = DDP(bucket_mb=300 / 2**20)
ROUNDING = 2.0**-8  # of bfloat16, relative: 8 bits of significand, to nearest


@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 0), (3, 0), (3, 2), (3, 1)])
@pytest.mark.parametrize("store", [DDP(), SMALL], ids=["one bucket", "many buckets"])
@pytest.mark.parametrize(
    "options", [{}, {"tied": True}, {"spare": True}, {"frozen": True}, {"p": 0.3}], ids=str
)
def test_it_equals_one_device(options: dict[str, float | bool], store: DDP, ranks: int, micro_batch: int):
    analyzed = analyzed_model(**options)
    plan = plan_of(analyzed, ranks, (BatchSplit(), store), micro_batch)
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed, plan))
    assert verdict.passed, str(verdict)
    assert verdict.num_steps == 3


def test_parameters_that_no_step_reaches_are_sent_as_zeros():
    analyzed = analyzed_model(spare=True)
    plan = plan_of(analyzed, 3, (BatchSplit(), SMALL))
    sent = {
        name
        for action in plan.program.actions(FIRST_ROLE)
        if action.kind == "REDUCE"
        for name in action.tensors
    }
    assert "layers.3.linear.weight" in sent
    assert verdict_of(case_of(analyzed, plan)).max_errors["gradient"] < 1e-10


@cache
def reduced_gradients(
    precision: PrecisionConfig, micro_batch: int, store: DDP = SMALL
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The gradients that CLIP sees on rank 1 of 3, and the sum of the magnitudes of all ranks' summands."""
    analyzed = analyzed_model()
    job = replace(tiny_job(), precision=precision)
    plan = plan_of(analyzed, 3, (BatchSplit(), store), micro_batch, job)
    assert static_checks(plan) == []
    read_batch = case_of(analyzed, plan).batch_reader
    seen: dict[int, dict[str, torch.Tensor]] = {}

    def body(world: World) -> None:
        def look(action: Action, state: RankState) -> None:
            seen[world.rank] = {
                name: p.grad.clone() for name, p in state.trained_module.trainable_parameters.items()
            }

        executor_of(analyzed, plan, world, extra_handlers={"CLIP": look}).step(
            read_batch(plan, world.rank)(0)
        )

    run_on_threads(body, plan.mesh)
    for other in (0, 2):
        assert all(torch.equal(seen[1][name], seen[other][name]) for name in seen[1]), (
            "every rank holds the same bits"
        )
    batches = [read_batch(plan, rank)(0) for rank in range(3)]
    count = sum((batch["labels"] != IGNORE_INDEX).sum().item() for batch in batches)
    magnitudes = {name: torch.zeros_like(grad) for name, grad in seen[1].items()}
    for batch in batches:
        module, _, parameters = analyzed.make_module("cpu", torch.float32)
        (token_cross_entropy().total(module(batch["input_ids"]), batch) / count).backward()
        for name, total in magnitudes.items():
            total += parameters[name].grad.abs()
    return seen[1], magnitudes


@pytest.mark.parametrize("micro_batch", [0, 2])
def test_gradients_in_bfloat16_differ_by_their_rounding_only(micro_batch: int):
    """Each of the summands is rounded once and their sum once more; nothing else may differ, and something
    must.
    """
    exact, magnitudes = reduced_gradients(PrecisionConfig(), micro_batch)
    rounded, _ = reduced_gradients(PrecisionConfig(reduce="bfloat16"), micro_batch)
    assert all(grad.dtype == torch.float32 for grad in rounded.values())
    assert any(not torch.equal(rounded[name], exact[name]) for name in exact)
    for name, grad in exact.items():
        bound = (
            ROUNDING * (magnitudes[name] + magnitudes[name] * (1 + ROUNDING)) + 1e-6 * magnitudes[name]
        )  # 1e-6: float32
        assert ((rounded[name] - grad).abs() <= bound).all(), name


def twenty_adam_steps(world: World) -> tuple[dict[str, str], list[Metrics]]:
    analyzed = analyzed_model(p=0.1)
    job = replace(tiny_job(), precision=PrecisionConfig(), optimizer=OptimizerConfig("adamw", lr=0.01))
    plan = plan_of(analyzed, 3, (BatchSplit(), SMALL), 2, job)
    read_batch = case_of(analyzed, plan).batch_reader(plan, world.rank)
    executor = executor_of(analyzed, plan, world)
    metrics = [executor.step(read_batch(step)) for step in range(20)]
    return {
        name: sha256(value.numpy().tobytes()).hexdigest() for name, value in executor.state_dict().items()
    }, metrics


def test_replicas_hold_the_same_bits_after_twenty_adam_steps_in_processes(process_pool: ProcessPool):
    (first, metrics), *others = process_pool.run(twenty_adam_steps, plan_of(analyzed_model(), 3).mesh)
    assert all(other == (first, metrics) for other in others)
    assert metrics[-1].loss < metrics[0].loss
    assert any(name.startswith("optimizer/exp_avg_sq/") for name in first)


def test_the_same_plan_run_twice_gives_the_same_bits():
    runs = [run_on_threads(twenty_adam_steps, plan_of(analyzed_model(), 3).mesh) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0][0] == runs[0][1] == runs[0][2]
