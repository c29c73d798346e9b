"""Plays one rank's list of actions. The engine is this loop: wait for what an action waits for, do it, go on.

    list     COUNT  F0 F1 F2  LOSS  B2 PACK B1 PACK B0 PACK  TALLY  CLIP STEP
    wire     COUNT ......                  REDUCE  REDUCE  REDUCE  TALLY

F actions are special in one way: the model's own forward, written by its user, decides when a block is reached. The
player calls the model at a micro-batch's first F; each block, before it runs, plays the list up to its own F. All other
actions are looked up in a table from kind to handler; strategies bring handlers for the kinds they introduced.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.core.program import Action
from meshwright.core.steps import ROLE
from meshwright.core.strategy import Handler
from meshwright.engine.acts import Acts
from meshwright.engine.loss import Batch
from meshwright.engine.optimizers import (
    MakeOptimizer,
    check_optimizer,
    group_numbers,
    make_optimizer,
    parameter_groups,
    restore_state,
    state_tensors,
)
from meshwright.engine.schedule import factor
from meshwright.engine.state import Metrics, State
from meshwright.model.dice import Dice
from meshwright.model.drive import Drive


class Player:
    """One rank of a plan: `step(batch)` plays the list once. `extra` are handlers for kinds that a caller added."""

    def __init__(
        self,
        plan: Plan,
        state: State,
        optimizer: MakeOptimizer | None = None,
        dice: Dice | None = None,
        extra: Mapping[str, Callable[[Action, State], None]] | None = None,
    ) -> None:
        self.plan, self.state = plan, state
        self.steps_done = 0
        trainable = state.subject.trainable
        spec = plan.job.optimizer
        self.optimizer = optimizer(parameter_groups(spec, trainable)) if optimizer else make_optimizer(spec, trainable)
        check_optimizer(self.optimizer, trainable)
        self._base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self._numbers = group_numbers(self.optimizer)
        self._drive = Drive(state.subject.blocks, in_place=plan.anatomy.in_place)
        self._acts = Acts(plan, state, self.optimizer, self._drive, dice)
        handlers: dict[str, Handler] = dict(self._acts.handlers)
        for strategy in plan.strategies:
            handlers |= strategy.bind(self)
        handlers |= {kind: self._with_state(act) for kind, act in (extra or {}).items()}
        self._list = self._resolve(plan.program.actions(ROLE), handlers)
        self._place = {(action.subject, action.micro): i for i, (action, _, _) in enumerate(self._list) if action.kind == "F"}
        self._starts: dict[int, int] = {}  # where the first F of each micro-batch stands
        for (_, micro), place in self._place.items():
            self._starts.setdefault(micro or 0, place)
        self._cursor = 0

    def step(self, batch: Batch | None, *, stop: bool = False) -> Metrics:
        """Train one global step on this rank's samples; the same numbers come back on every rank.

        `batch` holds this rank's rows, micro-batch after micro-batch: at most micro_batch * num_micro; fewer, or None,
        when its data ran out (it then takes part with zero weight). `stop` asks all ranks to stop after this step: each
        sees it in the metrics.
        """
        acts, state = self._acts, self.state
        acts.begin(self.steps_done, batch, stop=stop)
        lr = self._set_lr()
        self._cursor = 0
        for micro, first in self._starts.items():
            self._play_to(first)
            acts.forward(micro, self._reach(micro))
        self._play_to(len(self._list))
        for work in state.works.values():
            work.wait()
        self.steps_done += 1
        state.forget()
        return acts.metrics(self.steps_done, lr)

    def start(self, action: Action) -> None:
        """Start the collective that `action.transfer` states on the flat tensor of `action.subject`."""
        self._acts.start(action, self.state.tensor(action.subject))

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that must be saved, by logical name: parameters, persistent buffers, optimizer state."""
        subject = self.state.subject
        parameters = {f"model/{name}": parameter.detach() for name, parameter in subject.parameters.items()}
        buffers = {f"buffer/{name}": buffer for name, buffer in _persistent_buffers(subject.module)}
        state = state_tensors(self.optimizer, subject.trainable, self._numbers)
        return parameters | buffers | {f"optimizer/{name}": value for name, value in state.items()}

    def restore(self, saved: Mapping[str, torch.Tensor], steps_done: int) -> None:
        """Take up `saved` (as `tensors` gave it) after `steps_done` global steps."""
        subject = self.state.subject
        with torch.no_grad():
            for name, parameter in subject.parameters.items():
                parameter.copy_(saved[f"model/{name}"])
            for name, buffer in _persistent_buffers(subject.module):
                buffer.copy_(saved[f"buffer/{name}"])
        moments = {name.removeprefix("optimizer/"): value for name, value in saved.items() if name.startswith("optimizer/")}
        restore_state(self.optimizer, subject.trainable, moments)
        self.steps_done = steps_done

    def close(self) -> None:
        """Give the user's module its own forwards back."""
        self._drive.detach()

    def _set_lr(self) -> float:
        scale = factor(self.plan.job.schedule, self.steps_done, self.plan.job.train.steps)
        for group, base in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * scale
        return self._base_lrs[0] * scale

    def _reach(self, micro: int) -> Callable[[str], None]:
        """What a block calls before it runs: play the list up to its F."""

        def reach(visit: str) -> None:
            target = self._place.get((visit, micro))
            if target is None or target < self._cursor:
                known = " ".join(self.plan.anatomy.visits)
                what = "out of the order" if target is not None else "more often than in the order"
                text = f"the model reached block '{visit}' {what} that the plan knows: {known}"
                fix = "a forward may leave blocks out; let it call them in the order of the trial run, or declare larger blocks"
                raise PlanError(text, fix=fix, where="model")
            self._play_to(target + 1)

        return reach

    def _play_to(self, end: int) -> None:
        while self._cursor < end:
            action, handler, waits = self._list[self._cursor]
            self._cursor += 1
            for name in waits:
                self.state.works[name].wait()
            if handler is not None:
                handler(action)

    def _with_state(self, act: Callable[[Action, State], None]) -> Handler:
        return lambda action: act(action, self.state)

    @staticmethod
    def _resolve(
        actions: tuple[Action, ...], handlers: Mapping[str, Handler]
    ) -> list[tuple[Action, Handler | None, tuple[str, ...]]]:
        """Each action with its handler and the wire actions it waits for; compute actions end in list order anyway."""
        unknown = sorted({action.kind for action in actions}.difference(handlers, ("F",)))
        if unknown:
            fix = "return a handler from the strategy's `bind` for each kind that its `rewrite` adds"
            raise PlanError(f"nobody plays {', '.join(unknown)}", fix=fix, where="program")
        on_wire = {action.name for action in actions if action.lane == "wire"}
        resolved = []
        for action in actions:
            handler = None if action.kind == "F" else handlers[action.kind]
            resolved.append(
                (action, handler, tuple(name for name in action.waits if name in on_wire and action.lane == "compute"))
            )
        return resolved


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that belong to the model's state, by name: what a state_dict holds, whatever hooks make of it."""
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer
