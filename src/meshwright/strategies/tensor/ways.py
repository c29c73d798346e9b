"""What follows from where a layer takes its input from, and where its output goes: the word that all divided matrices share.

A technique says, for each role of a layer, which side of the weight is cut along which axis, what becomes of the input before the
product, and what of the output behind it. That is a `Way`:

    x --into--> x' --product with this rank's slice of the weight--> y' --out--> y          (+ bias, where the out side is whole)

    columns of line.py      out side cut along tp     into: stream -> R     out: nothing, y stays S(width)
    rows of line.py         in side cut along tp      into: nothing         out: P -> stream

Parameters of the layer that are not cut are `shared` along an axis whose ranks use them on different slices of the stream (a norm
on slices of the sequence, a bias added to one): they are R there while the layer runs, and backward sums their gradients.

Here it is read three times: the weights' layouts, the collectives that a program books in F and B, and the layer's forward. The
gradient of a move is the move between the adjoint places (core/layout.py), so that nothing is said of backwards.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.core.anatomy import NBYTES, Call
from meshwright.core.job import Job
from meshwright.core.layout import COLLECTIVES, I, Place, R, S, move_name
from meshwright.core.program import Action, Program, Transfer
from meshwright.core.space import Home, Space
from meshwright.core.steps import COUNT_NBYTES, FORWARDS
from meshwright.core.strategy import Runtime
from meshwright.model.linears import lies_transposed

Held = Mapping[str, Any]  # the parameters of a layer by their own names: tensors, or None
Compute = Callable[[Runtime, nn.Module, Held, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Move:
    """A tensor moves along `axis` from `src` to `dst`; along the axes `apart` it is cut meanwhile, and stays so."""

    axis: str
    src: Place
    dst: Place
    apart: tuple[str, ...] = ()

    @property
    def back(self) -> "Move":
        """The move of its gradient."""
        return Move(self.axis, self.dst.adjoint, self.src.adjoint, self.apart)

    def transfer(self, numel: int, space: Space, dtype: str) -> Iterator[Transfer]:
        """The collective that moves a value of `numel` elements, if there is one."""
        act = "keep" if self.src == self.dst else move_name(self.src, self.dst)
        if act in COLLECTIVES:
            numel //= space.mesh.extent(self.apart)
            put_in = numel if self.src.letter == "P" else numel // space.mesh.size(self.axis)
            yield Transfer(act, (self.axis,), put_in * NBYTES[dtype], dtype=dtype)


@dataclass(frozen=True)
class Way:
    """How a layer computes: the sides of its weight that are cut, by axis; what becomes of what goes in, and of what comes out.

    Parameters that are not cut are R along the axes `shared` while it runs. `compute` is what stands between the moves.
    """

    cut: Mapping[str, str]
    into: Move | None = None
    out: Move | None = None
    shared: tuple[str, ...] = ()
    compute: Compute = field(default_factory=lambda: linear)


Ways = Mapping[str, Way]  # by role


def placed(home: Home, ways: Ways) -> Home:
    """`home` with what its weight's role says."""
    way = ways.get(home.weight.role)
    for axis, side in way.cut.items() if way else ():
        cut = home.weight.side(side)
        if cut is not None:
            place = S(cut.dim)
            layout, grad, stored = (layout.with_place(axis, place) for layout in (home.layout, home.grad, home.stored))
            home = replace(home, layout=layout, grad=grad, stored=stored)
    return home


def booked(program: Program, ways: Ways, space: Space, job: Job) -> Program:
    """`program` with the moves of all layers in the forwards and backwards in which they are taken."""
    return program.edit(lambda actions: [_met(action, actions, ways, space, job) for action in actions])


def heard(program: Program, axis: str) -> Program:
    """`program` with COUNT taken along `axis` too: a wish to stop is heard by all."""

    def along(action: Action) -> Action:
        if action.kind != "COUNT":
            return action
        axes = (*(action.transfer.axes if action.transfer else ()), axis)
        return replace(action, lane="wire", transfer=Transfer("all_reduce", axes, COUNT_NBYTES, dtype="float64"))

    return program.edit(lambda actions: [along(action) for action in actions])


