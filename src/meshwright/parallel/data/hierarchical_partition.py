"""hpZ: a second shard of the weights, kept within a host, so that backward gathers them inside hosts alone.

Why it works: weights do not change between the first forward and the step. ZeRO stage 3 gathers them over all
n ranks for forward, and throws that away; backward gathers the same bits once more over the slow links
between hosts. Here each rank keeps 1/h of what forward has gathered, where h neighbouring ranks (one host)
have all of it together, and every later gather of the step runs among those h. The step changes the weights,
so the first gather after it runs over all ranks again. Nothing is rounded: a plan with `hpz` has the bits of
the plan without it.

    4 ranks, h = 2      rank 0        rank 1        rank 2        rank 3
    primary shard       [0]           [1]           [2]           [3]           optimizer, checkpoints
    secondary shard     [0 1]         [2 3]         [0 1]         [2 3]         from forward to backward

    before   UNSHARD(0, F) F0 RESHARD(0, F)        F1 B1 UNSHARD(0, B)          B0 RESHARD(0, B) STEP
    after    UNSHARD(0, F) F0 RESHARD(0, F) keeps  F1 B1 UNSHARD(0, B) among h  B0 RESHARD(0, B) STEP

    sent per rank and gather, groups b of N_b elements of s bytes, padding included:
        over all ranks   sum (n-1)/n N_b s        among h   sum (h-1)/h N_b s
    memory per rank: sum N_b s / h for groups that are gathered more than once

With m microbatches, one gather of a group is over all ranks, the other 2 m - 1 stay inside hosts (the paper:
m of each); what is recomputed gathers inside them too. `partition_size` is the h of DeepSpeed's
`zero_hpz_partition_size`: the ranks of a host, divided by the ranks along axes that lie inside the shard
axes (tp). Parameters with at most h shards (experts) are gathered as before.
Cost: N s / h bytes of memory, and one copy of as many, for (2 m - 1) of 2 m gathers over fast links.
Limits: zero of stage 3, whose shards lie on a multiple of `partition_size` ranks and rest on the device. The
group that is used last by forward and first by backward is gathered once, and keeps nothing.
Paper: Wang et al. 2023, "ZeRO++", arXiv 2306.10209, section 3.2 (hpZ); PyTorch FSDP2 calls it
`reshard_after_forward` = h.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.field_constraints import at_least
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import PARAM_DTYPE_NBYTES
from meshwright.plan.sharding.mesh import divisors
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import (
    Action,
    Allocation,
    Program,
    Transfer,
    neighbour_indices,
    with_waits,
)
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

if TYPE_CHECKING:
    from meshwright.engine.params.flat_param import FlatParam

WHERE = "strategies.hpz.partition_size"
SIZE_FIX = "write the ranks of a host that share the weights, at least 2, or remove hpz"


@dataclass(frozen=True)
class HierarchicalPartition(Strategy):
    """Gathers weights among `partition_size` neighbouring ranks, once a step has gathered them from all."""

    name: ClassVar[str] = "hpz"
    phase: ClassVar[StrategyPhase] = "comm"
    partition_size: int = field(default=0, metadata=at_least(2, SIZE_FIX))

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        num_shards = {
            sharding.mesh.group_size(each.flat_shard_axes)
            for each in sharding.param_shardings
            if each.is_stored_sharded
        }
        if not num_shards:
            text = "no weights are stored in shards, so backward gathers none"
            yield Diagnostic(text, "use zero with stage = 3, or remove hpz", "strategies.hpz")
            return
        largest = max(num_shards)
        if largest <= self.partition_size:
            text = (
                f"partition_size = {self.partition_size}, and weights have {largest} shards: backward would"
            )
            text += " gather over all of their ranks, as forward does"
            yield Diagnostic(text, _smaller_fix(largest), WHERE)
        for number in sorted(each for each in num_shards if each > self.partition_size):
            if number % self.partition_size:
                text = f"the {number} shards of weights do not divide by partition_size = "
                text += f"{self.partition_size}"
                yield Diagnostic(text, _smaller_fix(number), WHERE)
        if sharding.tiers.weights != "device":
            tier, offload = sharding.tiers.weights, "offload"
            if tier == "disk":
                offload = "disk_offload"
            text = f"shards of weights rest on the {tier}, and the second shard would lie on the device"
            fix = f"remove weights from what of {offload}, or remove hpz"
            yield Diagnostic(text, fix, "strategies.hpz")

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        return program.edit(lambda actions: self._gather_within_hosts(actions, view))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        shards = _SecondaryShards(runtime, self.partition_size)
        runtime.wrap("UNSHARD", shards.wrap_unshard)
        runtime.wrap("RESHARD", shards.wrap_reshard)
        return {}

    def _gather_within_hosts(self, actions: list[Action], view: RankView) -> list[Action]:
        specs = {spec.params[0][0]: spec for spec in view.flat_param_specs.values()}
        found, edits = list[list[Action]](), dict[str, Action]()
        for name, spec in specs.items():
            if spec.num_ranks > self.partition_size:
                found += _gathers_of(actions, name)
        if not view.plan.stage_axes:  # a stage may have one block, which is gathered once
            self._refuse_without_effect(found)
        by_name = {action.name: action for action in actions}
        for first, *later in (gathers for gathers in found if len(gathers) > 1):
            spec = specs[first.tensors[0]]
            nbytes = spec.numel // self.partition_size * PARAM_DTYPE_NBYTES[_dtype(first)]
            kept = Allocation(_shard_name(spec.name), nbytes)
            keeps = by_name[_reshard_name(first)]
            edits[keeps.name] = replace(keeps, allocations=(*keeps.allocations, kept))
            for gather in later:
                edits[gather.name] = with_waits(self._within_host(gather, nbytes), (keeps.name,))
            ends = by_name[_reshard_name(later[-1])]
            edits[ends.name] = replace(ends, frees=(*ends.frees, kept.name))
        return [edits.get(action.name, action) for action in actions]

    def _within_host(self, gather: Action, nbytes: int) -> Action:
        """Returns `gather` of secondary shards of `nbytes` in place of the primary ones."""
        axes = () if gather.transfer is None else gather.transfer.axes
        within = Transfer(
            "all_gather", axes, nbytes, dtype=_dtype(gather), num_neighbours=self.partition_size
        )
        return replace(gather, transfer=within)

    @staticmethod
    def _refuse_without_effect(gathers: list[list[Action]]) -> None:
        """Raises PlanError if weights of many groups are gathered, each of them once."""
        if len(gathers) > 2 and all(len(each) == 1 for each in gathers):
            text = "every weight is gathered once per step and kept until backward: hpz has nothing to gather"
            fix = 'set gather = "use" and keep_mb = 0 in zero, or remove hpz'
            raise PlanError(text, fix=fix, location="strategies.hpz")


class _SecondaryShards:
    """The secondary shards of one rank: RESHARD fills them, UNSHARD gathers them."""

    def __init__(self, runtime: Runtime, partition_size: int) -> None:
        self._state, self._partition_size = runtime.state, partition_size
        self._flat_params = {
            each.spec.params[0][0]: each for each in runtime.state.flat_params.by_param_group.values()
        }

    def wrap_unshard(self, handler: Handler) -> Handler:
        """Returns a handler of UNSHARD that gathers secondary shards where the plan says so."""

        def unshard(action: Action) -> None:
            transfer = action.transfer
            if transfer is None or not transfer.num_neighbours:
                handler(action)
                return
            flat_param = self._flat_params[action.tensors[0]]
            members = neighbour_indices(flat_param.group.index, transfer.num_neighbours)
            group = self._state.world.group(transfer.axes, members)
            _, shard = self._ranges(flat_param)
            work = group.all_gather(flat_param.full_tensor, shard, action=action.name)
            self._state.issue(action, work)

        return unshard

    def wrap_reshard(self, handler: Handler) -> Handler:
        """Returns a handler of RESHARD that keeps this rank's secondary shard where the plan says so."""

        def reshard(action: Action) -> None:
            if action.allocations:
                gathered, shard = self._ranges(self._flat_params[action.tensors[0]])
                shard.copy_(gathered)
            handler(action)

        return reshard

    def _ranges(self, flat_param: "FlatParam") -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the range of the full tensor that is this rank's secondary shard, and the shard itself."""
        full_tensor, spec = flat_param.full_tensor, flat_param.spec
        index = flat_param.group.index % self._partition_size
        gathered = full_tensor.view(self._partition_size, -1)[index]
        buffer = self._state.flat_params.buffer
        return gathered, buffer(_shard_name(spec.name), gathered.nbytes, gathered.dtype)


def _gathers_of(actions: Sequence[Action], first_param: str) -> list[list[Action]]:
    """Returns the gathers of the group that begins with `first_param`, between one STEP and the next."""
    found: list[list[Action]] = [[]]
    for action in actions:
        if action.kind == "STEP" and first_param in action.tensors:
            found.append([])
        elif action.kind == "UNSHARD" and action.tensors[0] == first_param:
            found[-1].append(action)
    return [each for each in found if each]


def _dtype(gather: Action) -> str:
    return "" if gather.transfer is None else gather.transfer.dtype


def _shard_name(group: str) -> str:
    return f"secondary shard({group})"


def _reshard_name(gather: Action) -> str:
    return replace(gather, kind="RESHARD").name


def _smaller_fix(num_shards: int) -> str:
    fitting = [each for each in divisors(num_shards) if 1 < each < num_shards]
    choice = f"choose one of {', '.join(map(str, fitting))}" if fitting else "shard over more ranks"
    return f"{choice}, or remove hpz"
