"""The actions of workers that look up rows of hosts, and the lists of these hosts.

    worker   PULL_ROWS(table: counts, ids, rows)  F    B  PUSH_ROWS(table)
    host     PULL_ROWS(table: the same)                   PUSH_ROWS(table)

Both have one name on both sides, since one exchange carries each: a host goes through the tables in the order
of its workers. A worker's pull is begun by its forward, which knows the ids. How many rows there are is
known at run time: the sizes here are what is expected if all ids are alike, and the most.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, INTEGER_NBYTES
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.grad_dependencies import with_grad_waits
from meshwright.plan.step.memory.memory_names import row_grads_name, row_ids_name, row_sum_name, rows_name
from meshwright.plan.step.program import Action, Allocation, RuntimeSize, Transfer
from meshwright.plan.step.simulator import qualified_name
from meshwright.plan.step.single_device_program import (
    EVERY_RANK_KINDS,
    FORWARD_KINDS,
    ROW_KINDS,
    WEIGHT_GRAD_KINDS,
    samples_per_microbatch,
)

ID_DTYPE = "int64"
ID_NBYTES = INTEGER_NBYTES[ID_DTYPE]


@dataclass(frozen=True)
class HostedTable:
    """One table, the weight `param` of the embedding `module`, and its lookup in the block call `block_call`,
    of `num_ids` ids per sample. It has `num_rows` rows of `width` elements; each of `num_hosts` has a
    `stretch` of them, the last ones fewer, or none.
    """

    module: str
    param: str
    block_call: str
    num_ids: int
    num_rows: int
    width: int
    stretch: int
    num_hosts: int

    @property
    def bounds(self) -> list[int]:
        """The first row of each host, and the one behind the last."""
        return [min(self.num_rows, number * self.stretch) for number in range(self.num_hosts + 1)]

    def rows_by_host(self, number: int) -> list[int]:
        """Returns how many of `number` distinct rows are those of each host, if all are looked up alike."""
        shares = [number * bound // self.num_rows for bound in self.bounds]
        return [shares[host + 1] - shares[host] for host in range(self.num_hosts)]

    def expected_rows(self, num_samples: int) -> int:
        """Returns how many distinct rows are looked up for so many samples, if all ids are alike."""
        missed = (1 - 1 / self.num_rows) ** (num_samples * self.num_ids)
        return round(self.num_rows * (1 - missed))

    def max_rows(self, num_samples: int) -> int:
        """Returns how many distinct rows are looked up for so many samples at most."""
        return min(num_samples * self.num_ids, self.num_rows)

    def count_name(self, microbatch: int | None) -> str:
        """Returns the name under which a rank records the rows that it looks up, or gives."""
        return f"rows({self.module}, {microbatch})"


def add_row_actions(
    actions: Sequence[Action], tables: Sequence[HostedTable], axis: str, view: RankView, job: Job
) -> list[Action]:
    """Returns `actions` of a worker, whose forwards pull the rows of `tables` that they look up, and behind
    whose backwards their gradients are pushed to hosts along `axis`. If the rank of `view` is to be a host,
    what it does meanwhile stands in their place.
    """
    num_samples = samples_per_microbatch(actions, view.plan, job)
    sizes = axis, view.plan.num_workers, job.precision.parameters, num_samples
    number = view.coordinate[axis] - view.plan.num_workers
    rows = _WorkerActions(*sizes) if number < 0 else _HostActions(*sizes, number)
    edited, last = list[Action](), actions[0]
    for action in actions:
        own = [each for each in tables if each.block_call == action.subject]
        if own and action.kind in FORWARD_KINDS:
            edited += rows.forward(action, own, last)
        elif own and action.kind in WEIGHT_GRAD_KINDS:
            edited += rows.backward(action, own, edited)
        else:
            edited.append(action)
        last = last if action.starts_work else action
    moves = [each for each in edited if each.kind == "PUSH_ROWS"]
    freed = [row_grads_name(each.subject, each.microbatch) for each in moves if number < 0]
    return [
        replace(each, frees=(*each.frees, *freed)) if each.kind == "CLIP" else each
        for each in with_grad_waits(edited, [each.name for each in moves])
    ]


@dataclass(frozen=True)
class _RowMessages:
    """The messages of `num_workers` workers and of hosts along `axis`, in `dtype`, in microbatches of
    `num_samples` samples.
    """

    axis: str
    num_workers: int
    dtype: str
    num_samples: int

    def pull(self, table: HostedTable, ids: RuntimeSize | None, rows: RuntimeSize | None) -> list[Transfer]:
        """Returns the messages of a pull from `table` in which a rank sends so many `ids`, and `rows`."""
        counts = ID_NBYTES * (self.num_workers + table.num_hosts)
        messages = (
            Transfer("all_to_all", (self.axis,), counts, dtype=ID_DTYPE),
            self.message(ID_DTYPE, ids),
            self.message(self.dtype, rows),
        )
        return [replace(each, position=at) for at, each in enumerate(messages)]

    def message(self, dtype: str, rows: RuntimeSize | None) -> Transfer:
        """Returns the message in which a rank sends `rows`; None: it receives."""
        nbytes = 0 if rows is None else rows.expected
        return Transfer("all_to_all_v", (self.axis,), nbytes, dtype=dtype, runtime_size=rows)

    def push(self, table: HostedTable, backward: Action, rows: RuntimeSize | None) -> Action:
        """Returns the push to `table` behind `backward`, in which a rank sends the gradients of `rows`."""
        return Action(
            "PUSH_ROWS",
            table.module,
            backward.microbatch,
            stream="comm",
            waits=(backward.name,),
            tensors=(table.param,),
            transfer=self.message(self.dtype, rows),
        )

    def row_nbytes(self, table: HostedTable) -> int:
        """Returns the bytes of a row of `table`."""
        return table.width * FLOAT_NBYTES[self.dtype]


@dataclass(frozen=True)
class _WorkerActions(_RowMessages):
    def forward(self, action: Action, tables: Sequence[HostedTable], last: Action) -> Iterator[Action]:
        """Yields the pulls of the rows of `tables`, and the forward `action`, which looks them up."""
        for table in tables:
            messages = self.pull(table, self._rows(table, action.microbatch, ID_NBYTES), None)
            pull = Action("PULL_ROWS", table.module, action.microbatch, tensors=(table.param,))
            yield self._with_memory(pull.with_inner_transfers(messages), [table], rows_name)
        yield action

    def backward(
        self, action: Action, tables: Sequence[HostedTable], before: Sequence[Action]
    ) -> Iterator[Action]:
        """Yields the backward `action`, and the pushes of the gradients of rows that it makes."""
        yield self._with_memory(action, tables, row_grads_name)
        for table in tables:
            rows = self._rows(table, action.microbatch, self.row_nbytes(table))
            frees = (rows_name(table.module, action.microbatch),)
            yield replace(self.push(table, action, rows), frees=frees)

    def _with_memory(
        self, action: Action, tables: Sequence[HostedTable], name: Callable[[str, int | None], str]
    ) -> Action:
        """Returns `action` with memory for a value of each element of the rows of `tables`."""
        found = list(action.allocations)
        for table in tables:
            rows = self._rows(table, action.microbatch, self.row_nbytes(table))
            found.append(Allocation(name(table.module, action.microbatch), rows.expected, rows))
        return replace(action, allocations=tuple(found))

    def _rows(self, table: HostedTable, microbatch: int | None, row_nbytes: int) -> RuntimeSize:
        sizes = table.expected_rows(self.num_samples), table.max_rows(self.num_samples)
        return RuntimeSize(table.count_name(microbatch), row_nbytes, *sizes)


@dataclass(frozen=True)
class _HostActions(_RowMessages):
    """What the host of this `number` does."""

    number: int

    def forward(self, action: Action, tables: Sequence[HostedTable], last: Action) -> Iterator[Action]:
        """Yields what answers the pulls of the forward `action`, which workers begin behind `last`."""
        for table in tables:
            ids = self._rows(table, action.microbatch, ID_NBYTES)
            messages = self.pull(table, None, replace(ids, row_nbytes=self.row_nbytes(table)))
            yield Action(
                "PULL_ROWS",
                table.module,
                action.microbatch,
                waits=(last.name,),
                tensors=(table.param,),
                inner_transfers=tuple(messages),
                allocations=(Allocation(row_ids_name(table.module, action.microbatch), ids.expected, ids),),
            )
        yield action

    def backward(
        self, action: Action, tables: Sequence[HostedTable], before: Sequence[Action]
    ) -> Iterator[Action]:
        """Yields what takes the gradients of rows that the backward `action` of workers makes: the first one
        of a table begins their sum.
        """
        yield action
        for table in tables:
            is_first = all(each.kind != "PUSH_ROWS" or each.subject != table.module for each in before)
            total = Allocation(row_sum_name(table.param), table.stretch * self.row_nbytes(table))
            frees = (row_ids_name(table.module, action.microbatch),)
            push = self.push(table, action, None)
            yield replace(push, allocations=(total,) if is_first else (), frees=frees)

    def _rows(self, table: HostedTable, microbatch: int | None, row_nbytes: int) -> RuntimeSize:
        own = table.bounds[self.number + 1] - table.bounds[self.number]
        expected = table.rows_by_host(table.expected_rows(self.num_samples))[self.number]
        most = min(own, table.max_rows(self.num_samples))
        sizes = self.num_workers * expected, self.num_workers * most
        return RuntimeSize(table.count_name(microbatch), row_nbytes, *sizes)


def host_actions(worker: str, actions: Sequence[Action], owned: Collection[str]) -> Iterator[Action]:
    """Yields the list of a host of the parameters `owned`: what stands in the list `actions` of its workers,
    of the role `worker`, for it, and what all ranks do.
    """
    kinds = (*ROW_KINDS, *EVERY_RANK_KINDS)
    kept = {action.name for action in actions if action.kind in kinds}
    for action in actions:
        if action.kind in ROW_KINDS:  # what it waits for are the workers
            yield replace(action, waits=tuple(qualified_name(worker, wait) for wait in action.waits))
        elif action.kind in EVERY_RANK_KINDS:
            waits = [wait for wait in action.waits if wait in kept]
            waits += ["TOKEN_COUNT()"] if action.kind == "STEP" else []
            sums = tuple(map(row_sum_name, owned)) if action.kind == "STEP" else ()
            tensors = tuple(owned) if action.tensors else ()
            yield replace(action, waits=tuple(dict.fromkeys(waits)), tensors=tensors, frees=sums)
