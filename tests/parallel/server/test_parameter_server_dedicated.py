"""Dedicated servers: ranks that step parameters for the workers, read no samples and run no forward."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.loss_guard import LossSpikeError
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.plan.job.job import LossGuard, PrecisionConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Action
from meshwright.plan.step.simulator import simulate
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.prediction import with_collective_waits
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.report.terminal.memory_and_sent_bytes import servers_text
from meshwright.report.terminal.plan_overview import batch_text
from meshwright.run.checkpoint.distributed_checkpoint import load_tensors
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.messages import issued_messages, planned_messages
from meshwright.verifier.static_checks import static_checks
from tests.parallel.server.server_plans import (
    ADAMW,
    DDP,
    ZERO_1,
    check_crossing,
    dedicated,
    dedicated_plan,
    entries_of,
    group_nbytes,
    held_by,
    samples_of,
    sent,
    server_plan,
    trained,
)
from tests.parallel.tensor.even_llama import analyzed_even_llama
from tests.parallel.tensor.odd_llama import batches
from tests.planner.program_cost.test_rank_memory import assert_holds_planned_bytes
from tests.tiny_model import NUM_SAMPLES, analyzed_model, case_of, edited, executor_of, tiny_job, verdict_of

UNCLIPPED = TrainConfig(steps=20, batch=12, clip=0.0)  # servers add up the norm, each that of its groups
MIXED = PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32")
SPLIT = mw.BatchSplit()
BESIDE: dict[str, tuple[mw.Mesh, tuple[Strategy, ...]]] = {
    "slices": (mw.Mesh(dp_replicate=4, tp=2), (SPLIT, mw.TensorParallel(), dedicated(2))),
    "stages": (mw.Mesh(pp=2, dp_replicate=3), (SPLIT, mw.Pipeline(), dedicated(1))),
    "tied stages": (mw.Mesh(pp=2, dp_replicate=3), (SPLIT, mw.Pipeline(schedule="gpipe"), dedicated(1))),
    "recompute": (
        mw.Mesh(dp_replicate=4),
        (SPLIT, mw.ActivationCheckpointing(), mw.ChunkedLoss(2), dedicated(2)),
    ),
}


def check(analyzed: AnalyzedModel, plan: Plan, data: dict[str, torch.Tensor] | None = None) -> None:
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed, plan, data), 3)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(("workers", "servers", "micro_batch"), [(1, 1, 0), (1, 2, 3), (2, 1, 2), (3, 2, 1)])
def test_it_equals_one_device(workers: int, servers: int, micro_batch: int):
    check(analyzed_model(), dedicated_plan(servers, workers, micro_batch))


@pytest.mark.parametrize("options", [{"tied": True}, {"spare": True}, {"frozen": True}, {"p": 0.3}], ids=str)
def test_it_equals_one_device_with_ties_unused_and_frozen_parameters_and_dropout(
    options: dict[str, float | bool],
):
    analyzed = analyzed_model(**options)
    check(analyzed, dedicated_plan(2, analyzed=analyzed))


@pytest.mark.parametrize("beside", BESIDE)
def test_it_equals_one_device_beside_other_techniques(beside: str):
    mesh, strategies = BESIDE[beside]
    analyzed = analyzed_even_llama() if beside == "slices" else analyzed_model(tied=beside == "tied stages")
    plan = mw.make_plan(analyzed, tiny_job(), mesh, strategies, 1)
    check(analyzed, plan, batches(1, NUM_SAMPLES)[0] if beside == "slices" else None)


def test_servers_step_as_the_optimizer_does_on_one_device():
    (expected,) = trained(mw.make_plan(analyzed_model(), tiny_job(optimizer=ADAMW), mw.Mesh(), ()))
    plan = dedicated_plan(2, 2, optimizer=ADAMW)
    for rank, found in enumerate(trained(plan)):
        assert found.keys() == (held_by(plan, rank) or expected.keys())
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 1), (3, 2)])
def test_every_rank_sends_and_receives_what_the_law_says(workers: int, servers: int):
    plan = dedicated_plan(servers, workers)
    entries, total, received = entries_of(plan), group_nbytes(plan), 0
    for rank in range(workers):
        assert sent(entries[rank], ("REDUCE",)) == total  # all gradients
        assert sent(entries[rank], ("UNSHARD",)) == 0
    for rank in range(workers, workers + servers):
        served = group_nbytes(plan, lambda owner, rank=rank: owner == rank)
        assert sent(entries[rank], ("REDUCE",)) == 0
        assert sent(entries[rank], ("UNSHARD",)) == served
        arriving = [each for each in entries[rank] if each.action.startswith("REDUCE")]
        assert {each.group_size for each in arriving} == {workers + 1}  # no other server takes part
        assert sum((each.group_size - 1) * each.nbytes for each in arriving) == workers * served
        received += served
    assert received == total
    for rank, found in enumerate(entries):
        assert issued_messages(found) == planned_messages(plan.for_rank(rank))


def test_no_bit_depends_on_the_number_of_servers_or_on_where_they_are():
    expected = trained(server_plan(DDP, train=UNCLIPPED))[0]
    for servers in (1, 2):
        plan = dedicated_plan(servers, 3, train=UNCLIPPED)
        for rank, found in enumerate(trained(plan)):
            assert found.keys() == (held_by(plan, rank) or expected.keys())
            assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_workers_read_all_samples_and_servers_none():
    plan = dedicated_plan(2, 3)
    assert sorted(row for rank in range(3) for row in plan.samples_read(rank)) == list(range(12))
    assert plan.samples_read(3) == plan.samples_read(4) == []
    assert batch_text(plan) == "12 samples = 3 workers x 4 micro-batches x 1 sample"
    assert "rank 3 receives" in servers_text(plan)["servers"]


@pytest.mark.parametrize(
    "precision",
    [PrecisionConfig(reduce="bfloat16"), MIXED, replace(MIXED, gradients="float32", reduce="float32")],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True])
def test_every_rank_holds_the_planned_bytes(precision: PrecisionConfig, *, tied: bool):
    plan = dedicated_plan(2, 2, optimizer=ADAMW, precision=precision)
    job = tiny_job(optimizer=ADAMW, precision=precision)
    assert_holds_planned_bytes({"tied": tied}, plan.strategies, plan.mesh, job, 1)


def test_workers_hold_weights_and_gradients_and_servers_what_they_step():
    plan = dedicated_plan(2, 2, optimizer=ADAMW)
    total = group_nbytes(plan)
    for rank in (0, 1):
        held = state_bytes(plan, rank)
        assert (held.parameters, held.gradients) == (total, total)
        assert held.optimizer_states == held.buffers == 0
    for rank in (2, 3):
        held, served = state_bytes(plan, rank), group_nbytes(plan, lambda owner, rank=rank: owner == rank)
        assert (held.parameters, held.gradients) == (served, served)
        assert held.optimizer_states == 2 * served + 4 * len(held_by(plan, rank))
        largest = max(a.transfer.nbytes for a in plan.for_rank(rank).actions if a.kind == "REDUCE")
        assert held.buffers == 2 * largest  # of what arrives, and the sum


def test_a_run_continues_with_the_bits_that_it_would_have_had(tmp_path: Path):
    plan = dedicated_plan(2, 2, optimizer=ADAMW, precision=MIXED)
    whole = trained(plan, range(4))
    trained(plan, range(2), folder=tmp_path)
    for found, expected in zip(
        trained(plan, range(2, 4), start=tmp_path / "step-00000002"), whole, strict=True
    ):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("then", ["among workers", "ddp", "zero", "one more"])
def test_a_run_goes_on_under_another_storage_and_comes_back(then: str, tmp_path: Path):
    mine, other = (
        dedicated_plan(1, 2, optimizer=ADAMW),
        {
            "among workers": server_plan(2, 3, optimizer=ADAMW),
            "ddp": server_plan(DDP, 3, optimizer=ADAMW),
            "zero": server_plan(ZERO_1, 2, optimizer=ADAMW),
            "one more": dedicated_plan(2, 3, optimizer=ADAMW),
        }[then],
    )
    check_crossing(mine, other, tmp_path)


class Normed(nn.Module):
    """A model whose buffers change in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.5)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_buffers_are_those_of_workers(tmp_path: Path):
    loss = mw.Loss(total=lambda outputs, batch: outputs.square().sum(), count=lambda batch: len(batch["x"]))
    data = {"x": torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
    analyzed = mw.analyze(Normed, {"x": data["x"][:2]}, loss=loss)
    plan = mw.make_plan(analyzed, tiny_job(), mw.Mesh(dp_replicate=2), (SPLIT, dedicated(1)))

    def body(world: World) -> dict[str, torch.Tensor]:
        with mw.parallelize(analyzed, plan, world=world) as trainer:
            trainer.step(trainer.local_batch(data))
            trainer.save(tmp_path)
            trainer.load(tmp_path / "step-00000001")
            return {name: buffer.clone() for name, buffer in trainer.module.named_buffers()}

    of_worker, of_server = run_on_threads(body, plan.mesh)
    saved = load_tensors(tmp_path / "step-00000001")[0]
    assert len(of_worker) == 6
    for name, buffer in of_worker.items():
        assert torch.equal(saved[f"buffer/{name}"], buffer)
        assert torch.equal(of_server[name], buffer)  # as it was loaded
        assert buffer.count_nonzero() == buffer.numel()


@pytest.mark.parametrize("stages", [1, 2])
def test_losses_are_evaluated_by_workers(stages: int):
    def body(world: World, plan: Plan) -> float:
        executor = executor_of(analyzed_model(), plan, world)
        executor.step(samples_of(plan, world.rank, 0))
        found = executor.evaluate([samples_of(plan, world.rank, 1), None]).loss
        executor.close()
        return found

    mesh, beside = mw.Mesh(dp_replicate=3, pp=stages), [mw.Pipeline()] if stages > 1 else []
    plan, ddp = plan_on(mesh, *beside, dedicated(1), micro_batch=2), server_plan(DDP, 2)
    expected = run_on_threads(lambda world: body(world, ddp), ddp.mesh)[0]
    found = run_on_threads(lambda world: body(world, plan), plan.mesh)
    assert found == [pytest.approx(expected)] * 3 * stages


def test_a_loss_spike_is_looked_for_on_the_workers():
    guard = LossGuard("stop", factor=1.0001, window=2)
    plan = plan_on(mw.Mesh(pp=2, dp_replicate=3), mw.Pipeline(), dedicated(1), micro_batch=2, guard=guard)

    def body(world: World) -> None:
        executor = executor_of(analyzed_model(), plan, world)
        try:
            for step in range(9):
                executor.step(samples_of(plan, world.rank, step))
        finally:
            executor.close()

    with pytest.raises(LossSpikeError) as caught:
        run_on_threads(body, plan.mesh)
    reports = caught.value.spike.rank_reports
    assert [bool(each.grad_norm) for each in reports] == [True, True, False] * 2


def test_full_parameters_are_refused_on_all_ranks():
    plan = dedicated_plan(1, 1)

    def body(world: World) -> None:
        executor = executor_of(analyzed_model(), plan, world)
        try:
            with executor.full_param_forwards.full_params("GENERATE"):
                pass
        finally:
            executor.close()

    with pytest.raises(mw.PlanError, match=r"last 1 ranks only serve(?s:.*)without dedicated servers"):
        run_on_threads(body, plan.mesh)


def test_a_server_of_many_is_traced_without_memory_and_the_others():
    mesh, strategies = (
        mw.Mesh(dp_replicate=14, tp=2),
        (SPLIT, mw.TensorParallel(), dedicated(2)),
    )
    plan = mw.make_plan(analyzed_even_llama(), tiny_job(batch=48, optimizer=ADAMW), mesh, strategies, 2)
    traced = mw.trace(analyzed_even_llama(), plan, [0, 23, 24, 27])
    assert traced.passed, str(traced)


def plan_on(
    mesh: mw.Mesh,
    *beside: Strategy,
    analyzed: AnalyzedModel | None = None,
    micro_batch: int = 0,
    **job: object,
) -> Plan:
    return mw.make_plan(analyzed or analyzed_model(), tiny_job(**job), mesh, (SPLIT, *beside), micro_batch)


REFUSED = [
    (lambda: dedicated_plan(2, 0), r"servers = 2 of the 2 ranks(?s:.*)no worker(?s:.*)servers = 1 or fewer"),
    (lambda: dedicated_plan(1, 0), r"no worker is left(?s:.*)raise mesh.dp_replicate"),
    (lambda: dedicated_plan(1, 5), r"12 samples does not divide by 5 workers(?s:.*)10 or 15"),
    (lambda: dedicated_plan(6, 2), r"servers = 6, and there are 5 parameter groups"),
    (
        lambda: plan_on(mw.Mesh(pp=2, dp_replicate=5), mw.Pipeline(), dedicated(3)),
        r"servers = 3(?s:.*)1 parameter groups in the stage with fewest(?s:.*)servers = 1 or fewer",
    ),
    (
        lambda: plan_on(mw.Mesh(outer=2, dp_replicate=3), dedicated(1), mw.LocalSGD(sync_every=2)),
        r"ranks along outer share the work(?s:.*)dedicated = false",
    ),
    (
        lambda: plan_on(
            mw.Mesh(dp_replicate=3, cp=2), mw.RingAttention(), dedicated(1), analyzed=analyzed_even_llama()
        ),
        r"ranks along cp share the work(?s:.*)dedicated = false",
    ),
    (
        lambda: plan_on(
            mw.Mesh(dp_replicate=3), dedicated(1), train=TrainConfig(steps=2, batch=12, noise_scale=True)
        ),
        r"noise scale(?s:.*)runs no forward",
    ),
    (
        lambda: mw.Plan.make(
            tiny_job(),
            mw.Mesh(dp_replicate=3),
            analyzed_model().model_spec,
            (SPLIT, dedicated(1)),
            run=mw.RunConfig(sample_tokens=3),
        ),
        r"3 tokens are sampled(?s:.*)sample_tokens = 0",
    ),
]


@pytest.mark.parametrize(("make", "text"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_work_is_refused_with_the_repair(make, text: str):
    with pytest.raises(mw.PlanError, match=text):
        make()


def test_a_server_is_expected_to_step_behind_the_backward_of_its_workers():
    plan = dedicated_plan(1, 2)
    program = with_collective_waits(plan.program, plan.mesh)
    times = {(each.role, each.action.name): each for each in simulate(program)}
    last = max(each.end for (_, name), each in times.items() if name.startswith("B("))
    assert times["pp0_server0", "REDUCE(embed)"].start >= last
    assert times["pp0_server0", "STEP()"].start > times["pp0", "REDUCE(embed)"].end
    assert times["pp0", "GLOBAL_NORM(norm)"].start == times["pp0_server0", "GLOBAL_NORM(norm)"].start


def test_a_server_that_leaves_a_worker_out_is_noticed(monkeypatch: pytest.MonkeyPatch):
    def forgets(size, root, gradient, total, sums, place):
        for peer in range(size - 1):
            yield [], [(peer, place)]
        total.copy_(place)

    monkeypatch.setattr("meshwright.parallel.server.parameter_server.take_rounds", forgets)
    verdict = verdict_of(case_of(analyzed_model(), dedicated_plan(2)), 1)
    assert not verdict.passed
    assert "gradient" in str(verdict)


def test_a_server_that_takes_no_gradient_or_steps_too_early_is_noticed():
    def without(kind: str, actions: list[Action]) -> list[Action]:
        is_server = not any(action.kind == "F" for action in actions)
        return [each for each in actions if each.kind != kind or not is_server]

    def early(actions: list[Action]) -> list[Action]:
        return [replace(each, waits=()) if each.kind == "STEP" else each for each in actions]

    plan = dedicated_plan(1, 2)
    texts = str(static_checks(edited(plan, lambda actions: without("REDUCE", actions))))
    assert "stays a partial sum over dp_replicate" in texts
    texts = str(static_checks(edited(plan, lambda actions: without("UNSHARD", actions))))
    assert "pp0_server0" in texts
    assert "does not wait for CLIP" in str(static_checks(edited(plan, early)))
