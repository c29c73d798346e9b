"""Tensors of a strategy: made as declared, counted, saved by all ranks, and loaded under another plan."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from meshwright.comm.collectives.group import World
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.tensor_placements import FLAT, Layout, P, S
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase
from meshwright.plan.strategy_state import StateSpec
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.run.checkpoint.distributed_checkpoint import load_tensors, save_tensors
from meshwright.testing.ranks import run_on_threads
from tests.parallel.tensor.model_families import analyze_family, batches, planned
from tests.tiny_model import NUM_SAMPLES, analyzed_model, executor_of, plan_of, token_samples

ANALYZED = analyzed_model()
BATCH = token_samples(NUM_SAMPLES)


@dataclass(frozen=True)
class ErrorFeedback(Strategy):
    """Rounds the gradients of a REDUCE to a few bits, and adds what was lost to the next step's."""

    name: ClassVar[str] = "error_feedback"
    phase: ClassVar[StrategyPhase] = "comm"
    exact: ClassVar[bool] = False
    axis: str = "dp_replicate"

    def states(self, view: RankView, job: Job) -> Iterable[StateSpec]:
        layout = Layout().with_placement(self.axis, P)
        for param in view.model_spec.trainable:
            yield StateSpec("residual", param=param.name, dtype="float64", layout=layout)
        yield StateSpec("num_reduces", dtype="int64", on_host=True)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        def rounded(handler: Handler) -> Handler:
            def handle(action: Action) -> None:
                for name, gradient in runtime.state.operand_by_param(action).items():
                    residual = runtime.tensors[f"residual/{name}"].view(-1)
                    residual += gradient
                    gradient.copy_(residual.to(torch.float8_e5m2))
                    residual -= gradient
                runtime.tensors["num_reduces"] += 1
                handler(action)

            return handle

        runtime.wrap("REDUCE", rounded)
        return {}


@dataclass(frozen=True)
class Momentum(Strategy):
    """Keeps a running sum of the shards of ZeRO's gradients."""

    name: ClassVar[str] = "momentum"
    phase: ClassVar[StrategyPhase] = "comm"
    axis: str = "dp_replicate"

    def states(self, view: RankView, job: Job) -> Iterable[StateSpec]:
        layout = Layout().with_placement(self.axis, S(FLAT))
        for param in view.model_spec.trainable:
            yield StateSpec("sum", param=param.name, dtype="float64", layout=layout)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        def summed(handler: Handler) -> Handler:
            def handle(action: Action) -> None:
                parameters = runtime.state.flat_params.optimizer_params()
                for name, parameter in parameters.items():
                    runtime.tensors[f"sum/{name}"] += parameter.grad.view(-1)
                handler(action)

            return handle

        runtime.wrap("STEP", summed)
        return {}


DDP_PLAN = (BatchSplit(), DDP(bucket_mb=300 / 2**20), ErrorFeedback())
ZERO_PLAN = (BatchSplit(), ZeRO(axis="dp_replicate", stage=1), ErrorFeedback(), Momentum())


def local_samples(plan: Plan, rank: int) -> dict[str, torch.Tensor]:
    rows = torch.tensor(plan.samples_read(rank))
    return {key: value[rows] for key, value in BATCH.items()}


def trained(
    plan: Plan, folder: Path, steps: int, save_at: int = 0, load: bool = False
) -> list[dict[str, torch.Tensor]]:
    """Trains on every rank, saves after `save_at` steps; returns each rank's parameters and tensors."""

    def body(world: World) -> dict[str, torch.Tensor]:
        executor = executor_of(ANALYZED, plan, world)
        if load:
            executor.load_state_dict(load_tensors(folder / "step-00000002")[0], 2)
        for done in range(executor.steps_done, steps):
            executor.step(local_samples(plan, world.rank))
            if done + 1 == save_at:
                save_tensors(folder, save_at, executor.state_dict(), {}, world.group(AXES), keep=9)
        tensors = {
            f"{owner}/{key}": tensor.clone()
            for owner in executor.state.plan.states
            for key, tensor in executor.state.strategy_tensors.of(owner).items()
        }
        found = {**executor.gather_parameters(), **tensors}
        executor.close()
        return found

    return run_on_threads(body, plan.mesh)


