"""What follows from where a layer takes its input from, and where its output goes: the word that all divided matrices share.

A `Way` is what a technique says of a role: which side of the weight is cut along which axis, what becomes of input and output.

    x --into--> x' --product with this rank's slice of the weight--> y' --out--> y          (+ bias, where the out side is whole)

    columns of line.py      out side cut along tp     into: stream -> R     out: nothing, y stays S(width)
    rows of line.py         in side cut along tp      into: nothing         out: P -> stream

Parameters of the layer that are not cut are `shared` along an axis whose ranks use them on different slices of the stream (a norm
on slices of the sequence, a bias added to one): they are R there while the layer runs, and backward sums their gradients.
Of backwards nothing is said: the gradient of a move is the move between the adjoint places (core/layout.py).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.comm.moves import later
from meshwright.core.anatomy import NBYTES, Call, Weight
from meshwright.core.job import Job
from meshwright.core.layout import COLLECTIVES, I, P, Place, R, S, move_name
from meshwright.core.program import Action, Hold, Program, Transfer
from meshwright.core.space import Home, Space
from meshwright.core.steps import COUNT_NBYTES, FORWARDS, inside
from meshwright.core.strategy import Runtime
from meshwright.model.linears import lies_transposed
from meshwright.strategies.tensor.overlap import Meanwhile, in_chunks, product, sizes

Held = Mapping[str, Any]  # the parameters of a layer by their own names: tensors, or None
Compute = Callable[..., torch.Tensor]  # of a runtime, a module, its parameters, and what the module is called with
WIDTH = S(-1)  # the place of a tensor of which each rank has a slice of the last dim


@dataclass(frozen=True)
class Move:
    """A tensor moves along `axis` from `src` to `dst`; along the axes `apart` it is cut meanwhile, and stays so.

    It travels as products take it, or, if that is wider, in the dtype of parameters: `wide`; in float32 at least: `sums`.
    """

    axis: str
    src: Place
    dst: Place
    apart: tuple[str, ...] = ()
    wide: bool = False
    sums: bool = False

    @property
    def back(self) -> "Move":
        """The move of its gradient."""
        return Move(self.axis, self.dst.adjoint, self.src.adjoint, self.apart, self.wide, self.sums)

    def transfer(self, numel: int, space: Space, job: Job, at: int = 0) -> Iterator[Transfer]:
        """The collective that moves a value of `numel` elements, if there is one."""
        dtype = job.precision.parameters if self.wide else job.precision.compute
        dtype = "float32" if self.sums and dtype in ("bfloat16", "float16") else dtype
        act = "keep" if self.src == self.dst else move_name(self.src, self.dst)
        if act in COLLECTIVES:
            numel //= space.mesh.extent(self.apart)
            put_in = numel if self.src.letter == "P" else numel // space.mesh.size(self.axis)
            yield Transfer(act, (self.axis,), put_in * NBYTES[dtype], dtype=dtype, at=at)


@dataclass(frozen=True)
class Way:
    """How a layer computes: the sides of its weight that are cut, by axis; what becomes of what goes in, and of what comes out.

    Parameters that are not cut are R along the axes `shared` while it runs. `compute` is what stands between the moves; `within`
    are the moves that it makes itself, each with the elements per sample of the value. With `again` nobody keeps for backward
    what `into` brought: it is moved once more. What comes out is computed and moved in `chunks` of samples.
    """

    cut: Mapping[str, str]
    into: Move | None = None
    out: Move | None = None
    shared: tuple[str, ...] = ()
    compute: Compute = field(default_factory=lambda: linear)
    within: Callable[[Call], Iterable[tuple[Move, int]]] = lambda call: ()
    again: bool = False
    chunks: int = 1

    def side(self, axis: str, weight: Weight) -> str:
        """Which side of `weight` is cut along `axis`. A bias, added to a sum that is scattered by width, is cut as that is."""
        scattered = self.out is not None and self.out.axis == axis and self.out.src == P and self.out.dst == WIDTH
        return "out" if scattered and weight.side(self.cut[axis]) is None else self.cut[axis]


Leaves = tuple[tuple[str, str], ...]  # parameters of a layer by their own names, and the axes that share them
Came = MutableMapping[torch.Tensor, torch.Tensor]  # of what a gate has moved, what it was made of
Ways = Mapping[str, Way]  # by role; that of a single layer by its name
Met = tuple[int, Call, Way]  # a call, with its number among those of the model
Taken = tuple[Move, int, int]  # a move, the elements of the value, and when: after the number of the call, backwards below 0


def way_of(ways: Ways, layer: str, role: str) -> Way | None:
    """How `layer` computes: in its own way, else in that of its role."""
    return ways.get(layer, ways.get(role))


def placed(home: Home, ways: Ways) -> Home:
    """`home` with what its weight's layer says."""
    way = way_of(ways, home.weight.name.rpartition(".")[0], home.weight.role)
    for axis in way.cut if way else ():
        cut = home.weight.side(way.side(axis, home.weight)) if way else None
        if cut is not None:
            place = S(cut.dim)
            layout, grad, stored = (layout.with_place(axis, place) for layout in (home.layout, home.grad, home.stored))
            home = replace(home, layout=layout, grad=grad, stored=stored)
    return home


