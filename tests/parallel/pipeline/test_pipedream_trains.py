"""PipeDream as something that trains: it equals a replay of its weight versions, and notices when a backward
meets others.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.func import functional_call

from meshwright.api import make_plan, parallelize, verify
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.pipeline.pipedream import (
    PipeDream,
    max_versions_kept,
    pipedream_schedule,
    weight_versions,
)
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.job import Job, OptimizerConfig, PrecisionConfig, TrainConfig
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.plan.step.single_device_program import stepped_microbatches
from meshwright.plan.step.weight_stashing import forward_versions, staleness
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.run.training.trainer import select_local_batch
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.float64_parity_setup import make_parity_case
from meshwright.verifier.parity import compare_rank, make_verdict
from meshwright.verifier.reference import run_reference
from meshwright.verifier.static_checks import static_checks
from meshwright.verifier.verdict_and_cause import Verdict
from tests.parallel.checkpoint_crossing import loads_under_other_plan
from tests.parallel.pipeline.test_pipeline_strategy import JOB
from tests.parallel.tensor.declared_pairs import pairs
from tests.parallel.tensor.odd_llama import analyzed_llama, batches
from tests.tiny_model import analyzed_model, edited, executor_of, tiny_job, token_samples

NUM_SAMPLES = 6
EACH = replace(JOB, train=TrainConfig(batch=NUM_SAMPLES, clip=0.0))
MIXED = PrecisionConfig(
    "bfloat16", "bfloat16", "bfloat16", master="float32", gradients="bfloat16", optimizer_states="float32"
)
STEPPED = {
    "momentum": (
        OptimizerConfig("sgd", lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    ),
    "adamw": (
        OptimizerConfig("adamw", lr=0.01, weight_decay=0.1),
        lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95)),
    ),
}


def planned(
    analyzed: AnalyzedModel, mesh: Mesh, *strategies: Strategy, job: Job = EACH, micro_batch: int = 1
) -> Plan:
    return make_plan(analyzed, job, mesh, (PipeDream(), *strategies), micro_batch)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_it_equals_a_replay_of_its_weight_versions(ranks: int):
    plan = planned(analyzed_llama(), Mesh(pp=ranks))
    assert not plan.exact
    assert not static_checks(plan)
    verdict = verify(analyzed_llama(), plan, batches(2, NUM_SAMPLES))
    assert verdict.passed, verdict
    assert f"pp {ranks} equals a replay of its weight versions in one process after 2 steps" in str(verdict)


@pytest.mark.parametrize(
    ("mesh", "beside"),
    [
        (Mesh(pp=2, tp=3), (TensorParallel(),)),
        (Mesh(pp=3), (ActivationCheckpointing(),)),
        (Mesh(pp=2, dp_replicate=3), (BatchSplit(), DDP(bucket_mb=0.01))),
        (Mesh(pp=2, dp_replicate=2), (BatchSplit(), NaiveDDP())),
    ],
)
def test_it_does_so_beside_others(mesh: Mesh, beside: tuple[Strategy, ...]):
    plan = planned(analyzed_llama(), mesh, *beside)
    assert not static_checks(plan)
    verdict = verify(analyzed_llama(), plan, batches(2, NUM_SAMPLES))
    assert verdict.passed, verdict


def test_masks_are_those_of_the_samples():
    analyzed = pairs(0.2, layers=4)
    plan = planned(analyzed, Mesh(pp=3), job=replace(EACH, train=TrainConfig(batch=4, clip=0.0)))
    assert verify(analyzed, plan, [token_samples(4), token_samples(4)]).passed


def test_micro_batches_in_which_nothing_counts_are_no_updates():
    plan = planned(analyzed_model(), Mesh(pp=3), job=replace(EACH, train=TrainConfig(batch=12, clip=0.0)))
    assert all(label == -100 for label in token_samples(12)["labels"][3]), "row 3 has no label"
    assert verify(analyzed_model(), plan, [token_samples(12), token_samples(9)]).passed


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rule", STEPPED)
def test_its_optimizer_steps_once_per_micro_batch(ranks: int, rule: str):
    spec, make = STEPPED[rule]
    wide = PrecisionConfig("float64", "float64", "float64")
    plan = planned(analyzed_llama(), Mesh(pp=ranks), job=replace(EACH, optimizer=spec, precision=wide))

    def on_rank(world: World) -> tuple[dict[str, torch.Tensor], list[float]]:
        with parallelize(analyzed_llama(), plan, world=world) as engine:
            losses = [engine.step(engine.local_batch(batch)).loss for batch in batches(2, NUM_SAMPLES)]
            return engine.executor.gather_parameters(), losses

    expected, losses = replayed(plan, make)
    for found, told in run_on_threads(on_rank, plan.mesh):
        assert told == pytest.approx(losses, rel=1e-10)
        for name, value in found.items():
            assert (value - expected[name]).abs().max() <= 1e-10 * expected[name].abs().max(), name


def replayed(plan: Plan, make: Callable) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Plain PyTorch: per microbatch the gradient at the versions that the lists state, and a step of the
    newest weights.
    """
    model, _, newest = analyzed_llama().make_module(torch.device("cpu"), torch.float64)
    stage = {weight.name: plan.sharding.pp_ranks_using(weight)[0] for weight in plan.model_spec.params}
    met = {
        (each.virtual_stage, each.microbatch): each.forward
        for each in weight_versions(pipedream_schedule(plan.mesh.pp, NUM_SAMPLES))
    }
    groups = [[value for value in newest.values() if (value.ndim > 1) is decays] for decays in (True, False)]
    optimizer = make(
        [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0), strict=True)]
    )
    losses = []
    for batch in batches(2, NUM_SAMPLES):
        history = [{name: value.detach().clone() for name, value in newest.items()}]
        total = 0.0
        for micro in range(NUM_SAMPLES):
            used = {name: history[met[stage[name], micro]][name].clone().requires_grad_() for name in newest}
            row = slice(micro, micro + 1)
            logits = functional_call(model, used, kwargs={"input_ids": batch["input_ids"][row]}).logits
            loss = torch.nn.functional.cross_entropy(
                logits.view(-1, logits.shape[-1]), batch["labels"][row].view(-1)
            )
            for name, gradient in zip(used, torch.autograd.grad(loss, list(used.values())), strict=True):
                newest[name].grad = gradient
            optimizer.step()
            history.append({name: value.detach().clone() for name, value in newest.items()})
            total += loss.item()
        losses.append(total / NUM_SAMPLES)
    return {name: value.detach() for name, value in newest.items()}, losses


