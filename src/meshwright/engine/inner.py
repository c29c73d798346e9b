"""Collectives inside of a block: a tensor that is moved along an axis, once however many ask for it.

q, k and v each need the block's input in the same place. A move belongs to the tensor: within one run of a block the first who
asks moves it, the others get what it got, and backward sums their gradients before it moves them back, once.

    input  --move I -> R-->  input'  --> q, k, v         backward: one all_reduce of the sum of three gradients
"""

import torch
from torch import nn

from meshwright.comm.moves import move
from meshwright.core.layout import Place
from meshwright.engine.state import State

Key = tuple[int, int, str, Place, Place]  # a tensor and its version, the axis, from where, to where


class Inner:
    """The moves of one rank inside of blocks; the ledger books them under the action of the program that is under way."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._moved: dict[
            Key, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # the tensor, which must not be forgotten, and what it became

    def begin(self, action: str) -> None:
        """Another block runs, for `action`: nothing has been moved in it."""
        self._state.acting = action
        self._moved.clear()

    def move(self, tensor: torch.Tensor, axis: str, src: Place, dst: Place) -> torch.Tensor:
        """`tensor`, which is in `src` along `axis`, in `dst`; differentiable.

        Under autocast it travels as products take it, unless it is a parameter.
        """
        if not torch.is_grad_enabled():  # no block begins, and nothing would ever be forgotten
            return self._done(tensor, axis, src, dst)
        key = (id(tensor), tensor._version, axis, src, dst)
        if key not in self._moved:
            self._moved[key] = tensor, self._done(tensor, axis, src, dst)
        return self._moved[key][1]

    def _done(self, tensor: torch.Tensor, axis: str, src: Place, dst: Place) -> torch.Tensor:
        kind = tensor.device.type
        casts = torch.is_autocast_enabled(kind) and not isinstance(tensor, nn.Parameter)
        cast = tensor.to(torch.get_autocast_dtype(kind)) if casts else tensor
        return move(cast, self._state.world.group((axis,)), src, dst, lambda: self._state.acting)
