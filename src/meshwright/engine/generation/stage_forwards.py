"""Forwards of a pipelined model with a cache: each rank runs its own blocks, and sends what others need.

    rank 0    embed --> layer 0 --> (layer 1) --> (head)         hidden states of layer 0 --> rank 1
    rank 1   (embed) -> (layer 0) --> layer 1 --> head           chosen tokens            --> rank 0

The model's own forward runs on every rank. A block of another rank returns what that rank has sent, if a
block of this one needs it, and NaN in its shape otherwise, without memory: glue may run on it, and a number
that depended on it would be NaN, not wrong. Which outputs are needed is known from the forward that the trial
recorded; shapes from two of its lengths. In the cache, layers of other ranks are as long as those of this
rank, without memory too, so that the model finds the positions that it expects.

    bytes per forward    rows x tokens x width at each border between ranks, and 8 per row for the tokens

Limits: what crosses a border is the output of a block, and caches are of keys and values. Other models run in
lockstep (forward_backward/lockstep_pipeline_forward.py), which sends the outputs of all blocks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import nan
from typing import Any

import torch

from meshwright.comm.collectives.group import Work
from meshwright.engine.generation.kv_cache import caches_keys_and_values, fill_missing_columns
from meshwright.engine.runtime.comm_groups import p2p_group
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.pipeline.forward_graph import ForwardGraph, ValueRef
from meshwright.model.tensors.pytree import map_leaves, tree_tensors, value_leaves
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_call_name, block_of
from meshwright.plan.model_spec.stage_transfers import StageValue

TOKEN_DIM = 1  # of inputs [samples, tokens]


def make_stage_forwards(state: RankState, action: str) -> "StageForwards | None":
    """Returns what runs the stages of this rank; None without a pipeline, or where it cannot.

    All pipeline ranks get the same answer.
    """
    sharding, graphs = state.plan.sharding, state.trained_module.forward_graphs
    if not sharding.block_calls_by_pp_rank or graphs is None:
        return None
    if state.takes_residual_slices(has_whole_tokens=True):
        return None
    compute_dtype = getattr(torch, state.plan.job.precision.compute)
    inputs = state.loss.model_inputs(state.trained_module.dummy_batch)
    lengths = {value.shape[TOKEN_DIM] for value in inputs.values() if value.ndim > TOKEN_DIM}
    if len(lengths) != 1 or min(lengths) == 1:
        return None
    if not caches_keys_and_values(state.trained_module.module):
        return None
    (length,) = lengths
    shorter = {
        key: value[:, : length - 1] if value.ndim > TOKEN_DIM else value for key, value in inputs.items()
    }
    graph, shorter_graph = (graphs.get(each, compute_dtype, training=False) for each in (inputs, shorter))
    owners = dict[str, int]()
    for index, calls in reversed(list(enumerate(sharding.block_calls_by_pp_rank))):
        owners |= {block_of(call): index for call in calls}
    if not owners.keys() >= set(map(block_of, graph.boundaries.block_calls)):
        return None  # a block that training does not call, and that every rank has
    shapes = _shapes_by_length(graph, shorter_graph, length)
    crossing = [value for value in graph.boundaries.values if _crosses(value, owners)]
    if shapes is None or any(value.op for value in crossing):
        return None
    return StageForwards(state, action, _StagePlan(graph, owners, {v.name: v for v in crossing}, shapes))


def _crosses(value: StageValue, owners: Mapping[str, int]) -> bool:
    return any(owners[block_of(call)] != owners[block_of(value.producer)] for call in value.consumers)


@dataclass(frozen=True)
class _Shape:
    """The shape of a value: of each dim, the size without samples and per sample, each at two lengths."""

    length: int
    at_length: tuple[tuple[int, int], ...]
    at_shorter: tuple[tuple[int, int], ...]

    def size(self, num_samples: int, num_tokens: int) -> tuple[int, ...]:
        """Returns the shape for `num_samples` samples of `num_tokens` tokens."""
        more = num_tokens - self.length
        return tuple(
            fixed + more * (fixed - shorter_fixed) + num_samples * (each + more * (each - shorter_each))
            for (fixed, each), (shorter_fixed, shorter_each) in zip(
                self.at_length, self.at_shorter, strict=True
            )
        )


def _shapes_by_length(
    graph: ForwardGraph, shorter_graph: ForwardGraph, length: int
) -> dict[str, _Shape] | None:
    """Returns the shapes of all values; None if the forward takes another path at another length."""
    sizes, shorter = graph.dim_sizes, shorter_graph.dim_sizes
    if graph.boundaries.block_calls != shorter_graph.boundaries.block_calls or sizes.keys() != shorter.keys():
        return None
    if any(len(sizes[name]) != len(shorter[name]) for name in sizes):
        return None
    return {name: _Shape(length, sizes[name], shorter[name]) for name in sizes}


@dataclass(frozen=True)
class _StagePlan:
    """The recorded forward, the pipeline rank of each block, and what crosses borders between ranks."""

    graph: ForwardGraph
    owners: Mapping[str, int]
    crossing: Mapping[str, StageValue]
    shapes: Mapping[str, _Shape]

    def receivers(self, name: str) -> list[int]:
        """Returns the ranks that need the value `name` of another rank."""
        if name not in self.crossing:
            return []
        value = self.crossing[name]
        ranks = {self.owners[block_of(call)] for call in value.consumers}
        return sorted(ranks - {self.owners[block_of(value.producer)]})


class StageForwards:
    """The forwards of the stages of one rank; messages are sent for `action`."""

    def __init__(self, state: RankState, action: str, stage_plan: _StagePlan) -> None:
        self._state, self._action, self._plan = state, action, stage_plan
        self._group = state.world.group(("pp",))
        self.last_rank = stage_plan.owners[block_of(stage_plan.graph.boundaries.block_calls[-1])]
        self._num_samples, self._num_tokens = 0, 0
        self._num_calls: dict[str, int] = {}
        self._values: dict[str, torch.Tensor] = {}  # of this forward, by name
        self._sends: list[tuple[Work, torch.Tensor]] = []

    @property
    def num_batches(self) -> int:
        """How many batches go round the ranks, so that all compute at once: as many as there are ranks, where
        each has one stage.
        """
        calls = self._plan.graph.boundaries.block_calls
        ranks = [self._plan.owners[block_of(call)] for call in calls]
        num_stages = 1 + sum(one != other for one, other in pairwise(ranks))
        return num_stages if num_stages == self._group.size else 1

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the logits."""
        return self._group.index == self.last_rank

    @contextmanager
    def run(self) -> Iterator[None]:
        """Makes blocks of other ranks return what these have sent, in forwards of the module."""
        with self._state.driver.use_interceptor(self._run_block):
            yield
        self._wait_for_sends()

    def begin(self, ids: torch.Tensor) -> None:
        """Begins a forward on the tokens `ids`, (samples, tokens)."""
        self._wait_for_sends()
        self._num_samples, self._num_tokens = ids.shape
        self._num_calls = {}

    def end(self, cache: Any, num_tokens: int) -> None:
        """Ends a forward: layers of other ranks in `cache` become as long as the `num_tokens` so far. What
        this rank sends may still be under way.
        """
        self._values = {}
        for layer in [] if cache is None else cache.layers:
            fill_missing_columns(layer, self._num_samples, num_tokens, self._state.world.device)

    def share_tokens(self, ids: torch.Tensor) -> Work:
        """Begins to replace `ids` (samples,) on all ranks by those of the rank that has the logits."""
        return self._group.broadcast(ids, source=self.last_rank, action=self._action)

    def share_logprobs(self, logprobs: torch.Tensor) -> Work:
        """Begins to replace `logprobs` on all ranks by those of the rank that has the logits."""
        return self._group.broadcast(logprobs, source=self.last_rank, action=self._action)

    def _wait_for_sends(self) -> None:
        for work, _ in self._sends:
            work.wait()
        self._sends = []

    def _run_block(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        owner = self._plan.owners.get(name)
        if owner is None:  # not in the trained forward: every rank has it
            return run(*args, **kwargs)
        number = self._num_calls[name] = self._num_calls.get(name, 0) + 1
        stub = self._plan.graph.stubs.get(block_call_name(name, number))
        if stub is None:
            text = f"the forward calls '{name}' {number} times, which it did not in the trial"
            fix = "generate under a plan without a pipeline"
            raise PlanError(text, fix=fix, location="model")
        if owner != self._group.index:
            return map_leaves(stub.outputs, partial(self._foreign_value, owner, (args, kwargs)))
        outputs = run(*args, **kwargs)
        refs = [each for each in value_leaves(stub.outputs) if type(each) is ValueRef]
        tensors = tree_tensors(outputs)
        if len(refs) != len(tensors):
            given = f"'{name}' returns {len(tensors)} tensors, and {len(refs)} in the trial"
            fix = "let the block return the same with a cache as without; or generate without a pipeline"
            raise PlanError(given, fix=fix, location="model")
        for ref, tensor in zip(refs, tensors, strict=True):
            if ref.name not in self._values:
                for rank in self._plan.receivers(ref.name):
                    self._send(ref.name, tensor, rank)
                self._values[ref.name] = tensor
        return outputs

    def _foreign_value(self, owner: int, inputs: Any, leaf: Any) -> Any:
        """Returns what stands for `leaf` of the outputs of a block of the rank `owner`."""
        if type(leaf) is not ValueRef:
            return leaf
        if not leaf.name:
            return value_leaves(inputs)[leaf.input_index]
        if leaf.name not in self._values:  # else an earlier block has returned it too
            is_needed = self._group.index in self._plan.receivers(leaf.name)
            self._values[leaf.name] = self._recv(leaf.name, owner) if is_needed else self._absent(leaf.name)
        return self._values[leaf.name]

    def _absent(self, name: str) -> torch.Tensor:
        dtype, device = self._plan.graph.values[name].dtype, self._state.world.device
        number = nan if dtype.is_floating_point else 0
        return torch.full((), number, dtype=dtype, device=device).expand(self._shape(name))

    def _recv(self, name: str, owner: int) -> torch.Tensor:
        dtype, device = self._plan.graph.values[name].dtype, self._state.world.device
        tensor = torch.empty(self._shape(name), dtype=dtype, device=device)
        group, peer = p2p_group(self._state.world, ("pp",), owner, is_sender=False)
        group.recv(tensor, source=peer, action=f"{self._action}({name})").wait()
        return tensor

    def _send(self, name: str, tensor: torch.Tensor, rank: int) -> None:
        dtype, shape = self._plan.graph.values[name].dtype, self._shape(name)
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            given = f"{tensor.dtype} {list(tensor.shape)}"
            text = f"the block output '{name}' is {given}, and was {dtype} {list(shape)} in the trial"
            fix = "let the forward return the same shapes and dtypes as in the trial"
            raise PlanError(text, fix=fix, location="model")
        tensor = tensor.contiguous()
        group, peer = p2p_group(self._state.world, ("pp",), rank, is_sender=True)
        work = group.send(tensor, target=peer, action=f"{self._action}({name})")
        self._sends.append((work, tensor))

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._plan.shapes[name].size(self._num_samples, self._num_tokens)
