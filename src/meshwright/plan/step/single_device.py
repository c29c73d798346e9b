"""The step of one device, before any technique: the list that strategies rewrite.

    TOKEN_COUNT   how many tokens of this step count towards the loss (all micro-batches)
    F       forward of one visit                      LOSS    loss of one micro-batch and its gradient
    B       backward of one visit, in reverse         LOSS_SUM   the loss of the whole step
    I       the half of a backward for what went in   W       the half for the weights, any time later
    CLIP    gradient norm of the logical parameters, and clipping by it; where ranks step different elements, before it
    LOCAL_NORM  the sum of squares of what this rank is the first to step      GLOBAL_NORM   the sum of those over the ranks
    STEP    the optimizer; gradients are gone afterwards

A rank may step more than once: then the turns say behind which backwards, with the gradient of that micro-batch alone, over what
counts in it. LOCAL_NORM stands before each such STEP, nobody clips, and GLOBAL_NORM adds up the squares of all of them.

Where the loss needs the rows of several ranks, GATHER (rows of one output or target, from all ranks) stands before it.
Strategies may add PACK (gradients of a bucket into one contiguous buffer) and UNPACK (out of a buffer of another dtype). Where
the job asks for the noise of the gradient, `core.noise` adds what measures it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ROOT
from meshwright.plan.sharding.param_sharding import ParamGroup
from meshwright.plan.sharding.rank_share import block_shares
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.action import Action, Allocation, Program, Transfer, with_waits
from meshwright.plan.step.activation_memory import activation_memory, loss_scratch_nbytes
from meshwright.plan.step.chunked_loss import MAX_CHUNK_NUMEL, chunked_loss_cost

FIRST_ROLE = "pp0"
CHECKPOINTED_FORWARD = "F_CHECKPOINTED"
FORWARD_KINDS = ("F", CHECKPOINTED_FORWARD)  # kinds that the model's own forward reaches, block by block
INPUT_GRAD_KINDS = ("B", "I")  # kinds that give the gradient of what a visit took in
WEIGHT_GRAD_KINDS = (
    "B",
    "W",
)  # kinds that leave the gradients of a visit's weights, and let go of what its forward kept
PARAM_USE_KINDS = (*FORWARD_KINDS, "RECOMPUTE", "B", "I", "W")  # kinds that need the weights of their block
BATCH_INFO = "batch_info"  # the subject of the GATHER that tells how many rows each rank has, and sums of what is the same on all
COUNT_NBYTES = 32  # weight, wishes to stop, rows, tokens: float64
STEP_TOTAL_NBYTES = {
    "TOKEN_COUNT": COUNT_NBYTES,
    "LOSS_SUM": 8,
}  # numbers of a step that ranks add up, and their bytes: float64
SCRATCH = "scratch"  # what LOSS and each B hold for themselves alone: what the loss keeps, a gradient until it is added to another
GRAD_NORM = "norm"  # the subject of the BROADCAST of the gradient norm


class StageCalls(NamedTuple):
    """A run of visits, forward or backward, for one micro-batch. Backwards go through `visits` in reverse.

    "I" and "W" are the halves of a backward. "STEP" is a step with what the backwards of that micro-batch have left. Without any,
    all of them make one step together.
    """

    kind: Literal["F", "B", "I", "W", "STEP"]
    block_calls: tuple[str, ...]
    microbatch: int


def sequential_stage_calls(block_calls: tuple[str, ...], num_microbatches: int) -> list[StageCalls]:
    """The turns of a rank that runs the whole model for one micro-batch after the other."""
    kinds: tuple[Literal["F", "B"], ...] = ("F", "B")
    return [StageCalls(kind, block_calls, micro) for micro in range(num_microbatches) for kind in kinds]


def single_device_program(
    sharding: ShardingPlan, job: Job, micro_batch: int, stage_calls: Sequence[StageCalls]
) -> Program:
    """The program of a rank that trains alone, on micro-batches of `micro_batch` samples, in these turns."""
    parts = _StageCallActions(sharding, job, micro_batch)
    actions = [Action("TOKEN_COUNT"), *(action for turn in stage_calls for action in parts.actions(turn))]
    losses = tuple(action.name for action in actions if action.kind == "LOSS")
    last = actions[-1].name
    actions.append(Action("LOSS_SUM", waits=losses, frees=parts.scratch_in_use))
    if any(turn.kind == "STEP" for turn in stage_calls):
        return Program.from_dict({role_of(dict(sharding.coordinate)): [*actions, *_norm(sharding, last)]})
    names = tuple(weight.name for weight in sharding.model_spec.trainable)
    waits = (
        [last, "TOKEN_COUNT()"] if sharding.block_calls_by_pp_rank else [last]
    )  # not every backward follows a loss
    if sharding.grad_norm_axes:
        square = Action("LOCAL_NORM", GRAD_NORM, waits=(last,))
        actions += [square, *_norm(sharding, square.name)]
        waits += [action.name for action in actions[-2:]]
    actions.append(Action("CLIP", waits=tuple(waits), tensors=names))
    actions.append(
        Action("STEP", waits=("CLIP()",), tensors=names, frees=tuple(map(grad_name, sharding.param_groups())))
    )
    return Program.from_dict({role_of(dict(sharding.coordinate)): actions})


def _norm(sharding: ShardingPlan, last: str) -> list[Action]:
    """GLOBAL_NORM, behind the `last` action that has to do with gradients; none where every rank knows all of them."""
    if not sharding.grad_norm_axes:
        return []
    total = Transfer("all_reduce", sharding.grad_norm_axes, 8, dtype="float64")
    return [Action("GLOBAL_NORM", GRAD_NORM, stream="comm", waits=(last,), transfer=total)]


def role_of(coordinate: Mapping[str, int]) -> str:
    """Whose list the ranks at `coordinate` play."""
    return f"pp{coordinate.get('pp', 0)}"


def samples_per_microbatch(actions: Iterable[Action], sharding: ShardingPlan, job: Job) -> int:
    """The samples of a micro-batch of a rank that plays `actions`."""
    micros = {action.microbatch for action in actions if action.kind in WEIGHT_GRAD_KINDS}
    return job.train.batch // sharding.mesh.group_size(sharding.data_axes) // len(micros)


def reads_summed_grads(action: Action) -> bool:
    """Whether `action` looks at the summed gradients of all weights: all sums stand before the first that does."""
    return action.kind in ("LOCAL_NORM", "CLIP")


def stepped_microbatches(actions: Iterable[Action]) -> tuple[int, ...]:
    """The micro-batches with whose gradients alone a rank steps, in that order; none where it steps once, with those of all."""
    return tuple(
        action.microbatch for action in actions if action.kind == "STEP" and action.microbatch is not None
    )


def first_grad_reader(actions: Sequence[Action], microbatch: int | None = None) -> int:
    """Where the first action stands that looks at all summed gradients: of one micro-batch, where that is stepped with alone."""
    return next(
        i
        for i, action in enumerate(actions)
        if reads_summed_grads(action) and action.microbatch == microbatch
    )


def with_grad_waits(
    actions: Iterable[Action], names: Iterable[str], microbatch: int | None = None
) -> list[Action]:
    """`actions`, of which those that look at all summed gradients (of one micro-batch, likewise) wait for `names` too."""
    names = tuple(names)
    return [
        with_waits(action, names)
        if reads_summed_grads(action) and action.microbatch == microbatch
        else action
        for action in actions
    ]


def reduce_totals_along(
    program: Program, axis: str, kinds: Iterable[str] = tuple(STEP_TOTAL_NBYTES)
) -> Program:
    """`program` with these numbers of a step, of TOTALS, added up along `axis` too; once, whoever else asks for it."""

    def along(action: Action) -> Action:
        if action.kind not in kinds:
            return action
        before = action.transfer.axes if action.transfer else ()
        axes = before if axis in before else (*before, axis)
        return replace(
            action,
            stream="comm",
            transfer=Transfer("all_reduce", axes, STEP_TOTAL_NBYTES[action.kind], dtype="float64"),
        )

    return program.edit(lambda actions: [along(action) for action in actions])


def grad_name(param_group: ParamGroup) -> str:
    """The name under which the gradients of `bundle` are held."""
    return f"gradient({param_group.name})"


def output_grad_name(name: str) -> str:
    """The name under which the gradient of one of the model's outputs travels."""
    return f"gradient({name})"


