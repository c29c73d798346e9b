"""The reference: one device, in an ordinary PyTorch loop, computes what every plan must compute.

The model's own forward on the whole global batch, one `loss.backward()`, torch's own clipping and optimizer.
Nothing here cuts a graph, buckets a gradient or knows a mesh. It shares with the engine only what defines the
numbers: initial values, the order of samples, and the stateless dropout.

A plan in which every microbatch is an update of its own, at weights that are several updates old, computes
something else. For it the loop replays the weight versions that its program states
(plan/step/weight_stashing.py): still one model, its own forward, one backward. Likewise where the host steps
beside the next step (offload with a delay): gradients are those at weights that lack the last update.

A plan with gradient compression steps with what its codes say. That is verified in two ways, to 1e-10: every
sum equals what its technique defines (engine/step/observed_sums.py), and nothing is lost: what is applied +
what is owed afterwards = the gradient of one device + what was owed before. For the second one the ranks
train once beforehand and report what each step `lost`: the change of all they owe, or, where nothing is owed,
what codes lost. The reference steps with its own gradient less that; every number of the ranks must equal it.
Where momentum is added before codes, the reference has its own; the ranks report which of it ended.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from meshwright.comm.collectives.group import World
from meshwright.engine.optim.lr_schedule import lr_factor
from meshwright.engine.optim.make_optimizers import make_param_groups
from meshwright.engine.runtime.rank_state import RankState, TrainedModule
from meshwright.engine.step.executor import StepExecutor
from meshwright.engine.step.observed_sums import (
    LocalChanges,
    largest_sum_error,
    local_changes,
    owed_sums,
    unowed_sums,
)
from meshwright.model.analysis.forward_errors import explain_forward_errors
from meshwright.model.blocks.block_forward_backward import backward_from
from meshwright.model.loss.loss_definition import Batch, Loss
from meshwright.model.recording.expert_choices import ChoiceRecorder, Choices
from meshwright.model.rng.stateless_dropout import StatelessDropout
from meshwright.model.rng.stateless_rng import StatelessRNG
from meshwright.model.tensors.float64_mode import Float64Mode
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import block_call_name
from meshwright.plan.plan import Plan
from meshwright.plan.step.single_device_program import stepped_microbatches as alone
from meshwright.plan.step.weight_stashing import forward_versions

TensorsByName = dict[str, torch.Tensor]
NOTHING_LOST: Mapping[str, torch.Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class ParityCase:
    """A comparison: a plan, and functions that make the model, the random numbers and the samples of a run.

    `batch_reader(plan, rank)` returns a function from step to that rank's samples; `single_device_plan` is
    the same job on one device. `plan_for_batch(batch)` is `plan` for samples like those of a batch, which may
    have another length.
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
    """One step of one device: batch, loss, gradients before clipping, their norm, parameters afterwards.

    Where microbatches are updates of their own, `microbatch_gradients` holds the gradients by microbatch, and
    `gradients` those of the last one. `biases` are the buffers that move the choice of experts, afterwards;
    `choices` the experts of each token, by layer. `sum_error` is the largest error of a sum of codes.
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


@dataclass(frozen=True)
class Reference:
    """The results of one device; `block_of` names the first block that uses each parameter."""

    initial_values: TensorsByName
    steps: list[ReferenceStep] = field(default_factory=list)
    block_of: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LostStep:
    """What the sums of codes of one step left out of each gradient, all ranks together; and the largest error
    of such a sum, relative, against what its technique defines. `before` is what ranks did before codes.
    """

    lost: TensorsByName
    error: float
    before: LocalChanges = field(default_factory=LocalChanges)


def record_lost(parity_case: ParityCase, world: World, num_steps: int) -> tuple[LostStep, ...]:
    """Trains one rank of the plan and returns what each step left out, the same on every rank; () if the plan
    has no sums of codes that say so.

    All ranks call it.
    """
    plan = parity_case.plan.for_rank(world.rank)
    if not any(each.carried_by for role in plan.program.roles for a in role.actions for each in a.transfers):
        return ()
    state = RankState(parity_case.make_trained_module(), world, parity_case.loss, observed_sums=[])
    executor = StepExecutor(plan, state, stateless_rng=parity_case.make_rng())
    read_batch = parity_case.batch_reader(parity_case.plan, world.rank)
    steps, before = list[LostStep](), dict[str, torch.Tensor]()
    try:
        with world.ledger.pause_recording():
            for step in range(num_steps):
                executor.step(read_batch(step))
                owed = owed_sums(state)
                lost = {name: each - before[name] if before else each for name, each in owed.items()}
                for name, each in unowed_sums(state).items():
                    lost[name] = lost[name] + each if name in lost else each
                steps.append(LostStep(lost, largest_sum_error(state), local_changes(state)))
                before = owed
                state.observed_sums = []
    finally:
        executor.close()
    return tuple(steps) if any(step.lost for step in steps) else ()


def run_reference(parity_case: ParityCase, num_steps: int, lost: Sequence[LostStep] = ()) -> Reference:
    """Trains `num_steps` steps on one device and records all that is compared.

    Replays weight versions if the plan has any. `lost` is what sums of codes leave out (`record_lost`).
    """
    subject, rng, plan = (
        parity_case.make_trained_module(),
        parity_case.make_rng(),
        parity_case.single_device_plan,
    )
    replay = (
        _WeightVersionReplay(parity_case, subject, rng)
        if alone(parity_case.plan.for_rank(0).actions)
        else None
    )
    trainable = subject.trainable_parameters
    block_of = {weight.name: weight.block_calls[0] for weight in plan.model_spec.params}
    reference = Reference(
        {name: p.detach().clone() for name, p in subject.parameters.items()}, block_of=block_of
    )
    optimizer = _plain_sgd(plan.job, subject)
    update = _DelayedUpdate(trainable) if parity_case.plan.sharding.tiers.delay else _update
    base_lrs = [group["lr"] for group in optimizer.param_groups]
    samples, model_spec = parity_case.batch_reader(plan, 0), plan.model_spec
    found = (each.on_one_device(subject.module, model_spec) for each in parity_case.plan.strategies)
    step_ends = [each for each in found if each is not None]
    recorder = ChoiceRecorder(lambda: len(reference.steps))
    if replay is None:
        recorder.attach(subject.module, model_spec.experts_calls)
    momenta = dict[str, torch.Tensor]()  # those that are added before codes
    for step in range(num_steps):
        batch = samples(step)
        if batch is None:
            break
        updates = bool(parity_case.loss.count(batch) > 0)  # where nothing counts, nothing changes
        for group, base_lr in zip(optimizer.param_groups, base_lrs, strict=True):
            group["lr"] = base_lr * lr_factor(plan.job.lr_schedule, step, plan.job.train.steps)
        if replay is not None:
            reference.steps.append(replay.step(optimizer, batch, step))
            continue
        optimizer.zero_grad(set_to_none=True)
        loss = _loss(parity_case, subject, rng, batch, step)
        _backward(loss)
        missing = _missing(subject, lost[step], momenta) if lost and updates else {}
        gradients = _gradients(subject, missing)
        clip = plan.job.train.clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(list(trainable.values()), clip)
        update(optimizer, updates)
        for end_step in step_ends:
            end_step(updates)
        biases = {each.buffer: subject.module.get_buffer(each.buffer) for each in model_spec.choice_biases}
        parameters_after = {name: p.detach().clone() for name, p in subject.parameters.items()}
        values = (loss.item(), norm.item(), gradients, parameters_after)
        choices = recorder.pop_choices(len(next(iter(batch.values()))))
        error = lost[step].error if lost else 0.0
        reference.steps.append(
            ReferenceStep(batch, *values, biases=_values(biases), choices=choices, sum_error=error)
        )
    recorder.detach()
    return reference


def batch_gradients(parity_case: ParityCase, batch: Batch, part_sizes: Sequence[int]) -> TensorsByName:
    """Returns the gradients of a global batch at the initial values on one device, summed over parts of it of
    `part_sizes` samples.
    """
    subject, rng = parity_case.make_trained_module(), parity_case.make_rng()
    weight = parity_case.loss.count_weight_and_tokens(batch)[0] or 1.0
    begin = 0
    for size in part_sizes:
        part = {key: value[begin : begin + size] for key, value in batch.items()}
        part_weight = parity_case.loss.count_weight_and_tokens(part)[0]
        if part_weight > 0:
            _backward(_loss(parity_case, subject, rng, part, 0, begin) * (part_weight / weight))
        begin += size
    return _gradients(subject)


def _update(optimizer: torch.optim.Optimizer, updates: bool) -> None:
    if updates:
        optimizer.step()


class _DelayedUpdate:
    """Updates weights, and leaves those in the model that lack the last update."""

    def __init__(self, trainable: Mapping[str, torch.nn.Parameter]) -> None:
        self._trainable, self._stepped = trainable, _values(trainable)

    def __call__(self, optimizer: torch.optim.Optimizer, updates: bool) -> None:
        before = self._stepped
        _set(self._trainable, before)
        _update(optimizer, updates)
        self._stepped = _values(self._trainable)
        _set(self._trainable, before)


class _WeightVersionReplay:
    """Updates with one microbatch each.

    Its gradient at the weight version of its forward, applied to the latest weights.
    """

    def __init__(self, parity_case: ParityCase, subject: TrainedModule, rng: StatelessRNG | None) -> None:
        self._parity_case, self._subject, self._rng, self._plan = parity_case, subject, rng, parity_case.plan
        plan = parity_case.plan
        # all ranks step with the same microbatches in the same order
        (self._microbatch_order,) = {alone(role.actions) for role in plan.program.roles} - {()}
        versions = [forward_versions(plan.stage_role(pp_rank).actions) for pp_rank in range(plan.mesh.pp)]
        self._version_by_param = {
            weight.name: versions[plan.sharding.pp_ranks_using(weight)[0]]
            for weight in parity_case.plan.model_spec.trainable
        }

    def step(self, optimizer: torch.optim.Optimizer, batch: Batch, step: int) -> ReferenceStep:
        """Runs one step of the plan, from the latest weights to those after all its updates."""
        trainable, num_rows = self._subject.trainable_parameters, self._plan.micro_batch * self._plan.num_data
        weight_history = [_values(trainable)]  # by number of updates
        gradients_by_microbatch: dict[int, TensorsByName] = {}
        loss, counts = 0.0, list[float]()
        for microbatch in self._microbatch_order:
            samples = {
                key: value[microbatch * num_rows : (microbatch + 1) * num_rows]
                for key, value in batch.items()
            }
            _set(
                trainable,
                {name: weight_history[self._version_by_param[name][microbatch]][name] for name in trainable},
            )
            optimizer.zero_grad(set_to_none=True)
            counts.append(
                self._parity_case.loss.count_weight_and_tokens(samples)[0]
                if len(next(iter(samples.values())))
                else 0.0
            )
            if counts[-1] > 0:
                microbatch_loss = _loss(
                    self._parity_case, self._subject, self._rng, samples, step, microbatch * num_rows
                )
                _backward(microbatch_loss)
                loss += microbatch_loss.item() * counts[-1]
            gradients_by_microbatch[microbatch] = _gradients(self._subject)
            _set(trainable, weight_history[-1])
            if counts[-1] > 0:  # an update in which nothing counts changes nothing
                optimizer.step()
            weight_history.append(_values(trainable))
        squares = sum(
            (tensor * tensor).sum().item()
            for values in gradients_by_microbatch.values()
            for tensor in values.values()
        )
        norm = (squares / max(1, sum(count > 0 for count in counts))) ** 0.5
        parameters = {name: p.detach().clone() for name, p in self._subject.parameters.items()}
        return ReferenceStep(
            batch,
            loss / (sum(counts) or 1.0),
            norm,
            gradients_by_microbatch[self._microbatch_order[-1]],
            parameters,
            gradients_by_microbatch,
        )


def _backward(loss: torch.Tensor) -> None:
    """Computes the gradients of `loss`; what the model recomputes is as wide as in its forward."""
    with Float64Mode():
        backward_from(loss, 1.0)


def _values(parameters: Mapping[str, torch.Tensor]) -> TensorsByName:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _set(parameters: Mapping[str, torch.nn.Parameter], values: TensorsByName) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])


def _gradients(subject: TrainedModule, lost: Mapping[str, torch.Tensor] = NOTHING_LOST) -> TensorsByName:
    """Returns a copy of every gradient, less what is `lost` of it.

    Zeros for a parameter that the step does not reach, which still decays.
    """
    for parameter in subject.trainable_parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for name, missing in lost.items():
        gradient = subject.trainable_parameters[name].grad
        if gradient is not None:
            gradient.sub_(missing)
    return {name: p.grad.clone() for name, p in subject.trainable_parameters.items() if p.grad is not None}


def _missing(subject: TrainedModule, step: LostStep, momenta: TensorsByName) -> TensorsByName:
    """Returns what the step of ranks leaves out of each gradient; `momenta` become those after the step."""
    missing, before = dict(step.lost), step.before
    for name, clipped in before.clipped.items():
        missing[name] = missing[name] + clipped
    for name, dropped in before.dropped.items():
        gradient, clipped = subject.trainable_parameters[name].grad, before.clipped.get(name, 0.0)
        new = (torch.zeros_like(dropped) if gradient is None else gradient) - clipped
        decayed = before.momentum * momenta.get(name, torch.zeros_like(new))
        missing[name] = missing[name] - decayed
        momenta[name] = decayed + new - dropped
    return missing


def _loss(
    parity_case: ParityCase,
    subject: TrainedModule,
    rng: StatelessRNG | None,
    batch: Batch,
    step: int,
    begin: int = 0,
) -> torch.Tensor:
    inputs = parity_case.loss.model_inputs(batch)
    with explain_forward_errors(subject.module, inputs, parity_case.loss.model_inputs(subject.dummy_batch)):
        if rng is None:
            outputs = subject.module(**inputs)
        else:
            num_rows = len(next(iter(batch.values())))
            first = step * parity_case.single_device_plan.job.train.batch + begin
            rng.begin_forward(step, torch.arange(first, first + num_rows))
            with StatelessDropout(rng), _BlockCallHooks(subject, rng.enter_block):
                outputs = subject.module(**inputs)
    return parity_case.loss.whole_total(outputs, batch) / (
        parity_case.loss.count_weight_and_tokens(batch)[0] or 1.0
    )


def _plain_sgd(job: Job, subject: TrainedModule) -> torch.optim.Optimizer:
    groups = make_param_groups(job.optimizer, subject.trainable_parameters)
    return torch.optim.SGD(
        groups, lr=job.optimizer.lr, momentum=job.optimizer.momentum, foreach=False, fused=False
    )


class _BlockCallHooks:
    """Announces block calls to the RNG, so that draw sites have the names that they have in the engine.

    As there, a block that another block calls is a part of that one, and a call without gradients is not a
    block call.
    """

    def __init__(self, subject: TrainedModule, enter: Callable[[str], None]) -> None:
        self._subject, self._enter = subject, enter
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> None:
        num_calls: dict[str, int] = {}
        active: list[str] = []

        def enter(name: str) -> None:
            if active or not torch.is_grad_enabled():
                return
            active.append(name)
            num_calls[name] = num_calls.get(name, 0) + 1
            self._enter(block_call_name(name, num_calls[name]))

        def leave(name: str) -> None:
            if active == [name]:
                active.clear()

        for name, block in self._subject.blocks.items():
            self._handles += [
                block.register_forward_pre_hook(lambda module, args, name=name: enter(name)),
                block.register_forward_hook(lambda module, args, output, name=name: leave(name)),
            ]

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
