"""What techniques keep from step to step is declared: by name, with bytes, and refused where it is wrong."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, LossGuard, PrecisionConfig, TrainConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.tensor_placements import FLAT, Layout, P, S
from meshwright.plan.strategy_interface import Strategy, StrategyPhase
from meshwright.plan.strategy_state import StateSpec, local_state_nbytes, owner_names
from meshwright.planner.program_cost.rank_memory import peak_nbytes, state_bytes
from tests.tiny_model import analyzed_model, plan_of

ANALYZED = analyzed_model()
STORES = (BatchSplit(), ZeRO(axis="dp_replicate"))


@dataclass(frozen=True)
class Keeps(Strategy):
    """Keeps one tensor per parameter, of the placement `letter`."""

    name: ClassVar[str] = "keeps"
    phase: ClassVar[StrategyPhase] = "comm"
    letter: str = "P"
    dtype: str = "float32"
    param: str = ""

    def states(self, view: RankView, job: Job) -> Iterable[StateSpec]:
        layout = Layout().with_placement("dp_replicate", P if self.letter == "P" else S(FLAT))
        names = [self.param] if self.param else [param.name for param in view.model_spec.trainable]
        return [StateSpec("kept", param=name, dtype=self.dtype, layout=layout) for name in names]


def test_the_options_of_a_job_keep_numbers_on_the_host():
    job = Job(
        train=TrainConfig(4, 8, noise_scale=True),
        guard=LossGuard("skip", window=7),
        precision=PrecisionConfig(compute="float16"),
    )
    plan = replace(plan_of(ANALYZED, 2, (BatchSplit(), DDP())).for_rank(0), job=job)
    shapes = {f"{owner}/{spec.key}": spec.shape for owner, specs in plan.states.items() for spec in specs}
    assert shapes == {
        **{"loss_scale/value": (), "loss_scale/num_good_steps": ()},
        **{"guard/window": (7, 2), "guard/num_skipped_in_a_row": (), "noise_scale/averages": (2,)},
    }
    assert all(local_state_nbytes(spec, plan.view) == 0 for specs in plan.states.values() for spec in specs)


def test_summands_are_as_large_as_their_parameters_and_shards_as_large_as_a_shard():
    numel = sum(param.numel for param in ANALYZED.model_spec.trainable)
    summands, shards = (
        [state_bytes(plan_of(ANALYZED, 3, (*STORES, Keeps(letter))), rank) for rank in range(3)]
        for letter in "PS"
    )
    assert [each.strategy_states for each in summands] == [4 * numel] * 3
    assert sum(each.strategy_states for each in shards) == 4 * numel
    assert max(each.strategy_states for each in shards) < 2 * numel
    plain = plan_of(ANALYZED, 3, STORES)
    assert summands[0].total - state_bytes(plain, 0).total == 4 * numel
    assert peak_nbytes(plan_of(ANALYZED, 3, (*STORES, Keeps())), 0) - peak_nbytes(plain, 0) == 4 * numel


def test_strategies_of_one_name_have_tensors_of_their_own():
    assert owner_names(["ddp", "keeps", "keeps"]) == ["ddp", "keeps.1", "keeps.2"]


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (Keeps(dtype="float12"), "the state 'kept/.*' has the dtype 'float12'"),
        (Keeps(param="nowhere"), "the state 'kept/nowhere' is of no parameter of this rank"),
        (Keeps("S"), r"the state 'kept/.*' is S\(flat\), and its parameter is not"),
    ],
)
def test_a_state_that_cannot_be_is_refused(strategy: Keeps, text: str):
    plan = plan_of(ANALYZED, 2, (BatchSplit(), DDP(), strategy)).for_rank(1)
    assert plan.mesh == Mesh(dp_replicate=2)
    with pytest.raises(PlanError, match=text):
        _ = plan.states
