"""Activations of a step: what is counted, when it ends, and how close the plan comes."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from meshwright.api import make_plan
from meshwright.engine.runtime.rank_state import TrainedModule
from meshwright.model.blocks.block_forward_backward import ForwardDriver
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from meshwright.run.telemetry.activation_memory import ActivationRecorder
from meshwright.run.telemetry.rank_profile import rank_usage_path
from meshwright.run.training.train_loop import train_loop
from meshwright.testing.ranks import run_on_threads
from tests.tiny_model import TOKENS, VOCABULARY, analyzed_model, executor_of, tiny_job, token_samples

ANALYZED = analyzed_model()
SAVED = ("output(", "saved activations(")  # what the plan allocates until a backward


class Stepper:
    """Stands in for an executor: runs a model under a driver, without cutting its graph."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        blocks = dict(self.model.named_children())
        parameters = dict(self.model.named_parameters())
        trained = TrainedModule(self.model, blocks, parameters, ANALYZED.model_spec, {})
        self._driver = ForwardDriver(blocks, cut_graph=False)
        self.state = SimpleNamespace(trained_module=trained, driver=self._driver)
        self._inputs = torch.ones(16, 4)

    def step(self) -> list[torch.Tensor]:
        self.model.zero_grad()
        outputs, *_ = self._driver.forward(lambda name: False, lambda: self.model(self._inputs))
        outputs.exp().sum().backward()
        return [parameter.grad.clone() for parameter in self.model.parameters()]


def test_saved_tensors_and_outputs_count_once_and_parameters_do_not():
    recorder, stepper = ActivationRecorder(), Stepper()
    assert recorder.peak_nbytes is None
    with recorder.recording(stepper):
        stepper.step()
    # while Tanh runs: the inputs, its own inputs (freed then), its outputs, which it saves
    assert recorder.peak_nbytes == 4 * 16 * (4 + 8 + 8)


def test_memory_that_was_freed_does_not_count():
    once, thrice, stepper = ActivationRecorder(), ActivationRecorder(), Stepper()
    for recorder, times in ((once, 1), (thrice, 3)):
        with recorder.recording(stepper):
            for _ in range(times):
                stepper.step()
    assert once.peak_nbytes == thrice.peak_nbytes


def test_gradients_are_bit_identical_while_activations_are_measured():
    stepper = Stepper()
    alone = stepper.step()
    with ActivationRecorder().recording(stepper):
        measured = stepper.step()
        # a pipeline stage whose blocks have hooks is not replayed, in all later steps either
        assert not any(block._forward_hooks or block._forward_pre_hooks for block in stepper.model)
    assert all(torch.equal(*pair) for pair in zip(alone, measured, strict=True))


def planned_and_measured(folder: Path, mesh: Mesh, *strategies: Strategy) -> list[tuple[int, int]]:
    """Of each rank's first step, the planned peak of outputs and saved activations, and the measured one."""
    job = tiny_job()
    job = replace(job, train=replace(job.train, steps=2))
    plan = replace(make_plan(ANALYZED, job, mesh, strategies, 2), run=RunConfig(str(folder)))

    def rank(world) -> int:
        executor = executor_of(ANALYZED, plan, world)
        batches = open_local_batches(ExampleDataset(token_samples()), plan, world.rank)
        train_loop(executor, plan, batches, world, lambda: False)
        executor.close()
        peak = 0
        sizes: dict[str, int] = {}
        for action in executor.state.plan.actions:
            sizes |= {each.name: each.nbytes for each in action.allocations if each.name.startswith(SAVED)}
            peak = max(peak, sum(sizes.values()))
            for name in action.frees:
                sizes.pop(name, None)
        return peak

    planned = run_on_threads(rank, plan.mesh)
    files = [rank_usage_path(folder, rank) for rank in range(plan.mesh.world_size)]
    measured = [json.loads(file.read_text())["memory"]["activations"] for file in files]
    return list(zip(planned, measured, strict=True))


@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        (Mesh(), ()),
        (Mesh(dp_shard=3), (BatchSplit("dp_shard"), ZeRO(stage=3), ActivationCheckpointing())),
    ],
    ids=["one device", "gathered parameters and checkpointed blocks"],
)
def test_a_run_measures_what_the_plan_says_of_outputs_and_saved_activations(tmp_path, mesh, strategies):
    log_softmax = 2 * TOKENS * VOCABULARY * 8  # saved by the loss; scratch in the plan
    for planned, measured in planned_and_measured(tmp_path, mesh, *strategies):
        assert 0 <= measured - planned - log_softmax < 1000, "beyond that: token ids, labels and masks"
