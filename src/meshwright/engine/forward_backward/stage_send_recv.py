"""Sends and receives between pipeline stages: values forward, their gradients back.

    RECV x ---> [ a stage of the model ] ---> SEND y     x: a leaf where the stage begins, y: where it ends
    SEND_GRAD dx <--- [ its backwards ] <--- RECV_GRAD dydx: x's gradient after the last backward

A value that is received, used, and sent on collects its gradient here too: the gradients from later stages
are added to this stage's own. Stages on the same rank pass their leaves to each other. Where ranks have
slices of a value, each sends its own; where they have the same value and send a slice each, CONCAT joins the
received slices: RECV slice ---> CONCAT ---> x.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import torch

from meshwright.comm.collectives.group import Work
from meshwright.engine.forward_backward.observed_codes import observe_stage_value
from meshwright.engine.runtime.async_copies import FinishedOnWait
from meshwright.engine.runtime.comm_groups import p2p_group
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.analysis.forward_graph_trace import ForwardGraphCache
from meshwright.model.blocks.block_forward_backward import BeforeBlock, backward, run_backward
from meshwright.model.pipeline.forward_graph import ForwardGraph
from meshwright.model.pipeline.microbatch_replay import ScriptCache
from meshwright.model.pipeline.stage_forward import StageResult, run_stage
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.stage_transfers import StageSpec, StageValue
from meshwright.plan.sharding.stage_value_shards import DimSizes, StageValueShards
from meshwright.plan.step.program import Action, Transfer
from meshwright.plan.strategy_interface import ActivationCodec, Handler

MAX_CACHED_SHAPES = 4096  # of stage values; samples of more lengths than that compute some again


@dataclass
class _MicrobatchValues:
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    stage_runs: dict[str, StageResult] = field(default_factory=dict)  # by the first block call of the stage
    gradients: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    slices: dict[str, torch.Tensor] = field(default_factory=dict)  # by the subject of CONCAT
    sends: dict[str, list[Work]] = field(default_factory=dict)  # forward
    forward_graph: ForwardGraph | None = None

    def pop_gradient(self, name: str) -> torch.Tensor:
        """Returns the sum of the gradients that have arrived for a value, and drops them."""
        first, *rest = self.gradients.pop(name)
        return sum(rest, start=first)


def make_stage_io(state: RankState) -> "StageIO | None":
    """Returns the sends and receives of this rank's stages; None where it runs the whole model."""
    plan = state.plan
    if not plan.sharding.block_calls_by_pp_rank:
        return None
    stages, forward_graphs = plan.sharding.stages, state.trained_module.forward_graphs
    if not stages or forward_graphs is None:
        raise RuntimeError("a plan has stages, and the boundaries between them are not recorded")
    return StageIO(state, stages, forward_graphs)


