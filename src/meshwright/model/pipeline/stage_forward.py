"""One part of a model run by a call of the model's own forward, in which the blocks of all other parts are stubbed.

    part            visits    layers.4 layers.5          takes  layers.3          gives  layers.5
    the forward     embed --> layers.0 ... layers.3 --> layers.4 --> layers.5 --> (left here)
    runs            stub      stub         received     itself       itself

The forward runs from its beginning. A stub gives out `Foreign` tensors, which have a name and a shape and no numbers; glue that
computes with them gives more of them, as the course of the forward tells (model/course.py), and glue that does not (masks,
positions, rotary tables) computes as ever. Where a Foreign of this part's own time stands for a value that was received, that is
taken in its place. Behind the last visit the forward goes on until all values exist that later parts need, and is then left by an
exception; that of the last part runs to its end.

Gradients: a received value is a leaf, and so is a value that is given, with the edge where its gradient goes: in the visit that
made it, or in the closing visit where glue did. The order of a backward: what later parts sent is put into the leaves of `given`,
then the closing visit, then the visits in reverse; then `received` have theirs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily

from meshwright.model.blocks.driver import BeforeBlock, BlockCall, ForwardDriver, ForwardPass
from meshwright.model.hf.output_capture import capture_marks
from meshwright.model.pipeline.forward_graph import BlockCallStub, ForwardGraph, ValueRef
from meshwright.model.pipeline.replay_script import ReplayScript, ScriptCache, ScriptRecorder
from meshwright.model.pipeline.stage_values import CONTROL_FLOW_FIX, GlueShape, PlaceholderEnv
from meshwright.model.sequence_parallel.sharded_activation import SequenceShardedTensor
from meshwright.model.sequence_parallel.sharded_forward import ShardedForward
from meshwright.model.tensors.function_modes import InterceptMode, call_unchanged
from meshwright.model.tensors.grad_alias import GradAlias, aliased_leaf
from meshwright.model.tensors.pytree import tree_tensors, value_leaves
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_call_name, block_of
from meshwright.plan.model_spec.stage_boundaries import StageSpec

BlockCallCallback = Callable[[str], None]


@dataclass(frozen=True)
class StageResult:
    """What a run of a part left: the values `given` by name, the model's `outputs` where it is the last, and for a backward more.

    With gradients `received` are the leaves of the values that it took and that need one (`grad` None: nothing came of it),
    `closing` holds the glue behind the last visit and `passed` the visits. Where the drive does not cut, values have their graph.
    """

    sent_values: dict[str, torch.Tensor]
    outputs: Any
    received_values: dict[str, torch.Tensor]
    closing_call: BlockCall | None = None
    forward_pass: ForwardPass | None = None


class StageFinished(BaseException):
    """The forward is left: all that it was run for is there. No Exception, so that no model catches it."""


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
    """Run `part` of the model whose forward `call()` runs on so many `rows`; `received` are the values that it takes, by name.

    `reach` and `leave` hear of the part's own visits, as in `Drive.forward`; `skip` of those of earlier parts, in their order.
    With `scripts` the model's forward runs on the first of equal `inputs`, and its script on those that follow (model/script.py).
    Where ranks have slices of the width, `looks` says the shape of values that are not there, for glue that asks them for it.
    Where a rank has some of the tokens, `dealt` says what is done round blocks: values are taken and given by their own tokens.
    Without gradients switched on it is an evaluation, by the course of one. Raises PlanError where something that the part needs
    was not received, and where the forward takes another way than its course.
    """
    for value in stage.inputs:
        if value.name not in received_values:
            text = f"the part of '{stage.block_calls[0]}' takes the value '{value}', which was not received"
            raise PlanError(
                text, fix=f"hand it over from the part of '{value.producer}'", location="received"
            )
    grad = torch.is_grad_enabled()
    needed = {value.name for value in stage.inputs if value.needs_grad and grad}
    taken = {
        value.name: received_values[value.name].detach().requires_grad_(value.name in needed)
        for value in stage.inputs
    }
    payload = {name: driver.writable_leaf(leaf) if name in needed else leaf for name, leaf in taken.items()}
    for name in forward_graph.written_values.intersection(
        taken
    ):  # somebody writes into it: into a copy, and never into a leaf
        copy = taken[name].detach().clone()
        payload[name] = GradAlias.apply(taken[name], copy) if name in needed else copy
    received_values = {name: taken[name] for name in needed}
    if sharded_forward is not None:
        apart = ((each.name, each.sequence_dim) for each in stage.inputs if each.sequence_dim is not None)
        payload |= {
            name: sharded_forward.wrap_local(
                payload[name], along, forward_graph.shape(name, num_samples)[along]
            )
            for name, along in apart
        }
    seeds = (*(payload[value.name] for value in stage.inputs), *(inputs or {}).values())
    key = stage.block_calls[0], *(inputs or ()), *((seed.shape, seed.dtype) for seed in seeds)
    script = script_cache.find(key) if script_cache is not None and grad else None
    if script is not None:
        return _stage_result(
            driver,
            stage,
            received_values,
            *driver.forward(before_block, partial(_replay, driver, script, seeds), after_block),
        )
    writer = script_cache.start_recording(key, seeds) if script_cache is not None and grad else None
    standing = PlaceholderEnv(
        forward_graph,
        stage,
        num_samples,
        torch.device(device),
        payload,
        call_unchanged if writer is None else writer.run_glue,
        glue_shape,
    )
    under_way = _StageRun(driver, forward_graph, stage, standing, on_skipped_call, writer, sharded_forward)

    def whole() -> Any:
        outputs = under_way.run_forward(run_model)
        if script_cache is not None and writer is not None:
            script_cache.store(key, writer, outputs)
        return outputs

    with driver.use_interceptor(under_way.run_block):
        outputs, closing, passed = (
            driver.forward(before_block, whole, after_block) if grad else (whole(), None, None)
        )
    under_way.finish()
    return _stage_result(driver, stage, received_values, outputs, closing, passed)


def _stage_result(
    drive: ForwardDriver,
    part: StageSpec,
    received: dict[str, torch.Tensor],
    outputs: Any,
    closing: BlockCall | None,
    passed: ForwardPass | None,
) -> StageResult:
    if part.is_last:
        return StageResult({}, outputs, received, closing, passed)
    given = {name: aliased_leaf(tensor) for name, tensor in outputs.items()} if drive.cut_graph else outputs
    return StageResult(given, None, received, closing, passed)


def _replay(drive: ForwardDriver, script: ReplayScript, seeds: Sequence[torch.Tensor]) -> Any:
    for name in script.skipped_blocks:
        drive.skip_call(name)
    return script.replay(seeds)


class _StageRun:
    """A run of a part that is under way."""

    def __init__(
        self,
        drive: ForwardDriver,
        course: ForwardGraph,
        part: StageSpec,
        standing: PlaceholderEnv,
        skip: BlockCallCallback | None,
        writer: ScriptRecorder | None,
        dealt: ShardedForward | None,
    ) -> None:
        self._driver, self._forward_graph, self._stage, self._placeholders, self._on_skipped_call = (
            drive,
            course,
            part,
            standing,
            skip,
        )
        self._recorder, self._sharded_forward = writer, dealt
        self._call_index = course.boundaries.index
        self._first, self._last = (
            self._call_index[part.block_calls[0]],
            self._call_index[part.block_calls[-1]],
        )
        self._missing = {value.name for value in part.outputs}
        self._sent_values: dict[str, torch.Tensor] = {}
        self._tracks_values = any(
            value.op for value in part.outputs
        )  # glue makes some of what is to be given
        self._live_tensors: dict[int, torch.Tensor] = {}  # tensors that are values, while counting
        self._tensors_by_name: dict[str, torch.Tensor] = {}
        self._calls: dict[str, int] = {}
        self._grad_enabled = torch.is_grad_enabled()
        self._current, self._finished = -1, False
        before = course.boundaries.block_calls[: self._first]
        follows = writer is not None or self._tracks_values or any(course.ops[visit] for visit in before)
        self._mode = InterceptMode(self.run_glue) if follows else None

    def run_forward(self, call: Callable[[], Any]) -> Any:
        """The outputs of the forward, or, where it is left, the values that the part gives, by name."""
        try:
            with nullcontext() if self._mode is None else self._mode:
                outputs = call()
        except StageFinished:
            return self._sent_values
        if not self._stage.is_last:
            return self._sent_values  # somebody has caught what left it
        outputs = self._placeholders.replace_received(outputs)
        return outputs if self._sharded_forward is None else self._sharded_forward.local_outputs(outputs)

    def finish(self) -> None:
        """The forward has ended. Raises PlanError when values are missing that the part was to give."""
        self._placeholders.finish()
        self._live_tensors.clear()
        self._tensors_by_name.clear()
        self._mode = (
            None  # it knows this run: together they would keep tensors until the garbage is collected
        )
        if self._missing:
            text = f"the forward did not make the values {', '.join(sorted(self._missing))}, which it made in the trial run"
            raise PlanError(text, fix=CONTROL_FLOW_FIX, location="model")

    def run_block(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A block is called: the drive's guide."""
        if torch.is_grad_enabled() != self._grad_enabled:
            return run(*args, **kwargs)
        if self._finished:  # and somebody has caught it
            raise StageFinished
        count = self._calls[name] = self._calls.get(name, 0) + 1
        visit = block_call_name(name, count)
        at = self._call_index.get(visit, -1)
        if at != self._current + 1:
            behind = (
                f"behind '{self._forward_graph.boundaries.block_calls[self._current]}'"
                if self._current >= 0
                else "first"
            )
            text = f"the forward calls '{visit}' {behind}, which it did not in the trial run"
            raise PlanError(text, fix=CONTROL_FLOW_FIX, location="model")
        if at > self._last:
            raise StageFinished
        self._current = at
        self._placeholders.begin_block_call(visit, stage_begun=at >= self._first)
        if at >= self._first:
            return self._run_own_block(visit, run, (args, kwargs))
        if self._on_skipped_call is not None:
            self._on_skipped_call(visit)
        self._driver.skip_call(name)
        if self._recorder is not None:
            self._recorder.skip_block(name)
        return self._fill_stub(self._forward_graph.stubs[visit], (args, kwargs))

    def _fill_stub(self, stub: BlockCallStub, given: Any) -> Any:
        """What stands for the outputs of a visit of another part, and for what it captures."""
        if stub.captured:
            lists = {mark.channel: mark.captured for mark in capture_marks()}
            for channel, added in stub.captured:
                lists[channel].extend(self._placeholders.fill_template(added, given))
        return self._placeholders.fill_template(stub.outputs, given)

    def _run_own_block(self, visit: str, run: Callable[..., Any], given: Any) -> Any:
        """A visit of this part runs itself, on what was received for each Foreign that it is given."""
        given, dealt, capturing = (
            self._placeholders.replace_all_foreign(given, f"the block '{visit}' takes in"),
            self._sharded_forward,
            capture_marks(),
        )
        if self._recorder is not None:
            name, captured = (
                block_of(visit),
                lambda: [each for mark in capturing for each in mark.added_tensors],
            )
            run = partial(self._recorder.run_block, name, run, captured, self._model_modes())
        with self._pause_glue():
            args, kwargs = given if dealt is None else dealt.enter_block(visit, given)
            outputs = run(*args, **kwargs)
            outputs = outputs if dealt is None else dealt.leave_block(outputs)
        self._note_values(
            self._forward_graph.stubs[visit].value_refs,
            tree_tensors([outputs, *(mark.added_tensors for mark in capturing)]),
        )
        return outputs

    def run_glue(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Glue calls `func`: where that is the next operation of the course, its values are noted."""
        standing, given = self._placeholders, (args, kwargs)
        if self._current < self._first:
            return (
                standing.compute(func, args, kwargs)
                if standing.foreign_values(given)
                else standing.call_func(func, args, kwargs)
            )
        op = standing.match_op(func) if self._tracks_values else None
        counts = op is not None and any(id(each) in self._live_tensors for each in tree_tensors(given))
        if standing.foreign_values(given):
            counts = op is not None
            outcome = standing.compute(func, args, kwargs)
        else:
            outcome = standing.call_func(func, args, kwargs)
        if op is None or not counts:
            return outcome
        standing.advance_op()
        for old, new in op.renamed_values:
            tensor = (
                self._tensors_by_name.pop(old)
                if old in self._tensors_by_name
                else standing.received_values[old]
            )
            standing.rename_value(old, new)
            self._note_value(new, tensor)
        for number, name in op.written_inputs:
            self._note_value(name, value_leaves(given)[number])
        self._note_values(op.value_refs, tree_tensors(outcome))
        return outcome

    def _note_values(self, places: Sequence[ValueRef], made: Sequence[torch.Tensor]) -> None:
        """Note the values among what was made, and leave the forward when nothing is missing any more."""
        for place, tensor in zip(places, made, strict=False):
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
        """The modes that the model has entered."""
        stack = _get_current_function_mode_stack()
        return tuple(stack[stack.index(self._mode) + 1 :]) if self._mode in stack else ()

    @contextmanager
    def _pause_glue(self) -> Iterator[None]:
        """Within a block, glue is not followed."""
        stack = _get_current_function_mode_stack() if self._mode is not None else []
        if stack and stack[-1] is self._mode:
            with _pop_mode_temporarily():
                yield
        elif self._mode is not None:  # the model has entered a mode of its own
            self._mode.paused = True
            try:
                yield
            finally:
                self._mode.paused = False
        else:
            yield
