"""ZeRO and FSDP: optimizer states, gradients and weights are sharded over the data-parallel ranks.

Why it works: a rank needs full weights only while a block runs, and the optimizer needs none: it steps each
element by itself. So of the n copies of optimizer states (stage 1), gradients (2) and weights (3) that `ddp`
keeps, n-1 are freed. The sum of the gradients arrives where it is stepped (reduce-scatter), and the stepped
weights are all-gathered: together the bytes of one all-reduce. Storage is sharded, not work: every rank
computes every block on its own samples.

    stage 1, 2   UNSHARD(0) UNSHARD(1)  F0 F1 LOSS B1 PACK(1) B0 PACK(0)   LOCAL_NORM GLOBAL_NORM CLIP STEP
    comm                                              REDUCE(1)      REDUCE(0)
    stage 3      UNSHARD(0) F0 RESHARD(0)  F1 LOSS B1 PACK(1) RESHARD(1)  B0 PACK(0) RESHARD(0)  ... CLIP STEP
    comm           UNSHARD(1, F, 0)           UNSHARD(0, B, 0)  REDUCE(1, 0)  REDUCE(0, 0)

    gradients P -> S(flat) along the axis: reduce_scatter; weights S(flat) -> R: all_gather
    bytes per rank, P elements of 2 (weight) + 2 (gradient) + 12 (master weights, optimizer states):
        4 P + 12 P/n (stage 1)      2 P + 14 P/n (2)      16 P/n + buffers (3)
    sent per rank, over parameter groups b of N_b elements: a = sum (n-1) ceil(N_b/n) * bytes per element
        2 a (stage 1)      (m + 1) a (stage 2, m microbatches)
        (2 m + m) a (stage 3, gather = "use")      (m + m) a ("microbatch")      (1 + m) a ("step")

    UNSHARD   all-gathers full weights from the shards of all ranks
    WAIT      waits for the weights that glue uses at any time, or for the gradients that are summed next
    RESHARD   frees the full weights; the next parameter group reuses the buffer

`gather` says how long stage 3 keeps full weights: for one "use" (forward, and again backward), for a
"microbatch", or for the "step"; `keep_mb` keeps as many more as fit. Weights are gathered `prefetch` uses
early into a fixed number of buffers. Stages 2 and 3 reduce after every backward, through two buffers, so no
full gradient outlives its block. With `replicate_axis`, shards are replicated over a second axis (HSDP):
reduce-scatter inside a
group, all-reduce of the shard across groups. Ranks with other tokens of the same samples are among
the n: sums and shards cover them and the axis together. A parameter whose shards would all lie on one rank
(experts, where each rank has its own) stays whole; its gradient is summed over replicas, as `ddp` does.
Cost: stages 1 and 2 send what `ddp` sends (stage 2 more often if microbatches accumulate), stage 3 half as
much again. On accelerators each parameter and shard begins at a multiple of 128 bytes (`align_bytes`): N_b
and P count the padding.
Limits: an optimizer that reads more than one element needs shards at its shard alignment
(plan/sharding/flat_param.py). Stage 3 needs fast links.
Paper: Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054 (sections 5 and 7); Zhao et al. 2023, "PyTorch
FSDP", arXiv 2304.11277 (sections 3.2 hybrid, 3.3 overlap).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from meshwright.parallel.data.batch_split import GRAD_SUM_AXIS, same_data_diagnostic
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.hardware.streams import COPY
from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.field_constraints import at_least, one_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import PARAM_DTYPE_NBYTES, ROOT
from meshwright.plan.sharding.flat_param import FlatParamSpec
from meshwright.plan.sharding.mesh import GRAD_SUM_AXES
from meshwright.plan.sharding.param_sharding import ParamGroup, ParamSharding
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import FLAT, I, S
from meshwright.plan.step.grad_reduce_scatter import GradReduceScatter
from meshwright.plan.step.program import Action, Allocation, Program, Transfer, with_waits
from meshwright.plan.step.single_device_program import PARAM_USE_KINDS
from meshwright.plan.step.unshard_windows import (
    JoinScope,
    ParamUse,
    assign_buffers,
    flat_groups,
    gather_before_forward,
    unshard_windows,
    wait_for_gather,
)
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

STAGE_FIX = "write 1 (optimizer states), 2 (also gradients) or 3 (also weights); to shard nothing, use ddp"


@dataclass(frozen=True)
class ZeRO(Strategy):
    """Shards optimizer states (`stage` 1), gradients too (2) and weights too (3) along `axis`; replicates
    along `replicate_axis`.

    Ranks with other tokens of the same samples hold shards too. `gather`, `keep_mb` and `prefetch` are for
    stage 3 alone (see the module).
    """

    name: ClassVar[str] = "zero"
    phase: ClassVar[StrategyPhase] = "storage"
    axis: str = field(default="dp_shard", metadata=GRAD_SUM_AXIS)
    stage: int = field(default=3, metadata=one_of(1, 2, 3, fix=STAGE_FIX))
    replicate_axis: str = field(default="", metadata=one_of("", *GRAD_SUM_AXES))
    gather: JoinScope = "use"
    keep_mb: float = field(default=0.0, metadata=at_least(0))
    prefetch: int = field(default=1, metadata=at_least(0))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        location = "strategies.zero"
        for axis in (self.axis, self.replicate_axis):
            if axis and axis not in sharding.grad_sum_axes:
                yield same_data_diagnostic("shards", axis, location)
        unused = [
            key
            for key, usual in (("gather", "use"), ("keep_mb", 0.0), ("prefetch", 1))
            if vars(self)[key] != usual
        ]
        if unused and self.stage in (1, 2):
            text = f"{' and '.join(unused)} with stage {self.stage}, which keeps weights whole"
            yield Diagnostic(text, f"remove {' and '.join(unused)}, or set stage = 3", location)
        yield from self._check_dtypes(sharding)
        if self.axis == self.replicate_axis:
            yield Diagnostic(
                f"axis and replicate_axis are both {self.axis}",
                "shard along one axis, replicate along the other",
                location,
            )
        elif self.replicate_axis in sharding.token_axes:
            text = (
                f"replicate_axis = '{self.replicate_axis}', where ranks have other tokens of a sample: "
                f"shards are cut along {self.axis} and it"
            )
            yield Diagnostic(
                text,
                'remove replicate_axis, or write the other axis of samples there: "dp_replicate"',
                f"{location}.replicate_axis",
            )
        yield from self._check_single_owner(sharding)

    def _check_single_owner(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        stored = [
            axis
            for axis in sharding.grad_sum_axes
            if any(
                axis not in (*param_sharding.grad_layout.axes_with("P"), *param_sharding.sliced_dims)
                for param_sharding in _trainable(sharding)
            )
        ]
        if taken := [axis for axis in stored if axis in (*sharding.sum_axes(self.axis), self.replicate_axis)]:
            text = f"another strategy stores the weights along {' and '.join(taken)} already"
            other = [axis for axis in stored if axis in sharding.data_axes and axis != self.axis]
            more = f'; zero can replicate too: replicate_axis = "{other[0]}"' if other else ""
            yield Diagnostic(text, f"keep one of them{more}", "strategies.zero")
        elif cut := sorted(
            {axis for param_sharding in sharding.param_shardings for axis in param_sharding.flat_shard_axes}
        ):
            text = (
                f"the weights are cut into shards along {' and '.join(cut)} already, and now "
                f"along {self.axis} too"
            )
            fix = f'keep one of them, along one axis; zero can replicate too: replicate_axis = "{cut[0]}"'
            yield Diagnostic(text, fix, "strategies.zero")

    def _check_dtypes(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        for weight in (param_sharding.param for param_sharding in sharding.param_shardings):
            if weight.dtype and weight.trainable:
                text = (
                    f"{weight.name} is trained in {weight.dtype}, and shards are stepped in the dtype of "
                    f"the job"
                )
                yield Diagnostic(text, "make it a parameter of real floats, or freeze it", weight.name)
            elif weight.dtype and weight.dtype not in PARAM_DTYPE_NBYTES and self.stage == 3:
                text = f"{weight.name} is of {weight.dtype}, which is not cut into shards"
                yield Diagnostic(
                    text,
                    f"use stage = 2, which keeps weights whole, or one of {', '.join(PARAM_DTYPE_NBYTES)}",
                    weight.name,
                )

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        num_ranks = sharding.mesh.group_size((*sharding.sum_axes(self.axis), *self._replicas()))

        def on_one_rank(param_sharding: ParamSharding) -> bool:  # experts, if each of the ranks has its own
            axes = sharding.param_sum_axes(param_sharding, self.axis)
            group = (*axes, *self._replicas(param_sharding))
            return not axes or sharding.mesh.group_size(group) == 1 < num_ranks

        def stored(param_sharding: ParamSharding) -> ParamSharding:
            if self.stage < 3 or on_one_rank(param_sharding):
                return param_sharding
            axes = sharding.param_sum_axes(param_sharding, self.axis)
            layout = param_sharding.storage_layout.with_placement(axes, S(FLAT))
            return replace(param_sharding, storage_layout=layout)

        def shard(param_sharding: ParamSharding) -> ParamSharding:
            axes = sharding.param_sum_axes(param_sharding, self.axis)
            placement = I if on_one_rank(param_sharding) else S(FLAT)
            grad = param_sharding.grad_layout.with_placement(axes, placement)
            grad = grad.with_placement(self._replicas(param_sharding), I)
            return replace(stored(param_sharding), grad_layout=grad)

        return sharding.map_param_shardings(shard).map_param_shardings(stored, frozen=True)

    def _replicas(self, param_sharding: ParamSharding | None = None) -> tuple[str, ...]:
        """The axis of replicas, if there is one, and they are replicas of this parameter."""
        is_sliced = param_sharding is not None and self.replicate_axis in param_sharding.sliced_dims
        return (self.replicate_axis,) if self.replicate_axis and not is_sliced else ()

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        sums = GradReduceScatter(
            view,
            job,
            self.replicate_axis,
            every_microbatch=self.stage > 1,
        )
        program = program.edit(sums.add_to)
        if self.replicate_axis:  # gradients of parameters that stay whole
            program = DDP(self.replicate_axis).rewrite(program, view, job)
        return program.edit(
            lambda actions: (self._insert_unshard_windows if self.stage == 3 else self._insert_step_gathers)(
                actions, view, job
            )
        )

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        start = runtime.state.start_collective
        kinds = {"UNSHARD": start, "REDUCE": start, "ACCUMULATE": runtime.state.flat_params.accumulate}
        return {**kinds, "RESHARD": _no_op, "WAIT": _no_op}

    @staticmethod
    def _unshard_action(
        param_group: ParamGroup, flat_param_spec: FlatParamSpec, job: Job, what: str, microbatch: int | None
    ) -> Action:
        first, parameters = param_group.params[0], job.precision.parameters
        dtype, nbytes = first.dtype_for(parameters), flat_param_spec.shard_numel * first.itemsize(parameters)
        members = flat_param_spec.member_indices
        transfer = Transfer("all_gather", flat_param_spec.axes, nbytes, dtype=dtype, member_indices=members)
        return Action(
            "UNSHARD",
            f"{param_group.name}{what}",
            microbatch,
            "comm",
            tensors=param_group.names,
            transfer=transfer,
        )

    def _insert_step_gathers(self, actions: list[Action], view: RankView, job: Job) -> list[Action]:
        specs = view.flat_param_specs
        gathers = {
            group.name: self._unshard_action(group, specs[group.name], job, "", None)
            for group in flat_groups(view.param_groups)
        }
        return gather_before_forward(actions, view.param_groups, gathers, view.model_spec.block_calls)

    def _insert_unshard_windows(self, actions: list[Action], view: RankView, job: Job) -> list[Action]:
        param_groups, flat_param_specs = (
            {param_group.name: param_group for param_group in flat_groups(view.all_param_groups)},
            view.flat_param_specs,
        )
        widths = {
            name: param_group.params[0].itemsize(job.precision.parameters)
            for name, param_group in param_groups.items()
        }
        nbytes = {
            name: flat_param_spec.numel * widths[name] for name, flat_param_spec in flat_param_specs.items()
        }
        at = [
            i
            for i, action in enumerate(actions)
            if action.kind in PARAM_USE_KINDS or (action.kind == "LOSS" and action.tensors)
        ]
        uses = [
            ParamUse(_needed_groups(actions[i], list(param_groups.values())), actions[i].microbatch or 0)
            for i in at
        ]
        found = unshard_windows(uses, nbytes, self.gather, self.keep_mb * 2**20, self.prefetch)
        number, sizes = assign_buffers(found, nbytes)
        before: dict[int, list[Action]] = {}
        behind: dict[int, list[Action]] = {}
        waits: dict[int, list[str]] = {}
        for window in found:
            param_group, first = param_groups[window.param_group], actions[at[window.first_use]]
            held = Allocation(
                f"weight buffer {number[window.param_group]}", sizes[number[window.param_group]]
            )
            fetch = self._unshard_action(
                param_group,
                flat_param_specs[window.param_group],
                job,
                _gather_suffix(first, param_group),
                first.microbatch,
            )
            fetch = replace(fetch, allocations=(held,))
            release = Action(
                "RESHARD", fetch.subject, fetch.microbatch, tensors=fetch.tensors, frees=(held.name,)
            )
            if view.plan.tiers.weights != "device":
                copy = _fetch_shard(fetch)
                before.setdefault(at[window.fetch_use], []).append(copy)
                fetch = with_waits(replace(fetch, allocations=()), (copy.name,))
            before.setdefault(at[window.fetch_use], []).append(fetch)
            if ROOT in param_group.block_calls:
                before[at[window.fetch_use]].append(wait_for_gather(fetch))
            behind.setdefault(at[window.last_use], []).append(release)
            for use in range(window.first_use, window.last_use + 1):
                if window.param_group in uses[use].param_groups:
                    waits.setdefault(at[use], []).append(fetch.name)
        return _with_insertions(actions, before, waits, behind)


def _with_insertions(
    actions: list[Action],
    before: Mapping[int, list[Action]],
    waits: Mapping[int, list[str]],
    behind: Mapping[int, list[Action]],
) -> list[Action]:
    edited: list[Action] = []
    owed: list[Action] = []
    for i, action in enumerate(actions):
        if action.kind not in ("PACK", "REDUCE", "ACCUMULATE"):
            edited += owed
            owed = []
        edited += [*before.get(i, ()), with_waits(action, waits.get(i, ()))]
        owed += behind.get(i, ())
    return edited + owed


def _needed_groups(action: Action, param_groups: Sequence[ParamGroup]) -> tuple[str, ...]:
    by_loss = set(action.tensors) if action.kind == "LOSS" else set()
    return tuple(
        each.name
        for each in param_groups
        if {action.subject, ROOT} & set(each.block_calls) or by_loss & set(each.names)
    )


def _gather_suffix(use: Action, param_group: ParamGroup) -> str:
    return f", {use.kind}" + ("" if param_group.block_calls == (use.subject,) else f" of {use.subject}")


def _fetch_shard(unshard: Action) -> Action:
    """Returns the copy of a shard that rests in another tier into its place in the buffer of `unshard`."""
    transfer = unshard.transfer
    nbytes, dtype = (0, "") if transfer is None else (transfer.nbytes, transfer.dtype)
    return replace(
        unshard,
        kind="FETCH_PARAM",
        stream="copy_in",
        transfer=Transfer(COPY, (), nbytes, dtype=dtype),
    )


def _trainable(sharding: ShardingPlan) -> list[ParamSharding]:
    return [param_sharding for param_sharding in sharding.param_shardings if param_sharding.param.trainable]


def _no_op(action: Action) -> None:
    """Does nothing: the action only waits or frees."""
