"""Out of memory on a rank: planned and live memory, and the cheapest change that fits."""

import re
from dataclasses import replace

import pytest
import torch

from meshwright import api, oom_advice
from meshwright.api import make_plan, parallelize, verify
from meshwright.comm.backends.fake import FakeWorld
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.oom_advice import (
    MemoryUsage,
    OOMAdvisor,
    OutOfMemory,
    PlanChange,
    can_shard_sequence,
    is_out_of_memory,
    oom_message,
    plan_changes,
    planned_nbytes,
    requested_nbytes,
)
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.errors import CollectiveError, PlanError, format_nbytes
from meshwright.plan.job.job import OptimizerConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.launch.failure_record import failure_kind
from tests.parallel.tensor.odd_llama import analyzed_llama, batches
from tests.tiny_model import analyzed_model, tiny_job

CPU = torch.device("cpu")
ANALYZED = analyzed_model()
JOB = tiny_job(optimizer=OptimizerConfig("adamw"))
SHARD = BatchSplit(axis="dp_shard")
ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 4096 bytes. Error"
)


def copies(micro_batch: int = 0) -> Plan:
    return make_plan(ANALYZED, JOB, Mesh(dp_replicate=3), (BatchSplit(), DDP()), micro_batch)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (RuntimeError(ALLOCATOR), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), True),
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (CollectiveError("rank 0 failed first, with OutOfMemory: rank 0 ran out of memory"), False),
    ],
)
def test_an_error_is_one_of_memory_by_its_type_or_its_words(error: Exception, is_one: bool):
    assert is_out_of_memory(error) is is_one


def test_what_was_asked_for_is_read_from_the_words_of_the_allocator():
    assert requested_nbytes(ALLOCATOR) == 4096
    assert requested_nbytes("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0") == 2.5 * 2**30
    assert requested_nbytes("out of memory") == 0


def test_the_changes_come_in_the_order_of_what_they_cost_and_each_takes_less():
    plan = copies()
    found = list(plan_changes(ANALYZED, plan, 0))
    words = [change.description for change in found]
    shards = [f'[[strategies]] name = "zero", axis = "dp_replicate", stage = {stage}' for stage in (1, 2, 3)]
    assert [word for word in words if "zero" in word] == [word for word in shards if word in words]
    assert words.index(shards[0]) < words.index("micro_batch = 2") < words.index(shards[2])
    now = sum(planned_nbytes(plan, 0).values())
    for change in found:
        assert change.nbytes == sum(planned_nbytes(change.plan, 0).values())
        assert change.nbytes < now or change.plan.micro_batch < plan.micro_batch


def test_offload_is_not_advised_where_the_device_is_the_host():
    plan = copies()
    on_device, on_host = (
        [change.description for change in plan_changes(ANALYZED, plan, 0, on_host=each)]
        for each in (False, True)
    )
    assert '[[strategies]] name = "offload"' in on_device
    assert on_host == [each for each in on_device if "offload" not in each]


def test_one_zero_stage_is_replaced_by_the_next_and_the_last_has_none():
    plan = make_plan(ANALYZED, JOB, Mesh(dp_shard=3), (SHARD, ZeRO(stage=2)), 1)
    words = [change.description for change in plan_changes(ANALYZED, plan, 0)]
    assert [word for word in words if "zero" in word] in (
        [],
        ['[[strategies]] name = "zero", axis = "dp_shard", stage = 3'],
    )
    assert not any("micro_batch" in word for word in words), "it is 1 already"


def test_pipelines_are_advised_schedules_with_fewer_micro_batches_in_flight_and_smaller_stages():
    plan = make_plan(ANALYZED, JOB, Mesh(pp=2), (Pipeline(schedule="gpipe"),), 2)
    found = list(plan_changes(ANALYZED, plan, 0))
    leaner = next(change for change in found if change.description == 'strategies.pipeline.schedule = "1f1b"')
    assert leaner.nbytes < sum(planned_nbytes(plan, 0).values())
    assert found.index(leaner) < [change.description for change in found].index("micro_batch = 1")
    again = make_plan(ANALYZED, JOB, Mesh(pp=2), (Pipeline(),), 2)
    assert leaner.description not in [change.description for change in plan_changes(ANALYZED, again, 0)]
    assert "use more ranks (mesh.dp_shard, or mesh.pp for smaller stages)" in oom_message(
        MemoryError(), plan, 0, MemoryUsage(0, 1, None, {}), []
    )


@pytest.mark.parametrize("stores", [(ZeRO(),), (DDP(axis="dp_shard"),)], ids=["shards", "ddp"])
def test_context_parallelism_replaces_data_parallel_ranks(stores: tuple[Strategy, ...]):
    long = analyzed_llama(length=40)
    plan = make_plan(long, tiny_job(), Mesh(dp_shard=2), (SHARD, *stores), 1)
    change = next(change for change in plan_changes(long, plan, 0) if "cp" in change.description)
    assert change.description == 'mesh.cp = 2 in the place of mesh.dp_shard, and [[strategies]] name = "ring"'
    assert (change.plan.mesh, change.plan.micro_batch) == (Mesh(cp=2), 1)
    assert change.nbytes < sum(planned_nbytes(plan, 0).values())
    assert verify(long, change.plan, batches(1, change.plan.job.train.batch, 40)).passed
    assert "mesh.dp_shard, or mesh.cp for fewer tokens of each sample" in oom_message(
        MemoryError(), plan, 0, MemoryUsage(0, 1, None, {}), [], sequence_shardable=can_shard_sequence(long)
    )