def filled(runtime: Runtime, ways: Ways) -> None:
    """Have every layer of a role compute in its way."""
    homes = runtime.plan.space.homes
    for name, role in dict.fromkeys((call.name, call.role) for call in runtime.plan.anatomy.calls):
        if role in ways:
            leaves = tuple((leaf, axis) for axis in ways[role].shared for leaf, _ in _shared(homes, name, axis))
            runtime.fill(name, partial(_forward, runtime, ways[role], leaves))


def linear(runtime: Runtime, module: nn.Module, held: Held, x: torch.Tensor) -> torch.Tensor:
    """The product with, and the bias of, the slice of the weight that a linear layer holds."""
    weight = held["weight"]
    return F.linear(x, weight.t() if lies_transposed(module) else weight, held.get("bias"))


def own(runtime: Runtime, module: nn.Module, held: Held, x: torch.Tensor) -> torch.Tensor:
    """What `module` itself computes, with the parameters `held`."""
    before = dict(module._parameters)
    try:
        module._parameters.update(held)
        return type(module).forward(module, x)
    finally:
        module._parameters.update(before)


def moved(runtime: Runtime, tensor: torch.Tensor, move: Move | None) -> torch.Tensor:
    """`tensor` after `move`, for the action under way."""
    return tensor if move is None or move.src == move.dst else runtime.move(tensor, move.axis, move.src, move.dst)


def _forward(runtime: Runtime, way: Way, shared: tuple[tuple[str, str], ...], module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    held: dict[str, Any] = dict(module._parameters)
    for leaf, axis in shared:
        held[leaf] = runtime.move(held[leaf], axis, I, R)
    x = moved(runtime, x, way.into)
    if way.out is None or way.out.src.letter != "P":
        return moved(runtime, way.compute(runtime, module, held, x), way.out)
    bias = held.get("bias")  # added once, to the sum
    y = moved(runtime, way.compute(runtime, module, held | {"bias": None}, x), way.out)
    return y if bias is None else y + bias


def _shared(homes: Iterable[Home], layer: str, axis: str) -> Iterator[tuple[str, Home]]:
    """The parameters of `layer` that are not cut along `axis`, by their own names."""
    for home in homes:
        for name in (home.weight.name, *home.weight.aliases):
            owner, _, leaf = name.rpartition(".")
            if owner == layer and axis not in home.cut:
                yield leaf, home


def _met(action: Action, actions: list[Action], ways: Ways, space: Space, job: Job) -> Action:
    if action.kind not in (*FORWARDS, "B"):
        return action
    mine = [call for call in space.anatomy.calls if call.visit == action.subject and call.role in ways]
    micros = {other.micro for other in actions if other.kind == "B"}
    rows = job.train.batch // space.mesh.extent(space.data_axes) // len(micros)
    moves = list(_moves(mine, ways))
    if action.kind == "B":
        moves = [(move.back, numel, needed) for move, numel, needed in reversed(moves)]
    dtype = job.precision.compute
    met = [
        each
        for move, numel, needed in moves
        if needed or action.kind != "B"
        for each in move.transfer(numel * rows, space, dtype)
    ]
    met += _gradients(mine, ways, space, job) if action.kind == "B" else ()
    return replace(action, inner=(*action.inner, *met))


def _gradients(calls: Iterable[Call], ways: Ways, space: Space, job: Job) -> Iterator[Transfer]:
    """The sums over the ranks of the gradients of what `calls` share, each once."""
    found = {
        (home.weight.name, axis): home.weight
        for call in calls
        for axis in ways[call.role].shared
        for _, home in _shared(space.homes, call.name, axis)
    }
    for (_, axis), weight in found.items():
        if weight.trainable:
            dtype = job.precision.parameters
            yield Transfer("all_reduce", (axis,), weight.numel * NBYTES[dtype], dtype=dtype)


def _moves(calls: list[Call], ways: Ways) -> Iterator[tuple[Move, int, bool]]:
    """The moves of `calls` in order, elements per sample, and whether a gradient comes back; one of what several take in."""
    needed: dict[tuple[int, Move | None], bool] = {}
    for call in calls:
        key = call.source, ways[call.role].into
        needed[key] = needed.get(key, False) or call.needed
    for call in calls:
        into, out = ways[call.role].into, ways[call.role].out
        if into is not None and (call.source, into) in needed:
            yield into, call.into, needed.pop((call.source, into))
        if out is not None:
            yield out, call.out, True
