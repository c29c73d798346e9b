"""Offload changes no bit; copies and memory per tier are the plan's, to the byte."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from meshwright.api import make_plan, trace
from meshwright.comm.collectives.group import World
from meshwright.engine.optim.sharded_state_dict import TensorShard
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.parallel.pipeline.pipedream import PipeDream
from meshwright.plan.hardware.memory_tiers import MEMORY_TIERS
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import OptimizerConfig, PrecisionConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.engine.one_device import bits
from tests.tiny_model import (
    NUM_SAMPLES,
    analyzed_model,
    edited,
    executor_of,
    plan_of,
    tiny_job,
    token_samples,
)

ANALYZED = analyzed_model()
BATCH = token_samples(NUM_SAMPLES)
STORES = {
    "ddp": (BatchSplit(), DDP(bucket_mb=300 / 2**20)),
    **{f"zero {stage}": (BatchSplit(), ZeRO(axis="dp_replicate", stage=stage)) for stage in (1, 2, 3)},
}
STATES, GRADIENTS = "optimizer_states", "gradients"
MODES = {
    "device": Offload(),
    "host": Offload(step_on="host"),
    "gradients": Offload((STATES, GRADIENTS), "host"),
    "everything": Offload((STATES, GRADIENTS, "weights"), "host"),
}
PRECISIONS = {
    "float64": PrecisionConfig("float64", "float64", "float64"),
    "masters": PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32"),
    "float32 gradients": PrecisionConfig(
        "bfloat16", "bfloat16", "float32", master="float32", gradients="float32"
    ),
}
SHORT = {"device": {"prefetch": 0}, "host": {}}  # few buffers, so that they are filled again
ADAMW = OptimizerConfig("adamw", lr=0.01)


def trained(plan: Plan, steps: int = 3) -> list[dict[str, object]]:
    """Parameters, states and losses of each rank, and the bytes of its last step and of its memory."""

    def body(world: World) -> dict[str, object]:
        executor = executor_of(ANALYZED, plan, world)
        rows = torch.tensor(plan.samples_read(world.rank))
        found, before = {}, {}
        for step in range(steps):
            before = dict(world.ledger.copied_nbytes)
            metrics = executor.step({key: value[rows] for key, value in BATCH.items()})
            found[f"loss {step}"] = torch.tensor([metrics.loss, metrics.grad_norm])
        evaluated = executor.evaluate([{key: value[rows] for key, value in BATCH.items()}])
        found["evaluation"] = torch.tensor(evaluated.loss)
        saved = executor.state_dict().items()
        found |= {name: value.values if isinstance(value, TensorShard) else value for name, value in saved}
        found = bits({**executor.gather_parameters(use_masters=True), **found})
        copied = {name: n - before.get(name, 0) for name, n in world.ledger.copied_nbytes.items()}
        tiers = {tier: executor.memory_by_category(tier) for tier in MEMORY_TIERS}
        executor.close()
        return {"bits": found, "copied": copied, "memory": tiers}

    return run_on_threads(body, plan.mesh)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("mode", MODES)
def test_it_changes_no_bit(store: str, precision: str, mode: str):
    job = replace(tiny_job(), precision=PRECISIONS[precision], optimizer=ADAMW)
    if store == "ddp" and precision == "float32 gradients":
        pytest.skip("ddp keeps gradients in the dtype of the weights")
    if (mode == "everything" and store != "zero 3") or (mode == "gradients" and store == "ddp"):
        pytest.skip("there are no such shards")
    plain = plan_of(ANALYZED, 2, STORES[store], job=job, micro_batch=2)
    plan = plan_of(ANALYZED, 2, (*STORES[store], MODES[mode]), job=job, micro_batch=2)
    assert static_checks(plan) == []
    found = trained(plan)
    assert [each["bits"] for each in found] == [each["bits"] for each in trained(plain)]
    for rank, each in enumerate(found):
        planned = {
            action.name: action.transfer.nbytes
            for action in plan.for_rank(rank).actions
            if action.stream in ("copy_in", "copy_out")
        }
        assert each["copied"] == planned
        for tier in ("device", "host"):
            said, sizes = state_bytes(plan, rank, tier).as_dict(), each["memory"][tier]
            said["buffers"] += said.pop("gradients")  # in ddp, gradients lie in buckets
            sizes["buffers"] = sizes.pop("buckets") + sizes.pop("gradients")
            assert sizes == {name: n for name, n in said.items() if n or name in sizes}, tier


def without_waits(kind: str) -> Callable[[list[Action]], list[Action]]:
    return lambda actions: [replace(each, waits=()) if each.kind == kind else each for each in actions]


def gathers_at_once(actions: list[Action]) -> list[Action]:
    return [replace(each, waits=()) if each.kind == "UNSHARD" else each for each in actions]


def without(kind: str) -> Callable[[list[Action]], list[Action]]:
    return lambda actions: [each for each in actions if each.kind != kind]


@pytest.mark.parametrize(
    ("step_on", "change", "text"),
    [
        ("device", without_waits("STEP"), r"STEP\(head\) does not wait for FETCH_STATES\(head\)"),
        ("device", without_waits("OFFLOAD_STATES"), r"OFFLOAD_STATES\(\S+\) does not wait for STEP"),
        ("device", without_waits("FETCH_STATES"), r"FETCH_STATES\(\S+\) does not wait for OFFLOAD_STATES"),
        ("device", without("OFFLOAD_STATES"), "updates what no OFFLOAD_STATES or FETCH_PARAM copies"),
        ("host", without_waits("STEP"), r"STEP\(head\) does not wait for OFFLOAD_GRAD\(head\)"),
        ("host", without_waits("OFFLOAD_GRAD"), r"OFFLOAD_GRAD\(\S+\) does not wait for REDUCE"),
        ("host", without_waits("FETCH_PARAM"), r"FETCH_PARAM\(head\) does not wait for STEP\(head\)"),
        ("host", without("OFFLOAD_GRAD"), "reads gradients on the host, and no OFFLOAD_GRAD copies them"),
    ],
)
def test_copies_that_come_too_early_or_never_are_found(
    step_on: str, change: Callable[[list[Action]], list[Action]], text: str
):
    job = tiny_job(optimizer=ADAMW)
    plan = plan_of(ANALYZED, 2, (*STORES["zero 2"], Offload(step_on=step_on, **SHORT[step_on])), job=job)
    assert static_checks(plan) == []
    found = "\n".join(str(diagnostic) for diagnostic in static_checks(edited(plan, change)))
    assert re.search(text, found), found


@pytest.mark.parametrize(
    ("offload", "more", "text"),
    [
        ({"host_gb": 0}, {}, "host_gb = 0; needed is a number above 0"),
        ({"host_gb": 1e-6}, {}, r"needs 2.64 KiB of host memory, and host_gb = 1e-06 allows less"),
        ({"step_on": "disk"}, {}, "step_on"),
        ({"what": ("gradients",), "step_on": "host"}, {}, "leaves out optimizer_states"),
        ({"what": (STATES, GRADIENTS)}, {}, "the device steps, and gradients would be copied"),
        ({"what": (STATES, "weights"), "step_on": "host"}, {}, "no strategy stores shards"),
        ({"step_on": "host", "prefetch": 2}, {}, "prefetch is for states that the device steps"),
        ({}, {"optimizer": OptimizerConfig("muon", momentum=0.9)}, "reads whole matrices"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    offload: dict[str, object], more: dict[str, object], text: str
):
    with pytest.raises(PlanError, match=text) as refused:
        plan_of(
            ANALYZED, 2, (*STORES["zero 1"], Offload(**offload)), job=tiny_job(**{"optimizer": ADAMW, **more})
        )
    assert all(each.fix for each in refused.value.diagnostics)


@pytest.mark.parametrize(
    ("strategies", "micro_batch", "text"),
    [
        ((BatchSplit(), DataParallelMaster()), 0, "one rank updates for all others"),
        ((BatchSplit(), DDP()), 0, "reduced into shards, and no strategy does that"),
        ((BatchSplit(), ZeRO("dp_replicate", 2, "dp_shard")), 0, "summed again afterwards along dp_shard"),
        ((PipeDream(),), 1, "the plan updates after every microbatch"),
    ],
)
def test_other_ways_to_sum_and_to_update_are_refused(
    strategies: tuple[Strategy, ...], micro_batch: int, text: str
):
    mesh = Mesh(pp=2) if micro_batch else Mesh(dp_replicate=2)
    if "dp_shard" in text:
        mesh, strategies = Mesh(dp_replicate=2, dp_shard=2), (BatchSplit("dp_shard"), *strategies)
    job = tiny_job(optimizer=ADAMW, train=TrainConfig(batch=12, clip=0.0))
    offload = MODES["gradients"] if "shard" in text else Offload()
    with pytest.raises(PlanError, match=text):
        make_plan(ANALYZED, job, mesh, (*strategies, offload), micro_batch)


@pytest.mark.parametrize("mode", MODES)
def test_a_trace_finds_the_messages_of_the_plan(mode: str):
    assert trace(ANALYZED, plan_of(ANALYZED, 2, (*STORES["zero 3"], MODES[mode]))).passed


def test_a_shard_is_gathered_after_it_was_fetched():
    plan = plan_of(ANALYZED, 2, (*STORES["zero 3"], MODES["everything"]), job=tiny_job(optimizer=ADAMW))
    problems = [fault.problem for fault in static_checks(edited(plan, gathers_at_once))]
    assert "UNSHARD(embed, F, 0) does not wait for FETCH_PARAM(embed, F, 0)" in problems


def test_an_optimizer_that_was_passed_is_refused():
    plan = plan_of(ANALYZED, 1, (*STORES["ddp"], Offload()), job=tiny_job(optimizer=ADAMW))
    with pytest.raises(PlanError, match="an optimizer that was passed may count its steps"):
        run_on_threads(
            lambda world: executor_of(ANALYZED, plan, world, optimizer=torch.optim.Adagrad), plan.mesh
        )
