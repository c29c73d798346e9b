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

from meshwright.model.blocks.checkpointing import CheckpointedCall, tensors_with_graph
from meshwright.model.hf.output_capture import CaptureMark, capture_marks
from meshwright.model.tensors.grad_alias import GradAlias
from meshwright.model.tensors.pytree import replace_tensors, tree_tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_call_name

# Where the model's graph takes a gradient, and the leaf that stands for it beyond the border. For glue it is an edge, not
# the tensor: glue may write into the tensor later, and that must not change what the leaf stood for.
GraphCut = tuple[GradientEdge, torch.Tensor]
OutputLeaf = tuple[torch.Tensor, torch.Tensor]
BeforeBlock = Callable[[str], bool | None]  # told the visit that is reached; True: it shall be lean
BlockInterceptor = Callable[
    [str, Callable[..., Any], Any, Any], Any
]  # (block, its run, args, kwargs) -> what the model gets


@dataclass(slots=True)
class BlockCall:
    """One call of one block: what it gave out, and the glue first seen on the way in. `kept`: it is to be run again."""

    name: str
    outputs: list[OutputLeaf] = field(default_factory=list)
    glue: list[GraphCut] = field(default_factory=list)
    checkpoint: CheckpointedCall | None = None


@dataclass(slots=True)
class ForwardPass:
    """One forward of the whole model: its visits by name, and the leaf of each glue tensor (and version) seen so far."""

    before_block: BeforeBlock
    after_block: Callable[[], None] | None = None
    block_calls: dict[str, BlockCall] = field(default_factory=dict)
    glue_leaves: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    num_calls: dict[str, int] = field(default_factory=dict)
    side_channels: dict[int, str] = field(
        default_factory=dict
    )  # leaves (by id) of what a block gave out by a side channel
    in_block: bool = False


LARGER_BLOCK_FIX = (
    "declare a larger block that holds both: Model(blocks=[...]), where '(model)' is the whole model"
)