def booked(program: Program, ways: Ways, space: Space, job: Job) -> Program:
    """`program` with the moves of all layers in the forwards and backwards in which they are taken."""
    learning = _learning(space)

    def met(actions: list[Action]) -> list[Action]:
        micros = {action.micro for action in actions if action.kind == "B"}
        rows = job.train.batch // space.mesh.extent(space.data_axes) // len(micros)
        return [_met(action, rows, ways, space, job, learning) for action in actions]

    return program.edit(met)


def heard(program: Program, axis: str) -> Program:
    """`program` with COUNT taken along `axis` too: a wish to stop is heard by all."""

    def along(action: Action) -> Action:
        if action.kind != "COUNT":
            return action
        before = action.transfer.axes if action.transfer else ()
        axes = before if axis in before else (*before, axis)
        return replace(action, lane="wire", transfer=Transfer("all_reduce", axes, COUNT_NBYTES, dtype="float64"))

    return program.edit(lambda actions: [along(action) for action in actions])


def filled(runtime: Runtime, ways: Ways) -> None:
    """Have every layer of a role compute in its way."""
    space, came = runtime.plan.space, WeakIdKeyDictionary()
    gates: dict[str, dict[int | str, Move]] = {}
    for call in {(call.name, call.role): call for call in space.anatomy.calls}.values():
        way = way_of(ways, call.name, call.role)
        if way is not None:
            leaves = tuple((leaf, axis) for axis in way.shared for leaf, _ in _shared(space.homes, call.name, axis))
            runtime.fill(call.name, partial(_forward, runtime, way, leaves, came))
            if way.into is not None and call.visit in space.through and call.gate:
                gates.setdefault(call.gate, {}).update(dict.fromkeys(call.slots, way.into))
    for gate, moves in gates.items():
        runtime.wrap(gate, partial(_gated, runtime, moves, came))


def linear(runtime: Runtime, module: nn.Module, held: Held, x: torch.Tensor) -> torch.Tensor:
    """The product with, and the bias of, the slice of the weight that a linear layer holds."""
    weight, bias, transposed = held["weight"], held.get("bias"), lies_transposed(module)
    if (waits := later(x)) is None:
        return F.linear(x, weight.t() if transposed else weight, bias)
    return product(x, weight, bias, waits, transposed=transposed)


def own(runtime: Runtime, module: nn.Module, held: Held, *given: Any, **named: Any) -> torch.Tensor:
    """What `module` itself computes, with the parameters `held`."""
    before = dict(module._parameters)
    try:
        module._parameters.update(held)
        return type(module).forward(module, *given, **named)
    finally:
        module._parameters.update(before)


def moved(runtime: Runtime, tensor: torch.Tensor, move: Move | None, meanwhile: Meanwhile = None) -> torch.Tensor:
    """`tensor` after `move`, for the action under way; `meanwhile()` is called while it is under way."""
    if move is None or move.src == move.dst:
        return tensor
    with torch.autocast(tensor.device.type, enabled=False) if move.wide or move.sums else nullcontext():
        return runtime.move(tensor, move.axis, move.src, move.dst, meanwhile)


