"""The model states of mixed precision, in bytes per element, in the tier that they rest in."""

from dataclasses import replace

import pytest

from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, PrecisionConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.memory.model_states import STEP_COUNTER_NBYTES, group_states
from meshwright.planner.program_cost.rank_memory import state_bytes
from tests.paper_model import SyntheticModel

JOB = Job(
    ModelConfig("model.json"),
    DataConfig("text.txt", sequence=64),
    TrainConfig(batch=12),
    optimizer=OptimizerConfig("adamw"),
    precision=PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32"),
)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("step_on", "out", "back"), [("device", 12, 12), ("host", 2, 2)])
def test_copies_are_those_of_the_papers(stage: int, step_on: str, out: int, back: int):
    """N elements of a rank: 12 N of states each way, or 2 N of gradients out and 2 N of weights back."""
    spec, ranks = SyntheticModel(layers=4, numel=1200).model_spec, 3
    strategies = (BatchSplit(axis="dp_shard"), ZeRO(stage=stage), Offload(step_on=step_on))
    plan = Plan.make(JOB, Mesh(dp_shard=ranks), spec, strategies, 2)
    numel = spec.numel // ranks
    copied = {
        stream: sum(each.transfer.nbytes for each in plan.for_rank(0).actions if each.stream == stream)
        for stream in ("copy_in", "copy_out")
    }
    counters = STEP_COUNTER_NBYTES * sum(
        len(each.stepped_params) for each in group_states(JOB, plan.rank_view(0))
    )
    counters = counters if step_on == "device" else 0
    assert copied == {"copy_out": out * numel + counters, "copy_in": back * numel + counters}


def test_states_add_up_per_tier():
    spec = SyntheticModel(layers=4, numel=1200).model_spec
    plain = Plan.make(JOB, Mesh(), spec)
    plan = Plan.make(JOB, Mesh(), spec, (Offload(step_on="host"),))
    device, host = (state_bytes(plan, 0, tier) for tier in ("device", "host"))
    before, numel = state_bytes(plain, 0), spec.numel
    assert (device.parameters, device.master, device.optimizer_states) == (2 * numel, 0, 0)
    assert (host.master, host.optimizer_states) == (before.master, before.optimizer_states)
    assert (host.parameters, host.gradients) == (2 * numel, 2 * numel)
    assert replace(before, buffers=0) == replace(
        device, buffers=0, master=host.master, optimizer_states=host.optimizer_states
    )
