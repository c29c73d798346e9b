"""Tensor parallelism, 2-D (Optimus): the stream and every matrix divided over a square of ranks, by samples and by width.

Why it works: SUMMA multiplies X W on q x q ranks, each of which has a block of X and one of W, in q steps: in step k the ranks
of column k hand their blocks of X along their rows, those of row k their blocks of W down their columns, and every rank adds
one product. All steps at once are a gather of X along the row, a gather of W down the column, and one product. The rows of X
are samples, so ranks of one column have other samples and use the same slice of W: that is a data axis, and to gather W there
before use, again for backward, and to scatter the sum of its gradients, is ZeRO-3 on it. What is new is only the width.

    mesh: dp_shard (rows of the grid: samples) x tp (columns: width), q ranks each
    rank (i, j) holds   X[samples i, width j]     W[:, out j], in shards over i     ->     Y[samples i, out j]
    forward    X: S(-1) -> R along tp     W: shards -> R along dp_shard     Y = X W, its width is divided as the next X must be
    backward   both once more             dX = dY W: P -> S(-1) along tp    dW = X dY: P -> shards along dp_shard

    received per rank and layer, forward + backward = 3 (q-1)/q^2 (|X| + |W|) elements    |X| = b s h of the global batch
    (three times q-1 of the q blocks of |X|/q^2 each, and of |W|/q^2); with again = false, which keeps X, 2 for its 3
    stream, weights, gradients, moments: 1/q^2 of one device's; a gathered X, for as long as its products run: 1/q

Layers that take in the same tensor (q, k, v) share its gathering, so |X| counts once for them. Heads, in groups that share a
key, lie over the columns. A norm over the divided width takes the mean squares (and means) of all slices, a number or two per
token; one whose formula is unknown gathers its input and keeps its slice of the output. Norms over single heads are whole, and
their gradients summed. Tables of embeddings are divided by width and send nothing. The head gives slices of the logits, which
are gathered for the loss: (q-1)/q^2 b s v. One that is tied to a table takes in what its width lies in: summands of all logits.
Cost: what a rank receives shrinks with q, where the sums of 1-D stay as large as the stream. As in the paper a rows layer gathers
its (wide) input, where 1-D sums its (narrow) output: for small q that is more. Weights travel too: for samples enough to hide it.
Limits: q divides all widths and groups of heads. What computes over the whole width outside of the layers that are known (a
norm without weights) is not noticed here: `verify` shows it.
Paper: Xu et al. 2021, "An Efficient 2D Method for Training Super-Large Deep Learning Models" (Optimus), arXiv 2104.05343;
van de Geijn and Watts 1997, "SUMMA: Scalable Universal Matrix Multiplication Algorithm", Concurrency: Practice and Experience.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
from torch import nn

from meshwright.model.tensor_parallel.norm_formulas import applied, joined, statistics
from meshwright.parallel.tensor.comm_accounting import booked, heard
from meshwright.parallel.tensor.gqa_heads import told
from meshwright.parallel.tensor.layer_sharding import WIDTH, Compute, Held, Move, Way, Ways, filled, moved, own, placed, way_of
from meshwright.parallel.tensor.validation import axis_fault, twice_faults
from meshwright.plan.job.errors import Fault
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.layer_calls import Call, Formula
from meshwright.plan.model_spec.model_spec import Anatomy, Weight
from meshwright.plan.sharding.param_sharding import Home
from meshwright.plan.sharding.placement import FLAT, I, P, R, S
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Program
from meshwright.plan.strategy import Handler, Phase, Runtime, Strategy

ROWS = "dp_shard"  # the axis of the grid along which samples lie
TABLES, HEADS = ("table", "lookup"), ("head", "logits")
KNOWN = ("columns", "rows", "inside", *TABLES, *HEADS, "norm")


@dataclass(frozen=True)
class Grid(Strategy):
    """Matrices and the stream divided by width along `axis`, in a square with dp_shard.

    With `again`, what a layer takes in is gathered once more for backward, and not kept.
    """

    name: ClassVar[str] = "grid"
    phase: ClassVar[Phase] = "shard"
    axis: str = "tp"
    again: bool = True

    def check(self, job: Job, space: Space) -> Iterator[Fault]:
        where = "strategies.grid"
        if self.axis != "tp":
            yield axis_fault(self.axis, "matrices", where)
            return
        yield from twice_faults(space, self.axis, where)
        yield from kind_faults(space, where)
        yield from square_faults(space, (ROWS, self.axis))

    def partners(self, space: Space) -> Iterator[Fault]:
        yield from uneven_faults(sided(space, self.ways(space)), space.mesh.size(self.axis))
        yield from shard_faults(space, "strategies.grid")

    def ways(self, space: Space) -> Ways:
        """How layers compute, by role, norms and what is tied by name; not those that another strategy divides by words."""
        product = Way({self.axis: "out"}, into=Move(self.axis, WIDTH, R), again=self.again)
        looked_up = Way({self.axis: "out"}, compute=own)
        ways = {
            "columns": product,
            "rows": product,
            "inside": Way({self.axis: "out"}, shared=(self.axis,), compute=own),
            "table": looked_up,
            "lookup": looked_up,
            "head": replace(product, out=Move(self.axis, WIDTH, I)),
            "logits": Way({}, into=Move(self.axis, WIDTH, I), compute=own),
            **norms(space, (self.axis,)),
        }
        for weight, table, head, divisible in tied((space.whole or space).anatomy):
            ways[head] = Way({self.axis: "in"}, out=Move(self.axis, P, I)) if divisible else ways["logits"]
            ways[table] = looked_up if divisible else Way({}, out=Move(self.axis, I, WIDTH), compute=own)
            ways[weight.layers[0]] = ways[table if weight.role in TABLES else head]  # its sides are those of its role
        return {layer: way for layer, way in ways.items() if layer not in by_words(space, self.axis)}

    def place(self, space: Space) -> Space:
        ways = self.ways(space)

        def divided(home: Home) -> Home:
            return placed(home, ways)

        return space.with_homes(divided).with_homes(divided, frozen=True).with_stream(self.axis, WIDTH)

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        return heard(booked(program, self.ways(space), space, job), self.axis)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        filled(runtime, self.ways(runtime.plan.space))
        told(runtime, self.axis)
        return {}


def norms(space: Space, axes: tuple[str, ...]) -> Ways:
    """How the norms of a model compute, by name, where the stream is divided by width along `axes`, innermost last."""
    found = {}
    for call in (call for call in space.anatomy.calls if call.role == "norm"):
        if call.formula is not None:
            within = partial(_told, axes, {axis: space.mesh.size(axis) for axis in axes})
            found[call.name] = Way(dict.fromkeys(axes, "out"), compute=partial(_normed, call.formula, axes), within=within)
        else:
            slices = tuple(Move(axis, R, WIDTH, axes[:i]) for i, axis in enumerate(axes))
            gathers = tuple(Move(axis, WIDTH, R, axes[:i]) for i, axis in enumerate(axes))
            found[call.name] = Way({}, shared=axes, **through(gathers[::-1], own, slices))
    return found


def through(before: tuple[Move, ...], compute: Compute, after: tuple[Move, ...] = ()) -> dict[str, Any]:
    """Of a way, `compute` and `within`: what is computed between several moves of the input and several of the output."""
    return {"compute": partial(_through, before, compute, after), "within": partial(_within, before, after)}


def tied(anatomy: Anatomy) -> Iterator[tuple[Weight, str, str, bool]]:
    """The weights that a table and a head share, with these two, and whether the head is a plain product."""
    roles = {call.name: call.role for call in anatomy.calls}
    for weight in anatomy.weights:
        tables, heads = ([each for each in weight.layers if roles.get(each) in pair] for pair in (TABLES, HEADS))
        yield from ((weight, table, head, roles[head] == "head") for table in tables for head in heads)


def by_words(space: Space, axis: str) -> set[str]:
    """The roles, and the layers by name, that another strategy divides by words along `axis`."""
    roles, found = {call.name: call.role for call in space.anatomy.calls}, set()
    for home in space.homes:
        words = home.weight.side({"table": "in", "head": "out"}.get(home.weight.role, ""))
        divided = words is not None and home.cut.get(axis) == words.dim
        if divided and (home.weight.role == "table" or space.logits.place(axis) == WIDTH):
            layers = home.weight.layers
            found |= {*layers, *(roles[layer] for layer in layers if layer in roles)}
    return found


def kind_faults(space: Space, where: str) -> Iterator[Fault]:
    """Weights that nobody knows how to divide, where no rank has all of the stream."""
    left = [weight for weight in space.anatomy.weights if weight.role not in KNOWN]
    if left:
        why = f": {left[0].why}" if left[0].why else ""
        text = f"no rank has all of a token, and {len(left)} parameters compute with all of it ({left[0].name}{why})"
        fix = 'declare the layers that can be divided: meshwright.Model(..., sockets={"layers.*.up": "columns", '
        yield Fault(text, f'{fix}"layers.*.down": "rows"}}), or divide pairs of matrices alone: name = "line"', where)


def square_faults(space: Space, axes: tuple[str, ...]) -> Iterator[Fault]:
    """A grid whose sides differ."""
    sizes = [space.mesh.size(axis) for axis in axes]
    if min(sizes) == max(sizes) > 1:
        return
    given = " x ".join(f"{axis} {size}" for axis, size in zip(axes, sizes, strict=True))
    side = max(2, int(prod(sizes) ** (1 / len(sizes)) + 1e-9))
    near = [f"{axis} = {side}" for axis in axes]
    text = f"the grid is {given}; needed are as many ranks along each of {' and '.join(axes)}, at least 2"
    yield Fault(text, f"set mesh.{', mesh.'.join(near)} ({side ** len(axes)} ranks)", "mesh")


Sided = tuple[int, int, Weight]  # units, among how many axes of the grid they are dealt, and of which weight


def sided(space: Space, ways: Ways) -> Iterator[Sided]:
    """The sides of weights that are divided."""
    for weight in space.anatomy.weights:
        way = way_of(ways, weight.layers[0], weight.role)
        sides = [way.side(axis, weight) for axis in way.cut] if way else []
        yield from ((cut.units, sides.count(cut.side), weight) for cut in weight.cuts if cut.side in sides)


def uneven_faults(sides: Iterable[Sided], side: int) -> Iterator[Fault]:
    """Units that do not divide by the ranks of a grid with `side` ranks along each axis; one fault per number of units."""
    sides = list(sides)
    found: dict[tuple[int, int], list[Weight]] = {}
    for units, power, weight in sides:
        if units % side**power:
            found.setdefault((units, side**power), []).append(weight)
    fits = [
        str(q) for q in range(2, max((units for units, _, _ in sides), default=0) + 1) if all(u % q**p == 0 for u, p, _ in sides)
    ]
    all_fit = (
        f"set the sides of the grid to {' or '.join(fits)}" if fits else "no grid of at least 2 ranks a side divides them all"
    )
    for (units, ranks), weights in sorted(found.items()):
        more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
        text = f"{weights[0].name}{more}: {units} units (heads that share a key, words, or features) on {ranks} ranks"
        near = " or ".join(str(size) for size in (units - units % ranks, units - units % ranks + ranks) if size)
        words = '; words may be divided unevenly: name = "vocabulary"' if weights[0].role == "head" else ""
        yield Fault(text, f"{all_fit}; or make it {near} units{words}", "mesh")


def shard_faults(space: Space, where: str, across: str = "") -> Iterator[Fault]:
    """The rows of the grid share the storage of their slices; along `across`, if given, they are copied."""
    if space.token_axes:
        text = (
            f"ranks along {' and '.join(space.token_axes)} have some of the tokens of a sample each, and a grid wants all of them"
        )
        yield Fault(text, 'use the strategy "line", or set mesh.cp = 1', where)
    axes = (ROWS, across) if across else (ROWS,)
    whole = [home for home in space.homes if home.weight.trainable and home.stored.place(ROWS) != S(FLAT)]
    cut = [home for home in space.homes if home.weight.trainable and across in home.flat]
    if whole or cut or not set(axes) <= set(space.data_axes):
        text = f"nothing keeps weights in shards along {ROWS}, the rows of the grid: each would hold whole columns of it"
        text = text if whole or ROWS not in space.data_axes else f"nothing splits samples and copies shards along {across}"
        more = f', across = "{across}"' if across else ""
        lists = " and ".join(f'[[strategies]] name = "batch", axis = "{axis}"' for axis in axes)
        yield Fault(text, f'add {lists}, and [[strategies]] name = "zero", axis = "{ROWS}", stage = 3{more}', where)


def _through(
    before: tuple[Move, ...],
    compute: Compute,
    after: tuple[Move, ...],
    runtime: Runtime,
    module: nn.Module,
    held: Held,
    x: torch.Tensor,
) -> torch.Tensor:
    for move in before:
        x = moved(runtime, x, move)
    bias = held.get("bias") if any(move.src == P for move in after) else None
    y = compute(runtime, module, held if bias is None else {**held, "bias": None}, x)
    for move in after:
        y = moved(runtime, y, move)
    return y if bias is None else y + bias  # added once, to the sum


def _within(before: tuple[Move, ...], after: tuple[Move, ...], call: Call) -> Iterator[tuple[Move, int]]:
    yield from ((move, call.into) for move in before)
    yield from ((move, call.out) for move in after)


def _told(axes: tuple[str, ...], ranks: Mapping[str, int], call: Call) -> Iterator[tuple[Move, int]]:
    """The gathers of the statistics of a norm's slices, each with the elements per sample that it brings."""
    if call.formula is not None:
        numel = call.into // call.formula.width * call.formula.statistics
        for axis in axes:
            numel *= ranks[axis]
            yield Move(axis, WIDTH, R, wide=True, sums=True), numel


def _normed(
    formula: Formula, axes: tuple[str, ...], runtime: Runtime, module: nn.Module, held: Held, x: torch.Tensor
) -> torch.Tensor:
    """The slice of a norm's output, of a slice of its input."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    known = statistics(formula, wide)
    for axis in axes:
        known = moved(runtime, known, Move(axis, WIDTH, R, wide=True, sums=True))
    y = applied(formula, wide, joined(formula, known), held["weight"], held.get("bias"))
    return y.to(torch.result_type(x, held["weight"]))
