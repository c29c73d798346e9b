"""What a rank of an asynchronous parameter server does at run time: workers push and pull, servers update.

    worker    CLIP   the norm of its own gradients, which are scaled before they are pushed
              PUSH   starts to send; PULL starts to receive at once, and the step ends when both have ended
    server    TAKE   waits for whichever worker comes first, or for the one that a record names
              STEP   all parameters, with the gradient of that worker
              GIVE   to all workers that the clocks let go on; nothing, if they let none

A server has at most one push of each worker to take: a worker pushes again when it has pulled. So a message
from whichever rank comes first is the begin of a push, and the rest of it comes from the same worker.
"""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from meshwright.comm.backends.fake import CompletedWork
from meshwright.parallel.server.arrival_record import (
    REPLAY,
    START_FIX,
    ArrivalRecord,
    RecordHeader,
    RecordWriter,
    Update,
    WorkerClocks,
    record_path,
    staleness_of,
    start_problem,
)
from meshwright.plan.job.errors import PlanError
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler, Runtime

if TYPE_CHECKING:  # no strategy imports the engine
    from meshwright.comm.collectives.group import Group
    from meshwright.engine.runtime.rank_state import RankState

logger = logging.getLogger(__name__)


class WorkerExchanges:
    """The pushes and pulls of one worker, and the norm of what it pushes."""

    def __init__(self, runtime: Runtime) -> None:
        self._state = runtime.state
        self._pushes = [action for action in runtime.state.plan.actions if action.kind == "PUSH"]
        runtime.wrap("CLIP", self._clip_pushes)
        self.handlers: dict[str, Handler] = {
            "LOCAL_NORM": self.compute_norm,
            "PUSH": self.push,
            "PULL": self.pull,
        }

    def compute_norm(self, action: Action) -> None:
        """Computes the squared norm of the gradients that are pushed."""
        norms = [torch.linalg.vector_norm(self._gradient(push)) for push in self._pushes]
        self._state.flat_params.grad_sqnorm = torch.stack(norms).double().square().sum().view(1)

    def push(self, action: Action) -> None:
        """Starts to send the gradient of a group."""
        group, server = self._server(action)
        self._state.issue(action, group.send(self._gradient(action), target=server, action=action.name))

    def pull(self, action: Action) -> None:
        """Starts to receive the parameters of a group."""
        group, server = self._server(action)
        parameters = self._state.operand(action).output
        self._state.issue(action, group.recv(parameters, source=server, action=action.name))

    def _clip_pushes(self, handler: Handler) -> Handler:
        """Returns `handler` of CLIP, behind which gradients are scaled down to `train.clip`."""

        def clip(action: Action) -> None:
            handler(action)
            norm, limit = self._state.step.grad_norm + 1e-6, self._state.plan.job.train.clip
            for push in self._pushes if limit and norm > limit else ():
                self._gradient(push).mul_(limit / norm)

        return clip

    def _gradient(self, push: Action) -> torch.Tensor:
        return self._state.operand(push).input

    def _server(self, action: Action) -> "tuple[Group, int]":
        transfer = action.transfer
        if transfer is None:
            raise ValueError(f"{action.name} has no transfer: it goes to a server")
        return self._state.world.group(transfer.axes, transfer.member_indices), transfer.group_root


