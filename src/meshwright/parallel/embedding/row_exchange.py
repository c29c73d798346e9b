"""Sends the rows of tables from their hosts to the workers that look them up, and their gradients back.

    worker   ids --distinct, rising--> counts, ids -> hosts      rows <- hosts     looked up in these alone
    host     ids <- workers            rows -> workers           gradients <- workers, added in their order

Hosts have stretches of rows, so rising ids are in the order of hosts, and nothing is sorted a second time.
A worker keeps the rows of a microbatch as a leaf of its graph, until it has sent their gradient. A host keeps
their places for as long. On a GPU a worker waits for the device once per table and microbatch, for the
counts.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.comm.backends.fake import CompletedWork
from meshwright.comm.collectives.route import Route, exchange_counts
from meshwright.parallel.embedding.row_actions import HostedTable
from meshwright.plan.step.memory.memory_names import allocates_sum
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler, Runtime


class WorkerRows:
    """The lookups of one worker: rows that it pulls from hosts, and their gradients on the way back."""

    def __init__(self, runtime: Runtime, axis: str, tables: Sequence[HostedTable]) -> None:
        state = runtime.state
        self._state, self._group = state, state.world.group((axis,))
        self._microbatches = {action.name: action.microbatch for action in state.plan.actions}
        self._num_workers = state.plan.sharding.num_workers
        self._pulled: dict[tuple[str, int | None], tuple[torch.Tensor, Route]] = {}  # until it is pushed
        for table in tables:
            weight = state.trained_module.module.get_parameter(table.param)
            # nothing takes the weight itself; if something did, it would find no number there
            weight.data = weight.detach().new_full((), torch.nan).expand(table.num_rows, table.width)
            state.patches.replace_forward(table.module, _Lookup(self, table))
        # a pull runs within the forward behind it, which knows the ids
        self.handlers: dict[str, Handler] = {"PULL_ROWS": lambda action: None, "PUSH_ROWS": self.push}

    def look_up(self, table: HostedTable, padding_idx: int | None, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows of `ids`, of any shape: [..., width]."""
        action, microbatch = self._state.current_action, None
        is_planned = action in self._microbatches  # else it is an evaluation
        if is_planned:
            microbatch = self._microbatches[action]
            action = Action("PULL_ROWS", table.module, microbatch).name
        if isinstance(ids, FakeTensor):
            found, places, sent = self._expected_ids(table, ids)
            self._group.all_to_all(
                found.new_empty(len(sent)), found.new_zeros(len(sent)), action=action
            ).wait()
        else:
            found, places = ids.flatten().unique(return_inverse=True)
            sent = self._count(table, found, action)
        route = Route(self._group, tuple(sent), (0,) * self._group.size)
        route.send(found.to(torch.int64), action)
        dtype = getattr(torch, self._state.plan.job.precision.parameters)
        rows = route.adjoint.send(found.new_empty(0, table.width, dtype=dtype), action)
        if is_planned:
            self._state.world.ledger.record_count(table.count_name(microbatch), len(found))
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self._pulled[table.module, microbatch] = rows, route
        looked_up = rows
        if padding_idx is not None:  # its row has no gradient
            looked_up = torch.where((found == padding_idx).unsqueeze(1), rows.detach(), rows)
        return nn.functional.embedding(places.view(ids.shape), looked_up)

    def push(self, action: Action) -> None:
        """Starts to send the gradients of the rows of a microbatch; zeros if no backward has reached them."""
        rows, route = self._pulled.pop((action.subject, action.microbatch))
        gradient = torch.zeros_like(rows) if rows.grad is None else rows.grad
        self._state.issue(action, route.start(gradient, action.name)[1])

    def _count(self, table: HostedTable, found: torch.Tensor, action: str) -> list[int]:
        """Returns how many of the rising ids `found` are those of each rank, and tells it.

        Raises IndexError for an id that is in no row.
        """
        bounds = torch.searchsorted(found, torch.tensor(table.bounds, dtype=found.dtype, device=found.device))
        counts = torch.cat([bounds.new_zeros(self._num_workers), bounds.diff()])
        sent, _ = exchange_counts(self._group, counts.unsqueeze(1), action)
        rows = [number for (number,) in sent]
        if sum(rows) != len(found):
            low, high = found[0].item(), found[-1].item()
            raise IndexError(
                f"index out of range: {table.module} has {table.num_rows} rows, ids {low} to {high}"
            )
        return rows

    def _expected_ids(
        self, table: HostedTable, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Returns as many distinct ids as are expected of `ids` without values, and how many of each rank."""
        num_samples = self._state.plan.micro_batch
        number = table.expected_rows(num_samples)
        sent = [0] * self._num_workers + table.rows_by_host(number)
        return ids.new_zeros(number, dtype=torch.int64), torch.zeros_like(ids), sent


class _Lookup:
    """The forward of an embedding whose rows lie on hosts."""

    def __init__(self, rows: WorkerRows, table: HostedTable) -> None:
        self._rows, self._table = rows, table

    def __call__(self, module: nn.Embedding, input: torch.Tensor) -> torch.Tensor:
        return self._rows.look_up(self._table, module.padding_idx, input)


class HostRows:
    """What one host gives and takes: its stretch of every table."""

    def __init__(self, runtime: Runtime, axis: str, tables: Sequence[HostedTable]) -> None:
        state = runtime.state
        self._state, self._group = state, state.world.group((axis,))
        self._tables: Mapping[str, HostedTable] = {table.module: table for table in tables}
        self._number = self._group.index - state.plan.sharding.num_workers
        self._given: dict[tuple[str, int | None], tuple[torch.Tensor, Route]] = {}  # places, until taken
        self.handlers: dict[str, Handler] = {"PULL_ROWS": self.give, "PUSH_ROWS": self.take}
        state.serve_forward = self.serve_forward

    @torch.no_grad()
    def give(self, action: Action) -> None:
        """Sends each worker the rows that its microbatch looks up."""
        table = self._tables[action.subject]
        places, route = self._give(table, action.name)
        self._given[table.module, action.microbatch] = places, route
        self._state.world.ledger.record_count(table.count_name(action.microbatch), len(places))

    @torch.no_grad()
    def take(self, action: Action) -> None:
        """Receives the gradients of these rows, and adds them in the order of the workers."""
        table = self._tables[action.subject]
        places, route = self._given.pop((table.module, action.microbatch))
        flat_params = self._state.flat_params
        flat_param = flat_params.flat_param_of(table.param)
        if flat_param is None:
            raise ValueError(f"{action.name} takes gradients of {table.param}, of which no row lies here")
        total = flat_params.gradient(flat_param)
        if allocates_sum(action):
            total.zero_()
        arrived, begin = route.send(total.new_empty(0, table.width), action.name), 0
        by_row = total.view(-1, table.width)
        for number in route.output_splits:  # the rows of one worker are distinct
            part = slice(begin, begin + number)
            by_row.index_add_(0, places[part], arrived[part])
            begin += number
        self._state.issue(action, CompletedWork())

    @torch.no_grad()
    def serve_forward(self, action: str) -> None:
        """Gives the rows of one forward outside of a step."""
        for table in self._tables.values():
            self._give(table, action)

    def _give(self, table: HostedTable, action: str) -> tuple[torch.Tensor, Route]:
        """Returns the places of the rows that are asked for, by worker, and the route of their ids."""
        flat_param = self._state.flat_params.flat_param_of(table.param)
        if flat_param is None:
            raise ValueError(f"{action} gives rows of {table.param}, and none lies here")
        size, shard = self._group.size, flat_param.shard
        counts = torch.zeros(size, 1, dtype=torch.int64, device=shard.device)
        if isinstance(shard, FakeTensor):
            self._group.all_to_all(torch.empty_like(counts), counts, action=action).wait()
            arriving = self._expected_counts(table)
        else:
            arriving = [number for (number,) in exchange_counts(self._group, counts, action)[1]]
        route = Route(self._group, (0,) * size, tuple(arriving))
        ids = route.send(counts.new_empty(0), action)
        places = ids - table.bounds[self._number]
        route.adjoint.send(shard.view(-1, table.width).index_select(0, places), action)
        return places, route

    def _expected_counts(self, table: HostedTable) -> list[int]:
        plan = self._state.plan
        own = table.rows_by_host(table.expected_rows(plan.micro_batch))[self._number]
        return [own] * plan.sharding.num_workers + [0] * plan.sharding.num_servers
