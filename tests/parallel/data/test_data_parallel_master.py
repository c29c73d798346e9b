"""data_parallel_master: parity, its five kinds of messages, and the bytes through the master beside those of
DDP.
"""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api import parallelize, select_local_batch, trace, verify
from meshwright.comm.collectives.group import World
from meshwright.comm.collectives.ledger import LedgerEntry
from meshwright.engine.losses.gathered_outputs_loss import GlobalBatchLoss
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import LossGuard, OptimizerConfig, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from meshwright.testing.ranks import ProcessPool, run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.engine.two_tower_model import CONTRASTIVE, analyzed_towers, global_batches, towers_plan
from tests.paper_model import FIRST_ROLE
from tests.tiny_model import (
    analyzed_model,
    case_of,
    edited,
    executor_of,
    first_of,
    plan_of,
    tiny_job,
    token_samples,
    verdict_of,
)

LED = (BatchSplit(), DataParallelMaster())


@pytest.fixture(scope="module")
def analyzed() -> AnalyzedModel:
    return analyzed_model()


def master_plan(analyzed: AnalyzedModel, ranks: int = 3, **changes: Any) -> Plan:
    return plan_of(analyzed, ranks, LED, job=tiny_job(**changes))


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_equals_one_device(analyzed: AnalyzedModel, ranks: int):
    plan = master_plan(analyzed, ranks)
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed, plan))
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("count", [13, 17])
def test_it_equals_one_device_with_dropout_and_a_short_last_batch(count: int):
    """Of 13 rows the second batch has 1: the master plays it, and the others stand in."""
    analyzed = analyzed_model(p=0.4, tied=True)
    plan = master_plan(analyzed, data=DataConfig("example", epochs=1))
    verdict = verdict_of(case_of(analyzed, plan, token_samples(count)), steps=2)
    assert verdict.passed, str(verdict)
    assert verdict.num_steps == 2


