"""Defines a technique on one axis: a value with two pure functions and one effect.

    place    ShardingPlan -> ShardingPlan    the placements of tensors under this technique
    rewrite  Program -> Program              the actions it adds, removes or moves
    bind     Runtime -> handlers             the implementation of new kinds of action

Whatever order a user writes, the phases fix the order in which strategies apply: shard, schedule, memory,
storage, comm. At most one strategy decides the order of the step, and one, per axis, how parameters are
stored.
"""

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.placement import Placement
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.action import Action, Program
from meshwright.plan.step.single_device import StageCalls

StrategyPhase = Literal["shard", "schedule", "memory", "storage", "comm"]
PHASES: tuple[StrategyPhase, ...] = ("shard", "schedule", "memory", "storage", "comm")


class Runtime(Protocol):
    """The engine's interface for strategies on a running rank."""

    def start_collective(self, action: Action) -> None:
        """Start the collective of `action.transfer` on the flat tensor of `action.subject`."""

    def unshard(self, action: Action) -> None:
        """Start gathering the parameters of `action.tensors` from their shards."""

    def reduce(self, action: Action) -> None:
        """Start the reduce-scatter of the packed gradients of `action.tensors`, or the all-reduce of their
        shards.
        """

    def accumulate(self, action: Action) -> None:
        """Add the shard that REDUCE computed for this micro-batch to the sum of earlier ones."""

    @property
    def plan(self) -> Any:
        """The plan that is executed (`plan/plan.py`)."""

    def replace_forward(self, name: str, forward: Callable[..., Any]) -> None:
        """Make the module `name` of the model compute `forward(module, *its arguments)`."""

    def wrap_forward(self, name: str, wrapper: Callable[..., Any]) -> None:
        """Make the module `name` of the model compute `wrapper(original forward, *its arguments)`."""

    def redistribute(
        self,
        tensor: Any,
        axis: str,
        src: Placement,
        dst: Placement,
        overlap_fn: Callable[[], None] | None = None,
    ) -> Any:
        """`tensor` redistributed along `axis` for the current action; the same tensor is redistributed once
        per block.

        `overlap_fn()` is called while the communication is under way.
        """

    def redistribute_uncached(
        self, tensor: Any, axis: str, src: Placement, dst: Placement, num_neighbours: int = 0
    ) -> Any:
        """`tensor` redistributed along `axis` for the current action, every time it is called, without
        caching.

        With `num_neighbours`, the group is that many neighbours along the axis.
        """

    def redistribute_in_backward(
        self, tensor: Any, axis: str, src: Placement, dst: Placement
    ) -> AbstractContextManager[Any]:
        """A context in which autograd saves `tensor` instead of its redistribution; backward redistributes it
        again.
        """

    def set_attention(self, attention_fn: Callable[[Any], Any]) -> None:
        """Make attention within blocks, called with the tokens of this rank, compute `attention_fn`."""

    def set_convolution(self, convolution_fn: Callable[[Any], Any]) -> None:
        """Make convolutions over tokens within blocks compute `convolution_fn`."""

    def shift(self, output: Any, tensor: Any, axis: str, offset: int = 1) -> Any:
        """Start sending `tensor` to the rank `offset` positions on around `axis`, and receiving `output` from
        as far behind.

        The result has a `wait()`.
        """

    def start_send_recv(self, action: Action) -> None:
        """Start sending the value of `action.tensors`, or its gradient, to the peer of the transfer, or
        receiving it.

        SEND and RECV move a value forward, SEND_GRAD and RECV_GRAD its gradient back.
        """

    def recompute(self, action: Action) -> None:
        """Run a checkpointed block call again, so that its backward has a graph."""


Handler = Callable[[Action], None]


@dataclass(frozen=True)
class Strategy(ABC):
    """A technique as a value. By default a method changes nothing; a technique overrides what it needs."""

    name: ClassVar[str]
    mode: ClassVar[str] = ""  # distinguishes strategies of the same name: the key `mode` of its table
    phase: ClassVar[StrategyPhase]
    exact: ClassVar[bool] = True
    needs_sequence_info: ClassVar[bool] = False  # whether it reads ModelSpec.sequence_info

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        """Yields what is wrong with this technique on this job and mesh."""
        return iter(())

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        """Yields what this technique misses, or does not support, in the sharding that all strategies
        together produce.
        """
        return iter(())

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        """`sharding` with the layouts that this technique changes."""
        return sharding

    def order_stage_calls(
        self, stage_calls: Sequence[StageCalls], sharding: ShardingPlan
    ) -> Sequence[StageCalls]:
        """The order in which a rank goes through its block calls; by default unchanged."""
        return stage_calls

    def rewrite(self, program: Program, sharding: ShardingPlan, job: Job) -> Program:
        """`program` with the actions that this technique adds, removes or moves."""
        return program

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        """Handlers for the kinds of action that this technique introduces."""
        return {}

    def tolerance(self, sharding: ShardingPlan) -> float:
        """The relative rounding error of this technique, in units of the largest number of a block; 0: it
        rounds nothing.
        """
        return 0.0

    def file_digests(self) -> tuple[tuple[str, str], ...]:
        """Digests of the files that this technique names, by key: they affect results, and no option holds
        them.
        """
        return ()

    def as_dict(self) -> dict[str, Any]:
        """The strategy as a table of a plan file."""
        mode = {"mode": self.mode} if self.mode else {}
        return {"name": self.name, **mode, **{item.name: getattr(self, item.name) for item in fields(self)}}

    def __str__(self) -> str:
        empty_by_default = {item.name for item in fields(self) if not item.default}
        table = {
            key: value
            for key, value in self.as_dict().items()
            if key != "name" and (value or key not in empty_by_default)
        }
        text = ", ".join(
            f"{key} {' '.join(value) if isinstance(value, tuple) else value}" for key, value in table.items()
        )
        return f"{self.name} ({text})"


def sort_by_phase(strategies: Iterable[Strategy]) -> tuple[Strategy, ...]:
    """The strategies in the order in which they apply; within a phase, as the user wrote them."""
    return tuple(sorted(strategies, key=lambda strategy: PHASES.index(strategy.phase)))