@pytest.mark.parametrize(("ranks", "micros"), [(2, 6), (3, 6), (4, 6), (4, 2), (3, 1)])
def test_the_program_states_the_versions_of_the_paper(ranks: int, micros: int):
    plan = planned(
        analyzed_llama(), Mesh(pp=ranks), job=replace(EACH, train=TrainConfig(batch=micros, clip=0.0))
    )
    law = {
        (each.virtual_stage, each.microbatch): each.forward
        for each in weight_versions(pipedream_schedule(ranks, micros))
    }
    for stage in range(ranks):
        actions = plan.stage_role(stage).actions
        assert forward_versions(actions) == {micro: law[stage, micro] for micro in range(micros)}
        assert stepped_microbatches(actions) == tuple(range(micros))
        assert staleness(actions) == min(ranks - 1 - stage, micros - 1)
        rooms = {hold.name for action in actions if action.kind == "STASH" for hold in action.allocations}
        assert len(rooms) == max_versions_kept(pipedream_schedule(ranks, micros))[stage] - 1


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("precision", [PrecisionConfig(), MIXED], ids=["float32", "masters"])
def test_each_rank_holds_the_versions_that_the_plan_says(copies: int, precision: PrecisionConfig):
    job = tiny_job(optimizer=OptimizerConfig(), precision=precision, train=TrainConfig(batch=12, clip=0.0))
    beside = (BatchSplit(), DDP()) if copies > 1 else ()
    plan = planned(analyzed_model(), Mesh(pp=3, dp_replicate=copies), *beside, job=job)

    def on_rank(world: World) -> dict[str, int]:
        executor = executor_of(analyzed_model(), plan, world)
        for _ in range(2):
            executor.step(select_local_batch(token_samples(12), plan, world.rank))
        sizes = executor.memory_by_category()
        executor.close()
        return sizes

    for rank, sizes in enumerate(run_on_threads(on_rank, plan.mesh)):
        mine, said = plan.for_rank(rank), state_bytes(plan, rank)
        own = (
            sum(weight.numel for weight in mine.view.model_spec.trainable)
            * FLOAT_NBYTES[precision.parameters]
        )
        assert sizes["parameters"] == said.parameters == own
        kept = {
            hold.name: hold.nbytes
            for action in mine.actions
            for hold in action.allocations
            if action.kind == "STASH"
        }
        assert list(kept.values()) == [own] * (2 - plan.mesh.coordinate(rank)["pp"])
        assert sum(sizes.values()) == said.total, (sizes, said)


def without(*kinds: str) -> Callable[[list[Action]], list[Action]]:
    """The list without these kinds, of which nobody waits for any."""

    def change(actions: list[Action]) -> list[Action]:
        gone = {action.name for action in actions if action.kind in kinds}
        left = [action for action in actions if action.name not in gone]
        return [
            replace(action, waits=tuple(wait for wait in action.waits if wait not in gone)) for action in left
        ]

    return change


