"""Tensor parallelism, 3-D: samples, and either side of every matrix, each along an axis of its own of a cube of ranks.

Why it works: Y = X W sums over the width of X, for each sample and each feature of Y: three indices. On q x q x q ranks each has
a q-th of every index, so a block of X, of W and of Y is needed by q ranks each, and no rank does what another does. A block that
is stored in q parts by those who need it takes a q-th of the memory, is gathered before use, and its gradient is scattered as it
is summed: X along the axis of the features of Y, W along that of the samples, Y the other way round along that of X's width.

    mesh: dp_shard (a: samples) x tp_depth (c) x tp (b), q ranks each; the stream lies in width over (c, b), b innermost
    X[a, (c, b)] --gather along b--> X[a, c]     W[in c, out b] in shards over a --gather--> W
    X[a, c] W = Y[a, b], a summand of it --reduce-scatter along c--> Y[a, (c, b)]            and so the next layer takes it in
    out b: of every q-th of the outputs the b-th q-th, so that what c gets of the sum is a slice of its part; heads stay whole

    received per rank and layer, forward + backward = 2 (q-1)/q^3 (|X| + |W| + |Y|) elements
    (each of X, W, Y: gathered or scattered once, its gradient the other way, q-1 of the q blocks of 1/q^3 each)
    stream, weights, gradients, moments: 1/q^3 of one device's; gathered blocks, kept for backward: 1/q^2

Weights count so where they are gathered once for forward and backward: `gather = "micro"` of the strategy that stores them; with
"use" they count 3 for 2. Layers that take in the same tensor share its gathering. The paper lets the axes b and c swap from layer
to layer; here b is the inner one for good, and a residual stream needs no swaps. Norms over the divided width take statistics
along both axes; tables lie in width along both; bias and norm likewise. The head sums logits along tp_depth, where all need
them: 2 (q-1)/q^3 b s v forward, and they are gathered along tp for the loss.
Cost: three gathers and scatters for one; per rank fewer bytes than 2-D as q grows, in more messages.
Limits: q^2 divides all widths and groups of heads, q the words. What 2-D says of norms without weights holds here.
Paper: Bian et al. 2021, "Maximizing Parallelism in Distributed Training for Huge Neural Networks", arXiv 2105.14450 (section 3);
Agarwal et al. 1995, "A three-dimensional approach to parallel matrix multiplication", IBM J. Res. Dev. 39(5) (SC).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from meshwright.parallel.tensor.comm_accounting import booked, heard
from meshwright.parallel.tensor.gqa_heads import told
from meshwright.parallel.tensor.layer_sharding import WIDTH, Held, Move, Way, Ways, filled, linear, own, placed
from meshwright.parallel.tensor.optimus_2d import (
    ROWS,
    TABLES,
    Sided,
    by_words,
    kind_faults,
    norms,
    shard_faults,
    sided,
    square_faults,
    through,
    tied,
    uneven_faults,
)
from meshwright.parallel.tensor.validation import axis_fault, twice_faults
from meshwright.plan.job.errors import Fault
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.dim_split import Cut
from meshwright.plan.sharding.param_sharding import Home
from meshwright.plan.sharding.placement import I, P, R
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Program
from meshwright.plan.strategy import Handler, Phase, Runtime, Strategy

DEPTH = "tp_depth"  # the axis along which the inputs of a matrix lie
PRODUCTS = ("columns", "rows")


@dataclass(frozen=True)
class Cube(Strategy):
    """Matrices divided on either side, along `axis` and tp_depth, and the stream along both, in a cube with dp_shard."""

    name: ClassVar[str] = "cube"
    phase: ClassVar[Phase] = "shard"
    axis: str = "tp"

    def check(self, job: Job, space: Space) -> Iterator[Fault]:
        where = "strategies.cube"
        if self.axis != "tp":
            yield axis_fault(self.axis, "the outputs of matrices", where)
            return
        yield from twice_faults(space, self.axis, where)
        yield from kind_faults(space, where)
        yield from square_faults(space, (ROWS, DEPTH, self.axis))

    def partners(self, space: Space) -> Iterator[Fault]:
        yield from uneven_faults(self._sides(space), space.mesh.size(self.axis))
        yield from shard_faults(space, "strategies.cube")
        if by_words(space, self.axis):
            text = "another strategy divides table or head by words along tp, and here they are divided along tp_depth too"
            yield Fault(text, 'remove name = "vocabulary"', "strategies.cube")

    def ways(self, space: Space) -> Ways:
        """How layers compute, by role; norms, packed matrices and what is tied by name."""
        b, c = self.axis, DEPTH
        product = Way({c: "in", b: "out"}, into=Move(b, WIDTH, R, (c,)), out=Move(c, P, WIDTH, (b,)))
        looked_up = Way({c: "out", b: "out"}, compute=own)
        ways = {
            **dict.fromkeys(PRODUCTS, product),
            **{layer: replace(product, compute=partial(_regrouped, *parts)) for layer, parts in self._packed(space)},
            "inside": Way({c: "out", b: "out"}, shared=(c, b), compute=own),
            "table": looked_up,
            "lookup": looked_up,
            "head": replace(product, out=Move(b, WIDTH, I), **through((), linear, (Move(c, P, I, (b,)),))),
            "logits": Way({}, **through((Move(b, WIDTH, I, (c,)), Move(c, WIDTH, I)), own)),
            **norms(space, (c, b)),
        }
        for weight, table, head, divisible in tied((space.whole or space).anatomy):
            summed = Way({c: "in", b: "in"}, **through((), linear, (Move(b, P, I), Move(c, P, I))))
            whole = Way({}, **through((), own, (Move(c, I, WIDTH), Move(b, I, WIDTH, (c,)))))
            ways[head], ways[table] = (summed, looked_up) if divisible else (ways["logits"], whole)
            ways[weight.layers[0]] = ways[table if weight.role in TABLES else head]  # its sides are those of its role
        return ways

    def place(self, space: Space) -> Space:
        ways, side = self.ways(space), space.mesh.size(DEPTH)

        def divided(home: Home) -> Home:
            home = placed(home, ways)
            fine = home.weight.role in PRODUCTS and len(home.weight.shape) > 1
            cuts = tuple(_refined(cut, side) if cut.side == "out" else cut for cut in home.weight.cuts)
            return replace(home, weight=replace(home.weight, cuts=cuts)) if fine else home

        space = space.with_homes(divided).with_homes(divided, frozen=True)
        return space.with_stream(DEPTH, WIDTH).with_stream(self.axis, WIDTH)

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        return heard(heard(booked(program, self.ways(space), space, job), self.axis), DEPTH)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        filled(runtime, self.ways(runtime.plan.space))
        told(runtime, DEPTH, self.axis)
        return {}

    def _sides(self, space: Space) -> Iterator[Sided]:
        """The outputs of products are dealt to all ranks of a plane in the end."""
        yield from (side for side in sided(space, self.ways(space)) if side[2].role not in PRODUCTS)
        for weight in (weight for weight in space.anatomy.weights if weight.role in PRODUCTS):
            yield from ((cut.units, 2 if cut.side == "out" else 1, weight) for cut in weight.cuts)

    def _packed(self, space: Space) -> Iterator[tuple[str, tuple[tuple[int, ...], int]]]:
        """The layers whose outputs come in several sections, each with what of those a rank computes, and the depth."""
        for weight in (weight for weight in space.anatomy.weights if weight.role in PRODUCTS and len(weight.shape) > 1):
            cut, ranks = weight.side("out"), space.mesh.size(self.axis)
            if cut is not None and len(cut.sections) > 1:
                local = tuple(section // ranks for section in cut.sections)
                yield weight.layers[0], (local, space.mesh.size(DEPTH))


def _refined(cut: Cut, parts: int) -> Cut:
    """`cut` with each of its sections in so many: ranks take a slice of each."""
    sections = tuple(section // parts for section in cut.sections for _ in range(parts))
    return Cut(cut.dim, max(1, cut.units // parts), sections, cut.side)


def _regrouped(
    sections: tuple[int, ...], depth: int, runtime: Runtime, module: nn.Module, held: Held, x: torch.Tensor
) -> torch.Tensor:
    """The product, whose features come section after section, with those of each rank along the depth together."""
    y = linear(runtime, module, held, x)
    return torch.cat([part.unflatten(-1, (depth, -1)) for part in y.split(sections, -1)], -1).flatten(-2)
