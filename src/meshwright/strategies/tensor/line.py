"""Tensor parallelism, 1-D (Megatron): pairs of matrices divided by columns, then by rows.

Why it works: in y = f(x A) B the columns of A need not know of each other as long as f works element by element, or head by head.
So each rank has some columns of A and the same rows of B, and computes a summand of y; one sum over the ranks ends the pair.

    x ----I -> R----> x A_0 -> f -> ... B_0 ---P -> I---> y + b         rank 0
    x ----I -> R----> x A_1 -> f -> ... B_1 ---P -> I---> y + b         rank 1
      backward: sum                     backward: nothing

    weights: A S(out), B S(in), its bias I (added once, after the sum); stream I: every rank holds it whole
    forward: one all_reduce per pair; backward: one per tensor that columns layers take in (q, k and v share one)
    sent per rank, micro-batch and layer of k pairs: 4 k b s h (t-1)/t elements
    weights, gradients and moments of the pairs: 1/t; norms, embedding and head: whole on every rank

Units that are divided are whole heads (groups of heads, where several share a key) and single features; they need not divide by
the number of ranks: the first ranks get one more.
Cost: the sums stand in the way of the computation, two per layer and direction: for fast links, inside a host.
Limits: layers whose roles nobody knows stay whole (`meshwright plan --explain-model`).
Paper: Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053 (section 3).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from meshwright.core.errors import Fault
from meshwright.core.job import Job
from meshwright.core.layout import P, R
from meshwright.core.program import Program
from meshwright.core.space import Home, Space
from meshwright.core.strategy import Handler, Phase, Runtime, Strategy
from meshwright.strategies.tensor.ways import Move, Way, Ways, booked, filled, heard, placed


@dataclass(frozen=True)
class Line(Strategy):
    """Pairs of linear layers divided along `axis`."""

    name: ClassVar[str] = "line"
    phase: ClassVar[Phase] = "shard"
    axis: str = "tp"

    def check(self, job: Job, space: Space) -> Iterator[Fault]:
        where = "strategies.line"
        if self.axis != "tp":
            yield Fault(f"axis = '{self.axis}'; matrices are divided along tp", 'write axis = "tp"', f"{where}.axis")
            return
        if not any(call.role == "rows" for call in space.anatomy.calls):
            text = f"no pair of linear layers of {space.anatomy.name} is known to split"
            fix = 'declare them: meshwright.Model(..., sockets={"layers.*.up": "columns", "layers.*.down": "rows"})'
            yield Fault(text, fix, where)
        if space.anatomy.random:
            yield Fault("the model draws dropout inside of what is divided", "set its dropout probabilities to 0", where)
        if job.guard.action != "off":
            text = "the guard replays a spoiled step block by block, and here no rank has all of a block's gradients"
            yield Fault(text, 'set guard.action = "off"', "guard.action")
        ranks, least, ways = space.mesh.size(self.axis), {}, self.ways(space)
        for weight in (home.weight for home in space.homes if home.weight.role in ways):
            cut = weight.side(ways[weight.role].cut[self.axis])
            if cut is not None and cut.units < ranks:
                least.setdefault(cut.units, weight.name)
        for units, name in sorted(least.items()):
            text = f"{name} divides into {units} units (heads that share a key, or features), and {self.axis} has {ranks} ranks"
            yield Fault(text, f"set mesh.{self.axis} to at most {units}", f"mesh.{self.axis}")

    def ways(self, space: Space) -> Ways:
        """How layers compute, by role; the stream lies where the space says."""
        stream = space.stream.place(self.axis)
        return {
            "columns": Way({self.axis: "out"}, into=Move(self.axis, stream, R)),
            "rows": Way({self.axis: "in"}, out=Move(self.axis, P, stream)),
        }

    def place(self, space: Space) -> Space:
        ways = self.ways(space)

        def divided(home: Home) -> Home:
            return placed(home, ways)

        return space.with_homes(divided).with_homes(divided, frozen=True)

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        return heard(booked(program, self.ways(space), space, job), self.axis)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        filled(runtime, self.ways(runtime.plan.space))
        return {}
