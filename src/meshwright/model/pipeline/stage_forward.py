"""Runs one pipeline stage by calling the model's own forward, with the blocks of all other stages stubbed.

    stage           block calls  layers.4 layers.5          inputs  layers.3        outputs  layers.5
    the forward     embed --> layers.0 ... layers.3 --> layers.4 --> layers.5 --> (stopped here)
    runs            stub      stub         received     block        block

The forward starts at its beginning. A stub returns `PlaceholderTensor`s, which have a name and a shape but
no data; glue on them returns further placeholders, according to the forward graph, and glue without them
(masks, positions, rotary tables) runs normally. From the first block call of the stage on, a received value
takes the place of its placeholder. After the last block call the forward continues until all values for
later stages exist and is then stopped by an exception; the forward of the last stage runs to its end.

Gradients: a received value is a leaf, and so is a sent value, with the edge where its gradient flows: in the
block call that made it, or in the closing call if glue made it. Order of a backward: gradients from later
stages go into the leaves of `sent_values`, then the closing call runs backward, then the block calls in
reverse; afterwards `received_values` have their gradients.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily

from meshwright.model.blocks.block_forward_backward import BeforeBlock, BlockCall, ForwardDriver, ForwardPass
from meshwright.model.context_parallel.block_input_sharding import ShardedForward
from meshwright.model.context_parallel.sharded_activation import SequenceShardedTensor
from meshwright.model.hf.captured_outputs import capture_marks
from meshwright.model.pipeline.forward_graph import BlockCallStub, ForwardGraph, ValueRef
from meshwright.model.pipeline.microbatch_replay import ReplayScript, ScriptCache, ScriptRecorder
from meshwright.model.pipeline.remote_values import CONTROL_FLOW_FIX, GlueShape, PlaceholderEnv
from meshwright.model.tensors.function_modes import InterceptMode, call_unchanged
from meshwright.model.tensors.inplace_leaf_alias import GradAlias, aliased_leaf
from meshwright.model.tensors.pytree import tree_tensors, value_leaves
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_call_name, block_of
from meshwright.plan.model_spec.stage_transfers import StageSpec

BlockCallCallback = Callable[[str], None]


@dataclass(frozen=True)
class StageResult:
    """The result of one stage: `sent_values` by name, the model's `outputs` if it is the last stage, and
    state for backward.

    With gradients, `received_values` are the leaves of received values that need one (`grad` None: no
    gradient reached it), `closing_call` holds the glue after the last block call, and `forward_pass` the
    block calls. If the driver does not cut the graph, values keep their graph.
    """

    sent_values: dict[str, torch.Tensor]
    outputs: Any
    received_values: dict[str, torch.Tensor]
    closing_call: BlockCall | None = None
    forward_pass: ForwardPass | None = None


class StageFinished(BaseException):
    """Stops the forward once the stage has all its values. Not an Exception, so that no model catches it."""


def run_stage(
    run_model: Callable[[], Any],
    driver: ForwardDriver,
    forward_graph: ForwardGraph,
    stage: StageSpec,
    num_samples: int,
    received_values: Mapping[str, torch.Tensor],
    device: torch.device | str = "cpu",
    *,
    before_block: BeforeBlock,
    after_block: Callable[[], None] | None = None,
    on_skipped_call: BlockCallCallback | None = None,
    script_cache: ScriptCache | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    sharded_forward: ShardedForward | None = None,
    glue_shape: GlueShape = tuple,
) -> StageResult:
    """Runs `stage` of the model whose forward is `run_model()`, on `num_samples` samples; `received_values`
    are its inputs.

    `before_block` and `after_block` are called around the stage's own block calls, as in
    `ForwardDriver.forward`; `on_skipped_call` for each call of an earlier stage, in order. With
    `script_cache` the model's forward runs on the first of equal `inputs`, and its script for those that
    follow (microbatch_replay.py). If ranks hold slices of the hidden dim, `glue_shape` maps the full shape of
    a placeholder to the shape that glue sees. On a sequence shard, `sharded_forward` handles the inputs and
    outputs of blocks, and values are exchanged as local shards.

    With gradients off it runs an evaluation, with the graph of one. Raises PlanError if an input was not
    received, or if the forward deviates from its graph.
    """
    for value in stage.inputs:
        if value.name not in received_values:
            text = f"the stage of '{stage.block_calls[0]}' takes the value '{value}', which was not received"
            raise PlanError(text, fix=f"send it from the stage of '{value.producer}'", location="received")
    grad = torch.is_grad_enabled()
    needed = {value.name for value in stage.inputs if value.needs_grad and grad}
    leaves = {
        value.name: received_values[value.name].detach().requires_grad_(value.name in needed)
        for value in stage.inputs
    }
    payload = {name: driver.writable_leaf(leaf) if name in needed else leaf for name, leaf in leaves.items()}
    # the model writes in place: use a copy, never a leaf
    for name in forward_graph.written_values.intersection(leaves):
        copy = leaves[name].detach().clone()
        payload[name] = GradAlias.apply(leaves[name], copy) if name in needed else copy
    received_values = {name: leaves[name] for name in needed}
    for each in stage.inputs:
        if sharded_forward is not None and each.sequence_dim is not None:
            length = forward_graph.shape(each.name, num_samples)[each.sequence_dim]
            payload[each.name] = sharded_forward.wrap_local(payload[each.name], each.sequence_dim, length)
    seeds = (*(payload[value.name] for value in stage.inputs), *(inputs or {}).values())
    key = stage.block_calls[0], *(inputs or ()), *((seed.shape, seed.dtype) for seed in seeds)
    script = script_cache.find(key) if script_cache is not None and grad else None
    if script is not None:
        result = driver.forward(before_block, partial(_replay, driver, script, seeds), after_block)
        return _stage_result(driver, stage, received_values, *result)
    recorder = script_cache.start_recording(key, seeds) if script_cache is not None and grad else None
    placeholders = PlaceholderEnv(
        forward_graph,
        stage,
        num_samples,
        torch.device(device),
        payload,
        call_unchanged if recorder is None else recorder.run_glue,
        glue_shape,
    )
    stage_run = _StageRun(
        driver, forward_graph, stage, placeholders, on_skipped_call, recorder, sharded_forward
    )

    def run_and_record() -> Any:
        outputs = stage_run.run_forward(run_model)
        if script_cache is not None and recorder is not None:
            script_cache.store(key, recorder, outputs)
        return outputs

    with driver.use_interceptor(stage_run.run_block):
        if grad:
            result = driver.forward(before_block, run_and_record, after_block)
        else:
            result = run_and_record(), None, None
    stage_run.finish()
    return _stage_result(driver, stage, received_values, *result)


def _stage_result(
    driver: ForwardDriver,
    stage: StageSpec,
    received: dict[str, torch.Tensor],
    outputs: Any,
    closing_call: BlockCall | None,
    forward_pass: ForwardPass | None,
) -> StageResult:
    if stage.is_last:
        return StageResult({}, outputs, received, closing_call, forward_pass)
    inputs = {name: aliased_leaf(tensor) for name, tensor in outputs.items()} if driver.cut_graph else outputs
    return StageResult(inputs, None, received, closing_call, forward_pass)


def _replay(driver: ForwardDriver, script: ReplayScript, seeds: Sequence[torch.Tensor]) -> Any:
    for name in script.skipped_blocks:
        driver.skip_call(name)
    return script.replay(seeds)


class _StageRun:
    def __init__(
        self,
        driver: ForwardDriver,
        forward_graph: ForwardGraph,
        stage: StageSpec,
        placeholders: PlaceholderEnv,
        on_skipped_call: BlockCallCallback | None,
        recorder: ScriptRecorder | None,
        sharded_forward: ShardedForward | None,
    ) -> None:
        self._driver, self._forward_graph, self._stage = driver, forward_graph, stage
        self._placeholders, self._on_skipped_call = placeholders, on_skipped_call
        self._recorder, self._sharded_forward = recorder, sharded_forward
        self._call_index = forward_graph.boundaries.index
        self._first, self._last = (self._call_index[stage.block_calls[end]] for end in (0, -1))
        self._missing = {value.name for value in stage.outputs}
        self._sent_values: dict[str, torch.Tensor] = {}
        # glue makes some of the sent values
        self._tracks_values = any(value.op for value in stage.outputs)
        self._live_tensors: dict[int, torch.Tensor] = {}  # by id
        self._tensors_by_name: dict[str, torch.Tensor] = {}
        self._calls: dict[str, int] = {}
        self._grad_enabled = torch.is_grad_enabled()
        self._current, self._finished = -1, False
        earlier_calls = forward_graph.boundaries.block_calls[: self._first]
        follows_glue = (
            recorder is not None
            or self._tracks_values
            or any(forward_graph.ops[block_call] for block_call in earlier_calls)
        )
        self._mode = InterceptMode(self.run_glue) if follows_glue else None

    def run_forward(self, call: Callable[[], Any]) -> Any:
        """Returns the outputs of the forward or, if it was stopped, the values that the stage sends, by
        name.
        """
        try:
            with nullcontext() if self._mode is None else self._mode:
                outputs = call()
        except StageFinished:
            return self._sent_values
        if not self._stage.is_last:
            return self._sent_values  # the model caught StageFinished
        outputs = self._placeholders.replace_received(outputs)
        return outputs if self._sharded_forward is None else self._sharded_forward.local_outputs(outputs)

    def finish(self) -> None:
        """Ends the run. Raises PlanError if a value that the stage must send is missing."""
        self._placeholders.finish()
        self._live_tensors.clear()
        self._tensors_by_name.clear()
        self._mode = None  # breaks a reference cycle that would keep tensors until garbage collection
        if self._missing:
            text = (
                f"the forward did not make the values {', '.join(sorted(self._missing))}, which it made in "
                f"the trial"
            )
            raise PlanError(text, fix=CONTROL_FLOW_FIX, location="model")

    def run_block(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs, skips or stops at one block call; called by the driver."""
        if torch.is_grad_enabled() != self._grad_enabled:
            return run(*args, **kwargs)
        if self._finished:  # the model caught StageFinished
            raise StageFinished
        num_calls = self._calls[name] = self._calls.get(name, 0) + 1
        block_call = block_call_name(name, num_calls)
        index = self._call_index.get(block_call, -1)
        if index != self._current + 1:
            position = (
                f"after '{self._forward_graph.boundaries.block_calls[self._current]}'"
                if self._current >= 0
                else "first"
            )
            text = f"the forward calls '{block_call}' {position}, which it did not in the trial"
            raise PlanError(text, fix=CONTROL_FLOW_FIX, location="model")
        if index > self._last:
            raise StageFinished
        self._current = index
        self._placeholders.begin_block_call(block_call, stage_begun=index >= self._first)
        if index >= self._first:
            return self._run_own_block(block_call, run, (args, kwargs))
        if self._on_skipped_call is not None:
            self._on_skipped_call(block_call)
        self._driver.skip_call(name)
        if self._recorder is not None:
            self._recorder.skip_block(name)
        return self._fill_stub(self._forward_graph.stubs[block_call], (args, kwargs))

    def _fill_stub(self, stub: BlockCallStub, inputs: Any) -> Any:
        """Returns the placeholder outputs of a block call of another stage, and fills its side channels."""
        if stub.captured:
            lists = {mark.channel: mark.captured for mark in capture_marks()}
            for channel, added in stub.captured:
                lists[channel].extend(self._placeholders.fill_template(added, inputs))
        return self._placeholders.fill_template(stub.outputs, inputs)

    def _run_own_block(self, block_call: str, run: Callable[..., Any], inputs: Any) -> Any:
        inputs, sharded_forward, side_channels = (
            self._placeholders.replace_all_foreign(inputs, f"the block '{block_call}' takes"),
            self._sharded_forward,
            capture_marks(),
        )
        if self._recorder is not None:
            name, captured = (
                block_of(block_call),
                lambda: [each for mark in side_channels for each in mark.added_tensors],
            )
            run = partial(self._recorder.run_block, name, run, captured, self._model_modes())
        with self._pause_glue():
            args, kwargs = (
                inputs if sharded_forward is None else sharded_forward.enter_block(block_call, inputs)
            )
            outputs = run(*args, **kwargs)
            outputs = outputs if sharded_forward is None else sharded_forward.leave_block(outputs)
        self._note_values(
            self._forward_graph.stubs[block_call].value_refs,
            tree_tensors([outputs, *(mark.added_tensors for mark in side_channels)]),
        )
        return outputs

    def run_glue(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the glue function `func`; if it is the next operation of the graph, its values are noted."""
        placeholders, inputs = self._placeholders, (args, kwargs)
        if self._current < self._first:
            return (
                placeholders.compute(func, args, kwargs)
                if placeholders.foreign_values(inputs)
                else placeholders.call_func(func, args, kwargs)
            )
        op = placeholders.match_op(func) if self._tracks_values else None
        makes_values = op is not None and any(id(each) in self._live_tensors for each in tree_tensors(inputs))
        if placeholders.foreign_values(inputs):
            makes_values = op is not None
            outcome = placeholders.compute(func, args, kwargs)
        else:
            outcome = placeholders.call_func(func, args, kwargs)
        if op is None or not makes_values:
            return outcome
        placeholders.advance_op()
        for old, new in op.renamed_values:
            tensor = (
                self._tensors_by_name.pop(old)
                if old in self._tensors_by_name
                else placeholders.received_values[old]
            )
            placeholders.rename_value(old, new)
            self._note_value(new, tensor)
        for number, name in op.written_inputs:
            self._note_value(name, value_leaves(inputs)[number])
        self._note_values(op.value_refs, tree_tensors(outcome))
        return outcome

    def _note_values(self, places: Sequence[ValueRef], tensors: Sequence[torch.Tensor]) -> None:
        """Notes the values among `made`, and stops the forward when none is missing."""
        for place, tensor in zip(places, tensors, strict=False):
            if place.name:
                self._note_value(place.name, tensor)
        if self._current == self._last and not self._missing and not self._stage.is_last:
            self._finished = True
            raise StageFinished

    def _note_value(self, name: str, tensor: torch.Tensor) -> None:
        if self._tracks_values:
            self._live_tensors[id(tensor)] = self._tensors_by_name[name] = tensor
        if name in self._missing:
            self._missing.remove(name)
            self._sent_values[name] = tensor.local_tensor if type(tensor) is SequenceShardedTensor else tensor

    def _model_modes(self) -> tuple[TorchFunctionMode, ...]:
        """The function modes that the model has entered."""
        stack = _get_current_function_mode_stack()
        return tuple(stack[stack.index(self._mode) + 1 :]) if self._mode in stack else ()

    @contextmanager
    def _pause_glue(self) -> Iterator[None]:
        stack = _get_current_function_mode_stack() if self._mode is not None else []
        if stack and stack[-1] is self._mode:
            with _pop_mode_temporarily():
                yield
        elif self._mode is not None:  # the model has entered its own mode
            self._mode.paused = True
            try:
                yield
            finally:
                self._mode.paused = False
        else:
            yield
