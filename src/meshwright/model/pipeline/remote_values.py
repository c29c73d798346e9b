"""Holds the values of other stages during one stage's forward: placeholder tensors, and received values for
some of them.

Glue computes y = x * 8, and another stage makes x:

    before the stage begins   x is a placeholder, and y becomes one, as in the forward graph; only views of
                              received values are computed, which every stage makes itself
    afterwards                y is computed from the received x; without one, the error names x
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from meshwright.model.blocks.user_checkpointing import USER_CHECKPOINT_FIX
from meshwright.model.pipeline.forward_graph import ForwardGraph, GlueOp, ValueRef
from meshwright.model.recording.op_table import find_op
from meshwright.model.tensors.call_description import (
    CHECKPOINT_MODULE,
    caller_line,
    function_title,
    in_user_checkpoint,
)
from meshwright.model.tensors.placeholder import (
    PlaceholderTensor,
    call_without_override,
    find_placeholders,
    make_placeholder,
)
from meshwright.model.tensors.pytree import map_leaves, replace_tensors, tree_tensors, value_leaves
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.stage_transfers import StageSpec

# full shape -> shape that glue sees
GlueShape = Callable[[tuple[int, ...]], tuple[int, ...]]
CONTROL_FLOW_FIX = (
    "let every forward run the operations of the trial, whatever the data; "
    "or do not split the model into stages"
)


class PlaceholderEnv:
    """The values of other stages in one run of `stage`; `received_values` holds those that were received, by
    name.

    Glue that can be computed runs as `call_func(func, args, kwargs)`; it sees placeholders in the shape that
    `glue_shape` gives.
    """

    def __init__(
        self,
        forward_graph: ForwardGraph,
        stage: StageSpec,
        num_samples: int,
        device: torch.device,
        received_values: dict[str, torch.Tensor],
        call_func: Callable[[Any, Any, Any], Any],
        glue_shape: GlueShape,
    ) -> None:
        self.received_values, self.call_func, self._glue_shape = received_values, call_func, glue_shape
        self._forward_graph, self._stage, self._num_samples, self._device = (
            forward_graph,
            stage,
            num_samples,
            device,
        )
        self._tensors: dict[str, torch.Tensor] = {}  # name -> tensor that the model holds
        # ids of shared tensors written by another stage -> value name
        self._written_tensors: dict[int, str] = {}
        self._stage_begun = False
        self._block_call = ""
        self._ops: Sequence[GlueOp] = ()
        self._op_index = 0

    def begin_block_call(self, block_call: str, *, stage_begun: bool) -> None:
        """Notes that the forward reaches `block_call`; `stage_begun` is false for calls of earlier stages."""
        self._block_call, self._stage_begun = block_call, stage_begun
        self._ops, self._op_index = self._forward_graph.ops[block_call], 0

    def finish(self) -> None:
        """Releases everything at the end of the forward."""
        self._block_call = ""
        self.received_values.clear()
        self._tensors.clear()
        self._written_tensors.clear()

    def match_op(self, func: Any) -> GlueOp | None:
        """Returns the next operation of the graph after this block call if `func` is that operation."""
        names = self._op_index < len(self._ops) and self._ops[self._op_index].func_name == function_title(
            func
        )
        return self._ops[self._op_index] if names else None

    def advance_op(self) -> None:
        """Moves on to the next operation of the graph."""
        self._op_index += 1

    def fill_template(self, template: Any, given: Any) -> Any:
        """Returns what a skipped block call or operation with these inputs would have returned."""
        return (
            self._fill_leaf(given, template)
            if type(template) is ValueRef
            else map_leaves(template, partial(self._fill_leaf, given))
        )

    def _fill_leaf(self, inputs: Any, leaf: Any) -> Any:
        if type(leaf) is not ValueRef:
            return leaf
        if not leaf.name:
            return value_leaves(inputs)[leaf.input_index]
        if leaf.name not in self._tensors:
            value, shape = (
                self._forward_graph.values[leaf.name],
                self._glue_shape(self._forward_graph.shape(leaf.name, self._num_samples)),
            )
            needed = value.needs_grad and torch.is_grad_enabled()
            self._tensors[leaf.name] = make_placeholder(
                leaf.name, self, shape, value.dtype, self._device, needs_grad=needed
            )
        return self._tensors[leaf.name]

    def foreign_values(self, value: Any) -> dict[int, str]:
        """Returns the names of values of other stages among the tensors in `value`, by id."""
        names: dict[int, str] = {}
        for each in tree_tensors(value):
            if type(each) is PlaceholderTensor:
                names[id(each)] = each.value_name
            elif self._written_tensors and id(each) in self._written_tensors:
                names[id(each)] = self._written_tensors[id(each)]
        return names

    def replace_all_foreign(self, given: Any, consumer: str) -> Any:
        """Returns `given` with received values in place of values of other stages.

        Raises PlanError if one was not received, or if the model itself recomputes the block that takes it
        in backward: that run would receive the value again.
        """
        names = self.foreign_values(given)
        if names and in_user_checkpoint():
            name = min(names.values())
            text = (
                f"{consumer} '{name}', which comes from another stage, and runs again in "
                f"backward ({CHECKPOINT_MODULE})"
            )
            raise PlanError(text, fix=USER_CHECKPOINT_FIX, location="model")
        for name in names.values():
            if name not in self.received_values:
                raise self._not_received_error(name, consumer)
        return self._replace(given, names)

    def replace_received(self, value: Any) -> Any:
        """Returns `value` with received values in place of values of other stages, as far as they were
        received.
        """
        return self._replace(
            value,
            {key: name for key, name in self.foreign_values(value).items() if name in self.received_values},
        )

    def _replace(self, value: Any, names: Mapping[int, str]) -> Any:
        return (
            replace_tensors(value, {key: self.received_values[name] for key, name in names.items()})
            if names
            else value
        )

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of `func` on arguments that contain a value of another stage."""
        entry = find_op(func.__name__)
        if entry.shape_operand == 2 and isinstance(args[1], PlaceholderTensor):
            args = (args[0], self._shape_only_tensor(args[1]))
        names = self.foreign_values((args, kwargs))
        if not names:
            return self.call_func(func, args, kwargs)
        all_received = all(name in self.received_values for name in names.values())
        op = None if self._stage_begun else self.match_op(func)
        if op is not None:
            return self._emulate_op(op, func, (args, kwargs), all_received=all_received)
        if all_received and (self._stage_begun or entry.kind == "read"):
            args, kwargs = self.replace_received((args, kwargs))
            return self.call_func(func, args, kwargs)
        if entry.shape_operand == 1:
            args, kwargs = replace_tensors(
                (args, kwargs),
                {id(each): self._shape_only_tensor(each) for each in find_placeholders((args, kwargs))},
            )
            return self.call_func(func, args, kwargs)
        if entry.kind == "read":
            raise self.missing_value_error(function_title(func), min(names.values()))
        outcome = call_without_override(func, args, kwargs)
        if self._written_tensors and tree_tensors(outcome):  # a placeholder raises this itself
            raise self.missing_value_error(function_title(func), min(names.values()))
        return outcome

    def _shape_only_tensor(self, like: PlaceholderTensor) -> torch.Tensor:
        """A tensor of that shape on the memory of one element, for functions that only read the shape."""
        return torch.empty((), dtype=like.dtype, device=self._device).expand(like.shape)

    def _emulate_op(self, op: GlueOp, func: Any, inputs: Any, *, all_received: bool) -> Any:
        """Returns what `op` of another stage returns; a view of a received value is made from that value."""
        self.advance_op()
        for old, new in op.renamed_values:
            self.rename_value(old, new)
        for number, name in op.written_inputs:
            self._tensors[name] = value_leaves(inputs)[number]
            self._written_tensors[id(self._tensors[name])] = name
        outcome = self.fill_template(op.result, inputs)
        if all_received and any(
            place.name and self._forward_graph.base_of(place.name) for place in op.value_refs
        ):
            args, kwargs = self.replace_received(inputs)
            tensors = tree_tensors(self.call_func(func, args, kwargs))
            self.received_values |= {
                place.name: tensor for place, tensor in zip(op.value_refs, tensors, strict=True)
            }
        return outcome

    def rename_value(self, old: str, new: str) -> None:
        """Renames the value `old` to `new` after a write in place."""
        if old in self._tensors:
            tensor = self._tensors[new] = self._tensors.pop(old)
            if isinstance(tensor, PlaceholderTensor):
                tensor.value_name = new
            else:
                self._written_tensors[id(tensor)] = new
            if self._stage_begun and old in self.received_values:
                self.received_values[new] = self.received_values[old]

    def missing_value_error(self, computation: str, name: str) -> Exception:
        """Returns the error for a computation that needs the data of the value `name`."""
        if not self._block_call:
            return self._not_received_error(
                name, f"after the forward, {computation} (at {caller_line()}) takes"
            )
        glue = f"the glue after '{self._block_call}' computes {computation} (at {caller_line()}) with"
        if self._stage_begun:
            return self._not_received_error(name, glue)
        text = f"{glue} '{name}', which it did not use in the trial"
        return PlanError(text, fix=CONTROL_FLOW_FIX, location="model")

    def _not_received_error(self, name: str, who: str) -> PlanError:
        value, first = self._forward_graph.values[name], self._stage.block_calls[0]
        title = f"'{name}'" + (f" ({value.op} at {value.source_line})" if value.op else "")
        text = (
            f"{who} the value {title}, made after '{value.producer}', which the stage that "
            f"begins with '{first}' did not receive"
        )
        fix = f"send it from the stage of '{value.producer}', or begin the stage with '{value.producer}'"
        return PlanError(text, fix=fix, location="received")
