"""What stands in a run of one part for the values of other parts: Foreign tensors, and what was received for some of them.

Say glue computes y = x * 8, where another part makes x:

    before the part begins    x is a Foreign, and y is another, as the course of the forward says: nothing is computed, but for
                              views of what was received, which everybody makes for himself
    afterwards                y is computed with what was received for x; where nothing was, a fault names x
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from meshwright.model.blocks.user_checkpointing import (
    CHECKPOINT_MODULE,
    USER_CHECKPOINT_FIX,
    in_user_checkpoint,
)
from meshwright.model.pipeline.forward_graph import ForwardGraph, GlueOp, ValueRef
from meshwright.model.tensors.function_modes import (
    SHAPE_FROM_SECOND_ARG,
    SHAPE_ONLY_FACTORIES,
    VALUE_READS,
    caller_line,
    function_title,
)
from meshwright.model.tensors.placeholder import (
    PlaceholderTensor,
    call_without_override,
    find_placeholders,
    make_placeholder,
)
from meshwright.model.tensors.pytree import map_leaves, replace_tensors, tree_tensors, value_leaves
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.stage_boundaries import StageSpec

GlueShape = Callable[
    [tuple[int, ...]], tuple[int, ...]
]  # of the shape that a value has in the whole model, that which glue sees
CONTROL_FLOW_FIX = (
    "let every forward take the way of the trial run, whatever the data are; or leave the model whole"
)


class PlaceholderEnv:
    """The values of other parts in a run of `part` on so many `rows`; `payload` holds what was received for them, by name.

    Glue that can be computed is, by `call(func, args, kwargs)`; it sees values of other parts in the shape that `looks` says.
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
        self._tensors: dict[str, torch.Tensor] = {}  # what the model holds for a value
        self._written_tensors: dict[
            int, str
        ] = {}  # tensors that every part makes, by id, into which another part wrote values: the name
        self._stage_begun = False
        self._block_call = ""
        self._ops: Sequence[GlueOp] = ()
        self._op_index = 0

    def begin_block_call(self, block_call: str, *, stage_begun: bool) -> None:
        """The forward reaches `visit`; the part has `begun`, or this belongs to an earlier one."""
        self._block_call, self._stage_begun = block_call, stage_begun
        self._ops, self._op_index = self._forward_graph.ops[block_call], 0

    def finish(self) -> None:
        """The forward has ended."""
        self._block_call = ""
        self.received_values.clear()
        self._tensors.clear()
        self._written_tensors.clear()

    def match_op(self, func: Any) -> GlueOp | None:
        """The next operation of the course behind this visit, where `func` is that."""
        found = self._op_index < len(self._ops) and self._ops[self._op_index].func_name == function_title(
            func
        )
        return self._ops[self._op_index] if found else None

    def advance_op(self) -> None:
        """That operation has been done."""
        self._op_index += 1

    def fill_template(self, template: Any, given: Any) -> Any:
        """What a visit or an operation, which was given `given`, would have given out."""
        return (
            self._fill_leaf(given, template)
            if type(template) is ValueRef
            else map_leaves(template, partial(self._fill_leaf, given))
        )

    def _fill_leaf(self, given: Any, leaf: Any) -> Any:
        if type(leaf) is not ValueRef:
            return leaf
        if not leaf.name:
            return value_leaves(given)[leaf.input_index]
        if leaf.name not in self._tensors:
            seen, shape = (
                self._forward_graph.values[leaf.name],
                self._glue_shape(self._forward_graph.shape(leaf.name, self._num_samples)),
            )
            needed = seen.needs_grad and torch.is_grad_enabled()
            self._tensors[leaf.name] = make_placeholder(
                leaf.name, self, shape, seen.dtype, self._device, needs_grad=needed
            )
        return self._tensors[leaf.name]

    def foreign_values(self, value: Any) -> dict[int, str]:
        """The values of other parts among the tensors in `value`: their names, by id."""
        found: dict[int, str] = {}
        for each in tree_tensors(value):
            if type(each) is PlaceholderTensor:
                found[id(each)] = each.value_name
            elif self._written_tensors and id(each) in self._written_tensors:
                found[id(each)] = self._written_tensors[id(each)]
        return found

    def replace_all_foreign(self, given: Any, consumer: str) -> Any:
        """`given` with what was received in place of values of other parts. Raises PlanError for one that was not.

        And where a block that takes one runs again in backward, by the model's own doing: that run would be given the value anew.
        """
        found = self.foreign_values(given)
        if found and in_user_checkpoint():
            name = min(found.values())
            text = f"{consumer} '{name}', which comes from another part, and runs again in backward ({CHECKPOINT_MODULE})"
            raise PlanError(text, fix=USER_CHECKPOINT_FIX, location="model")
        for name in found.values():
            if name not in self.received_values:
                raise self._not_received_error(name, consumer)
        return self._replace(given, found)

    def replace_received(self, value: Any) -> Any:
        """`value` with what was received in place of values of other parts, where something was."""
        return self._replace(
            value,
            {key: name for key, name in self.foreign_values(value).items() if name in self.received_values},
        )

    def _replace(self, value: Any, found: Mapping[int, str]) -> Any:
        return (
            replace_tensors(value, {key: self.received_values[name] for key, name in found.items()})
            if found
            else value
        )

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outcome of `func` on arguments among which there is a value of another part."""
        if func.__name__ in SHAPE_FROM_SECOND_ARG and isinstance(args[1], PlaceholderTensor):
            args = (args[0], self._shape_only_tensor(args[1]))
        found = self.foreign_values((args, kwargs))
        if not found:
            return self.call_func(func, args, kwargs)
        ready = all(name in self.received_values for name in found.values())
        op = None if self._stage_begun else self.match_op(func)
        if op is not None:
            return self._emulate_op(op, func, (args, kwargs), ready=ready)
        if ready and (self._stage_begun or func.__name__ in VALUE_READS):
            args, kwargs = self.replace_received((args, kwargs))
            return self.call_func(func, args, kwargs)
        if func.__name__ in SHAPE_ONLY_FACTORIES:
            args, kwargs = replace_tensors(
                (args, kwargs),
                {id(each): self._shape_only_tensor(each) for each in find_placeholders((args, kwargs))},
            )
            return self.call_func(func, args, kwargs)
        if func.__name__ in VALUE_READS:
            raise self.missing_value_error(function_title(func), min(found.values()))
        outcome = call_without_override(func, args, kwargs)
        if self._written_tensors and tree_tensors(outcome):  # a Foreign would have said so itself
            raise self.missing_value_error(function_title(func), min(found.values()))
        return outcome

    def _shape_only_tensor(self, like: PlaceholderTensor) -> torch.Tensor:
        """A tensor like that on memory of one element: for those who look at its shape."""
        return torch.empty((), dtype=like.dtype, device=self._device).expand(like.shape)

    def _emulate_op(self, op: GlueOp, func: Any, given: Any, *, ready: bool) -> Any:
        """What `op`, which belongs to another part, gives; a view of what was received is made of that."""
        self.advance_op()
        for old, new in op.renamed_values:
            self.rename_value(old, new)
        for number, name in op.written_inputs:
            self._tensors[name] = value_leaves(given)[number]
            self._written_tensors[id(self._tensors[name])] = name
        outcome = self.fill_template(op.result, given)
        if ready and any(place.name and self._forward_graph.base_of(place.name) for place in op.value_refs):
            args, kwargs = self.replace_received(given)
            made = tree_tensors(self.call_func(func, args, kwargs))
            self.received_values |= {
                place.name: tensor for place, tensor in zip(op.value_refs, made, strict=True)
            }
        return outcome

    def rename_value(self, old: str, new: str) -> None:
        """The tensor that was the value `old` is `new` from here on: somebody writes into it."""
        if old in self._tensors:
            bearer = self._tensors[new] = self._tensors.pop(old)
            if isinstance(bearer, PlaceholderTensor):
                bearer.value_name = new
            else:
                self._written_tensors[id(bearer)] = new
            if self._stage_begun and old in self.received_values:
                self.received_values[new] = self.received_values[old]

    def missing_value_error(self, computation: str, name: str) -> Exception:
        """The error for `what`, a computation that needs the numbers of the value `name`."""
        if not self._block_call:
            return self._not_received_error(
                name, f"behind the forward, {computation} (at {caller_line()}) takes"
            )
        glue = f"the glue behind '{self._block_call}' computes {computation} (at {caller_line()}) with"
        if self._stage_begun:
            return self._not_received_error(name, glue)
        text = f"{glue} '{name}', which it did not in the trial run"
        return PlanError(text, fix=CONTROL_FLOW_FIX, location="model")

    def _not_received_error(self, name: str, who: str) -> PlanError:
        seen, first = self._forward_graph.values[name], self._stage.block_calls[0]
        value = f"'{name}'" + (f" ({seen.op} at {seen.source_line})" if seen.op else "")
        text = f"{who} the value {value}, made behind '{seen.producer}', which the part that begins with '{first}' did not receive"
        fix = f"hand it over from the part of '{seen.producer}', or begin the part with '{seen.producer}'"
        return PlanError(text, fix=fix, location="received")
