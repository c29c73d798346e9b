"""Micro-batches of a step played again, one after the other, to look at every block: `Whole` models, and `Parts` of them.

Weights that are kept in shards are fetched for every block, forward and backward, and no whole gradient outlives its block.
Between parts values and gradients are sent once more, under the names that they have in the step, and the gradient of a weight
that several of them use is added up for each micro-batch.

Where a harmful step came from: each rank plays its own micro-batches again, alone, and looks at every block.

The parameters have not changed and dropout is stateless, so the second playing has the numbers of the first, before
anything was summed over ranks. It costs one more forward and backward, and only when a step is harmful. The ranks then
tell each other what they found in one small message, GUARD, which is in no program: good steps do not send it.

Weights that are stored in shards are brought together once more for each block, forward and backward, in the plan's order of
blocks: so all ranks meet, also one that has no rows or whose forward leaves a block out. No whole gradient outlives its block.
Ranks that have slices of the same weights, or parts of the model, play the same rows: what they find they add up first, in a
GUARD of their own. Parts play one micro-batch after the other, and send each other what they take once more.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any, Protocol

import torch

from meshwright.engine.forward.evaluation import preserve_module_state
from meshwright.engine.forward.stage_io import StageIO
from meshwright.engine.params.summon_full import unshard_in_order
from meshwright.engine.runtime.loss import Batch
from meshwright.engine.runtime.loss_guard import RankSpikeReport, StepPhase
from meshwright.engine.runtime.state import RankState
from meshwright.model.blocks.driver import BeforeBlock, BlockCall, backward, backward_from
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.step.single_device import FORWARD_KINDS, INPUT_GRAD_KINDS
from meshwright.plan.strategy import Handler

UnshardFn = Callable[[str], None]  # has the weights of a block whole
TRANSFER_KINDS = ("SEND", "RECV", "CONCAT")  # and their gradients' kinds, which begin so


class ForwardFn(Protocol):
    """Runs the model's forward on a micro-batch, or the part of it that begins with a visit; leaves the pass in the state."""

    def __call__(
        self,
        microbatch: int,
        before_block: BeforeBlock,
        after_block: Callable[[], None] | None = None,
        first_block_call: str = "",
    ) -> None: ...


class MicrobatchReplay(Protocol):
    """One rank's way to play its micro-batches again; `seen` is what it finds."""

    findings: "ReplayFindings"

    def replay(self, microbatch: int) -> None:
        """Play one that has rows."""

    def join_collectives(self, microbatch: int) -> None:
        """Take part in one for which this rank has no rows."""


class ReplayFindings:
    """What was seen so far: the loss over `count`, squares of gradients, and where a number first was not finite.

    `first` is the micro-batch of that, with its stage and block. Squares are taken in float64 so as not to overflow, by name.
    `total` takes the loss of what a forward gave out and its rows. `shared` are the weights that several ranks along pp use, with
    the indices of those.
    """

    def __init__(
        self, plan: Plan, state: RankState, count: float, loss_sum: Callable[[Any, Batch], torch.Tensor]
    ) -> None:
        self._state, self._anatomy, self._count, self._total = (
            state,
            plan.sharding.model_spec,
            count or 1.0,
            loss_sum,
        )
        self._completed: dict[str | None, list[str]] = defaultdict(
            list
        )  # by the visit whose backward completes them
        users = {
            home.param.name: plan.sharding.pp_ranks_using(home.param)
            for home in plan.sharding.logical_param_shardings
            if home.param.trainable
        }
        self.tied_param_users = {name: indices for name, indices in users.items() if len(indices) > 1}
        for weight in self._anatomy.trainable:
            if weight.name not in self.tied_param_users:
                self._completed[self._anatomy.last_backward([weight])].append(weight.name)
        self.loss, self.sqnorms = 0.0, defaultdict[str, float](float)
        self.first_nonfinite: tuple[int, StepPhase, str] | None = None

    def check_outputs(self, microbatch: int, block_calls: Mapping[str, BlockCall]) -> None:
        """Look at what visits have given out."""
        if self.first_nonfinite is None:
            odd = (
                name for name, visit in block_calls.items() if any(_odd(leaf) for _, leaf in visit.outputs)
            )
            self.first_nonfinite = next(((microbatch, "forward", name) for name in odd), None)

    def compute_loss(self, microbatch: int) -> None:
        """Take the loss of a micro-batch whose forward has ended, and its gradient down to the last blocks' outputs."""
        outputs, closing = self._state.final_glue.pop(microbatch)
        total = self._total(outputs, self._state.microbatches[microbatch])
        if self.first_nonfinite is None and _odd(total):
            self.first_nonfinite = microbatch, "loss", ""
        self.loss += total.item() / self._count
        if total.requires_grad:
            backward_from(total, 1.0 / self._count)
        backward(closing)

    def check_gradients(self, microbatch: int, name: str) -> None:
        """Look at the gradients of a visit whose backward has ended; those that it completes are squared, and let go of."""
        grads = (
            self._state.trained_module.parameters[weight.name].grad
            for weight in self._anatomy.params_of(name)
        )
        if self.first_nonfinite is None and any(grad is not None and _odd(grad) for grad in grads):
            self.first_nonfinite = microbatch, "backward", name
        self.add_sqnorms(self._completed[name])

    def add_sqnorms(self, names: Iterable[str]) -> None:
        """Square the gradients of `names`, as far as they are there, and let go of them."""
        for name in names:
            parameter = self._state.trained_module.parameters[name]
            if parameter.grad is not None:
                self.sqnorms[name] += parameter.grad.double().square().sum().item()
                parameter.grad = None


