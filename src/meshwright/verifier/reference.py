"""One device, without the engine: an ordinary PyTorch loop that states what every plan must compute.

The model's own forward on the whole global batch, one `loss.backward()`, torch's own clipping and optimizer. Nothing here
cuts a graph, buckets a gradient or knows a mesh. It shares with the engine only what defines the numbers: initial
values, the order of samples, and the stateless dropout.

A plan in which every micro-batch is an update of its own, at weights that are several updates old, computes something else. Then
the loop is a replay of the versions that its program states (core/versions.py): still one model, its own forward, one backward.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from meshwright.engine.optim.optimizers import lr_factor, make_param_groups
from meshwright.engine.runtime.loss import Batch, Loss
from meshwright.engine.runtime.state import TrainedModule
from meshwright.model.blocks.driver import backward_from
from meshwright.model.rng.dropout_mode import StatelessDropout
from meshwright.model.rng.sites import StatelessRNG
from meshwright.model.tensors.float64_mode import Float64Mode
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import block_call_name
from meshwright.plan.plan import Plan
from meshwright.plan.step.single_device import stepped_microbatches as alone
from meshwright.plan.step.weight_stashing import forward_versions

TensorsByName = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ParityCase:
    """What is compared: a plan, and how to make the model, the randomness and the rows that it and one device train on.

    `rows(plan, rank)` gives a function from step to that rank's rows; `alone` is the same job on one device. `on(batch)` is
    `plan` on rows like those of a batch, which may be of another length.
    """

    plan: Plan
    single_device_plan: Plan
    loss: Loss
    make_trained_module: Callable[[], TrainedModule]
    make_rng: Callable[[], StatelessRNG | None]
    batch_reader: Callable[[Plan, int], Callable[[int], Batch | None]]
    plan_for_batch: Callable[[Batch], Plan]


@dataclass(frozen=True)
class ReferenceStep:
    """One step of one device: the batch, the loss, every gradient before clipping, their norm, the parameters after.

    Where micro-batches are updates of their own, `each` has the gradients by micro-batch, and `gradients` those of the last one.
    """

    batch: Batch
    loss: float
    grad_norm: float
    gradients: TensorsByName
    parameters: TensorsByName
    microbatch_gradients: dict[int, TensorsByName] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """What one device computes; `block_of` names the first block that uses each parameter."""

    initial_values: TensorsByName
    steps: list[ReferenceStep] = field(default_factory=list)
    block_of: dict[str, str] = field(default_factory=dict)


def run_reference(parity_case: ParityCase, num_steps: int) -> Reference:
    """Train `steps` steps on one device and keep all that is compared; a replay, where the plan asks for one."""
    subject, dice, plan = (
        parity_case.make_trained_module(),
        parity_case.make_rng(),
        parity_case.single_device_plan,
    )
    replay = _WeightVersionReplay(parity_case, subject, dice) if alone(parity_case.plan.actions) else None
    trainable = subject.trainable_parameters
    block_of = {weight.name: weight.block_calls[0] for weight in plan.model_spec.params}
    reference = Reference(
        {name: p.detach().clone() for name, p in subject.parameters.items()}, block_of=block_of
    )
    optimizer = _plain_sgd(plan.job, subject)
    bases = [group["lr"] for group in optimizer.param_groups]
    rows = parity_case.batch_reader(plan, 0)
    for step in range(num_steps):
        batch = rows(step)
        if batch is None:
            break
        for group, base in zip(optimizer.param_groups, bases, strict=True):
            group["lr"] = base * lr_factor(plan.job.schedule, step, plan.job.train.steps)
        if replay is not None:
            reference.steps.append(replay.step(optimizer, batch, step))
            continue
        optimizer.zero_grad(set_to_none=True)
        loss = _loss(parity_case, subject, dice, batch, step)
        _backward(loss)
        gradients = _gradients(subject)
        clip = plan.job.train.clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(list(trainable.values()), clip)
        if (
            parity_case.loss.count(batch) > 0
        ):  # a step in which nothing counts leaves the parameters as they were
            optimizer.step()
        after = {name: p.detach().clone() for name, p in subject.parameters.items()}
        reference.steps.append(ReferenceStep(batch, loss.item(), norm.item(), gradients, after))
    return reference


class _WeightVersionReplay:
    """Updates with one micro-batch each: its gradient at the weights that it meets on each rank, with which the newest step."""

    def __init__(self, case: ParityCase, subject: TrainedModule, dice: StatelessRNG | None) -> None:
        self._case, self._subject, self._dice, self._plan = case, subject, dice, case.plan
        roles = [actions for _, actions in case.plan.program.roles]
        (self._order,) = {
            alone(actions) for actions in roles
        }  # all ranks step with the same micro-batches in the same order
        met = [forward_versions(actions) for actions in roles]
        self._met = {
            weight.name: met[case.plan.sharding.pp_ranks_using(weight)[0]]
            for weight in case.plan.model_spec.trainable
        }

    def step(self, optimizer: torch.optim.Optimizer, batch: Batch, step: int) -> ReferenceStep:
        """One step of the plan, from the newest weights to those after all its updates."""
        trainable, num_rows = self._subject.trainable_parameters, self._plan.micro_batch * self._plan.num_data
        history = [_values(trainable)]  # after so many updates
        each: dict[int, TensorsByName] = {}
        loss, counts = 0.0, list[float]()
        for micro in self._order:
            rows = {key: value[micro * num_rows : (micro + 1) * num_rows] for key, value in batch.items()}
            _set(trainable, {name: history[self._met[name][micro]][name] for name in trainable})
            optimizer.zero_grad(set_to_none=True)
            counts.append(
                self._case.loss.count_weight_and_tokens(rows)[0] if len(next(iter(rows.values()))) else 0.0
            )
            if counts[-1] > 0:
                taken = _loss(self._case, self._subject, self._dice, rows, step, micro * num_rows)
                _backward(taken)
                loss += taken.item() * counts[-1]
            each[micro] = _gradients(self._subject)
            _set(trainable, history[-1])
            if counts[-1] > 0:  # one in which nothing counts leaves the parameters as they were
                optimizer.step()
            history.append(_values(trainable))
        squares = sum(
            (tensor * tensor).sum().item() for values in each.values() for tensor in values.values()
        )
        norm = (squares / max(1, sum(count > 0 for count in counts))) ** 0.5
        parameters = {name: p.detach().clone() for name, p in self._subject.parameters.items()}
        return ReferenceStep(
            batch, loss / (sum(counts) or 1.0), norm, each[self._order[-1]], parameters, each
        )


def _backward(loss: torch.Tensor) -> None:
    """The gradients of `loss`; what the model recomputes on the way is as wide as in its forward."""
    with Float64Mode():
        backward_from(loss, 1.0)


def _values(parameters: Mapping[str, torch.nn.Parameter]) -> TensorsByName:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _set(parameters: Mapping[str, torch.nn.Parameter], values: TensorsByName) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])


def _gradients(subject: TrainedModule) -> TensorsByName:
    """A copy of every gradient; a step that does not reach a parameter has one of zero, and still decays it."""
    for parameter in subject.trainable_parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return {name: p.grad.clone() for name, p in subject.trainable_parameters.items() if p.grad is not None}


def _loss(
    case: ParityCase,
    subject: TrainedModule,
    dice: StatelessRNG | None,
    batch: Batch,
    step: int,
    begin: int = 0,
) -> torch.Tensor:
    """The mean loss of `batch`, the rows from `begin` on of the step's."""
    inputs = case.loss.model_inputs(batch)
    if dice is None:
        outputs = subject.module(**inputs)
    else:
        num_rows = len(next(iter(batch.values())))
        first = step * case.single_device_plan.job.train.batch + begin
        dice.begin_forward(step, torch.arange(first, first + num_rows))
        with StatelessDropout(dice), _BlockCallHooks(subject, dice.enter_block):
            outputs = subject.module(**inputs)
    return case.loss.total(outputs, batch) / (case.loss.count_weight_and_tokens(batch)[0] or 1.0)


def _plain_sgd(job: Job, subject: TrainedModule) -> torch.optim.Optimizer:
    groups = make_param_groups(job.optimizer, subject.trainable_parameters)
    return torch.optim.SGD(
        groups, lr=job.optimizer.lr, momentum=job.optimizer.momentum, foreach=False, fused=False
    )


class _BlockCallHooks:
    """While active, blocks say that they are entered, so that dropout sites have the names they have in the engine.

    As there, a block that another block calls is a part of that one, and a call without gradients is no visit.
    """

    def __init__(self, subject: TrainedModule, enter: Callable[[str], None]) -> None:
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
            self._enter(block_call_name(name, calls[name]))

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
