"""The engine's own acts: COUNT, F, LOSS, B, PACK, UNPACK, TALLY, CLIP, STEP, and starting a collective.

The header that COUNT sends holds three numbers: the tokens that count, how many ranks ask to stop, how many rows there
are. With it every rank knows, before its first backward, the one global denominator, and all ranks stop together.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.core.program import Action
from meshwright.core.steps import ROLE
from meshwright.core.strategy import Handler
from meshwright.engine.buckets import Bucket
from meshwright.engine.loss import Batch
from meshwright.engine.optimizers import forget_scale, scale_in_step
from meshwright.engine.state import Metrics, State
from meshwright.model.dice import Dice
from meshwright.model.drive import Drive, Visit, backward, backward_from
from meshwright.model.dropout import StatelessDropout
from meshwright.model.paths import pieces
from meshwright.model.values import tensors


class Acts:
    """Handlers over one rank's state."""

    def __init__(self, plan: Plan, state: State, optimizer: torch.optim.Optimizer, drive: Drive, dice: Dice | None) -> None:
        self.plan, self.state, self.optimizer = plan, state, optimizer
        self._drive, self._dice = drive, dice
        self._step, self._rows, self._stop, self._checked, self._under_way = 0, 0, False, False, False
        self._counted: Sequence[float] | None = None
        self._trained = list(state.subject.trainable.values())
        self._meant = {action.name: self._parameters(action) for action in plan.program.actions(ROLE) if action.kind == "CLIP"}
        self._stateless = None if dice is None else StatelessDropout(dice)
        self._carriers = {name: act for act in plan.program.actions(ROLE) if act.transfer for name in act.tensors}
        self.handlers: Mapping[str, Handler] = {
            "COUNT": self.count,
            "LOSS": self.loss,
            "B": self.backward,
            "PACK": self.pack,
            "UNPACK": lambda action: state.buckets[action.subject].unpack(),
            "TALLY": self.tally,
            "CLIP": self.clip,
            "STEP": self.update,
        }

    def begin(self, step: int, batch: Batch | None, *, stop: bool) -> None:
        """Cut the rank's rows into micro-batches; one without rows stands in with the example and weighs nothing.

        Raises ValueError for a batch with more rows than the plan's, or whose tensors differ in rows.
        """
        size, device = self.plan.micro_batch, self.state.world.device
        rows = 0 if batch is None else self._rows_of(batch)
        micros: list[Batch] = []
        for first in range(0, self.plan.local_batch, size):
            part: Batch = self.state.subject.stand_in
            if batch is not None and first < rows:
                part = batch if rows <= size else {key: value[first : first + size] for key, value in batch.items()}
            micros.append({key: value.to(device) for key, value in part.items()})
        self.state.begin(micros, num_real=-(-rows // size))
        self._step, self._rows, self._stop = step, rows, stop
        if self._under_way:  # the last step did not come to its end: what it left must not be added to this one
            self._end()
        self._under_way = True

    def start(self, action: Action, tensor: torch.Tensor) -> None:
        """Start the collective of `action` on `tensor`; without a transfer there is nothing to send."""
        if action.transfer is not None:
            group = self.state.world.group(action.transfer.axes)
            self.state.works[action.name] = group.all_reduce(tensor, action=action.name, algorithm=action.transfer.algorithm)

    def count(self, action: Action) -> None:
        """Count what this rank's rows weigh, and start adding it up over the ranks."""
        state = self.state
        tokens = sum(float(state.loss.count(micro)) for micro in state.micros[: state.num_real])
        self._counted = (tokens, self._stop, self._rows)
        if action.transfer is not None:
            state.header = torch.tensor(self._counted, dtype=torch.float64, device=state.world.device)
            self._counted = None  # known once the others' have been added
            self.start(action, state.header)

    def forward(self, micro: int, reach: Callable[[str], None]) -> None:
        """Run the model's own forward on one micro-batch; `reach` is called before each block."""
        state = self.state
        inputs = {key: value for key, value in state.micros[micro].items() if key not in state.loss.targets}
        with self._autocast(), self._randomness(micro):
            outputs, closing, seen = self._drive.forward(self._announcing(reach), lambda: state.subject.module(**inputs))
        state.passes[micro] = seen
        state.closings[micro] = (outputs, closing)

    def loss(self, action: Action) -> None:
        """Take the loss of a micro-batch over the global count, and its gradient down to the last blocks' outputs."""
        state, micro = self.state, action.micro or 0
        outputs, closing = state.closings.pop(micro)
        total = state.loss.total(outputs, state.micros[micro])
        if micro >= state.num_real:
            total = total * 0.0
        if not self._checked:
            self._check_paths(total, micro, outputs, closing)
        state.tally += total.detach()
        del outputs
        with self._no_draws():
            if total.requires_grad:  # unless this forward passed no trained parameter
                backward_from(total, 1.0 / max(self._totals()[0], 1.0))
            backward(closing)

    def backward(self, action: Action) -> None:
        """Run the backward of one visit; one that the forward did not reach has none."""
        visit = self.state.passes[action.micro or 0].visits.pop(action.subject, None)
        if visit is None:
            return
        if self._dice is None:
            backward(visit)
        else:
            with self._no_draws():
                backward(visit)

    def pack(self, action: Action) -> None:
        """Put the gradients of `action.tensors` into the bucket that carries them, made at its first use; it stays."""
        carrier = self._carriers[action.tensors[0]]
        bucket = self.state.buckets.get(carrier.subject)
        if bucket is None:
            parameters = {name: self.state.subject.parameters[name] for name in carrier.tensors}
            bucket = Bucket(parameters, getattr(torch, self.plan.job.precision.reduce))
            self.state.buckets[carrier.subject] = bucket
        bucket.pack(action.tensors)

    def tally(self, action: Action) -> None:
        """Start adding up the loss over the ranks."""
        self.start(action, self.state.tally)

    def clip(self, action: Action) -> None:
        """Take the norm of the gradients of the logical parameters, each counted once; scale them down to `train.clip`."""
        grads, parameters = [], self._meant[action.name]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grads.append(parameter.grad)
        norm = torch.nn.utils.get_total_norm(grads)
        self.state.grad_norm = norm.item()
        limit = self.plan.job.train.clip
        if limit and not self.state.grad_norm + 1e-6 <= limit:  # as torch.nn.utils.clip_grad_norm_ has it
            scale_in_step(self.optimizer, parameters, norm, limit)

    def update(self, action: Action) -> None:
        """Let the optimizer step, unless nothing counted in this step; the gradients are gone afterwards."""
        if self._totals()[0]:
            self.optimizer.step()
        self._end()

    def metrics(self, step: int, lr: float) -> Metrics:
        """What the step did, from the header and the tally that all ranks share."""
        count, stop, _ = self._totals()
        loss = self.state.tally.item() / max(count, 1.0)
        return Metrics(step, loss, self.state.grad_norm, lr, int(count), stop=stop > 0, skipped=not count)

    def _totals(self) -> Sequence[float]:
        """What counts in this step over all ranks: tokens, wishes to stop, rows; COUNT has ended."""
        if self._counted is None:
            self._counted = self.state.header.tolist()
        return self._counted

    def _parameters(self, action: Action) -> list[nn.Parameter]:
        return [self.state.subject.parameters[name] for name in action.tensors]

    def _end(self) -> None:
        forget_scale(self.optimizer)
        for parameter in self._trained:  # 10 us where the optimizer's own zero_grad takes 130
            parameter.grad = None
        self._under_way = False

    def _rows_of(self, batch: Batch) -> int:
        rows = {key: len(value) for key, value in batch.items()}
        if len(set(rows.values())) != 1:
            given = ", ".join(f"{key} {count}" for key, count in rows.items()) or "no tensors"
            text = f"the batch holds {given}; needed are the same rows in every tensor"
            raise ValueError(f"{text}; pass None when this rank has no rows left")
        count = next(iter(rows.values()))
        if count > self.plan.local_batch:
            text = f"the batch has {count} rows and this rank plays {self.plan.local_batch} in a step"
            raise ValueError(f"{text}; pass at most that many, or raise train.batch")
        return count

    def _autocast(self) -> AbstractContextManager:
        precision = self.plan.job.precision
        if precision.compute == precision.parameters:
            return nullcontext()
        dtype = getattr(torch, precision.compute)
        # no cache: a cached cast would join the graphs of two blocks that share a weight
        return torch.autocast(self.state.world.device.type, dtype=dtype, cache_enabled=False)

    def _randomness(self, micro: int) -> AbstractContextManager:
        """Dropout by global sample: row k of this micro-batch has one number in the global batch under every plan."""
        if self._dice is None:
            return nullcontext()
        plan, rows = self.plan, len(next(iter(self.state.micros[micro].values())))
        first = plan.first_rows(plan.data_index(self.state.world.rank))[micro]
        cursor = self._step * plan.job.train.batch + first
        self._dice.begin(self._step, torch.arange(cursor, cursor + rows, device=self.state.world.device))
        return self._stateless or nullcontext()

    def _no_draws(self) -> AbstractContextManager:
        """Refuse randomness in backward: a model that recomputes would meet other masks than its forward did."""
        if self._dice is None:
            return nullcontext()
        self._dice.enter("a recomputation in backward, which redraws its dropout: turn off the model's own checkpointing")
        return self._stateless or nullcontext()

    def _announcing(self, reach: Callable[[str], None]) -> Callable[[str], None]:
        if self._dice is None:
            return reach
        enter = self._dice.enter

        def announced(visit: str) -> None:
            reach(visit)
            enter(visit)

        return announced

    def _check_paths(self, loss: torch.Tensor, micro: int, outputs: Any, closing: Visit) -> None:
        if loss.shape != ():
            text = f"the loss has the shape {list(loss.shape)}; needed is a scalar, the sum over what counts"
            raise PlanError(text, fix="return total.sum() from Loss.total", where="loss")
        subject = self.state.subject
        found = pieces(self.state.passes[micro], closing)
        found.refuse_unknown(subject.trainable, {weight.name: weight.visits for weight in subject.anatomy.weights})
        handed = {id(tensor) for tensor in tensors(outputs)}
        found.refuse_loss(loss, {name: p for name, p in subject.parameters.items() if id(p) not in handed})
        self._checked = True
