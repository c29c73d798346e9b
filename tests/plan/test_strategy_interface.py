"""A strategy is a value; phases fix the order in which strategies apply."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from itertools import permutations
from typing import ClassVar

import pytest

import meshwright as mw
from meshwright.parallel import STRATEGIES
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.single_device_program import sequential_stage_calls, single_device_program
from meshwright.plan.strategy_interface import PHASES, Strategy, StrategyPhase, sort_by_phase
from tests.paper_model import SyntheticModel


@dataclass(frozen=True)
class Shard(Strategy):
    name: ClassVar[str] = "shard it"
    phase: ClassVar[StrategyPhase] = "shard"
    axis: str = "tp"


@dataclass(frozen=True)
class Store(Strategy):
    name: ClassVar[str] = "store it"
    phase: ClassVar[StrategyPhase] = "storage"


@dataclass(frozen=True)
class Wire(Strategy):
    name: ClassVar[str] = "wire it"
    phase: ClassVar[StrategyPhase] = "comm"


@pytest.mark.parametrize("written", list(permutations([Shard(), Store(), Wire()])))
def test_phases_fix_the_order_whatever_was_written(written: tuple[Strategy, ...]):
    assert sort_by_phase(written) == (Shard(), Store(), Wire())
    assert PHASES == ("shard", "schedule", "memory", "storage", "comm")


def test_within_a_phase_the_written_order_stays():
    assert sort_by_phase([Shard("tp"), Store(), Shard("cp")]) == (Shard("tp"), Shard("cp"), Store())


def test_a_strategy_that_overrides_nothing_changes_nothing():
    sharding = ShardingPlan.one_device(Mesh(), SyntheticModel().model_spec)
    view = RankView(sharding, sharding.mesh.coordinate(0))
    program = single_device_program(
        view, Job(), 1, sequential_stage_calls(sharding.model_spec.block_calls, 1)
    )
    store = Store()
    assert list(store.check(Job(), sharding)) == []
    assert store.place(sharding) is sharding
    assert store.rewrite(program, view, Job()) is program
    assert store.exact


def test_strategies_are_frozen_values_that_print_their_fields():
    assert Shard("cp") == Shard("cp") != Shard("tp")
    assert Shard("cp").as_dict() == {"name": "shard it", "axis": "cp"}
    assert str(Shard("cp")) == "shard it (axis cp)"
    with pytest.raises(FrozenInstanceError):
        Shard().axis = "pp"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mw.Pipeline(axis="tp"), "strategies.pipeline.axis: axis = 'tp'; needed is 'pp'\n"),
        (
            lambda: mw.DataParallelMaster(axis="cp"),
            "strategies.data_parallel_master.axis: axis = 'cp'; needed is 'dp_replicate' or 'dp_shard'\n",
        ),
        (lambda: mw.ZeRO(stage=4), "strategies.zero.stage: stage = 4; needed is 1, 2 or 3\n  repair: "),
        (lambda: mw.ZeRO(axis="tp"), "strategies.zero.axis: axis = 'tp'; needed is 'dp_replicate', "),
        (
            lambda: mw.DDP(bucket_mb=-1),
            "strategies.ddp.bucket_mb: bucket_mb = -1; needed is a number above 0",
        ),
        (lambda: mw.DDP(bucket_mb="25"), "strategies.ddp.bucket_mb: bucket_mb = '25'; needed is a number\n"),
        (
            lambda: mw.ActivationCheckpointing(blocks="*.3"),
            "strategies.activation_checkpointing.blocks: blocks = '*.3'; needed is a tuple\n"
            "  repair: write blocks = ('*.3',)",
        ),
        (
            lambda: mw.ChunkedLoss(num_chunks=1),
            "strategies.chunked_loss.num_chunks: num_chunks = 1; needed is ",
        ),
        (
            lambda: mw.RingAttention(load_balance="zag"),
            "strategies.ring.load_balance: load_balance = 'zag'; ",
        ),
    ],
)
def test_a_constructor_refuses_a_wrong_value_with_the_repair(make: Callable[[], Strategy], message: str):
    with pytest.raises(PlanError) as raised:
        make()
    assert str(raised.value).startswith(message)


def test_a_constructor_reports_all_wrong_fields_at_once():
    with pytest.raises(PlanError) as raised:
        mw.ZeRO(axis="pp", keep_mb=-1.0, prefetch=-1)
    assert len(raised.value.diagnostics) == 3


def test_every_strategy_stands_at_the_top_of_the_package():
    classes = {strategy for modes in STRATEGIES.values() for strategy in modes.values()}
    assert classes == {vars(mw).get(each.__name__, getattr(mw, each.__name__)) for each in classes}
