"""Finds the cause of a harmful step: each rank replays its own microbatches and checks every block.

The parameters have not changed and dropout is stateless, so the replay has the numbers of the step, before
any sum over ranks. It costs one more forward and backward, and only when a step is harmful. The ranks then
exchange their findings in one small message, SPIKE_DIAGNOSIS, which is in no program: good steps do not send
it.

Sharded weights are gathered again for each block, forward and backward, in the plan's order of blocks: so the
collectives match, also on a rank that has no samples or whose forward leaves a block out. No full gradient
outlives its block. Between stages, values and gradients are sent again, under the names that they have in the
step; the gradient of a tied weight is summed for each microbatch. Ranks that have slices of the same weights,
or stages of the model, replay the same samples: they sum their findings first, in a SPIKE_DIAGNOSIS of their
own.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

import torch

from meshwright.engine.forward_backward.backward_handlers import run_backward
from meshwright.engine.forward_backward.evaluation import preserve_module_state
from meshwright.engine.forward_backward.microbatch_forward import run_forward
from meshwright.engine.forward_backward.stage_send_recv import StageIO
from meshwright.engine.params.unshard_forward_hooks import unshard_in_order
from meshwright.engine.runtime.loss_guard import RankSpikeReport, StepPhase
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.blocks.block_forward_backward import BlockCall, backward, backward_from
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.step.single_device_program import FORWARD_KINDS, INPUT_GRAD_KINDS

TRANSFER_KINDS = ("SEND", "RECV", "CONCAT")  # prefixes: also the kinds of their gradients


class ReplayFindings:
    """The loss over `count`, squared gradient norms by name, and the first value that was not finite.

    `first_nonfinite` is its microbatch, phase and block. Squares are computed in float64 against overflow.
    `tied_param_users` are the pp ranks of weights that several of them use.
    """

    def __init__(self, state: RankState, count: float) -> None:
        plan = state.plan
        self._state, self._model_spec, self._count = state, plan.view.model_spec, count or 1.0
        # by the block call whose backward completes them
        self._params_by_last_backward: dict[str | None, list[str]] = defaultdict(list)
        pp_ranks = {
            param_sharding.param.name: plan.sharding.pp_ranks_using(param_sharding.param)
            for param_sharding in plan.view.logical_param_shardings
            if param_sharding.param.trainable
        }
        self.tied_param_users = {name: indices for name, indices in pp_ranks.items() if len(indices) > 1}
        for weight in self._model_spec.trainable:
            if weight.name not in self.tied_param_users:
                last = plan.view.stage_spec.last_backward([weight])
                self._params_by_last_backward[last].append(weight.name)
        self.loss, self.sqnorms = 0.0, defaultdict[str, float](float)
        self.first_nonfinite: tuple[int, StepPhase, str] | None = None

    def clear(self) -> None:
        """Forgets what was found."""
        self.loss, self.first_nonfinite = 0.0, None
        self.sqnorms.clear()

    def check_outputs(self, microbatch: int, block_calls: Mapping[str, BlockCall]) -> None:
        """Checks the outputs of block calls."""
        if self.first_nonfinite is None:
            non_finite = (
                name
                for name, block_call in block_calls.items()
                if any(_is_non_finite(leaf) for _, leaf in block_call.outputs)
            )
            self.first_nonfinite = next(((microbatch, "forward", name) for name in non_finite), None)

    def compute_loss(self, microbatch: int) -> None:
        """Computes the loss of a microbatch, and its gradient down to the last blocks' outputs."""
        outputs, closing = self._state.step.final_glue.pop(microbatch)
        total = self._state.batch_sums.loss_sum(outputs, self._state.step.microbatches[microbatch])
        if microbatch >= self._state.step.num_real_microbatches:
            total = total * 0.0
        if self.first_nonfinite is None and _is_non_finite(total):
            self.first_nonfinite = microbatch, "loss", ""
        self.loss += total.item() / self._count
        if total.requires_grad:
            backward_from(total, 1.0 / self._count)
        backward(closing)

    def check_gradients(self, microbatch: int, name: str) -> None:
        """Checks the gradients of a block call after its backward.

        Squares and frees those that are complete.
        """
        grads = (
            self._state.trained_module.parameters[weight.name].grad
            for weight in self._model_spec.params_of(name)
        )
        if self.first_nonfinite is None and any(grad is not None and _is_non_finite(grad) for grad in grads):
            self.first_nonfinite = microbatch, "backward", name
        self.add_sqnorms(self._params_by_last_backward[name])

    def add_sqnorms(self, names: Iterable[str]) -> None:
        """Adds the squared gradients of `names`, where there are any, and frees them."""
        for name in names:
            parameter = self._state.trained_module.parameters[name]
            if parameter.grad is not None:
                self.sqnorms[name] += parameter.grad.double().square().sum().item()
                parameter.grad = None


