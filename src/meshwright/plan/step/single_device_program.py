"""Builds the step of a single device, before any technique: the list that strategies rewrite.

    TOKEN_COUNT  the number of tokens of this step that count towards the loss (all microbatches)
    F            forward of one block call               LOSS      loss of one microbatch, and its gradient
    B            backward of one block call              LOSS_SUM  loss and expert load of the whole step
    I            the input-gradient half of a backward   W         the parameter-gradient half of a backward
    CLIP         the gradient norm, and clipping by it
    LOCAL_NORM   sum of the squares of this rank's gradients
    GLOBAL_NORM  sum of the squared norms over all ranks
    STEP         the optimizer, of all parameters or of one group (`step_by_group`); frees their gradients

A rank may step more than once: then a list of `StageCalls` says after which backwards, each with the gradient
of that microbatch alone. LOCAL_NORM precedes each such STEP, nothing is clipped, and GLOBAL_NORM sums all
squares.

If the loss reads sums over the global batch (`Loss.auxiliary`), all forwards come first, then
BATCH_SUM (sums over the tokens of the global batch that the loss reads), then losses and backwards.

If the loss needs the outputs of several ranks, GATHER (one output or target, from all ranks) precedes it.
Strategies may add PACK (gradients of a bucket into one contiguous buffer) and UNPACK (copies gradients out of
the buffer). If the job asks for the gradient noise scale, `plan.step.gradient_noise` adds its actions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ROOT
from meshwright.plan.sharding.expert_load import num_load_counts
from meshwright.plan.sharding.mesh import ROUND_AXES
from meshwright.plan.sharding.param_sharding import ParamGroup
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.chunked_loss_cost import MAX_CHUNK_NUMEL, chunked_loss_cost
from meshwright.plan.step.memory.block_call_memory import activation_memory, loss_scratch_nbytes
from meshwright.plan.step.memory.memory_names import (
    SCRATCH,
    deferred_grad_name,
    grad_name,
    loss_grad_name,
    output_name,
    saved_activations_name,
    sum_name,
)
from meshwright.plan.step.program import Action, Allocation, Program, Role, SiteRanks, Transfer

CHECKPOINTED_FORWARD = "F_CHECKPOINTED"
INPUT_DROPPED_FORWARD = "F_INPUT_DROPPED"
CHECKPOINTED_KINDS = (CHECKPOINTED_FORWARD, INPUT_DROPPED_FORWARD)  # forwards that are run again
FORWARD_KINDS = ("F", *CHECKPOINTED_KINDS)  # kinds that run in the model's forward, block by block
RECOMPUTE_KINDS = ("RECOMPUTE", "RECOMPUTE_OUTPUT")  # kinds that run a forward again
INPUT_GRAD_KINDS = ("B", "I")  # kinds that compute the input gradient of a block call
WEIGHT_GRAD_KINDS = ("B", "W")  # kinds that compute parameter gradients and free saved activations
# kinds that use the parameters of their block
PARAM_USE_KINDS = (*FORWARD_KINDS, *RECOMPUTE_KINDS, "B", "I", "W")
# kinds that allocate activations, and gradients that are not kept, beside those that receive them
ACTIVATION_KINDS = (*PARAM_USE_KINDS, "LOSS", "CONCAT", "CONCAT_GRAD", "PULL_ROWS")
OBSERVER_KINDS = ("SHOW", "OBSERVE", "ANSWER")  # kinds of ranks that see weights, and step none
NUMBER_KINDS = ("TOKEN_COUNT", "LOSS_SUM", "LOCAL_NORM", "GLOBAL_NORM")
EVERY_RANK_KINDS = (*NUMBER_KINDS, "CLIP", "STEP", *OBSERVER_KINDS)  # servers' too
ROW_KINDS = ("PULL_ROWS", "PUSH_ROWS")  # kinds that move rows of servers, in the order of a microbatch
BATCH_INFO = "batch_info"  # the subject of the GATHER of per-rank sample counts and sums of replicated inputs
COUNT_NBYTES = 32  # loss weight, stop requests, samples, tokens: float64
BATCH_SUM = "BATCH_SUM"
GRAD_NORM = "norm"  # the subject of the BROADCAST of the gradient norm


class StageCalls(NamedTuple):
    """Consecutive block calls, forward or backward, for one microbatch. Backwards run in reverse order.

    "I" and "W" are the halves of a backward. "STEP" is an update with the gradients of that microbatch;
    without any, all microbatches make one step together.
    """

    kind: Literal["F", "B", "I", "W", "STEP"]
    block_calls: tuple[str, ...]
    microbatch: int


def sequential_stage_calls(block_calls: tuple[str, ...], num_microbatches: int) -> list[StageCalls]:
    """Returns the calls of a rank that runs the whole model for one microbatch after the other."""
    kinds: tuple[Literal["F", "B"], ...] = ("F", "B")
    return [
        StageCalls(kind, block_calls, microbatch) for microbatch in range(num_microbatches) for kind in kinds
    ]


def forwards_first(stage_calls: Iterable[StageCalls]) -> list[StageCalls]:
    """Returns `stage_calls` with all forwards before all others, each in their order."""
    return sorted(stage_calls, key=lambda calls: calls.kind != "F")


def single_device_program(
    view: RankView, job: Job, micro_batch: int, stage_calls: Sequence[StageCalls]
) -> Program:
    """Returns the program of a rank that trains alone, on microbatches of `micro_batch` samples, in the order
    of `stage_calls`.
    """
    builder = _StageCallActions(view, job, micro_batch)
    actions = [Action("TOKEN_COUNT"), *(action for calls in stage_calls for action in builder.actions(calls))]
    losses = tuple(action.name for action in actions if action.kind == "LOSS")
    if losses and view.model_spec.num_batch_sums:
        _insert_batch_sum(actions, view)
    last = actions[-1].name
    actions.append(Action("LOSS_SUM", waits=losses, frees=builder.scratch_in_use))
    if any(calls.kind == "STEP" for calls in stage_calls):
        return Program((stage_role(view, [*actions, *_norm(view.plan, last)]),))
    names = tuple(param.name for param in view.model_spec.trainable)
    # Not every stage computes a loss.
    waits = [last, "TOKEN_COUNT()"] if view.plan.block_calls_by_pp_rank else [last]
    if view.plan.grad_norm_axes:
        square = Action("LOCAL_NORM", GRAD_NORM, waits=(last,))
        actions += [square, *_norm(view.plan, square.name)]
        waits += [action.name for action in actions[-2:]]
    actions.append(Action("CLIP", waits=tuple(waits), tensors=names))
    actions.append(
        Action("STEP", waits=("CLIP()",), tensors=names, frees=tuple(map(grad_name, view.param_groups)))
    )
    return Program((stage_role(view, actions),))


def _insert_batch_sum(actions: list[Action], view: RankView) -> None:
    """Inserts BATCH_SUM before the first loss, which stands after all forwards; all losses wait for it."""
    first = next(at for at, action in enumerate(actions) if action.kind == "LOSS")
    last_call = view.model_spec.block_calls[-1]
    forwards = (each for each in actions if each.kind == "F" and each.subject == last_call)
    batch_sum = Action(BATCH_SUM, waits=tuple(action.name for action in forwards))
    for at, action in enumerate(actions):
        if action.kind == "LOSS":
            actions[at] = replace(action, waits=(*action.waits, batch_sum.name))
    actions.insert(first, batch_sum)


def _norm(sharding: ShardingPlan, last: str) -> list[Action]:
    if not sharding.grad_norm_axes:
        return []
    total = Transfer("all_reduce", sharding.grad_norm_axes, 8, dtype="float64")
    return [Action("GLOBAL_NORM", GRAD_NORM, stream="comm", waits=(last,), transfer=total)]


def stage_role(view: RankView, actions: Iterable[Action]) -> Role:
    """Returns the role of the rank of `view`, with `actions`: ranks at one index along pp run the same
    stages; without a pipeline, all ranks of the mesh have one role.
    """
    pp_rank, pp_size = 0, 1
    if view.plan.block_calls_by_pp_rank:
        pp_rank, pp_size = view.coordinate["pp"], view.plan.mesh.pp
    num_sites = view.plan.mesh.group_size(ROUND_AXES)
    num_ranks = view.plan.mesh.world_size // num_sites // pp_size
    first = pp_rank * num_ranks  # only sites lie outside pp: in each, the ranks of a stage follow one another
    plan = view.plan
    num_served = num_ranks * plan.num_servers // plan.mesh.size(plan.server_axis) if plan.num_servers else 0
    ranks = range(first, first + num_ranks - num_served)  # servers are the last ones of the stage
    if num_sites > 1 and pp_size > 1:
        ranks = SiteRanks(ranks, num_sites, num_ranks * pp_size)
    elif num_sites > 1:
        ranks = range(view.plan.mesh.world_size - plan.num_servers)  # servers of sites are the last of all
    return Role(stage_role_name(pp_rank), ranks, tuple(actions))


def stage_role_name(pp_rank: int) -> str:
    """Returns the name of the role of the ranks at index `pp_rank` along pp."""
    return f"pp{pp_rank}"


def runs_input_backward(action: Action, sharding: ShardingPlan) -> bool:
    """Returns whether `action` computes the gradients of the activations of its block call: B, or of a split
    backward I; W if the input of the call needs no gradient, because W then has everything.
    """
    boundaries = sharding.model_spec.stage_boundaries
    has_all_in_weights = boundaries is not None and not boundaries.input_needs_grad(action.subject)
    return action.kind in ("B", "W" if has_all_in_weights else "I")


def samples_per_microbatch(actions: Iterable[Action], sharding: ShardingPlan, job: Job) -> int:
    """Returns the samples per microbatch of a rank that executes `actions`."""
    microbatches = {action.microbatch for action in actions if action.kind in WEIGHT_GRAD_KINDS}
    return job.train.batch // sharding.num_data // len(microbatches)


def stepped_microbatches(actions: Iterable[Action]) -> tuple[int, ...]:
    """Returns the microbatches after which a rank steps with their gradients alone, in order; empty with one
    step for all.
    """
    return tuple(
        action.microbatch for action in actions if action.kind == "STEP" and action.microbatch is not None
    )


def step_by_group(actions: Iterable[Action], view: RankView) -> list[Action]:
    """Returns `actions` with a STEP for each parameter group of `view` in place of the one for all, in their
    order, so that the update of one group may overlap with what others need before and after theirs.

    Each frees the gradients of its group, and the last one what the one for all freed besides. To be called
    when all gradients have their place: by a strategy of the phase "comm". Updates per microbatch stay whole.
    """
    groups, found = view.param_groups, list[Action]()
    own_grads = {name: group.name for group in groups for name in (grad_name(group), sum_name(group))}
    for action in actions:
        if action.kind != "STEP" or action.subject or action.microbatch is not None or not groups:
            found.append(action)
            continue
        for group in groups:
            frees = [name for name in action.frees if own_grads.get(name) == group.name]
            if group is groups[-1]:
                frees += [name for name in action.frees if name not in own_grads]
            found.append(replace(action, subject=group.name, tensors=group.names, frees=tuple(frees)))
    last = Action("STEP", groups[-1].name).name if groups else ""
    return [
        replace(action, waits=tuple(last if name == "STEP()" else name for name in action.waits))
        if "STEP()" in action.waits
        else action
        for action in found
    ]


def step_total_nbytes(sharding: ShardingPlan) -> dict[str, int]:
    """Returns the bytes of the totals of a step over ranks, float64, by the kind of their action."""
    return {"TOKEN_COUNT": COUNT_NBYTES, "LOSS_SUM": 8 * (1 + num_load_counts(sharding))}


def reduce_totals_along(program: Program, axis: str, nbytes: Mapping[str, int]) -> Program:
    """Returns `program` with the totals of a step in `nbytes`, by kind, also reduced along `axis`; once, even
    if several strategies ask for it.
    """

    def reduce_along(action: Action) -> Action:
        if action.kind not in nbytes:
            return action
        before = action.transfer.axes if action.transfer else ()
        axes = before if axis in before else (*before, axis)
        transfer = Transfer("all_reduce", axes, nbytes[action.kind], dtype="float64")
        return replace(action, stream="comm", transfer=transfer)

    return program.edit(lambda actions: [reduce_along(action) for action in actions])


class _StageCallActions:
    """Builds actions in order; `scratch_in_use` names the scratch memory of the last action until it is
    freed.
    """

    def __init__(self, view: RankView, job: Job, micro_batch: int) -> None:
        self._view, self._job, self._micro_batch = view, job, micro_batch
        self._shares = view.work_share.block_shares
        self._chunked_loss = chunked_loss_cost(view, job, micro_batch)
        self._memory = activation_memory(view, job, micro_batch)
        self._groups_of: dict[str, list[ParamGroup]] = {
            block_call: [] for block_call in (*view.model_spec.block_calls, ROOT)
        }
        for group in view.param_groups:
            for block_call in group.block_calls:
                self._groups_of[block_call].append(group)
        self._groups_with_grads: set[str] = set()  # names
        self.scratch_in_use: tuple[str, ...] = ()

    def actions(self, stage_calls: StageCalls) -> list[Action]:
        kind, block_calls, microbatch = stage_calls
        if kind == "F":
            return [self._forward(block_call, microbatch) for block_call in block_calls]
        if kind == "STEP":
            return self._step(stage_calls)
        at_end = self._view.computes_loss and self._view.model_spec.block_calls[-1] in block_calls
        loss = [self._loss(microbatch)] if at_end and kind != "W" else []
        waits = tuple(action.name for action in loss)
        if kind == "I":
            inputs = [self._inputs(block_call, microbatch, waits) for block_call in reversed(block_calls)]
            return [*loss, *inputs]
        return [
            *loss,
            *(self._backward(block_call, microbatch, kind, waits) for block_call in reversed(block_calls)),
        ]

    def _step(self, stage_calls: StageCalls) -> list[Action]:
        last = Action("B", stage_calls.block_calls[0], stage_calls.microbatch).name
        square = Action("LOCAL_NORM", GRAD_NORM, stage_calls.microbatch, waits=(last,))
        names = tuple(param.name for param in self._view.model_spec.trainable)
        frees = tuple(
            grad_name(group) for group in self._view.param_groups if group.name in self._groups_with_grads
        )
        self._groups_with_grads.clear()
        step = Action(
            "STEP",
            microbatch=stage_calls.microbatch,
            waits=(square.name, "TOKEN_COUNT()"),
            tensors=names,
            frees=frees,
        )
        return [square, step]

    def _forward(self, block_call: str, microbatch: int) -> Action:
        memory = self._memory[block_call]
        allocations = [Allocation(output_name(block_call, microbatch), memory.output_nbytes)]
        allocations += (
            [Allocation(saved_activations_name(block_call, microbatch), memory.saved_nbytes)]
            if self._view.model_spec.saved_numel
            else []
        )
        frees, self.scratch_in_use = self.scratch_in_use, ()
        return Action(
            "F",
            block_call,
            microbatch,
            flops=self._shares[block_call].flops * self._micro_batch,
            allocations=tuple(allocations),
            frees=frees,
        )

    def _loss(self, microbatch: int) -> Action:
        view = self._view
        model_spec = self._view.model_spec
        itemsize = FLOAT_NBYTES[self._job.precision.compute]
        last = model_spec.block_calls[-1]
        waits = f"F({last}, {microbatch})", "TOKEN_COUNT()"
        if self._chunked_loss is not None:
            allocations = (
                Allocation(loss_grad_name(last, microbatch), self._chunked_loss.output_grad_nbytes),
                Allocation(SCRATCH, self._chunked_loss.scratch_nbytes),
            )
            frees, self.scratch_in_use = self.scratch_in_use, (SCRATCH,)
            fields = {
                "waits": waits,
                "tensors": self._chunked_loss.param_names,
                "flops": self._chunked_loss.flops,
                "allocations": allocations,
                "frees": frees,
            }
            return Action("LOSS", microbatch=microbatch, **fields)
        logits = self._shares[last].output_numel * self._micro_batch
        saved_numel = (
            min(logits, MAX_CHUNK_NUMEL)
            if view.plan.logits_layout.axes_with("S")
            else model_spec.loss_saved_numel * self._micro_batch
        )
        scratch = loss_scratch_nbytes(
            view, self._job, saved_numel if model_spec.loss_saved_numel else 0, self._micro_batch
        )
        allocations = [
            Allocation(loss_grad_name(last, microbatch), logits * itemsize),
            Allocation(SCRATCH, scratch),
        ]
        frees, self.scratch_in_use = self.scratch_in_use, (SCRATCH,)
        return Action("LOSS", microbatch=microbatch, waits=waits, allocations=tuple(allocations), frees=frees)

    def _inputs(self, block_call: str, microbatch: int, waits: tuple[str, ...]) -> Action:
        share = self._shares[block_call]
        itemsize = FLOAT_NBYTES[self._job.precision.compute]
        num_samples = self._micro_batch
        # Then it is the gradient that LOSS returned.
        last = self._view.computes_loss and block_call == self._view.model_spec.block_calls[-1]
        allocations = (
            ()
            if last
            else (
                Allocation(
                    deferred_grad_name(block_call, microbatch),
                    share.deferred_grad_numel * num_samples * itemsize,
                ),
            )
        )
        frees, self.scratch_in_use = self.scratch_in_use, ()
        waits = (f"F({block_call}, {microbatch})", *waits)
        flops = (2 * share.flops - share.weight_grad_flops) * num_samples
        return Action(
            "I", block_call, microbatch, waits=waits, flops=flops, allocations=allocations, frees=frees
        )

    def _backward(
        self, block_call: str, microbatch: int, kind: Literal["B", "W"], waits: tuple[str, ...]
    ) -> Action:
        model_spec, itemsize = self._view.model_spec, FLOAT_NBYTES[self._job.precision.parameters]
        groups = self._groups_of[block_call]
        # gradients that go into shards are packed after each backward, or accumulated there
        # LOSS has accumulated these.
        loss_params = () if self._chunked_loss is None else self._chunked_loss.param_names
        accumulating = (
            each
            for each in groups
            if each.name in self._groups_with_grads and not each.param_shardings[0].flat_shard_axes
        )
        accumulated_numels = [
            param.numel for each in accumulating for param in each.params if param.name not in loss_params
        ]
        new_groups = {
            each.name: each
            for each in (*groups, *self._groups_of[ROOT])
            if each.name not in self._groups_with_grads
        }
        self._groups_with_grads |= new_groups.keys()
        new_nbytes = sum(group.numel for group in new_groups.values()) * itemsize
        allocations = [
            Allocation(
                SCRATCH,
                self._memory[block_call].scratch_nbytes(
                    max(accumulated_numels, default=0) * itemsize, new_nbytes
                ),
            )
        ]
        allocations += [Allocation(grad_name(group), group.numel * itemsize) for group in new_groups.values()]
        frees = [
            output_name(block_call, microbatch),
            *([saved_activations_name(block_call, microbatch)] if model_spec.saved_numel else []),
        ]
        if self._view.computes_loss and block_call == model_spec.block_calls[-1]:
            frees.append(loss_grad_name(block_call, microbatch))
        elif kind == "W":
            frees.append(deferred_grad_name(block_call, microbatch))
        frees, self.scratch_in_use = (*frees, *self.scratch_in_use), (SCRATCH,)
        share, num_samples = self._shares[block_call], self._micro_batch
        if kind == "W":
            flops = share.weight_grad_flops * num_samples
            return Action(
                "W",
                block_call,
                microbatch,
                waits=(f"I({block_call}, {microbatch})",),
                flops=flops,
                allocations=tuple(allocations),
                frees=frees,
            )
        waits = (f"F({block_call}, {microbatch})", *waits)
        return Action(
            "B",
            block_call,
            microbatch,
            waits=waits,
            flops=2 * share.flops * num_samples,
            allocations=tuple(allocations),
            frees=frees,
        )
