"""Strategies wrap the handlers of others in the order of their phases, on the operand of each action."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from meshwright.comm.collectives.group import World
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.errors import PlanError
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase
from meshwright.testing.ranks import run_on_threads
from tests.tiny_model import analyzed_model, case_of, executor_of, plan_of, token_samples, verdict_of

ANALYZED = analyzed_model()
SAMPLES = 12
SEEN: dict[int, list[tuple[str, str, int, int]]] = {}  # by rank; what each wrapper met


@dataclass(frozen=True)
class Scaled(Strategy):
    """Multiplies what `kind` sends by a power of 2, before the collective of the plan."""

    name: ClassVar[str] = "scaled"
    phase: ClassVar[StrategyPhase] = "memory"
    factor: float = 0.5
    kind: str = "REDUCE"

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        def scaled(handler: Handler) -> Handler:
            def handle(action: Action) -> None:
                operand = runtime.state.operand(action)
                sizes = operand.input.numel(), operand.output.numel()
                seen = SEEN.setdefault(runtime.state.world.rank, [])
                seen.append((self.name, action.name, *sizes))
                operand.input.mul_(self.factor)
                handler(action)

            return handle

        runtime.wrap(self.kind, scaled)
        return {}


@dataclass(frozen=True)
class ScaledLast(Scaled):
    """The same in the last phase."""

    name: ClassVar[str] = "scaled last"
    phase: ClassVar[StrategyPhase] = "comm"
    factor: float = 2.0


@dataclass(frozen=True)
class Gathered(Strategy):
    """Sums by an all-gather of every rank's summand, in place of the collective of the plan."""

    name: ClassVar[str] = "gathered"
    phase: ClassVar[StrategyPhase] = "comm"

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        state = runtime.state

        def gathered(handler: Handler) -> Handler:
            def handle(action: Action) -> None:
                if action.transfer is None:
                    handler(action)
                    return
                summand, group = (
                    state.operand(action).output.view(-1),
                    state.world.group(action.transfer.axes),
                )
                summands = summand.new_empty(group.size * summand.numel())
                work = group.all_gather(summands, summand.clone(), action=action.name)
                work.wait()
                summand.copy_(summands.view(group.size, -1).sum(0))
                state.issue(action, work)

            return handle

        runtime.wrap("REDUCE", gathered)
        return {}


def trained(strategies: tuple[Strategy, ...], ranks: int = 3) -> list[dict[str, torch.Tensor]]:
    """The parameters after two steps, on each rank."""
    plan = plan_of(ANALYZED, ranks, strategies)
    batch = token_samples(SAMPLES)
    mine = SAMPLES // ranks

    def body(world: World) -> dict[str, torch.Tensor]:
        executor = executor_of(ANALYZED, plan, world)
        rows = slice(world.rank * mine, (world.rank + 1) * mine)
        for _ in range(2):
            executor.step({key: value[rows] for key, value in batch.items()})
        found = {name: value.clone() for name, value in executor.gather_parameters().items()}
        executor.close()
        return found

    return run_on_threads(body, plan.mesh)


@pytest.mark.parametrize("store", [DDP(bucket_mb=300 / 2**20), NaiveDDP()], ids=["ddp", "naive_ddp"])
def test_two_strategies_wrap_one_kind_in_the_order_of_their_phases(store: Strategy):
    SEEN.clear()
    plain = trained((BatchSplit(), store))
    wrapped = trained((ScaledLast(), Scaled(), BatchSplit(), store))
    for mine, theirs in zip(plain, wrapped, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    first_reduce = SEEN[0][0][1]
    assert [name for name, action, *_ in SEEN[0] if action == first_reduce][:2] == ["scaled last", "scaled"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_operand_of_a_flat_parameter_is_what_its_collective_moves(stage: int):
    SEEN.clear()
    store = ZeRO(axis="dp_replicate", stage=stage)
    plain = trained((BatchSplit(), store))
    strategies = Scaled(), ScaledLast(), Scaled(1.0, "UNSHARD")
    wrapped = trained((*strategies, BatchSplit(), store))
    for mine, theirs in zip(plain, wrapped, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    for _, action, sent, received in SEEN[1]:
        assert (sent == 3 * received) if action.startswith("REDUCE") else (received == 3 * sent)
    assert {action.partition("(")[0] for _, action, *_ in SEEN[1]} == {"REDUCE", "UNSHARD"}


def test_a_strategy_hands_back_the_work_of_its_own_collective():
    plain, own = trained((BatchSplit(), DDP())), trained((Gathered(), BatchSplit(), DDP()))
    for mine, theirs in zip(plain, own, strict=True):
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-12, atol=1e-14)


def test_a_collective_that_the_program_does_not_state_is_noticed():
    plan = plan_of(ANALYZED, 3, (Gathered(), BatchSplit(), DDP()))
    verdict = verdict_of(case_of(ANALYZED, plan))
    assert not verdict.passed
    assert verdict.first_difference.quantity == "ledger"


def test_wrapping_what_nothing_handles_is_refused():
    plan = plan_of(ANALYZED, 2, (Scaled(kind="PUSH"), BatchSplit(), DDP()))
    with pytest.raises(PlanError, match="wraps PUSH, and nothing handles it"):
        run_on_threads(lambda world: executor_of(ANALYZED, plan, world), plan.mesh)
