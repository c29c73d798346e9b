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

from meshwright.plan.job.errors import Fault
from meshwright.plan.job.job import Job
from meshwright.plan.sharding.placement import Place
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Program
from meshwright.plan.step.single_device import Turn

Phase = Literal["shard", "order", "memory", "store", "wire"]
PHASES: tuple[Phase, ...] = ("shard", "order", "memory", "store", "wire")


class Runtime(Protocol):
    """What a strategy may touch of a running rank: the engine's state, seen through the words it may use."""

    def start(self, action: Action) -> None:
        """Start the collective that `action.transfer` states on the flat tensor of `action.subject`."""

    def unshard(self, action: Action) -> None:
        """Start gathering the weights of `action.tensors` from their shards."""

    def reduce(self, action: Action) -> None:
        """Start summing the packed gradients of `action.tensors` into shards, or their shards over replicas."""

    def add(self, action: Action) -> None:
        """Add the shard that REDUCE left for this micro-batch to the sum of those before."""

    @property
    def plan(self) -> Any:
        """The plan that is played (core/plan.py)."""

    def fill(self, name: str, forward: Callable[..., Any]) -> None:
        """Have the module `name` of the model compute `forward(module, *its arguments)`."""

    def wrap(self, name: str, around: Callable[..., Any]) -> None:
        """Have the module `name` of the model compute `around(what it computes otherwise, *its arguments)`."""

    def move(self, tensor: Any, axis: str, src: Place, dst: Place, meanwhile: Callable[[], None] | None = None) -> Any:
        """`tensor` moved along `axis` for the action under way; the same tensor is moved once in a block.

        `meanwhile()` is called while it is under way.
        """

    def exchange(self, tensor: Any, axis: str, src: Place, dst: Place, near: int = 0) -> Any:
        """`tensor` moved along `axis` for the action under way, as often as this is asked, and nothing of it is held on to.

        With `near` it is so among so many neighbours along the axis.
        """

    def again(self, tensor: Any, axis: str, src: Place, dst: Place) -> AbstractContextManager[Any]:
        """While it lasts, autograd keeps nothing of what `tensor` became by this move: backward moves it once more."""

    def attend(self, answer: Callable[[Any], Any]) -> None:
        """Have attention within blocks, asked for with the tokens of this rank, be what `answer` says (model/attend.py)."""

    def convolve(self, answer: Callable[[Any], Any]) -> None:
        """The same of convolutions over tokens (model/convolve.py)."""

    def shift(self, output: Any, tensor: Any, axis: str, by: int = 1) -> Any:
        """Start sending `tensor` to the rank `by` places on, round `axis`, and filling `output` from the one as far behind.

        What comes back has a `wait()`.
        """

    def cross(self, action: Action) -> None:
        """Start sending the value of `action.tensors`, or its gradient, to the peer of the transfer, or receiving it from there.

        RECEIVE and SEND move a value, RECEIVE_GRAD and SEND_GRAD its gradient, the other way.
        """

    def rerun(self, action: Action) -> None:
        """Run a visit once more that kept only what it took in, so that its backward finds a graph."""


Handler = Callable[[Action], None]


@dataclass(frozen=True)
class Strategy(ABC):
    """A technique as a value. The methods default to "change nothing"; a technique overrides what it needs."""

    name: ClassVar[str]
    phase: ClassVar[Phase]
    exact: ClassVar[bool] = True
    by_token: ClassVar[bool] = False  # it needs to know what the model does with tokens: Anatomy.tokens

    def check(self, job: Job, space: Space) -> Iterator[Fault]:
        """What is wrong with this technique on this job and mesh."""
        return iter(())

    def partners(self, space: Space) -> Iterator[Fault]:
        """What this technique misses, or cannot bear, in the space that all strategies together have made."""
        return iter(())

    def place(self, space: Space) -> Space:
        """`space` with the layouts that this technique changes."""
        return space

    def turns(self, turns: Sequence[Turn], space: Space) -> Sequence[Turn]:
        """In which order a rank goes through its visits: as before, `turns`, or in another one."""
        return turns

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        """`program` with the actions that this technique adds, removes or moves."""
        return program

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        """Handlers for the kinds of action that this technique introduced."""
        return {}

    def tolerance(self, space: Space) -> float:
        """By how much of the largest of its block a number may be off for what this technique rounds; 0: it rounds nothing."""
        return 0.0

    def beyond(self) -> tuple[tuple[str, str], ...]:
        """What affects numbers and stands in no table, by key: digests of the files that it names."""
        return ()

    def as_dict(self) -> dict[str, Any]:
        """The strategy as a table of a plan file."""
        return {"name": self.name, **{item.name: getattr(self, item.name) for item in fields(self)}}

    def __str__(self) -> str:
        unset = {item.name for item in fields(self) if not item.default}  # nothing of it, by default
        table = {key: value for key, value in self.as_dict().items() if key != "name" and (value or key not in unset)}
        said = ", ".join(f"{key} {' '.join(value) if isinstance(value, tuple) else value}" for key, value in table.items())
        return f"{self.name} ({said})"


def in_phase_order(strategies: Iterable[Strategy]) -> tuple[Strategy, ...]:
    """The strategies in the order in which they apply; within a phase, as the user wrote them."""
    return tuple(sorted(strategies, key=lambda strategy: PHASES.index(strategy.phase)))
