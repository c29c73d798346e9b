"""The messages of a rank in one step: those that the program states, and those that the rank issued.

Both have one form, so that they are compared by value. What a transfer means says nothing about how it is
carried: its `messages` do, with kind, group, bytes and dtype.

    stated     Transfer.messages, in the order of the program
    issued     the entries of the ledger

The size of a message that the data decides (`RuntimeSize`) is a law: bytes = rows x bytes of a row, where the
rows are those that the rank counted in that step and recorded in its ledger before it sent them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from meshwright.comm.collectives.ledger import LedgerEntry
from meshwright.engine.runtime.microbatches import BatchShapes
from meshwright.plan.plan import Plan, RankPlan
from meshwright.plan.sharding.mesh import in_mesh_order
from meshwright.plan.step.program import Action, RuntimeSize, Transfer
from meshwright.plan.step.single_device_program import FORWARD_KINDS, RECOMPUTE_KINDS
from meshwright.verifier.one_device.parity_case import ParityCase

if TYPE_CHECKING:
    from meshwright.verifier.parity import RankReport


class Message(NamedTuple):
    """One collective: action, kind, axes, number of ranks, the operand's bytes and dtype, algorithm."""

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


def planned_messages(
    plan: RankPlan,
    microbatch_plans: Sequence[RankPlan] = (),
    counts: Mapping[str, int] | None = None,
    step: int | None = None,
) -> list[Message]:
    """Returns what each rank puts into collectives in `step`, in the order of the program; None: in a step
    that ends a round, behind the first ones, which some techniques leave exact.

    `microbatch_plans` are by microbatch the plans that say what is sent for it, where its shapes differ from
    those of `plan`. `counts` are the rows that the rank counted in the step; None: as many as expected.
    """
    actions_by_plan = {
        id(each): {action.name: action for action in each.actions} for each in microbatch_plans
    }
    actions = [
        _resize(action, actions_by_plan[id(microbatch_plans[action.microbatch])])
        if microbatch_plans and action.microbatch is not None
        else action
        for action in plan.actions
    ]
    return [
        Message(
            action.name,
            message.collective,
            in_mesh_order(message.axes),
            message.num_ranks(plan.mesh),
            _nbytes(message, counts),
            message.dtype,
            message.algorithm,
        )
        for action in actions
        if step is None or action.runs_in(step)
        for transfer in action.transfers
        for message in (transfer.messages if step is None else transfer.messages_in_step(step))
    ]


def issued_messages(entries: Iterable[LedgerEntry]) -> list[Message]:
    """Returns what a rank put into collectives, in the order in which it issued them."""
    return [
        Message(
            entry.action,
            entry.collective,
            tuple(entry.axes),
            entry.group_size,
            entry.nbytes,
            entry.dtype,
            entry.algorithm,
        )
        for entry in entries
    ]