class FullModelReplay:
    """Of a rank that runs the whole model."""

    def __init__(
        self,
        plan: Plan,
        state: RankState,
        findings: ReplayFindings,
        forward: ForwardFn,
        unshard_block: UnshardFn,
    ) -> None:
        self.findings, self._state, self._forward, self._fetch = findings, state, forward, unshard_block
        self._visits = plan.sharding.model_spec.block_calls

    def replay(self, microbatch: int) -> None:
        """Play one that has rows; blocks that its forward leaves out are fetched all the same."""
        with unshard_in_order(self._visits, self._fetch) as reach:
            self._forward(microbatch, reach)
        visits = self._state.forward_passes.pop(microbatch).block_calls
        self.findings.check_outputs(microbatch, visits)
        self.findings.compute_loss(microbatch)
        with unshard_in_order(self._visits[::-1], self._fetch) as reach:
            for name in reversed(list(visits)):
                reach(name)
                backward(visits[name])
                self.findings.check_gradients(microbatch, name)
        self.findings.add_sqnorms(self._state.trained_module.trainable_parameters)

    def join_collectives(self, microbatch: int) -> None:
        """Take part in one for which this rank has no rows."""
        for order in (self._visits, self._visits[::-1]):
            with unshard_in_order(order, self._fetch):
                pass


class StageReplay:
    """Of a rank that runs parts: what its list says of a micro-batch, in the order of the list."""

    def __init__(
        self,
        plan: Plan,
        state: RankState,
        findings: ReplayFindings,
        forward: ForwardFn,
        unshard_block: UnshardFn,
        stage_io: StageIO,
        run_backward: Handler,
    ) -> None:
        self.findings, self._state, self._forward, self._fetch = findings, state, forward, unshard_block
        self._list, self._crossing, self._flow, self._pp = plan.actions, stage_io, run_backward, plan.mesh.pp
        for (
            work
        ) in state.works.values():  # what the step has sent was taken: the norm of all gradients is known
            work.wait()
        state.final_glue.clear()
        state.forward_passes.clear()
        stage_io.clear()

    def replay(self, microbatch: int) -> None:
        """Play one that has rows: its turns, and what crosses between them."""
        state, begun = self._state, set[str]()
        for action in (action for action in self._list if action.microbatch == microbatch):
            for name in state.works.keys() & set(action.waits):
                state.works[name].wait()
            if action.kind in FORWARD_KINDS and action.subject in self._crossing.first_block_calls:
                self._forward(
                    microbatch, lambda visit: self._fetch(block_of(visit)), first_block_call=action.subject
                )
                visits = state.forward_passes[microbatch].block_calls
                self.findings.check_outputs(
                    microbatch, {name: visit for name, visit in visits.items() if name not in begun}
                )
                begun |= visits.keys()
            elif action.kind == "LOSS":
                self.findings.compute_loss(microbatch)
            elif action.kind in INPUT_GRAD_KINDS:
                self._fetch(block_of(action.subject))
                self._flow(action)
                self.findings.check_gradients(microbatch, action.subject)
            elif action.kind.partition("_")[0] in TRANSFER_KINDS:
                self._crossing.start_send_recv(action)
        for work in state.works.values():
            work.wait()
        for name, users in self.findings.tied_param_users.items():
            parameter = state.trained_module.parameters[name]
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            group = state.world.group(("pp",), users if len(users) < self._pp else ())
            group.all_reduce(gradient, action="SPIKE_DIAGNOSIS").wait()
            parameter.grad = gradient
        self.findings.add_sqnorms(state.trained_module.trainable_parameters)

    def join_collectives(self, microbatch: int) -> None:
        """Take part in one for which this rank has no rows."""
        for action in (
            action
            for action in self._list
            if action.microbatch == microbatch and action.kind in (*FORWARD_KINDS, *INPUT_GRAD_KINDS)
        ):
            self._fetch(block_of(action.subject))