@dataclass
class MicrobatchReplay(ABC):
    """Replays the microbatches of one rank, and collects `findings`."""

    state: RankState
    findings: ReplayFindings

    @abstractmethod
    def replay(self, microbatch: int) -> None:
        """Replays a microbatch that has samples."""

    @abstractmethod
    def join_collectives(self, microbatch: int) -> None:
        """Takes part in the collectives of a microbatch for which this rank has no samples."""

    def unshard_block(self, block: str) -> None:
        """Gathers the weights of a block."""
        self.state.collectives.begin_block(SPIKE_DIAGNOSIS)
        self.state.flat_params.unshard_block(block, SPIKE_DIAGNOSIS)


class FullModelReplay(MicrobatchReplay):
    """The replay on a rank that runs the whole model."""

    def replay(self, microbatch: int) -> None:
        """Replays a microbatch; weights of blocks that its forward leaves out are gathered all the same."""
        order = self.state.plan.view.model_spec.block_calls
        with unshard_in_order(order, self.unshard_block) as before_block:
            run_forward(self.state, microbatch, before_block)
        block_calls = self.state.step.forward_passes.pop(microbatch).block_calls
        self.findings.check_outputs(microbatch, block_calls)
        self.findings.compute_loss(microbatch)
        with unshard_in_order(order[::-1], self.unshard_block) as before_block:
            for name in reversed(list(block_calls)):
                before_block(name)
                backward(block_calls[name])
                self.findings.check_gradients(microbatch, name)
        self.findings.add_sqnorms(self.state.trained_module.trainable_parameters)

    def join_collectives(self, microbatch: int) -> None:
        block_calls = self.state.plan.view.model_spec.block_calls
        for order in (block_calls, block_calls[::-1]):
            with unshard_in_order(order, self.unshard_block):
                pass


@dataclass
class StageReplay(MicrobatchReplay):
    """The replay on a rank that runs pipeline stages: the actions of a microbatch, in list order."""

    stage_io: StageIO

    def __post_init__(self) -> None:
        # the sends of the step have completed, since the norm of all gradients is known
        for work in self.state.works.values():
            work.wait()
        self.state.step.final_glue.clear()
        self.state.step.forward_passes.clear()
        self.stage_io.clear()

    def replay(self, microbatch: int) -> None:
        """Replays the stages of a microbatch, and the transfers between them."""
        state, checked = self.state, set[str]()
        for action in (action for action in self.state.plan.actions if action.microbatch == microbatch):
            for name in state.works.keys() & set(action.waits):
                state.works[name].wait()
            if action.kind in FORWARD_KINDS and action.subject in self.stage_io.first_block_calls:
                run_forward(
                    self.state,
                    microbatch,
                    lambda block_call: self.unshard_block(block_of(block_call)),
                    first_block_call=action.subject,
                )
                block_calls = state.step.forward_passes[microbatch].block_calls
                self.findings.check_outputs(
                    microbatch,
                    {name: block_call for name, block_call in block_calls.items() if name not in checked},
                )
                checked |= block_calls.keys()
            elif action.kind == "LOSS":
                self.findings.compute_loss(microbatch)
            elif action.kind in INPUT_GRAD_KINDS:
                self.unshard_block(block_of(action.subject))
                run_backward(self.state, action, backward)
                self.findings.check_gradients(microbatch, action.subject)
            elif action.kind.partition("_")[0] in TRANSFER_KINDS:
                self.stage_io.start_send_recv(action)
        for work in state.works.values():
            work.wait()
        for name, pp_ranks in self.findings.tied_param_users.items():
            parameter = state.trained_module.parameters[name]
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            group = state.world.group(("pp",), pp_ranks if len(pp_ranks) < self.state.plan.mesh.pp else ())
            group.all_reduce(gradient, action=SPIKE_DIAGNOSIS).wait()
            parameter.grad = gradient
        self.findings.add_sqnorms(state.trained_module.trainable_parameters)

    def join_collectives(self, microbatch: int) -> None:
        for action in (
            action
            for action in self.state.plan.actions
            if action.microbatch == microbatch and action.kind in (*FORWARD_KINDS, *INPUT_GRAD_KINDS)
        ):
            self.unshard_block(block_of(action.subject))


def _is_non_finite(tensor: torch.Tensor) -> bool:
    return not bool(tensor.isfinite().all())


SPIKE_DIAGNOSIS = "SPIKE_DIAGNOSIS"  # name in the ledger
STEP_PHASES: tuple[StepPhase, ...] = ("", "forward", "loss", "backward")
NUM_REPORT_NUMBERS = 5  # numbers that each rank tells: loss, norm, stage, block, parameter