class PlannedMessages:
    """The messages of the ranks of `parity_case.plan`, for microbatches of any shapes."""

    def __init__(self, parity_case: ParityCase) -> None:
        self._parity_case = parity_case
        columns = (*parity_case.plan.model_spec.inputs, *parity_case.plan.model_spec.targets)
        self._column_names = {column.name for column in columns}
        # by the shapes of one sample
        self._plans = {frozenset((column.name, column.shape) for column in columns): parity_case.plan}
        self._last_batch_plans: dict[tuple[frozenset, int], Plan] = {}  # with smaller microbatches
        self._first_coded_step = parity_case.plan.program.first_coded_step

    def messages(self, report: "RankReport") -> Iterator[tuple[int, Message]]:
        """Yields the messages of the rank of `report`, each with its step."""
        actual, plans_by_shapes, known_messages = (
            self._parity_case.plan.for_rank(report.rank),
            dict[BatchShapes, RankPlan](),
            dict[object, list[Message]](),
        )
        for step, counts in enumerate(report.counts[: report.num_steps]):
            microbatches = report.microbatch_shapes[step] if report.microbatch_shapes else ()
            for shapes in set(microbatches) - plans_by_shapes.keys():
                plans_by_shapes[shapes] = self._plan_for_shapes(report.rank, step, shapes)
            ends = self._parity_case.plan.program.ends(step)
            key = microbatches, tuple(counts.items()), min(step, self._first_coded_step), ends
            if key not in known_messages:
                known_messages[key] = planned_messages(
                    actual, [plans_by_shapes[shapes] for shapes in microbatches], counts, step
                )
            yield from ((step, message) for message in known_messages[key])

    def unplanned(self, report: "RankReport") -> tuple[int, str] | None:
        """Returns the step and the first message in which what the rank of `report` issued differs.

        A server that takes what comes first lets workers go on when it can: its messages have no order.
        """
        issued, planned = issued_messages(report.sent_entries), list(self.messages(report))
        plan = self._parity_case.plan
        if plan.program.depends_on_arrivals and plan.is_server(report.rank):
            issued, planned = sorted(issued), sorted(planned, key=lambda each: each[1])
        for found, stands in zip_longest(issued, planned):
            step, stated = stands or (len(report.counts), None)
            if found != stated:
                return step, f"{_issued_text(found)} where the program states {_issued_text(stated)}"
        return None

    def _plan_for_shapes(self, rank: int, step: int, shapes: BatchShapes) -> RankPlan:
        read_batch, lengths = (
            shapes[0][1][0],
            frozenset((name, shape[1:]) for name, shape in shapes if name in self._column_names),
        )
        if lengths not in self._plans:
            batch = self._parity_case.batch_reader(self._parity_case.plan, rank)(step)
            self._plans[lengths] = (
                self._parity_case.plan if batch is None else self._parity_case.plan_for_batch(batch)
            )
        plan = self._plans[lengths]
        if read_batch != plan.micro_batch:
            if (lengths, read_batch) not in self._last_batch_plans:
                self._last_batch_plans[lengths, read_batch] = plan.with_micro_batch(read_batch)
            plan = self._last_batch_plans[lengths, read_batch]
        return plan.for_rank(rank)


def count_problems(
    plan: RankPlan, counts: Mapping[str, int], step: int | None = None
) -> Iterator[tuple[str, str]]:
    """Yields the action and the problem for each count that is missing in `counts`, or exceeds its plan: of
    all actions, or of those that run in `step`, from 0.
    """
    for action in (each for each in plan.actions if step is None or each.runs_in(step)):
        for size in dict.fromkeys(_runtime_sizes(action)):
            if size.count not in counts:
                yield action.name, f"{action.name} depends on '{size.count}', and no such count was recorded"
            elif counts[size.count] > size.max_rows:
                rows = f"{counts[size.count]} rows of '{size.count}' were counted"
                yield action.name, f"{rows}, and {action.name} has memory for {size.max_rows}"


def _runtime_sizes(action: Action) -> Iterator[RuntimeSize]:
    messages = [message for transfer in action.transfers for message in transfer.messages]
    for each in (*messages, *action.allocations):
        if each.runtime_size is not None:
            yield each.runtime_size


def _issued_text(message: Message | None) -> str:
    return f"{message.action}: {message}" if message else "no collective"


def _nbytes(message: Transfer, counts: Mapping[str, int] | None) -> int:
    size = message.runtime_size
    if size is None or counts is None:
        return message.nbytes
    return counts.get(size.count, 0) * size.row_nbytes


def _resize(action: Action, others: Mapping[str, Action]) -> Action:
    """Returns `action` with the sizes of `others`, by name.

    A smaller microbatch may need no recomputation; then its forward counts as the planned kind and moves as
    much.
    """
    for kind in (action.kind, *(FORWARD_KINDS if action.kind in (*FORWARD_KINDS, *RECOMPUTE_KINDS) else ())):
        name = replace(action, kind=kind).name
        if name in others:
            return replace(others[name], kind=action.kind)
    return action
