"""One device, without the engine: an ordinary PyTorch loop that states what every plan must compute.

The model's own forward on the whole global batch, one `loss.backward()`, torch's own clipping and optimizer. Nothing here
cuts a graph, buckets a gradient or knows a mesh. It shares with the engine only what defines the numbers: initial
values, the order of samples, and the stateless dropout.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from meshwright.core.job import Job
from meshwright.core.plan import Plan
from meshwright.engine.loss import Batch, Loss
from meshwright.engine.optimizers import parameter_groups
from meshwright.engine.schedule import factor
from meshwright.engine.state import Subject
from meshwright.model.dice import Dice
from meshwright.model.dropout import StatelessDropout

Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """What is compared: a plan, and how to make the model, the randomness and the rows that it and one device train on.

    `rows(plan, rank)` gives a function from step to that rank's rows; `alone` is the same job on one device.
    """

    plan: Plan
    alone: Plan
    loss: Loss
    make_subject: Callable[[], Subject]
    make_dice: Callable[[], Dice | None]
    rows: Callable[[Plan, int], Callable[[int], Batch | None]]


@dataclass(frozen=True)
class StepTruth:
    """One step of one device: the batch, the loss, every gradient before clipping, their norm, the parameters after."""

    batch: Batch
    loss: float
    grad_norm: float
    gradients: Values
    parameters: Values


@dataclass(frozen=True)
class Reference:
    """What one device computes; `block_of` names the first block that uses each parameter."""

    initial: Values
    steps: list[StepTruth] = field(default_factory=list)
    block_of: dict[str, str] = field(default_factory=dict)


def run_reference(case: Case, steps: int) -> Reference:
    """Train `steps` steps on one device and keep all that is compared."""
    subject, dice, plan = case.make_subject(), case.make_dice(), case.alone
    trainable = subject.trainable
    block_of = {weight.name: weight.visits[0] for weight in plan.anatomy.weights}
    reference = Reference({name: p.detach().clone() for name, p in subject.parameters.items()}, block_of=block_of)
    optimizer = _plain_sgd(plan.job, subject)
    bases = [group["lr"] for group in optimizer.param_groups]
    rows = case.rows(plan, 0)
    for step in range(steps):
        batch = rows(step)
        if batch is None:
            break
        for group, base in zip(optimizer.param_groups, bases, strict=True):
            group["lr"] = base * factor(plan.job.schedule, step, plan.job.train.steps)
        optimizer.zero_grad(set_to_none=True)
        loss = _loss(case, subject, dice, batch, step)
        loss.backward()
        for parameter in trainable.values():
            if parameter.grad is None:  # a step that does not reach a parameter has a gradient of zero, and still decays it
                parameter.grad = torch.zeros_like(parameter)
        gradients = {name: p.grad.clone() for name, p in trainable.items() if p.grad is not None}
        clip = plan.job.train.clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(list(trainable.values()), clip)
        if case.loss.count(batch) > 0:  # a step in which nothing counts leaves the parameters as they were
            optimizer.step()
        after = {name: p.detach().clone() for name, p in subject.parameters.items()}
        reference.steps.append(StepTruth(batch, loss.item(), norm.item(), gradients, after))
    return reference


def _loss(case: Case, subject: Subject, dice: Dice | None, batch: Batch, step: int) -> torch.Tensor:
    inputs = {key: value for key, value in batch.items() if key not in case.loss.targets}
    if dice is None:
        outputs = subject.module(**inputs)
    else:
        num_rows = len(next(iter(batch.values())))
        first = step * case.alone.job.train.batch
        dice.begin(step, torch.arange(first, first + num_rows))
        with StatelessDropout(dice), _announced(subject, dice.enter):
            outputs = subject.module(**inputs)
    return case.loss.total(outputs, batch) / (case.loss.counted(batch)[0] or 1.0)


def _plain_sgd(job: Job, subject: Subject) -> torch.optim.Optimizer:
    groups = parameter_groups(job.optimizer, subject.trainable)
    return torch.optim.SGD(groups, lr=job.optimizer.lr, momentum=job.optimizer.momentum, foreach=False, fused=False)


class _announced:  # noqa: N801  reads as a phrase in a with statement
    """While active, blocks say that they are entered, so that dropout sites have the names they have in the engine.

    As there, a block that another block calls is a part of that one, and a call without gradients is no visit.
    """

    def __init__(self, subject: Subject, enter: Callable[[str], None]) -> None:
        self._subject, self._enter = subject, enter
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> None:
        calls: dict[str, int] = {}
        inside: list[str] = []

        def announce(name: str) -> None:
            if inside or not torch.is_grad_enabled():
                return
            inside.append(name)
            calls[name] = calls.get(name, 0) + 1
            self._enter(name if calls[name] == 1 else f"{name}#{calls[name]}")

        def leave(name: str) -> None:
            if inside == [name]:
                inside.clear()

        for name, block in self._subject.blocks.items():
            self._handles += [
                block.register_forward_pre_hook(lambda module, args, name=name: announce(name)),
                block.register_forward_hook(lambda module, args, output, name=name: leave(name)),
            ]

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