def _odd(tensor: torch.Tensor) -> bool:
    return not bool(tensor.isfinite().all())


STEP_PHASES: tuple[StepPhase, ...] = ("", "forward", "loss", "backward")
NUM_REPORT_NUMBERS = 5  # numbers that each rank tells: loss, norm, stage, block, parameter


def diagnose_spike(plan: Plan, state: RankState, replay: MicrobatchReplay) -> tuple[RankSpikeReport, ...]:
    """What the samples of each rank did in this step, by rank; every rank calls it and gets the same."""
    for parameter in state.trained_module.trainable_parameters.values():
        parameter.grad = None
    with preserve_module_state(state.trained_module.module):
        for micro in range(len(state.microbatches)):
            replay.replay(micro) if micro < state.num_real_microbatches else replay.join_collectives(micro)
    names, visits = [weight.name for weight in plan.model_spec.trainable], plan.model_spec.block_calls
    loss, squares, stage, block = _joined(plan, state, replay.findings)
    norms = {name: squares[name] ** 0.5 for name in names}
    odd = [name for name in names if not isfinite(norms[name])]
    if stage == "backward":
        odd = [
            name for name in odd if name in {weight.name for weight in plan.model_spec.params_of(block)}
        ] or odd
    largest = odd[0] if odd else max(names, key=lambda name: norms[name])
    if not stage and odd:
        stage, block = "backward", ""
    if not block:
        block = next(
            (
                w.block_calls[0]
                for w in plan.model_spec.params
                if w.name == largest and w.block_calls[0] in visits
            ),
            "",
        )
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    place = visits.index(block) if block in visits else -1
    mine = [
        loss,
        total,
        STEP_PHASES.index(stage),
        place,
        names.index(largest) if state.num_real_microbatches else -1,
    ]
    told = _exchanged(state, mine)
    return tuple(_suspect(rank, row, visits, names) for rank, row in enumerate(told))


def _joined(
    plan: Plan, state: RankState, seen: ReplayFindings
) -> tuple[float, Mapping[str, float], StepPhase, str]:
    """Of all ranks that play these rows the loss, the squares of whole gradients, and where a number first was not finite."""
    space, names, visits = (
        plan.sharding,
        [weight.name for weight in plan.model_spec.trainable],
        plan.model_spec.block_calls,
    )
    if not space.model_parallel_axes:
        _, stage, block = seen.first_nonfinite or (0, "", "")
        return seen.loss, seen.sqnorms, stage, block
    coordinate = plan.mesh.coordinate(state.world.rank)
    counted = set(space.params_counted_in_sum(coordinate))
    tells = not any(
        coordinate[axis] for axis in space.model_parallel_axes if axis != "pp"
    )  # those with other slices have the same loss
    mine = [seen.sqnorms[name] if name in counted else 0.0 for name in names]
    micro, stage, block = seen.first_nonfinite or (-1, "", "")
    mine += [
        seen.loss if tells else 0.0,
        micro,
        STEP_PHASES.index(stage),
        visits.index(block) if block in visits else -1,
    ]
    group = state.world.group(space.model_parallel_axes)
    told = torch.tensor(mine, dtype=torch.float64, device=state.world.device)
    gathered = told.new_empty(group.size * len(told))
    group.all_gather(gathered, told, action="SPIKE_DIAGNOSIS").wait()
    rows = gathered.view(group.size, -1)
    met = [(int(micro), int(kind), int(place)) for micro, kind, place in rows[:, -3:].tolist() if kind]
    last, none = STEP_PHASES.index("backward"), (-1, 0, -1)
    _, kind, place = min(
        met, key=lambda each: (*each[:2], -each[2] if each[1] == last else each[2]), default=none
    )
    *squares, loss = rows[:, :-3].sum(0).tolist()
    return (
        loss,
        dict(zip(names, squares, strict=True)),
        STEP_PHASES[kind],
        visits[place] if place >= 0 else "",
    )


def _exchanged(state: RankState, mine: list[float]) -> list[list[float]]:
    group = state.world.group(AXES)
    told = torch.tensor(mine, dtype=torch.float64, device=state.world.device)
    gathered = torch.empty(group.size * NUM_REPORT_NUMBERS, dtype=torch.float64, device=state.world.device)
    group.all_gather(gathered, told, action="SPIKE_DIAGNOSIS").wait()
    return gathered.view(-1, NUM_REPORT_NUMBERS).tolist()


def _suspect(rank: int, row: list[float], visits: tuple[str, ...], names: list[str]) -> RankSpikeReport:
    loss, norm, (stage, block, parameter) = row[0], row[1], map(int, row[2:])
    return RankSpikeReport(
        rank,
        loss,
        norm,
        STEP_PHASES[stage],
        visits[block] if block >= 0 else "",
        names[parameter] if parameter >= 0 else "",
    )
