"""Disk offload beside other techniques: every plan ends with the bits of the same plan without it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.job import LossGuard, TrainConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import ProcessPool, run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.engine.one_device import bits
from tests.parallel.checkpoint_crossing import loads_under_other_plan
from tests.parallel.expert.mixture_model import analyzed_mixtral, batch_of, expert_strategies
from tests.parallel.memory.tiers import test_offload_combinations
from tests.parallel.memory.tiers.test_offload_combinations import FP16, SPLIT, ended, job
from tests.parallel.tensor.odd_llama import analyzed_llama, batches, llama

CASES: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    **test_offload_combinations.CASES,
    "gpipe 2, zero 1, recompute": (
        Mesh(pp=2, dp_replicate=2),
        (SPLIT, Pipeline(schedule="gpipe"), ZeRO("dp_replicate", 1), ActivationCheckpointing()),
    ),
    "ddp 3": (Mesh(dp_replicate=3), (SPLIT, DDP())),
    "zero 3 of 3": (Mesh(dp_replicate=3), (SPLIT, ZeRO("dp_replicate", 3))),
}


@pytest.mark.parametrize("case", CASES)
def test_it_changes_no_bit(case: str, tmp_path: Path):
    (mesh, strategies), analyzed = CASES[case], analyzed_llama()
    plain, plan = (
        make_plan(analyzed, job(), mesh, chosen, 2)
        for chosen in (strategies, (*strategies, DiskOffload(str(tmp_path), num_buffers=2)))
    )
    assert static_checks(plan) == []
    data = batches(3, 12)
    found, wanted = (
        run_on_threads(lambda world, each=each: ended(world, analyzed, each, data), mesh)
        for each in (plan, plain)
    )
    assert found == wanted


WEIGHTS = ("optimizer_states", "weights")


@pytest.mark.parametrize("case", ["cp 2, zero 3", "zero 3 of 3", "pp 2, tp 2, zero 3"])
def test_weights_on_disk_change_no_bit(case: str, tmp_path: Path):
    stages = (SPLIT, Pipeline(schedule="1f1b"), TensorParallel(), ZeRO("dp_replicate", 3, keep_mb=0.0))
    mesh, strategies = CASES.get(case, (Mesh(pp=2, tp=2, dp_replicate=2), stages))
    analyzed, data = analyzed_llama(), batches(3, 12)
    disk = DiskOffload(str(tmp_path), 2, WEIGHTS)
    plain, plan = (
        make_plan(analyzed, job(), mesh, chosen, 2) for chosen in (strategies, (*strategies, disk))
    )
    assert static_checks(plan) == []
    found, wanted = (
        run_on_threads(lambda world, each=each: ended(world, analyzed, each, data), mesh)
        for each in (plan, plain)
    )
    assert found == wanted


def test_frozen_weights_rest_on_disk_beside_those_that_are_trained(tmp_path: Path):
    """Their records are read for each use, and no step writes them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "lm_head" in name)
    analyzed, data = analyze(model, batches(1)[0], loss=token_cross_entropy()), batches(2, 12)
    strategies = (SPLIT, ZeRO("dp_replicate", 3))
    plain, plan = (
        make_plan(analyzed, job(), Mesh(dp_replicate=2), chosen, 2)
        for chosen in (strategies, (*strategies, DiskOffload(str(tmp_path), 2, WEIGHTS)))
    )
    actions = plan.for_rank(0).actions
    read, written = (
        {name for each in actions if each.kind == kind for name in each.tensors}
        for kind in ("READ_PARAM", "WRITE_PARAM")
    )
    assert written == {name for name in read if "q_proj" in name or "lm_head" in name} < read
    found, wanted = (
        run_on_threads(lambda world, each=each: ended(world, analyzed, each, data), plan.mesh)
        for each in (plan, plain)
    )
    assert found == wanted


def test_experts_rest_on_disk(tmp_path: Path):
    mesh, strategies = Mesh(ep=2), expert_strategies(ZeRO("dp_shard", 2))
    results, data = [], [batch_of(12, seed) for seed in range(3)]
    unguarded = replace(job(PrecisionConfig()), guard=LossGuard())
    for chosen in (strategies, (*strategies, DiskOffload(str(tmp_path)))):
        plan = make_plan(analyzed_mixtral(), unguarded, mesh, chosen, 3)
        results.append(
            run_on_threads(lambda world, plan=plan: ended(world, analyzed_mixtral(), plan, data), mesh)
        )
    assert results[0] == results[1]


