"""Compares the messages of a rank with its program, without the other ranks and without memory.

The engine runs steps as rank r of the plan's own mesh, with its optimizer and dtypes, on the fake world
(comm/backends/fake.py): nothing leaves the process, and a ledger records every collective. Each action must
issue exactly the one that the program states: the same collective, axes, ranks, bytes, dtype and algorithm,
in the same order, every step.

    parameters   fake tensors: shapes without memory; rank 777 of 1,024 of a 7 B model fits into half a GiB
    samples      real: the engine reads the loss weights in them
    loss, norm   numbers that the engine reads off a fake tensor; each is 1
    dropout      keeps everything

So a mesh of any size is traced on any machine. A trace cannot check values: whether the sums are right is for
parity. A model whose forward depends on values of parameters cannot run on fake tensors
(`NeedsRealTensorsError`); it can on real ones, whole or scaled down.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.comm.backends.fake import CompletedWork, FakeWorld
from meshwright.comm.collectives.group import Work
from meshwright.engine.runtime.rank_state import RankState, TrainedModule
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.loss.loss_definition import Batch, Loss
from meshwright.model.rng.stateless_rng import DrawSites, StatelessRNG
from meshwright.model.tensors.fake_tensor_limits import depends_on_values
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.job import LossGuard
from meshwright.plan.plan import Plan, RankPlan
from meshwright.verifier.messages import Message, count_problems, issued_messages, planned_messages
from meshwright.verifier.verdict_and_cause import write_json

DEFAULT_NUM_STEPS = 2  # the setup of a first step (buckets, states) must not change what the next sends
MAX_SHOWN = 5  # diagnostics in the text of a verdict
TRACE_FIX = (
    "the strategy that adds the action states in `rewrite` what its handler from `bind` sends: "
    "make them agree"
)

MakeTrainedModule = Callable[[FakeTensorMode | None], TrainedModule]


class NeedsRealTensorsError(PlanError):
    """The model depends on values that fake tensors do not have."""


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank: the messages and the counts of each step, and the bytes sent in the last one."""

    rank: int
    steps: tuple[list[Message], ...]
    sent_nbytes: float
    counts: tuple[dict[str, int], ...]
    numbers: tuple[int, ...]  # of the steps, from 0