def on_a_process(world: World) -> tuple[float, dict[str, torch.Tensor]]:
    analyzed = analyzed_model()
    plan = master_plan(analyzed, world.mesh.world_size)
    with parallelize(analyzed, plan, world=world) as engine:
        loss = [
            engine.step(
                select_local_batch({key: v[:12] for key, v in token_samples().items()}, plan, world.rank)
            ).loss
            for _ in range(2)
        ][-1]
        return loss, {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def test_processes_equal_threads_and_all_ranks_end_with_the_same_parameters(process_pool: ProcessPool):
    mesh = Mesh(dp_replicate=3)
    threads, processes = run_on_threads(on_a_process, mesh), process_pool.run(on_a_process, mesh)
    for (loss, parameters), (other, twins) in zip(threads, processes, strict=True):
        assert loss == pytest.approx(other, rel=1e-13)
        assert all(torch.allclose(value, twins[name], rtol=1e-12) for name, value in parameters.items())
        assert all(torch.equal(value, processes[0][1][name]) for name, value in twins.items())


def test_only_the_master_reads_data_and_it_reads_all_of_it(analyzed: AnalyzedModel):
    plan = master_plan(analyzed)
    assert [plan.samples_read(rank) for rank in range(3)] == [list(range(12)), [], []]
    batches_by_rank = [
        open_local_batches(ExampleDataset(token_samples()), plan, rank).batch(0) for rank in range(3)
    ]
    assert len(batches_by_rank[0]["labels"]) == 12
    assert batches_by_rank[1:] == [None, None]
    shares = [
        select_local_batch({key: value[:7] for key, value in token_samples().items()}, plan, rank)
        for rank in range(3)
    ]
    assert [len(batch["labels"]) for batch in shares] == [7, 0, 0]


def entries_of(analyzed: AnalyzedModel, plan: Plan) -> list[list[LedgerEntry]]:
    """Returns what each rank issues in one step."""

    def body(world: World) -> list[LedgerEntry]:
        executor = executor_of(analyzed, plan, world)
        world.ledger.is_recording = True
        executor.step(
            select_local_batch({key: value[:12] for key, value in token_samples().items()}, plan, world.rank)
        )
        return list(world.ledger.entries)

    return run_on_threads(body, plan.mesh)


def through(entries: list[list[LedgerEntry]], rank: int) -> float:
    """The bytes that leave `rank` or come to it, without the two small messages of `batch`."""
    work = [
        [entry for entry in mine if entry.action not in ("TOKEN_COUNT()", "LOSS_SUM()")] for mine in entries
    ]
    sent = sum(entry.sent_nbytes for entry in work[rank])
    to_it = ("gather", "reduce") if rank == 0 else ()
    come = sum(entry.sent_nbytes for mine in work for entry in mine if entry.collective in to_it)
    come += sum(entry.nbytes for entry in work[rank] if entry.collective in ("scatter", "broadcast") and rank)
    return sent + come + sum(entry.sent_nbytes for entry in work[rank] if entry.collective == "all_reduce")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ledger_shows_five_kinds_of_messages_and_the_load_of_the_master_beside_ddp(
    analyzed: AnalyzedModel, ranks: int
):
    mine, theirs = (
        entries_of(analyzed, master_plan(analyzed, ranks)),
        entries_of(analyzed, plan_of(analyzed, ranks)),
    )
    kinds = defaultdict(int)
    for entry in mine[0]:
        kind = "gradient" if "gradient(" in entry.action else entry.action.split("(")[0]
        kinds[kind] += entry.nbytes
    weights = sum(weight.numel for weight in analyzed.model_spec.trainable) * 8
    inputs, outputs = 12 // ranks * 5 * 8, 12 // ranks * 5 * 13 * 8
    five = {
        "SCATTER": inputs,
        "GATHER": outputs,
        "gradient": outputs,
        "REDUCE": weights,
        "BROADCAST": weights + 8,
    }
    assert kinds == {**five, "TOKEN_COUNT": 32, "LOSS_SUM": 8}
    assert {e.action.split("(")[0] for e in theirs[0]} == {"TOKEN_COUNT", "REDUCE", "LOSS_SUM"}

    law = weights + 8 + (ranks - 1) * (weights + inputs + 2 * outputs)  # the norm is 8 bytes
    assert through(mine, 0) == pytest.approx(law, rel=1e-12)
    assert all(
        through(theirs, rank) == pytest.approx(4 * (ranks - 1) / ranks * weights, rel=1e-12)
        for rank in range(ranks)
    )
    assert through(mine, 0) > through(theirs, 0)
    assert all(
        through(mine, rank) < through(mine, 0) or ranks == 2 for rank in range(1, ranks)
    )  # of two, each is the other end


def test_bytes_in_the_plan_are_bytes_in_the_ledger_in_every_dtype(analyzed: AnalyzedModel):
    for precision in (PrecisionConfig(), PrecisionConfig(compute="bfloat16")):
        plan = master_plan(analyzed, precision=precision)
        assert trace(analyzed, plan, [0, 1, 2]).passed
        assert trace(analyzed, plan, [0, 2], fake=False).passed


def test_the_master_steps_float32_master_weights_and_scatters_rounded_weights(analyzed: AnalyzedModel):
    """What one rank steps for all is what each would have stepped for itself."""
    mixed = PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32")

    def body(world: World, plan: Plan) -> tuple[dict[str, list[float]], int]:
        with parallelize(analyzed, plan, world=world) as engine:
            for _ in range(3):
                engine.step(select_local_batch(token_samples(12), plan, world.rank))
            weights = {
                name: value.float().flatten().tolist()
                for name, value in engine.executor.gather_parameters().items()
            }
            return weights, engine.executor.memory_by_category().get("master", 0)

    alone = plan_of(analyzed, 1, (), job=tiny_job(precision=mixed))
    led = run_on_threads(
        lambda world: body(world, master_plan(analyzed, precision=mixed)), Mesh(dp_replicate=3)
    )
    expected, nbytes = run_on_threads(lambda world: body(world, alone), alone.mesh)[0]
    assert [held for _, held in led] == [nbytes, 0, 0]
    for weights, _ in led:
        assert weights == led[0][0]
        for name, values in weights.items():
            assert values == pytest.approx(expected[name], rel=0.05, abs=0.02)
    with pytest.raises(PlanError, match=r"scaled for float16, and only the rank that updates"):
        master_plan(analyzed, precision=PrecisionConfig(compute="float16"))


def test_a_contrastive_loss_is_computed_by_the_master():
    bare = replace(
        CONTRASTIVE, total=lambda outputs, batch: CONTRASTIVE.total((*outputs[:2], torch.ones(())), batch)
    )
    analyzed = analyzed_towers(bare)
    plan = towers_plan(analyzed, Mesh(dp_replicate=3), LED)
    assert static_checks(plan) == []
    verdict = verify(analyzed, plan, global_batches(17), loss=bare)
    assert verdict.passed, str(verdict)


def test_a_step_without_samples_is_skipped_by_all(analyzed: AnalyzedModel):
    plan = master_plan(analyzed)

    def body(world: World) -> bool:
        return executor_of(analyzed, plan, world).step(None).is_skipped

    assert run_on_threads(body, plan.mesh) == [True] * 3


def test_a_checkpoint_contains_the_optimizer_states_of_the_master(analyzed: AnalyzedModel, tmp_path: Path):
    plan = master_plan(analyzed, optimizer=OptimizerConfig("adamw", lr=0.01))
    batch = {key: value[:12] for key, value in token_samples().items()}

    def body(world: World) -> list[float]:
        with parallelize(analyzed, plan, world=world) as engine:
            engine.step(engine.local_batch(batch))
            saved = engine.save(tmp_path)
            after = [engine.step(engine.local_batch(batch)).loss for _ in range(2)]
            engine.load(saved)
            return [*after, *(engine.step(engine.local_batch(batch)).loss for _ in range(2))]

    for first, second, again, repeated in run_on_threads(body, plan.mesh):
        assert (first, second) == (again, repeated)

    def other(world: World) -> list[float]:  # the same checkpoint under another plan
        with parallelize(analyzed, plan_of(analyzed, 2, job=plan.job), world=world) as engine:
            engine.load(next(tmp_path.glob("step-*")))
            return [engine.step(engine.local_batch(batch)).loss for _ in range(2)]

    assert run_on_threads(other, Mesh(dp_replicate=2))[0] == pytest.approx([first, second], rel=1e-12)


def test_an_output_gradient_sent_to_the_wrong_rank_is_noticed(
    analyzed: AnalyzedModel, monkeypatch: pytest.MonkeyPatch
):
    taken = GlobalBatchLoss._scatter_samples

    def shifted(
        self: GlobalBatchLoss, action: Action, column: Any, whole: torch.Tensor | None
    ) -> torch.Tensor:
        swapped = whole.roll(4, 0) if whole is not None and "gradient" in action.subject else whole
        return taken(self, action, column, swapped)

    monkeypatch.setattr(GlobalBatchLoss, "_scatter_samples", shifted)
    step, quantity, _, _ = first_of(verdict_of(case_of(analyzed, master_plan(analyzed))))
    assert (step, quantity) == (0, "gradient")


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        (
            "BROADCAST(head.weight)",
            "1 weights (head.weight...) are not broadcast over dp_replicate after STEP",
        ),
        (
            "REDUCE(head.weight)",
            "the gradient of head.weight stays a partial sum over dp_replicate: no reduce moves it",
        ),
        ("GATHER(output0)", "LOSS(0) needs all samples of output0 and waits for no GATHER of them"),
    ],
)
def test_a_program_without_one_of_the_messages_fails_the_static_checks(
    analyzed: AnalyzedModel, left_out: str, message: str
):
    plan = edited(
        master_plan(analyzed), lambda actions: [action for action in actions if action.name != left_out]
    )
    assert any(message in fault.problem for fault in static_checks(plan))