class ForwardDriver:
    """Blocks of one module instance, their forwards replaced until `detach`.

    `in_place` hands out aliases of the leaves: slower by some microseconds a block, needed where the model writes into
    a block's output in place, which autograd refuses for leaves. The trial run finds out.

    Without `cut` the graph stays whole: for a list that does nothing between the backwards of its blocks, which are then
    one call of the autograd engine, made by the loss. Of the order of 30 us per block saved; only thin blocks show it.
    """

    def __init__(
        self, blocks: Mapping[str, nn.Module], *, in_place: bool = False, cut_graph: bool = True
    ) -> None:
        self._blocks = dict(blocks)
        self._in_place, self.cut_graph = in_place, cut_graph
        self._pass: ForwardPass | None = None
        self._pre_block_hook: Callable[[str], None] | None = None
        self._interceptor: BlockInterceptor | None = None
        self._own_forwards = {name: block.__dict__.get("forward") for name, block in self._blocks.items()}
        for name, block in self._blocks.items():
            block.forward = partial(self._enter_block, name, block.forward)

    @property
    def in_glue(self) -> bool:
        """Whether a forward is under way, and between blocks."""
        return self._pass is not None and not self._pass.in_block

    def is_block(self, name: str) -> bool:
        """Whether the module `name` is one of the blocks."""
        return name in self._blocks

    @contextmanager
    def cutting_graph(self) -> Iterator[None]:
        """Cut the graph meanwhile, whatever the list does."""
        before, self.cut_graph = self.cut_graph, True
        try:
            yield
        finally:
            self.cut_graph = before

    @contextmanager
    def use_pre_block_hook(self, hook: Callable[[str], None]) -> Iterator[None]:
        """Have `fetch(block)` called meanwhile before a block runs outside of a pass, as in an evaluation."""
        self._pre_block_hook = hook
        try:
            yield
        finally:
            self._pre_block_hook = None

    @contextmanager
    def use_interceptor(self, interceptor: BlockInterceptor) -> Iterator[None]:
        """Have `guide(block, run, args, kwargs)` called meanwhile in place of a block, which `run(*args, **kwargs)` runs."""
        self._interceptor = interceptor
        try:
            yield
        finally:
            self._interceptor = None

    def skip_call(self, name: str) -> None:
        """Count a call of the block `name` that is not made: the names of later visits are those of the whole forward."""
        if self._pass is not None:
            self._pass.num_calls[name] = self._pass.num_calls.get(name, 0) + 1

    def detach(self) -> None:
        """Give every block its own forward back. A second call does nothing."""
        for name, block in self._blocks.items():
            block.__dict__.pop("forward", None)
            own = self._own_forwards[name]
            if own is not None:  # it had one set on the instance
                block.__dict__["forward"] = own
        self._blocks = {}

    def forward(
        self,
        before_block: BeforeBlock,
        run_model: Callable[[], Any],
        after_block: Callable[[], None] | None = None,
    ) -> tuple[Any, BlockCall, ForwardPass]:
        """Run `call` (the model's forward), calling `reach(visit)` before each block and `leave()`, if any, after it.

        A visit for which `reach` returns True is lean.

        Returns the model's outputs as leaves, the closing visit that holds the glue behind the last block, and the pass.
        """
        self._pass = current = ForwardPass(before_block, after_block)
        try:
            outputs = run_model()
        finally:
            self._pass = None
        closing = BlockCall("(outputs)")
        taken = self._cut_inputs(current, outputs, closing) if self.cut_graph else {}
        if taken:
            outputs = replace_tensors(outputs, self._writable_leaves(taken))
        current.glue_leaves.clear()  # identities are needed while the forward runs; kept, they would keep activations
        return outputs, closing, current

    def _enter_block(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._interceptor is not None:
            return self._interceptor(
                name, partial(self._enter_without_interceptor, name, forward), args, kwargs
            )
        current = self._pass
        if current is None or current.in_block or not torch.is_grad_enabled():
            if self._pre_block_hook is not None:
                self._pre_block_hook(name)
            return forward(*args, **kwargs)
        count = current.num_calls[name] = current.num_calls.get(name, 0) + 1
        visit = BlockCall(block_call_name(name, count))
        lean = current.before_block(visit.name)
        if not self.cut_graph:
            return self._run_block(current, forward, args, kwargs)
        taken = self._cut_inputs(current, (args, kwargs), visit)
        if lean:
            visit.checkpoint = self._checkpoint(visit, name, forward, (args, kwargs), taken)
        if taken:
            args, kwargs = replace_tensors((args, kwargs), self._writable_leaves(taken))
        capturing = capture_marks()
        run = partial(self._refuse_input_write, visit, forward) if self._in_place else forward
        with nullcontext() if visit.checkpoint is None else visit.checkpoint.first_run((args, kwargs)):
            outputs = self._run_block(current, run, args, kwargs)
        current.block_calls[visit.name] = visit
        outputs = (
            self._cut_captured_outputs(outputs, capturing, visit, current)
            if capturing
            else self._cut_outputs(outputs, visit)
        )
        if visit.checkpoint is not None:
            visit.checkpoint.output_leaves, visit.outputs = [leaf for _, leaf in visit.outputs], []
        return outputs

    def _enter_without_interceptor(
        self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        guide, self._interceptor = self._interceptor, None  # blocks inside it are parts of it
        try:
            return self._enter_block(name, forward, *args, **kwargs)
        finally:
            self._interceptor = guide

    def _checkpoint(
        self,
        visit: BlockCall,
        name: str,
        run: Callable[..., Any],
        given: Any,
        taken: Mapping[int, torch.Tensor],
    ) -> CheckpointedCall:
        """What a lean visit keeps of what it is given; in place, leaves may be written into by way of their aliases."""
        return CheckpointedCall.from_inputs(
            visit.name, self._blocks[name], run, given, taken, copy_inputs=self._in_place
        )

    def recompute(self, block_call: BlockCall) -> None:
        """Run a lean visit once more, so that there is a graph for its backward. Of any other visit nothing is done.

        Raises PlanError when it does not give what it gave at first.
        """
        if block_call.checkpoint is None:
            return
        under_way, self._pass = self._pass, None  # blocks inside it are parts of it
        try:
            block_call.outputs = block_call.checkpoint.recompute(GradAlias.apply)
        finally:
            self._pass = under_way
        block_call.checkpoint = None

    @staticmethod
    def _run_block(current: ForwardPass, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        current.in_block = True
        try:
            outputs = forward(*args, **kwargs)
        finally:
            current.in_block = False
        if current.after_block is not None:
            current.after_block()
        return outputs

    def _cut_captured_outputs(
        self, outputs: Any, capturing: Sequence[CaptureMark], visit: BlockCall, current: ForwardPass
    ) -> Any:
        """`outputs` as leaves, and what was captured inside the block likewise, in the lists where it stands."""
        channels = {
            id(tensor): mark.channel for mark in capturing for tensor in tree_tensors(mark.added_tensors)
        }
        outputs, *captured = self._cut_outputs([outputs, *(mark.added_tensors for mark in capturing)], visit)
        for mark, added in zip(capturing, captured, strict=True):
            mark.replace(added)
        current.side_channels.update(
            {id(leaf): channels[id(tensor)] for tensor, leaf in visit.outputs if id(tensor) in channels}
        )
        return outputs

    @staticmethod
    def _refuse_input_write(
        visit: BlockCall, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the block, and refuse one that writes into its input."""
        versions = [
            (tensor, tensor._version) for tensor in tree_tensors((args, kwargs)) if tensor.requires_grad
        ]
        outputs = forward(*args, **kwargs)
        if any(tensor._version != version for tensor, version in versions):
            text = f"the block '{visit.name}' writes into its input in place, and the gradient of what was there would be lost"
            raise PlanError(
                text,
                fix=f"use inplace=False there, write x = x + y for x += y, or {LARGER_BLOCK_FIX}",
                location="model",
            )
        return outputs

    def _cut_inputs(self, current: ForwardPass, value: Any, visit: BlockCall) -> dict[int, torch.Tensor]:
        """Leaves for the glue tensors in `value`, by id of the tensor; those first seen here are noted in `visit`."""
        new: dict[int, torch.Tensor] = {}
        for tensor in tree_tensors(value):
            if tensor.requires_grad and not tensor.is_leaf and id(tensor) not in new:
                key = (id(tensor), tensor._version)
                if key not in current.glue_leaves:
                    current.glue_leaves[key] = (tensor, tensor.detach().requires_grad_())
                    visit.glue.append((get_gradient_edge(tensor), current.glue_leaves[key][1]))
                new[id(tensor)] = current.glue_leaves[key][1]
        return new

    def _cut_outputs(self, value: Any, visit: BlockCall) -> Any:
        """`value` with the block's outputs replaced by leaves."""
        new: dict[int, torch.Tensor] = {}
        for tensor in tensors_with_graph(value):
            new[id(tensor)] = tensor.detach().requires_grad_()
            visit.outputs.append((tensor, new[id(tensor)]))
        return replace_tensors(value, self._writable_leaves(new)) if new else value

    def _writable_leaves(self, leaves: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {key: self.writable_leaf(leaf) for key, leaf in leaves.items()} if self._in_place else leaves

    def writable_leaf(self, leaf: torch.Tensor) -> torch.Tensor:
        """What the model gets for `leaf`: an alias where somebody may write into it in place, or itself."""
        return GradAlias.apply(leaf, leaf) if self._in_place else leaf


def backward(block_call: BlockCall) -> None:
    """Gradients of one visit: its parameters', and those of the leaves it took in. Forgets the visit's graph."""
    if block_call.checkpoint is not None:
        raise RuntimeError(
            f"the backward of {block_call.name} has no graph: it kept its inputs alone; put a RECOMPUTE before it"
        )
    outputs, glue = block_call.outputs, block_call.glue
    block_call.outputs, block_call.glue = [], []
    _backward_cuts(outputs, keep=False)
    if glue:
        _backward_cuts(glue, keep=True)


def backward_from(root: torch.Tensor, scale: float) -> None:
    """Gradients of `seed * root`, a scalar, down to the leaves it was computed from."""
    run_backward((root,), (torch.full_like(root, scale),), False, False, (), True, True)


def _backward_cuts(cuts: Sequence[GraphCut | OutputLeaf], *, keep: bool) -> None:
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
