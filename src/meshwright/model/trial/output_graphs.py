"""Finds the outputs that a model computes over all samples of a forward, from the graphs of two trials.

    trial on 3 samples    aux_loss []  <--  sum []  <--  mul [8]  <--  mean [8]  <--  softmax [15, 8]
    trial on 5 samples    aux_loss []  <--  sum []  <--  mul [8]  <--  mean [8]  <--  softmax [25, 8]
                                                         ^ not linear, and without samples

An auxiliary loss is a product of means over all tokens: those of two halves of a batch do not add up to that
of the batch. A sum over samples does, through any sums and multiples of it; and a learned scale depends on no
sample. A size in the graph that differs between the trials is one of samples.

Limits: gradients only, so an output that needs none is not looked at. A mean that is written as a sum times
a constant passes for a sum.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import ne
from typing import Any

from meshwright.model.blocks.autograd_partition import Node, is_leaf_node
from meshwright.model.blocks.block_forward_backward import BlockCall, ForwardPass
from meshwright.model.loss.loss_inputs import distinct_tensors
from meshwright.model.tensors.pytree import named_tensors
from meshwright.plan.model_spec.model_spec import BatchStatistic

# backwards of scalars of which the result is a sum or a multiple, and of what joins or sums larger tensors
SCALAR_BACKWARDS = frozenset(
    f"{name}Backward0" for name in ("Add", "Sub", "Neg", "Mul", "View", "ToCopy", "Alias", "Clone")
)
SUM_BACKWARDS = frozenset(("SumBackward0", "SumBackward1", "StackBackward0", "CatBackward0"))


@dataclass
class OutputGraph:
    """The graph behind one output of a trial.

    `shapes` counts the shapes of all its nodes; `summands` are the shapes of the tensors whose elements the
    output adds up; `side_channels` are those that it passes.
    """

    path: str
    shape: tuple[int, ...]
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    summands: list[tuple[int, ...]] = field(default_factory=list)
    side_channels: tuple[str, ...] = ()

    def statistic(self, other: "OutputGraph", *, whole_batch: bool) -> BatchStatistic | None:
        """Returns the description of the output if it is computed over all samples, but is no sum over them;
        None if not. `other` is its graph in a trial with another number of samples.

        With `whole_batch` a sum counts too: such a loss takes values of the whole batch.
        """
        if self.shape != other.shape or self.shapes == other.shapes:
            return None
        is_sum = all(map(ne, self.summands, other.summands))
        return None if is_sum and not whole_batch else BatchStatistic(self.path, self.side_channels)


def output_graphs(outputs: Any, forward_pass: ForwardPass, final_call: BlockCall) -> list[OutputGraph]:
    """Returns the graphs behind the `distinct_tensors` of `outputs`, across the blocks at which it is cut.

    Only the graphs of scalars are followed.
    """
    paths = {id(tensor): path for path, tensor in reversed(named_tensors(outputs))}
    sources = _sources(forward_pass, final_call)
    graphs = []
    for tensor in distinct_tensors(outputs):
        graph = OutputGraph(_output_path(paths.get(id(tensor), "")), tuple(tensor.shape))
        graphs.append(graph)
        root = sources.get(id(tensor), tensor.grad_fn)
        if root is not None and not tensor.ndim:
            graph.side_channels = _count_shapes(graph, root, sources, forward_pass.side_channels)
            graph.summands = _summands(root, sources)
    return graphs


def _sources(forward_pass: ForwardPass, final_call: BlockCall) -> dict[int, Node]:
    """Returns the node behind each leaf, by its id, at which the driver has cut the graph."""
    calls = (*forward_pass.block_calls.values(), final_call)
    cuts = [(edge.node, leaf) for call in calls for edge, leaf in call.glue]
    cuts += [(tensor.grad_fn, leaf) for call in calls for tensor, leaf in call.outputs]
    return {id(leaf): node for node, leaf in cuts if node is not None}


def _count_shapes(
    graph: OutputGraph, root: Node, sources: Mapping[int, Node], side_channels: Mapping[int, str]
) -> tuple[str, ...]:
    """Counts the shapes of all nodes behind `root`; returns the side channels on the way, in order."""
    pending, seen, channels = [root], {root}, dict[str, None]()
    while pending:
        node = pending.pop()
        graph.shapes[_shape(node)] += 1
        if is_leaf_node(node) and id(node.variable) in side_channels:
            channels[side_channels[id(node.variable)]] = None
        found = [each for each in _nodes_behind(node, sources) if each not in seen]
        seen.update(found)
        pending += dict.fromkeys(found)
    return tuple(channels)


def _summands(root: Node, sources: Mapping[int, Node]) -> list[tuple[int, ...]]:
    pending, seen, shapes = [root], {root}, list[tuple[int, ...]]()
    while pending:
        node = pending.pop()
        behind = _nodes_behind(node, sources)
        is_product = node.name() == "MulBackward0" and len(behind) > 1
        is_scalar_sum = node.name() in SCALAR_BACKWARDS and _shape(node) == () and not is_product
        if behind and (is_scalar_sum or node.name() in SUM_BACKWARDS or is_leaf_node(node)):
            found = [each for each in behind if each not in seen]
            seen.update(found)
            pending += dict.fromkeys(found)
        else:
            shapes.append(_shape(node))
    return shapes


def _nodes_behind(node: Node, sources: Mapping[int, Node]) -> Sequence[Node]:
    if is_leaf_node(node):
        return [sources[id(node.variable)]] if id(node.variable) in sources else []
    return [source for source, _ in node.next_functions if source is not None]


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.variable.shape if is_leaf_node(node) else node._input_metadata[0].shape)


def _output_path(path: str) -> str:
    return "outputs" + "".join(f"[{key}]" if key.isdigit() else f".{key}" for key in path.split(".") if key)
