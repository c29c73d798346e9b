"""Driving a forward that nobody rewrote: the model runs as it is, and its autograd graph is cut at block borders.

Each block's `forward` is replaced, per instance, by a call into the drive. When the model reaches a block, the drive
tells the engine (which plays its list up to that block's F), turns inputs that need gradients into leaves, runs the
block, and hands back leaves in place of its outputs. What lies between blocks is glue: a glue tensor is cut where a
block first takes it in, and remembered by identity, so that a value used by several blocks has one leaf.

    model       embed ---> * 0.5 ---> layer ---> + skip ---> head ---> loss
    graph      [embed] o  [ glue ] o [layer] o  [ glue ] o  [head] o  [loss]        o: a leaf, where the graph is cut

Backward walks the visits in reverse: first the block, from the gradients of its outputs' leaves, then, once, the glue
tensors first seen at that block. A leaf's gradient is complete by the time its block is reached, because all that used
it came later in the forward; so skips, several inputs and encoder-decoders need nothing special. Glue keeps its buffers
(`retain_graph`), since two glue tensors may share a part of their graph.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.core.errors import PlanError
from meshwright.model.values import swap, tensors

Cut = tuple[torch.Tensor, torch.Tensor]  # a tensor of the model's graph, and the leaf that stands for it beyond the border


@dataclass
class Visit:
    """One call of one block: what it gave out, and the glue first seen on the way in."""

    name: str
    outputs: list[Cut] = field(default_factory=list)
    glue: list[Cut] = field(default_factory=list)


@dataclass
class Pass:
    """One forward of the whole model: its visits by name, and the leaf of each glue tensor seen so far."""

    reach: Callable[[str], None]
    visits: dict[str, Visit] = field(default_factory=dict)
    seen: dict[int, Cut] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)


class _Alias(torch.autograd.Function):
    """The same values as a tensor that is no leaf: glue or a block may then write into it in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class Drive:
    """Blocks of one module instance, their forwards replaced until `detach`.

    `in_place` hands out aliases of the leaves: slower by some microseconds a block, needed where the model writes into
    a block's output in place, which autograd refuses for leaves. The trial run finds out.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], *, in_place: bool = False) -> None:
        self._blocks = dict(blocks)
        self._in_place = in_place
        self._pass: Pass | None = None
        for name, block in self._blocks.items():
            block.forward = partial(self._enter, name, block.forward)

    def detach(self) -> None:
        """Give every block its own forward back."""
        for block in self._blocks.values():
            block.__dict__.pop("forward", None)

    def forward(self, reach: Callable[[str], None], call: Callable[[], Any]) -> tuple[Any, Visit, Pass]:
        """Run `call` (the model's forward), calling `reach(visit)` before each block.

        Returns the model's outputs as leaves, the closing visit that holds the glue behind the last block, and the pass.
        """
        self._pass = current = Pass(reach)
        try:
            outputs = call()
        finally:
            self._pass = None
        closing = Visit("(outputs)")
        return self._take(current, outputs, closing), closing, current

    def _enter(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        current = self._pass
        if current is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        count = current.calls[name] = current.calls.get(name, 0) + 1
        visit = Visit(name if count == 1 else f"{name}#{count}")
        current.reach(visit.name)
        args, kwargs = self._take(current, (args, kwargs), visit)
        outputs = self._give(forward(*args, **kwargs), visit)
        current.visits[visit.name] = visit
        return outputs

    def _take(self, current: Pass, value: Any, visit: Visit) -> Any:
        """`value` with its glue tensors replaced by leaves; those first seen here are noted in `visit`."""
        new = {}
        for tensor in tensors(value):
            if tensor.requires_grad and not tensor.is_leaf:
                cut = current.seen.get(id(tensor))
                if cut is None:
                    cut = current.seen[id(tensor)] = (tensor, tensor.detach().requires_grad_())
                    visit.glue.append(cut)
                new[id(tensor)] = self._hand_out(cut[1])
        return swap(value, new) if new else value

    def _give(self, value: Any, visit: Visit) -> Any:
        """`value` with the block's outputs replaced by leaves."""
        new = {}
        for tensor in tensors(value):
            if tensor.requires_grad and not tensor.is_leaf and id(tensor) not in new:
                leaf = tensor.detach().requires_grad_()
                visit.outputs.append((tensor, leaf))
                new[id(tensor)] = self._hand_out(leaf)
        return swap(value, new) if new else value

    def _hand_out(self, leaf: torch.Tensor) -> torch.Tensor:
        return _Alias.apply(leaf) if self._in_place else leaf


def backward(visit: Visit) -> None:
    """Gradients of one visit: its parameters', and those of the leaves it took in. Forgets the visit's graph."""
    _flow(visit.outputs, keep=False)
    _flow(visit.glue, keep=True)
    visit.outputs, visit.glue = [], []


def _flow(cuts: list[Cut], *, keep: bool) -> None:
    reached = [(tensor, leaf.grad) for tensor, leaf in cuts if leaf.grad is not None]
    if reached:
        torch.autograd.backward([tensor for tensor, _ in reached], [grad for _, grad in reached], retain_graph=keep)


def refuse_side_paths(roots: Iterable[torch.Tensor], owners: Mapping[int, str], where: str) -> None:
    """Raise PlanError when the graph behind `roots` (loss and glue) runs into a block: `owners` names parameters by id.

    Such a path goes round the leaves: a tensor that left its block by another way than its outputs (a hook, an
    attribute). Its gradient would arrive after the block's backward, or twice.
    """
    todo = [root.grad_fn for root in roots if root.grad_fn is not None]
    known = set(todo)
    while todo:
        node = todo.pop()
        for following, _ in node.next_functions:
            if following is None or following in known:
                continue
            known.add(following)
            variable = _variable(following)
            if variable is not None and id(variable) in owners:
                text = f"a tensor left a block behind its outputs: {where} reaches the parameter {owners[id(variable)]} directly"
                raise PlanError(
                    text,
                    fix="return that tensor among the outputs of its block, or compute with it inside the block",
                    where="model",
                )
            todo.append(following)


def _variable(node: Any) -> torch.Tensor | None:
    """The leaf that an AccumulateGrad node writes to; None for other nodes."""
    return node.variable if node.name() == "torch::autograd::AccumulateGrad" else None
