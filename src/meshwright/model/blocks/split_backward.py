"""The backward of a visit in two halves: the gradients of what it took in, and, any time later, those of its weights.

    y = x A,  z = f(y) B        graph    z <-- mm <-- f <-- mm <-- x        through: the nodes that lead to an input
                                               |            |               frontier: those where weights branch off
                                               B            A

    half      one run of autograd from the outputs to the inputs, dy and dx; it leaves at every frontier what came there
    settle    one run per frontier, from what was left there to its weights alone: dB = f(y)^T dz, dA = x^T dy

An engine that is told which gradients are wanted computes no others, so no product is computed twice. Which node is what follows
from the graph, for any model. Where halves cannot be told apart, gradients of weights come in the first one, as in a whole
backward:

    weights behind two frontiers (a layer that is called twice, a mask made once for two)
    weights that a Python function takes in: it would compute, and send, all of its gradients both times

A visit that takes in nothing that needs a gradient, an embedding, has its whole backward in the second half. Glue flows in the
first.

Cost: what the forward kept stays until the second half, and so do the gradients at frontiers (dz and dy, not dx); some
microseconds per node to look at the graph.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from meshwright.model.blocks.driver import BlockCall, OutputLeaf, backward, run_backward

Node = Any  # torch.autograd.graph.Node, whose attributes depend on the operation
Gradients = tuple[torch.Tensor | None, ...]
NODES: Any = torch._C._functions
ACCUMULATE_GRAD: type = NODES.AccumulateGrad  # the node that writes into a leaf, its `variable`
OPAQUE_NODE = "CheckpointFunctionBackward"  # it runs a graph of its own, which nobody sees, and refuses to be asked for a part


@dataclass(slots=True)
class _FrontierGrads:
    """What came to a frontier, noted when it first runs; when it runs once more it is given that again, whatever hooks did."""

    gradients: Gradients | None = None

    def __call__(self, gradients: Gradients) -> Gradients | None:
        if self.gradients is None:
            self.gradients = gradients
            return None
        return self.gradients


@dataclass(slots=True)
class WeightBackward:
    """The second half of a backward. Frontiers come with what was left there, and their weights: first what ran first."""

    frontiers: list[tuple[Node, _FrontierGrads, list[nn.Parameter]]] = field(default_factory=list)
    outputs: list[OutputLeaf] = field(default_factory=list)  # those that lead to weights alone

    def run(self) -> None:
        """Add the gradients of the weights that the first half has left out, and forget the graph."""
        frontiers, outputs = self.frontiers, self.outputs
        self.frontiers, self.outputs = [], []
        backward(BlockCall("", outputs))
        while frontiers:
            node, left, weights = frontiers.pop()
            came = [
                (GradientEdge(node, i), each)
                for i, each in enumerate(left.gradients or ())
                if each is not None
            ]
            if came:
                edges, gradients = zip(*came, strict=True)
                run_backward(edges, gradients, False, False, tuple(weights), True, True)


def input_backward(block_call: BlockCall) -> WeightBackward:
    """Give the leaves that a visit took in their gradients, and let its glue flow; the rest of its backward is returned."""
    if block_call.checkpoint is not None or not block_call.outputs:
        backward(block_call)  # which says what is wrong, or has glue alone
        return WeightBackward()
    graph = _Graph(block_call.outputs)
    if graph.is_opaque:
        backward(block_call)
        return WeightBackward()
    owed = WeightBackward()
    inputs = list(graph.inputs)
    for branch in graph.branches():
        if branch.whole:
            inputs += branch.weights
        elif branch.node is None:
            owed.outputs += branch.outputs
        else:
            left = _FrontierGrads()
            branch.node.register_prehook(left)
            owed.frontiers.append((branch.node, left, branch.weights))
    owed.frontiers.sort(
        key=lambda each: each[0]._sequence_nr()
    )  # what ranks send each other goes in the same order on all
    came = [(tensor, leaf.grad) for tensor, leaf in block_call.outputs if leaf.grad is not None]
    if inputs and came:
        tensors, gradients = zip(*came, strict=True)
        run_backward(tensors, gradients, True, False, tuple(inputs), True, True)
    block_call.outputs = []
    backward(block_call)
    return owed


@dataclass(slots=True)
class _Branch:
    """Weights that are reached from a frontier, or from `outputs` (then `node` is None); `whole`: not from there alone."""

    node: Node | None
    weights: list[nn.Parameter]
    outputs: list[OutputLeaf]
    whole: bool


class _Graph:
    """The graph behind outputs: its leaves, and the nodes `through` which gradients go to those that are no weights."""

    def __init__(self, outputs: Sequence[OutputLeaf]) -> None:
        self._outputs = outputs
        self._children: dict[Node, list[Node]] = {}  # of each node, those that it hands gradients to
        above: dict[Node, list[Node]] = {tensor.grad_fn: [] for tensor, _ in outputs}
        todo = list(above)
        while todo:
            node = todo.pop()
            self._children[node] = behind = [each for each, _ in node.next_functions if each is not None]
            for each in behind:
                if each in above:
                    above[each].append(node)
                else:
                    above[each] = [node]
                    todo.append(each)
        leaves = [node for node in above if type(node) is ACCUMULATE_GRAD]
        todo = [leaf for leaf in leaves if not isinstance(leaf.variable, nn.Parameter)]
        self.inputs = [leaf.variable for leaf in todo]
        self.is_opaque = any(type(node).__name__ == OPAQUE_NODE for node in above)
        self._through: dict[Node, None] = dict.fromkeys(todo)
        while todo:
            for node in above[todo.pop()]:
                if node not in self._through:
                    self._through[node] = None
                    todo.append(node)

    def branches(self) -> list[_Branch]:
        """The ways to weights that no input lies behind; those that meet are whole."""
        through, starts = self._through, dict[Node | None, list[Node]]()
        for node in through:
            aside = [each for each in self._children[node] if each not in through]
            if aside:
                starts[node] = aside
        ends = [output for output in self._outputs if output[0].grad_fn not in through]
        if ends:
            starts[None] = [tensor.grad_fn for tensor, _ in ends]
        found = {node: self._nodes_below(first) for node, first in starts.items()}
        owner: dict[Node, Node | None] = {}
        met: set[Node | None] = set()
        for node, nodes in found.items():
            for each in nodes:
                if owner.setdefault(each, node) is not node:
                    met |= {node, owner[each]}
        return [self._branch(node, nodes, ends, whole=node in met) for node, nodes in found.items()]

    @staticmethod
    def _branch(node: Node | None, nodes: Iterable[Node], ends: list[OutputLeaf], *, whole: bool) -> _Branch:
        weights = [each.variable for each in nodes if type(each) is ACCUMULATE_GRAD]
        return _Branch(node, weights, [] if node else ends, whole or isinstance(node, BackwardCFunction))

    def _nodes_below(self, roots: Iterable[Node]) -> dict[Node, None]:
        """The nodes behind `roots`, those too."""
        known = dict.fromkeys(roots)
        todo = list(known)
        while todo:
            for each in self._children[todo.pop()]:
                if each not in known:
                    known[each] = None
                    todo.append(each)
        return known