def _gated(
    runtime: Runtime, moves: Mapping[int | str, Move], came: Came, inner: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """What a gate computes, with what its layers take in moved where it begins."""
    given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    for slot, move in moves.items():
        x = given[slot]
        given[slot] = moved(runtime, x, move)
        came[given[slot]] = x
    return inner(*(given[i] for i in range(len(args))), **{key: given[key] for key in kwargs})


def _forward(
    runtime: Runtime, way: Way, shared: Leaves, came: Came, module: nn.Module, x: Any, *more: Any, **named: Any
) -> torch.Tensor:
    given: Any = x if x is None else came.get(x, x)
    x = x if given is not x else moved(runtime, x, way.into)
    held: dict[str, Any] = dict(module._parameters)
    for leaf, axis in shared:
        held[leaf] = runtime.move(held[leaf], axis, I, R)
    bias = held.get("bias") if way.out is not None and way.out.src == P else None
    held |= {} if bias is None else {"bias": None}  # added once, to the sum

    def compute(x: Any) -> torch.Tensor:
        return way.compute(runtime, module, held, x, *more, **named)

    with _kept(runtime, way, given):
        y = in_chunks(x, way.chunks, compute, lambda y, meanwhile: moved(runtime, y, way.out, meanwhile))
    return y if bias is None else y + bias


def _kept(runtime: Runtime, way: Way, given: torch.Tensor) -> AbstractContextManager[Any]:
    """While it lasts, autograd keeps what `way` wants kept for backward."""
    move = way.into
    return nullcontext() if move is None or not way.again else runtime.again(given, move.axis, move.src, move.dst)


def _shared(homes: Iterable[Home], layer: str, axis: str) -> Iterator[tuple[str, Home]]:
    """The parameters of `layer` that are not cut along `axis`, by their own names."""
    for home in homes:
        for name in (home.weight.name, *home.weight.aliases):
            owner, _, leaf = name.rpartition(".")
            if owner == layer and axis not in home.cut:
                yield leaf, home


def _met(action: Action, rows: int, ways: Ways, space: Space, job: Job, learning: Collection[str]) -> Action:
    if action.kind not in (*FORWARDS, "B"):
        return action
    mine = {i: call for i, call in enumerate(space.anatomy.calls) if call.visit == action.subject}
    found = [(i, call, way) for i, call in mine.items() if (way := way_of(ways, call.name, call.role)) is not None]
    moves = _back(found, rows, space, learning) if action.kind == "B" else _forth(found, rows)
    met = [each for move, numel, at in moves for each in move.transfer(numel, space, job, at)]
    held = action.takes if action.kind == "B" else _with_gathered(action, found, rows, space, job, learning)
    return replace(action, inner=tuple(sorted((*action.inner, *met), key=lambda each: each.at)), takes=held)


def _with_gathered(
    action: Action, calls: Iterable[Met], rows: int, space: Space, job: Job, learning: Collection[str]
) -> tuple[Hold, ...]:
    """What a forward takes, and with what it keeps inside the inputs that were gathered and are kept for backward."""
    kept = {(call.source, way.into): call.into for _, call, way in calls if call.name in learning and not way.again}
    more = 0
    for (_, into), numel in kept.items():
        if into is not None and into.src.letter == "S" and into.dst == R:
            whole = numel // space.mesh.extent(into.apart)
            more += whole - whole // space.mesh.size(into.axis)  # the slice is counted already
    more *= rows * NBYTES[job.precision.compute]
    name = inside(action.subject, action.micro)
    return tuple(replace(hold, nbytes=hold.nbytes + more) if hold.name == name else hold for hold in action.takes)


def _forth(calls: Iterable[Met], rows: int) -> Iterator[Taken]:
    """The moves of `calls` in a forward of so many rows. Of what several take in there is one."""
    taken = set()
    for at, call, way in calls:
        if way.into is not None and (call.source, way.into) not in taken:
            taken.add((call.source, way.into))
            yield way.into, call.into * rows, at
        yield from ((move, numel * rows, at) for move, numel in way.within(call))
        if way.out is not None:
            yield from ((way.out, call.out * part, at) for part in sizes(rows, way.chunks))


def _back(calls: Sequence[Met], rows: int, space: Space, learning: Collection[str]) -> Iterator[Taken]:
    """Likewise in a backward: of gradients that are needed, of those of what is shared, and once more of what nobody has kept."""
    alike: dict[tuple[int, Move | None], list[Call]] = {}
    first: dict[tuple[str, str], int] = {}
    for at, call, way in calls:
        alike.setdefault((call.source, way.into), []).append(call)
        for axis in way.shared:
            for _, home in _shared(space.homes, call.name, axis):
                first.setdefault((home.weight.name, axis), at)
    anew = set()
    for at, call, way in reversed(calls):
        into, taking = way.into, alike[call.source, way.into]
        if way.out is not None:
            yield from ((way.out.back, call.out * part, -at) for part in sizes(rows, way.chunks)[::-1])
        if call.needed:
            yield from ((move.back, numel * rows, -at) for move, numel in reversed(list(way.within(call))))
        if into is not None and way.again and (call.source, into) not in anew and call.name in learning:
            anew.add((call.source, into))
            yield into, call.into * rows, -at
        for axis in reversed(way.shared):
            for _, home in reversed(list(_shared(space.homes, call.name, axis))):
                if home.weight.trainable and first[home.weight.name, axis] == at:
                    yield Move(axis, P, I, wide=True), home.weight.numel, -at
        if into is not None and call is taking[0] and any(each.needed for each in taking):
            yield into.back, call.into * rows, -at


def _learning(space: Space) -> frozenset[str]:
    """The layers of which a matrix is trained: its gradient needs what went in."""
    matrices = [home.weight for home in space.homes if home.weight.trainable and len(home.weight.shape) > 1]
    return frozenset(name.rpartition(".")[0] for weight in matrices for name in (weight.name, *weight.aliases))
