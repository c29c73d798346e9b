"""Adds the actions that measure the gradient noise scale, after all strategies have edited the program.

    GRAD_SQNORM    squared norm of a gradient before other parts of the batch are added to it
    REDUCE_SQNORM  squared norms and batch fractions, summed over the ranks
    NOISE_SCALE    the gradient noise scale, from the sums of REDUCE_SQNORM and the norm of the full gradient

A part of the batch is what one rank accumulates; a single data rank, which has nothing to compare with, uses
the first microbatch. `engine.step.gradient_noise` has the formulas. The list of a rank, with other ranks and
alone:

    B1 PACK(1) GRAD_SQNORM(0) REDUCE(0) B0 PACK(0) ... LOSS_SUM REDUCE_SQNORM CLIP STEP NOISE_SCALE
    F0 F1 LOSS B1 B0 GRAD_SQNORM  F0 F1 LOSS B1 B0     LOSS_SUM REDUCE_SQNORM CLIP STEP NOISE_SCALE

Gradients that PACK takes away after a backward, to be scattered, are measured before it. If that happens for
every microbatch, each is a part of its own; a shard is not measured again when it is accumulated. Ranks with
slices of the same parameters, or with other layers, have the same part: its norm is summed over them,
replicated parameters count once. A rank with several stages measures each after its first microbatch. Cost:
one message of 24 bytes per rank and step, and one more pass over the gradients; nothing if it is off.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import ROOT
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.program import Action, Program, Transfer, index_of_last, with_waits
from meshwright.plan.step.single_device_program import WEIGHT_GRAD_KINDS

REDUCE_SQNORM_NBYTES = 24  # three float64: squared norms, fractions of the batch, parts
LOCATION = "train.noise_scale"
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")


def noise_scale_diagnostics(job: Job, sharding: ShardingPlan, micro_batch: int) -> Iterator[Diagnostic]:
    """Yields why the gradient noise cannot be measured, if the job asks for it."""
    if not job.train.noise_scale:
        return
    num_data, batch = sharding.num_data, job.train.batch
    if sharding.primary_rank_axes:
        text = (
            "one rank computes the loss for all others: no rank has a gradient of its own part of the batch"
        )
        yield Diagnostic(text, 'use the strategy "ddp", or set train.noise_scale = false', LOCATION)
    elif sharding.mesh.group_size(sharding.token_axes) > 1:
        text = f"ranks along {' and '.join(sharding.token_axes)} have different tokens of a sample"
        text += ": no rank has the gradient of a part of the batch"
        yield Diagnostic(text, "set train.noise_scale = false", LOCATION)
    elif sharding.model_spec.needs_global_batch:
        text = "the loss compares all samples: the gradient of a part is not that of a smaller batch"
        yield Diagnostic(text, "set train.noise_scale = false", LOCATION)
    elif num_data == 1 and (not micro_batch or micro_batch >= batch):
        text = f"one data rank runs the {batch} samples of a step as one microbatch"
        text += ": there is no smaller batch to compare with"
        fix = "set micro_batch to a smaller divisor of train.batch, raise mesh.dp_replicate,"
        fix += " or set train.noise_scale = false"
        yield Diagnostic(text, fix, LOCATION)
    shared = [
        param_sharding.param.name
        for param_sharding in sharding.param_shardings
        if param_sharding.param.trainable and len(sharding.pp_ranks_using(param_sharding.param)) > 1
    ]
    if shared and sharding.block_calls_by_pp_rank:
        text = f"{len(shared)} parameters ({shared[0]}...) are used by several stages"
        text += ", and no rank has the gradient"
        yield Diagnostic(
            f"{text} of one part of the batch", "untie them, or set train.noise_scale = false", LOCATION
        )


def add_noise_scale_actions(program: Program, view: RankView) -> Program:
    """Returns `program` with GRAD_SQNORM, REDUCE_SQNORM and NOISE_SCALE, if `noise_scale_diagnostics` yields
    nothing.

    Raises PlanError if some gradient is never that of the first microbatch alone, on a single data rank.
    """
    axes = (*view.plan.data_axes, *view.plan.model_parallel_axes)
    total = (
        Transfer("all_reduce", axes, REDUCE_SQNORM_NBYTES, dtype="float64")
        if view.plan.mesh.group_size(axes) > 1
        else None
    )
    if view.plan.num_data > 1:
        return program.edit(
            lambda actions: _with_estimate(_measure_before_reductions(actions, view.plan.data_axes), total)
        )
    return program.edit(lambda actions: _with_estimate(_measure_after_first_microbatch(actions, view), total))


def _measure_before_reductions(actions: list[Action], axes: tuple[str, ...]) -> list[Action]:
    edited: list[Action] = []
    scattered: set[tuple[str, ...]] = set()
    for action in actions:
        reduces = (
            action.transfer is not None
            and action.transfer.collective in REDUCTIONS
            and set(axes) & set(action.transfer.axes)
        )
        # to shards, or to the rank that owns them
        scatters = action.transfer is not None and action.transfer.collective in ("reduce_scatter", "reduce")
        if action.tensors and reduces and (scatters or action.tensors not in scattered):
            i = _index_of_pack(edited, action) if scatters else len(edited)
            waits = action.waits if i == len(edited) else edited[i].waits
            measure = Action(
                "GRAD_SQNORM", action.subject, action.microbatch, waits=waits, tensors=action.tensors
            )
            edited.insert(i, measure)
            action = with_waits(action, (measure.name,))
        edited.append(action)
        if scatters:
            scattered.add(action.tensors)
    return edited


def _index_of_pack(actions: Sequence[Action], reduce: Action) -> int:
    for i in range(len(actions) - 1, -1, -1):
        action = actions[i]
        if action.kind in WEIGHT_GRAD_KINDS:
            break
        if action.kind == "PACK" and (action.tensors, action.microbatch) == (
            reduce.tensors,
            reduce.microbatch,
        ):
            return i
    return len(actions)


def _measure_after_first_microbatch(actions: list[Action], view: RankView) -> list[Action]:
    backward_indices = [i for i, action in enumerate(actions) if action.kind in WEIGHT_GRAD_KINDS]
    params_after: dict[int, list[str]] = {}
    for param in view.model_spec.trainable:
        backwards = [
            i
            for i in backward_indices
            if ROOT in param.block_calls or actions[i].subject in param.block_calls
        ]
        at = max((i for i in backwards if actions[i].microbatch == 0), default=-1)
        others = [actions[i].name for i in backwards if actions[i].microbatch != 0 and i < at]
        if others or at < 0:
            why = f"{others[0]} comes before {actions[at].name}" if others else "this rank does not run it"
            text = f"the gradient of '{param.name}' is never that of the first microbatch alone: {why}"
            fix = 'choose schedule = "1f1b", raise mesh.dp_replicate, or set train.noise_scale = false'
            raise PlanError(text, fix=fix, location=LOCATION)
        params_after.setdefault(at, []).append(param.name)
    if params_after and not any(actions[i].microbatch for i in backward_indices if i < max(params_after)):
        tensors = next(action.tensors for action in actions if action.kind == "CLIP")
        params_after = {max(params_after): list(tensors)}
    edited = list[Action]()
    for i, action in enumerate(actions):
        edited.append(action)
        if i in params_after:
            subject = action.subject if len(params_after) > 1 else ""
            edited.append(
                Action("GRAD_SQNORM", subject, waits=(action.name,), tensors=tuple(params_after[i]))
            )
    return edited


def _with_estimate(actions: list[Action], total: Transfer | None) -> list[Action]:
    measures = tuple(action.name for action in actions if action.kind == "GRAD_SQNORM")
    noise = Action("REDUCE_SQNORM", waits=measures)
    if total is not None:
        noise = replace(noise, stream="comm", transfer=total)
    clip, step = index_of_last(actions, "CLIP") or 0, index_of_last(actions, "STEP") or 0
    estimate = Action("NOISE_SCALE", waits=(noise.name, actions[clip].name, actions[step].name))
    return [*actions[:clip], noise, *actions[clip : step + 1], estimate, *actions[step + 1 :]]
