"""What rests on disk is in no memory, and steps that fail or are left out leave the file as it was."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from benchmarks.harness.live_bytes import live_bytes
from meshwright.api import make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.engine.params import rank_file
from meshwright.engine.step.executor import StepExecutor
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.tiers.disk_offload import DiskOffload
from meshwright.plan.hardware.memory_tiers import FILE_BLOCK_NBYTES
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import OptimizerConfig, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.flat_param import round_up
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.memory.model_states import group_states
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.testing.ranks import run_on_threads
from tests.engine.one_device import bits
from tests.parallel.memory.tiers.test_offload_combinations import job
from tests.parallel.tensor.odd_llama import analyzed_llama, batches
from tests.tiny_model import analyzed_model, executor_of, plan_of, tiny_job, token_samples

ANALYZED = analyzed_model()
BATCH = token_samples(12)
MASTERS = PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32")


def planned(*strategies: object) -> Plan:
    trained = tiny_job(precision=MASTERS, optimizer=OptimizerConfig("adamw", lr=0.01))
    return plan_of(ANALYZED, 1, strategies, job=trained)


def on_rank(plan: Plan, body: Callable[[StepExecutor, World], object]) -> object:
    """What `body` returns on the one rank of `plan`, whose file is closed afterwards."""

    def run(world: World) -> object:
        executor = executor_of(ANALYZED, plan, world)
        try:
            return body(executor, world)
        finally:
            executor.close()

    return run_on_threads(run, plan.mesh)[0]


def stepped(executor: StepExecutor, steps: int) -> dict[str, object]:
    for _ in range(steps):
        executor.step(BATCH)
    return bits(executor.state_dict())


WEIGHTS = ("optimizer_states", "weights")
SHARDS = (BatchSplit(), ZeRO("dp_replicate", 3, keep_mb=0.0))


@pytest.mark.parametrize("what", [WEIGHTS[:1], WEIGHTS])
def test_live_storages_are_those_that_the_plan_says_in_all_tiers(what: tuple[str, ...], tmp_path: Path):
    store = SHARDS if "weights" in what else ()
    plain, plan = planned(*store), planned(*store, DiskOffload(str(tmp_path), 2, what))

    def live_nbytes() -> int:
        gc.collect()
        return live_bytes()

    def held(each: Plan) -> int:
        before = live_nbytes()

        def body(executor: StepExecutor, world: World) -> int:
            executor.step(BATCH)
            executor.step(BATCH)
            return live_nbytes() - before

        return on_rank(each, body)

    held(plain)  # what the first run of a process keeps
    said = sum(state_bytes(plan, 0, tier).total for tier in ("device", "host", "disk"))
    said += 4 * len(ANALYZED.model_spec.trainable)  # of a master on disk, one element is in memory
    assert held(plan) - held(plain) == said - state_bytes(plain, 0).total
    assert state_bytes(plan, 0, "host").model_states == state_bytes(plan, 0, "host").gradients


class Failed(Exception):
    """Raised in the middle of a step."""


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_step_that_failed_leaves_the_states_as_they_were(steps_before: int, tmp_path: Path):
    plan = planned(DiskOffload(str(tmp_path)))

    def body(executor: StepExecutor, world: World) -> list[object]:
        before, step = stepped(executor, steps_before), executor.state.update.step

        def fails_afterwards(names: object) -> None:
            step(names)
            raise Failed

        with patch.object(executor.state.update, "step", fails_afterwards), pytest.raises(Failed):
            executor.step(BATCH)
        after = {name: value for name, value in bits(executor.state_dict()).items() if "model" not in name}
        return [after, {name: value for name, value in before.items() if "model" not in name}]

    after, before = on_rank(plan, body)
    assert after == before


@pytest.mark.parametrize("where", ["clip", "step"])
def test_a_step_after_one_that_failed_before_its_update_goes_on_from_the_file(where: str, tmp_path: Path):
    plan = planned(DiskOffload(str(tmp_path), num_buffers=2))

    def body(executor: StepExecutor, world: World) -> object:
        stepped(executor, 1)
        with patch.object(executor.state.update, where, side_effect=Failed), pytest.raises(Failed):
            executor.step(BATCH)
        return stepped(executor, 1)

    assert on_rank(plan, body) == on_rank(plan, lambda executor, world: stepped(executor, 2))


def test_the_first_step_reads_masters_alone_and_later_ones_whole_records(tmp_path: Path):
    analyzed = analyzed_llama()  # with records of several blocks
    plan = make_plan(analyzed, job(), Mesh(), (DiskOffload(str(tmp_path), num_buffers=2),))

    def body(world: World) -> list[dict[str, int]]:
        found, before = [], dict[str, int]()
        with parallelize(analyzed, plan, world=world) as engine:
            for batch in batches(2, 12):
                engine.step(batch)
                copied = {name: n - before.get(name, 0) for name, n in world.ledger.copied_nbytes.items()}
                before = dict(world.ledger.copied_nbytes)
                found.append({name: n for name, n in copied.items() if "STATES" in name})
        return found

    ((first, second),) = run_on_threads(body, plan.mesh)
    said = {each.name: each.transfer.nbytes for each in plan.for_rank(0).actions if each.stream == "disk"}
    assert second == said
    for group in group_states(plan.job, plan.rank_view(0)):
        assert first[f"WRITE_STATES({group.name})"] == group.record_nbytes
        masters = round_up(group.master_nbytes, FILE_BLOCK_NBYTES)
        assert first[f"READ_STATES({group.name})"] == masters
    assert sum(first.values()) < sum(second.values())


def test_nothing_is_in_the_folder_while_a_run_uses_it_and_afterwards(tmp_path: Path):
    plan = planned(DiskOffload(str(tmp_path)))

    def body(executor: StepExecutor, world: World) -> list[str]:
        stepped(executor, 2)
        return os.listdir(tmp_path)

    assert on_rank(plan, body) == os.listdir(tmp_path) == []


@pytest.mark.parametrize(("call", "kind"), [("preadv", "READ_STATES"), ("pwritev", "WRITE_STATES")])
def test_a_disk_that_fails_in_mid_run_ends_the_step_with_its_name(call: str, kind: str, tmp_path: Path):
    plan = planned(DiskOffload(str(tmp_path)))

    def body(executor: StepExecutor, world: World) -> str:
        stepped(executor, 1)
        error = OSError(5, "Input/output error")
        with patch.object(rank_file.os, call, side_effect=error), pytest.raises(PlanError) as refused:
            executor.step(BATCH)
        return str(refused.value)

    text = on_rank(plan, body)
    assert kind in text
    assert f"in '{tmp_path}': Input/output error (EIO)" in text


def test_an_optimizer_that_keeps_more_than_the_plan_says_is_an_error(tmp_path: Path):
    plan = planned(DiskOffload(str(tmp_path)))

    def body(executor: StepExecutor, world: World) -> None:
        step = executor.state.update.step

        def keeps_more(names: object) -> None:
            step(names)
            for states in executor.state.optimizers[0].state.values():
                states["extra"] = torch.zeros(5000)

        with (
            patch.object(executor.state.update, "step", keeps_more),
            pytest.raises(ValueError, match=r"extra of .* and the plan leaves room for 4096"),
        ):
            executor.step(BATCH)

    on_rank(plan, body)


def test_an_evaluation_reads_weights_and_leaves_them_out_of_memory(tmp_path: Path):
    """Also the first thing of all; a disk that fails then is an error."""
    plain, plan = planned(*SHARDS), planned(*SHARDS, DiskOffload(str(tmp_path), 2, WEIGHTS))
    error = OSError(5, "Input/output error")

    def body(executor: StepExecutor, world: World) -> list[float]:
        found = [executor.evaluate([BATCH]).loss]
        executor.step(BATCH)
        found.append(executor.evaluate([BATCH]).loss)
        if executor.state.disk is not None:
            with (
                patch.object(rank_file.os, "preadv", side_effect=error),
                pytest.raises(PlanError, match="EIO"),
            ):
                executor.evaluate([BATCH])
        executor.step(BATCH)
        return [*found, executor.evaluate([BATCH]).loss]

    assert on_rank(plan, body) == on_rank(plain, body)


@pytest.mark.parametrize(("call", "kind"), [("preadv", "READ_PARAM"), ("pwritev", "WRITE_PARAM")])
def test_a_disk_that_fails_at_weights_ends_the_step_with_its_name(call: str, kind: str, tmp_path: Path):
    plan = planned(*SHARDS, DiskOffload(str(tmp_path), what=WEIGHTS))

    def body(executor: StepExecutor, world: World) -> str:
        executor.step(BATCH)
        error = OSError(5, "Input/output error")
        with patch.object(rank_file.os, call, side_effect=error), pytest.raises(PlanError) as refused:
            executor.step(BATCH)
        return str(refused.value)

    assert f"{kind}(" in on_rank(plan, body)


def test_masters_are_not_in_memory_between_steps(tmp_path: Path):
    plan = planned(DiskOffload(str(tmp_path)))

    def body(executor: StepExecutor, world: World) -> int:
        stepped(executor, 1)
        parameters = executor.state.flat_params.optimizer_params().values()
        return sum(each.untyped_storage().nbytes() for each in parameters)

    assert on_rank(plan, body) == 4 * len(ANALYZED.model_spec.trainable)
