"""The memory and message tables of a plan: categories add up, different ranks have columns, messages are
those of the program.
"""

import re
from dataclasses import replace

import pytest
from rich.console import Console

from meshwright.api import make_plan
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.server.parameter_server import ParameterServer
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.job.job import Job, PrecisionConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.report.terminal.memory_and_sent_bytes import (
    all_send_alike,
    busiest_rank,
    expected_text,
    sent_nbytes_by_role,
    sent_table,
    servers_text,
    state_nbytes_by_role,
    states_table,
)
from tests.paper_model import FIRST_ROLE, SyntheticModel
from tests.parallel.expert.mixture_model import analyzed_mixtral, expert_strategies, sgd_job

JOB = Job(ModelConfig("model.json"), DataConfig("text.txt", sequence=64), TrainConfig(batch=12))


def plan_of(zero: ZeRO, ranks: int = 4, layers: int = 4, numel: int = 2**20) -> Plan:
    job = replace(JOB, train=replace(JOB.train, batch=ranks))
    return Plan.make(
        job, Mesh(dp_shard=ranks), SyntheticModel(layers, numel).model_spec, (BatchSplit("dp_shard"), zero)
    )


def shown(table: object) -> str:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_states_stand_by_category_and_per_parameter():
    text = shown(states_table(plan_of(ZeRO(stage=2))))
    assert re.search(r"state +each rank +per parameter", text)
    for name, nbytes, each in (
        ("parameters", "16 MiB", "4 B"),
        ("gradients", "4 MiB", "1 B"),
        ("optimizer_states", "8 MiB", "2 B"),
    ):
        assert re.search(rf"{name} +{nbytes} +{each}", text), text
    assert re.search(r"buffers +8 MiB +2 B", text)
    assert re.search(r"total +36 MiB +9 B", text)
    assert "master" not in text


def test_ranks_that_differ_stand_side_by_side():
    text = shown(states_table(plan_of(ZeRO(), ranks=12, layers=1, numel=5)))
    assert re.search(r"state +rank 0 +rank 11", text)
    assert re.search(r"optimizer_states +12 B +0 B", text)


def test_messages_are_counted_by_kind_and_move():
    text = shown(sent_table(plan_of(ZeRO(stage=2))))
    assert re.search(r"UNSHARD +all_gather of float32 over dp_shard +4 +12 MiB", text)
    assert re.search(r"REDUCE +reduce_scatter of float32 over dp_shard +4 +12 MiB", text)
    assert re.search(r"total +11 +24 MiB", text)


def test_one_device_sends_nothing():
    assert sent_table(Plan.make(JOB, Mesh(), SyntheticModel().model_spec)) is None


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_held_all_the_time_is_what_no_action_takes(stage: int):
    plan = plan_of(ZeRO(stage=stage))
    said, held = state_bytes(plan, 0), state_nbytes_by_role(plan)[FIRST_ROLE]
    taken = {hold.name for action in plan.program.actions(FIRST_ROLE) for hold in action.allocations}
    assert any("gradient" in name for name in taken)
    assert sum(held.values()) == said.parameters + said.optimizer_states + said.master


def test_bytes_that_the_choice_of_experts_decides_are_said_to_be_expected():
    assert expected_text(plan_of(ZeRO(stage=2))) == ""
    plan = make_plan(analyzed_mixtral(), sgd_job(), Mesh(ep=3), expert_strategies())
    sizes = [
        transfer.runtime_size
        for action in plan.program.roles[0].actions
        for transfer in action.transfers
        if transfer.runtime_size is not None
    ]
    more = sum(size.max_rows * size.row_nbytes - size.expected_rows * size.row_nbytes for size in sizes)
    assert more > 0
    assert f"expected, at most {format_nbytes(more)} more" in expected_text(plan)


def copies(store: Strategy, precision: PrecisionConfig | None = None) -> Plan:
    """Four blocks of a MiB of float32 on four ranks, stored by `store`."""
    job = replace(JOB, precision=precision or PrecisionConfig())
    model_spec = SyntheticModel(layers=4, numel=2**18).model_spec
    return Plan.make(job, Mesh(dp_replicate=4), model_spec, (BatchSplit(), store))


def test_servers_are_named_with_what_arrives_there():
    text = servers_text(copies(ParameterServer(servers=2)))["servers"]
    assert "rank 0 receives 6 MiB, rank 2 receives 6 MiB" in text  # 2 groups each, from 3 others
    assert "rank 0 receives 12 MiB, from" in servers_text(copies(ParameterServer()))["servers"]
    assert servers_text(copies(DDP())) == servers_text(copies(DataParallelMaster())) == {}


@pytest.mark.parametrize(
    ("store", "reduce", "busiest", "mib"),
    [
        (ParameterServer(), "float32", 3, 4.0),  # each sends all of its gradients, or all parameters
        (ParameterServer(), "bfloat16", 0, 4.0),  # a worker sends half of that
        (ParameterServer(servers=4), "bfloat16", 3, 0.75 * 2 + 1),
        (DDP(), "float32", 3, 6.0),
    ],
)
def test_bytes_are_those_of_the_rank_that_sends_most(store: Strategy, reduce: str, busiest: int, mib: float):
    plan = copies(store, PrecisionConfig(reduce=reduce))
    assert sent_nbytes_by_role(plan)[FIRST_ROLE] / 2**20 == pytest.approx(mib, abs=1e-3)
    assert all_send_alike(plan) is (reduce == "float32" or store == ParameterServer(servers=4))
    assert busiest_rank(plan)[0] in (busiest, *(range(4) if all_send_alike(plan) else ()))