@pytest.mark.parametrize("strategies", [DDP_PLAN, ZERO_PLAN], ids=["ddp", "zero"])
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(
    strategies: tuple[Strategy, ...], tmp_path: Path
):
    plan = plan_of(ANALYZED, 3, strategies)
    straight = trained(plan, tmp_path, 4, save_at=2)
    resumed = trained(plan, tmp_path, 4, load=True)
    for mine, theirs in zip(straight, resumed, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert any(tensor.abs().max() > 0 for name, tensor in straight[1].items() if "/residual/" in name), (
        "something was lost and kept"
    )


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
@pytest.mark.parametrize("strategies", [DDP_PLAN, ZERO_PLAN], ids=["ddp", "zero"])
def test_other_ranks_find_the_same_sums_and_shards(
    strategies: tuple[Strategy, ...], ranks: int, tmp_path: Path
):
    before = trained(plan_of(ANALYZED, 3, strategies), tmp_path, 2, save_at=2)
    after = trained(plan_of(ANALYZED, ranks, strategies), tmp_path, 2, load=True)
    for name in (name for name in before[0] if "/" in name):
        mine, theirs = ([rank[name] for rank in each] for each in (before, after))
        if "/residual/" in name:
            torch.testing.assert_close(sum(mine), sum(theirs), rtol=1e-12, atol=1e-15)
        elif "/sum/" in name:
            assert torch.equal(torch.cat(mine), torch.cat(theirs))
        else:
            assert {each.item() for each in (*mine, *theirs)} == {mine[0].item()}


def test_a_slice_of_tensor_parallelism_is_saved_and_found_as_a_slice(tmp_path: Path):
    """A stage of a pipeline saves its own; summands of 2 x 2 ranks are those of one device."""
    analyzed, batch = analyze_family("gpt2"), batches("gpt2", 1)[0]

    def played(mesh: Mesh, load: bool, *more: Strategy) -> list[dict[str, torch.Tensor]]:
        plan = planned(analyzed, mesh, (*more, BatchSplit(), DDP(), ErrorFeedback()))

        def body(world: World) -> dict[str, torch.Tensor]:
            executor = executor_of(analyzed, plan, world)
            if load:
                executor.load_state_dict(load_tensors(tmp_path / "step-00000001")[0], 1)
            else:
                rows = torch.tensor(plan.samples_read(world.rank))
                executor.step({key: value[rows] for key, value in batch.items()})
                save_tensors(tmp_path, 1, executor.state_dict(), {}, world.group(AXES), keep=9)
            tensors = {
                key: value.clone()
                for key, value in executor.state.strategy_tensors.of("error_feedback").items()
            }
            executor.close()
            return tensors

        return run_on_threads(body, plan.mesh)

    before = played(Mesh(dp_replicate=2, tp=2, pp=2), False, Pipeline(), TensorParallel())
    assert all(len(tensors) < len(analyzed.model_spec.trainable) for tensors in before)
    entries = load_tensors(tmp_path / "step-00000001")[0]
    (alone,) = played(Mesh(), True)
    for param in analyzed.model_spec.trainable:
        saved = entries[f"state/error_feedback/residual/{param.name}"]
        assert saved.shape == (2, *param.shape)
        torch.testing.assert_close(alone[f"residual/{param.name}"], saved.sum(0))
    sliced = "residual/transformer.h.0.mlp.c_fc.weight"
    shapes = {tuple(tensors[sliced].shape) for tensors in before if sliced in tensors}
    assert sorted(shapes) == [(24, 14), (24, 15)], "29 columns on two ranks"


@pytest.mark.parametrize("strategies", [DDP_PLAN, ZERO_PLAN], ids=["ddp", "zero"])
def test_the_prediction_counts_what_a_rank_holds(strategies: tuple[Strategy, ...]):
    plan = plan_of(ANALYZED, 3, strategies)

    def held(world: World) -> int:
        executor = executor_of(ANALYZED, plan, world)
        found = executor.memory_by_category()["strategy_states"]
        executor.close()
        return found

    assert run_on_threads(held, plan.mesh) == [state_bytes(plan, rank).strategy_states for rank in range(3)]


def test_a_tensor_that_was_not_saved_begins_anew_and_one_of_another_shape_is_refused():
    plan = plan_of(ANALYZED, 1, DDP_PLAN)

    def body(world: World) -> None:
        executor = executor_of(ANALYZED, plan, world)
        executor.step(local_samples(plan, 0))
        saved = full_tensors(executor.state_dict())
        name = "state/error_feedback/num_reduces"
        executor.load_state_dict({key: value for key, value in saved.items() if key != name}, 1)
        assert executor.state.strategy_tensors.of("error_feedback")["num_reduces"].item() == 0
        with pytest.raises(PlanError, match=rf"{name} has the shape \[2\], and \[\] is needed"):
            executor.load_state_dict({**saved, name: torch.zeros(2, dtype=torch.int64)}, 1)
        executor.close()

    run_on_threads(body, plan.mesh)


def full_tensors(state_dict: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The tensors of one rank that has all of each."""
    return {
        name: value if isinstance(value, torch.Tensor) else value.values.clone().view(value.shape)
        for name, value in state_dict.items()
    }
