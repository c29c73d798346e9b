"""What a rank says that runs out of memory: what was planned, what was live, and which changes of the plan take less.

    planned   states to the byte, buffers, and activations as the trial run has found them
    live      what this rank held of them when it failed, and the whole process
    changes   in the order of what they cost in time: shards of moments, and of gradients; a schedule that keeps fewer
              micro-batches in flight; half the micro-batch; shards of the weights; recompute; the tokens of rows dealt to the
              ranks that had rows of their own

The first change that comes below the limit is named, where there is a limit: the memory of the device, or what the system
grants the process. What the plan does not know of is taken to shrink with the micro-batch, and else to stay.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import psutil
import torch

from meshwright.engine.step.executor import Player
from meshwright.model.analysis.analyze import Reading
from meshwright.model.analysis.plan_checks import refuse_model
from meshwright.parallel import STRATEGIES
from meshwright.parallel.context.ring import Ring
from meshwright.parallel.context.sequence_sharding import AXIS
from meshwright.parallel.data.batch_split import Batch
from meshwright.parallel.data.ddp import Replicate
from meshwright.parallel.data.zero import Zero
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.plan.job.errors import CollectiveError, PlanError, size
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.action import Program
from meshwright.plan.strategy import Strategy
from meshwright.planner.program_cost.memory import state_bytes
from meshwright.report.timeline.memory_and_bytes import planned_memory

if sys.platform != "win32":
    import resource

WORDS = re.compile(r"out of memory|(can't|cannot|could not) allocate memory|not enough memory", re.IGNORECASE)
ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)
UNITS = {"BYTES": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
SHOWN = 4  # changes in a message
LEANER = ("1f1b", "zb_v_half", "zb_v_min")  # schedules, each with less in flight and more bubble than the one before


class OutOfMemory(RuntimeError):
    """A rank could not allocate: what was planned, what was live, and which changes take less."""


@dataclass(frozen=True)
class Change:
    """Another plan of the same job, in words, and what it takes of what is planned, in bytes."""

    words: str
    plan: Plan
    nbytes: int


@dataclass(frozen=True)
class Seen:
    """Bytes of a rank: of the process before the model was made and when it failed, what it may have, and what was live."""

    before: int
    used: int
    limit: int | None
    live: Mapping[str, int]

    def expected(self, change: Change, plan: Plan, words: str) -> float:
        """What the process would need under `change`: what nobody planned shrinks with the micro-batch."""
        unplanned = max(0, self.used + asked_nbytes(words) - self.before - sum(self.live.values()))
        return self.before + change.nbytes + unplanned * change.plan.micro_batch / plan.micro_batch


def asked_nbytes(words: str) -> int:
    """The bytes that an allocator says it was asked for; 0 where it does not say."""
    found = ASKED.search(words)
    return 0 if found is None else int(float(found[1]) * UNITS[found[2].upper()])


def exhausted(error: BaseException) -> bool:
    """Whether `error` says that memory was asked for and not given on this rank."""
    if isinstance(error, (CollectiveError, OutOfMemory)):  # the one quotes what another rank has said, the other has told all
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and WORDS.search(str(error)) is not None


def planned_nbytes(plan: Plan, rank: int) -> dict[str, int]:
    """What `rank` of `plan` holds by category, when what the program takes beside the states is largest."""
    states, mine = state_bytes(plan, rank), Program.of({"": plan.at(rank).actions})
    fullest, _ = planned_memory(mine, {"parameters": states.parameters, "master": states.master, "moments": states.moments})
    return fullest


def changes(reading: Reading, plan: Plan, rank: int) -> Iterator[Change]:
    """The plans of the same job and as many ranks that take less than `plan`, those first that cost least in time."""
    now = sum(planned_nbytes(plan, rank).values())
    here = [*_shards(plan, (1, 2)), *_fewer_in_flight(plan), *_smaller(plan), *_shards(plan, (3,)), *_again(plan)]
    tried = [(plan.mesh, plan.anatomy, each) for each in here]
    if dealable(reading):
        tried += [(mesh, replace(plan.anatomy, tokens=reading.tokens), each) for mesh, each in _dealt(plan)]
    for mesh, anatomy, (words, strategies, micro_batch) in tried:
        try:
            other = Plan.make(plan.job, mesh, anatomy, strategies, micro_batch, plan.run)
            refuse_model(other, reading)
        except PlanError:  # that technique does not go with this model or job
            continue
        nbytes = sum(planned_nbytes(other, rank).values())
        if nbytes < now or other.micro_batch < plan.micro_batch:
            yield Change(words, other, nbytes)


def dealable(reading: Reading) -> bool:
    """Whether the tokens of a row can be on several ranks."""
    tokens = reading.tokens
    return tokens is not None and bool(tokens.attends) and not any(passing.mixes for passing in tokens.visits)


class Telling:
    """`with` it, one rank of `plan` raises OutOfMemory where memory was asked for and not given. It may be entered many times.

    It is made before the model is; `player` is the rank's, once there is one.
    """

    def __init__(self, reading: Reading, plan: Plan, rank: int, device: torch.device) -> None:
        self._reading, self._plan, self._rank, self._device = reading, plan, rank, device
        self._before = process_nbytes(device)
        self.player: Player | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or not exhausted(error):
            return
        live = {} if self.player is None else self.player.sizes()
        seen = Seen(self._before, process_nbytes(self._device), memory_limit(self._device), live)
        others = list(changes(self._reading, self._plan, self._rank))
        deals = self._plan.mesh.cp == 1 and dealable(self._reading)
        raise OutOfMemory(told(error, self._plan, self._rank, seen, others, deals=deals)) from error


def told(error: BaseException, plan: Plan, rank: int, seen: Seen, others: Sequence[Change], *, deals: bool = False) -> str:
    """The message: what was asked for, what was planned and what was live by category, and the changes.

    `deals`: more ranks may have some of the tokens of each row.
    """
    planned = planned_nbytes(plan, rank)
    limit, words = seen.limit, str(error).strip() or type(error).__name__
    within = "" if limit is None else f" of {size(limit)}"
    lines = [f"rank {rank} ran out of memory: {words.splitlines()[0]}"]
    lines.append(f"  planned    {_parts(planned)}")
    lines.append(f"  live       {_parts(seen.live) or 'nothing yet: the model was being made'}; in all {size(seen.used)}{within}")
    fits = None if limit is None else next((each for each in others if seen.expected(each, plan, words) < limit), None)
    shown = others[:SHOWN]
    for each in (*shown, *([fits] if fits is not None and fits not in shown else [])):
        word = "this fits: " if each == fits else "takes less:"
        lines.append(f"  {word} {each.words}: {size(each.nbytes)} planned instead of {size(sum(planned.values()))}")
    more = "mesh.dp_shard" + (", or mesh.cp for fewer tokens of each row" if deals else "")
    more += "" if plan.mesh.pp == 1 else ", or mesh.pp for smaller parts"
    if not others:
        lines.append(f"  no change of this plan takes less: use more ranks ({more}), or a smaller model")
    elif fits is None and limit is not None:
        lines.append(f"  none of them is sure to fit into {size(limit)}: combine them, or use more ranks ({more})")
    return "\n".join(lines)


def memory_limit(device: torch.device) -> int | None:
    """The bytes that a process can have: those of the device, or what the system grants; None where nothing is said."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if sys.platform == "win32":
        return None
    granted = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if granted == resource.RLIM_INFINITY else granted


