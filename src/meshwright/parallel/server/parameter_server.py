"""Synchronous parameter server: workers push gradients to the ranks that step them, and pull parameters back.

Why it works: an optimizer steps each parameter by itself, so one rank can keep the master and the optimizer
states of a parameter for all, if it receives every gradient of it. Each parameter group is assigned to one of
k servers: a server adds the gradients of its groups in the order of the workers, and steps the sum as one
device would. All wait for all pushes, so a step is that of `ddp`: nothing is stale. Servers are workers too,
or, if they are `dedicated`, the last k ranks along the axis, which read no samples and run no forward. No bit
of a sum depends on that or on k; that of the gradient norm may, which adds up those of the servers.

    all ranks    UNSHARD(0) UNSHARD(1)  F0 F1 LOSS B1 PACK(1) B0 PACK(0)   LOCAL_NORM GLOBAL_NORM CLIP STEP
    comm                                              REDUCE(1)      REDUCE(0)

    worker       PULL: receives all groups          PUSH: sends its gradients        STEP: nothing
    server j     GIVE: sends its groups             TAKE: receives n-1, adds them    STEP: its groups

    dedicated    UNSHARD(0) UNSHARD(1)  REDUCE(1) REDUCE(0)  LOCAL_NORM GLOBAL_NORM CLIP STEP   nothing else

    gradients P -> S(flat), of which the server has everything: reduce to its rank, as a gather and an ordered
    sum; parameters S(flat) -> R: broadcast from its rank, at the begin of the next step

A push begins when the backward of its group is done, once per step, while earlier blocks still compute. A
group goes to the server with the fewest bytes so far, the largest group first; of equal servers to the first.
Server j of the n workers is the rank at index floor(j n / k), so that the servers lie on different hosts; the
one with most bytes comes first. Experts that fewer ranks share have servers among these. In a pipeline each
stage has k servers. Sums of half types are made in float32, and rounded once.

A dedicated server has a role and a list of its own (plan/role_programs.py): of the parameters that it steps
the messages, in the order of the workers, then norm, clipping and step. It exchanges each group with the
workers alone. It takes part in the sums of counts, losses and norms, and in an evaluation, with zeros. The
global batch divides by the n workers; the mesh has n + k ranks along the axis.

    S, W        bytes of the trained parameters in the dtype of the sums, and in that of the parameters
    S_j, W_j    those of the groups of a server, about 1/k of them; 0 for the other workers
                                     leaves a rank                     arrives
    parameter_server                 S - S_j + W_j                     (n-1) S_j + W - W_j
    the same, k = 1, at the server   W                                 (n-1) S
    dedicated: a server              W_j                               n S_j
    dedicated: a worker              S                                 W
    ddp                              2 (n-1)/n S                       2 (n-1)/n S
    zero, stage 1                    (n-1)/n (S + W)                   (n-1)/n (S + W)

So one server receives n/2 times what a rank of `ddp` does: all bytes go through it. With k = n, a rank
receives what one of `zero` does, up to uneven groups; zero cuts every parameter into n equal shards, which is
why it took the place of servers where all ranks are alike. The ledger counts W_j once, at the server: a
backend forwards a broadcast along a ring or a tree, so that other ranks send it on. A server that sent every
worker a message of its own would send n W_j: with groups of equal bytes, 2 n S / k go to and from each of k
dedicated servers, of which (n + 1) S / k are in the ledger. k = 1 is `data_parallel_master` with losses on
all ranks.

Cost: masters and optimizer states 1/k on a server and 0 on other workers; weights and gradients whole on all
workers. A server keeps a buffer for the gradients that arrive and their sum, as long as twice its largest
group. A dedicated one keeps weights, summed gradients, masters and states of what it steps, and nothing else.
Limits: a step waits for the slowest rank. What rests off the device, travels as codes, or is stepped as a
matrix of which several ranks hold slices, is refused. With dedicated servers no full parameters are gathered
for forwards of the user (generate, predict, metrics of the user), and these are refused: rounds, tokens or
experts over several ranks, losses over the samples of all ranks, `sync_batch_norm`, the gradient noise scale.
`search` does not propose it.
Paper: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server" (OSDI), Algorithm 1,
with the first of its consistency models, the sequential one.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import ClassVar

import torch

from meshwright.comm.collectives.deterministic_sum import ACCUMULATION_DTYPES
from meshwright.comm.collectives.group import Rounds
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import at_least, one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES
from meshwright.plan.sharding.flat_param import FlatParamSpec
from meshwright.plan.sharding.mesh import GRAD_SUM_AXES, REPLICA_AXES, ROUND_AXES
from meshwright.plan.sharding.param_sharding import ParamGroup, ParamSharding
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import FLAT, I, S
from meshwright.plan.step.grad_reduce_scatter import GradReduceScatter
from meshwright.plan.step.program import Action, Allocation, Program, Transfer
from meshwright.plan.step.unshard_windows import flat_groups, gather_before_forward
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

SERVERS_FIX = "write the number of ranks that step parameters for all: 1 or more; without servers, use ddp"
WIDE = {"bfloat16": "float32", "float16": "float32"}  # the dtype in which sums of others are made


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Full replicas of the weights along `axis`; `servers` of its ranks keep the optimizer states and step.

    Ranks with other tokens of the same samples may be servers too. If they are `dedicated`, the servers are
    the last ranks along `axis`, and no workers.
    """

    name: ClassVar[str] = "parameter_server"
    phase: ClassVar[StrategyPhase] = "storage"
    axis: str = field(
        default="dp_replicate",
        metadata=one_of(*GRAD_SUM_AXES, fix=f"choose one of: {', '.join(REPLICA_AXES)}"),
    )
    servers: int = field(default=1, metadata=at_least(1, SERVERS_FIX))
    dedicated: bool = False

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location, ranks = f"strategies.{self.name}", sharding.mesh.group_size(sharding.sum_axes(self.axis))
        if self.axis not in sharding.grad_sum_axes:
            text = f"the workers along {self.axis} would all see the same samples: no strategy splits them"
            fix = f'add [[strategies]] name = "batch_split", axis = "{self.axis}"'
            yield Diagnostic(text, fix, location)
            return
        if self.dedicated:
            yield from self._check_dedicated(job, sharding)
        elif self.servers > ranks:
            text = f"servers = {self.servers}, and there are {ranks} ranks along {self._axes_text(sharding)}"
            yield Diagnostic(text, f"write servers = {ranks} or fewer", f"{location}.servers")
        beside = [
            axis
            for axis in sharding.grad_sum_axes
            if axis not in sharding.sum_axes(self.axis) and sharding.mesh.size(axis) > 1
        ]
        if beside:
            number = sharding.mesh.group_size((self.axis, *beside))
            text = f"the ranks along {' and '.join(beside)} have other samples, and would have other servers"
            sizes = ", ".join(f"mesh.{axis} = 1" for axis in beside)
            yield Diagnostic(text, f"make it one axis: mesh.{self.axis} = {number}, {sizes}", location)
        yield from dtype_diagnostics(sharding)
        yield from self._check_stored_once(sharding)

    def _check_dedicated(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location, ranks = f"strategies.{self.name}", sharding.mesh.size(self.axis)
        if self.servers >= ranks:
            text = f"servers = {self.servers} of the {ranks} ranks along {self.axis}, and no worker is left"
            fix = f"write servers = {ranks - 1} or fewer" if ranks > 1 else f"raise mesh.{self.axis}"
            fix += ", or dedicated = false: then the servers are workers too"
            yield Diagnostic(text, fix, f"{location}.servers")
        other = [axis for axis in sharding.sum_axes(self.axis) if axis != self.axis]
        other = [axis for axis in (*other, *ROUND_AXES) if sharding.mesh.size(axis) > 1]
        reasons = {
            f"the ranks along {' and '.join(other)} share the work on samples": bool(other),
            "the loss compares, or adds up, what the forwards of all samples return": bool(
                sharding.model_spec.needs_global_batch or sharding.model_spec.num_batch_sums
            ),
            f"parameters are sliced along {self.axis}": any(
                self.axis in each.sliced_dims for each in sharding.param_shardings
            ),
            "batch norms see the samples of all ranks": sharding.syncs_batch_norm,
            "the gradient noise scale is measured on all ranks": job.train.noise_scale,
        }
        for reason in (reason for reason, holds in reasons.items() if holds):
            text = f"{reason}, and a dedicated server runs no forward"
            yield Diagnostic(text, "write dedicated = false: then the servers are workers too", location)

    def _check_stored_once(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        stored = [
            axis
            for axis in sharding.sum_axes(self.axis)
            if any(
                each.param.trainable and axis not in (*each.grad_layout.axes_with("P"), *each.sliced_dims)
                for each in sharding.param_shardings
            )
        ]
        if stored:
            text = f"another strategy stores the weights along {' and '.join(stored)} already"
            yield Diagnostic(text, "keep one of them", f"strategies.{self.name}")

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location = f"strategies.{self.name}"
        if not sharding.tiers.keeps_states_on_device:
            text = "model states rest off the device, and servers step what rests on theirs"
            yield Diagnostic(text, 'remove offload and disk_offload, or use "zero"', location)
        coded = [each.param.name for each in sharding.param_shardings if each.is_coded]
        if coded:
            text = f"the gradients of {len(coded)} parameters ({coded[0]}...) travel as codes"
            fix = f'remove the compression, or use "ddp" or "zero" in place of {self.name}'
            yield Diagnostic(text, fix, location)
        owned = [each.param.name for each in sharding.param_shardings if each.owner_axes]
        if owned:
            text = f"the optimizer steps the whole matrix {owned[0]}, and the ranks of a server hold slices"
            fix = 'use "ddp" or "zero", an optimizer that steps elements ("adamw"), or mesh.tp = 1'
            yield Diagnostic(text, fix, location)
        numbers = [*self._num_groups(sharding)] or [self.servers]
        number = min(numbers) if self.dedicated else max(numbers)
        if number < self.servers <= sharding.mesh.group_size(sharding.sum_axes(self.axis)):
            which = "fewest" if self.dedicated else "most"
            where = f" in the stage with {which}" if sharding.block_calls_by_pp_rank else ""
            text = f"servers = {self.servers}, and there are {number} parameter groups{where}: a server would"
            text += " step nothing"
            yield Diagnostic(text, f"write servers = {number} or fewer", f"{location}.servers")

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        def sharded(param_sharding: ParamSharding) -> ParamSharding:
            axes = sharding.param_sum_axes(param_sharding, self.axis)
            is_shared = sharding.mesh.group_size(axes) > 1 or not param_sharding.sliced_dims
            layout = param_sharding.grad_layout.with_placement(axes, S(FLAT) if is_shared else I)
            return replace(param_sharding, grad_layout=layout)

        placed = sharding.map_param_shardings(sharded)
        if self.dedicated and self.servers < sharding.mesh.size(self.axis):
            placed = replace(placed, server_axis=self.axis, num_servers=self.servers)
        return with_servers(placed, self.servers)

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        pushes = GradReduceScatter(view, job, "", every_microbatch=False)
        pulls = {
            group.name: _pull(group, view.flat_param_specs[group.name], job)
            for group in flat_groups(view.param_groups)
        }
        calls = view.model_spec.block_calls
        return program.edit(
            lambda actions: _with_push_buffers(
                gather_before_forward(pushes.add_to(actions), view.param_groups, pulls, calls), view
            )
        )

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        state = runtime.state
        return {
            "UNSHARD": state.start_collective,
            "REDUCE": Pushes(runtime).start,
            "ACCUMULATE": state.flat_params.accumulate,
            "WAIT": lambda action: None,
        }

    def _axes_text(self, sharding: ShardingPlan) -> str:
        return " and ".join(
            axis for axis in sharding.sum_axes(self.axis) if sharding.mesh.size(axis) > 1
        ) or (self.axis)

    def _num_groups(self, sharding: ShardingPlan) -> Iterator[int]:
        """Yields, by stage, the number of groups that all ranks share."""
        numbers = defaultdict[int, int](int)
        for group in flat_groups(sharding.param_groups):
            if group.param_shardings[0].flat_shard_axes == sharding.sum_axes(self.axis):
                for stage in _stages(group, sharding):
                    numbers[stage] += 1
        yield from numbers.values()


def dtype_diagnostics(sharding: ShardingPlan) -> Iterator[Diagnostic]:
    """Yields trained parameters of a dtype of their own, which no server steps."""
    for weight in (each.param for each in sharding.param_shardings if each.param.trainable):
        if weight.dtype:
            text = f"{weight.name} is trained in {weight.dtype}, and servers step the dtype of the job"
            yield Diagnostic(text, "make it a parameter of real floats, or freeze it", weight.name)


def with_servers(sharding: ShardingPlan, num_servers: int) -> ShardingPlan:
    """Returns `sharding`, whose gradients are S(flat), with the server of each trained parameter."""
    owners = assign_servers(sharding, num_servers)
    return sharding.map_param_shardings(
        lambda each: replace(each, owner_index=owners.get(each.param.name, each.owner_index))
    )


def assign_servers(sharding: ShardingPlan, num_servers: int) -> dict[str, int]:
    """Returns, by trained parameter, the index of its server among the ranks that sum its gradient.

    Each group goes to the server with the fewest bytes so far, of all stages that use it; the largest group
    comes first. All ranks assign alike. `sharding` has gradients S(flat), and no owners.
    """
    loads = defaultdict[tuple[tuple[str, ...], int, int], int](int)  # by axes, stage and server
    chosen, order = list[tuple[ParamGroup, int]](), flat_groups(sharding.param_groups)
    for group in sorted(order, key=lambda group: -_local_numel(group, sharding)):
        axes, stages = group.param_shardings[0].flat_shard_axes, _stages(group, sharding)
        servers = range(min(num_servers, sharding.mesh.group_size(axes)))
        server = min(servers, key=lambda each: sum(loads[axes, stage, each] for stage in stages))
        for stage in stages:
            loads[axes, stage, server] += _local_numel(group, sharding)
        chosen.append((group, server))
    found = dict[str, int]()
    for group, server in chosen:
        axes = group.param_shardings[0].flat_shard_axes
        totals = defaultdict[int, int](int)
        for (other, _, each), numel in loads.items():
            totals[each] += numel if other == axes else 0
        num_ranks = sharding.mesh.group_size(axes)
        number = min(num_servers, num_ranks)
        by_load = sorted(range(number), key=lambda each: -totals[each])  # the fullest first
        places = sharding.server_indices or [each * num_ranks // number for each in range(number)]
        found |= dict.fromkeys(group.names, places[by_load.index(server)])
    return found


def _stages(group: ParamGroup, sharding: ShardingPlan) -> tuple[int, ...]:
    return group.pp_ranks or sharding.pp_ranks_using(group.params[0])


def _local_numel(group: ParamGroup, sharding: ShardingPlan) -> int:
    return sum(
        each.param.numel // sharding.mesh.group_size(each.sliced_dims) for each in group.param_shardings
    )


def _pull(group: ParamGroup, spec: FlatParamSpec, job: Job) -> Action:
    """Returns the broadcast of the stepped parameters of `group` from its server."""
    first, parameters = group.params[0], job.precision.parameters
    nbytes = spec.numel * first.itemsize(parameters)
    dtype = first.dtype_for(parameters)
    transfer = Transfer(
        "broadcast",
        spec.axes,
        nbytes,
        dtype=dtype,
        root=spec.owner_index or 0,
        member_indices=spec.member_indices,
    )
    return Action("UNSHARD", group.name, None, "comm", tensors=group.names, transfer=transfer)


def _with_push_buffers(actions: list[Action], view: RankView) -> list[Action]:
    """Returns `actions` with the buffers in which the rank of `view`, if it is a server, receives and adds
    gradients: for each set of ranks one, which the sums over them share.
    """
    sizes, buffers = dict[tuple[str, ...], int](), dict[str, Allocation]()
    for action in filter(_is_push, actions):
        transfer = action.transfer
        if transfer and view.plan.mesh.index(view.coordinate, transfer.axes) == transfer.root:
            nbytes = _wide_nbytes(transfer) + transfer.nbytes
            sizes[transfer.axes] = max(nbytes, sizes.get(transfer.axes, 0))
            buffers.setdefault(action.name, Allocation(_buffer_name(transfer), 0))
    first = {buffer.name: name for name, buffer in reversed(buffers.items())}
    edited = list[Action]()
    for action in actions:
        if action.name in first.values() and (transfer := action.transfer) is not None:
            buffer = Allocation(_buffer_name(transfer), sizes[transfer.axes])
            action = replace(action, allocations=(*action.allocations, buffer))
        elif action.kind == "LOCAL_NORM":
            action = replace(action, frees=(*action.frees, *first))
        edited.append(action)
    return edited


def _is_push(action: Action) -> bool:
    return action.kind == "REDUCE" and action.transfer is not None and action.transfer.collective == "reduce"


def _buffer_name(transfer: Transfer) -> str:
    return f"pushed gradients over {' '.join(transfer.axes)}"


def _wide_nbytes(transfer: Transfer) -> int:
    """The bytes of the sum of `transfer`, in the dtype in which it is made."""
    return transfer.nbytes // FLOAT_NBYTES[transfer.dtype] * FLOAT_NBYTES[_wide(transfer.dtype)]


def _wide(dtype: str) -> str:
    return WIDE.get(dtype, dtype)


class Pushes:
    """The pushes of one rank, and as a server its sums of what arrives."""

    def __init__(self, runtime: Runtime) -> None:
        self._state = runtime.state
        actions = [action for action in runtime.state.plan.actions if _is_push(action)]
        self._buffers = {each.name: each for action in actions for each in action.allocations}
        self._lock = Lock()  # on threads, two sums may run at a time, and they share one buffer

    def start(self, action: Action) -> None:
        """Starts to send the packed gradients of a group to its server; there, to receive and add them."""
        transfer, state = action.transfer, self._state
        if transfer is None:
            return
        group = state.world.group(transfer.axes, transfer.member_indices)
        flat_param = state.flat_params.flat_param_of(action.tensors[0])
        if state.plan.view.is_server and flat_param is not None:
            rounds = self._take(group.size, transfer, None, state.flat_params.gradient(flat_param))
        elif group.index == transfer.group_root:
            operand = state.operand(action)
            rounds = self._take(group.size, transfer, operand.input.view(-1), operand.output.view(-1))
        else:
            gradient = state.operand(action).input.view(-1)
            rounds = push_rounds(group.size, group.index, transfer.group_root, gradient)
        state.start_exchange(action, group, rounds)

    def _take(
        self, size: int, transfer: Transfer, gradient: torch.Tensor | None, total: torch.Tensor
    ) -> Rounds:
        with self._lock:
            buffer, dtype = self._buffers[_buffer_name(transfer)], getattr(torch, transfer.dtype)
            flat = self._state.flat_params.buffer(buffer.name, buffer.nbytes, torch.uint8)
            wide, sums = ACCUMULATION_DTYPES.get(dtype, dtype), _wide_nbytes(transfer)
            places = flat[:sums].view(wide), flat[sums : sums + transfer.nbytes].view(dtype)
            yield from take_rounds(size, transfer.group_root, gradient, total, *places)


def push_rounds(size: int, index: int, root: int, gradient: torch.Tensor) -> Rounds:
    """Yields the rounds of the rank at `index` of `size` that sends `gradient`, flat, to the one at `root`:
    in its own round, and nothing in those of others.
    """
    for peer in range(size):
        if peer != root:
            yield ([(root, gradient)] if peer == index else []), []


def take_rounds(
    size: int,
    root: int,
    gradient: torch.Tensor | None,
    total: torch.Tensor,
    sums: torch.Tensor,
    place: torch.Tensor,
) -> Rounds:
    """Yields the rounds of the rank at `root`, which receives the gradients of all others in their order, and
    writes the sum with its own `gradient`, if it has one, into `total`; all are flat and of one size.

    `place` is for what arrives, `sums` for the sum, in the dtype in which it is made. `total` may be
    `gradient`, which is read in its turn. The sum is rounded to the dtype of what arrives.
    """
    for peer in range(size):
        if peer != root:
            yield [], [(peer, place)]
        part = gradient if peer == root else place
        if part is not None and peer:
            sums.add_(part)
        elif part is not None:
            sums.copy_(part)
    if total.dtype == place.dtype:
        total.copy_(sums)
    else:
        total.copy_(place.copy_(sums))
