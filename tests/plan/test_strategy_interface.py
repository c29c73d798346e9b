"""A strategy is a value; phases fix the order in which strategies apply."""

from dataclasses import FrozenInstanceError, dataclass
from itertools import permutations
from typing import ClassVar

import pytest

from meshwright.plan.job.job import Job
from meshwright.plan.sharding.mesh import Mesh
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
    program = single_device_program(
        sharding, Job(), 1, sequential_stage_calls(sharding.model_spec.block_calls, 1)
    )
    store = Store()
    assert list(store.check(Job(), sharding)) == []
    assert store.place(sharding) is sharding
    assert store.rewrite(program, sharding, Job()) is program
    assert store.exact


def test_strategies_are_frozen_values_that_print_their_fields():
    assert Shard("cp") == Shard("cp") != Shard("tp")
    assert Shard("cp").as_dict() == {"name": "shard it", "axis": "cp"}
    assert str(Shard("cp")) == "shard it (axis cp)"
    with pytest.raises(FrozenInstanceError):
        Shard().axis = "pp"