def process_nbytes(device: torch.device) -> int:
    """The bytes that count: allocated on a device, else resident, or where the address space is limited all of that."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    said = psutil.Process().memory_info()
    return said.rss if memory_limit(device) is None else said.vms


def _parts(nbytes: Mapping[str, int]) -> str:
    found = [f"{name} {size(each)}" for name, each in nbytes.items() if each]
    return f"{size(sum(nbytes.values()))} ({', '.join(found)})" if found else ""


Tried = tuple[str, tuple[Strategy, ...], int]


def _shards(plan: Plan, stages: Iterable[int]) -> Iterator[Tried]:
    """Whole copies turned into shards, shards of one stage into those of the next."""
    for stage in stages:
        for old in plan.strategies:
            if isinstance(old, Zero) and old.stage < stage:
                new = replace(old, stage=stage)
            elif isinstance(old, Replicate):
                new = Zero(axis=old.axis, stage=stage)
            else:
                continue
            others = tuple(new if strategy == old else strategy for strategy in plan.strategies)
            yield f'[[strategies]] name = "{new.name}", axis = "{new.axis}", stage = {stage}', others, plan.micro_batch


def _fewer_in_flight(plan: Plan) -> Iterator[Tried]:
    """Another schedule, for as many parts per rank where the user has said where they begin."""
    for old in plan.strategies:
        if isinstance(old, Pipeline):
            for name in LEANER:
                new = replace(old, schedule=name, chunks=0)
                others = tuple(new if strategy == old else strategy for strategy in plan.strategies)
                yield f'strategies.pipeline.schedule = "{name}"', others, plan.micro_batch


def _smaller(plan: Plan) -> Iterator[Tried]:
    """The next smaller micro-batch that divides what a rank plays."""
    divisors = [n for n in range(1, plan.micro_batch // 2 + 1) if plan.local_batch % n == 0]
    if divisors:
        yield f"micro_batch = {divisors[-1]}", plan.strategies, divisors[-1]


def _dealt(plan: Plan) -> Iterator[tuple[Mesh, Tried]]:
    """Ranks that had rows of their own with some of the tokens of all: a row is no longer whole on any."""
    split = [strategy.axis for strategy in plan.strategies if isinstance(strategy, Batch)]
    for axis in split if plan.mesh.cp == 1 else ():
        ranks = plan.mesh.size(axis)
        mesh = replace(plan.mesh, **{axis: 1, AXIS: ranks})
        others = tuple(_along(old, axis) for old in plan.strategies if not (isinstance(old, Batch) and old.axis == axis))
        words = f'mesh.{AXIS} = {ranks} in the place of mesh.{axis}, and [[strategies]] name = "{Ring.name}"'
        yield mesh, (words, (*others, Ring()), plan.micro_batch)


def _along(old: Strategy, axis: str) -> Strategy:
    """A strategy with what it stored along `axis` along that of tokens."""
    match old:
        case Zero() if old.axis == axis:
            return replace(old, axis=AXIS)
        case Zero() if old.across == axis:
            return replace(old, across="")
        case Replicate() if old.axis == axis:
            return replace(old, axis=AXIS)
    return old


def _again(plan: Plan) -> Iterator[Tried]:
    """Activations recomputed in backward, where that is known and not done yet."""
    technique = STRATEGIES.get("recompute")
    if technique is not None and not any(isinstance(strategy, technique) for strategy in plan.strategies):
        yield '[[strategies]] name = "recompute"', (*plan.strategies, technique()), plan.micro_batch