def diagnose_spike(state: RankState) -> tuple[RankSpikeReport, ...]:
    """Returns the report of each rank's samples in this step, by rank.

    Every rank calls it and gets the same.
    """
    plan, findings = state.plan, ReplayFindings(state, state.token_counter.totals()[0])
    replay = (
        FullModelReplay(state, findings)
        if state.stage_io is None
        else StageReplay(state, findings, state.stage_io)
    )
    for parameter in state.trained_module.trainable_parameters.values():
        parameter.grad = None
    with state.driver.cutting_graph(), preserve_module_state(state.trained_module.module):
        for microbatch in range(len(state.step.microbatches)):
            # a block with batch norms communicates while it runs: on a stand-in too, as in the step
            if microbatch < state.step.num_real_microbatches or plan.sharding.syncs_batch_norm:
                replay.replay(microbatch)
            else:
                replay.join_collectives(microbatch)
    if not state.step.num_real_microbatches:
        findings.clear()
    names, block_calls = [weight.name for weight in plan.model_spec.trainable], plan.model_spec.block_calls
    loss, squares, phase, block = _merge_findings(state, findings)
    norms = {name: squares[name] ** 0.5 for name in names}
    non_finite = [name for name in names if not isfinite(norms[name])]
    if phase == "backward":
        non_finite = [
            name
            for name in non_finite
            if name in {weight.name for weight in plan.model_spec.params_of(block)}
        ] or non_finite
    suspected_param = non_finite[0] if non_finite else max(names, key=lambda name: norms[name])
    if not phase and non_finite:
        phase, block = "backward", ""
    if not block:
        block = next(
            (
                w.block_calls[0]
                for w in plan.model_spec.params
                if w.name == suspected_param and w.block_calls[0] in block_calls
            ),
            "",
        )
    total_norm = sum(norm**2 for norm in norms.values()) ** 0.5
    block_index = block_calls.index(block) if block in block_calls else -1
    local_numbers = [
        loss,
        total_norm,
        STEP_PHASES.index(phase),
        block_index,
        names.index(suspected_param) if state.step.num_real_microbatches else -1,
    ]
    message = _all_gather_report(state, local_numbers)
    return tuple(_make_report(rank, numbers, block_calls, names) for rank, numbers in enumerate(message))


def _merge_findings(
    state: RankState, findings: ReplayFindings
) -> tuple[float, Mapping[str, float], StepPhase, str]:
    """Returns loss, squared norms and the first non-finite place, over ranks with the same samples."""
    plan = state.plan
    sharding, names, block_calls = (
        plan.sharding,
        [weight.name for weight in plan.model_spec.trainable],
        plan.model_spec.block_calls,
    )
    if not sharding.model_parallel_axes:
        _, phase, block = findings.first_nonfinite or (0, "", "")
        return findings.loss, findings.sqnorms, phase, block
    coordinate = plan.mesh.coordinate(state.world.rank)
    counted_params = plan.view.params_counted_in_sum
    # ranks with other slices have the same loss
    reports_loss = not any(coordinate[axis] for axis in sharding.param_slice_axes)
    local_numbers = [findings.sqnorms[name] if name in counted_params else 0.0 for name in names]
    microbatch, phase, block = findings.first_nonfinite or (-1, "", "")
    local_numbers += [
        findings.loss if reports_loss else 0.0,
        microbatch,
        STEP_PHASES.index(phase),
        block_calls.index(block) if block in block_calls else -1,
    ]
    group = state.world.group(sharding.model_parallel_axes)
    message = torch.tensor(local_numbers, dtype=torch.float64, device=state.world.device)
    gathered_messages = message.new_empty(group.size * len(message))
    group.all_gather(gathered_messages, message, action=SPIKE_DIAGNOSIS).wait()
    messages = gathered_messages.view(group.size, -1)
    non_finite_places = [
        (int(microbatch), int(phase_index), int(block_index))
        for microbatch, phase_index, block_index in messages[:, -3:].tolist()
        if phase_index
    ]
    last, no_place = STEP_PHASES.index("backward"), (-1, 0, -1)
    _, phase_index, block_index = min(
        non_finite_places,
        key=lambda each: (*each[:2], -each[2] if each[1] == last else each[2]),
        default=no_place,
    )
    *squares, loss = messages[:, :-3].sum(0).tolist()
    return (
        loss,
        dict(zip(names, squares, strict=True)),
        STEP_PHASES[phase_index],
        block_calls[block_index] if block_index >= 0 else "",
    )


def _all_gather_report(state: RankState, local_numbers: list[float]) -> list[list[float]]:
    group = state.world.group(AXES)
    message = torch.tensor(local_numbers, dtype=torch.float64, device=state.world.device)
    gathered_messages = torch.empty(
        group.size * NUM_REPORT_NUMBERS, dtype=torch.float64, device=state.world.device
    )
    group.all_gather(gathered_messages, message, action=SPIKE_DIAGNOSIS).wait()
    return gathered_messages.view(-1, NUM_REPORT_NUMBERS).tolist()


def _make_report(
    rank: int, numbers: list[float], block_calls: tuple[str, ...], names: list[str]
) -> RankSpikeReport:
    loss, norm, (phase, block, parameter) = numbers[0], numbers[1], map(int, numbers[2:])
    return RankSpikeReport(
        rank,
        loss,
        norm,
        STEP_PHASES[phase],
        block_calls[block] if block >= 0 else "",
        names[parameter] if parameter >= 0 else "",
    )
