"""What glue brings together of tokens in one trial forward, and in the backwards of which visits its gradients go back.

    hidden = layers.1(x)         a rank has some of the tokens
    pooled = hidden.mean(1)      forward: brought together behind layers.1
    y = hidden - pooled          apart, and given to layers.2       backward: when layers.2 has had its own, what it took in flows

A step cuts the graph where a visit takes something in, and what glue has made flows once, behind the backward of the visit that
took it in first; what the model gives out flows behind the loss (model/drive.py). So all follows from the graph that autograd has
made: from what the loss takes, back to what visits gave out, from there within the visit to what it took in, and on.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.model.blocks.loss_inputs import LossSpec
from meshwright.model.sequence_analysis.lengths import TrialLengths
from meshwright.model.sequence_parallel.sharded_activation import SequenceShardedTensor, to_local_tensors
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.plan.model_spec.sequence_info import GlueGather

GradNode = Any  # torch.autograd.graph.Node
GradEdge = tuple[GradNode, int]  # and which of its outputs


@dataclass(eq=False)
class GatherRecord:
    """One tensor that was brought together behind `visit` (empty: in the loss), and given `into` another (empty: to glue).

    It has `numel` elements, with as many tokens as there are: so many `tokens`, of which each rank gave its own; 0: a summand.
    """

    block_call: str
    numel: int
    num_tokens: int
    dtype: torch.dtype
    consumer: str = ""
    grad_node: GradNode | None = None
    backward_calls: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _InputEdges:
    """A tensor that a visit takes in, as it runs on it, where gradients of both flow, the tokens of one that is apart, 0: none.

    `keys`: it is given with all tokens.
    """

    block_tensor: torch.Tensor
    outer_edge: GradEdge | None
    inner_edge: GradEdge | None
    num_tokens: int
    is_replicated: bool


@dataclass
class _BlockCallEdges:
    """A visit: what it took in, each with what it ran on instead; the glue of that which it took in first; what it gave out."""

    block_call: str
    inputs: list[tuple[GradEdge, GradEdge]]
    glue_edges: list[GradEdge]
    outputs: list[GradEdge]


class GatherTrace:
    """Follows one forward, on tokens as `sizes` says; `found` is what was brought together, in order."""

    def __init__(self, trial_lengths: TrialLengths) -> None:
        self.gathers: list[GatherRecord] = []
        self._trial_lengths = trial_lengths
        self._block_calls: list[_BlockCallEdges] = []
        self._inputs: list[_InputEdges] = []
        self._previous_call = ""
        self._output_nodes: set[GradNode] = set()
        self._seen_edges: set[GradEdge] = set()

    def add_gather(
        self, block_call: str, gathered: torch.Tensor, num_tokens: int = 0, consumer: str = ""
    ) -> torch.Tensor:
        """Behind `visit` glue, or a visit, is given `made`, which nobody else has: of all `tokens`, or a sum. Returns it."""
        planned = self._trial_lengths.planned_lengths.get(num_tokens, num_tokens)
        self.gathers.append(
            GatherRecord(
                block_call,
                self._trial_lengths.planned_numel(gathered.shape),
                planned,
                gathered.dtype,
                consumer,
                gathered.grad_fn,
            )
        )
        return gathered

    def enter_block(
        self,
        previous_call: str,
        value: Any,
        token_dims: Iterable[tuple[int, ...]],
        replacements: Mapping[int, torch.Tensor],
    ) -> None:
        """A visit behind another takes in `value`; of its tensors, in order, these `dims` are tokens, and `new` run instead."""
        self._previous_call, found = previous_call, dict[int, _InputEdges]()
        for tensor, along in zip(tree_tensors(value), token_dims, strict=True):
            inner = replacements.get(id(tensor), tensor)
            apart = tensor if type(tensor) is SequenceShardedTensor else None
            outer = (
                inner if apart is None else apart.local_tensor
            )  # a rank cuts its tokens out of all else, every time
            tokens = 0 if apart is None else apart.token_shard.length
            found.setdefault(
                id(tensor),
                _InputEdges(inner, grad_edge(outer), grad_edge(inner), tokens, is_replicated=not along),
            )
        self._inputs = list(found.values())

    def leave_block(self, block_call: str, outputs: Any, *, is_replicated: bool) -> None:
        """It has run, on all tokens of what it takes in where that is `whole`."""
        pairs = list[tuple[GradEdge, GradEdge]]()
        for each in self._inputs:
            brought = each.num_tokens > 0 and (is_replicated or each.is_replicated)
            if brought:
                self.add_gather(self._previous_call, each.block_tensor, each.num_tokens, block_call)
            outer = each.inner_edge if brought else each.outer_edge
            if outer is not None and each.inner_edge is not None:
                pairs.append((outer, each.inner_edge))
        glue = [
            outer
            for outer, _ in pairs
            if outer[0] not in self._output_nodes and outer not in self._seen_edges
        ]
        self._seen_edges.update(glue)
        gave = grad_edges(outputs)
        self._output_nodes |= {node for node, _ in gave}
        self._block_calls.append(_BlockCallEdges(block_call, pairs, list(dict.fromkeys(glue)), gave))
        self._inputs = []

    def finish(self, outputs: Any, loss: torch.Tensor | None) -> None:
        """The forward has given `outputs`, of which a loss has made `total`; None: all that need a gradient seem to get one."""
        given = grad_edges(to_local_tensors(outputs))
        marked = set(given)
        if loss is not None:
            reached = _reachable_edges(grad_edges(loss), {node for node, _ in given})
            self._note_backward("", reached)
            marked &= reached
        self._flow_back(
            "",
            [each for each in given if each[0] not in self._output_nodes and each not in self._seen_edges],
            marked,
        )
        for passed in reversed(self._block_calls):
            inside = _reachable_edges(
                [each for each in passed.outputs if each in marked], {node for _, (node, _) in passed.inputs}
            )
            marked |= {outer for outer, inner in passed.inputs if inner in inside}
            self._flow_back(passed.block_call, passed.glue_edges, marked)
        self._block_calls.clear()
        self._output_nodes.clear()
        self._seen_edges.clear()
        for moved in self.gathers:
            moved.grad_node = None

    def _flow_back(self, visit: str, glue: Iterable[GradEdge], marked: set[GradEdge]) -> None:
        """What was taken in flows, as far as it has a gradient, to what visits gave out, which then have one."""
        reached = _reachable_edges([each for each in glue if each in marked], self._output_nodes)
        self._note_backward(visit, reached)
        marked |= {each for each in reached if each[0] in self._output_nodes}

    def _note_backward(self, visit: str, reached: set[GradEdge]) -> None:
        nodes = {node for node, _ in reached}
        for moved in self.gathers:
            if moved.grad_node is not None and moved.grad_node in nodes:
                moved.backward_calls.append(visit)


def compare_gathers(
    first_gathers: Sequence[GatherRecord],
    second_gathers: Sequence[GatherRecord] | None,
    batch_sizes: tuple[int, int],
) -> tuple[tuple[GlueGather, ...], str]:
    """What is brought together on any number of rows, as two forwards show it; and why it is not the same on all (empty: it is).

    They ran on so many `rows`, the second on other numbers of tokens too, and in float64; None: it did not run.
    """
    for visit in dict.fromkeys(each.block_call for each in (*first_gathers, *(second_gathers or ()))):
        counts = [
            sum(each.block_call == visit for each in some)
            for some in (first_gathers, first_gathers if second_gathers is None else second_gathers)
        ]
        if counts[0] != counts[1]:
            text = f"{_describe_glue(visit)} brings tokens of several ranks together {counts[0]} times on {batch_sizes[0]} rows"
            return (), f"{text}, and {counts[1]} times on {batch_sizes[1]} longer or shorter ones"
    found = list[GlueGather]()
    for number, one in enumerate(first_gathers):
        two = one if second_gathers is None else second_gathers[number]
        each, rest = divmod(one.numel, batch_sizes[0])
        by_row = not rest and two.numel == each * batch_sizes[0 if second_gathers is None else 1]
        if (not by_row and two.numel != one.numel) or (two.block_call, two.backward_calls) != (
            one.block_call,
            one.backward_calls,
        ):
            text = f"what {_describe_glue(one.block_call)} needs of several ranks' tokens depends on the number of rows, or of tokens"
            return (
                (),
                f"{text}: {one.numel:,} elements of {batch_sizes[0]} rows, {two.numel:,} of {batch_sizes[1]}",
            )
        own = not one.dtype.is_floating_point or (second_gathers is not None and two.dtype == one.dtype)
        dtype = str(one.dtype).removeprefix("torch.") if own else ""
        found.append(
            GlueGather(
                one.block_call,
                each if by_row else one.numel,
                one.num_tokens,
                by_row,
                tuple(one.backward_calls),
                dtype,
                one.consumer,
            )
        )
    return tuple(found), ""


def rank_loss(
    loss_spec: LossSpec, outputs: Any, batch: Mapping[str, torch.Tensor], targets: Iterable[str]
) -> torch.Tensor | None:
    """The loss of what a forward gave out, as a rank takes it: of its own tokens, where it is a sum over those."""
    if loss_spec.whole_batch:
        return None
    read = tree_tensors(outputs if loss_spec.logits is None else loss_spec.logits(outputs))
    lengths = {each.token_shard.length if type(each) is SequenceShardedTensor else 0 for each in read}
    (length,) = lengths if len(lengths) == 1 else (0,)
    own = loss_spec.is_token_sum and length > 0 and all(batch[key].shape[1] == length for key in targets)
    return loss_spec.total(to_local_tensors(outputs) if own else outputs, batch)


def _describe_glue(visit: str) -> str:
    return f"the glue behind '{visit}'" if visit else "the loss"


def grad_edge(tensor: torch.Tensor) -> GradEdge | None:
    """Where a gradient of `tensor` begins to flow; None: it has none."""
    return (tensor.grad_fn, tensor.output_nr) if tensor.requires_grad and tensor.grad_fn is not None else None


def grad_edges(value: Any) -> list[GradEdge]:
    """The same of the tensors in `value` that have one."""
    return [found for found in map(grad_edge, tree_tensors(value)) if found is not None]


def _reachable_edges(starts: Iterable[GradEdge], ends: Collection[GradNode]) -> set[GradEdge]:
    """Where gradients come to from `starts`; nobody looks behind `ends`."""
    reached = set(starts)
    todo, known = [node for node, _ in reached], set[GradNode]()
    while todo:
        node = todo.pop()
        if node in known or node in ends:
            continue
        known.add(node)
        behind = [(each, number) for each, number in node.next_functions if each is not None]
        reached.update(behind)
        todo += [each for each, _ in behind]
    return reached
