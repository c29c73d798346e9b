"""Reductions of tied gradients: their position in the program, and the waits before and after them."""

from dataclasses import replace

import pytest

from meshwright.api import make_plan
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Strategy
from tests.tiny_model import TOKENS, analyzed_model

SHARD = BatchSplit(axis="dp_shard")
NAME = "embed+head over pp 0+2"
WIDE = PrecisionConfig("bfloat16", "bfloat16", "float32", master="float32")


def plan_of(mesh: Mesh, *strategies: Strategy, precision: PrecisionConfig | None = None) -> Plan:
    job = Job(
        ModelConfig("tied"),
        DataConfig("random", sequence=TOKENS),
        TrainConfig(batch=12),
        OptimizerConfig(lr=0.1),
    )
    job = job if precision is None else replace(job, precision=precision)
    return make_plan(analyzed_model(tied=True), job, mesh, (Pipeline(), *strategies), 2)


def end(plan: Plan, role: str = "pp0") -> list[str]:
    """The names from the last backward on."""
    names = [action.name for action in plan.program.actions(role)]
    return names[max(i for i, name in enumerate(names) if name.startswith("B(")) + 1 :]


def of_kind(plan: Plan, kind: str, role: str = "pp0") -> Action:
    (found,) = (
        action
        for action in plan.program.actions(role)
        if action.kind == kind and action.subject.startswith(NAME)
    )
    return found


def test_it_follows_all_other_communication_and_precedes_readers_of_gradients():
    plan = plan_of(Mesh(pp=3))
    tail = [
        "LOSS_SUM()",
        f"WAIT({NAME}, tied)",
        f"REDUCE_TIED({NAME})",
        "LOCAL_NORM(norm)",
        "GLOBAL_NORM(norm)",
        "CLIP()",
        "STEP()",
    ]
    assert end(plan) == tail
    assert end(plan, "pp2")[1:] == tail  # behind what it sends back
    assert end(plan, "pp1")[1:] == [
        "LOSS_SUM()",
        "LOCAL_NORM(norm)",
        "GLOBAL_NORM(norm)",
        "CLIP()",
        "STEP()",
    ]
    tie = of_kind(plan, "REDUCE_TIED")
    assert tie.waits == (f"WAIT({NAME}, tied)", f"pp2/WAIT({NAME}, tied)")
    assert tie.transfer is not None
    assert (tie.transfer.collective, tie.transfer.axes, tie.transfer.member_indices) == (
        "all_reduce",
        ("pp",),
        (0, 2),
    )
    readers = [action for action in plan.program.actions("pp0") if action.kind in ("LOCAL_NORM", "CLIP")]
    assert all(tie.name in action.waits for action in readers)


def test_alone_gradients_are_packed_once_and_stay_where_they_are_summed():
    actions = plan_of(Mesh(pp=3)).program.actions("pp0")
    (pack,) = (action for action in actions if action.kind == "PACK")
    first = next(action for action in actions if action.kind == "B" and action.subject == "embed")
    assert actions.index(pack) == actions.index(first) + 1
    assert f"bucket({NAME})" in actions[-1].frees
    assert f"gradient({NAME})" not in actions[-1].frees


@pytest.mark.parametrize(
    ("mesh", "store", "before"),
    [
        (Mesh(pp=3, dp_replicate=2), (BatchSplit(), DDP()), {"PACK(embed+head over pp 0+2)", "REDUCE(0)"}),
        (Mesh(pp=3, dp_shard=2), (SHARD, ZeRO(stage=1)), {f"PACK({NAME})", f"REDUCE({NAME})"}),
        (Mesh(pp=3, dp_shard=2), (SHARD, ZeRO(stage=2)), {f"ACCUMULATE({NAME}, 2)"}),
    ],
)
def test_it_waits_for_the_sum_over_other_samples(mesh: Mesh, store: tuple[Strategy, ...], before: set[str]):
    ready = of_kind(plan_of(mesh, *store), "WAIT")
    assert before <= set(ready.waits)


def test_a_sharded_group_sends_a_shard_in_the_dtype_of_gradients():
    plan = plan_of(Mesh(pp=3, dp_shard=2), SHARD, ZeRO(stage=2))
    move, flat_param = of_kind(plan, "REDUCE_TIED").transfer, plan.rank_view(0).flat_param_specs[NAME]
    assert move is not None
    assert (move.nbytes, move.dtype) == (flat_param.shard_numel * 4, "float32")
    assert flat_param == list(plan.role_plans())[2].view.flat_param_specs[NAME]  # cut at the same places


@pytest.mark.parametrize(
    ("mesh", "store"), [(Mesh(pp=3), ()), (Mesh(pp=3, dp_replicate=2), (BatchSplit(), DDP()))]
)
def test_for_half_precision_gradients_the_wider_buffer_is_summed(mesh: Mesh, store: tuple[Strategy, ...]):
    plan = plan_of(mesh, *store, precision=WIDE)
    tie, actions = of_kind(plan, "REDUCE_TIED"), plan.program.actions("pp0")
    assert tie.transfer is not None
    assert tie.transfer.dtype == "float32"
    unpacks = [
        action for action in actions if action.kind == "UNPACK" and set(tie.tensors) & set(action.tensors)
    ]
    assert [tie.name in action.waits for action in unpacks] == [True]


def test_weights_that_one_rank_uses_alone_have_none():
    tied = {
        name
        for action in plan_of(Mesh(pp=3)).program.actions("pp0")
        if action.kind == "REDUCE_TIED"
        for name in action.tensors
    }
    assert tied == {"embed.weight"}


def test_a_gradient_that_is_sent_in_another_dtype_is_packed_after_its_last_backward():
    narrow = PrecisionConfig(reduce="bfloat16")
    for precision, last in ((narrow, True), (None, False)):
        for role in ("pp0", "pp2"):
            names = [action.name for action in plan_of(Mesh(pp=3), precision=precision).program.actions(role)]
            pack = names.index(f"PACK({NAME})")
            backwards = [i for i, name in enumerate(names) if name.startswith(("B(embed, ", "B(head, "))]
            assert len(backwards) == 6  # one per microbatch
            assert (pack > backwards[-1]) == last
            assert pack > backwards[0]
