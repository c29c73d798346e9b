"""States lie with their server: bytes, mixed precision, checkpoints, runs that go on under other plans."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.plan.job.job import PrecisionConfig
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.run.checkpoint.distributed_checkpoint import load_tensors
from tests.parallel.server.server_plans import (
    ADAMW,
    DDP,
    ZERO_1,
    are_equal,
    check_crossing,
    group_nbytes,
    server_plan,
    trained,
)
from tests.planner.program_cost.test_rank_memory import assert_holds_planned_bytes
from tests.tiny_model import tiny_job

MIXED = PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32")
PRECISIONS = {
    "float32": PrecisionConfig(),
    "bfloat16 sums": PrecisionConfig(reduce="bfloat16"),
    "mixed": MIXED,
    "wide sums": replace(MIXED, gradients="float32", reduce="float32"),
    "float16": PrecisionConfig("float16", "float16", "float16", master="float32"),
}
STORAGES = {"one server": 1, "two servers": 2, "ddp": DDP, "zero": ZERO_1}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_rank_holds_the_planned_bytes(precision: str, *, tied: bool):
    plan = server_plan(2, optimizer=ADAMW, precision=PRECISIONS[precision])
    assert_holds_planned_bytes(
        {"tied": tied},
        plan.strategies,
        plan.mesh,
        tiny_job(optimizer=ADAMW, precision=PRECISIONS[precision]),
        1,
    )


def test_servers_hold_the_optimizer_states_of_what_they_step_and_others_none():
    plan = server_plan(2, optimizer=ADAMW)
    states = [state_bytes(plan, rank).optimizer_states for rank in range(3)]
    counters = [
        4 * sum(each.owner_index == rank for each in plan.sharding.param_shardings) for rank in range(3)
    ]
    served = [group_nbytes(plan, lambda owner, rank=rank: owner == rank) for rank in range(3)]
    assert states == [2 * nbytes + counter for nbytes, counter in zip(served, counters, strict=True)]
    assert states[0] >= states[1] > states[2] == 0
    assert max(served[:2]) < 0.6 * sum(served)


def test_a_run_continues_with_the_bits_that_it_would_have_had(tmp_path: Path):
    plan = server_plan(2, optimizer=ADAMW)
    whole = trained(plan, range(4))
    trained(plan, range(2), folder=tmp_path)
    assert are_equal(whole, trained(plan, range(2, 4), start=tmp_path / "step-00000002"))


@pytest.mark.parametrize("then", STORAGES)
def test_a_run_goes_on_under_another_storage_and_comes_back(then: str, tmp_path: Path):
    mine, other = server_plan(3, optimizer=ADAMW), server_plan(STORAGES[then], 2, optimizer=ADAMW)
    check_crossing(mine, other, tmp_path)


def test_masters_are_those_of_the_servers(tmp_path: Path):
    plan = server_plan(2, optimizer=ADAMW, precision=MIXED)
    whole = trained(plan, range(3))
    trained(plan, range(2), folder=tmp_path)
    saved = load_tensors(tmp_path / "step-00000002")[0]
    assert {saved[name].dtype for name in saved if name.startswith("model/")} == {torch.float32}
    assert are_equal(whole, trained(plan, range(2, 3), start=tmp_path / "step-00000002"))


def test_the_states_of_no_group_may_be_left_out(tmp_path: Path):
    """A server that began anew with its states after a restart would go on, with other numbers."""
    plan = server_plan(2, optimizer=ADAMW)
    trained(plan, range(2), folder=tmp_path)
    saved = load_tensors(tmp_path / "step-00000002")[0]
    names = {each.param.name for each in plan.sharding.param_shardings}
    assert {f"optimizer/exp_avg/{name}" for name in names} <= set(saved)