class StageIO:
    """The stage values of the microbatches that are in flight on this rank."""

    def __init__(
        self, state: RankState, stages: tuple[StageSpec, ...], forward_graphs: ForwardGraphCache
    ) -> None:
        plan = state.plan
        self._state, self._forward_graphs, self._sharding = state, forward_graphs, plan.sharding
        local_block_calls = set(plan.view.model_spec.block_calls)
        local_slice = [stage for stage in stages if stage.block_calls[0] in local_block_calls]
        self._stages_by_first = {stage.block_calls[0]: stage for stage in local_slice}
        self._stages_by_last = {stage.block_calls[-1]: stage for stage in local_slice}
        self._values = {stage_value.name: stage_value for stage in stages for stage_value in stage.outputs}
        self._value_shards, self._compute_dtype = (
            StageValueShards(plan.view, self._values.values()),
            getattr(torch, plan.job.precision.compute),
        )
        self.handlers: dict[str, Handler] = dict.fromkeys(
            ("SEND", "RECV", "CONCAT", "SEND_GRAD", "RECV_GRAD", "CONCAT_GRAD"), self.start_send_recv
        )
        self._cached_shapes: dict[tuple[str, DimSizes, int], tuple[int, ...]] = {}
        self._by_microbatch: defaultdict[int, _MicrobatchValues] = defaultdict(_MicrobatchValues)
        self._scripts = ScriptCache(state.trained_module.module, state.trained_module.blocks)

    @property
    def first_block_calls(self) -> frozenset[str]:
        """The block calls with which the stages of this rank begin."""
        return frozenset(self._stages_by_first)

    def clear(self) -> None:
        """Drops all values, when a step has ended or failed."""
        self._by_microbatch.clear()
        self._scripts.clear()

    def forward(
        self,
        first_block_call: str,
        microbatch: int,
        inputs: Mapping[str, torch.Tensor],
        before_block: BeforeBlock,
        after_block: Callable[[], None] | None,
        skip_block: Callable[[str], None] | None,
    ) -> None:
        """Runs the stage that begins with `first_block_call`, and stores its pass and outputs in the state.

        `before_block` and `after_block` are called for its own block calls, `skip_block` for those before
        them.
        """
        stage, in_flight = self._stages_by_first[first_block_call], self._by_microbatch[microbatch]
        forward_graph, num_samples = self._forward_graph(microbatch), next(iter(inputs.values())).shape[0]
        given = {stage_value.name: in_flight.values[stage_value.name] for stage_value in stage.inputs}
        device, sharded_forward = self._state.world.device, self._state.sequence_runner.sharded_forward()
        call = partial(self._state.trained_module.module, **inputs)
        # what draws numbers draws them where the model's forward stands; and what stands for all tokens is
        # made anew in each
        scripts = self._scripts if skip_block is None and sharded_forward is None else None
        options = {
            "script_cache": scripts,
            "inputs": inputs,
            "glue_shape": self._value_shards.glue_shape,
            "sharded_forward": sharded_forward,
        }
        stage_run = run_stage(
            call,
            self._state.driver,
            forward_graph,
            stage,
            num_samples,
            given,
            device,
            before_block=before_block,
            after_block=after_block,
            on_skipped_call=skip_block,
            **options,
        )
        if stage_run.closing_call is None or stage_run.forward_pass is None:
            raise RuntimeError("a stage ran without gradients in a step")
        in_flight.stage_runs[first_block_call] = stage_run
        # for other stages of this rank
        in_flight.values |= {name: leaf.detach() for name, leaf in stage_run.sent_values.items()}
        forward_pass = self._state.step.forward_passes.setdefault(microbatch, stage_run.forward_pass)
        if forward_pass is not stage_run.forward_pass:
            forward_pass.block_calls |= stage_run.forward_pass.block_calls
        if stage.is_last:
            self._state.step.final_glue[microbatch] = stage_run.outputs, stage_run.closing_call

    def is_stage_boundary(self, block_call: str) -> bool:
        """Returns whether a stage begins or ends with `block_call`: its backward sends or receives."""
        return block_call in self._stages_by_first or block_call in self._stages_by_last

    def begin_backward(self, last_block_call: str, microbatch: int) -> None:
        """Passes received gradients to the values of the stage that ends with `last_block_call`."""
        stage = self._stages_by_last.get(last_block_call)
        if stage is None:
            return
        in_flight = self._by_microbatch[microbatch]
        stage_run = in_flight.stage_runs[stage.block_calls[0]]
        # a rank that has sent all these gradients has received the value
        for name in stage_run.sent_values.keys() & in_flight.gradients.keys():
            for work in in_flight.sends.pop(name, ()):
                work.wait()  # returns at once and frees the value
        inner_grads = {}  # values inside the stage's graph share one backward
        for name, leaf in (stage_run.sent_values | stage_run.received_values).items():
            if name in in_flight.gradients and leaf.is_leaf:
                leaf.grad = in_flight.pop_gradient(name)
            elif name in in_flight.gradients:
                inner_grads[leaf] = in_flight.pop_gradient(name)
        if inner_grads:
            run_backward(tuple(inner_grads), tuple(inner_grads.values()), False, False, (), True, True)
        if not stage.is_last and stage_run.closing_call is not None:
            backward(stage_run.closing_call)

    def end_backward(self, first_block_call: str, microbatch: int) -> None:
        """Collects the gradients of what the stage that begins with `first_block_call` has received."""
        stage = self._stages_by_first.get(first_block_call)
        if stage is None:
            return
        in_flight = self._by_microbatch[microbatch]
        for name, leaf in in_flight.stage_runs.pop(first_block_call).received_values.items():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            in_flight.gradients.setdefault(name, []).append(gradient)
        # no other stage of this rank needs them any more
        for stage_value in (
            *stage.inputs,
            *stage.outputs,
        ):
            in_flight.values.pop(stage_value.name, None)

    def start_send_recv(self, action: Action) -> None:
        """Starts sending, receiving or concatenating the value of `action`, or its gradient."""
        (name,), microbatch, transfer = action.tensors, action.microbatch or 0, action.transfer
        if transfer is None:
            raise RuntimeError(f"{action.name} has no transfer")
        in_flight, stage_value = self._by_microbatch[microbatch], self._values[name]
        match action.kind:
            case "SEND":
                self._send(action, transfer, in_flight.values[name], stage_value, microbatch)
            case "SEND_GRAD":
                self._send(action, transfer, in_flight.pop_gradient(name), stage_value, microbatch)
            case "RECV" | "RECV_GRAD" if transfer.replica_axes:
                in_flight.slices[action.subject] = self._receive(
                    action, transfer, self._empty_slice(stage_value, microbatch, transfer.replica_axes)
                )
            case "RECV":
                in_flight.values[name] = self._receive(action, transfer, self._empty(stage_value, microbatch))
            case "RECV_GRAD":
                in_flight.gradients.setdefault(name, []).append(
                    self._receive(action, transfer, self._empty(stage_value, microbatch))
                )
            case "CONCAT":
                in_flight.values[name] = self._concat(
                    action, transfer, in_flight.slices.pop(action.subject), stage_value, microbatch
                )
            case "CONCAT_GRAD":
                full_value = self._concat(
                    action, transfer, in_flight.slices.pop(action.subject), stage_value, microbatch
                )
                in_flight.gradients.setdefault(name, []).append(full_value)
            case other:
                raise RuntimeError(f"{action.name}: a {other} between stages is unknown")

    def _send(
        self,
        action: Action,
        transfer: Transfer,
        tensor: torch.Tensor,
        stage_value: StageValue,
        microbatch: int,
    ) -> None:
        shape, dtype = self._shape(stage_value, microbatch), getattr(torch, stage_value.dtype)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            actual = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            text = (
                f"{action.name} is to send {stage_value.dtype} {list(shape)}, and the value "
                f"'{stage_value}' is {actual} here"
            )
            fix = (
                "let the forward return the same shapes and dtypes as in the trial; or choose split points "
                "that it does not cross"
            )
            raise PlanError(text, fix=fix, location="model")
        tensor = tensor.detach().contiguous()
        if transfer.replica_axes:
            index, value_slice = (
                self._state.world.group(transfer.replica_axes).index,
                self._empty_slice(stage_value, microbatch, transfer.replica_axes),
            )
            local_slice = tensor.view(-1)[index * len(value_slice) : (index + 1) * len(value_slice)]
            if len(local_slice) < len(value_slice):
                value_slice.zero_()[: len(local_slice)].copy_(local_slice)
                local_slice = value_slice
            tensor = local_slice
        codec = self._codec(transfer)
        if transfer.peer is not None:
            group, peer = p2p_group(self._state.world, transfer.axes, transfer.peer, is_sender=True)
            message = tensor if codec is None else codec.encode(tensor)
            if codec is not None and self._state.observed_codes is not None:
                dims = self._forward_graph(microbatch).dim_sizes[stage_value.name]
                value = replace(stage_value, dim_sizes=dims)
                observe_stage_value(self._state, self._value_shards, action, value, tensor, message)
            work = group.send(message, target=peer, action=action.name)
            if action.kind == "SEND_GRAD" or codec is not None:  # then nobody waits for its tensor
                self._state.issue_send(action, work)
            else:
                self._state.issue(action, work)
                self._by_microbatch[microbatch].sends.setdefault(stage_value.name, []).append(work)

    def _receive(self, action: Action, transfer: Transfer, tensor: torch.Tensor) -> torch.Tensor:
        codec = self._codec(transfer)
        if transfer.peer is not None:
            group, peer = p2p_group(self._state.world, transfer.axes, transfer.peer, is_sender=False)
            message = tensor if codec is None else codec.empty_codes(tensor)
            work = group.recv(message, source=peer, action=action.name)
            if codec is not None:
                work = FinishedOnWait(work, partial(codec.decode, message, tensor))
            self._state.issue(action, work)
        return tensor

    def _codec(self, transfer: Transfer) -> ActivationCodec | None:
        """Returns the codec of the messages of `transfer` in this step; None: it is sent as it is."""
        is_coded = transfer.carried_by and self._state.step.number >= transfer.carried_from
        return self._state.activation_codecs[transfer.axes[0]] if is_coded else None

    def _concat(
        self,
        action: Action,
        transfer: Transfer,
        value_slice: torch.Tensor,
        stage_value: StageValue,
        microbatch: int,
    ) -> torch.Tensor:
        group, shape = self._state.world.group(transfer.axes), self._shape(stage_value, microbatch)
        gathered = value_slice.new_empty(group.size * len(value_slice))
        self._state.issue(action, group.all_gather(gathered, value_slice, action=action.name))
        return gathered[: prod(shape)].view(shape)

    def _forward_graph(self, microbatch: int) -> ForwardGraph:
        """Returns the recorded forward for this microbatch, whose lengths may differ from the example's."""
        in_flight = self._by_microbatch[microbatch]
        if in_flight.forward_graph is None:
            state = self._state
            inputs = state.loss.model_inputs(state.step.microbatches[microbatch])
            # passed explicitly: receives are posted before any forward casts
            in_flight.forward_graph = self._forward_graphs.get(
                inputs, self._compute_dtype, sequence_sharded=self._sharding.sequence_sharding is not None
            )
            missing = sorted(self._values.keys() - in_flight.forward_graph.dim_sizes.keys())
            if missing:
                shapes = ", ".join(f"{key} {list(tensor.shape[1:])}" for key, tensor in inputs.items())
                text = (
                    f"on samples of {shapes} the forward does not compute '{missing[0]}', which is sent "
                    "between stages"
                )
                raise PlanError(
                    text,
                    fix="make the plan from such samples, or let every forward take the same path",
                    location="model",
                )
        return in_flight.forward_graph

    def _shape(self, stage_value: StageValue, microbatch: int) -> tuple[int, ...]:
        num_samples, dims = (
            next(iter(self._state.step.microbatches[microbatch].values())).shape[0],
            self._forward_graph(microbatch).dim_sizes[stage_value.name],
        )
        key = stage_value.name, dims, num_samples
        if key not in self._cached_shapes:
            if len(self._cached_shapes) >= MAX_CACHED_SHAPES:
                self._cached_shapes.clear()
            self._cached_shapes[key] = self._value_shards.local_shape(
                replace(stage_value, dim_sizes=dims), num_samples
            )
        return self._cached_shapes[key]

    def _empty(self, stage_value: StageValue, microbatch: int) -> torch.Tensor:
        dtype = getattr(torch, stage_value.dtype)
        return torch.empty(self._shape(stage_value, microbatch), dtype=dtype, device=self._state.world.device)

    def _empty_slice(
        self, stage_value: StageValue, microbatch: int, slice_axes: tuple[str, ...]
    ) -> torch.Tensor:
        numel = -(-prod(self._shape(stage_value, microbatch)) // self._sharding.mesh.group_size(slice_axes))
        return torch.empty(numel, dtype=getattr(torch, stage_value.dtype), device=self._state.world.device)
