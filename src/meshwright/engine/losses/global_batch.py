"""Where the rows of several ranks meet: GATHER, SCATTER, and the loss that is taken on all of them.

Every rank brings as many rows of a tensor as its micro-batch has in the plan. One that has fewer, or none, pads with
zeros, which are cut out before anybody looks at them, so messages have one size and no rank waits. Tensors travel as
bytes; floats as float32 (float64 beside such parameters), which holds every narrower float exactly.

    all_gather   each rank takes the same loss on all rows. It keeps the gradient of its own rows in full, because no other
                 rank has them; of a tensor that all ranks have (a logit scale) it keeps 1/n, because n ranks will add it up
    gather       index 0 of the group takes the loss, and SCATTER hands each rank the gradient of its rows

Before, SCATTER may have handed out the rows themselves, when index 0 alone has read them.
"""

from collections.abc import Callable
from typing import Any

import torch

from meshwright.comm.collectives.group import Group
from meshwright.engine.runtime.loss import Batch
from meshwright.engine.runtime.state import RankState
from meshwright.model.blocks.loss_inputs import distinct_tensors
from meshwright.model.tensors.pytree import replace_tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import BatchTensor
from meshwright.plan.plan import Plan
from meshwright.plan.step.action import Action
from meshwright.plan.step.single_device import BATCH_INFO, GRAD_NORM, output_grad_name
from meshwright.plan.strategy import Handler