def test_a_skipped_step_writes_nothing(tmp_path: Path):
    """The loss scale is far too large, so the first steps overflow; one of them finds no states at all."""
    strategies, data = (SPLIT, ZeRO("dp_replicate", 2)), batches(5, 12)

    def body(world: World, plan: Plan) -> object:
        with parallelize(analyzed_llama(), plan, world=world) as engine:
            written = []
            for batch in data:
                skipped = engine.step(engine.local_batch(batch)).is_skipped
                copied = world.ledger.copied_nbytes.items()
                total = sum(nbytes for name, nbytes in copied if name.startswith("WRITE_STATES"))
                written.append((skipped, total - sum(each for _, each in written)))
            state = {
                name: value for name, value in engine.executor.state_dict().items() if "state/" not in name
            }
            held = {
                name: value if isinstance(value, torch.Tensor) else value.values
                for name, value in state.items()
            }
            return bits(held), written

    plain, plan = (
        make_plan(analyzed_llama(), job(FP16), Mesh(dp_replicate=2), chosen, 2)
        for chosen in (strategies, (*strategies, DiskOffload(str(tmp_path))))
    )
    wanted, found = (
        run_on_threads(lambda world, each=each: body(world, each), each.mesh) for each in (plain, plan)
    )
    assert [each for each, _ in found] == [each for each, _ in wanted]
    for _, written in found:
        assert [skipped for skipped, _ in written] == [True, True, True, False, False]
        assert [nbytes > 0 for _, nbytes in written] == [False, False, False, True, True]


def on_process(world: World, folder: str) -> object:
    strategies = (SPLIT, ZeRO("dp_replicate", 3))
    plans = (
        make_plan(analyzed_llama(), job(), Mesh(dp_replicate=3), chosen, 2)
        for chosen in (strategies, (*strategies, DiskOffload(folder)))
    )
    wanted, found = (ended(world, analyzed_llama(), plan, batches(2, 12)) for plan in plans)
    return wanted == found


def test_it_changes_no_bit_on_processes(process_pool: ProcessPool, tmp_path: Path):
    assert process_pool.run(on_process, Mesh(dp_replicate=3), str(tmp_path)) == [True] * 3


@pytest.mark.parametrize(
    ("other", "what"),
    [("memory", WEIGHTS[:1]), ("host", WEIGHTS[:1]), ("memory", WEIGHTS)],
    ids=["memory", "host", "memory, weights"],
)
def test_checkpoints_go_to_plans_without_it_and_back(other: str, what: tuple[str, ...], tmp_path: Path):
    analyzed, few = analyzed_llama(), replace(job(PrecisionConfig()), train=TrainConfig(batch=4, clip=0.5))
    elsewhere = (DDP(),) if other == "memory" else (ZeRO("dp_replicate", 2), Offload(step_on="host"))
    plain = make_plan(analyzed, few, Mesh(dp_replicate=2), (SPLIT, *elsewhere))
    disk = (SPLIT, ZeRO("dp_replicate", 3 if "weights" in what else 1), DiskOffload(str(tmp_path), what=what))
    plan = make_plan(analyzed, few, Mesh(dp_replicate=2), disk)
    loads_under_other_plan(analyzed, plain, plan, tmp_path / "plain")
    loads_under_other_plan(analyzed, plan, plain, tmp_path / "on disk")


def test_a_run_that_is_resumed_ends_with_the_bits_of_one_that_was_not_stopped(tmp_path: Path):
    """On disk, then in memory, then on disk again: as without any stop, in memory."""
    analyzed, data = analyzed_llama(), batches(4, 12)
    strategies = (SPLIT, ZeRO("dp_replicate", 2))
    in_memory, on_disk = (
        make_plan(analyzed, job(), Mesh(dp_replicate=2), chosen, 2)
        for chosen in (strategies, (*strategies, DiskOffload(str(tmp_path))))
    )

    def body(world: World, plans: tuple[Plan, ...], folder: Path) -> object:
        for number, plan in enumerate(plans):
            with parallelize(analyzed, plan, world=world) as engine:
                if number:
                    engine.load(folder / str(number - 1) / f"step-{number * len(data) // len(plans):08d}")
                begin, end = (len(data) * each // len(plans) for each in (number, number + 1))
                for batch in data[begin:end]:
                    engine.step(engine.local_batch(batch))
                engine.save(folder / str(number))
                if number == len(plans) - 1:
                    held = engine.executor.state_dict().items()
                    return bits({k: v if isinstance(v, torch.Tensor) else v.values for k, v in held})
        return None

    stopped = (on_disk, in_memory, on_disk, on_disk)
    found = run_on_threads(lambda world: body(world, stopped, tmp_path / "stopped"), in_memory.mesh)
    wanted = run_on_threads(lambda world: body(world, (in_memory,), tmp_path / "whole"), in_memory.mesh)
    assert found == wanted
