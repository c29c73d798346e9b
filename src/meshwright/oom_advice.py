"""Advice after out-of-memory: what was planned, what was allocated, and which changes of the plan need less.

    planned   states to the byte, buffers, and activations as the memory trial found them
    live      what this rank had of them when it failed, and the whole process
    changes   in order of their cost in time: shards of optimizer states, and of gradients; a schedule with
              fewer microbatches in flight; half the microbatch; shards of the parameters; activation
              checkpointing; states and activations on the host, unless that is the memory of the device;
              sequence sharding over the data-parallel ranks

The first change below the limit is named, if there is a limit: the memory of the device, or what the system
grants the process. Memory that the plan does not know is assumed to shrink with the microbatch, and else to
stay.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import torch

from meshwright.device.device_memory import memory_limit, process_nbytes
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.analysis.plan_for_model import check_plan_for_model
from meshwright.parallel.context.context_parallel_strategy import CP_AXIS
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.memory.tiers.activation_offload import ActivationOffload
from meshwright.parallel.memory.tiers.offload import Offload
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.errors import CollectiveError, PlanError, format_nbytes
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.report.timeline.planned_vs_measured_bytes import planned_memory
from meshwright.run.launch.host_memory_check import check_ranks_fit_here

OOM_PATTERN = re.compile(
    r"out of memory|(can't|cannot|could not) allocate memory|not enough memory", re.IGNORECASE
)
REQUEST_PATTERN = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)
SIZE_UNITS = {"BYTES": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
MAX_SHOWN_CHANGES = 4  # changes shown in a message
LEANER_SCHEDULES = (
    "1f1b",
    "zb_v_half",
    "zb_v_min",
)  # schedules, each with fewer microbatches in flight and a larger bubble than the previous one


class OutOfMemory(RuntimeError):
    """A rank ran out of memory: what was planned, what was allocated, and which changes need less."""


@dataclass(frozen=True)
class PlanChange:
    """Another plan of the same job, described, and its planned memory in bytes."""

    description: str
    plan: Plan
    nbytes: int


@dataclass(frozen=True)
class MemoryUsage:
    """The memory of a rank in bytes: of the process before the model was made and at the failure, its limit,
    and the live tensors.
    """

    baseline: int
    used: int
    limit: int | None
    live: Mapping[str, int]

    def expected_nbytes(self, change: PlanChange, plan: Plan, message: str) -> float:
        """Returns the expected memory of the process under `change`: unplanned memory shrinks with the
        microbatch.
        """
        unplanned = max(0, self.used + requested_nbytes(message) - self.baseline - sum(self.live.values()))
        return self.baseline + change.nbytes + unplanned * change.plan.micro_batch / plan.micro_batch


def requested_nbytes(message: str) -> int:
    """Returns the number of bytes that an allocator's message says were requested; 0 if it does not say."""
    found = REQUEST_PATTERN.search(message)
    return 0 if found is None else int(float(found[1]) * SIZE_UNITS[found[2].upper()])


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether `error` says that an allocation failed on this rank."""
    if isinstance(
        error, (CollectiveError, OutOfMemory)
    ):  # the first quotes another rank, the second is complete already
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and OOM_PATTERN.search(str(error)) is not None


def planned_nbytes(plan: Plan, rank: int) -> dict[str, int]:
    """Returns the planned memory of `rank` of `plan` by category, at its peak."""
    states = state_bytes(plan, rank)
    fullest, _ = planned_memory(
        plan.for_rank(rank).actions,
        {
            "parameters": states.parameters,
            "master": states.master,
            "optimizer_states": states.optimizer_states,
            "strategy_states": states.strategy_states,
        },
    )
    return fullest


def plan_changes(
    analyzed: AnalyzedModel, plan: Plan, rank: int, *, on_host: bool = False
) -> Iterator[PlanChange]:
    """Yields the plans of the same job on as many ranks that need less memory than `plan`, the cheapest in
    time first; with `on_host`, where device and host are one memory, none that offloads to the host.
    """
    now = sum(planned_nbytes(plan, rank).values())
    here = [
        *_shards(plan, (1, 2)),
        *_fewer_in_flight(plan),
        *_shrink_microbatch(plan),
        *_shards(plan, (3,)),
        *_recompute(plan),
        *(() if on_host else (*_offload(plan), *_offload_activations(plan))),
    ]
    tried = [(plan.mesh, plan.model_spec, each) for each in here]
    if can_shard_sequence(analyzed):
        tried += [
            (mesh, replace(plan.model_spec, sequence_info=analyzed.sequence_info), each)
            for mesh, each in _sequence_sharded(plan)
        ]
    for mesh, model_spec, (message, strategies, micro_batch) in tried:
        try:
            other = plan.with_strategies(strategies, micro_batch, mesh, model_spec)
            check_plan_for_model(other, analyzed)
        except PlanError:  # this strategy does not work with this model or job
            continue
        nbytes = sum(planned_nbytes(other, rank).values())
        if nbytes < now or other.micro_batch < plan.micro_batch:
            yield PlanChange(message, other, nbytes)


def can_shard_sequence(analyzed: AnalyzedModel) -> bool:
    """Returns whether the tokens of a sample can be on several ranks."""
    tokens = analyzed.sequence_info
    return (
        tokens is not None
        and bool(tokens.attention_calls)
        and not any(passing.not_sequence_parallel for passing in tokens.block_calls)
    )


class OOMAdvisor:
    """A context that turns a failed allocation of one rank of `plan` into OutOfMemory. It can be entered
    many times.

    It is created before the model; `executor` is the rank's, once it exists.
    """

    def __init__(self, analyzed: AnalyzedModel, plan: Plan, rank: int, device: torch.device) -> None:
        self._analyzed, self._plan, self._rank, self._device = analyzed, plan, rank, device
        self._before = process_nbytes(device)
        self.executor: StepExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def check_rank_fits_here(self) -> None:
        """Raises PlanError if the rank keeps more in the memory or on the disk of its host than is free."""
        check_ranks_fit_here(self._analyzed, self._plan, (self._rank,))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not is_out_of_memory(error):
            return
        live = {} if self.executor is None else self.executor.memory_by_category()
        seen = MemoryUsage(self._before, process_nbytes(self._device), memory_limit(self._device), live)
        on_host = self._device.type == "cpu"
        others = list(plan_changes(self._analyzed, self._plan, self._rank, on_host=on_host))
        shardable = self._plan.mesh.cp == 1 and can_shard_sequence(self._analyzed)
        raise OutOfMemory(
            oom_message(error, self._plan, self._rank, seen, others, sequence_shardable=shardable)
        ) from error


def oom_message(
    error: BaseException,
    plan: Plan,
    rank: int,
    usage: MemoryUsage,
    changes: Sequence[PlanChange],
    *,
    sequence_shardable: bool = False,
) -> str:
    """Returns the message: the request, the planned and the live memory by category, and the changes.

    `sequence_shardable`: more ranks may share the tokens of each sample.
    """
    planned = planned_nbytes(plan, rank)
    limit, message = usage.limit, str(error).strip() or type(error).__name__
    within = "" if limit is None else f" of {format_nbytes(limit)}"
    lines = [f"rank {rank} ran out of memory: {message.splitlines()[0]}"]
    lines.append(f"  planned    {_parts(planned)}")
    lines.append(
        f"  live       {_parts(usage.live) or 'nothing yet: the model was being made'}; in all "
        f"{format_nbytes(usage.used)}{within}"
    )
    fits = (
        None
        if limit is None
        else next((each for each in changes if usage.expected_nbytes(each, plan, message) < limit), None)
    )
    shown = changes[:MAX_SHOWN_CHANGES]
    for each in (*shown, *([fits] if fits is not None and fits not in shown else [])):
        word = "this fits: " if each == fits else "takes less:"
        lines.append(
            f"  {word} {each.description}: {format_nbytes(each.nbytes)} planned instead of "
            f"{format_nbytes(sum(planned.values()))}"
        )
    more = "mesh.dp_shard" + (", or mesh.cp for fewer tokens of each sample" if sequence_shardable else "")
    more += "" if plan.mesh.pp == 1 else ", or mesh.pp for smaller stages"
    if not changes:
        lines.append(f"  no change of this plan takes less: use more ranks ({more}), or a smaller model")
    elif fits is None and limit is not None:
        lines.append(
            f"  none of them is sure to fit into {format_nbytes(limit)}: combine them, or use more ranks "
            f"({more})"
        )
    return "\n".join(lines)


def _parts(nbytes: Mapping[str, int]) -> str:
    found = [f"{name} {format_nbytes(each)}" for name, each in nbytes.items() if each]
    return f"{format_nbytes(sum(nbytes.values()))} ({', '.join(found)})" if found else ""


CandidateChange = tuple[str, tuple[Strategy, ...], int]


def _shards(plan: Plan, stages: Iterable[int]) -> Iterator[CandidateChange]:
    """Replaces DDP by ZeRO, and ZeRO by a higher stage."""
    for stage in stages:
        for old in plan.strategies:
            if isinstance(old, ZeRO) and old.stage < stage:
                new = replace(old, stage=stage)
            elif isinstance(old, DDP):
                new = ZeRO(axis=old.axis, stage=stage)
            else:
                continue
            others = tuple(new if strategy == old else strategy for strategy in plan.strategies)
            yield (
                f'[[strategies]] name = "{new.name}", axis = "{new.axis}", stage = {stage}',
                others,
                plan.micro_batch,
            )


def _fewer_in_flight(plan: Plan) -> Iterator[CandidateChange]:
    """Replaces the schedule, with the same number of stages if the user gave their split points."""
    for old in plan.strategies:
        if isinstance(old, Pipeline):
            for name in LEANER_SCHEDULES:
                new = replace(old, schedule=name, virtual_stages=0)
                others = tuple(new if strategy == old else strategy for strategy in plan.strategies)
                yield f'strategies.pipeline.schedule = "{name}"', others, plan.micro_batch


def _shrink_microbatch(plan: Plan) -> Iterator[CandidateChange]:
    """Uses the next smaller microbatch that divides the local batch."""
    divisors = [n for n in range(1, plan.micro_batch // 2 + 1) if plan.local_batch % n == 0]
    if divisors:
        yield f"micro_batch = {divisors[-1]}", plan.strategies, divisors[-1]


def _sequence_sharded(plan: Plan) -> Iterator[tuple[Mesh, CandidateChange]]:
    split = [strategy.axis for strategy in plan.strategies if isinstance(strategy, BatchSplit)]
    for axis in split if plan.mesh.cp == 1 else ():
        ranks = plan.mesh.size(axis)
        mesh = replace(plan.mesh, **{axis: 1, CP_AXIS: ranks})
        others = tuple(
            _move_axis(old, axis)
            for old in plan.strategies
            if not (isinstance(old, BatchSplit) and old.axis == axis)
        )
        message = (
            f"mesh.{CP_AXIS} = {ranks} in the place of mesh.{axis}, "
            f'and [[strategies]] name = "{RingAttention.name}"'
        )
        yield mesh, (message, (*others, RingAttention()), plan.micro_batch)


def _move_axis(old: Strategy, axis: str) -> Strategy:
    match old:
        case ZeRO() if old.axis == axis:
            return replace(old, axis=CP_AXIS)
        case ZeRO() if old.replicate_axis == axis:
            return replace(old, replicate_axis="")
        case DDP() if old.axis == axis:
            return replace(old, axis=CP_AXIS)
    return old


def _offload(plan: Plan) -> Iterator[CandidateChange]:
    """Keeps the optimizer states on the host, and steps them on the device."""
    if not any(isinstance(strategy, Offload) for strategy in plan.strategies):
        yield '[[strategies]] name = "offload"', (*plan.strategies, Offload()), plan.micro_batch


def _offload_activations(plan: Plan) -> Iterator[CandidateChange]:
    """Keeps on the host what blocks keep for their backward."""
    if not any(isinstance(strategy, ActivationOffload) for strategy in plan.strategies):
        others = (*plan.strategies, ActivationOffload())
        yield '[[strategies]] name = "activation_offload"', others, plan.micro_batch


def _recompute(plan: Plan) -> Iterator[CandidateChange]:
    if not any(isinstance(strategy, ActivationCheckpointing) for strategy in plan.strategies):
        yield (
            '[[strategies]] name = "activation_checkpointing"',
            (*plan.strategies, ActivationCheckpointing()),
            plan.micro_batch,
        )