class ServerUpdates:
    """What one server takes, steps and gives, in the order of arrival or in that of `replayed`.

    Its order is written into the folder `record`, if there is one. If it `divides_lr`, by the staleness.
    """

    def __init__(
        self,
        state: "RankState",
        header: RecordHeader,
        record: str,
        replayed: ArrivalRecord | None,
        *,
        divides_lr: bool,
    ) -> None:
        self._state, self._header, self._record, self._replayed = state, header, record, replayed
        self._divides_lr = divides_lr
        takes = (action for action in state.plan.actions if action.kind == "TAKE")
        self._subjects = list(dict.fromkeys(action.subject for action in takes))
        self._clocks = WorkerClocks(header.workers, header.bound)
        self._updates, self._num_given, self._num_skipped = list[Update](), 0, 0
        self._writer: RecordWriter | None = None
        self._worker = 0  # whose push is taken
        self.handlers: dict[str, Handler] = {"TAKE": self.take, "STEP": self.step, "GIVE": self.give}

    @torch.no_grad()
    def take(self, action: Action) -> None:
        """Receives the gradient of a group: the first one from whoever comes, the others from that worker."""
        group, gradient = self._group(action), self._gradient(action)
        if action.subject != self._subjects[0]:
            group.recv(gradient, source=self._worker, action=action.name).wait()
        elif (known := self._known_worker()) is not None:
            self._worker = known
            group.recv(gradient, source=known, action=action.name).wait()
        else:
            self._worker = group.recv_any(gradient, action=action.name)
        self._state.issue(action, CompletedWork())

    def step(self, action: Action) -> None:
        """Steps all parameters with the gradient that was taken."""
        update = self._clocks.apply(self._worker)
        staleness = len(self._updates) - update.version
        self._updates.append(update)
        arrivals = self._state.arrivals
        if arrivals is not None and len(arrivals) < len(self._updates):
            arrivals.append(self._worker)
        groups = [group for optimizer in self._state.optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]
        for group in groups if self._divides_lr else ():
            group["lr"] = group["lr"] / max(1, staleness)
        self._state.update.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        if action.microbatch == self._header.workers - 1:
            self._end_step()

    def give(self, action: Action) -> None:
        """Sends parameters to the workers that may go on."""
        for worker in self._clocks.release() if action.subject == self._subjects[0] else ():
            number = self._num_given % self._header.workers
            self._num_given += 1
            works = []
            for subject in self._subjects:
                name = replace(action, subject=subject, microbatch=number).name
                parameters = self._state.flat_params.by_param_group[subject].full_tensor
                works.append(self._group(action).send(parameters, target=worker, action=name))
            for work in works:
                work.wait()
        self._state.issue(action, CompletedWork())

    def _end_step(self) -> None:
        number, workers = self._state.step.number, self._header.workers
        if self._record:
            first = number + 1 - len(self._updates) // workers
            if self._writer is None:
                path = record_path(self._record, self._header.server)
                self._writer = RecordWriter(path, replace(self._header, first_step=first))
            self._writer.append(self._updates[-workers:])
        if number + 1 == self._state.plan.job.train.steps:
            found = sorted(staleness_of(self._updates).items())
            text = ", ".join(f"{staleness}: {count}" for staleness, count in found)
            logger.info("updates by their staleness: %s", text)

    def _known_worker(self) -> int | None:
        """Returns the worker that comes next in the record, or in what the verifier has given; None: it is
        the one that comes first.
        """
        if self._replayed is not None:
            return self._next_worker(self._replayed)
        given, number = self._state.arrivals or (), len(self._updates)
        return given[number] if number < len(given) else None

    def _next_worker(self, record: ArrivalRecord) -> int:
        if not self._updates:  # whoever runs a plan without a config has not asked before
            step, recorded = self._state.step.number, record.header
            if problem := start_problem(recorded, step):
                raise PlanError(problem, fix=START_FIX, location=REPLAY)
            self._num_skipped = (step - recorded.first_step) * recorded.workers
        number = self._num_skipped + len(self._updates)
        if number >= len(record.updates):
            text = f"update {number} of step {self._state.step.number + 1} is not in the record, which has "
            text += f"{len(record.updates)} from step {record.header.first_step + 1} on"
            raise PlanError(text, fix="replay no more steps than it has", location=REPLAY)
        return record.updates[number].worker

    def _gradient(self, action: Action) -> torch.Tensor:
        flat_params = self._state.flat_params
        return flat_params.gradient(flat_params.by_param_group[action.subject])

    def _group(self, action: Action) -> "Group":
        return self._state.flat_params.by_param_group[action.subject].group
