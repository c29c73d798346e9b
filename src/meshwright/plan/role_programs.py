"""Builds the program of every role: the list of a worker, and what is left of it where a rank only serves.

    worker     TOKEN_COUNT  UNSHARD(0)  F0 F1 LOSS B1 PACK(1) B0 PACK(0)  REDUCE(1) REDUCE(0)  ... CLIP STEP
    server     TOKEN_COUNT  UNSHARD(0)                                              REDUCE(0)  ... CLIP STEP

The ranks of a pipeline stage are a role (`stage_role`). Each server that is no worker has a role of its own,
which ranks with other slices share: it keeps those messages of the workers in which it takes part, in their
order, and steps what it owns. What it waits for on other ranks are actions of their role.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from meshwright.plan.job.job import Job
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.gradient_noise_actions import add_noise_scale_actions
from meshwright.plan.step.matrix_owner_actions import add_matrix_owner_actions
from meshwright.plan.step.program import Action, Program, Role, drop_single_rank_transfers
from meshwright.plan.step.simulator import qualified_name
from meshwright.plan.step.single_device_program import (
    EVERY_RANK_KINDS,
    forwards_first,
    sequential_stage_calls,
    single_device_program,
)
from meshwright.plan.step.tied_params import add_tied_grad_reductions
from meshwright.plan.strategy_interface import Strategy

MESSAGE_KINDS = ("UNSHARD", "REDUCE", "REDUCE_TIED", "WAIT")  # of parameters, and of their gradients


def all_roles(
    job: Job, sharding: ShardingPlan, strategies: tuple[Strategy, ...], micro_batch: int
) -> Program:
    """Returns the program of all roles: the workers of each pipeline stage, then the servers of each."""
    stages = [
        {**sharding.mesh.coordinate(0), "pp": pp_rank}
        for pp_rank in range(len(sharding.block_calls_by_pp_rank) or 1)
    ]
    servers = ({**stage, sharding.server_axis: at} for stage in stages for at in sharding.server_indices)
    coordinates = (*stages, *servers)
    views = (RankView.of(sharding, coordinate) for coordinate in coordinates)
    return Program(tuple(role_of_view(job, view, strategies, micro_batch) for view in views))


def role_of_view(job: Job, view: RankView, strategies: tuple[Strategy, ...], micro_batch: int) -> Role:
    """Returns the role of the rank of `view`, with the sizes of that rank."""
    worker = _worker_role(job, replace(view, is_server=False), strategies, micro_batch)
    if not view.is_server:
        return worker
    mesh, axis = view.plan.mesh, view.plan.server_axis
    index = view.coordinate[axis]
    first = mesh.rank({"pp": view.coordinate["pp"], axis: index})
    ranks = range(first, first + mesh.group_size(AXES[AXES.index(axis) + 1 :]))
    owned, num_workers = {param.name for param in view.model_spec.params}, view.plan.num_workers
    found = (each.server_actions(worker.name, worker.actions, owned, num_workers) for each in strategies)
    actions = next(filter(None, map(tuple, found)), ()) or tuple(
        _server_actions(worker.name, worker.actions, owned)
    )
    return Role(f"{worker.name}_server{index - num_workers}", ranks, actions)


def _worker_role(job: Job, view: RankView, strategies: tuple[Strategy, ...], micro_batch: int) -> Role:
    local = job.train.batch // view.plan.num_data
    stage_calls = sequential_stage_calls(view.model_spec.block_calls, local // micro_batch)
    if view.model_spec.num_batch_sums:
        stage_calls = forwards_first(stage_calls)
    for strategy in strategies:
        stage_calls = strategy.order_stage_calls(stage_calls, view)
    program = single_device_program(view, job, micro_batch, stage_calls)
    for strategy in strategies:
        program = strategy.rewrite(program, view, job)
    program = drop_single_rank_transfers(
        add_matrix_owner_actions(add_tied_grad_reductions(program, view, job), view, job),
        view.plan.mesh,
    )
    (role,) = (add_noise_scale_actions(program, view) if job.train.noise_scale else program).roles
    return role


def _server_actions(worker: str, actions: Sequence[Action], owned: Set[str]) -> Iterator[Action]:
    """Yields what is left of the `actions` of the role `worker` on a rank that steps the parameters `owned`,
    and nothing else. The summed gradients of a group begin with the first push of it.
    """
    kept = [action for action in actions if _is_kept(action, owned)]
    steps = {name for action in actions if action.kind == "STEP" for name in action.frees}
    sums = {action.subject: each for action in actions for each in action.allocations if each.name in steps}
    given, names = {action.name: action for action in actions}, {action.name for action in kept}
    pulls = [action.name for action in kept if action.kind == "UNSHARD"]
    allocated = set[str]()
    for action in kept:
        waits: Sequence[str] = tuple(dict.fromkeys(_kept_waits(action, given, names)))
        allocations = [each for each in action.allocations if each.name not in steps]
        if action.kind == "REDUCE":
            waits = [qualified_name(worker, wait) for wait in action.waits]
            allocations.append(sums[action.subject])
        elif action.kind == "STEP":  # parameters change when they have left
            waits = [*waits, "TOKEN_COUNT()", *pulls]
        allocated |= {each.name for each in allocations}
        yield replace(
            action,
            waits=tuple(waits),
            tensors=tuple(name for name in action.tensors if name in owned),
            allocations=tuple(allocations),
            frees=tuple(name for name in action.frees if name in allocated),
        )


def _is_kept(action: Action, owned: Set[str]) -> bool:
    is_message = action.kind in MESSAGE_KINDS and owned >= set(action.tensors)
    return is_message or action.kind in EVERY_RANK_KINDS


def _kept_waits(action: Action, given: Mapping[str, Action], names: Set[str]) -> Iterator[str]:
    """Yields what `action` waits for and is kept, directly or behind an action that is not."""
    for wait in action.waits:
        if wait in names:
            yield wait
        elif wait in given and given[wait].kind == "ACCUMULATE":  # a server sums into its gradients
            yield from _kept_waits(given[wait], given, names)
