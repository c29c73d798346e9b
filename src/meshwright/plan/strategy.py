"""One technique on one axis: a value with two pure functions and one effect.

    place    Space -> Space         where tensors live under this technique
    rewrite  Program -> Program     what happens when
    bind     State -> handlers      how the new kinds of action are done

Whatever order a user writes, the phases fix the order in which strategies apply: shard, order, memory, store, wire. At
most one strategy decides the order of the step, and one, per axis, how weights are stored.
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
    """What a strategy may touch of a running rank: the engine's state, seen through the words it may use."""

    def start_collective(self, action: Action) -> None:
        """Start the collective that `action.transfer` states on the flat tensor of `action.subject`."""

    def unshard(self, action: Action) -> None:
        """Start gathering the weights of `action.tensors` from their shards."""

    def reduce(self, action: Action) -> None:
        """Start summing the packed gradients of `action.tensors` into shards, or their shards over replicas."""

    def accumulate(self, action: Action) -> None:
        """Add the shard that REDUCE left for this micro-batch to the sum of those before."""

    @property
    def plan(self) -> Any:
        """The plan that is played (core/plan.py)."""

    def replace_forward(self, name: str, forward: Callable[..., Any]) -> None:
        """Have the module `name` of the model compute `forward(module, *its arguments)`."""

    def wrap_forward(self, name: str, wrapper: Callable[..., Any]) -> None:
        """Have the module `name` of the model compute `around(what it computes otherwise, *its arguments)`."""

    def redistribute(
        self,
        tensor: Any,
        axis: str,
        src: Placement,
        dst: Placement,
        overlap_fn: Callable[[], None] | None = None,
    ) -> Any:
        """`tensor` moved along `axis` for the action under way; the same tensor is moved once in a block.

        `meanwhile()` is called while it is under way.
        """

    def redistribute_uncached(
        self, tensor: Any, axis: str, src: Placement, dst: Placement, num_neighbours: int = 0
    ) -> Any:
        """`tensor` moved along `axis` for the action under way, as often as this is asked, and nothing of it is held on to.

        With `near` it is so among so many neighbours along the axis.
        """

    def redistribute_in_backward(
        self, tensor: Any, axis: str, src: Placement, dst: Placement
    ) -> AbstractContextManager[Any]:
        """While it lasts, autograd keeps nothing of what `tensor` became by this move: backward moves it once more."""

    def set_attention(self, attention_fn: Callable[[Any], Any]) -> None:
        """Have attention within blocks, asked for with the tokens of this rank, be what `answer` says (model/attend.py)."""

    def set_convolution(self, convolution_fn: Callable[[Any], Any]) -> None:
        """The same of convolutions over tokens (model/convolve.py)."""

    def shift(self, output: Any, tensor: Any, axis: str, offset: int = 1) -> Any:
        """Start sending `tensor` to the rank `by` places on, round `axis`, and filling `output` from the one as far behind.

        What comes back has a `wait()`.
        """

    def start_send_recv(self, action: Action) -> None:
        """Start sending the value of `action.tensors`, or its gradient, to the peer of the transfer, or receiving it from there.

        RECV and SEND move a value, RECV_GRAD and SEND_GRAD its gradient, the other way.
        """

    def recompute(self, action: Action) -> None:
        """Run a visit once more that kept only what it took in, so that its backward finds a graph."""


Handler = Callable[[Action], None]


@dataclass(frozen=True)
class Strategy(ABC):
    """A technique as a value. The methods default to "change nothing"; a technique overrides what it needs."""

    name: ClassVar[str]
    mode: ClassVar[str] = ""  # which of several strategies of that name: the key `mode` of its table
    phase: ClassVar[StrategyPhase]
    exact: ClassVar[bool] = True
    needs_sequence_info: ClassVar[bool] = (
        False  # it needs to know what the model does with tokens: Anatomy.tokens
    )

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        """What is wrong with this technique on this job and mesh."""
        return iter(())

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        """What this technique misses, or cannot bear, in the space that all strategies together have made."""
        return iter(())

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        """`space` with the layouts that this technique changes."""
        return sharding

    def order_stage_calls(
        self, stage_calls: Sequence[StageCalls], sharding: ShardingPlan
    ) -> Sequence[StageCalls]:
        """In which order a rank goes through its visits: as before, `turns`, or in another one."""
        return stage_calls

    def rewrite(self, program: Program, sharding: ShardingPlan, job: Job) -> Program:
        """`program` with the actions that this technique adds, removes or moves."""
        return program

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        """Handlers for the kinds of action that this technique introduced."""
        return {}

    def tolerance(self, sharding: ShardingPlan) -> float:
        """By how much of the largest of its block a number may be off for what this technique rounds; 0: it rounds nothing."""
        return 0.0

    def file_digests(self) -> tuple[tuple[str, str], ...]:
        """What affects numbers and stands in no table, by key: digests of the files that it names."""
        return ()

    def as_dict(self) -> dict[str, Any]:
        """The strategy as a table of a plan file."""
        mode = {"mode": self.mode} if self.mode else {}
        return {"name": self.name, **mode, **{item.name: getattr(self, item.name) for item in fields(self)}}

    def __str__(self) -> str:
        unset = {item.name for item in fields(self) if not item.default}  # nothing of it, by default
        table = {
            key: value
            for key, value in self.as_dict().items()
            if key != "name" and (value or key not in unset)
        }
        said = ", ".join(
            f"{key} {' '.join(value) if isinstance(value, tuple) else value}" for key, value in table.items()
        )
        return f"{self.name} ({said})"


def sort_by_phase(strategies: Iterable[Strategy]) -> tuple[Strategy, ...]:
    """The strategies in the order in which they apply; within a phase, as the user wrote them."""
    return tuple(sorted(strategies, key=lambda strategy: PHASES.index(strategy.phase)))
