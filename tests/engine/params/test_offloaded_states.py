"""What rests on the host is not on the device, and a step that failed leaves the states whole."""

import gc
from unittest.mock import patch

import pytest

from benchmarks.harness.live_bytes import live_bytes
from meshwright.comm.collectives.group import World
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.plan.job.job import OptimizerConfig, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.testing.ranks import run_on_threads
from tests.engine.one_device import bits
from tests.tiny_model import analyzed_model, executor_of, plan_of, tiny_job, token_samples

ANALYZED = analyzed_model()
BATCH = token_samples(12)
MASTERS = PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32")
OFFLOADS = {"device": Offload(prefetch=0), "host": Offload(step_on="host")}


def planned(*strategies: object) -> Plan:
    job = tiny_job(precision=MASTERS, optimizer=OptimizerConfig("adamw", lr=0.01))
    return plan_of(ANALYZED, 1, strategies, job=job)


def live_nbytes() -> int:
    """The bytes of all storages that tensors of this process hold."""
    gc.collect()
    return live_bytes()


def held(plan: Plan) -> int:
    """The live bytes of an executor of `plan` after two steps, in both tiers."""

    def body(world: World) -> int:
        before = live_nbytes()
        executor = executor_of(ANALYZED, plan, world)
        for _ in range(2):
            executor.step(BATCH)
        found = live_nbytes() - before
        executor.close()
        return found

    return run_on_threads(body, plan.mesh)[0]


@pytest.mark.parametrize("step_on", OFFLOADS)
def test_live_storages_are_those_that_the_plan_says_in_both_tiers(step_on: str):
    plain, plan = planned(), planned(OFFLOADS[step_on])
    held(plain)  # what the first run of a process keeps
    said = sum(state_bytes(plan, 0, tier).total for tier in ("device", "host"))
    # of a master that the device steps, one element stays there
    said += 4 * len(ANALYZED.model_spec.trainable) if step_on == "device" else 0
    assert held(plan) - held(plain) == said - state_bytes(plain, 0).total
    assert state_bytes(plan, 0).master == state_bytes(plan, 0).optimizer_states == 0


class Failed(Exception):
    """Raised in the middle of a step."""


def test_a_step_that_failed_leaves_the_states_as_they_were():
    """States that were fetched go back at the next step, which ends as if there had been no failure."""
    plan = planned(OFFLOADS["device"])

    def body(world: World) -> list[object]:
        executor = executor_of(ANALYZED, plan, world)
        executor.step(BATCH)
        kept = {name: value.clone() for name, value in executor.state_dict().items()}
        with patch.object(executor.state.update, "step", side_effect=Failed), pytest.raises(Failed):
            executor.step(BATCH)
        rest = bits(executor.state_dict()), bits(kept)
        executor.step(BATCH)
        again = bits(executor.state_dict())
        executor.close()
        return [*rest, again]

    def twice(world: World) -> object:
        executor = executor_of(ANALYZED, plan, world)
        executor.step(BATCH)
        executor.step(BATCH)
        found = bits(executor.state_dict())
        executor.close()
        return found

    ((after_failure, before, again),) = run_on_threads(body, plan.mesh)
    assert after_failure == before
    assert again == run_on_threads(twice, plan.mesh)[0]


def test_the_optimizer_finds_no_master_before_it_is_fetched():
    plan = planned(OFFLOADS["device"])

    def body(world: World) -> int:
        executor = executor_of(ANALYZED, plan, world)
        parameters = executor.state.flat_params.optimizer_params().values()
        nbytes = sum(each.untyped_storage().nbytes() for each in parameters)
        executor.close()
        return nbytes

    assert run_on_threads(body, plan.mesh) == [4 * len(ANALYZED.model_spec.trainable)]
