"""The mutable state of one rank in a step, the module that it trains, and the metrics of the step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshwright.comm.collectives.group import Work, World
from meshwright.engine.runtime.grad_bucket import GradBucket
from meshwright.engine.runtime.loss_guard import LossSpike
from meshwright.model.analysis.forward_graph_trace import ForwardGraphCache
from meshwright.model.blocks.block_forward_backward import BlockCall, ForwardPass
from meshwright.model.loss.loss_definition import Batch, Loss
from meshwright.model.sequence_analysis.same_ops_on_shards import SequenceShardCheck
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.step.program import Action


@dataclass(frozen=True)
class Metrics:
    """The result of a step, the same on every rank. `tokens` and `samples` are global counts.

    `stop_requested`: a rank asked to stop. `is_skipped`: the parameters did not change, because no token
    counted, because the loss guard found a loss spike (`spike`), or because gradients overflowed float16
    (`overflow`). `loss_scale` is that of the next step; None without float16. `noise_scale` is in samples
    (step/gradient_noise.py); None: not measured or not known yet.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    stop_requested: bool = False
    is_skipped: bool = False
    spike: LossSpike | None = None
    samples: int = 0
    noise_scale: float | None = None
    overflow: bool = False
    loss_scale: float | None = None


@dataclass
class TrainedModule:
    """The model in training: the user's module, its blocks, logical parameters, and an example batch.

    `initial_values` are made on demand, for parameters that have a shape and no memory: a flat parameter or a
    slice gives it. `forward_graphs` are the recorded forwards that pipeline stages need. `sequence_check`
    compares sequences of other lengths with the plan. `remote_param_names` are the parameters of other
    pipeline ranks.
    """

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    model_spec: ModelSpec
    dummy_batch: Batch
    initial_values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    forward_graphs: ForwardGraphCache | None = None
    sequence_check: SequenceShardCheck | None = None
    remote_param_names: frozenset[str] = frozenset()

    def restrict_to(self, model_spec: ModelSpec) -> "TrainedModule":
        """Returns the part that runs the block calls of `model_spec`.

        The module frees all other parameters.
        """
        local_params = {weight.name: self.parameters[weight.name] for weight in model_spec.params}
        for name in self.parameters.keys() - local_params.keys():  # shapes stay, the memory is freed
            remote_param = self.parameters[name]
            remote_param.data = remote_param.detach().new_zeros(()).expand(remote_param.shape)
        return replace(
            self,
            parameters=local_params,
            model_spec=model_spec,
            remote_param_names=frozenset(self.parameters.keys() - local_params.keys()),
        )

    @property
    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The logical parameters that receive gradients."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}


@dataclass
class RankState:
    """One rank: its model, its place in the world, and what the current step has produced so far."""

    trained_module: TrainedModule
    world: World
    loss: Loss
    microbatches: list[Batch] = field(default_factory=list)
    num_real_microbatches: int = 0  # microbatches with samples; the others are dummies
    num_samples: int = 0  # samples in them
    microbatch_weights: list[float] = field(default_factory=list)  # what counts in each of them
    loss_sum: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    step_totals: torch.Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))
    forward_passes: dict[int, ForwardPass] = field(default_factory=dict)
    final_glue: dict[int, tuple[Any, BlockCall]] = field(default_factory=dict)
    buckets: dict[str, GradBucket] = field(default_factory=dict)
    works: dict[str, Work] = field(default_factory=dict)
    grad_norm: float = 0.0
    loss_factor: float = 1.0  # the loss is multiplied by it before its backward
    current_action: str = ""  # the ledger name of collectives inside a block
    # squared norms of gradients before they are summed
    local_sqnorms: dict[str, torch.Tensor] = field(default_factory=dict)
    noise_scale: float | None = None
    # as it travels to other ranks
    grad_norm_tensor: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))

    def __post_init__(self) -> None:
        for name in ("loss_sum", "step_totals", "grad_norm_tensor"):
            setattr(self, name, vars(self)[name].to(self.world.device))

    def begin_step(self, microbatches: list[Batch], num_real_microbatches: int) -> None:
        """Clears the last step, which may have failed, and sets the microbatches; dummies come last."""
        self.clear_step()
        self.microbatches, self.num_real_microbatches = microbatches, num_real_microbatches
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)

    def clear_step(self) -> None:
        """Frees the samples, activations and messages of a step; `step_totals` and `loss_sum` stay."""
        self.microbatches = []
        self.forward_passes.clear()
        self.final_glue.clear()
        self.works.clear()
        self.local_sqnorms.clear()

    def start_collective(self, action: Action, tensor: torch.Tensor | None = None) -> None:
        """Starts the collective of `action.transfer`, if it has one, on `tensor`.

        By default on the flat tensor of `action.subject`.
        """
        if action.transfer is None:
            return
        tensor = self.action_tensor(action.subject) if tensor is None else tensor
        group = self.world.group(action.transfer.axes, action.transfer.member_indices)
        match action.transfer.collective:
            case "broadcast":
                work = group.broadcast(tensor, action=action.name)
            case "reduce":
                work = group.reduce(tensor, action=action.name)
            case _:
                work = group.all_reduce(tensor, action=action.name, algorithm=action.transfer.algorithm)
        self.works[action.name] = work

    def packed_gradients(self, names: Sequence[str]) -> torch.Tensor:
        """Returns the range of a bucket in which the gradients of `names` lie."""
        return next(bucket for bucket in self.buckets.values() if names[0] in bucket.views).flat_gradients(
            names
        )

    def action_tensor(self, subject: str) -> torch.Tensor:
        """Returns the flat tensor that an action on `subject` moves.

        A bucket, or one parameter's gradient.
        """
        if subject in self.buckets:
            return self.buckets[subject].buffer
        parameter = self.trained_module.parameters[subject]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad
