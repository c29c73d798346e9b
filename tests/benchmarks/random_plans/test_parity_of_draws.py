"""Plans whose ranks are processes: what differs there is found, and a result holds only if nothing does."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from benchmarks.compression import compression_parity
from benchmarks.random_plans.parity_of_draws import row_on_processes
from benchmarks.random_plans.random_draws import Draw
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase
from meshwright.testing.ranks import ProcessPool

STRATEGIES = (BatchSplit(), DDP(), Int8Compression())
CODED = Draw(0, 0, "llama", Mesh(dp_replicate=2), STRATEGIES, num_microbatches=1, micro_batch=1, clip=0.5)


@dataclass(frozen=True)
class DriftingRank(Strategy):
    """Doubles the gradients of one rank before they are coded."""

    name: ClassVar[str] = "drifting_rank"
    phase: ClassVar[StrategyPhase] = "comm"

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        state = runtime.state

        def wrapper(handler: Handler) -> Handler:
            def reduce(action: Action) -> None:
                if state.world.rank == 1:
                    state.operand(action).input.mul_(2)
                handler(action)

            return reduce

        runtime.wrap("REDUCE", wrapper)
        return {}


def test_a_plan_on_processes_matches_and_a_rank_that_drifts_is_found(process_pool: ProcessPool):
    assert row_on_processes(CODED, process_pool)["outcome"] == "matched"
    drifting = replace(CODED, strategies=(*STRATEGIES, DriftingRank()))
    row = row_on_processes(drifting, process_pool)
    assert row["outcome"] == "differs", row


def test_a_result_holds_only_if_the_plans_on_processes_match_too():
    row = {"case": "", "codec": "int8", "outcome": "matched", "error": 1e-15, "techniques": ["ddp"]}
    rows, again = [row] * compression_parity.NUM_PLANS, {**row, "ranks": "processes"}
    assert compression_parity.result(rows).holds
    result = compression_parity.result([*rows, again])
    assert result.holds
    assert (result.detail["processes"], result.detail["matched on processes"]) == (1, 1)
    assert len(result.values) == compression_parity.NUM_PLANS
    assert not compression_parity.result([*rows, {**again, "outcome": "differs"}]).holds
    assert not compression_parity.result([*rows[1:], {**again}]).holds
