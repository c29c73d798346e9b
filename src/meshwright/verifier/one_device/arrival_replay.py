"""One process plays the workers and servers of a plan whose servers take gradients as they arrive.

In which order they arrive is known after a run alone. So the ranks train once beforehand, and report the
order (`record_arrivals`), after that of a record which the plan names, if it does. One process plays it; then
the ranks train once more in the same order, and every number of theirs must be that of this process.

    worker w   step s   loss and gradient of its samples, at the parameters that it has pulled; clipping
    server j   update   the gradient of the next worker in the order steps the parameters of this server;
                        those that the technique lets go on (`Strategy.on_servers`) then pull what it has

Each worker is an ordinary model with one backward per step, each server an ordinary optimizer. A server takes
a gradient when its worker has pulled from all servers what the step before has made.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from meshwright.comm.collectives.group import World
from meshwright.engine.optim.lr_schedule import lr_factor
from meshwright.engine.runtime.rank_state import RankState
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.loss.loss_definition import Batch
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.strategy_interface import ServerRule
from meshwright.verifier.one_device.loss_and_gradients import (
    backward,
    copied_values,
    gradients_of,
    loss_of,
    plain_sgd,
    set_values,
)
from meshwright.verifier.one_device.parity_case import (
    ParityCase,
    Reference,
    ReferenceStep,
    TensorsByName,
)

Arrivals = Mapping[int, Sequence[int]]  # by rank of a server the workers, in the order of their gradients
ACTION = "GATHER_FULL"  # the ledger name of collectives that no plan has


def record_arrivals(parity_case: ParityCase, world: World, num_steps: int) -> Arrivals:
    """Trains one rank of the plan, and returns in which order servers took gradients, the same on every rank;
    nothing if the plan does not depend on it. All ranks call it.
    """
    plan = parity_case.plan.for_rank(world.rank)
    if not plan.program.depends_on_arrivals:
        return {}
    given = _first_steps(parity_case.recorded_arrivals.get(world.rank, ()), num_steps)
    state = RankState(parity_case.make_trained_module(), world, parity_case.loss, arrivals=given)
    executor = StepExecutor(plan, state, stateless_rng=parity_case.make_rng())
    read_batch = parity_case.batch_reader(parity_case.plan, world.rank)
    try:
        with world.ledger.pause_recording():
            for step, _ in enumerate(batches_of(parity_case, num_steps)):
                executor.step(read_batch(step))
            message = torch.full((num_steps * plan.sharding.num_workers,), -1, device=world.device)
            message[: len(given)] = torch.tensor(given, dtype=message.dtype)
            group = world.group(AXES)
            found = message.new_empty(group.size * len(message))
            group.all_gather(found, message, action=ACTION).wait()
    finally:
        executor.close()
    rows = found.view(group.size, -1).tolist()
    return {
        rank: [each for each in rows[rank] if each >= 0] for rank in parity_case.plan.sharding.server_indices
    }


def batches_of(parity_case: ParityCase, num_steps: int) -> Iterator[Batch]:
    """Yields the global batches of the first `num_steps` steps, fewer where data end."""
    samples = parity_case.batch_reader(parity_case.single_device_plan, 0)
    for step in range(num_steps):
        batch = samples(step)
        if batch is None:
            return
        yield batch


def replay_arrivals(parity_case: ParityCase, num_steps: int, arrivals: Arrivals) -> Reference:
    """Returns what every worker and every server of the plan must find, if servers take gradients in the
    order of `arrivals`.

    Raises ValueError for orders that cannot have been together.
    """
    sharding, batches = parity_case.plan.sharding, list(batches_of(parity_case, num_steps))
    ranks = tuple(arrivals)
    workers = [_Worker(parity_case, each, ranks, batches) for each in range(sharding.num_workers)]
    servers = [_Server(parity_case, rank, order, batches) for rank, order in arrivals.items()]
    while any(server.left for server in servers):
        server = next((each for each in servers if each.left and workers[each.left[0]].pushes_to(each)), None)
        if server is None:
            orders = "; ".join(f"server {each.rank}: {', '.join(map(str, each.left))}" for each in servers)
            raise ValueError(f"servers cannot have taken the rest of their gradients in this order: {orders}")
        worker = server.left.pop(0)
        server.apply(worker, workers[worker].gradient())
        for each in server.rule.release():
            workers[each].pull(server.rank, server.parameters)
    sites = tuple(each.reference for each in (*workers, *servers))
    return replace(sites[0], sites=sites)


def _first_steps(arrivals: Sequence[int], num_steps: int) -> list[int]:
    """Returns the updates of the first `num_steps` steps of each worker in `arrivals`."""
    found, steps = list[int](), Counter[int]()
    for worker in arrivals:
        if steps[worker] < num_steps:
            found.append(worker)
        steps[worker] += 1
    return found


class _Worker:
    """One model that trains on the samples of a worker, at what it pulls."""

    def __init__(
        self, parity_case: ParityCase, number: int, servers: Sequence[int], batches: Sequence[Batch]
    ) -> None:
        self._parity_case, self._number, self._servers = parity_case, number, frozenset(servers)
        self._samples, self._batches = parity_case.plan.site_samples(number), batches
        self._subject, self._rng = parity_case.make_reference_module(), parity_case.make_rng()
        self._step, self._gradient, self._awaited = 0, TensorsByName(), set(self._servers)
        self.reference = _empty_reference(parity_case, copied_values(self._subject.parameters))

    def pushes_to(self, server: "_Server") -> bool:
        """Returns whether the next gradient that `server` takes is there: that of the present step."""
        return server.steps[self._number] == self._step

    def gradient(self) -> TensorsByName:
        """Returns the clipped gradient of the present step, which the first server to ask lets it make."""
        if not self._gradient:
            self._train()
        return self._gradient

    def pull(self, server: int, parameters: TensorsByName) -> None:
        """Takes the `parameters` of `server`; with those of the last server the step has ended."""
        set_values(self._subject.parameters, parameters)
        self._awaited.discard(server)
        if not self._awaited:
            last = self.reference.steps[-1]
            self.reference.steps[-1] = replace(last, parameters=copied_values(self._subject.parameters))
            self._step, self._gradient, self._awaited = self._step + 1, {}, set(self._servers)

    def _train(self) -> None:
        case, subject, trainable = self._parity_case, self._subject, self._subject.trainable_parameters
        whole = self._batches[self._step]
        rows = tuple(each for each in self._samples if each < len(next(iter(whole.values()))))
        batch = {key: value[list(rows)] for key, value in whole.items()}
        for parameter in trainable.values():
            parameter.grad = None
        loss = torch.zeros(())
        if rows:
            loss = loss_of(case, subject, self._rng, batch, self._step, rows)
            backward(loss)
        gradients = gradients_of(subject)
        limit = case.plan.job.train.clip or float("inf")
        norm = nn.utils.clip_grad_norm_(list(trainable.values()), limit)
        self._gradient = gradients_of(subject)
        found = ReferenceStep(batch, loss.item(), norm.item(), gradients, {}, samples=rows)
        self.reference.steps.append(found)


class _Server:
    """One optimizer that steps the parameters of a server with one gradient at a time.

    `left` are the workers whose gradients come, in this order; `steps` counts those that it has taken.
    """

    def __init__(
        self, parity_case: ParityCase, rank: int, order: Sequence[int], batches: Sequence[Batch]
    ) -> None:
        plan, parameters = parity_case.plan, parity_case.make_trained_module().parameters
        self.rank, self.left, self.steps, self._batches = rank, list(order), Counter[int](), batches
        owned = [each.param.name for each in plan.sharding.param_shardings if each.owner_index == rank]
        self._masters = {name: nn.Parameter(parameters[name].detach().clone()) for name in owned}
        self._optimizer = plain_sgd(plan.job, self._masters)
        self._job, self._num_workers = plan.job, plan.sharding.num_workers
        self._lrs = [group["lr"] for group in self._optimizer.param_groups]
        self.rule = _rule_of(parity_case, self._num_workers)
        self.reference = replace(_empty_reference(parity_case, self.parameters), arrivals=list(order))
        self._gradients = dict[int, TensorsByName]()  # of this step, by number of the update

    @property
    def parameters(self) -> TensorsByName:
        """A copy of what it has."""
        return copied_values(self._masters)

    def apply(self, worker: int, gradient: TensorsByName) -> None:
        """Steps with the gradient of `worker`; the last one of a step ends the step."""
        factor = lr_factor(self._job.lr_schedule, len(self.reference.steps), self._job.train.steps)
        divisor = self.rule.apply(worker)
        for group, lr in zip(self._optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = lr * factor / divisor
        own = {name: gradient[name].clone() for name in self._masters}
        for name, parameter in self._masters.items():
            parameter.grad = own[name].clone()
        self._optimizer.step()
        self.steps[worker] += 1
        self._gradients[len(self._gradients)] = own
        if len(self._gradients) == self._num_workers:
            batch = {key: value[:0] for key, value in self._batches[len(self.reference.steps)].items()}
            found = ReferenceStep(batch, 0.0, 0.0, {}, self.parameters, self._gradients, samples=())
            self.reference.steps.append(found)
            self._gradients = {}


def _rule_of(parity_case: ParityCase, num_workers: int) -> ServerRule:
    found = (each.on_servers(num_workers) for each in parity_case.plan.strategies)
    rule = next(filter(None, found), None)
    if rule is None:
        names = ", ".join(each.name for each in parity_case.plan.strategies)
        raise ValueError(f"ranks take what comes first, and none of {names} says what servers do with it")
    return rule


def _empty_reference(parity_case: ParityCase, values: TensorsByName) -> Reference:
    params = parity_case.plan.model_spec.params
    return Reference(values, block_of={param.name: param.block_calls[0] for param in params})
