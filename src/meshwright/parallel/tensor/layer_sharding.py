"""What follows from where a layer takes its input from, and where its output goes: the word that all divided matrices share.

A `Way` is what a technique says of a role: which side of the weight is cut along which axis, what becomes of input and output.

    x --into--> x' --product with this rank's slice of the weight--> y' --out--> y          (+ bias, where the out side is whole)

    columns of line.py      out side cut along tp     into: stream -> R     out: nothing, y stays S(width)
    rows of line.py         in side cut along tp      into: nothing         out: P -> stream

Layers whose outputs are summands of one sum take one `out` (joined.py).
Parameters of the layer that are not cut are `shared` along an axis whose ranks use them on different slices of the stream (a norm
on slices of the sequence, a bias added to one): they are R there while the layer runs, and backward sums their gradients.
Of backwards nothing is said: the gradient of a move is the move between the adjoint places (core/layout.py).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.comm.collectives.redistribute import later
from meshwright.model.tensor_parallel.layer_pairs import lies_transposed
from meshwright.parallel.tensor.comm_overlap import Meanwhile, Turn, added, chunked, in_chunks, product, turns_of
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.layer_calls import Call
from meshwright.plan.model_spec.model_spec import NBYTES, Weight
from meshwright.plan.sharding.param_sharding import Home
from meshwright.plan.sharding.placement import COLLECTIVES, I, P, Place, R, S, move_name
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Transfer
from meshwright.plan.strategy import Runtime

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

    @property
    def summed(self) -> bool:
        """Whether what comes out is a sum over ranks."""
        return self.out is not None and self.out.src == P

    @property
    def joint(self) -> bool:
        """Whether the gradients of its parameters come with that of what goes in: one act gives both (overlap.py)."""
        return self.compute is linear and self.into is not None and self.into.src != self.into.dst

    def side(self, axis: str, weight: Weight) -> str:
        """Which side of `weight` is cut along `axis`. A bias, added to a sum that is scattered by width, is cut as that is."""
        scattered = self.out is not None and self.summed and self.out.axis == axis and self.out.dst == WIDTH
        return "out" if scattered and weight.side(self.cut[axis]) is None else self.cut[axis]


Leaf = tuple[str, Home]  # a parameter of a layer, by its own name there
Leaves = tuple[tuple[str, str], ...]  # parameters of a layer by their own names, and the axes that share them
Came = MutableMapping[torch.Tensor, torch.Tensor]  # of what a gate has moved, what it was made of
Ways = Mapping[str, Way]  # by role; that of a single layer by its name


def way_of(ways: Ways, layer: str, role: str) -> Way | None:
    """How `layer` computes: in its own way, else in that of its role."""
    return ways.get(layer, ways.get(role))


def sums_of(calls: Iterable[Call], ways: Ways) -> dict[str, tuple[str, ...]]:
    """By layer, all that end in one sum with it, in the order in which they run: the last of them moves it for all."""
    found: dict[tuple[int, Move], list[str]] = {}
    for call in (call for call in calls if call.sum):
        way = way_of(ways, call.name, call.role)
        if way is not None and way.out is not None and way.summed:
            found.setdefault((call.sum, way.out), []).append(call.name)
    return {layer: tuple(layers) for layers in found.values() if len(layers) > 1 for layer in layers}


def placed(home: Home, ways: Ways) -> Home:
    """`home` with what its weight's layer says."""
    way = way_of(ways, home.weight.layers[0], home.weight.role)
    for axis in way.cut if way else ():
        cut = home.weight.side(way.side(axis, home.weight)) if way else None
        if cut is not None:
            place = S(cut.dim)
            layout, grad, stored = (layout.with_place(axis, place) for layout in (home.layout, home.grad, home.stored))
            home = replace(home, layout=layout, grad=grad, stored=stored)
    return home


def filled(runtime: Runtime, ways: Ways) -> None:
    """Have every layer of a role compute in its way."""
    space, came = runtime.plan.space, WeakIdKeyDictionary()
    parameters, gates = leaves_of(space.homes), dict[str, dict[int | str, Move]]()
    turns = turns_of(sums_of(space.anatomy.calls, ways))
    for call in {(call.name, call.role): call for call in space.anatomy.calls}.values():
        way = way_of(ways, call.name, call.role)
        if way is not None:
            leaves = tuple((leaf, axis) for axis in way.shared for leaf, _ in uncut(parameters.get(call.name, ()), axis))
            runtime.fill(call.name, partial(_forward, runtime, way, leaves, came, turns.get(call.name)))
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
    runtime: Runtime,
    way: Way,
    shared: Leaves,
    came: Came,
    turn: Turn | None,
    module: nn.Module,
    x: Any,
    *more: Any,
    **named: Any,
) -> torch.Tensor:
    given: Any = x if x is None else came.get(x, x)
    x = x if given is not x else moved(runtime, x, way.into)
    held: dict[str, Any] = dict(module._parameters)
    for leaf, axis in shared:
        held[leaf] = runtime.move(held[leaf], axis, I, R)
    biases = [held["bias"]] if way.summed and held.get("bias") is not None else []
    held |= {"bias": None} if biases else {}  # added once, to the sum

    def compute(x: Any) -> torch.Tensor:
        return way.compute(runtime, module, held, x, *more, **named)

    if turn is not None and way.out is not None and turn.hands_on:
        return turn.hand(compute(x), biases, way.out.dst, runtime.plan.mesh.size(way.out.axis))
    waiting: Iterator[torch.Tensor] = iter(())
    if turn is not None:
        handed, others = turn.take()
        waiting, biases = iter(chunked(handed, way.chunks)), [*biases, *others]
    with _kept(runtime, way, given):
        y = in_chunks(
            x,
            way.chunks,
            lambda part: added(compute(part), next(waiting, None)),
            lambda y, meanwhile: moved(runtime, y, way.out, meanwhile),
        )
    return y + reduce(torch.add, biases) if biases else y


def _kept(runtime: Runtime, way: Way, given: torch.Tensor) -> AbstractContextManager[Any]:
    """While it lasts, autograd keeps what `way` wants kept for backward."""
    move = way.into
    return nullcontext() if move is None or not way.again else runtime.again(given, move.axis, move.src, move.dst)


def leaves_of(homes: Iterable[Home]) -> dict[str, list[Leaf]]:
    """The parameters of every layer."""
    found: dict[str, list[Leaf]] = {}
    for home in homes:
        for name in home.weight.names:
            owner, _, leaf = name.rpartition(".")
            found.setdefault(owner, []).append((leaf, home))
    return found


def uncut(leaves: Iterable[Leaf], axis: str) -> list[Leaf]:
    """Those of `leaves` that are not cut along `axis`."""
    return [(leaf, home) for leaf, home in leaves if axis not in home.cut]