def output_name(block_call: str, microbatch: int) -> str:
    """The name under which what a visit hands on is held from its F to its B."""
    return f"output({block_call}, {microbatch})"


def loss_grad_name(block_call: str, microbatch: int) -> str:
    """The name under which the gradient of what a visit has handed to the loss is held from there to its B."""
    return f"output gradient({block_call}, {microbatch})"


def deferred_grad_name(block_call: str, microbatch: int) -> str:
    """The name under which the gradients are held, from I to W, that the weights of a visit still need."""
    return f"deferred gradient({block_call}, {microbatch})"


def saved_activations_name(block_call: str, microbatch: int | None) -> str:
    """The name under which what a visit computes within, and its backward needs, is held until then."""
    return f"saved activations({block_call}, {microbatch})"


class _StageCallActions:
    """The actions of one turn after the other. `left` names the scratch that the last one has not freed."""

    def __init__(self, sharding: ShardingPlan, job: Job, micro_batch: int) -> None:
        self._space, self._job, self._micro_batch = sharding, job, micro_batch
        self._mine, self._pieces = block_shares(sharding), chunked_loss_cost(sharding, job, micro_batch)
        self._taken = activation_memory(sharding, job, micro_batch)
        self._using: dict[str, list[ParamGroup]] = {
            visit: [] for visit in (*sharding.model_spec.block_calls, ROOT)
        }
        for bundle in sharding.param_groups():
            for visit in bundle.block_calls:
                self._using[visit].append(bundle)
        self._there: set[str] = set()  # the bundles that have gradients
        self.scratch_in_use: tuple[str, ...] = ()

    def actions(self, stage_calls: StageCalls) -> list[Action]:
        """The actions of `turn`; the loss, where it belongs to it, stands before the backward."""
        if stage_calls.kind == "F":
            return [self._forward(visit, stage_calls.microbatch) for visit in stage_calls.block_calls]
        if stage_calls.kind == "STEP":
            return self._step(stage_calls)
        if stage_calls.kind == "W":
            return [
                self._backward(visit, stage_calls.microbatch, "W", ())
                for visit in reversed(stage_calls.block_calls)
            ]
        ends = self._space.computes_loss and self._space.model_spec.block_calls[-1] in stage_calls.block_calls
        loss = [self._loss(stage_calls.microbatch)] if ends else []
        waits = tuple(action.name for action in loss)
        if stage_calls.kind == "I":
            return [
                *loss,
                *(
                    self._inputs(visit, stage_calls.microbatch, waits)
                    for visit in reversed(stage_calls.block_calls)
                ),
            ]
        return [
            *loss,
            *(
                self._backward(visit, stage_calls.microbatch, "B", waits)
                for visit in reversed(stage_calls.block_calls)
            ),
        ]

    def _step(self, stage_calls: StageCalls) -> list[Action]:
        """The step with what one micro-batch has left; the next one's backward makes gradients anew."""
        last = Action("B", stage_calls.block_calls[0], stage_calls.microbatch).name
        square = Action("LOCAL_NORM", GRAD_NORM, stage_calls.microbatch, waits=(last,))
        names = tuple(weight.name for weight in self._space.model_spec.trainable)
        frees = tuple(
            grad_name(bundle) for bundle in self._space.param_groups() if bundle.name in self._there
        )
        self._there.clear()
        step = Action(
            "STEP",
            microbatch=stage_calls.microbatch,
            waits=(square.name, "TOKEN_COUNT()"),
            tensors=names,
            frees=frees,
        )
        return [square, step]

    def _forward(self, block_call: str, microbatch: int) -> Action:
        mine = self._taken[block_call]
        held = [Allocation(output_name(block_call, microbatch), mine.output_nbytes)]
        held += (
            [Allocation(saved_activations_name(block_call, microbatch), mine.saved_nbytes)]
            if self._space.model_spec.saved_numel
            else []
        )
        frees, self.scratch_in_use = self.scratch_in_use, ()
        return Action(
            "F",
            block_call,
            microbatch,
            flops=self._mine[block_call].flops * self._micro_batch,
            allocations=tuple(held),
            frees=frees,
        )

    def _loss(self, microbatch: int) -> Action:
        space, anatomy, width = self._space, self._space.model_spec, FLOAT_NBYTES[self._job.precision.compute]
        last = anatomy.block_calls[-1]
        waits = f"F({last}, {microbatch})", "TOKEN_COUNT()"
        if self._pieces is not None:
            held = (
                Allocation(loss_grad_name(last, microbatch), self._pieces.output_grad_nbytes),
                Allocation(SCRATCH, self._pieces.scratch_nbytes),
            )
            frees, self.scratch_in_use = self.scratch_in_use, (SCRATCH,)
            how = {
                "waits": waits,
                "tensors": self._pieces.param_names,
                "flops": self._pieces.flops,
                "allocations": held,
                "frees": frees,
            }
            return Action("LOSS", microbatch=microbatch, **how)
        logits = self._mine[last].output_numel * self._micro_batch
        kept = (
            min(logits, MAX_CHUNK_NUMEL)
            if space.logits_layout.axes_with("S")
            else anatomy.loss_saved_numel * self._micro_batch
        )
        scratch = loss_scratch_nbytes(
            space, self._job, kept if anatomy.loss_saved_numel else 0, self._micro_batch
        )
        takes = [Allocation(loss_grad_name(last, microbatch), logits * width), Allocation(SCRATCH, scratch)]
        frees, self.scratch_in_use = self.scratch_in_use, (SCRATCH,)
        return Action("LOSS", microbatch=microbatch, waits=waits, allocations=tuple(takes), frees=frees)

    def _inputs(self, block_call: str, microbatch: int, waits: tuple[str, ...]) -> Action:
        """The first half of a backward. What the forward kept stays until the second, and what comes to the weights with it."""
        share, width, rows = (
            self._mine[block_call],
            FLOAT_NBYTES[self._job.precision.compute],
            self._micro_batch,
        )
        last = (
            self._space.computes_loss and block_call == self._space.model_spec.block_calls[-1]
        )  # then it is what the loss gave back
        held = (
            ()
            if last
            else (
                Allocation(
                    deferred_grad_name(block_call, microbatch), share.deferred_grad_numel * rows * width
                ),
            )
        )
        frees, self.scratch_in_use = self.scratch_in_use, ()
        waits = (f"F({block_call}, {microbatch})", *waits)
        flops = (2 * share.flops - share.weight_grad_flops) * rows
        return Action("I", block_call, microbatch, waits=waits, flops=flops, allocations=held, frees=frees)

    def _backward(
        self, block_call: str, microbatch: int, kind: Literal["B", "W"], waits: tuple[str, ...]
    ) -> Action:
        anatomy, width = self._space.model_spec, FLOAT_NBYTES[self._job.precision.parameters]
        using = self._using[block_call]
        # gradients that go into shards are packed after each backward, or are added up there
        later = () if self._pieces is None else self._pieces.param_names  # LOSS has done these
        summed = (
            each for each in using if each.name in self._there and not each.param_shardings[0].flat_shard_axes
        )
        added = [weight.numel for each in summed for weight in each.params if weight.name not in later]
        new = {each.name: each for each in (*using, *self._using[ROOT]) if each.name not in self._there}
        self._there |= new.keys()
        fresh = sum(bundle.numel for bundle in new.values()) * width
        held = [
            Allocation(SCRATCH, self._taken[block_call].scratch_nbytes(max(added, default=0) * width, fresh))
        ]
        held += [Allocation(grad_name(bundle), bundle.numel * width) for bundle in new.values()]
        frees = [
            output_name(block_call, microbatch),
            *([saved_activations_name(block_call, microbatch)] if anatomy.saved_numel else []),
        ]
        if self._space.computes_loss and block_call == anatomy.block_calls[-1]:
            frees.append(loss_grad_name(block_call, microbatch))
        elif kind == "W":
            frees.append(deferred_grad_name(block_call, microbatch))
        frees, self.scratch_in_use = (*frees, *self.scratch_in_use), (SCRATCH,)
        share, rows = self._mine[block_call], self._micro_batch
        if kind == "W":
            flops = share.weight_grad_flops * rows
            return Action(
                "W",
                block_call,
                microbatch,
                waits=(f"I({block_call}, {microbatch})",),
                flops=flops,
                allocations=tuple(held),
                frees=frees,
            )
        waits = (f"F({block_call}, {microbatch})", *waits)
        return Action(
            "B",
            block_call,
            microbatch,
            waits=waits,
            flops=2 * share.flops * rows,
            allocations=tuple(held),
            frees=frees,
        )


