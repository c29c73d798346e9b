"""Forward driver: runs the model's own forward, with its autograd graph cut at block boundaries.

Each block's `forward` is replaced, per instance, by a call into the driver. When the model reaches a block,
the driver calls the engine (which executes its actions up to that block's F), turns inputs that need
gradients into leaves, runs the block, and returns leaves in place of its outputs. The code between blocks is
glue: a glue tensor is cut where a block first takes it as input, and remembered by identity, so that a value
used by several blocks has one leaf. A block that another block calls is a part of that one; a block under
`torch.no_grad` runs unchanged.

    model       embed ---> * 0.5 ---> layer ---> + skip ---> head ---> loss
    graph      [embed] o  [ glue ] o [layer] o  [ glue ] o  [head] o  [loss]
                        o: a leaf, where the graph is cut

Backward walks the block calls in reverse: first the block, from the gradients of its outputs' leaves, then,
once, the glue tensors first used by that block. A leaf's gradient is complete when its block is reached,
because everything that used it came later in the forward; so skips, several inputs and encoder-decoders need
nothing special. Glue keeps its buffers (`retain_graph`), since two glue tensors may share a part of their
graph.

A block call for which `before_block` returns True is checkpointed: it keeps its inputs, and `recompute` runs
it again before its backward (model/blocks/checkpointing.py). If it returns the name of the block call before,
what that one has returned is not kept either: `recompute_outputs` makes it anew.

Cost: cutting the graph takes about 30 us per block call; only thin blocks show it.
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
from meshwright.model.hf.captured_outputs import CaptureMark, capture_marks
from meshwright.model.tensors.inplace_leaf_alias import GradAlias
from meshwright.model.tensors.pytree import replace_tensors, tree_tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_call_name

# Where the model's graph takes a gradient, and the leaf that replaces it beyond the boundary. For glue it is
# an edge, not the tensor: glue may write into the tensor later, which must not change the leaf's meaning.
GraphCut = tuple[GradientEdge, torch.Tensor]
OutputLeaf = tuple[torch.Tensor, torch.Tensor]
# called with the block call; True: checkpoint it, and the name of the block call before: without its outputs
BeforeBlock = Callable[[str], bool | str | None]
BlockInterceptor = Callable[
    [str, Callable[..., Any], Any, Any], Any
]  # (block, its run, args, kwargs) -> its outputs
OutputObserver = Callable[[Any], None]  # called with the outputs of a block


@dataclass(slots=True)
class BlockCall:
    """One call of one block: its outputs, and the glue tensors first used by it; `checkpoint`, if any."""

    name: str
    outputs: list[OutputLeaf] = field(default_factory=list)
    glue: list[GraphCut] = field(default_factory=list)
    checkpoint: CheckpointedCall | None = None


@dataclass(slots=True)
class ForwardPass:
    """One forward of the whole model: its block calls by name, and the leaf of each glue tensor."""

    before_block: BeforeBlock
    after_block: Callable[[], None] | None = None
    block_calls: dict[str, BlockCall] = field(default_factory=dict)
    glue_leaves: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    num_calls: dict[str, int] = field(default_factory=dict)
    side_channels: dict[int, str] = field(default_factory=dict)  # leaves (by id) of captured outputs
    in_block: bool = False


LARGER_BLOCK_FIX = (
    "declare a larger block that holds both: Model(blocks=[...]), where '(model)' is the whole model"
)


class ForwardDriver:
    """Replaces the forwards of the blocks of one module instance, until `detach`.

    `in_place` returns aliases of the leaves: slower by some microseconds per block, needed if the model
    writes into a block's output in place, which autograd refuses for leaves. The trial finds out.

    Without `cut_graph` the graph stays whole: for a program that does nothing between the backwards of its
    blocks, which are then one call of the autograd engine, made by the loss. It saves about 30 us per block;
    only thin blocks show it.
    """

    def __init__(
        self, blocks: Mapping[str, nn.Module], *, in_place: bool = False, cut_graph: bool = True
    ) -> None:
        self._blocks = dict(blocks)
        self._in_place, self.cut_graph = in_place, cut_graph
        self._pass: ForwardPass | None = None
        self._pre_block_hook: Callable[[str], None] | None = None
        self._interceptor: BlockInterceptor | None = None
        self._observer: OutputObserver | None = None
        self._own_forwards = {name: block.__dict__.get("forward") for name, block in self._blocks.items()}
        for name, block in self._blocks.items():
            block.forward = partial(self._enter_block, name, block.forward)

    @property
    def in_glue(self) -> bool:
        """Whether a forward is running and is between blocks."""
        return self._pass is not None and not self._pass.in_block

    @contextmanager
    def cutting_graph(self) -> Iterator[None]:
        """Context manager: cuts the graph, whatever `cut_graph` says."""
        before, self.cut_graph = self.cut_graph, True
        try:
            yield
        finally:
            self.cut_graph = before

    @contextmanager
    def use_pre_block_hook(self, hook: Callable[[str], None]) -> Iterator[None]:
        """Context manager: calls `hook(block)` before a block runs outside a forward pass (evaluation)."""
        self._pre_block_hook = hook
        try:
            yield
        finally:
            self._pre_block_hook = None

    @contextmanager
    def use_interceptor(self, interceptor: BlockInterceptor) -> Iterator[None]:
        """Context manager: calls `interceptor(block, run, args, kwargs)` in place of each block."""
        self._interceptor = interceptor
        try:
            yield
        finally:
            self._interceptor = None

    @contextmanager
    def use_output_observer(self, observer: OutputObserver) -> Iterator[None]:
        """Context manager: calls `observer(outputs)` after each block of a forward pass."""
        # not a forward hook of the blocks: a stage whose blocks have hooks is not replayed
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    def skip_call(self, name: str) -> None:
        """Counts a call of the block `name` that is not made; later calls keep their names."""
        if self._pass is not None:
            self._pass.num_calls[name] = self._pass.num_calls.get(name, 0) + 1

    def detach(self) -> None:
        """Restores the forward of every block. A second call does nothing."""
        for name, block in self._blocks.items():
            block.__dict__.pop("forward", None)
            own_forward = self._own_forwards[name]
            if own_forward is not None:  # one was set on the instance
                block.__dict__["forward"] = own_forward
        self._blocks = {}

    def forward(
        self,
        before_block: BeforeBlock,
        run_model: Callable[[], Any],
        after_block: Callable[[], None] | None = None,
    ) -> tuple[Any, BlockCall, ForwardPass]:
        """Runs `run_model`, with `before_block(block_call)` before each block and `after_block()` after it.

        What `before_block` returns decides whether the block call is checkpointed.

        Returns the model's outputs as leaves, the final call that holds the glue behind the last block, and
        the pass.
        """
        self._pass = forward_pass = ForwardPass(before_block, after_block)
        try:
            outputs = run_model()
        finally:
            self._pass = None
        final_call = BlockCall("(outputs)")
        output_leaves = self._cut_inputs(forward_pass, outputs, final_call) if self.cut_graph else {}
        if output_leaves:
            outputs = replace_tensors(outputs, self._writable_leaves(output_leaves))
        # identities matter while the forward runs; afterwards they would keep activations alive
        forward_pass.glue_leaves.clear()
        return outputs, final_call, forward_pass

    def _enter_block(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._interceptor is not None:
            return self._interceptor(
                name, partial(self._enter_without_interceptor, name, forward), args, kwargs
            )
        forward_pass = self._pass
        if forward_pass is None or forward_pass.in_block or not torch.is_grad_enabled():
            if self._pre_block_hook is not None:
                self._pre_block_hook(name)
            return forward(*args, **kwargs)
        count = forward_pass.num_calls[name] = forward_pass.num_calls.get(name, 0) + 1
        block_call = BlockCall(block_call_name(name, count))
        checkpointing = forward_pass.before_block(block_call.name)
        if not self.cut_graph:
            return self._run_block(forward_pass, forward, args, kwargs)
        input_leaves = self._cut_inputs(forward_pass, (args, kwargs), block_call)
        if checkpointing:
            block_call.checkpoint = self._checkpoint(block_call, name, forward, (args, kwargs), input_leaves)
            self._drop_inputs(block_call.checkpoint, forward_pass, checkpointing)
        if input_leaves:
            args, kwargs = replace_tensors((args, kwargs), self._writable_leaves(input_leaves))
        marks = capture_marks()
        run = partial(self._refuse_input_write, block_call, forward) if self._in_place else forward
        with (
            nullcontext()
            if block_call.checkpoint is None
            else block_call.checkpoint.first_run((args, kwargs))
        ):
            outputs = self._run_block(forward_pass, run, args, kwargs)
        forward_pass.block_calls[block_call.name] = block_call
        outputs = (
            self._cut_captured_outputs(outputs, marks, block_call, forward_pass)
            if marks
            else self._cut_outputs(outputs, block_call)
        )
        if block_call.checkpoint is not None:
            block_call.checkpoint.output_leaves = [leaf for _, leaf in block_call.outputs]
            block_call.outputs = []
        return outputs

    def _enter_without_interceptor(
        self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        interceptor, self._interceptor = self._interceptor, None  # blocks that it calls are parts of it
        try:
            return self._enter_block(name, forward, *args, **kwargs)
        finally:
            self._interceptor = interceptor

    def _checkpoint(
        self,
        block_call: BlockCall,
        name: str,
        run: Callable[..., Any],
        inputs: Any,
        leaves: Mapping[int, torch.Tensor],
    ) -> CheckpointedCall:
        return CheckpointedCall.from_inputs(
            block_call.name, self._blocks[name], run, inputs, leaves, copy_inputs=self._in_place
        )

    def _drop_inputs(
        self, call: CheckpointedCall, forward_pass: ForwardPass, checkpointing: bool | str
    ) -> None:
        """Drops those inputs of `call` that the block call named `checkpointing` has returned, if that ran
        just before: a forward may leave blocks out.
        """
        last = next(reversed(forward_pass.block_calls.values()), None)
        if last is None or last.name != checkpointing or last.checkpoint is None or self._in_place:
            return
        call.drop_inputs_of(last.checkpoint)

    def recompute(self, block_call: BlockCall) -> None:
        """Runs a checkpointed block call again, so that its backward has a graph; other calls are left alone.

        Raises PlanError if the outputs differ from those of the first run.
        """
        if block_call.checkpoint is None:
            return
        with self._no_pass():
            block_call.outputs = block_call.checkpoint.recompute(GradAlias.apply)
        block_call.checkpoint = None

    def recompute_outputs(self, block_call: BlockCall) -> None:
        """Runs a checkpointed block call again for its outputs, if they were dropped; others are left alone.

        Raises PlanError if the outputs differ from those of the first run.
        """
        if block_call.checkpoint is not None:
            with self._no_pass():
                block_call.checkpoint.recompute_outputs(GradAlias.apply)

    @contextmanager
    def _no_pass(self) -> Iterator[None]:
        """Context manager for a block call that runs again: blocks that it calls are parts of it."""
        running_pass, self._pass = self._pass, None
        try:
            yield
        finally:
            self._pass = running_pass

    def _run_block(
        self, forward_pass: ForwardPass, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        forward_pass.in_block = True
        try:
            outputs = forward(*args, **kwargs)
        finally:
            forward_pass.in_block = False
        if forward_pass.after_block is not None:
            forward_pass.after_block()
        if self._observer is not None:
            self._observer(outputs)
        return outputs

    def _cut_captured_outputs(
        self, outputs: Any, marks: Sequence[CaptureMark], block_call: BlockCall, forward_pass: ForwardPass
    ) -> Any:
        channels = {id(tensor): mark.channel for mark in marks for tensor in tree_tensors(mark.added_tensors)}
        outputs, *captured = self._cut_outputs([outputs, *(mark.added_tensors for mark in marks)], block_call)
        for mark, added in zip(marks, captured, strict=True):
            mark.replace(added)
        forward_pass.side_channels.update(
            {id(leaf): channels[id(tensor)] for tensor, leaf in block_call.outputs if id(tensor) in channels}
        )
        return outputs

    @staticmethod
    def _refuse_input_write(
        block_call: BlockCall, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        versions = [
            (tensor, tensor._version) for tensor in tree_tensors((args, kwargs)) if tensor.requires_grad
        ]
        outputs = forward(*args, **kwargs)
        if any(tensor._version != version for tensor, version in versions):
            text = (
                f"the block '{block_call.name}' writes into its input in place, and the gradient of the old "
                "value would be lost"
            )
            raise PlanError(
                text,
                fix=f"use inplace=False there, write x = x + y for x += y, or {LARGER_BLOCK_FIX}",
                location="model",
            )
        return outputs

    def _cut_inputs(
        self, forward_pass: ForwardPass, value: Any, block_call: BlockCall
    ) -> dict[int, torch.Tensor]:
        """Leaves for the glue tensors in `value`, by tensor id; new ones are recorded in the block call."""
        leaves: dict[int, torch.Tensor] = {}
        for tensor in tree_tensors(value):
            if tensor.requires_grad and not tensor.is_leaf and id(tensor) not in leaves:
                key = (id(tensor), tensor._version)
                if key not in forward_pass.glue_leaves:
                    forward_pass.glue_leaves[key] = (tensor, tensor.detach().requires_grad_())
                    block_call.glue.append((get_gradient_edge(tensor), forward_pass.glue_leaves[key][1]))
                leaves[id(tensor)] = forward_pass.glue_leaves[key][1]
        return leaves

    def _cut_outputs(self, value: Any, block_call: BlockCall) -> Any:
        leaves: dict[int, torch.Tensor] = {}
        for tensor in tensors_with_graph(value):
            leaves[id(tensor)] = tensor.detach().requires_grad_()
            block_call.outputs.append((tensor, leaves[id(tensor)]))
        return replace_tensors(value, self._writable_leaves(leaves)) if leaves else value

    def _writable_leaves(self, leaves: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {key: self.writable_leaf(leaf) for key, leaf in leaves.items()} if self._in_place else leaves

    def writable_leaf(self, leaf: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that the model gets for `leaf`: an alias if it may be written in place, else
        itself.
        """
        return GradAlias.apply(leaf, leaf) if self._in_place else leaf