def test_context_parallelism_is_not_advised_where_impossible_or_in_use():
    assert not any("cp" in change.description for change in plan_changes(ANALYZED, copies(), 0))
    assert "mesh.cp" not in oom_message(
        MemoryError(),
        copies(),
        0,
        MemoryUsage(0, 1, None, {}),
        [],
        sequence_shardable=can_shard_sequence(ANALYZED),
    )
    sharded = make_plan(analyzed_llama(), tiny_job(), Mesh(cp=2), (RingAttention(), DDP(axis="cp")))
    assert not any(
        "cp" in change.description
        for change in plan_changes(analyzed_llama(), sharded, 0)
        if "zero" not in change.description
    )


def test_no_change_is_advised_that_would_be_refused_for_the_model(monkeypatch: pytest.MonkeyPatch):
    long = analyzed_llama(length=40)
    plan = make_plan(long, tiny_job(), Mesh(dp_shard=2), (SHARD, ZeRO()), 1)
    asked: list[Plan] = []

    def without_sequence_parallel_blocks(plan: Plan, analyzed: AnalyzedModel) -> None:
        asked.append(plan)
        if plan.mesh.cp > 1:
            raise PlanError("its blocks do what no rank can", fix="leave mesh.cp at 1", location="model")

    assert any("cp" in change.description for change in plan_changes(long, plan, 0))
    monkeypatch.setattr(oom_advice, "check_plan_for_model", without_sequence_parallel_blocks)
    found = [change.plan for change in plan_changes(long, plan, 0)]
    assert found
    assert all(plan in asked and plan.mesh.cp == 1 for plan in found)


def test_the_change_that_fits_is_advised_although_others_come_before():
    plan = copies()
    others = [PlanChange(f"change {number}", plan, 100 - number) for number in range(6)]
    text = oom_message(MemoryError(), plan, 0, MemoryUsage(0, 0, 96, {}), others)
    assert "this fits:  change 5" in text
    assert "change 4" not in text


def test_the_message_says_what_was_planned_what_was_live_and_the_first_change_that_fits():
    plan = copies()
    found = list(plan_changes(ANALYZED, plan, 1))
    planned = sum(planned_nbytes(plan, 1).values())
    fitting = found[1]
    limit = 1000 + max(fitting.nbytes, 1) + 1  # as if the process took 1,000 bytes before
    smaller = [replace(change, nbytes=planned) if i < 1 else change for i, change in enumerate(found)]
    text = oom_message(
        RuntimeError(ALLOCATOR),
        plan,
        1,
        MemoryUsage(1000, 1000, limit, {"parameters": 4096, "gradients": 0}),
        smaller,
    )
    lines = text.splitlines()
    assert lines[0].startswith("rank 1 ran out of memory: [enforce fail")
    assert lines[1].startswith("  planned ")
    assert "optimizer_states" in lines[1]
    assert "live       4 KiB (parameters 4 KiB); in all" in lines[2]
    assert f"this fits:  {fitting.description}: " in text
    assert text.count("this fits") == 1


def test_where_nothing_takes_less_or_fits_that_is_said():
    plan, seen = copies(), MemoryUsage(0, 10**9, 10, {})
    assert "no change of this plan takes less: use more ranks" in oom_message(
        MemoryError(), plan, 0, seen, []
    )
    assert "none of them is sure to fit into 10 B" in oom_message(
        MemoryError(), plan, 0, seen, [PlanChange("less", plan, 100)]
    )


def test_a_rank_that_cannot_allocate_ends_with_that_message_and_its_own_error_as_the_cause():
    plan = make_plan(ANALYZED, JOB, Mesh(dp_shard=3), (SHARD, ZeRO(stage=1)))

    def rank() -> None:
        with parallelize(ANALYZED, plan, world=FakeWorld(plan.mesh, 2)) as engine, engine.oom_advisor:
            torch.empty(1 << 60)

    with pytest.raises(
        OutOfMemory, match=r"rank 2 ran out of memory(?s:.*)optimizer_states(?s:.*)live +\d(?s:.*)stage = 3"
    ) as caught:
        rank()
    assert failure_kind(caught.value) == "error"
    assert is_out_of_memory(caught.value.__cause__)


def test_another_error_is_left_as_it_is():
    with pytest.raises(RuntimeError, match=r"^broken$"), OOMAdvisor(ANALYZED, copies(), 0, CPU):
        raise RuntimeError("broken")


@pytest.mark.parametrize("act", ["step", "evaluate"])
def test_in_a_users_own_loop_the_message_is_the_same_and_told_once(monkeypatch: pytest.MonkeyPatch, act: str):
    plan = make_plan(ANALYZED, JOB, Mesh(dp_shard=3), (SHARD, ZeRO(stage=1)))

    def failing(executor: StepExecutor, given: object, **rest: object) -> None:
        raise MemoryError

    monkeypatch.setattr(StepExecutor, act, failing)
    told_twice = r"rank 2 ran out of memory(?s:.*)rank 2 ran"
    with (
        parallelize(ANALYZED, plan, world=FakeWorld(plan.mesh, 2)) as engine,
        pytest.raises(OutOfMemory) as caught,
        engine.oom_advisor,
    ):
        getattr(engine, act)(None)
    held = format_nbytes(sum(engine.executor.memory_by_category().values()))
    assert f"live       {held} (" in str(caught.value)
    assert re.search(told_twice, str(caught.value)) is None
    assert isinstance(caught.value.__cause__, MemoryError)


def test_a_model_that_is_too_large_to_be_made_ends_with_that_message_too(monkeypatch: pytest.MonkeyPatch):
    def failing(*given: object, **rest: object) -> None:
        raise MemoryError

    monkeypatch.setattr(api, "make_trained_module", failing)
    with pytest.raises(OutOfMemory, match="nothing yet: the model was being made"):
        parallelize(ANALYZED, copies(), world=FakeWorld(copies().mesh, 1))
