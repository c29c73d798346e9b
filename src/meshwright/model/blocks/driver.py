"""Driving a forward that nobody rewrote: the model runs as it is, and its autograd graph is cut at block borders.

Each block's `forward` is replaced, per instance, by a call into the drive. When the model reaches a block, the drive
tells the engine (which plays its list up to that block's F), turns inputs that need gradients into leaves, runs the
block, and hands back leaves in place of its outputs. What lies between blocks is glue: a glue tensor is cut where a
block first takes it in, and remembered by identity, so that a value used by several blocks has one leaf. A block that
another block calls is a part of that one; a block under `torch.no_grad` runs as it is.

    model       embed ---> * 0.5 ---> layer ---> + skip ---> head ---> loss
    graph      [embed] o  [ glue ] o [layer] o  [ glue ] o  [head] o  [loss]        o: a leaf, where the graph is cut

Backward walks the visits in reverse: first the block, from the gradients of its outputs' leaves, then, once, the glue
tensors first seen at that block. A leaf's gradient is complete by the time its block is reached, because all that used
it came later in the forward; so skips, several inputs and encoder-decoders need nothing special. Glue keeps its buffers
(`retain_graph`), since two glue tensors may share a part of their graph.

A visit for which `reach` returns True is lean: it keeps its inputs, and `again` runs it once more before its backward
(model/lean.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.model.blocks.checkpointing import Kept, given_out
from meshwright.model.hf.output_capture import Mark, marks
from meshwright.model.tensors.grad_alias import Alias
from meshwright.model.tensors.pytree import swap, tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import visit_of

# Where the model's graph takes a gradient, and the leaf that stands for it beyond the border. For glue it is an edge, not
# the tensor: glue may write into the tensor later, and that must not change what the leaf stood for.
Cut = tuple[GradientEdge, torch.Tensor]
Output = tuple[torch.Tensor, torch.Tensor]
Reach = Callable[[str], bool | None]  # told the visit that is reached; True: it shall be lean
Guide = Callable[[str, Callable[..., Any], Any, Any], Any]  # (block, its run, args, kwargs) -> what the model gets


@dataclass(slots=True)
class Visit:
    """One call of one block: what it gave out, and the glue first seen on the way in. `kept`: it is to be run again."""

    name: str
    outputs: list[Output] = field(default_factory=list)
    glue: list[Cut] = field(default_factory=list)
    kept: Kept | None = None


@dataclass(slots=True)
class Pass:
    """One forward of the whole model: its visits by name, and the leaf of each glue tensor (and version) seen so far."""

    reach: Reach
    leave: Callable[[], None] | None = None
    visits: dict[str, Visit] = field(default_factory=dict)
    seen: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    side: dict[int, str] = field(default_factory=dict)  # leaves (by id) of what a block gave out by a side channel
    inside: bool = False


LARGER = "declare a larger block that holds both: Model(blocks=[...]), where '(model)' is the whole model"


class Drive:
    """Blocks of one module instance, their forwards replaced until `detach`.

    `in_place` hands out aliases of the leaves: slower by some microseconds a block, needed where the model writes into
    a block's output in place, which autograd refuses for leaves. The trial run finds out.

    Without `cut` the graph stays whole: for a list that does nothing between the backwards of its blocks, which are then
    one call of the autograd engine, made by the loss. Of the order of 30 us per block saved; only thin blocks show it.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], *, in_place: bool = False, cut: bool = True) -> None:
        self._blocks = dict(blocks)
        self._in_place, self.cut = in_place, cut
        self._pass: Pass | None = None
        self._fetch: Callable[[str], None] | None = None
        self._guide: Guide | None = None
        self._own = {name: block.__dict__.get("forward") for name, block in self._blocks.items()}
        for name, block in self._blocks.items():
            block.forward = partial(self._enter, name, block.forward)

    @property
    def in_glue(self) -> bool:
        """Whether a forward is under way, and between blocks."""
        return self._pass is not None and not self._pass.inside

    def is_block(self, name: str) -> bool:
        """Whether the module `name` is one of the blocks."""
        return name in self._blocks

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """Cut the graph meanwhile, whatever the list does."""
        before, self.cut = self.cut, True
        try:
            yield
        finally:
            self.cut = before

    @contextmanager
    def fetching(self, fetch: Callable[[str], None]) -> Iterator[None]:
        """Have `fetch(block)` called meanwhile before a block runs outside of a pass, as in an evaluation."""
        self._fetch = fetch
        try:
            yield
        finally:
            self._fetch = None

    @contextmanager
    def guided(self, guide: Guide) -> Iterator[None]:
        """Have `guide(block, run, args, kwargs)` called meanwhile in place of a block, which `run(*args, **kwargs)` runs."""
        self._guide = guide
        try:
            yield
        finally:
            self._guide = None

    def skip(self, name: str) -> None:
        """Count a call of the block `name` that is not made: the names of later visits are those of the whole forward."""
        if self._pass is not None:
            self._pass.calls[name] = self._pass.calls.get(name, 0) + 1

    def detach(self) -> None:
        """Give every block its own forward back. A second call does nothing."""
        for name, block in self._blocks.items():
            block.__dict__.pop("forward", None)
            own = self._own[name]
            if own is not None:  # it had one set on the instance
                block.__dict__["forward"] = own
        self._blocks = {}

    def forward(self, reach: Reach, call: Callable[[], Any], leave: Callable[[], None] | None = None) -> tuple[Any, Visit, Pass]:
        """Run `call` (the model's forward), calling `reach(visit)` before each block and `leave()`, if any, after it.

        A visit for which `reach` returns True is lean.

        Returns the model's outputs as leaves, the closing visit that holds the glue behind the last block, and the pass.
        """
        self._pass = current = Pass(reach, leave)
        try:
            outputs = call()
        finally:
            self._pass = None
        closing = Visit("(outputs)")
        taken = self._take(current, outputs, closing) if self.cut else {}
        if taken:
            outputs = swap(outputs, self._handed_out(taken))
        current.seen.clear()  # identities are needed while the forward runs; kept, they would keep activations
        return outputs, closing, current

    def _enter(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._guide is not None:
            return self._guide(name, partial(self._unguided, name, forward), args, kwargs)
        current = self._pass
        if current is None or current.inside or not torch.is_grad_enabled():
            if self._fetch is not None:
                self._fetch(name)
            return forward(*args, **kwargs)
        count = current.calls[name] = current.calls.get(name, 0) + 1
        visit = Visit(visit_of(name, count))
        lean = current.reach(visit.name)
        if not self.cut:
            return self._inside(current, forward, args, kwargs)
        taken = self._take(current, (args, kwargs), visit)
        if lean:
            visit.kept = self._keep(visit, name, forward, (args, kwargs), taken)
        if taken:
            args, kwargs = swap((args, kwargs), self._handed_out(taken))
        capturing = marks()
        run = partial(self._watch, visit, forward) if self._in_place else forward
        with nullcontext() if visit.kept is None else visit.kept.lean((args, kwargs)):
            outputs = self._inside(current, run, args, kwargs)
        current.visits[visit.name] = visit
        outputs = self._give_all(outputs, capturing, visit, current) if capturing else self._give(outputs, visit)
        if visit.kept is not None:
            visit.kept.leaves, visit.outputs = [leaf for _, leaf in visit.outputs], []
        return outputs

    def _unguided(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        guide, self._guide = self._guide, None  # blocks inside it are parts of it
        try:
            return self._enter(name, forward, *args, **kwargs)
        finally:
            self._guide = guide

    def _keep(self, visit: Visit, name: str, run: Callable[..., Any], given: Any, taken: Mapping[int, torch.Tensor]) -> Kept:
        """What a lean visit keeps of what it is given; in place, leaves may be written into by way of their aliases."""
        return Kept.of(visit.name, self._blocks[name], run, given, taken, copies=self._in_place)

    def again(self, visit: Visit) -> None:
        """Run a lean visit once more, so that there is a graph for its backward. Of any other visit nothing is done.

        Raises PlanError when it does not give what it gave at first.
        """
        if visit.kept is None:
            return
        under_way, self._pass = self._pass, None  # blocks inside it are parts of it
        try:
            visit.outputs = visit.kept.again(Alias.apply)
        finally:
            self._pass = under_way
        visit.kept = None

    @staticmethod
    def _inside(current: Pass, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        current.inside = True
        try:
            outputs = forward(*args, **kwargs)
        finally:
            current.inside = False
        if current.leave is not None:
            current.leave()
        return outputs

    def _give_all(self, outputs: Any, capturing: Sequence[Mark], visit: Visit, current: Pass) -> Any:
        """`outputs` as leaves, and what was captured inside the block likewise, in the lists where it stands."""
        channels = {id(tensor): mark.channel for mark in capturing for tensor in tensors(mark.added)}
        outputs, *captured = self._give([outputs, *(mark.added for mark in capturing)], visit)
        for mark, added in zip(capturing, captured, strict=True):
            mark.replace(added)
        current.side.update({id(leaf): channels[id(tensor)] for tensor, leaf in visit.outputs if id(tensor) in channels})
        return outputs

    @staticmethod
    def _watch(visit: Visit, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the block, and refuse one that writes into its input."""
        versions = [(tensor, tensor._version) for tensor in tensors((args, kwargs)) if tensor.requires_grad]
        outputs = forward(*args, **kwargs)
        if any(tensor._version != version for tensor, version in versions):
            text = f"the block '{visit.name}' writes into its input in place, and the gradient of what was there would be lost"
            raise PlanError(text, fix=f"use inplace=False there, write x = x + y for x += y, or {LARGER}", where="model")
        return outputs

    def _take(self, current: Pass, value: Any, visit: Visit) -> dict[int, torch.Tensor]:
        """Leaves for the glue tensors in `value`, by id of the tensor; those first seen here are noted in `visit`."""
        new: dict[int, torch.Tensor] = {}
        for tensor in tensors(value):
            if tensor.requires_grad and not tensor.is_leaf and id(tensor) not in new:
                key = (id(tensor), tensor._version)
                if key not in current.seen:
                    current.seen[key] = (tensor, tensor.detach().requires_grad_())
                    visit.glue.append((get_gradient_edge(tensor), current.seen[key][1]))
                new[id(tensor)] = current.seen[key][1]
        return new

    def _give(self, value: Any, visit: Visit) -> Any:
        """`value` with the block's outputs replaced by leaves."""
        new: dict[int, torch.Tensor] = {}
        for tensor in given_out(value):
            new[id(tensor)] = tensor.detach().requires_grad_()
            visit.outputs.append((tensor, new[id(tensor)]))
        return swap(value, self._handed_out(new)) if new else value

    def _handed_out(self, leaves: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {key: self.stand_in(leaf) for key, leaf in leaves.items()} if self._in_place else leaves

    def stand_in(self, leaf: torch.Tensor) -> torch.Tensor:
        """What the model gets for `leaf`: an alias where somebody may write into it in place, or itself."""
        return Alias.apply(leaf, leaf) if self._in_place else leaf


def backward(visit: Visit) -> None:
    """Gradients of one visit: its parameters', and those of the leaves it took in. Forgets the visit's graph."""
    if visit.kept is not None:
        raise RuntimeError(f"the backward of {visit.name} has no graph: it kept its inputs alone; put a RERUN before it")
    outputs, glue = visit.outputs, visit.glue
    visit.outputs, visit.glue = [], []
    _flow(outputs, keep=False)
    if glue:
        _flow(glue, keep=True)


def backward_from(root: torch.Tensor, seed: float) -> None:
    """Gradients of `seed * root`, a scalar, down to the leaves it was computed from."""
    run_backward((root,), (torch.full_like(root, seed),), False, False, (), True, True)


def _flow(cuts: Sequence[Cut | Output], *, keep: bool) -> None:
    edges, grads = [], []
    for source, leaf in cuts:
        grad = leaf.grad
        if grad is not None:
            edges.append(source)
            grads.append(grad)
    if edges:
        run_backward(tuple(edges), tuple(grads), keep, False, (), True, True)


# What torch.autograd.backward calls after it has checked shapes, which match here by construction: 12 us, not 53.
run_backward = torch.autograd.Variable._execution_engine.run_backward
