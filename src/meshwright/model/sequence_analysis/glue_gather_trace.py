"""Records the tensors that glue gathers over ranks in one trial forward, and the backwards through which
their gradients flow.

    hidden = layers.1(x)         a rank has a shard
    pooled = hidden.mean(1)      forward: gathered after layers.1
    y = hidden - pooled          sharded, input of layers.2       backward: after the backward of layers.2

A step cuts the graph at the inputs of each block call. What glue has made flows once, after the backward of
the first block call that takes it; the model outputs flow after the loss (blocks/block_forward_backward.py).
So everything follows from the autograd graph: from the loss back to the outputs of block calls, through each
to its inputs, and on.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.model.context_parallel.sharded_activation import (
    SequenceShardedTensor,
    find_sharded_tensors,
    to_local_tensors,
)
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.loss_inputs import OutputUseRecorder
from meshwright.model.sequence_analysis.trial_lengths import TrialLengths
from meshwright.model.tensors.pytree import named_tensors, tree_tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.sequence_info import GlueGather

GradNode = Any  # torch.autograd.graph.Node
GradEdge = tuple[GradNode, int]  # node and output index


@dataclass(eq=False)
class GatherRecord:
    """One tensor gathered after `block_call` ("" in the loss), for the input `path` of block call `consumer`
    ("" for glue).

    It has `numel` elements and `num_tokens` tokens at full length, of which each rank gave its shard; 0: a
    summand.
    """

    block_call: str
    numel: int
    num_tokens: int
    dtype: torch.dtype
    consumer: str = ""
    path: str = ""
    grad_node: GradNode | None = None
    backward_calls: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _InputEdges:
    """An input of a block call: the tensor on which it runs, the edges of both, and its tokens if sharded
    (0: not).
    """

    path: str
    block_tensor: torch.Tensor
    outer_edge: GradEdge | None
    inner_edge: GradEdge | None
    num_tokens: int
    is_replicated: bool


@dataclass
class _BlockCallEdges:
    """The edges of a block call: inputs with what it ran on, glue that it was first to take, and outputs."""

    block_call: str
    inputs: list[tuple[GradEdge, GradEdge]]
    glue_edges: list[GradEdge]
    outputs: list[GradEdge]


class GatherTrace:
    """Follows one forward; `gathers` are the gathered tensors in order."""

    def __init__(self, trial_lengths: TrialLengths) -> None:
        self.gathers: list[GatherRecord] = []
        self._trial_lengths = trial_lengths
        self._block_calls: list[_BlockCallEdges] = []
        self._inputs: list[_InputEdges] = []
        self._previous_call = ""
        self._output_nodes: set[GradNode] = set()
        self._seen_edges: set[GradEdge] = set()

    def add_gather(
        self, block_call: str, gathered: torch.Tensor, num_tokens: int = 0, consumer: str = "", path: str = ""
    ) -> torch.Tensor:
        """Notes and returns `gathered`, a tensor of its own: a gather of `num_tokens` tokens after
        `block_call`, or a sum (0).
        """
        planned_length = self._trial_lengths.planned_lengths.get(num_tokens, num_tokens)
        self.gathers.append(
            GatherRecord(
                block_call,
                self._trial_lengths.planned_numel(gathered.shape),
                planned_length,
                gathered.dtype,
                consumer,
                path,
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
        """Notes the inputs `value` of the next block call, with `token_dims` per tensor; the block runs on
        `replacements`.
        """
        self._previous_call, gathers_found = previous_call, dict[int, _InputEdges]()
        for (path, tensor), along in zip(named_tensors(value), token_dims, strict=True):
            inner = replacements.get(id(tensor), tensor)
            sharded = tensor if type(tensor) is SequenceShardedTensor else None
            # a rank takes its shard of any other tensor in every block call
            outer = inner if sharded is None else sharded.local_tensor
            tokens = 0 if sharded is None else sharded.token_shard.length
            gathers_found.setdefault(
                id(tensor),
                _InputEdges(path, inner, grad_edge(outer), grad_edge(inner), tokens, is_replicated=not along),
            )
        self._inputs = list(gathers_found.values())

    def leave_block(self, block_call: str, outputs: Any, *, is_replicated: bool) -> None:
        """Ends the block call; `is_replicated` if it ran on all tokens."""
        edge_pairs = list[tuple[GradEdge, GradEdge]]()
        for per_sample in self._inputs:
            is_gathered = per_sample.num_tokens > 0 and (is_replicated or per_sample.is_replicated)
            if is_gathered:
                self.add_gather(
                    self._previous_call,
                    per_sample.block_tensor,
                    per_sample.num_tokens,
                    block_call,
                    per_sample.path,
                )
            outer = per_sample.inner_edge if is_gathered else per_sample.outer_edge
            if outer is not None and per_sample.inner_edge is not None:
                edge_pairs.append((outer, per_sample.inner_edge))
        glue = [
            outer
            for outer, _ in edge_pairs
            if outer[0] not in self._output_nodes and outer not in self._seen_edges
        ]
        self._seen_edges.update(glue)
        output_edges = grad_edges(outputs)
        self._output_nodes |= {node for node, _ in output_edges}
        self._block_calls.append(
            _BlockCallEdges(block_call, edge_pairs, list(dict.fromkeys(glue)), output_edges)
        )
        self._inputs = []

    def finish(self, outputs: Any, loss: torch.Tensor | None) -> None:
        """Ends the forward with `outputs` and their `loss`; None: all outputs that need a gradient seem to
        get one.
        """
        output_edges = grad_edges(to_local_tensors(outputs))
        with_gradient = set(output_edges)
        if loss is not None:
            reached = reachable_edges(grad_edges(loss), {node for node, _ in output_edges})
            self._note_backward("", reached)
            with_gradient &= reached
        self._flow_back(
            "",
            [
                per_sample
                for per_sample in output_edges
                if per_sample[0] not in self._output_nodes and per_sample not in self._seen_edges
            ],
            with_gradient,
        )
        for call_edges in reversed(self._block_calls):
            reached_inside = reachable_edges(
                [per_sample for per_sample in call_edges.outputs if per_sample in with_gradient],
                {node for _, (node, _) in call_edges.inputs},
            )
            with_gradient |= {outer for outer, inner in call_edges.inputs if inner in reached_inside}
            self._flow_back(call_edges.block_call, call_edges.glue_edges, with_gradient)
        self._block_calls.clear()
        self._output_nodes.clear()
        self._seen_edges.clear()
        for gather in self.gathers:
            gather.grad_node = None

    def _flow_back(self, block_call: str, glue: Iterable[GradEdge], with_gradient: set[GradEdge]) -> None:
        reached = reachable_edges(
            [per_sample for per_sample in glue if per_sample in with_gradient], self._output_nodes
        )
        self._note_backward(block_call, reached)
        with_gradient |= {per_sample for per_sample in reached if per_sample[0] in self._output_nodes}

    def _note_backward(self, block_call: str, reached: set[GradEdge]) -> None:
        nodes = {node for node, _ in reached}
        for gather in self.gathers:
            if gather.grad_node is not None and gather.grad_node in nodes:
                gather.backward_calls.append(block_call)


def compare_gathers(
    first_gathers: Sequence[GatherRecord],
    second_gathers: Sequence[GatherRecord] | None,
    batch_sizes: tuple[int, int],
) -> tuple[tuple[GlueGather, ...], str]:
    """Returns the gathers for any batch size, from two forwards, and why they vary ("" if they do not).

    The second forward has other lengths and float64; None: it did not run.
    """
    for block_call in dict.fromkeys(
        per_sample.block_call for per_sample in (*first_gathers, *(second_gathers or ()))
    ):
        counts = [
            sum(per_sample.block_call == block_call for per_sample in some)
            for some in (first_gathers, first_gathers if second_gathers is None else second_gathers)
        ]
        if counts[0] != counts[1]:
            text = (
                f"{_describe_glue(block_call)} gathers tokens of several ranks {counts[0]} times on "
                f"{batch_sizes[0]} samples"
            )
            return (), f"{text}, and {counts[1]} times on {batch_sizes[1]} longer or shorter ones"
    gathers_found = list[GlueGather]()
    for number, first_gather in enumerate(first_gathers):
        second_gather = first_gather if second_gathers is None else second_gathers[number]
        per_sample, remainder = divmod(first_gather.numel, batch_sizes[0])
        is_per_sample = (
            not remainder
            and second_gather.numel == per_sample * batch_sizes[0 if second_gathers is None else 1]
        )
        if (not is_per_sample and second_gather.numel != first_gather.numel) or (
            second_gather.block_call,
            second_gather.backward_calls,
        ) != (
            first_gather.block_call,
            first_gather.backward_calls,
        ):
            text = (
                f"what {_describe_glue(first_gather.block_call)} needs of several ranks' tokens "
                f"depends on the number of samples, or of tokens"
            )
            return (
                (),
                f"{text}: {first_gather.numel:,} elements of {batch_sizes[0]} samples, "
                f"{second_gather.numel:,} of {batch_sizes[1]}",
            )
        has_own_dtype = not first_gather.dtype.is_floating_point or (
            second_gathers is not None and second_gather.dtype == first_gather.dtype
        )
        dtype = str(first_gather.dtype).removeprefix("torch.") if has_own_dtype else ""
        gathers_found.append(
            GlueGather(
                first_gather.block_call,
                per_sample if is_per_sample else first_gather.numel,
                first_gather.num_tokens,
                is_per_sample,
                tuple(first_gather.backward_calls),
                dtype,
                first_gather.consumer,
            )
        )
    return tuple(gathers_found), ""


def rank_loss(
    loss: Loss, outputs: Any, batch: Mapping[str, torch.Tensor], targets: Iterable[str]
) -> torch.Tensor | None:
    """Returns the loss as a rank computes it: of its own tokens if the loss is a sum over tokens."""
    if loss.whole_batch:
        return None
    logits_tensors = tree_tensors(
        outputs if loss.vocab_parallel is None else loss.vocab_parallel.logits(outputs)
    )
    lengths = {
        per_sample.token_shard.length if type(per_sample) is SequenceShardedTensor else 0
        for per_sample in logits_tensors
    }
    (length,) = lengths if len(lengths) == 1 else (0,)
    has_own_dtype = loss.is_token_sum and length > 0 and all(batch[key].shape[1] == length for key in targets)
    total = loss.total(to_local_tensors(outputs) if has_own_dtype else outputs, batch)
    if loss.auxiliary is None:
        return total
    # of all tokens: what it reads was gathered when it left its block
    recorder = OutputUseRecorder({id(each): at for at, each in enumerate(find_sharded_tensors(outputs))})
    with recorder:
        sums = loss.auxiliary.sums(outputs, batch)
    if recorder.used:
        text = "the auxiliary loss sums over outputs of which each rank along cp has its own tokens"
        raise PlanError(text, fix="set mesh.cp = 1, or leave the auxiliary loss out", location="loss")
    return total + loss.auxiliary.total(outputs, batch, sums)


def _describe_glue(block_call: str) -> str:
    return f"the glue after '{block_call}'" if block_call else "the loss"


def grad_edge(tensor: torch.Tensor) -> GradEdge | None:
    """Returns the edge at which a gradient of `tensor` starts; None without gradient."""
    return (tensor.grad_fn, tensor.output_nr) if tensor.requires_grad and tensor.grad_fn is not None else None


def grad_edges(value: Any) -> list[GradEdge]:
    """Returns the edges of the tensors in `value` that have one."""
    return [
        gathers_found for gathers_found in map(grad_edge, tree_tensors(value)) if gathers_found is not None
    ]


def reachable_edges(starts: Iterable[GradEdge], ends: Collection[GradNode]) -> set[GradEdge]:
    """Returns the edges behind `starts` in the graph, which is followed up to the nodes `ends`."""
    reached = set(starts)
    pending, visited = [node for node, _ in reached], set[GradNode]()
    while pending:
        node = pending.pop()
        if node in visited or node in ends:
            continue
        visited.add(node)
        next_edges = [
            (per_sample, number) for per_sample, number in node.next_functions if per_sample is not None
        ]
        reached.update(next_edges)
        pending += [per_sample for per_sample, _ in next_edges]
    return reached
