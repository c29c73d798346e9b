"""Defines a technique on one axis: a value with two pure functions and one effect.

    place    ShardingPlan -> ShardingPlan       the placements of tensors under this technique, on all ranks
    rewrite  Program, RankView -> Program       the actions it adds, removes or moves on one rank
    bind     Runtime -> handlers                the implementation of new kinds of action

Whatever order a user writes, the phases fix the order in which strategies apply: shard, schedule, memory,
storage, comm. At most one strategy decides the order of the step, and one, per axis, how parameters are
stored.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from meshwright.plan.job.errors import Diagnostic, raise_diagnostics
from meshwright.plan.job.field_constraints import field_diagnostics
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.sharding.tensor_placements import Layout
from meshwright.plan.step.program import Action, Program
from meshwright.plan.step.single_device_program import StageCalls
from meshwright.plan.strategy_state import StateSpec

if TYPE_CHECKING:  # the types of what strategies receive: no strategy imports the engine
    import torch
    from torch import nn

    from meshwright.engine.runtime.rank_state import RankState

StrategyPhase = Literal["shard", "schedule", "memory", "storage", "comm"]
PHASES: tuple[StrategyPhase, ...] = ("shard", "schedule", "memory", "storage", "comm")


Handler = Callable[[Action], None]
HandlerWrapper = Callable[[Handler], Handler]


@dataclass(frozen=True)
class ObservedSum:
    """A sum of codes over `axes` as one rank took part in it, for the verifier.

    `input` is what this rank put in, flat; `output` the sum, or its slice; `lost`, by parameter, what its
    codes lost, a summand along the axes of `layouts`. `is_owed`: it comes later. `defined_sum(inputs)` is
    what the technique defines as the sum of the inputs of all ranks. `clipped` is what local clipping took
    from the gradient before. With `momentum`, momenta are added before codes; of those, `dropped` have ended.
    `number` counts the sums of the rank in the order in which they begin.
    """

    axes: tuple[str, ...]
    input: "torch.Tensor"
    output: "torch.Tensor"
    lost: "Mapping[str, torch.Tensor]"
    layouts: Mapping[str, Layout]
    is_owed: bool
    defined_sum: "Callable[[Sequence[torch.Tensor]], torch.Tensor]"
    clipped: "Mapping[str, torch.Tensor]" = field(default_factory=dict)
    dropped: "Mapping[str, torch.Tensor]" = field(default_factory=dict)
    momentum: float = 0.0
    number: int = 0


class ActivationCodec(ABC):
    """How activations and their gradients travel where a transfer states that codes carry it."""

    @abstractmethod
    def empty_codes(self, values: "torch.Tensor") -> "torch.Tensor":
        """Returns memory for the codes of as many elements as `values` has, uint8 [bytes]."""

    @abstractmethod
    def encode(self, values: "torch.Tensor") -> "torch.Tensor":
        """Returns the codes of `values`, of any shape and float dtype, contiguous: uint8 [bytes]."""

    @abstractmethod
    def decode(self, codes: "torch.Tensor", values: "torch.Tensor") -> None:
        """Writes what `codes` say into `values`, contiguous."""

    @abstractmethod
    def messages(
        self, collective: str, numel: int, dtype: str, num_ranks: int, num_parts: int = 1
    ) -> tuple[tuple[str, int], ...]:
        """Returns the collectives that carry `collective`, of `numel` elements of `dtype` per rank, as codes,
        each with the bytes that a rank puts in; () if it is carried by itself. `num_parts` parts of what is
        exchanged are coded apart.
        """

    @abstractmethod
    def is_used_in(self, step: int) -> bool:
        """Returns whether codes are sent in `step`, counted from 0."""

    @abstractmethod
    def error_in_units(self, values: "torch.Tensor", lost: "torch.Tensor") -> float:
        """Returns the largest of what codes of `values` have `lost`, flat, in units of what they may lose of
        that element: at most 1 for codes as they should be.
        """


@dataclass(frozen=True)
class Answer:
    """What a function of the user has returned on the observer of this number, from 0, for the weights that
    `version` steps have made: tensors of any shape, by name.
    """

    version: int
    observer: int
    tensors: "Mapping[str, torch.Tensor]"


SUM_SLOT = "sum"


@dataclass(frozen=True)
class ActivationName:
    """Names an activation that a block sends while it runs: what the module `module` takes as argument `slot`
    (a position or keyword), or returns ("": all that it returns, else at this index; SUM_SLOT: the sum before
    its bias is added, in which the layers `others` have summands too).

    `samples` are the first sample of a chunk of a microbatch, and how many it has (None: all). Without a
    module it is what attention takes or returns, and `places(is_backward)` tells which part of the whole a
    rank sends of the value, or of its gradient: by dim, the size of the whole and the positions in it, -1 for
    padding. Slices along `part_dim` are coded apart, so that one that goes to several ranks has the same
    codes. `is_recoded`: it has been named before, and is coded once more on its way.
    """

    module: str
    side: Literal["input", "output"]
    slot: str = ""
    samples: tuple[int, int] | None = None
    places: Callable[[bool], Mapping[int, tuple[int, Sequence[int]]]] | None = None
    part_dim: int | None = None
    others: tuple[str, ...] = ()
    is_recoded: bool = False


@dataclass(frozen=True)
class ObservedCodes:
    """What the codes of one activation, or of its gradient, lost on one rank, for the verifier.

    `key` names what was coded, equal on all ranks; `lost` is what went in less what came out, flat, a part of
    the value that the global batch has, of `shape`; `index` are the places of its elements in that, int64, -1
    for padding. `error` is the largest loss in units of what the codec allows: at most 1.
    """

    key: tuple[str, ...]
    shape: tuple[int, ...]
    index: "torch.Tensor"
    lost: "torch.Tensor"
    error: float


@dataclass(frozen=True)
class SiteLoop:
    """The ordinary loop of one site, with which a plan of several sites is compared: its trained parameters,
    by name, the optimizer that steps them, and the index of the site along each axis of sites.

    `blocks` are the names of the parameters of each block that has any, in the order in which the model calls
    them; one of several blocks belongs to the first.
    """

    parameters: "Mapping[str, nn.Parameter]"
    optimizer: "torch.optim.Optimizer"
    index: Mapping[str, int]
    blocks: Sequence[Sequence[str]] = ()


EndStep = Callable[[int, "Mapping[str, torch.Tensor]"], None]  # of a step, and what codes lost


@dataclass(frozen=True)
class ServerRule:
    """What one server does that takes the gradients of single workers, in an order that is given.

    `apply(worker)` counts the next gradient of a worker, and returns by what its learning rate is divided;
    `release()` returns the workers that go on now, with the parameters that the server has.
    """

    apply: Callable[[int], float]
    release: Callable[[], Sequence[int]]


@dataclass(frozen=True)
class Runtime:
    """The parts of the engine that strategies may use on a running rank, made for its own plan.

    `state` knows the operand of each action (`state.operand(action)`: the tensors that its collective reads
    and writes), starts the collective that the plan states (`state.start_collective(action)`), and takes the
    work of any other that a strategy starts in its place (`state.issue(action, work)`). A step ends when all
    works have, but for those of the actions `state.awaited_later`: a later one waits
    (`state.wait_for_carried(names)`), and so does a save. `state.plan` is the
    plan of the rank; `state.flat_params` are its flat parameters; `state.collectives` are those inside
    blocks; `state.patches` replace and wrap forwards of modules; `state.sequence_runner` takes the attention
    and the convolutions of a strategy that shards the sequence. The other parts come after strategies.

    `tensors` are those that the strategy has declared (`Strategy.states`), by key: "residual/head.weight".
    """

    state: "RankState"
    tensors: "Mapping[str, torch.Tensor]" = field(default_factory=dict)
    wrappers: list[tuple[str, HandlerWrapper]] = field(default_factory=list)

    def wrap(self, kind: str, wrapper: HandlerWrapper) -> None:
        """Makes `wrapper(handler)` the handler of `kind`, where `handler` is what it has been so far.

        Strategies wrap in the order of their phases: that of the last phase sees an action first.
        """
        self.wrappers.append((kind, wrapper))


@dataclass(frozen=True)
class Strategy(ABC):
    """A technique as a value. By default a method changes nothing; a technique overrides what it needs.

    Raises PlanError at construction, with every field that has a wrong value.
    """

    name: ClassVar[str]
    mode: ClassVar[str] = ""  # distinguishes strategies of the same name: the key `mode` of its table
    phase: ClassVar[StrategyPhase]
    exact: ClassVar[bool] = True
    removed_keys: ClassVar[Mapping[str, str]] = MappingProxyType({})  # of earlier versions: what to write now
    is_per_axis: ClassVar[bool] = False  # whether a plan may list it once for each axis, in phase comm
    excludes: ClassVar[Mapping[str, str]] = MappingProxyType({})  # strategies it does not work with: why
    needs_sequence_info: ClassVar[bool] = False  # whether it reads ModelSpec.sequence_info
    needs_stage_boundaries: ClassVar[bool] = False  # whether it reads ModelSpec.stage_boundaries

    def __post_init__(self) -> None:
        raise_diagnostics(field_diagnostics(self, f"strategies.{self.name}"))

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        """Yields what is wrong with this technique on this job and mesh."""
        return iter(())

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        """Yields what this technique misses, or does not support, in the sharding that all strategies
        together produce.
        """
        return iter(())

    def check_files(
        self, job: Job, sharding: ShardingPlan, as_dict: Callable[[], dict[str, Any]]
    ) -> Iterator[Diagnostic]:
        """Yields what is wrong with the files that this technique reads, under the whole plan; `as_dict`
        returns all of it that affects results.
        """
        return iter(())

    def check_start(self, sharding: ShardingPlan, num_steps: int) -> Iterator[Diagnostic]:
        """Yields what is wrong with the files that this technique reads, if a run begins behind `num_steps`
        steps: 0, or those of the checkpoint from which it goes on.
        """
        return iter(())

    def place(self, sharding: ShardingPlan) -> ShardingPlan:
        """Returns `sharding` with the layouts that this technique changes."""
        return sharding

    def order_stage_calls(self, stage_calls: Sequence[StageCalls], view: RankView) -> Sequence[StageCalls]:
        """Returns the order in which a rank goes through its block calls; by default unchanged."""
        return stage_calls

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        """Returns `program`, of the rank of `view`, with the actions that this technique adds, removes or
        moves.
        """
        return program

    def server_actions(
        self, worker: str, actions: Sequence[Action], owned: Collection[str], num_workers: int
    ) -> Sequence[Action]:
        """Returns the actions of a rank that only serves `num_workers` workers, and steps the parameters
        `owned`, for the list `actions` of the role `worker`; () leaves it those of the worker that concern
        what it steps.
        """
        return ()

    def coding_passes(self, action: Action, view: RankView) -> Mapping[str, int]:
        """Returns how many elements this technique codes for `action` on the rank of `view`, which takes time
        beside the messages, by what codes them: its mode for a whole sum, "encode CODEC", "decode CODEC".
        """
        return {}

    def states(self, view: RankView, job: Job) -> Iterable[StateSpec]:
        """Returns the tensors that this technique keeps from step to step, on the rank of `view`."""
        return ()

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        """Returns the handlers for the kinds of action that this technique introduces; wraps those of other
        kinds that it changes (`runtime.wrap`).
        """
        return {}

    def on_one_device(self, module: "nn.Module", model_spec: ModelSpec) -> Callable[[bool], None] | None:
        """Returns what this technique does after each step of an ordinary loop on one device, with which
        plans are compared; it is told whether the step has updated. None: nothing.

        Called before the first step: it may put hooks on `module`.
        """
        return None

    def compute_on_one_device(  # noqa: B027  the default changes nothing, as that of every method here
        self, module: "nn.Module", model_spec: ModelSpec, micro_batch: int
    ) -> None:
        """Makes `module` compute, in an ordinary loop on one device with which plans are compared, what this
        technique makes ranks compute on microbatches of `micro_batch` samples: those of the batch in order.
        """

    def gathered_values(self, shard: "torch.Tensor") -> "torch.Tensor | None":
        """Returns what ranks receive of a flat `shard` of weights where UNSHARD is carried by other messages;
        None: this technique changes no weights.

        `verify` compares a plan with one device that computes with these values and steps exact weights.
        """
        return None

    def exact_counterpart(self) -> "Strategy | None":
        """Returns what takes the place of a technique that is not exact in the plan that `verify --curve`
        compares with; None: it is left out.
        """
        return None

    def on_sites(self, job: Job, sites: "Sequence[SiteLoop]") -> "EndStep | None":
        """Returns what this technique does after each step of ordinary loops, one for each site, with which
        plans are compared: it is told the step, from 0, and what codes lost of the outer gradients of all
        sites together, by name, and changes the `sites` in place. None: it does not let sites train apart.

        Called before the first step, when all sites have the initial values.
        """
        return None

    def on_servers(self, num_workers: int) -> ServerRule | None:
        """Returns what this technique does on one server of `num_workers` workers, with which plans are
        compared; None: no order in which gradients arrive affects results.
        """
        return None

    def recorded_arrivals(self) -> Mapping[int, Sequence[int]]:
        """Returns by server the workers whose gradients it takes, in the order of the files that this
        technique names; nothing where no file says so.
        """
        return MappingProxyType({})

    def without_files(self) -> "Strategy":
        """Returns this technique without the files that runs of its plan read and write, to be compared."""
        return self

    def tolerance(self, sharding: ShardingPlan) -> float:
        """Returns the relative rounding error of this technique, in units of the largest number of a block;
        0: it rounds nothing.
        """
        return 0.0

    def loss_tolerance(self, sharding: ShardingPlan) -> float:
        """Returns by how much, relatively, this technique may change the loss at given weights; 0: not at
        all.
        """
        return 0.0

    def file_digests(self) -> tuple[tuple[str, str], ...]:
        """Returns the digests of the files that this technique names, by key: they affect results, and no
        option holds them.
        """
        return ()

    def as_dict(self) -> dict[str, Any]:
        """Returns the strategy as a table of a plan file; without fields that are None: TOML has no null."""
        table = {"name": self.name, **({"mode": self.mode} if self.mode else {})}
        table |= {item.name: getattr(self, item.name) for item in fields(self)}
        return {key: value for key, value in table.items() if value is not None}

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
    """Returns the strategies in the order in which they apply; within a phase, as the user wrote them."""
    return tuple(sorted(strategies, key=lambda strategy: PHASES.index(strategy.phase)))