def backward(block_call: BlockCall) -> None:
    """Computes the gradients of one block call: of its parameters and input leaves. Frees its graph."""
    if block_call.checkpoint is not None:
        raise RuntimeError(
            f"the backward of {block_call.name} has no graph, because the call is checkpointed; put a "
            "RECOMPUTE before it"
        )
    outputs, glue = block_call.outputs, block_call.glue
    block_call.outputs, block_call.glue = [], []
    _backward_cuts(outputs, keep=False)
    if glue:
        _backward_cuts(glue, keep=True)


def backward_from(root: torch.Tensor, scale: float | torch.Tensor) -> None:
    """Computes the gradients of `scale * root`, a scalar, down to the leaves it was computed from."""
    run_backward((root,), (seed_like(root, scale),), False, False, (), True, True)


def seed_like(root: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """Returns the gradient of `root` with which a backward of `scale * root` begins."""
    if isinstance(scale, torch.Tensor):
        return scale.to(root.dtype).expand(root.shape)
    return torch.full_like(root, scale)


def _backward_cuts(cuts: Sequence[GraphCut | OutputLeaf], *, keep: bool) -> None:
    edges, grads = [], []
    for source, leaf in cuts:
        grad = leaf.grad
        if grad is not None:
            edges.append(source)
            grads.append(grad)
    if edges:
        run_backward(tuple(edges), tuple(grads), keep, False, (), True, True)


# torch.autograd.backward calls this after checking shapes, which match here by construction: 12 us, not 53.
run_backward = torch.autograd.Variable._execution_engine.run_backward