@pytest.mark.parametrize(
    ("mesh", "job", "micro_batch", "message"),
    [
        (
            Mesh(dp_replicate=3),
            {},
            2,
            "the loss is computed on the whole global batch at once, and micro_batch = 2 splits",
        ),
        (Mesh(dp_replicate=3, tp=2), {}, 0, "the ranks along tp would each have a master of their own"),
        (Mesh(dp_replicate=3), {"guard": LossGuard("stop")}, 0, 'set guard.action = "off"'),
        (
            Mesh(dp_replicate=3),
            {"precision": PrecisionConfig(reduce="bfloat16")},
            0,
            "gradients are sent in float32 here",
        ),
    ],
    ids=["microbatches", "another axis", "guard", "another dtype on the wire"],
)
def test_unsupported_plans_are_refused_with_the_repair(
    analyzed: AnalyzedModel, mesh: Mesh, job: dict, micro_batch: int, message: str
):
    with pytest.raises(PlanError) as caught:
        Plan.make(tiny_job(**job), mesh, analyzed.model_spec, LED, micro_batch)
    assert message in str(caught.value)


def test_an_output_of_the_master_alone_is_refused():
    with pytest.raises(
        PlanError, match=r"(?s)output2 of shape \[\], which is not per sample.*use the strategy \"ddp\""
    ):
        towers_plan(analyzed_towers(), Mesh(dp_replicate=3), LED)


def test_it_and_ddp_on_one_axis_are_refused():
    with pytest.raises(
        PlanError,
        match=("data_parallel_master and ddp both decide how parameters are stored along dp_replicate"),
    ):
        plan_of(analyzed_model(), 3, (*LED, DDP()))


def test_the_program_has_the_messages_in_their_places(analyzed: AnalyzedModel):
    kinds = [action.kind for action in master_plan(analyzed).program.actions(FIRST_ROLE)]
    short = [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]
    inside = [
        "TOKEN_COUNT",
        "SCATTER",
        "F",
        "GATHER",
        "LOSS",
        "SCATTER",
        "B",
        "LOSS_SUM",
        "REDUCE",
        "CLIP",
        "STEP",
        "BROADCAST",
    ]
    assert short == inside
