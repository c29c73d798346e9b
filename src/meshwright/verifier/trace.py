"""What a rank of a plan really sends, held against what its program says, without the other ranks and without memory.

The engine plays steps as rank r of the plan's own mesh, with its optimizer and dtypes, on the fake world (comm/fake.py):
nothing leaves the process, and a ledger notes every collective. Each action must issue exactly the one that the program
states: the same collective, axes, ranks, bytes, dtype and algorithm, in the same order, in every step.

    parameters   fake tensors: shapes without memory, so that rank 777 of 1,024 of a 7 B model fits into half a GiB
    rows         real: the engine looks at what is counted in them
    loss, norm   numbers that the engine reads off a fake tensor; each is 1
    dropout      keeps everything

So a mesh of any size is traced on any machine. What a trace cannot see are values: whether the sums are right is for
parity. A model whose forward looks at values that come from parameters cannot be played on fake tensors (`NeedsValues`);
it can on real ones, whole or scaled down.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.comm.backends.fake import CompletedWork, FakeWorld
from meshwright.comm.collectives.group import LedgerEntry, Work
from meshwright.engine.runtime.loss import Batch, Loss
from meshwright.engine.runtime.state import RankState, TrainedModule
from meshwright.engine.step.executor import Executor
from meshwright.model.rng.sites import DrawSites, StatelessRNG
from meshwright.model.trial.trial import depends_on_values
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.job import LossGuard
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES

DEFAULT_NUM_STEPS = (
    2  # by default: what a first step sets up (buckets, moments) must not change what the next one sends
)
MAX_SHOWN = 5  # faults in the words of a verdict
TRACE_FIX = "the strategy that adds the action states in `rewrite` what its handler from `bind` sends: make them agree"

MakeTrainedModule = Callable[[FakeTensorMode | None], TrainedModule]


class NeedsRealTensorsError(PlanError):
    """The model looks at values that fake tensors do not have."""


class TracedMessage(NamedTuple):
    """One collective: for which action, what, over which axes and how many ranks, the operand's bytes and dtype, and how."""

    action: str
    collective: str
    axes: tuple[str, ...]
    num_ranks: int
    nbytes: int
    dtype: str
    algorithm: str

    def __str__(self) -> str:
        over = f"over {', '.join(self.axes)} ({self.num_ranks} ranks, {self.algorithm})"
        return f"{self.collective} of {self.nbytes:,} bytes {self.dtype} {over}"


@dataclass(frozen=True)
class RankTrace:
    """What one rank issued: the messages of each step, in order, and the bytes that left it in the last one."""

    rank: int
    steps: tuple[tuple[TracedMessage, ...], ...]
    sent_nbytes: float


@dataclass(frozen=True)
class TraceVerdict:
    """The outcome: `passed` when every rank in `ranks` issued what the program states, in each of `steps` steps.

    `messages` and `sent` are the collectives, and the bytes that leave a rank, in one step; `tensors` says whether the
    parameters were fake or real.
    """

    plan: str
    mesh: str
    model: str
    ranks: tuple[int, ...]
    num_steps: int
    passed: bool
    num_messages: int
    sent_nbytes: float
    tensor_kind: str
    planned_nbytes: dict[str, int] = field(default_factory=dict)
    diagnostics: tuple[Diagnostic, ...] = ()
    rank_backend: str = "trace"
    versions: dict[str, str] = field(default_factory=dict)

    def raise_if_failed(self) -> None:
        """Raises PlanError, with all diagnostics, unless every rank issued what the program states."""
        if not self.passed:
            raise PlanError.from_diagnostics(self.diagnostics)

    def write(self, path: Path) -> None:
        """Write the verdict as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2, allow_nan=False) + "\n")

    def __str__(self) -> str:
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))} of {self.mesh}"
        if self.passed:
            return f"{ranks} issued the {self.num_messages} collectives that the program states, in each of {self.num_steps} steps"
        told = "".join(f"\n  {fault}" for fault in self.diagnostics[:MAX_SHOWN])
        more = (
            f"\n  and {len(self.diagnostics) - MAX_SHOWN} more" if len(self.diagnostics) > MAX_SHOWN else ""
        )
        return f"{ranks} did NOT issue what the program states{told}{more}"


def sample_ranks(plan: Plan) -> tuple[int, ...]:
    """The first rank, the last one, and one between them that the job's seed chooses."""
    world = plan.mesh.world_size
    return tuple(sorted({0, Random(plan.job.train.seed).randrange(world), world - 1}))


