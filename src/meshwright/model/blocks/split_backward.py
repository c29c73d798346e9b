"""Splits the backward of a block call in two: gradients of its inputs (I), and, later, of its weights (W).

    y = x A,  z = f(y) B    graph    z <-- mm <-- f <-- mm <-- x       through: nodes that lead to an input
                                           |            |              frontier: weights branch off here
                                           B            A

    I    one run of autograd from the outputs to the inputs, dy and dx; saves the gradient at each frontier
    W    one run per frontier, from that gradient to its weights alone: dB = f(y)^T dz, dA = x^T dy

Autograd computes only the gradients that it is asked for, so no product is computed twice. Which node is
which follows from the graph, for any model. If the halves cannot be separated, weight gradients come in I, as
in a full backward:

    weights behind two frontiers (a layer that is called twice, a mask made once for two)
    weights that are inputs of a Python autograd function: it would compute all of its gradients twice

A block call without inputs that need a gradient, such as an embedding, has its whole backward in W. Glue runs
in I.

Cost: activations stay until W, and so do the gradients at frontiers (dz and dy, not dx); some microseconds
per node to walk the graph.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from meshwright.model.blocks.block_forward_backward import BlockCall, OutputLeaf, backward, run_backward

Node = Any  # torch.autograd.graph.Node, whose attributes depend on the operation
Gradients = tuple[torch.Tensor | None, ...]
NODES: Any = torch._C._functions
ACCUMULATE_GRAD: type = NODES.AccumulateGrad  # the node that accumulates into a leaf, its `variable`
# it runs a graph of its own, which cannot be inspected, and refuses partial backwards
OPAQUE_NODE = "CheckpointFunctionBackward"


@dataclass(slots=True)
class _FrontierGrads:
    # notes the gradients when the frontier first runs, and returns them when it runs again despite hooks

    gradients: Gradients | None = None

    def __call__(self, gradients: Gradients) -> Gradients | None:
        if self.gradients is None:
            self.gradients = gradients
            return None
        return self.gradients


@dataclass(slots=True)
class WeightBackward:
    """The W half of a backward. Frontiers come with their saved gradients and weights, in the order of I."""

    frontiers: list[tuple[Node, _FrontierGrads, list[nn.Parameter]]] = field(default_factory=list)
    outputs: list[OutputLeaf] = field(default_factory=list)  # outputs that lead only to weights

    def run(self) -> None:
        """Adds the weight gradients that I left out, and frees the graph."""
        frontiers, outputs = self.frontiers, self.outputs
        self.frontiers, self.outputs = [], []
        backward(BlockCall("", outputs))
        while frontiers:
            node, saved, weights = frontiers.pop()
            edge_grads = [
                (GradientEdge(node, i), each)
                for i, each in enumerate(saved.gradients or ())
                if each is not None
            ]
            if edge_grads:
                edges, gradients = zip(*edge_grads, strict=True)
                run_backward(edges, gradients, False, False, tuple(weights), True, True)


def input_backward(block_call: BlockCall) -> WeightBackward:
    """Computes the gradients of a block call's input leaves and runs its glue; returns the rest as W."""
    if block_call.checkpoint is not None or not block_call.outputs:
        backward(block_call)  # raises the right error, or runs glue alone
        return WeightBackward()
    graph = _Graph(block_call.outputs)
    if graph.is_opaque:
        backward(block_call)
        return WeightBackward()
    weight_backward = WeightBackward()
    inputs = list(graph.inputs)
    for branch in graph.branches():
        if branch.whole:
            inputs += branch.weights
        elif branch.node is None:
            weight_backward.outputs += branch.outputs
        else:
            saved = _FrontierGrads()
            branch.node.register_prehook(saved)
            weight_backward.frontiers.append((branch.node, saved, branch.weights))
    weight_backward.frontiers.sort(
        key=lambda each: each[0]._sequence_nr()
    )  # collectives must run in the same order on all ranks
    output_grads = [(tensor, leaf.grad) for tensor, leaf in block_call.outputs if leaf.grad is not None]
    if inputs and output_grads:
        tensors, gradients = zip(*output_grads, strict=True)
        run_backward(tensors, gradients, True, False, tuple(inputs), True, True)
    block_call.outputs = []
    backward(block_call)
    return weight_backward


@dataclass(slots=True)
class _Branch:
    """Weights behind a frontier, or behind `outputs` (`node` is None); `whole`: not separable."""

    node: Node | None
    weights: list[nn.Parameter]
    outputs: list[OutputLeaf]
    whole: bool


class _Graph:
    """The graph behind outputs: its leaves, and the nodes `through` which gradients reach inputs."""

    def __init__(self, outputs: Sequence[OutputLeaf]) -> None:
        self._outputs = outputs
        self._children: dict[Node, list[Node]] = {}  # of each node, those that it passes gradients to
        parents: dict[Node, list[Node]] = {tensor.grad_fn: [] for tensor, _ in outputs}
        todo = list(parents)
        while todo:
            node = todo.pop()
            self._children[node] = children = [each for each, _ in node.next_functions if each is not None]
            for each in children:
                if each in parents:
                    parents[each].append(node)
                else:
                    parents[each] = [node]
                    todo.append(each)
        leaves = [node for node in parents if type(node) is ACCUMULATE_GRAD]
        todo = [leaf for leaf in leaves if not isinstance(leaf.variable, nn.Parameter)]
        self.inputs = [leaf.variable for leaf in todo]
        self.is_opaque = any(type(node).__name__ == OPAQUE_NODE for node in parents)
        self._through: dict[Node, None] = dict.fromkeys(todo)
        while todo:
            for node in parents[todo.pop()]:
                if node not in self._through:
                    self._through[node] = None
                    todo.append(node)

    def branches(self) -> list[_Branch]:
        """The branches to weights with no input behind them; those that meet are whole."""
        through, starts = self._through, dict[Node | None, list[Node]]()
        for node in through:
            weight_nodes = [each for each in self._children[node] if each not in through]
            if weight_nodes:
                starts[node] = weight_nodes
        ends = [output for output in self._outputs if output[0].grad_fn not in through]
        if ends:
            starts[None] = [tensor.grad_fn for tensor, _ in ends]
        nodes_by_start = {node: self._nodes_below(first) for node, first in starts.items()}
        owner: dict[Node, Node | None] = {}
        shared: set[Node | None] = set()
        for node, nodes in nodes_by_start.items():
            for each in nodes:
                if owner.setdefault(each, node) is not node:
                    shared |= {node, owner[each]}
        return [
            self._branch(node, nodes, ends, whole=node in shared) for node, nodes in nodes_by_start.items()
        ]

    @staticmethod
    def _branch(node: Node | None, nodes: Iterable[Node], ends: list[OutputLeaf], *, whole: bool) -> _Branch:
        weights = [each.variable for each in nodes if type(each) is ACCUMULATE_GRAD]
        return _Branch(node, weights, [] if node else ends, whole or isinstance(node, BackwardCFunction))

    def _nodes_below(self, roots: Iterable[Node]) -> dict[Node, None]:
        known = dict.fromkeys(roots)
        todo = list(known)
        while todo:
            for each in self._children[todo.pop()]:
                if each not in known:
                    known[each] = None
                    todo.append(each)
        return known
