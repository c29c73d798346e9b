"""Rewrites a program so that runs of block calls, segments, drop their activations and are run again.

    before    F0   F1               F2               F3   LOSS   B3
    after     F0   F_CHECKPOINTED1  F_INPUT_DROPPED2  F3   LOSS   B3
    holds     x0   x1 (its input)   x2 only until it ends

    before    B2                                     B1                B0
    after     RECOMPUTE_OUTPUT1   RECOMPUTE2   B2    RECOMPUTE1   B1   B0

    F_CHECKPOINTED     the forward of a block that keeps its inputs alone
    F_INPUT_DROPPED    the same, behind which the output of the block call before it is freed
    RECOMPUTE          the forward of a checkpointed block call, run again before its backward
    RECOMPUTE_OUTPUT   the same for its output alone, which the next block call takes

Before the backward of a segment all its block calls but the last run again in order, each giving the next one
its input. One that ran for its output alone runs once more, right before its backward.

A segment of one block call is activation checkpointing as everybody knows it: it runs once more, from its own
input.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.plan.job.errors import PlanError
from meshwright.plan.step.memory.memory_names import output_name
from meshwright.plan.step.program import Action, Allocation, with_waits
from meshwright.plan.step.single_device_program import (
    CHECKPOINTED_KINDS,
    FORWARD_KINDS,
    INPUT_DROPPED_FORWARD,
    INPUT_GRAD_KINDS,
    RECOMPUTE_KINDS,
)

CallKey = tuple[str, int | None]  # a block call, and the microbatch


@dataclass(frozen=True)
class RecomputedSegment:
    """Block calls in a row that are run again from the input of the first one.

    Of those in `saved_in_rerun`, never the last, the first rerun saves what the backward needs; the others
    run a third time.
    """

    block_calls: tuple[str, ...]
    saved_in_rerun: frozenset[str] = frozenset()


def recompute_segments(actions: Sequence[Action], segments: Iterable[RecomputedSegment]) -> list[Action]:
    """Returns `actions` with the block calls of `segments` run again before their backwards.

    Raises PlanError if some run again already.
    """
    check_nothing_recomputed(actions)
    segment_of = {block_call: segment for segment in segments for block_call in segment.block_calls}
    forwards, renamed, edited = dict[CallKey, Action](), dict[str, str](), list[Action]()
    for action in actions:
        action = replace(action, waits=tuple(renamed.get(wait, wait) for wait in action.waits))
        segment = segment_of.get(action.subject)
        if segment is not None and action.kind == "F":
            forwards[action.subject, action.microbatch] = action
            forward = _checkpointed(action, segment)
            renamed[action.name] = forward.name
            action = forward
        elif segment is not None and action.kind in INPUT_GRAD_KINDS:
            reruns = list(_reruns(action, segment, forwards, renamed))
            edited += reruns
            action = with_waits(action, [reruns[-1].name] if reruns else [])
        edited.append(action)
    return edited


def check_nothing_recomputed(actions: Iterable[Action]) -> None:
    """Raises PlanError if a block call runs again."""
    if any(action.kind in RECOMPUTE_KINDS for action in actions):
        text = "activation_checkpointing and memory_budget both decide which block calls run again"
        raise PlanError(text, fix="keep one of them", location="strategies")


def refuse_dropped_inputs(actions: Iterable[Action], strategy: str) -> None:
    """Raises PlanError, at the place of `strategy`, if block calls start again from inputs of others."""
    dropped = next((action for action in actions if action.kind == INPUT_DROPPED_FORWARD), None)
    if dropped is not None:
        text = (
            f"'{dropped.subject}' starts again from the input of another block (memory_budget), so it keeps "
        )
        text += f"no input that {strategy} could take"
        fix = f'set choices = ["recompute"] in memory_budget, or remove {strategy}'
        raise PlanError(text, fix=fix, location=f"strategies.{strategy}")


def _checkpointed(forward: Action, segment: RecomputedSegment) -> Action:
    """Returns `forward` as the first run of a block call of `segment`."""
    outputs, _ = _output_and_saved(forward)
    at = segment.block_calls.index(forward.subject)
    if at == 0:
        return replace(forward, kind="F_CHECKPOINTED", allocations=outputs)
    dropped = output_name(segment.block_calls[at - 1], forward.microbatch or 0)
    frees = (*forward.frees, dropped)
    return replace(forward, kind="F_INPUT_DROPPED", allocations=outputs, frees=frees)


def _reruns(
    backward: Action, segment: RecomputedSegment, forwards: dict[CallKey, Action], renamed: dict[str, str]
) -> Iterator[Action]:
    """Yields the reruns right before `backward` of a block call of `segment`."""
    last, microbatch = segment.block_calls[-1], backward.microbatch
    before = ""
    for block_call in segment.block_calls[:-1] if backward.subject == last else ():
        kind = "RECOMPUTE" if block_call in segment.saved_in_rerun else "RECOMPUTE_OUTPUT"
        rerun = _rerun(forwards[block_call, microbatch], kind, renamed, before)
        outputs, saved = _output_and_saved(forwards[block_call, microbatch])
        yield replace(rerun, allocations=(*outputs, *saved) if kind == "RECOMPUTE" else outputs)
        before = rerun.name
    if backward.subject not in segment.saved_in_rerun:
        forward = forwards[backward.subject, microbatch]
        yield replace(
            _rerun(forward, "RECOMPUTE", renamed, before), allocations=_output_and_saved(forward)[1]
        )


def _rerun(forward: Action, kind: str, renamed: dict[str, str], before: str) -> Action:
    """Returns the rerun of `forward`: it waits for the first run, and for the rerun `before`, if any."""
    return Action(
        kind,
        forward.subject,
        forward.microbatch,
        waits=(renamed[forward.name], *([before] if before else [])),
        flops=forward.flops,
        inner_transfers=tuple(move for move in forward.inner_transfers if not move.in_glue),
    )


def _output_and_saved(forward: Action) -> tuple[tuple[Allocation, ...], tuple[Allocation, ...]]:
    """Returns the allocations of `forward` for its output, and those for what its backward needs."""
    name = output_name(forward.subject, forward.microbatch or 0)
    outputs = tuple(each for each in forward.allocations if each.name == name)
    return outputs, tuple(each for each in forward.allocations if each.name != name)


def recomputation_conflicts(actions: Sequence[Action]) -> Iterator[str]:
    """Yields checkpointed block calls that are not run again before their backward, and dropped inputs that
    are not made again before they are needed.
    """
    checkpointed, producers, last_forward = (
        set[CallKey](),
        dict[CallKey, Action](),
        dict[int | None, Action](),
    )
    checkpointed, rerun, recomputed = (set[CallKey]() for _ in range(3))
    for action in actions:
        key = action.subject, action.microbatch
        if action.kind in FORWARD_KINDS:
            if action.kind in CHECKPOINTED_KINDS:
                checkpointed.add(key)
            if action.kind == INPUT_DROPPED_FORWARD and action.microbatch in last_forward:
                producers[key] = last_forward[action.microbatch]
            last_forward[action.microbatch] = action
        elif action.kind in RECOMPUTE_KINDS:
            if key not in checkpointed:
                yield f"{action.name} recomputes a forward that is not checkpointed, or that does not exist"
            producer = producers.get(key)
            if producer is not None and (producer.subject, action.microbatch) not in rerun:
                yield f"{action.name} needs what {producer.name} returned: it is dropped, and not made again"
            rerun.add(key)
            recomputed |= {key} if action.kind == "RECOMPUTE" else set()
        elif action.kind in INPUT_GRAD_KINDS and key in checkpointed - recomputed:
            forward = Action("F_CHECKPOINTED", *key).name
            yield f"{forward} is checkpointed, and no RECOMPUTE is between it and its backward"