def judged(change: Callable[[list[Action]], list[Action]]) -> Verdict:
    """Returns what the comparison finds of a plan with a planted bug that nobody has proved anything of."""
    plan = planned(analyzed_llama(), Mesh(pp=3))
    data = batches(2, NUM_SAMPLES)
    case = make_parity_case(
        analyzed_llama(),
        plan,
        token_cross_entropy(),
        lambda plan, rank: lambda step: select_local_batch(data[step], plan, rank),
    )
    case = replace(case, plan=edited(case.plan, change))
    reference = run_reference(case, 2)
    return make_verdict(
        case, run_on_threads(lambda world: compare_rank(case, world, reference), plan.mesh), "threads", {}
    )


def test_a_backward_with_the_newest_weights_is_noticed():
    change = without("LOAD_STASHED", "LOAD_LATEST")
    faults = [fault.problem for fault in static_checks(edited(planned(analyzed_llama(), Mesh(pp=3)), change))]
    text = (
        "B(model.layers.0, 1) uses the weights after 1 steps, and the forward of its microbatch those after 0"
    )
    assert text in faults
    verdict = judged(change)
    assert not verdict.passed
    assert (verdict.first_difference.step, verdict.first_difference.quantity) == (0, "gradient")


def test_weights_that_are_stepped_where_a_forward_has_met_them_are_noticed():
    plan = edited(planned(analyzed_llama(), Mesh(pp=3)), without("STASH"))
    assert any("loads weights that no STASH has kept" in fault.problem for fault in static_checks(plan))


def test_a_micro_batch_that_is_not_stepped_with_is_noticed():
    def change(actions: list[Action]) -> list[Action]:
        return [action for action in actions if action.name != "STEP(2)"]

    faults = [fault.problem for fault in static_checks(edited(planned(analyzed_llama(), Mesh(pp=3)), change))]
    assert "microbatch 2 has no STEP" in faults
    assert any(
        "adds to the gradients of microbatch 2, and no STEP is between them" in fault for fault in faults
    )


def test_gradients_that_are_summed_after_their_step_are_noticed():
    plan = planned(
        analyzed_model(),
        Mesh(pp=2, dp_replicate=2),
        BatchSplit(),
        DDP(),
        job=replace(EACH, train=TrainConfig(batch=4, clip=0.0)),
    )

    def change(actions: list[Action]) -> list[Action]:
        reduce = next(action.name for action in actions if action.kind == "REDUCE" and action.microbatch == 1)
        return [
            replace(action, waits=tuple(wait for wait in action.waits if wait != reduce))
            for action in actions
        ]

    assert any(
        "CLIP does not wait for REDUCE(0, 1)" in fault.problem
        for fault in static_checks(edited(plan, change))
    )


def test_a_checkpoint_crosses_because_the_pipeline_is_empty(tmp_path: Path):
    plan = planned(analyzed_llama(), Mesh(pp=3), job=replace(EACH, train=TrainConfig(batch=4, clip=0.0)))
    loads_under_other_plan(analyzed_llama(), plan, plan, tmp_path)


def test_with_one_micro_batch_it_goes_on_where_one_device_has_stopped(tmp_path: Path):
    job = replace(EACH, train=TrainConfig(batch=4, clip=0.0))
    loads_under_other_plan(
        analyzed_llama(),
        make_plan(analyzed_llama(), job, Mesh(), ()),
        planned(analyzed_llama(), Mesh(pp=2), job=job, micro_batch=4),
        tmp_path,
    )


def test_training_on_text_lowers_the_loss():
    text = (Path(__file__).parents[3] / "README.md").read_bytes()
    length, steps_taken = 24, 8
    analyzed = analyzed_llama(length=length, vocab_size=256)
    job = Job(
        EACH.model,
        EACH.data,
        TrainConfig(batch=12, clip=0.0),
        OptimizerConfig("adamw", lr=3e-3, weight_decay=0.0),
    )
    job = replace(job, data=replace(job.data, sequence=length))
    plan = planned(analyzed, Mesh(pp=3), job=job)

    def batch(step: int) -> dict[str, torch.Tensor]:
        begins = [(step * 12 + row) * length for row in range(12)]
        windows = torch.tensor([list(text[begin : begin + length + 1]) for begin in begins])
        return {"input_ids": windows[:, :-1], "labels": windows[:, 1:]}

    def on_rank(world: World) -> list[float]:
        with parallelize(analyzed, plan, world=world) as engine:
            return [engine.step(engine.local_batch(batch(step))).loss for step in range(steps_taken)]

    first, *_, last = run_on_threads(on_rank, plan.mesh)[0]
    assert last < first - 1.0, (first, last)
