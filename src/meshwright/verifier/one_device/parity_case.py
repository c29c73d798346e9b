"""What a comparison with one device takes, and what one device has found."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from meshwright.engine.runtime.rank_state import TrainedModule
from meshwright.model.loss.loss_definition import Batch, Loss
from meshwright.model.recording.expert_choices import Choices
from meshwright.model.rng.stateless_rng import StatelessRNG
from meshwright.plan.plan import Plan

TensorsByName = dict[str, torch.Tensor]
NOTHING_MISSING: Mapping[str, float] = MappingProxyType({})


def on_cpu(tensors: Mapping[str, torch.Tensor]) -> TensorsByName:
    """Returns `tensors` where one device computes."""
    return {name: each.detach().cpu() for name, each in tensors.items()}


def largest_element(tensor: torch.Tensor) -> float:
    """Returns the largest magnitude in `tensor`; 0 for integers, which are compared exactly: a table of them
    would hide every other error in its block.
    """
    return tensor.abs().max().item() if tensor.numel() and tensor.is_floating_point() else 0.0


@dataclass(frozen=True)
class ParityCase:
    """A comparison: a plan, and functions that make the model, the random numbers and the samples of a run.

    `batch_reader(plan, rank)` returns a function from step to that rank's samples; `single_device_plan` is
    the same job on one device. `plan_for_batch(batch)` is `plan` for samples like those of a batch, which may
    have another length. `recorded_arrivals` is by server the order in which it takes gradients, as far as
    the plan names a record.
    """

    plan: Plan
    single_device_plan: Plan
    loss: Loss
    make_trained_module: Callable[[], TrainedModule]
    make_rng: Callable[[], StatelessRNG | None]
    batch_reader: Callable[[Plan, int], Callable[[int], Batch | None]]
    plan_for_batch: Callable[[Batch], Plan]
    recorded_arrivals: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def make_reference_module(self) -> TrainedModule:
        """Returns a model that computes on one device what the techniques of the plan define."""
        subject = self.make_trained_module()
        for strategy in self.plan.strategies:
            strategy.compute_on_one_device(subject.module, subject.model_spec, self.plan.micro_batch)
        return subject


@dataclass(frozen=True)
class ReferenceStep:
    """One step of one device: batch, loss, gradients before clipping, their norm, parameters afterwards.

    Where microbatches are updates of their own, `microbatch_gradients` holds the gradients by microbatch, and
    `gradients` those of the last one. `biases` are the buffers that move the choice of experts, afterwards;
    `choices` the experts of each token, by layer. `sum_error` is the largest error of a sum of codes.
    `exact_loss` is the loss at the same weights without codes of activations, where there are any.
    `largest_missing` is the largest element of what codes leave out, by the name of the gradient: where next
    to nothing is sent, the gradient is a difference of two numbers of that scale, and so is its rounding.
    `batch` has the rows `samples` of the global batch (None: all), where sites train apart.
    """

    batch: Batch
    loss: float
    grad_norm: float
    gradients: TensorsByName
    parameters: TensorsByName
    microbatch_gradients: dict[int, TensorsByName] = field(default_factory=dict)
    biases: TensorsByName = field(default_factory=dict)
    choices: dict[str, Choices] = field(default_factory=dict)
    sum_error: float = 0.0
    exact_loss: float | None = None
    samples: tuple[int, ...] | None = None
    largest_missing: Mapping[str, float] = field(default_factory=dict)

    def rows_of(self, samples: Sequence[int]) -> list[int]:
        """Returns the rows of `batch` with those of `samples`, indices in the global batch, that it has."""
        if self.samples is None:
            return [each for each in samples if each < len(next(iter(self.batch.values())))]
        rows = {sample: row for row, sample in enumerate(self.samples)}
        return [rows[each] for each in samples if each in rows]


@dataclass(frozen=True)
class Reference:
    """The results of one device; `block_of` names the first block that uses each parameter.

    `sites` are those of each site that trains apart, the first one included; and of servers that take
    gradients as they arrive, which take them in the order `arrivals`, of workers.
    """

    initial_values: TensorsByName
    steps: list[ReferenceStep] = field(default_factory=list)
    block_of: dict[str, str] = field(default_factory=dict)
    sites: "tuple[Reference, ...]" = ()
    arrivals: list[int] | None = None

    def of_site(self, index: int) -> "Reference":
        """Returns the results of the site at `index`."""
        return self.sites[index] if self.sites else self

    def scales(
        self, values: TensorsByName, others: Mapping[str, float] = NOTHING_MISSING
    ) -> dict[str, float]:
        """Returns the scale of each block: the largest element of its `values`, and of those in `others`."""
        scales: dict[str, float] = {}
        for name, tensor in values.items():
            largest = max(largest_element(tensor), others.get(name, 0.0))
            scales[self.block_of[name]] = max(scales.get(self.block_of[name], 1e-30), largest)
        return scales
