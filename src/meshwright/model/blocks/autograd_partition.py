"""Checks the autograd graph of one forward: which part of it uses which parameter, and bypassed blocks.

A correct forward leaves its graph in parts, one per block call and one for glue, which meet only at leaves:

    [embed] o  [ glue ] o [layer] o  [ glue ] o  [head] o  [loss]

A tensor that bypasses a block's outputs (kept in an attribute, captured by a hook, read from another block)
joins two parts. Its gradient would come after the block's backward, or twice, or find its graph freed; so it
is refused, with the name of the block. The parameters that a part uses are read off the graph, because the
block that contains a parameter need not be the one that uses it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.model.blocks.block_forward_backward import LARGER_BLOCK_FIX, BlockCall, ForwardPass
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import ROOT

BOUNDARY_FIX = f"pass that tensor as an argument, return it among the outputs, or {LARGER_BLOCK_FIX}"
Node = Any  # torch.autograd.graph.Node, whose attributes depend on the operation


@dataclass(frozen=True)
class GraphPartition:
    """The graph of one forward: the part of each node, and the parts that use each leaf, by the leaf's id.

    A part is a block call, or ROOT for glue.
    """

    owner: Mapping[Node, str]
    users: Mapping[int, set[str]]

    def check_param_users(
        self, leaves: Mapping[str, torch.Tensor], known: Mapping[str, Iterable[str]]
    ) -> None:
        """Raises PlanError if a block call uses a leaf without being `known` to; ROOT allows every use."""
        for name, leaf in leaves.items():
            unknown = self.users.get(id(leaf), set()).difference(known[name])
            if unknown and ROOT not in known[name]:
                piece = min(unknown)
                where = "the glue between blocks uses" if piece == ROOT else f"the block '{piece}' uses"
                text = f"{where} the parameter {name}, which it did not use in the trial"
                fix = f"let every forward use each parameter in the same blocks, or {LARGER_BLOCK_FIX}"
                raise PlanError(text, fix=fix, location="model")

    def check_loss(self, loss: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> None:
        """Raises PlanError if the loss reaches one of `leaves`, or a part, not through the outputs."""
        names = {id(leaf): name for name, leaf in leaves.items()}
        for node in backward_nodes([loss.grad_fn] if loss.grad_fn is not None else []):
            if is_leaf_node(node) and id(node.variable) in names:
                text = (
                    f"the loss reaches the parameter {names[id(node.variable)]} directly, not through the "
                    "model's outputs"
                )
                raise PlanError(text, fix="use it inside the model, and return the result", location="loss")
            if node in self.owner:
                raise _bypass_error(self.owner[node], "the loss")


def split_graph(forward_pass: ForwardPass, final_call: BlockCall) -> GraphPartition:
    """Returns the parts of the graph of a finished forward. Raises PlanError for a tensor that bypasses
    outputs.
    """
    owner: dict[Node, str] = {}
    users: dict[int, set[str]] = defaultdict(set)
    for block_call in forward_pass.block_calls.values():
        for node in backward_nodes(tensor.grad_fn for tensor, _ in block_call.outputs):
            if is_leaf_node(node):
                users[id(node.variable)].add(block_call.name)
            elif owner.setdefault(node, block_call.name) != block_call.name:
                raise _bypass_error(owner[node], f"the block '{block_call.name}'")
    for node in backward_nodes(
        edge.node
        for block_call in (*forward_pass.block_calls.values(), final_call)
        for edge, _ in block_call.glue
    ):
        if is_leaf_node(node):
            users[id(node.variable)].add(ROOT)
        elif owner.setdefault(node, ROOT) != ROOT:
            raise _bypass_error(owner[node], "the glue between blocks")
    return GraphPartition(owner, users)


def backward_nodes(roots: Iterable[Node]) -> Iterator[Node]:
    """Yields the nodes from `roots` back to the leaves, each once."""
    todo = list(dict.fromkeys(roots))
    seen = set(todo)
    while todo:
        node = todo.pop()
        yield node
        sources = [source for source, _ in node.next_functions if source is not None and source not in seen]
        seen.update(sources)
        todo.extend(dict.fromkeys(sources))


def is_leaf_node(node: Node) -> bool:
    """Returns whether `node` accumulates into a leaf, which is then `node.variable`."""
    return node.name() == "torch::autograd::AccumulateGrad"


def reachable_leaf_names(tensor: torch.Tensor, names: Mapping[int, str]) -> set[str | None]:
    """Returns the names of the leaves (by id) that the graph of `tensor` reaches; None stands for other
    leaves.
    """
    return {names.get(id(node.variable)) for node in backward_nodes([tensor.grad_fn]) if is_leaf_node(node)}


def _bypass_error(part: str, user: str) -> PlanError:
    block = "the glue between blocks" if part == ROOT else f"the block '{part}'"
    text = (
        f"a tensor bypasses the outputs of {block}: it reaches {user} without being an argument or an output"
    )
    return PlanError(text, fix=BOUNDARY_FIX, location="model")
