"""Where a step measures how noisy its gradient is: three kinds of action, added behind all strategies' own.

    GRAD_SQNORM   squared norm of a gradient before other parts of the batch are added to it
    REDUCE_SQNORM     those norms, and the share of the batch behind them, added up over the ranks
    NOISE_SCALE  the gradient noise scale, from these small gradients and the norm of the whole one

A part of the batch is what one rank accumulates; on one data rank, which has nobody to compare itself with, it is the first
micro-batch. `engine.noise` has the formulas. The list of a rank, with other ranks and alone:

    B1 PACK(1)  GRAD_SQNORM(0) REDUCE(0)  B0 PACK(0)  GRAD_SQNORM(1) REDUCE(1)  LOSS_SUM  REDUCE_SQNORM(all-reduce)  CLIP STEP  NOISE_SCALE
    F0 F1 LOSS B1 B0  GRAD_SQNORM  F0 F1 LOSS B1 B0                         LOSS_SUM  REDUCE_SQNORM              CLIP STEP  NOISE_SCALE

Where PACK takes the gradients of a backward away, to be scattered, they are measured before it. If each micro-batch's are, each
is a part of its own; what was scattered is not measured again when it is added up further. Ranks that have slices of the same
weights, or other layers, have the same part: its norm is added up over them, what all of them have counts once. A rank that goes
through several parts of the model measures each behind its first micro-batch.
Cost: one message of 24 bytes per rank and step, and one more reading of the gradients; nothing when it is off.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import ROOT
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.action import Action, Program, Transfer, index_of_last, with_waits
from meshwright.plan.step.single_device import WEIGHT_GRAD_KINDS

REDUCE_SQNORM_NBYTES = 24  # three numbers in float64: squared norms, shares of the batch, parts
LOCATION = "train.noise_scale"
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")


def noise_scale_diagnostics(job: Job, sharding: ShardingPlan, micro_batch: int) -> Iterator[Diagnostic]:
    """Why the noise of the gradient cannot be measured, where the job asks for it."""
    if not job.train.noise_scale:
        return
    num_data, batch = sharding.mesh.group_size(sharding.data_axes), job.train.batch
    if sharding.primary_rank_axes:
        text = "one rank takes the loss and the gradients of the others' rows belong to it: no rank has a gradient of its own part"
        yield Diagnostic(text, 'use the strategy "ddp", or set train.noise_scale = false', LOCATION)
    elif sharding.mesh.group_size(sharding.token_axes) > 1:
        text = f"ranks along {' and '.join(sharding.token_axes)} have some of the tokens of a sample each"
        text += ": no rank has the gradient of a part of the batch"
        yield Diagnostic(text, "set train.noise_scale = false", LOCATION)
    elif sharding.model_spec.needs_global_batch:
        text = "the loss compares the rows of the whole batch, so the gradient of a part is not that of a smaller batch"
        yield Diagnostic(text, "set train.noise_scale = false", LOCATION)
    elif num_data == 1 and (not micro_batch or micro_batch >= batch):
        text = f"one data rank plays the {batch} samples of a step as one micro-batch: there is no smaller batch to compare with"
        fix = "set micro_batch to a divisor of train.batch below it, raise mesh.dp_replicate, or set train.noise_scale = false"
        yield Diagnostic(text, fix, LOCATION)
    shared = [
        home.param.name
        for home in sharding.param_shardings
        if home.param.trainable and len(sharding.pp_ranks_using(home.param)) > 1
    ]
    if shared and sharding.block_calls_by_pp_rank:
        text = f"{len(shared)} parameters ({shared[0]}...) are used by several parts of the model, and no rank has the gradient"
        yield Diagnostic(
            f"{text} of one part of the batch", "untie them, or set train.noise_scale = false", LOCATION
        )


def add_noise_scale_actions(program: Program, sharding: ShardingPlan) -> Program:
    """`program` with GRAD_SQNORM, REDUCE_SQNORM and NOISE_SCALE; `noise_faults` had nothing to say.

    Raises PlanError where some gradient is never that of the first micro-batch alone, and there is none of a rank.
    """
    axes = (*sharding.data_axes, *sharding.model_parallel_axes)
    total = (
        Transfer("all_reduce", axes, REDUCE_SQNORM_NBYTES, dtype="float64")
        if sharding.mesh.group_size(axes) > 1
        else None
    )
    if sharding.mesh.group_size(sharding.data_axes) > 1:
        return program.edit(lambda actions: _ended(_before_sums(actions, sharding.data_axes), total))
    return program.edit(lambda actions: _ended(_behind_first(actions, sharding), total))


def _before_sums(actions: list[Action], axes: tuple[str, ...]) -> list[Action]:
    """`actions` with a GRAD_SQNORM before each that adds up gradients over `axes`, or before the PACK that takes them away for it."""
    found: list[Action] = []
    scattered: set[tuple[str, ...]] = set()
    for action in actions:
        sums = (
            action.transfer is not None
            and action.transfer.collective in REDUCTIONS
            and set(axes) & set(action.transfer.axes)
        )
        scatters = action.transfer is not None and action.transfer.collective == "reduce_scatter"
        if action.tensors and sums and (scatters or action.tensors not in scattered):
            at = _packed(found, action) if scatters else len(found)
            waits = action.waits if at == len(found) else found[at].waits
            measure = Action(
                "GRAD_SQNORM", action.subject, action.microbatch, waits=waits, tensors=action.tensors
            )
            found.insert(at, measure)
            action = with_waits(action, (measure.name,))
        found.append(action)
        if scatters:
            scattered.add(action.tensors)
    return found


def _packed(actions: Sequence[Action], reduce: Action) -> int:
    """Where the PACK of what `reduce` sums stands, if no backward has added to it since; else behind all `actions`."""
    for at in range(len(actions) - 1, -1, -1):
        action = actions[at]
        if action.kind in WEIGHT_GRAD_KINDS:
            break
        if action.kind == "PACK" and (action.tensors, action.microbatch) == (
            reduce.tensors,
            reduce.microbatch,
        ):
            return at
    return len(actions)


def _behind_first(actions: list[Action], sharding: ShardingPlan) -> list[Action]:
    """`actions` with a GRAD_SQNORM of gradients behind the backwards of the first micro-batch that complete them.

    One for all, unless another micro-batch's backward comes between: then one for each visit that completes some.
    """
    ends = [i for i, action in enumerate(actions) if action.kind in WEIGHT_GRAD_KINDS]
    behind: dict[int, list[str]] = {}
    for weight in sharding.model_spec.trainable:
        using = [i for i in ends if ROOT in weight.block_calls or actions[i].subject in weight.block_calls]
        at = max((i for i in using if actions[i].microbatch == 0), default=-1)
        others = [actions[i].name for i in using if actions[i].microbatch != 0 and i < at]
        if others or at < 0:
            why = f"{others[0]} comes before {actions[at].name}" if others else "this rank does not run it"
            text = f"the gradient of '{weight.name}' is never that of the first micro-batch alone: {why}"
            fix = 'choose schedule = "1f1b", raise mesh.dp_replicate, or set train.noise_scale = false'
            raise PlanError(text, fix=fix, location=LOCATION)
        behind.setdefault(at, []).append(weight.name)
    if behind and not any(actions[i].microbatch for i in ends if i < max(behind)):
        tensors = next(action.tensors for action in actions if action.kind == "CLIP")
        behind = {max(behind): list(tensors)}
    found = list[Action]()
    for i, action in enumerate(actions):
        found.append(action)
        if i in behind:
            subject = action.subject if len(behind) > 1 else ""
            found.append(Action("GRAD_SQNORM", subject, waits=(action.name,), tensors=tuple(behind[i])))
    return found


def _ended(actions: list[Action], total: Transfer | None) -> list[Action]:
    """`actions` with REDUCE_SQNORM before CLIP, and NOISE_SCALE behind STEP, which says whether the step counts."""
    measures = tuple(action.name for action in actions if action.kind == "GRAD_SQNORM")
    noise = Action("REDUCE_SQNORM", waits=measures)
    if total is not None:
        noise = replace(noise, stream="comm", transfer=total)
    clip, step = index_of_last(actions, "CLIP") or 0, index_of_last(actions, "STEP") or 0
    estimate = Action("NOISE_SCALE", waits=(noise.name, actions[clip].name, actions[step].name))
    return [*actions[:clip], noise, *actions[clip : step + 1], estimate, *actions[step + 1 :]]