def last_backward(actions: Sequence[Action]) -> Action:
    """The last action that leaves gradients of weights: behind it all are there."""
    return next(action for action in reversed(actions) if action.kind in WEIGHT_GRAD_KINDS)


def contributing_calls(param_group: ParamGroup, block_calls: tuple[str, ...]) -> frozenset[str]:
    """The visits whose backwards add to the gradients of `bundle`: all of `visits` where glue uses one of its weights."""
    found = frozenset(visit for weight in param_group.params for visit in weight.block_calls)
    return frozenset(block_calls) if ROOT in found else found


def completing_backwards(
    actions: Sequence[Action],
    param_group: ParamGroup,
    block_calls: tuple[str, ...],
    microbatch: int | None = None,
) -> list[int]:
    """Where the backwards stand that complete the gradients of `bundle`, one per micro-batch, in the order of the list.

    Where one micro-batch is stepped with `alone`, its own.
    """
    return BackwardIndex(actions).completing(param_group, block_calls, microbatch)


class BackwardIndex:
    """Where the completing backwards of every visit stand in a list: looked for once, whatever the number of bundles."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions, self._at = actions, dict[str, list[int]]()
        for i, action in enumerate(actions):
            if action.kind in WEIGHT_GRAD_KINDS:
                self._at.setdefault(action.subject, []).append(i)

    def completing(
        self, param_group: ParamGroup, block_calls: tuple[str, ...], microbatch: int | None = None
    ) -> list[int]:
        """As `backwards` has them."""
        found = sorted(
            i for visit in contributing_calls(param_group, block_calls) for i in self._at.get(visit, ())
        )
        micros = ((self._actions[i].microbatch, i) for i in found)
        return sorted({micro: i for micro, i in micros if microbatch in (None, micro)}.values())