def trace(
    plan: Plan,
    ranks: Iterable[int],
    loss: Loss,
    make_trained_module: MakeTrainedModule,
    num_steps: int = DEFAULT_NUM_STEPS,
    *,
    fake: bool = True,
) -> TraceVerdict:
    """The verdict on `ranks` of `plan`, played one after the other; `make_subject` makes the model, of fake tensors or real.

    Raises PlanError for a rank that the mesh does not have, and NeedsValues when `fake` tensors cannot play the model.
    """
    ranks = tuple(dict.fromkeys(ranks))
    missing = [rank for rank in ranks if not 0 <= rank < plan.mesh.world_size]
    if missing or not ranks:
        text = f"there is no rank {missing[0]} in {plan.mesh}" if missing else "no rank is named"
        raise PlanError(text, fix=f"choose from 0 to {plan.mesh.world_size - 1}", location="trace")
    wanted = planned_collectives(plan)
    played = [trace_rank(plan, rank, loss, make_trained_module, num_steps, fake=fake) for rank in ranks]
    faults = [
        fault
        for each in played
        for fault in compare_trace(planned_collectives(plan.for_rank(each.rank)), each)
    ]
    return TraceVerdict(
        plan=plan.hash,
        mesh=str(plan.mesh),
        model=plan.model_spec.name,
        ranks=ranks,
        num_steps=num_steps,
        passed=not faults,
        num_messages=len(wanted),
        sent_nbytes=max(each.sent_nbytes for each in played),
        tensor_kind="fake" if fake else "real",
        planned_nbytes={message.action: message.nbytes for message in wanted},
        diagnostics=tuple(faults),
    )


def planned_collectives(plan: Plan) -> tuple[TracedMessage, ...]:
    """What each rank issues in one step, in the order of the program."""
    found = ((action.name, move) for action in plan.actions for move in action.transfers)
    return tuple(
        TracedMessage(
            name, move.collective, axes, move.num_ranks(plan.mesh), move.nbytes, move.dtype, move.algorithm
        )
        for name, move in found
        for axes in [tuple(axis for axis in AXES if axis in move.axes)]
    )


def trace_rank(
    plan: Plan,
    rank: int,
    loss: Loss,
    make_trained_module: MakeTrainedModule,
    num_steps: int = DEFAULT_NUM_STEPS,
    *,
    fake: bool = True,
) -> RankTrace:
    """What `rank` issues in `steps` steps. Raises NeedsValues when `fake` tensors cannot play the model."""
    world = FakeWorld(plan.mesh, rank)
    world.ledger.is_recording = True
    subject = make_trained_module(FakeTensorMode(allow_non_fake_inputs=True) if fake else None)
    issued = []
    try:
        with ExitStack() as opened:
            if fake:
                opened.enter_context(_ones(subject.module))
            works: dict[str, Work] = defaultdict(
                CompletedWork
            )  # who waits for a collective that was forgotten goes on: it is named below
            good = replace(
                plan, job=replace(plan.job, guard=LossGuard())
            )  # what fake numbers are is not judged
            player = Executor(
                good, RankState(subject, world, loss, works=works), stateless_rng=_open_dice(plan)
            )
            opened.callback(player.close)
            for _ in range(num_steps):
                world.ledger.entries.clear()
                player.step(_rows(subject.dummy_batch, len(plan.samples_read(rank))))
                issued.append(tuple(map(_message, world.ledger.entries)))
    except Exception as error:
        if not fake or isinstance(error, PlanError) or not depends_on_values(error):
            raise
        text = f"the model looks at values, which fake tensors lack ({type(error).__name__}: {error})"
        raise NeedsRealTensorsError(
            text, fix="trace it on real tensors: fake=False; it is then made whole", location="trace"
        ) from error
    return RankTrace(rank, tuple(issued), sum(entry.sent_nbytes for entry in world.ledger.entries))


