"""Runs one rank of a plan on fake CUDA tensors, its collectives on streams of their own, and collects races.

The rank has the groups, works and algorithms of a GPU job (comm/world.py); nothing is sent, and numbers that
the host reads are 1. A step is one of the engine: forward, backward, collectives, optimizer.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.races.fake_process_group import stream_backend
from benchmarks.races.fake_streams import DEVICE
from benchmarks.races.memory_accesses import Race
from benchmarks.races.race_checker import RaceChecker
from meshwright.comm.world import TorchWorld
from meshwright.engine.forward_backward import evaluation
from meshwright.engine.runtime.build_module import make_stateless_rng, make_trained_module
from meshwright.engine.runtime.rank_state import RankState
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.analysis.forward_graph_trace import ForwardGraphCache
from meshwright.model.loss.loss_definition import Batch, Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.plan.plan import Plan
from meshwright.verifier.message_trace import answer_reads

NUM_STEPS = 2  # buckets and states are made in the first one


@dataclass(frozen=True)
class RankInStreams:
    """One rank of a plan, while it is checked."""

    plan: Plan
    rank: int
    executor: StepExecutor
    checker: RaceChecker
    batch: Batch

    @property
    def state(self) -> RankState:
        """The mutable state of the rank."""
        return self.executor.state

    def step(self) -> None:
        """Trains one step, on the same samples."""
        self.executor.step(self.batch)


Play = Callable[[RankInStreams], None]


def train_steps(running: RankInStreams) -> None:
    """Trains `NUM_STEPS` steps."""
    for _ in range(NUM_STEPS):
        running.step()


def train_and_evaluate(running: RankInStreams) -> None:
    """Trains, evaluates, reads what a checkpoint and an export read, and trains on."""
    train_steps(running)
    if not running.state.loss.whole_batch:
        # ranks ask each other whether any has a batch left, which numbers that are always 1 affirm for ever
        with patch.object(evaluation, "_until_all_end", lambda batches, state: batches):
            running.executor.evaluate([running.batch, running.batch])
    running.executor.state_dict()
    running.executor.gather_parameters()
    running.step()


def find_races(
    analyzed: AnalyzedModel, plan: Plan, rank: int, play: Play = train_steps, loss: Loss | None = None
) -> list[Race]:
    """Returns the races of `rank` in what `play` does with it; needs a process of `run_with_fake_cuda`."""
    with running_rank(analyzed, plan, rank, loss or token_cross_entropy()) as running:
        play(running)
    return running.checker.races


@contextmanager
def running_rank(analyzed: AnalyzedModel, plan: Plan, rank: int, loss: Loss) -> Iterator[RankInStreams]:
    """Yields `rank` of `plan`, ready to train, under the checker."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    dtype = getattr(torch, plan.job.precision.parameters)
    module = make_trained_module(analyzed, DEVICE, dtype, mode)
    states: list[RankState] = []  # the state, once there is one
    checker = RaceChecker(lambda: states[0].current_action if states else "")
    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(answer_reads(module.module))
        get_graph = _disable_current_modes()(ForwardGraphCache.get)  # it makes tensors of its own
        stack.enter_context(patch.object(ForwardGraphCache, "get", get_graph))
        stack.enter_context(checker)
        stack.enter_context(stream_backend(rank, plan.mesh.world_size, checker))
        world = TorchWorld(plan.mesh, rank, DEVICE)
        stack.callback(world.close)
        states.append(RankState(module, world, loss))
        rng = make_stateless_rng(analyzed, plan)
        executor = StepExecutor(plan.for_rank(rank), states[0], stateless_rng=rng)
        stack.callback(executor.close)
        num_samples = len(plan.samples_read(rank))
        batch = {
            key: value.repeat(num_samples, *[1] * (value.ndim - 1))
            for key, value in module.dummy_batch.items()
        }
        yield RankInStreams(plan, rank, executor, checker, batch)
