"""Servers equal one device: alone, with every family beside them, and as processes."""

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.plan.job.job import OptimizerConfig
from meshwright.plan.plan import Plan
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import ProcessPool, run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.parallel.server.server_plans import ADAMW, samples_of, server_plan, trained
from tests.parallel.tensor.even_llama import analyzed_even_llama
from tests.parallel.tensor.odd_llama import batches
from tests.tiny_model import NUM_SAMPLES, analyzed_model, case_of, executor_of, tiny_job, verdict_of

OPTIMIZERS = [
    ADAMW,
    OptimizerConfig("sgd", lr=0.1, momentum=0.9, weight_decay=0.1),
    OptimizerConfig("muon", lr=0.01, momentum=0.95),  # steps whole matrices
    OptimizerConfig("adamw_8bit", lr=0.01),
]
OPTIONS = [{"tied": True}, {"spare": True}, {"frozen": True}, {"p": 0.3}]
SPLIT = mw.BatchSplit()
BESIDE: dict[str, tuple[mw.Mesh, tuple[Strategy, ...], int]] = {
    "stages": (mw.Mesh(pp=2, dp_replicate=2), (SPLIT, mw.Pipeline(), mw.ParameterServer(servers=2)), 1),
    "recompute": (
        mw.Mesh(dp_replicate=3),
        (SPLIT, mw.ActivationCheckpointing(), mw.ChunkedLoss(2), mw.ParameterServer(servers=2)),
        2,
    ),
    "slices": (mw.Mesh(dp_replicate=2, tp=2), (SPLIT, mw.TensorParallel(), mw.ParameterServer(servers=2)), 0),
    "ring": (mw.Mesh(dp_replicate=2, cp=2), (SPLIT, mw.RingAttention(), mw.ParameterServer(servers=3)), 1),
    "ring alone": (mw.Mesh(cp=3), (mw.RingAttention(), mw.ParameterServer("cp", 2)), 0),
}
ATTENDS = ("slices", "ring", "ring alone")  # these need a model with attention


def check(analyzed: AnalyzedModel, plan: Plan, steps: int = 3, data: dict[str, torch.Tensor] | None = None):
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed, plan, data), steps)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(("ranks", "servers", "micro_batch"), [(2, 1, 0), (3, 2, 1), (3, 3, 2)])
def test_it_equals_one_device(ranks: int, servers: int, micro_batch: int):
    check(analyzed_model(), server_plan(servers, ranks, micro_batch))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_every_optimizer_steps_as_on_one_device(optimizer: OptimizerConfig):
    alone = mw.make_plan(analyzed_model(), tiny_job(optimizer=optimizer), mw.Mesh(), ())
    (expected,) = trained(alone)
    for found in trained(server_plan(2, optimizer=optimizer)):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_equals_one_device_with_ties_unused_and_frozen_parameters_and_dropout(
    options: dict[str, float | bool],
):
    analyzed = analyzed_model(**options)
    check(analyzed, server_plan(2, 3, 1, analyzed))


@pytest.mark.parametrize("beside", BESIDE)
def test_it_equals_one_device_beside_other_techniques(beside: str):
    mesh, strategies, micro_batch = BESIDE[beside]
    analyzed = analyzed_even_llama() if beside in ATTENDS else analyzed_model(tied=beside == "stages")
    plan = mw.make_plan(analyzed, tiny_job(), mesh, strategies, micro_batch)
    check(analyzed, plan, 5, batches(1, NUM_SAMPLES)[0] if beside in ATTENDS else None)


def test_a_tied_parameter_has_one_server_for_all_its_stages():
    mesh, strategies, micro_batch = BESIDE["stages"]
    plan = mw.make_plan(analyzed_model(tied=True), tiny_job(), mesh, strategies, micro_batch)
    sums = [action for role in plan.program.roles for action in role.actions if action.kind == "REDUCE_TIED"]
    assert len(sums) == 2
    owners = {each.param.name: each.owner_index for each in plan.sharding.param_shardings}
    served = {
        rank: [
            action.transfer.nbytes > 0
            for action in plan.for_rank(rank).actions
            if action.kind == "REDUCE_TIED" and action.transfer
        ]
        for rank in range(4)
    }
    assert served == {rank: [rank % 2 == owners["embed.weight"]] for rank in range(4)}


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_evaluation_and_noise_scale_are_those_of_ddp(reduce: str):
    train = mw.TrainConfig(steps=20, batch=12, clip=0.0, noise_scale=True)
    precision = mw.PrecisionConfig(reduce=reduce)

    def body(world: World, plan: Plan) -> list[float]:
        executor = executor_of(analyzed_model(), plan, world)
        scales = [executor.step(samples_of(plan, world.rank, step)).noise_scale for step in range(3)]
        loss = executor.evaluate([samples_of(plan, world.rank, 3)]).loss
        executor.close()
        return [loss, *(0.0 if each is None else each for each in scales)]

    servers, ddp = (server_plan(each, train=train, precision=precision) for each in (2, mw.DDP()))
    assert static_checks(servers) == []
    found, expected = (run_on_threads(lambda world, p=p: body(world, p), p.mesh) for p in (servers, ddp))
    assert found == [found[0]] * 3
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert any(expected[0][1:])


def test_a_rank_of_many_is_traced_without_memory_and_the_others():
    job = tiny_job(batch=48, optimizer=ADAMW)
    mesh, strategies = (
        mw.Mesh(dp_replicate=12, tp=2),
        (SPLIT, mw.TensorParallel(), mw.ParameterServer(servers=2)),
    )
    plan = mw.make_plan(analyzed_even_llama(), job, mesh, strategies, 2)
    traced = mw.trace(analyzed_even_llama(), plan, [0, 12, 23])
    assert traced.passed, str(traced)


def on_a_process(world: World) -> list[torch.Tensor]:
    plan = server_plan(2, optimizer=ADAMW)
    executor = executor_of(analyzed_model(), plan, world)
    for step in range(2):
        executor.step(samples_of(plan, world.rank, step))
    return [value.clone() for value in executor.gather_parameters().values()]


def test_processes_have_the_bits_of_threads(process_pool: ProcessPool):
    mesh = mw.Mesh(dp_replicate=3)
    threads, processes = run_on_threads(on_a_process, mesh), process_pool.run(on_a_process, mesh)
    for mine, theirs in zip(threads, processes, strict=True):
        for one, other, first in zip(mine, theirs, processes[0], strict=True):
            assert torch.equal(other, first)
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
