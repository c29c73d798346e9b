"""What a strategy may touch of the rank that plays it: `core.strategy.Runtime`, as the engine has it.

Each word is one line: who does it stands in a file of its own.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from meshwright.comm.group import Work
from meshwright.core.layout import Place
from meshwright.core.plan import Plan
from meshwright.core.program import Action
from meshwright.engine.acts import Acts
from meshwright.engine.again import Again
from meshwright.engine.crossing import Crossing
from meshwright.engine.dealing import AllTokens
from meshwright.engine.inner import Inner, Meanwhile
from meshwright.engine.sockets import Sockets
from meshwright.engine.state import State
from meshwright.engine.store import Store
from meshwright.model.attend import Answer
from meshwright.model.convolve import Beside


class Touched:
    """The parts of a player, and what strategies may do with them."""

    plan: Plan
    state: State
    store: Store
    _acts: Acts
    _again: Again
    _crossing: Crossing | None
    _dealing: AllTokens
    _inner: Inner
    _sockets: Sockets

    def start(self, action: Action) -> None:
        """Start the collective that `action.transfer` states on the flat tensor of `action.subject`."""
        self._acts.start(action, self.state.tensor(action.subject))

    def unshard(self, action: Action) -> None:
        """Start gathering the weights of `action.tensors` from their shards."""
        self.store.unshard(action)

    def reduce(self, action: Action) -> None:
        """Start summing the packed gradients of `action.tensors` into shards, or their shards over replicas."""
        self.store.reduce(action)

    def add(self, action: Action) -> None:
        """Add the shard that REDUCE left for this micro-batch to the sum of those before."""
        self.store.add(action)

    def fill(self, name: str, forward: Callable[..., torch.Tensor]) -> None:
        """Have the module `name` of the model compute `forward(module, *its arguments)`."""
        self._sockets.fill(name, forward)

    def wrap(self, name: str, around: Callable[..., Any]) -> None:
        """Have the module `name` of the model compute `around(what it computes otherwise, *its arguments)`."""
        self._sockets.wrap(name, around)

    def move(self, tensor: torch.Tensor, axis: str, src: Place, dst: Place, meanwhile: Meanwhile = None) -> torch.Tensor:
        """`tensor` moved along `axis` for the action under way; once in a block."""
        return self._inner.move(tensor, axis, src, dst, meanwhile)

    def exchange(self, tensor: torch.Tensor, axis: str, src: Place, dst: Place, near: int = 0) -> torch.Tensor:
        """`tensor` moved along `axis`, or among `near` neighbours there, for the action under way; as often as it is asked."""
        return self._inner.exchange(tensor, axis, src, dst, near)

    def attend(self, answer: Answer) -> None:
        """Have attention within blocks, asked for with the tokens of this rank, be what `answer` says."""
        self._dealing.attend(answer)

    def convolve(self, answer: Beside) -> None:
        """Have convolutions over tokens within blocks, asked for with the tokens of this rank, be what `answer` says."""
        self._dealing.convolve(answer)

    def again(self, tensor: torch.Tensor, axis: str, src: Place, dst: Place) -> AbstractContextManager[object]:
        """While it lasts, autograd keeps nothing of what `tensor` became by this move: backward moves it once more."""
        return self._inner.again(tensor, axis, src, dst)

    def shift(self, output: torch.Tensor, tensor: torch.Tensor, axis: str, by: int = 1) -> Work:
        """Start sending `tensor` to the rank `by` places on along `axis`, and filling `output`, for the action under way."""
        return self.state.world.group((axis,)).shift(output, tensor, by=by, action=self.state.acting)

    def cross(self, action: Action) -> None:
        """Start sending or receiving a value between parts of the model, or its gradient."""
        if self._crossing is None:
            raise RuntimeError(f"this rank runs the whole model, and a strategy has it do {action.name}")
        self._crossing.cross(action)

    def rerun(self, action: Action) -> None:
        """Run a visit once more that kept only what it took in, so that its backward finds a graph."""
        self._inner.begin(action.name)
        self._again.rerun(action)
