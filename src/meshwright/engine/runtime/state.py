"""What one rank has in its hands while it plays a step: the one mutable object of the engine.

Gradients of several parameters as one contiguous buffer, so that one message carries them.

A bucket is made once and stays: `pack` copies gradients in and makes each `.grad` a view of its piece, so that later
micro-batches add in place and the optimizer reads the reduced values without a copy back.

    flat   [ w0.grad | w1.grad | w2.grad ]        w1.grad is flat[a:b].view(shape)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshwright.comm.collectives.group import Work, World
from meshwright.engine.runtime.loss import Batch, Loss
from meshwright.engine.runtime.loss_guard import LossSpike
from meshwright.model.analysis.pipeline_trial import ForwardGraphCache
from meshwright.model.blocks.driver import BlockCall, ForwardPass
from meshwright.model.sequence_analysis.runtime_check import SequenceShardCheck
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.step.action import Action


def bucket_actions(actions: Sequence[Action]) -> dict[str, Action]:
    """For each PACK, by name, the action behind it that is the first to move what it packs: it names the bucket."""
    found: dict[str, Action] = {}
    moving: dict[str, Action] = {}
    for action in reversed(actions):
        if action.kind == "PACK" and action.tensors[0] in moving:
            found[action.name] = moving[action.tensors[0]]
        if action.transfer is not None:
            moving |= dict.fromkeys(action.tensors, action)
    return found


class GradBucket:
    """One flat buffer of `dtype`, and a view of it per parameter, by logical name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        self.parameters = dict(parameters)
        first = next(
            iter(self.parameters.values())
        )  # the buffer is of its kind: on its device, and fake where it is fake
        self.buffer = first.new_empty(sum(p.numel() for p in self.parameters.values()), dtype=dtype)
        self.views: dict[str, torch.Tensor] = {}
        start = 0
        for name, parameter in self.parameters.items():
            self.views[name] = self.buffer[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()

    def flat_gradients(self, names: Sequence[str]) -> torch.Tensor:
        """The gradients of `names`, which follow each other here, as one flat tensor."""
        start = self.views[names[0]].storage_offset() - self.buffer.storage_offset()
        return self.buffer[start : start + sum(self.views[name].numel() for name in names)]

    def pack(self, names: Iterable[str]) -> None:
        """Copy the gradients of `names` in; a parameter that backward did not reach has a gradient of zero."""
        for name in names:
            parameter, view = self.parameters[name], self.views[name]
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
            if view.dtype == parameter.dtype:
                parameter.grad = view

    def unpack(self) -> None:
        """Copy the values back into the parameters' gradients, in the parameters' dtype."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                parameter.grad = self.views[name].to(parameter.dtype)
            else:
                parameter.grad.copy_(self.views[name])


@dataclass(frozen=True)
class Metrics:
    """What a step did, the same on every rank. `tokens` and `samples` are global counts; `stop`: a rank asked to stop.

    A step in which nothing counted leaves the parameters as they were: `skipped`. So does one that would do harm, where
    the job guards against that: `spike` says why; and one whose gradients left the range of float16: `overflow`. `loss_scale` is
    that of the next step; None: nothing is float16. `noise_scale` is in samples (`engine.noise`); None: not measured, or not
    known yet.
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
    """The model as the engine holds it: the user's module, its blocks, its logical parameters, and one example row.

    `blank` are the initial values, made when asked for, of parameters that have a shape and no memory: an arena gives it.
    `courses` say how its forward goes, for those who run a part of it, and `alike` whether it does so on rows of any length;
    `elsewhere` are the parameters of other parts.
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
        """What a rank holds of it that runs the visits of `anatomy` alone; the module lets go of all other weights."""
        mine = {weight.name: self.parameters[weight.name] for weight in model_spec.params}
        for name in self.parameters.keys() - mine.keys():  # shapes stay, and the memory goes
            foreign = self.parameters[name]
            foreign.data = foreign.detach().new_zeros(()).expand(foreign.shape)
        return replace(
            self,
            parameters=mine,
            model_spec=model_spec,
            remote_param_names=frozenset(self.parameters.keys() - mine.keys()),
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
    num_real_microbatches: int = 0  # micro-batches with rows; those behind them only stand in
    num_samples: int = 0  # the rows in them
    microbatch_weights: list[float] = field(
        default_factory=list
    )  # what counts in each of the real micro-batches
    loss_sum: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    step_totals: torch.Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))
    forward_passes: dict[int, ForwardPass] = field(default_factory=dict)
    final_glue: dict[int, tuple[Any, BlockCall]] = field(default_factory=dict)
    buckets: dict[str, GradBucket] = field(default_factory=dict)
    works: dict[str, Work] = field(default_factory=dict)
    grad_norm: float = 0.0
    loss_factor: float = 1.0  # what the loss is multiplied by before its backward
    current_action: str = ""  # the action under way: what collectives inside of a block are booked under
    local_sqnorms: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # squared norms of gradients before they are summed
    noise_scale: float | None = None
    grad_norm_tensor: torch.Tensor = field(
        default_factory=lambda: torch.zeros(1, dtype=torch.float64)
    )  # as it travels to other ranks

    def begin_step(self, microbatches: list[Batch], num_real_microbatches: int) -> None:
        """Forget the last step, which may have failed, and take these micro-batches, of which so many hold rows."""
        self.clear_step()
        self.microbatches, self.num_real_microbatches = microbatches, num_real_microbatches
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)

    def clear_step(self) -> None:
        """Let go of the rows, activations and messages of a step; its header and tally stay."""
        self.microbatches = []
        self.forward_passes.clear()
        self.final_glue.clear()
        self.works.clear()
        self.local_sqnorms.clear()

    def packed_gradients(self, names: Sequence[str]) -> torch.Tensor:
        """The stretch of a bucket in which the gradients of `names` lie."""
        return next(bucket for bucket in self.buckets.values() if names[0] in bucket.views).flat_gradients(
            names
        )

    def action_tensor(self, subject: str) -> torch.Tensor:
        """The flat tensor that an action on `subject` moves: a bucket, or one parameter's gradient."""
        if subject in self.buckets:
            return self.buckets[subject].buffer
        parameter = self.trained_module.parameters[subject]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad
