"""Trains one rank of a plan on a fake CUDA device, and counts what each phase asks of the device.

The rank is made as a user makes it (`parallelize`), initial values and all, and takes two training steps; the
second counts. Then come an evaluation, what a checkpoint reads, and what a restore writes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.harness.fake_device import DEVICE, FakeDevice, OperationCounts
from meshwright.api import parallelize
from meshwright.comm.backends.fake import FakeWorld
from meshwright.engine.optim.sharded_state_dict import SavedTensor
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.plan.plan import Plan
from meshwright.run.training.trainer import LocalSamples, Trainer, select_local_batch

Counts = dict[str, list[int]]  # phase -> kernels, host reads, copies, collectives


def count_rank(analyzed: AnalyzedModel, plan: Plan, rank: int) -> Counts:
    """Returns the counts of one rank of `plan`, by phase.

    Raises what the rank raises, and AssertionError for a tensor of the rank that is not on the device.
    """
    world, counts = FakeWorld(plan.mesh, rank, DEVICE), Counts()
    world.ledger.is_recording = True
    device = FakeDevice()

    @contextmanager
    def count(phase: str) -> Iterator[None]:
        device.counts = OperationCounts()
        world.ledger.entries.clear()
        yield
        found = device.counts
        counts[phase] = [found.kernels, found.host_reads, found.copies, len(world.ledger.entries)]

    size = plan.job.train.batch
    samples = {
        key: value.repeat(-(-size // len(value)), *[1] * (value.ndim - 1))[:size]
        for key, value in analyzed.example_samples.items()
    }
    batch = select_local_batch(samples, plan, rank)
    with device:
        with count("build"):
            trainer = parallelize(analyzed, plan, world=world)
        for phase in ("first step", "step"):
            with count(phase):
                trainer.step(batch)
        check_devices(trainer)
        for phase in ("first evaluation", "evaluation"):  # the first may record the forward of a pipeline
            with count(phase):
                trainer.evaluate(_one_batch(batch, device))
            device.number = 1
        del counts["first evaluation"]  # another rank of the process may have recorded it
        with count("save"):
            found = {name: _to_host(value) for name, value in trainer.executor.state_dict().items()}
        saved = _others(trainer) | found
        with count("restore"):
            trainer.executor.load_state_dict(saved, trainer.steps_done)
        check_devices(trainer)
        trainer.close()
    return counts


def _one_batch(batch: LocalSamples, device: FakeDevice) -> Iterator[LocalSamples]:
    """Yields `batch`; then a rank that asks how many others have batches reads 0."""
    yield batch
    device.number = 0


def _others(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Returns what other ranks may have saved and this one reads: parameters and buffers, in full."""
    shapes = {f"model/{each.name}": each.shape for each in trainer.plan.model_spec.params}
    shapes |= {f"buffer/{name}": tuple(each.shape) for name, each in trainer.module.named_buffers()}
    return {name: torch.ones(shape) for name, shape in shapes.items()}


def _to_host(value: SavedTensor) -> torch.Tensor:
    """Returns the full tensor of what a rank saves, as all ranks together would have written it."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu")
    value.values.detach().to("cpu")
    return torch.ones(value.shape, dtype=value.dtype)


def check_devices(trainer: Trainer) -> None:
    """Raises AssertionError for a tensor of the rank that is not on the device."""
    state = trainer.executor.state
    module = state.trained_module.module
    tensors: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors |= {
        f"gradient of {name}": each.grad for name, each in module.named_parameters() if each.grad is not None
    }
    for name, value in trainer.executor.state_dict().items():
        tensor = value if isinstance(value, torch.Tensor) else value.values
        is_state = name.startswith("optimizer/") and not name.startswith("optimizer/step")
        if is_state and tensor.ndim:  # numbers of steps stay on the CPU
            tensors[name] = tensor
    if wrong := [name for name, tensor in tensors.items() if tensor.device != DEVICE]:
        raise AssertionError(f"not on {DEVICE}: {', '.join(wrong)}")
