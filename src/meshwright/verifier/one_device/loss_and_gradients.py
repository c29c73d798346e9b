"""The loss and the gradients of a batch on one device, by the model's own forward and one backward; and the
optimizer that steps it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from meshwright.engine.generation.routed_experts import replay_context
from meshwright.engine.optim.make_optimizers import make_param_groups
from meshwright.engine.runtime.rank_state import TrainedModule
from meshwright.model.analysis.forward_errors import explain_forward_errors
from meshwright.model.blocks.block_forward_backward import backward_from
from meshwright.model.loss.loss_definition import Batch
from meshwright.model.pipeline.rounded_values import RoundedValues
from meshwright.model.recording.router_replay import ROUTED_EXPERTS
from meshwright.model.rng.stateless_dropout import StatelessDropout
from meshwright.model.rng.stateless_rng import StatelessRNG
from meshwright.model.tensors.float64_mode import Float64Mode
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import block_call_name
from meshwright.verifier.one_device.parity_case import ParityCase, TensorsByName

NOTHING_LOST: Mapping[str, torch.Tensor] = MappingProxyType({})


def backward(loss: torch.Tensor) -> None:
    """Computes the gradients of `loss`; what the model recomputes is as wide as in its forward."""
    with Float64Mode():
        backward_from(loss, 1.0)


def copied_values(parameters: Mapping[str, torch.Tensor]) -> TensorsByName:
    """Returns a copy of every parameter."""
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def set_values(parameters: Mapping[str, torch.nn.Parameter], values: TensorsByName) -> None:
    """Writes `values` into the parameters that they name."""
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)


def gradients_of(subject: TrainedModule, lost: Mapping[str, torch.Tensor] = NOTHING_LOST) -> TensorsByName:
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


def loss_of(
    parity_case: ParityCase,
    subject: TrainedModule,
    rng: StatelessRNG | None,
    batch: Batch,
    step: int,
    rows: Sequence[int] | None = None,
    rounded: RoundedValues | None = None,
) -> torch.Tensor:
    """Returns the loss of `batch`, which are the `rows` of the global batch (None: all)."""
    inputs = parity_case.loss.model_inputs(batch)
    with explain_forward_errors(subject.module, inputs, parity_case.loss.model_inputs(subject.dummy_batch)):
        run = partial(_run_with_routes, subject, batch, partial(subject.module, **inputs))
        if rounded is not None:
            run = partial(rounded.run, subject.module, subject.blocks, run, rows)
        if rng is None:
            outputs = run()
        else:
            num_rows = len(next(iter(batch.values())))
            first = step * parity_case.single_device_plan.job.train.batch
            own = torch.arange(num_rows) if rows is None else torch.tensor(list(rows)[:num_rows])
            rng.begin_forward(step, first + own)
            with StatelessDropout(rng), _BlockCallHooks(subject, rng.enter_block):
                outputs = run()
    return parity_case.loss.whole_total(outputs, batch) / (
        parity_case.loss.count_weight_and_tokens(batch)[0] or 1.0
    )


def _run_with_routes(subject: TrainedModule, batch: Batch, run: Callable[[], Any]) -> Any:
    """Returns what `run` returns with the routes of experts that `batch` contains, if it does."""
    if ROUTED_EXPERTS not in batch:
        return run()
    calls = subject.model_spec.experts_calls
    with replay_context(subject.module, calls, calls, lambda: batch[ROUTED_EXPERTS]):
        return run()


def exact_loss_of(
    parity_case: ParityCase, subject: TrainedModule, batch: Batch, step: int, rows: Sequence[int] | None
) -> float:
    """Returns the loss of `batch` at the weights of `subject`, whose buffers stay as they are."""
    other = parity_case.make_reference_module()
    other.module.load_state_dict(subject.module.state_dict())
    return loss_of(parity_case, other, parity_case.make_rng(), batch, step, rows).item()


def plain_sgd(job: Job, parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the optimizer of `job`, as parity has it, for `parameters` by name."""
    groups = make_param_groups(job.optimizer, parameters)
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
