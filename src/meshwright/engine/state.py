"""What one rank has in its hands while it plays a step: the one mutable object of the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshwright.comm.group import Work, World
from meshwright.core.anatomy import Anatomy
from meshwright.engine.buckets import Bucket
from meshwright.engine.loss import Batch, Loss
from meshwright.engine.spikes import Spike
from meshwright.model.alike import Alike
from meshwright.model.courses import Courses
from meshwright.model.drive import Pass, Visit


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
    stop: bool = False
    skipped: bool = False
    spike: Spike | None = None
    samples: int = 0
    noise_scale: float | None = None
    overflow: bool = False
    loss_scale: float | None = None


@dataclass
class Subject:
    """The model as the engine holds it: the user's module, its blocks, its logical parameters, and one example row.

    `blank` are the initial values, made when asked for, of parameters that have a shape and no memory: an arena gives it.
    `courses` say how its forward goes, for those who run a part of it, and `alike` whether it does so on rows of any length;
    `elsewhere` are the parameters of other parts.
    """

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    anatomy: Anatomy
    stand_in: Batch
    blank: Mapping[str, torch.Tensor] = field(default_factory=dict)
    courses: Courses | None = None
    alike: Alike | None = None
    elsewhere: frozenset[str] = frozenset()

    def within(self, anatomy: Anatomy) -> "Subject":
        """What a rank holds of it that runs the visits of `anatomy` alone; the module lets go of all other weights."""
        mine = {weight.name: self.parameters[weight.name] for weight in anatomy.weights}
        for name in self.parameters.keys() - mine.keys():  # shapes stay, and the memory goes
            foreign = self.parameters[name]
            foreign.data = foreign.detach().new_zeros(()).expand(foreign.shape)
        return replace(self, parameters=mine, anatomy=anatomy, elsewhere=frozenset(self.parameters.keys() - mine.keys()))

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The logical parameters that receive gradients."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}


@dataclass
class State:
    """One rank: its model, its place in the world, and what the current step has produced so far."""

    subject: Subject
    world: World
    loss: Loss
    micros: list[Batch] = field(default_factory=list)
    num_real: int = 0  # micro-batches with rows; those behind them only stand in
    num_rows: int = 0  # the rows in them
    weights: list[float] = field(default_factory=list)  # what counts in each of the real micro-batches
    tally: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    header: torch.Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))
    passes: dict[int, Pass] = field(default_factory=dict)
    closings: dict[int, tuple[Any, Visit]] = field(default_factory=dict)
    buckets: dict[str, Bucket] = field(default_factory=dict)
    works: dict[str, Work] = field(default_factory=dict)
    grad_norm: float = 0.0
    seed: float = 1.0  # what the loss is multiplied by before its backward
    acting: str = ""  # the action under way: what collectives inside of a block are booked under
    squares: dict[str, torch.Tensor] = field(default_factory=dict)  # squared norms of gradients before they are summed
    noise_scale: float | None = None
    norm: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))  # as it travels to other ranks

    def begin(self, micros: list[Batch], num_real: int) -> None:
        """Forget the last step, which may have failed, and take these micro-batches, of which so many hold rows."""
        self.forget()
        self.micros, self.num_real = micros, num_real
        self.tally = torch.zeros((), dtype=torch.float64, device=self.world.device)

    def forget(self) -> None:
        """Let go of the rows, activations and messages of a step; its header and tally stay."""
        self.micros = []
        self.passes.clear()
        self.closings.clear()
        self.works.clear()
        self.squares.clear()

    def packed(self, names: Sequence[str]) -> torch.Tensor:
        """The stretch of a bucket in which the gradients of `names` lie."""
        return next(bucket for bucket in self.buckets.values() if names[0] in bucket.views).stretch(names)

    def tensor(self, subject: str) -> torch.Tensor:
        """The flat tensor that an action on `subject` moves: a bucket, or one parameter's gradient."""
        if subject in self.buckets:
            return self.buckets[subject].flat
        parameter = self.subject.parameters[subject]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad
