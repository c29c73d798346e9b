"""The engine's own acts: COUNT, F, LOSS, B, PACK, UNPACK, TALLY, CLIP, STEP, and starting a collective.

The header that COUNT sends holds three numbers: the tokens that count, how many ranks ask to stop, how many rows there
are. With it every rank knows, before its first backward, the one global denominator, and all ranks stop together.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from meshwright.core.anatomy import ROOT
from meshwright.core.plan import Plan
from meshwright.core.program import Action
from meshwright.core.strategy import Handler
from meshwright.engine.buckets import Bucket
from meshwright.engine.loss import Batch
from meshwright.engine.state import Metrics, State
from meshwright.model.dice import Dice
from meshwright.model.drive import Drive, backward, refuse_side_paths
from meshwright.model.dropout import StatelessDropout


class Acts:
    """Handlers over one rank's state."""

    def __init__(self, plan: Plan, state: State, optimizer: torch.optim.Optimizer, drive: Drive, dice: Dice | None) -> None:
        self.plan, self.state, self.optimizer = plan, state, optimizer
        self._drive, self._dice = drive, dice
        self._step, self._checked, self._count = 0, False, 0.0
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
        """Cut the rank's rows into micro-batches; one without rows stands in with the example and weighs nothing."""
        size, example = self.plan.micro_batch, self.state.subject.stand_in
        micros: list[Batch] = []
        weights = []
        rows = 0 if batch is None else len(next(iter(batch.values())))
        if rows > self.plan.local_batch:
            text = f"the batch has {rows} rows and this rank plays {self.plan.local_batch} in a step"
            raise ValueError(f"{text}; pass at most that many, or raise train.batch")
        for micro in range(self.plan.num_micro):
            part = (
                {key: value[micro * size : (micro + 1) * size] for key, value in batch.items()} if batch is not None else example
            )
            empty = micro * size >= rows
            micros.append(example if empty else part)
            weights.append(0.0 if empty else 1.0)
        device = self.state.world.device
        self.state.begin([{key: value.to(device) for key, value in micro.items()} for micro in micros], weights)
        self._step = step
        self.state.header = torch.tensor([0.0, float(stop), rows], dtype=torch.float64, device=device)

    def start(self, action: Action, tensor: torch.Tensor) -> None:
        """Start the collective of `action` on `tensor`; without a transfer there is nothing to send."""
        if action.transfer is not None:
            group = self.state.world.group(action.transfer.axes)
            self.state.works[action.name] = group.all_reduce(tensor, action=action.name, algorithm=action.transfer.algorithm)

    def count(self, action: Action) -> None:
        """Count what this rank's rows weigh, and start adding it up over the ranks."""
        for micro, weight in zip(self.state.micros, self.state.weights, strict=True):
            if weight:
                self.state.header[0] += self.state.loss.count(micro)
        self.start(action, self.state.header)

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
        total = state.loss.total(outputs, state.micros[micro]) * state.weights[micro]
        self._count = state.header[0].item()
        state.tally[0] += total.detach()
        scaled = total / max(self._count, 1.0)
        if not self._checked:
            self._check_paths(scaled, micro, [tensor for tensor, _ in closing.glue])
        del outputs, total
        scaled.backward()
        backward(closing)

    def backward(self, action: Action) -> None:
        """Run the backward of one visit; one that the forward did not reach has none."""
        visit = self.state.passes[action.micro or 0].visits.pop(action.subject, None)
        if visit is not None:
            backward(visit)

    def pack(self, action: Action) -> None:
        """Put the gradients of `action.tensors` into the bucket, which is made at its first use and stays."""
        bucket = self.state.buckets.get(action.subject)
        if bucket is None:
            parameters = [self.state.subject.parameters[name] for name in action.tensors]
            dtype = getattr(torch, self.plan.job.precision.reduce)
            bucket = self.state.buckets[action.subject] = Bucket(parameters, dtype)
        bucket.pack()

    def tally(self, action: Action) -> None:
        """Start adding up the loss over the ranks."""
        self.start(action, self.state.tally)

    def clip(self, action: Action) -> None:
        """Take the norm of the gradients of the logical parameters, each counted once; scale them down to `train.clip`."""
        parameters = [self.state.subject.parameters[name] for name in action.tensors]
        grads = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grads.append(parameter.grad)
        norm = torch.nn.utils.get_total_norm(grads)
        self.state.grad_norm = norm.item()
        limit = self.plan.job.train.clip
        if limit and not self.state.grad_norm <= limit:
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)

    def update(self, action: Action) -> None:
        """Let the optimizer step, unless nothing counted in this step; the gradients are gone afterwards."""
        if self._count:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def metrics(self, step: int, lr: float) -> Metrics:
        """What the step did, from the header and the tally that all ranks share."""
        count, stop, _ = self.state.header.tolist()
        loss = self.state.tally[0].item() / max(count, 1.0)
        return Metrics(step, loss, self.state.grad_norm, lr, int(count), stop=stop > 0, skipped=not count)

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
        first = (micro * plan.num_data + plan.data_index(self.state.world.rank)) * plan.micro_batch
        cursor = self._step * plan.job.train.batch + first
        self._dice.begin(self._step, torch.arange(cursor, cursor + rows, device=self.state.world.device))
        return StatelessDropout(self._dice)

    def _announcing(self, reach: Callable[[str], None]) -> Callable[[str], None]:
        if self._dice is None:
            return reach
        enter = self._dice.enter

        def announced(visit: str) -> None:
            reach(visit)
            enter(visit)

        return announced

    def _check_paths(self, loss: torch.Tensor, micro: int, glue: list[torch.Tensor]) -> None:
        subject = self.state.subject
        names = {id(parameter): name for name, parameter in subject.parameters.items()}
        held = {id(subject.parameters[w.name]): w.name for w in subject.anatomy.weights if ROOT not in w.visits}
        inner = [tensor for visit in self.state.passes[micro].visits.values() for tensor, _ in visit.glue]
        refuse_side_paths([*inner, *glue], held, "the glue between blocks")
        refuse_side_paths([loss], names, "the loss")
        self._checked = True
