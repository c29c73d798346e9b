"""Embedding hosts: ranks that have the rows of tables, and workers that look them up."""

from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.comm.collectives.ledger import LedgerEntry
from meshwright.engine.optim.make_optimizers import OptimizerMaker
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.plan.job.job import OptimizerConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.planner.program_cost.rank_memory import peak_nbytes, state_bytes
from meshwright.report.terminal.action_table import plan_summary
from meshwright.run.checkpoint.distributed_checkpoint import compare_checkpoints, load_tensors
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.messages import issued_messages, planned_messages
from meshwright.verifier.static_checks import static_checks
from tests.parallel.embedding.host_plans import (
    HISTORY,
    ITEMS,
    LOSS,
    USERS,
    WIDTH,
    executor_on,
    host_plan,
    ratings,
    recommender,
    samples_of,
)
from tests.parallel.server.server_plans import parameters_after
from tests.parallel.tensor.odd_llama import analyzed_llama, batches
from tests.tiny_model import analyzed_model, case_of, tiny_job, verdict_of

ADAMW = OptimizerConfig("adamw", lr=0.01, weight_decay=0.1)
ROW = 8 * WIDTH  # bytes in float64
GRID = [(2, 1, 2), (2, 2, 3), (3, 1, 4), (3, 2, 1), (1, 1, 0)]  # workers, hosts, micro-batch


def trained(
    plan: Plan,
    steps: range = range(3),
    optimizer: OptimizerMaker | None = None,
    start: Path | None = None,
    folder: Path | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Each rank's parameters after `steps`, from the checkpoint `start`; saved in `folder` in the end."""
    return parameters_after(
        plan, lambda world: executor_on(plan, world, optimizer), samples_of, steps, start, folder
    )


def one_device(**job: object) -> Plan:
    return mw.make_plan(recommender(), tiny_job(**job), mw.Mesh(), ())


def check(
    analyzed: AnalyzedModel, plan: Plan, data: dict[str, torch.Tensor] | None, loss: mw.Loss | None
) -> None:
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed, plan, data, loss), 3)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(("workers", "hosts", "micro_batch"), GRID)
@pytest.mark.parametrize("padding", [None, 2])
def test_it_equals_one_device(workers: int, hosts: int, micro_batch: int, padding: int | None):
    analyzed = recommender(padding)
    check(analyzed, host_plan(hosts, workers, micro_batch, analyzed), ratings(), LOSS)


def test_one_of_several_tables_lies_on_hosts():
    plan = host_plan(2, tables=["tables.item"])
    assert [each.param.name for each in plan.sharding.params_on_servers] == ["tables.item.weight"]
    check(recommender(), plan, ratings(), LOSS)


def test_hosts_may_lie_along_the_axis_of_shards():
    strategies = (mw.BatchSplit("dp_shard"), mw.EmbeddingHost("dp_shard"), mw.DDP("dp_shard"))
    plan = mw.make_plan(recommender(), tiny_job(), mw.Mesh(dp_shard=3), strategies, 2)
    check(recommender(), plan, ratings(), LOSS)


def test_language_models_with_a_table_of_their_own_equal_one_device():
    tokens = batches(1, 12)[0]
    llama = analyzed_llama(tie_word_embeddings=False)
    check(llama, host_plan(2, 3, 2, llama), tokens, None)
    dropout = analyzed_model(p=0.3)
    check(dropout, host_plan(1, 2, 1, dropout, beside=[mw.ChunkedLoss(2)]), None, None)


@pytest.mark.parametrize(
    "optimizer",
    [ADAMW, OptimizerConfig("sgd", lr=0.1, momentum=0.9), OptimizerConfig("lion", lr=0.01, weight_decay=0.1)],
    ids=lambda each: each.name,
)
def test_rows_that_nobody_looks_up_are_stepped_as_on_one_device(optimizer: OptimizerConfig):
    (expected,) = trained(one_device(optimizer=optimizer))
    for found in trained(host_plan(2, 3, optimizer=optimizer)):
        assert {"tables.user.weight", "tables.item.weight"} <= found.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)