def compare_trace(planned: Sequence[TracedMessage], rank_trace: RankTrace) -> Iterator[Diagnostic]:
    """Every difference between what a rank issued and what is `wanted` in each step; one that repeats is said once."""
    known: set[str] = set()
    for number, issued in enumerate(rank_trace.steps, start=1):
        for action, text in _differences(planned, issued):
            if text not in known:
                known.add(text)
                yield Diagnostic(f"{text}, on rank {rank_trace.rank} in step {number}", TRACE_FIX, action)


def _differences(
    wanted: Sequence[TracedMessage], issued: Sequence[TracedMessage]
) -> Iterator[tuple[str, str]]:
    """The action, and what is wrong with it."""
    found: Mapping[str, list[TracedMessage]] = defaultdict(list)
    for message in issued:
        found[message.action].append(message)
    stated: Mapping[str, list[TracedMessage]] = defaultdict(list)
    for message in wanted:
        stated[message.action].append(message)
    alike = len(wanted) == len(issued)
    for action, messages in stated.items():
        mine = found.get(action, [])
        if mine == messages:
            continue
        alike = False
        said = "; ".join(map(str, messages))
        if not mine:
            yield action, f"{action} issued nothing, and the program states: {said}"
        elif len(mine) > len(messages):
            these = "the one" if len(messages) == 1 else f"the {len(messages)}"
            yield (
                action,
                f"{action} issued {len(mine)} collectives ({'; '.join(map(str, mine))}), not {these} stated: {said}",
            )
        else:
            yield action, f"{action} issued: {'; '.join(map(str, mine))}, and the program states: {said}"
    for action in [action for action in found if action not in stated]:
        alike = False
        yield (
            action,
            f"{action or 'no action'} issued: {found[action][0]}, and the program states no collective for it",
        )
    for mine, message in zip(issued, wanted, strict=False) if alike else ():
        if mine != message:
            yield mine.action, f"{mine.action} came where the program has {message.action}: the order differs"
            return


def _message(entry: LedgerEntry) -> TracedMessage:
    return TracedMessage(
        entry.action, entry.collective, entry.axes, entry.group_size, entry.nbytes, entry.dtype, entry.algorithm
    )


def _rows(row: Batch, count: int) -> Batch:
    return {key: value.repeat(count, *[1] * (value.ndim - 1)) for key, value in row.items()}


def _open_dice(plan: Plan) -> StatelessRNG | None:
    """Dropout that keeps everything: masks change no collective, and hashing those of a large model takes minutes."""
    if not plan.model_spec.has_dropout:
        return None
    dice = StatelessRNG(plan.job.train.seed, DrawSites())
    dice.begin_trial(plan.micro_batch)
    return dice


@contextmanager
def _ones(module: nn.Module) -> Iterator[None]:
    """Have numbers read off fake tensors be 1, but for those that `module` reads in its forward: there, it looks at values."""
    mode, own, forward = _Ones(), module.__dict__.get("forward"), module.forward

    def marked(*args: Any, **kwargs: Any) -> Any:
        mode.mark(inside=True)
        try:
            return forward(*args, **kwargs)
        finally:  # a part leaves it by what is no Exception: hooks of torch do not hear of that
            mode.mark(inside=False)

    module.forward = marked
    try:
        with mode:
            yield
    finally:
        module.__dict__.pop("forward")
        if own is not None:
            module.__dict__["forward"] = own


class _Ones(TorchDispatchMode):
    """Answers what fake tensors cannot, while the model's forward is not under way.

    Operations on lists of fake tensors that return nothing (fused optimizers) change values only and are left out: torch has
    no fake kernel for some, and would run the real one on zeros of full size.
    """

    def __init__(self) -> None:
        super().__init__()
        self._inside = False

    def mark(self, *, inside: bool) -> None:
        """Say whether the model's forward is under way."""
        self._inside = inside

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        reads = func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor)
        if reads and not self._inside:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if not func._schema.returns and any(isinstance(each, FakeTensor) for each in _listed(args)):
            return None
        return func(*args, **(kwargs or {}))


def _listed(args: tuple[Any, ...]) -> list[Any]:
    return args[0] if args and isinstance(args[0], list) else []
