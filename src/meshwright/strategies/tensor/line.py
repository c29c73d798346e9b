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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.core.anatomy import NBYTES, Linear
from meshwright.core.errors import Fault
from meshwright.core.job import Job
from meshwright.core.layout import I, P, R, S
from meshwright.core.program import Action, Program, Transfer
from meshwright.core.space import Home, Space
from meshwright.core.steps import COUNT_NBYTES, FORWARDS
from meshwright.core.strategy import Handler, Phase, Runtime, Strategy
from meshwright.model.linears import lies_transposed


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
        if not space.anatomy.linears:
            text = f"no pair of linear layers of {space.anatomy.name} is known to split"
            fix = 'declare them: meshwright.Model(..., sockets={"layers.*.up": "columns", "layers.*.down": "rows"})'
            yield Fault(text, fix, where)
        if space.anatomy.random:
            yield Fault("the model draws dropout inside of what is divided", "set its dropout probabilities to 0", where)
        if job.guard.action != "off":
            text = "the guard replays a spoiled step block by block, and here no rank has all of a block's gradients"
            yield Fault(text, 'set guard.action = "off"', "guard.action")
        ranks, least = space.mesh.size(self.axis), {}
        for home in space.homes:
            for cut in home.weight.cuts:
                if cut.units < ranks:
                    least.setdefault(cut.units, home.weight.name)
        for units, name in sorted(least.items()):
            text = f"{name} divides into {units} units (heads that share a key, or features), and {self.axis} has {ranks} ranks"
            yield Fault(text, f"set mesh.{self.axis} to at most {units}", f"mesh.{self.axis}")

    def place(self, space: Space) -> Space:
        return space.with_homes(self._divided).with_homes(self._divided, frozen=True)

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        return program.edit(lambda actions: [self._meeting(action, actions, space, job) for action in actions])

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        done = set()
        for linear in runtime.plan.anatomy.linears:
            if linear.name not in done:
                runtime.fill(linear.name, self._forward(linear, runtime))
            done.add(linear.name)
        return {}

    def _divided(self, home: Home) -> Home:
        if not home.weight.cuts:
            return home
        place = S(home.weight.cuts[0].dim)
        layout, grad, stored = (layout.with_place(self.axis, place) for layout in (home.layout, home.grad, home.stored))
        return replace(home, layout=layout, grad=grad, stored=stored)

    def _meeting(self, action: Action, actions: list[Action], space: Space, job: Job) -> Action:
        """`action` with the sums that are taken in it."""
        mine = [linear for linear in space.anatomy.linears if linear.visit == action.subject]
        if action.kind == "COUNT":  # a wish to stop is heard by all
            axes = (*(action.transfer.axes if action.transfer else ()), self.axis)
            return replace(action, lane="wire", transfer=Transfer("all_reduce", axes, COUNT_NBYTES, dtype="float64"))
        if action.kind in FORWARDS:
            numels = [linear.out for linear in mine if linear.role == "rows"]
        elif action.kind == "B":
            taken = {linear.source: linear.into for linear in mine if linear.role == "columns" and linear.needed}
            numels = list(reversed(taken.values()))
        else:
            return action
        micros = {other.micro for other in actions if other.kind == "B"}
        rows, dtype = job.train.batch // space.mesh.extent(space.data_axes) // len(micros), job.precision.compute
        sums = (Transfer("all_reduce", (self.axis,), numel * rows * NBYTES[dtype], dtype=dtype) for numel in numels)
        return replace(action, inner=(*action.inner, *sums))

    def _forward(self, linear: Linear, runtime: Runtime) -> Callable[..., torch.Tensor]:
        if linear.role == "columns":
            return partial(_columns, lambda x: runtime.move(x, self.axis, I, R))
        return partial(_rows, lambda y: runtime.move(y, self.axis, P, I))


def _columns(moved: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return _product(module, moved(x), module._parameters["bias"])


def _rows(summed: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y, bias = summed(_product(module, x, None)), module._parameters["bias"]
    return y if bias is None else y + bias


def _product(module: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    weight = module.get_parameter("weight")
    return F.linear(x, weight.t() if lies_transposed(module) else weight, bias)