def test_an_optimizer_of_the_user_steps_rows_on_hosts():
    def adagrad(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(groups, lr=0.1)

    (expected,) = trained(one_device(), optimizer=adagrad)
    for found in trained(host_plan(2, 3), optimizer=adagrad):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)


def test_no_bit_depends_on_the_number_of_hosts():
    unclipped = TrainConfig(steps=20, batch=12, clip=0.0)  # hosts add up the norm, each that of its rows
    one, two = (trained(host_plan(hosts, 3, train=unclipped))[0] for hosts in (1, 2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def entries_of(plan: Plan) -> list[list[LedgerEntry]]:
    """What each rank issues in one step."""

    def body(world: World) -> list[LedgerEntry]:
        executor = executor_on(plan, world)
        world.ledger.is_recording = True
        executor.step(samples_of(plan, world.rank, 0))
        executor.close()
        found = list(world.ledger.entries)
        counts = dict(world.ledger.counts)
        assert issued_messages(found) == planned_messages(plan.for_rank(world.rank), counts=counts)
        return found

    return run_on_threads(body, plan.mesh)


@pytest.mark.parametrize(("workers", "hosts", "micro_batch"), [(2, 1, 2), (3, 2, 1)])
def test_a_worker_sends_and_hosts_send_it_what_the_law_says(workers: int, hosts: int, micro_batch: int):
    plan, kinds = host_plan(hosts, workers, micro_batch), ("PULL_ROWS", "PUSH_ROWS")
    entries, given = entries_of(plan), 0
    for rank in range(workers):
        batch, total = samples_of(plan, rank, 0), 0
        for first in range(0, plan.local_batch, micro_batch):
            part = slice(first, first + micro_batch)
            distinct = sum(len(batch[key][part].unique()) for key in ("user", "items"))
            total += distinct * (8 + ROW) + 2 * 8 * (workers + hosts)  # ids and gradients; counts
            given += distinct * ROW
        assert sum(each.nbytes for each in entries[rank] if each.action.startswith(kinds)) == total
    counts = 2 * plan.num_microbatches * 8 * (workers + hosts) * hosts
    sent = sum(each.nbytes for rank in entries[workers:] for each in rank if each.action.startswith(kinds))
    assert sent == given + counts
    reduced = [each for each in entries[0] if each.action.startswith("REDUCE")]
    assert {each.group_size for each in reduced} == {workers}  # hosts are no part of the sums of ddp


def test_sizes_that_only_a_run_knows_are_expected_and_bounded():
    plan = host_plan(2, 3, 2)
    push = next(a for a in plan.for_rank(0).actions if a.name == "PUSH_ROWS(tables.item, 0)")
    ids = 2 * HISTORY
    assert push.transfer.runtime_size.max_rows == min(ids, ITEMS)
    assert push.transfer.nbytes == ROW * round(ITEMS * (1 - (1 - 1 / ITEMS) ** ids))
    gives = [next(a for a in plan.for_rank(rank).actions if a.kind == "PULL_ROWS") for rank in (3, 4)]
    assert [give.inner_transfers[2].runtime_size.max_rows for give in gives] == [3 * 2, 3 * 2]


def test_every_rank_holds_the_planned_bytes():
    plan = host_plan(2, 3, optimizer=ADAMW)

    def body(world: World) -> dict[str, int]:
        executor = executor_on(plan, world)
        for step in range(2):
            executor.step(samples_of(plan, world.rank, step))
        sizes = executor.memory_by_category()
        executor.close()
        return sizes

    dense = 8 * (plan.model_spec.numel - (USERS + ITEMS) * WIDTH)
    for rank, sizes in enumerate(run_on_threads(body, plan.mesh)):
        said = state_bytes(plan, rank)
        assert sum(sizes.values()) == said.total
        assert (sizes["parameters"], sizes["optimizer_states"]) == (said.parameters, said.optimizer_states)
        assert said.parameters == (dense if rank < 3 else (6 + 4) * ROW)  # of 11 and 7 rows, padding too
        assert peak_nbytes(plan, rank) <= peak_nbytes(plan, rank, at_most=True)
    assert "11 rows of 4, 6 on a host" in plan_summary(plan)["rows"]


def test_a_run_continues_with_the_bits_that_it_would_have_had(tmp_path: Path):
    plan = host_plan(2, 2, optimizer=ADAMW)
    whole = trained(plan, range(4))
    trained(plan, range(2), folder=tmp_path)
    again = trained(plan, range(2, 4), start=tmp_path / "step-00000002")
    for found, expected in zip(again, whole, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("then", ["ddp", "zero", "other hosts"])
def test_a_run_goes_on_under_another_plan_and_comes_back(then: str, tmp_path: Path):
    mine, job = host_plan(2, 2, optimizer=ADAMW), tiny_job(optimizer=ADAMW)
    other = {
        "ddp": lambda: mw.make_plan(
            recommender(), job, mw.Mesh(dp_replicate=3), (mw.BatchSplit(), mw.DDP()), 1
        ),
        "zero": lambda: mw.make_plan(
            recommender(), job, mw.Mesh(dp_shard=2), (mw.BatchSplit("dp_shard"), mw.ZeRO(stage=3)), 1
        ),
        "other hosts": lambda: host_plan(3, 1, optimizer=ADAMW),
    }[then]()
    trained(mine, range(2), folder=tmp_path / "mine")
    first = tmp_path / "mine" / "step-00000002"
    saved = load_tensors(first)[0]
    assert saved["model/tables.user.weight"].shape == (USERS, WIDTH)
    trained(other, range(2, 2), start=first, folder=tmp_path / "other")
    again = tmp_path / "other" / "step-00000002"
    assert compare_checkpoints(first, again) == []
    trained(mine, range(2, 2), start=again, folder=tmp_path / "back")
    assert compare_checkpoints(first, tmp_path / "back" / "step-00000002") == []
    expected, went_on = trained(mine, range(4))[0], trained(other, range(2, 4), start=again)[0]
    for name, value in expected.items():
        torch.testing.assert_close(went_on[name], value, rtol=1e-11, atol=1e-13)


def test_losses_are_evaluated_by_workers():
    def body(world: World, plan: Plan) -> float:
        executor = executor_on(plan, world)
        executor.step(samples_of(plan, world.rank, 0))
        given = [samples_of(plan, world.rank, 1), None][: 1 + world.rank % 2]  # ranks have fewer batches
        found = executor.evaluate(given).loss
        executor.step(samples_of(plan, world.rank, 2))
        executor.close()
        return found

    plan, alone = host_plan(2, 2, 2), one_device()
    expected = run_on_threads(lambda world: body(world, alone), alone.mesh)[0]
    found = run_on_threads(lambda world: body(world, plan), plan.mesh)
    assert found == [pytest.approx(expected)] * 4


def test_a_worker_without_samples_takes_part():
    def body(world: World, plan: Plan) -> float:
        executor = executor_on(plan, world)
        batch = samples_of(plan, world.rank, 0) if world.rank != 1 else None
        found = executor.step(batch).loss
        executor.close()
        return found

    plan = host_plan(1, 2, 2)
    assert len(set(run_on_threads(lambda world: body(world, plan), plan.mesh))) == 1


def test_a_host_of_many_is_traced_without_memory_and_the_others():
    plan = host_plan(3, 12)
    traced = mw.trace(recommender(), plan, [0, 11, 12, 14])
    assert traced.passed, str(traced)


def test_full_parameters_are_refused_on_all_ranks():
    plan = host_plan(1, 1)

    def body(world: World) -> None:
        executor = executor_on(plan, world)
        try:
            with executor.full_param_forwards.full_params("GENERATE"):
                pass
        finally:
            executor.close()

    with pytest.raises(mw.PlanError, match="last 1 ranks only serve"):
        run_on_threads(body, plan.mesh)