class GlobalBatchLoss:
    """One rank's part in it.

    `num_rows()` is the rows of the global batch in this step, known once TOKEN_COUNT has ended; `start(action, tensor)` starts the
    collective of an action.
    """

    def __init__(
        self,
        plan: Plan,
        state: RankState,
        num_samples: Callable[[], int],
        start_collective: Callable[[Action, torch.Tensor], None],
    ) -> None:
        self._plan, self._state, self._num_rows, self._start = plan, state, num_samples, start_collective
        self.handlers: dict[str, Handler] = {
            "GATHER": self.gather,
            "SCATTER": self.scatter,
            "BROADCAST": self.broadcast,
        }
        gathers = [
            action for action in plan.actions if action.kind == "GATHER" and action.transfer is not None
        ]
        self._collective = gathers[0].transfer.collective if gathers and gathers[0].transfer else "all_gather"
        self._axes = gathers[0].transfer.axes if gathers and gathers[0].transfer else ()
        self._outputs = {column.name: place for place, column in enumerate(plan.model_spec.outputs)}
        self._columns = {
            column.name: column for column in (*plan.model_spec.targets, *plan.model_spec.outputs)
        }
        self._inputs = {column.name: column for column in plan.model_spec.inputs}
        self._gathered = [action.subject for action in gathers if action.subject != BATCH_INFO]
        self._batch: Batch = {}
        self._rows_read = 0
        self._mine: list[torch.Tensor] = []
        self._arriving: dict[str, torch.Tensor | None] = {}
        self._leaves: dict[int, torch.Tensor] = {}

    @property
    def computes_loss(self) -> bool:
        """Whether this rank takes the loss, or waits for its gradient."""
        return self._collective == "all_gather" or self._group.index == 0

    @property
    def reports_loss(self) -> bool:
        """Whether the loss of this rank is the one that is added up: all that take it take the same."""
        return self._group.index == 0

    def begin_step(self) -> None:
        """Forget the last step, and note how many rows this rank has read in this one."""
        self._batch, self._mine, self._leaves = {}, [], {}
        self._rows_read = self._state.num_samples
        self._arriving.clear()

    def gather(self, action: Action) -> None:
        """Start the exchange of this rank's rows of an output or a target, or of FACTS."""
        group = self._group
        if not self._mine:
            self._mine = distinct_tensors(self._state.final_glue[action.microbatch or 0][0])
        tensor = (
            self._facts() if action.subject == BATCH_INFO else self._padded(self._columns[action.subject])
        )
        sent = _bytes(tensor)
        output = sent.new_empty(group.size * sent.numel()) if self.computes_loss else None
        self._arriving[action.subject] = output
        if output is not None and self._collective == "all_gather":
            work = group.all_gather(output, sent, action=action.name)
        else:
            work = group.gather(output, sent, action=action.name)
        self._state.works[action.name] = work

    def scatter(self, action: Action) -> None:
        """Take this rank's rows from index 0: of the batch that it has read, or of the gradient of an output."""
        if action.subject in self._inputs:
            self._take_rows(action, self._inputs[action.subject])
            return
        name = next(name for name in self._outputs if output_grad_name(name) == action.subject)
        column, mine = self._columns[name], self._mine[self._outputs[name]]
        whole = None
        if self.computes_loss:
            leaf = self._leaves.get(id(mine))
            whole = mine.detach()[:0] if leaf is None or leaf.grad is None else leaf.grad  # padded with zeros
        rows = self._handed_out(action, column, whole)
        if mine.requires_grad:
            grad = torch.zeros_like(mine)
            grad[: self._state.num_samples] = rows[: self._state.num_samples]
            torch.autograd.backward([mine], [grad])

    def broadcast(self, action: Action) -> None:
        """Start handing out a parameter, or the gradient norm, as index 0 has it."""
        state = self._state
        if action.subject == GRAD_NORM:
            state.grad_norm_tensor = torch.tensor(
                [state.grad_norm], dtype=torch.float64, device=state.world.device
            )
        self._start(
            action,
            state.grad_norm_tensor
            if action.subject == GRAD_NORM
            else state.trained_module.parameters[action.subject],
        )

    def loss_sum(self, outputs: Any) -> torch.Tensor | None:
        """The loss of all rows, from the outputs and targets that have arrived; None where it is not taken, or of no rows.

        Raises PlanError when ranks differ in a tensor that is not per row.
        """
        if not self.computes_loss:
            return None
        counts = self._rows_of_ranks()
        if not any(counts):
            return None
        met = {name: self._met(self._columns[name], counts) for name in self._gathered}
        for name, place in self._outputs.items():
            mine = self._mine[place]
            if name in met:
                self._leaves[id(mine)] = met[name].to(mine.dtype).requires_grad_(mine.requires_grad)
            elif mine.requires_grad:
                self._leaves[id(mine)] = mine.detach().requires_grad_()
        batch = {name: tensor for name, tensor in met.items() if name not in self._outputs}
        return self._state.loss.total(replace_tensors(outputs, self._leaves), batch or self._batch)

    def backward_to_local_samples(self) -> None:
        """Take the gradient of this rank's rows, and its part of what all ranks share, from that of all rows."""
        if self._collective != "all_gather":
            return
        counts = self._rows_of_ranks()
        group, mine = self._group, []
        first, size = sum(counts[: group.index]), counts[group.index]
        for name, place in self._outputs.items():
            tensor, leaf = self._mine[place], self._leaves.get(id(self._mine[place]))
            if leaf is None or leaf.grad is None or not tensor.requires_grad:
                continue
            grad = leaf.grad / group.size
            if name in self._gathered:
                grad = torch.zeros_like(tensor)
                grad[:size] = leaf.grad[first : first + size]
            mine.append((tensor, grad))
        if mine:
            torch.autograd.backward([tensor for tensor, _ in mine], [grad for _, grad in mine])

    @property
    def _group(self) -> Group:
        return self._state.world.group(self._axes)

    def _facts(self) -> torch.Tensor:
        """How many rows this rank has, and the sum of each output that the loss takes and that is not per row."""
        columns = self._plan.model_spec.outputs
        shared = [
            self._mine[place]
            for place, column in enumerate(columns)
            if column.used_by_loss and not column.per_sample
        ]
        rows = torch.tensor(self._state.num_samples, dtype=torch.float64, device=self._state.world.device)
        return torch.stack([rows, *(tensor.detach().double().sum() for tensor in shared)])

    def _rows_of_ranks(self) -> list[int]:
        """How many rows each rank of the group brings, in rank order."""
        group = self._group
        facts = self._arriving.get(BATCH_INFO)
        if (
            facts is None
        ):  # index 0 has handed them out: as many as there are to each, in the order of the batch
            return [self._dealt(index) for index in range(group.size)]
        told = facts.view(torch.int64).view(group.size, -1)  # as bits: a NaN equals a NaN
        if not (told[:, 1:] == told[0, 1:]).all():
            text = "the loss of the whole batch takes an output that is not per row, and the ranks do not hold the same"
            fix = "return it per row (rows along dim 0), or compute it from parameters alone"
            raise PlanError(text, fix=fix, location="loss")
        return facts.view(torch.float64).view(group.size, -1)[:, 0].long().tolist()

    def _dealt(self, index: int) -> int:
        """How many of the rows that index 0 has read go to the rank at `index`: they are dealt in order, as far as they go."""
        rows = self._rows_read if self._group.index == 0 else self._num_rows()
        return max(0, min(self._plan.micro_batch, rows - index * self._plan.micro_batch))

    def _padded(self, column: BatchTensor) -> torch.Tensor:
        place = self._outputs.get(column.name)
        rows = self._state.microbatches[0][column.name] if place is None else self._mine[place].detach()
        return self._filled(column, rows[: self._state.num_samples], self._plan.micro_batch)

    def _filled(self, column: BatchTensor, rows: torch.Tensor, size: int) -> torch.Tensor:
        """`rows` and zeros behind them: `size` rows, as they travel."""
        if tuple(rows.shape[1:]) != column.shape:
            text = f"{column.name} has rows of the shape {list(rows.shape[1:])}; the plan was made for {list(column.shape)}"
            fix = "give every sample one shape (pad it), and make the plan from an example of that shape"
            raise PlanError(text, fix=fix, location="batch")
        filled = rows.new_zeros((size, *column.shape), dtype=self._dtype(column))
        filled[: len(rows)] = rows
        return filled

    def _met(self, column: BatchTensor, counts: list[int]) -> torch.Tensor:
        """The rows of all ranks that have arrived of `column`, without the padding: (rows of the global batch, ...)."""
        arrived = self._arriving[column.name]
        if arrived is None:
            raise RuntimeError(
                f"{column.name} did not arrive on a rank that takes the loss; this is a bug: report the plan"
            )
        parts = arrived.view(self._dtype(column)).view(len(counts), self._plan.micro_batch, *column.shape)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def _take_rows(self, action: Action, column: BatchTensor) -> None:
        state = self._state
        if not self._batch:
            self._batch = {key: value[: self._rows_read] for key, value in state.microbatches[0].items()}
            state.microbatches[0] = dict(state.trained_module.dummy_batch)
        whole = self._batch[column.name] if self.computes_loss else None
        rows = self._handed_out(action, column, whole)
        state.num_samples = self._dealt(self._group.index)
        state.num_real_microbatches = min(1, state.num_samples)
        stand_in = state.trained_module.dummy_batch[column.name].to(rows.device)
        state.microbatches[0] = {
            **state.microbatches[0],
            column.name: rows[: state.num_samples] if state.num_samples else stand_in,
        }

    def _handed_out(self, action: Action, column: BatchTensor, whole: torch.Tensor | None) -> torch.Tensor:
        """This rank's rows (micro_batch, ...) of index 0's `whole`, which is None elsewhere."""
        group, size, dtype = self._group, self._plan.micro_batch, self._dtype(column)
        output = torch.zeros((size, *column.shape), dtype=dtype, device=self._state.world.device)
        sent = None if whole is None else _bytes(self._filled(column, whole, group.size * size))
        group.scatter(_bytes(output), sent, action=action.name).wait()
        return output

    def _dtype(self, column: BatchTensor) -> torch.dtype:
        return getattr(torch, column.comm_dtype(self._plan.job.precision.parameters))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