@dataclass(frozen=True)
class TraceVerdict:
    """The outcome: `passed` when every rank in `ranks` issued what the program states, in each step.

    `num_messages` and `sent_nbytes` are the collectives, and the bytes that leave a rank, in one step;
    `tensor_kind` says whether the parameters were fake or real.
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
        """Writes the verdict as JSON."""
        write_json(path, asdict(self))

    def __str__(self) -> str:
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))} of {self.mesh}"
        if self.passed:
            return (
                f"{ranks} issued the {self.num_messages} collectives that the program states, in each "
                f"of {self.num_steps} steps"
            )
        listing = "".join(f"\n  {diagnostic}" for diagnostic in self.diagnostics[:MAX_SHOWN])
        others = (
            f"\n  and {len(self.diagnostics) - MAX_SHOWN} more" if len(self.diagnostics) > MAX_SHOWN else ""
        )
        return f"{ranks} did NOT issue what the program states{listing}{others}"


def sample_ranks(plan: Plan) -> tuple[int, ...]:
    """Returns the first rank, the last one, and one between them that the job's seed chooses."""
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
    """Returns the verdict on `ranks` of `plan`, run one after the other, on fake tensors or real ones.

    Raises PlanError for a rank that the mesh does not have, and NeedsRealTensorsError when `fake` tensors
    cannot run the model.
    """
    ranks = tuple(dict.fromkeys(ranks))
    missing = [rank for rank in ranks if not 0 <= rank < plan.mesh.world_size]
    if missing or not ranks:
        text = f"there is no rank {missing[0]} in {plan.mesh}" if missing else "no rank is named"
        raise PlanError(text, fix=f"choose from 0 to {plan.mesh.world_size - 1}", location="trace")
    planned = planned_messages(plan.for_rank(0))
    traces = [trace_rank(plan, rank, loss, make_trained_module, num_steps, fake=fake) for rank in ranks]
    diagnostics = [
        diagnostic
        for rank_trace in traces
        for diagnostic in compare_trace(plan.for_rank(rank_trace.rank), rank_trace)
    ]
    return TraceVerdict(
        plan=plan.hash,
        mesh=str(plan.mesh),
        model=plan.model_spec.name,
        ranks=ranks,
        num_steps=len(traces[0].steps),
        passed=not diagnostics,
        num_messages=len(planned),
        sent_nbytes=max(rank_trace.sent_nbytes for rank_trace in traces),
        tensor_kind="fake" if fake else "real",
        planned_nbytes={message.action: message.nbytes for message in planned},
        diagnostics=tuple(diagnostics),
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
    """Returns what `rank` issues in `num_steps` steps. Raises NeedsRealTensorsError when `fake` tensors do
    not suffice.
    """
    issued, counts = list[list[Message]](), list[dict[str, int]]()
    with lone_executor(plan, rank, loss, make_trained_module, fake=fake) as executor:
        ledger, numbers = executor.state.world.ledger, traced_steps(plan, num_steps)
        ledger.is_recording = True
        batch = rank_batch(executor.state.trained_module.dummy_batch, plan, rank)
        for executor.steps_done in numbers:
            ledger.entries.clear()
            ledger.counts.clear()
            executor.step(batch)
            issued.append(issued_messages(ledger.entries))
            counts.append(dict(ledger.counts))
        sent_nbytes = sum(entry.sent_nbytes for entry in ledger.entries)
    return RankTrace(rank, tuple(issued), sent_nbytes, tuple(counts), numbers)


@contextmanager
def lone_executor(
    plan: Plan,
    rank: int,
    loss: Loss,
    make_trained_module: MakeTrainedModule,
    *,
    fake: bool = True,
    compiles: bool = False,
    device: torch.device | str = "cpu",
) -> Iterator[StepExecutor]:
    """Context manager: yields the executor of `rank` without the other ranks, on `fake` tensors or real ones
    of `device`, that of the module.

    With `compiles`, a strategy may compile the blocks; else they run as they are. Raises
    NeedsRealTensorsError when `fake` tensors do not suffice.
    """
    world = FakeWorld(plan.mesh, rank, device)
    subject = make_trained_module(FakeTensorMode(allow_non_fake_inputs=True) if fake else None)
    try:
        with ExitStack() as stack:
            if fake:
                stack.enter_context(answer_reads(subject.module, compiles=compiles))
            # waits for a missing collective return at once: it is reported below
            works: dict[str, Work] = defaultdict(CompletedWork)
            # fake numbers are not checked
            strategies = tuple(each.without_files() for each in plan.strategies)
            unguarded = replace(plan.job, guard=LossGuard())
            unguarded_plan = replace(plan, job=unguarded, strategies=strategies)
            executor = StepExecutor(
                unguarded_plan.for_rank(rank),
                RankState(subject, world, loss, works=works),
                stateless_rng=_keep_all_rng(plan),
            )
            stack.callback(executor.close)
            yield executor
    except Exception as error:
        if not fake or isinstance(error, PlanError) or not depends_on_values(error):
            raise
        text = f"the model reads tensor values, which fake tensors lack ({type(error).__name__}: {error})"
        raise NeedsRealTensorsError(
            text, fix="trace it on real tensors: fake=False; the full model is then built", location="trace"
        ) from error


def rank_batch(sample: Batch, plan: Plan, rank: int) -> Batch:
    """Returns `sample`, a batch of one, as often as `rank` reads samples in a step."""
    count = len(plan.samples_read(rank))
    return {key: value.repeat(count, *[1] * (value.ndim - 1)) for key, value in sample.items()}


def traced_steps(plan: Plan, num_steps: int) -> tuple[int, ...]:
    """Returns the numbers of the steps that a trace runs: the first ones, and the next that ends a round."""
    steps, period = tuple(range(num_steps)), plan.program.longest_period
    if period is None or any(map(period.ends_with, steps)):
        return steps
    return (*steps, next(step for step in count(num_steps) if period.ends_with(step)))


def compare_trace(plan: RankPlan, rank_trace: RankTrace) -> Iterator[Diagnostic]:
    """Yields every difference between what a rank issued and what `plan` states for each step.

    Each only once.
    """
    reported: set[str] = set()
    for step, issued, counts in zip(rank_trace.numbers, rank_trace.steps, rank_trace.counts, strict=True):
        planned = planned_messages(plan, counts=counts, step=step)
        for action, text in (*count_problems(plan, counts, step), *_differences(planned, issued)):
            if text not in reported:
                reported.add(text)
                yield Diagnostic(f"{text}, on rank {rank_trace.rank} in step {step + 1}", TRACE_FIX, action)


def _differences(planned: Sequence[Message], issued: Sequence[Message]) -> Iterator[tuple[str, str]]:
    issued_by_action: Mapping[str, list[Message]] = defaultdict(list)
    for message in issued:
        issued_by_action[message.action].append(message)
    stated: Mapping[str, list[Message]] = defaultdict(list)
    for message in planned:
        stated[message.action].append(message)
    same_order = len(planned) == len(issued)
    for action, messages in stated.items():
        issued_messages = issued_by_action.get(action, [])
        if issued_messages == messages:
            continue
        same_order = False
        stated_text = "; ".join(map(str, messages))
        if not issued_messages:
            yield action, f"{action} issued nothing, and the program states: {stated_text}"
        elif len(issued_messages) > len(messages):
            expected = "the one" if len(messages) == 1 else f"the {len(messages)}"
            yield (
                action,
                f"{action} issued {len(issued_messages)} collectives "
                f"({'; '.join(map(str, issued_messages))}), not {expected} "
                f"stated: {stated_text}",
            )
        else:
            yield (
                action,
                f"{action} issued: {'; '.join(map(str, issued_messages))}, and the program states: "
                f"{stated_text}",
            )
    for action in [action for action in issued_by_action if action not in stated]:
        same_order = False
        yield (
            action,
            f"{action or 'no action'} issued: {issued_by_action[action][0]}, and the program states no "
            "collective for it",
        )
    for issued_message, message in zip(issued, planned, strict=False) if same_order else ():
        if issued_message != message:
            yield (
                issued_message.action,
                f"{issued_message.action} was issued where the program has {message.action}: the order "
                f"differs",
            )
            return


def _keep_all_rng(plan: Plan) -> StatelessRNG | None:
    """Returns an RNG that keeps everything: masks change no collective, and hashing them takes minutes."""
    if not plan.model_spec.has_dropout:
        return None
    rng = StatelessRNG(plan.job.train.seed, DrawSites())
    rng.begin_trial(plan.micro_batch)
    return rng


@contextmanager
def answer_reads(module: nn.Module, *, compiles: bool = False) -> Iterator[None]:
    """Makes numbers that are read off fake tensors 1, except inside the forward of `module`, which torch may
    compile if it `compiles`.
    """
    mode, original_forward, forward = (
        _AnswerReads(compiles=compiles),
        module.__dict__.get("forward"),
        module.forward,
    )

    def marked_forward(*args: Any, **kwargs: Any) -> Any:
        mode.mark(inside=True)
        try:
            return forward(*args, **kwargs)
        finally:  # a stage leaves it by a BaseException, after which torch calls no hooks
            mode.mark(inside=False)

    module.forward = marked_forward
    try:
        with mode:
            yield
    finally:
        module.__dict__.pop("forward")
        if original_forward is not None:
            module.__dict__["forward"] = original_forward


class _AnswerReads(TorchDispatchMode):
    """Answers what fake tensors cannot, outside of the model's forward.

    Operations on lists of fake tensors that return nothing (fused optimizers) change values only and are
    skipped: torch has no fake kernel for some, and would run the real one on zeros of full size.
    """

    def __init__(self, *, compiles: bool) -> None:
        super().__init__()
        self._in_forward, self._compiles = False, compiles

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]  # torch asks each mode, not its class
        """Returns whether torch.compile works under this mode: else it would let blocks run as they are."""
        return self._compiles

    def mark(self, *, inside: bool) -> None:
        """Records whether the model's forward is under way."""
        self._in_forward = inside

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        reads = func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor)
        if reads and not self._in_forward:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten.record_stream.default and isinstance(args[0], FakeTensor):
            return None
        if not func._schema.returns and any(
            isinstance(rank_trace, FakeTensor) for rank_trace in _listed(args)
        ):
            return None
        return func(*args, **(kwargs or {}))


def _listed(args: tuple[Any, ...]) -> list[Any]:
    return args[0] if args and isinstance(args[0], list) else []
