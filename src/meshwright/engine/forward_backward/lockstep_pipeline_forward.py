"""Runs whole forwards of a pipelined model outside of steps, on all ranks in lockstep.

    rank 0    embed  -->  layer 0  -->  (layer 1)  -->  (head)      own blocks, and (others) on fake tensors
    rank 1   (embed) --> (layer 0) -->   layer 1   -->   head
              0 sends      0 sends       1 sends         1 sends     outputs go to the other ranks

Each block runs where its weights are; where several ranks have them (DualPipe), the outputs are those of the
first. The other ranks run it on tensors without numbers, which shows its outputs and does what it does to its
arguments: a cache of keys and values grows there too, and is as long as on the owner. Then the numbers
arrive. So glue runs on all ranks, on the same numbers, and every rank has the outputs; all ranks run whatever
calls the model, `generate` with or without a cache, and nothing needs to be known of the forward beforehand.

    bytes = sum over blocks of their outputs, and 88 more per tensor, broadcast along the pipeline

Cost: ranks work one after the other, as they must where each token needs the last one; a block on fake
tensors takes of the order of ten milliseconds, while its owner computes.
Limits: a block that looks at numbers inside, or that takes slices of the residual stream, cannot run on fake
tensors. Its outputs are then known from the trial, its effect on a cache is not: the ranks find that out
together at the first such call of the block, and all refuse it by name.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.hf.captured_outputs import capture_marks
from meshwright.model.hf.model_from_config import batched_experts
from meshwright.model.pipeline.forward_graph import ValueRef
from meshwright.model.tensors.call_description import is_constant
from meshwright.model.tensors.clear_fake_caches import clear_caches_with_fakes, lru_caches
from meshwright.model.tensors.fake_tensor_limits import depends_on_values
from meshwright.model.tensors.pytree import map_leaves, replace_tensors, tree_tensors, value_leaves
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_of

BROADCAST_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
MAX_DIMS = 9  # of a tensor, at most


class PipelinedForward:
    """Runs blocks in lockstep within `run_in_lockstep`; a rank that has the whole model runs it as usual."""

    def __init__(self, state: RankState) -> None:
        self._state, plan = state, state.plan
        self._owners: dict[str, int] = {}
        # the first of several ranks that have a block runs it
        for index, stage in reversed(list(enumerate(plan.sharding.block_calls_by_pp_rank))):
            self._owners |= {block_of(block_call): index for block_call in stage}
        stages, coordinate = plan.sharding.block_calls_by_pp_rank, plan.view.coordinate
        self._own = set(map(block_of, stages[coordinate["pp"]])) if stages else set[str]()
        # a single mode, because a cache may outlive a forward
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._calls_agreed_on = set[tuple[str, str]]()  # name of a block, class of a cache that it is given
        self._caches = lru_caches(state.trained_module.module)
        self._fake_weights_by_block: dict[str, list[dict[str, Any]]] = {}
        self._full_shapes = {
            name: param_sharding.param.shape
            for param_sharding in plan.view.logical_param_shardings
            if param_sharding.sliced_dims
            for name in param_sharding.param.names
        }
        self._sharded_layers = {
            state.trained_module.module.get_submodule(call.name) for call in plan.view.model_spec.layer_calls
        }

    @contextmanager
    def run_in_lockstep(self, action: str) -> Iterator[None]:
        """Makes all pipeline ranks run forwards of the module together meanwhile.

        Messages are sent for `action`.
        """
        if not self._owners:
            yield
            return
        with self._state.driver.use_interceptor(partial(self._run_block, action)):
            yield

    def _run_block(self, action: str, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a block on its owner, on fakes elsewhere, and broadcasts its outputs."""
        group, owner = self._state.world.group(("pp",)), self._owners.get(name)
        if owner is None:  # not in the trained forward: every rank has it
            return run(*args, **kwargs)
        capturing, inputs = capture_marks(), tree_tensors((args, kwargs))
        is_owner = owner == group.index
        outputs, refusal = None, None
        try:
            # of several ranks that have a block (DualPipe) all run it: they meet others in its collectives
            is_own = name in self._own
            outputs = run(*args, **kwargs) if is_own else self._fake_outputs(name, run, args, kwargs)
        except PlanError as error:
            refusal = error
        self._refuse_together(name, _opaque_kind((args, kwargs)), refusal)
        captured = [mark.added_tensors for mark in capturing]
        output_tensors = tree_tensors([outputs, *captured])
        ledger_name = f"{action}({name})"
        output_header = (
            _encode_outputs(name, output_tensors, inputs)
            if is_owner
            else torch.empty(len(output_tensors), 2 + MAX_DIMS, dtype=torch.int64)
        )
        output_header = output_header.to(self._state.world.device)
        if not output_tensors:
            return outputs
        group.broadcast(output_header, source=owner, action=ledger_name).wait()
        new: dict[int, torch.Tensor] = {}
        for tensor, (kind, ndim, *dims) in zip(output_tensors, output_header.tolist(), strict=True):
            real = tensor
            if kind >= 0:
                real = (
                    tensor.contiguous()
                    if is_owner
                    else torch.empty(dims[:ndim], dtype=BROADCAST_DTYPES[kind], device=output_header.device)
                )
                group.broadcast(real, source=owner, action=ledger_name).wait()
            elif not is_owner:
                real = inputs[-1 - kind]
            new[id(tensor)] = real
        if is_owner:
            return outputs
        for mark, each in zip(capturing, captured, strict=True):
            mark.replace(replace_tensors(each, new))
        return replace_tensors(outputs, new)

    def _refuse_together(self, name: str, kind: str, refusal: PlanError | None) -> None:
        """Raises on every rank if one of them refuses a call of a block, which is the first with such
        arguments: the others would wait for it.
        """
        if (name, kind) not in self._calls_agreed_on:
            refusals = torch.tensor([int(refusal is not None)], device=self._state.world.device)
            with self._state.world.ledger.pause_recording():
                self._state.world.group(("pp",)).all_reduce(refusals, action=f"AGREE({name})").wait()
            self._calls_agreed_on.add((name, kind))
            if refusal is None and refusals.item():
                given = f", and is given a {kind}" if kind else ""
                refusal = _lockstep_error(f"the block '{name}' cannot run on another rank{given}")
        if refusal is not None:
            raise refusal

    def _fake_outputs(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns the outputs of a block of another rank, without numbers."""
        if self._state.takes_residual_slices(has_whole_tokens=self._state.has_whole_tokens):
            return self._recorded_outputs(name, (args, kwargs), "takes slices of the residual stream", None)
        reals = {
            id(tensor): tensor
            for tensor in tree_tensors((args, kwargs))
            if not isinstance(tensor, FakeTensor)
        }
        fakes = {key: self._mode.from_tensor(tensor) for key, tensor in reals.items()}
        real_by_fake = {id(fake): reals[key] for key, fake in fakes.items()}
        before = [(mark, mark.captured[:]) for mark in capture_marks()]
        # in place, so that writes of the block into lists and dicts stay
        inputs = replace_tensors((args, kwargs), fakes)
        try:
            block = self._state.trained_module.blocks[name]
            with self._mode, self._fake_weights(name), batched_experts(block):
                return run(*inputs[0], **inputs[1])
        except Exception as error:
            if not depends_on_values(error):
                raise
            for mark, output_tensors in before:
                mark.captured[:] = output_tensors
            reason = f"reads values that another rank holds ({type(error).__name__})"
            return self._recorded_outputs(name, replace_tensors(inputs, real_by_fake), reason, error)
        finally:
            replace_tensors(inputs, real_by_fake)
            clear_caches_with_fakes(self._caches)

    @contextmanager
    def _fake_weights(self, name: str) -> Iterator[None]:
        """Gives a block fake weights of full shape meanwhile: this rank may have no memory for them.

        Modules that blocks of this rank share keep their sharded shapes.
        """
        modules = list(self._state.trained_module.blocks[name].named_modules(prefix=name))
        tables = [table for _, module in modules for table in (module._parameters, module._buffers)]
        if name not in self._fake_weights_by_block:
            table_shapes = [
                (module_name, {} if module in self._sharded_layers else self._full_shapes)
                for module_name, module in modules
                for _ in range(2)
            ]
            with self._mode:
                self._fake_weights_by_block[name] = [
                    {
                        key: self._empty(each, full_shapes.get(f"{module_name}.{key}"))
                        for key, each in table.items()
                    }
                    for table, (module_name, full_shapes) in zip(tables, table_shapes, strict=True)
                ]
        original = [dict(table) for table in tables]
        for table, fake_tables in zip(tables, self._fake_weights_by_block[name], strict=True):
            table |= fake_tables
        try:
            yield
        finally:
            for table, entries in zip(tables, original, strict=True):
                table |= entries

    def _empty(self, tensor: torch.Tensor | None, shape: tuple[int, ...] | None) -> Any:
        if tensor is None:
            return None
        return torch.empty(shape or tensor.shape, dtype=tensor.dtype, device=self._state.world.device)

    def _recorded_outputs(self, name: str, inputs: Any, reason: str, error: Exception | None) -> Any:
        """Returns a block's outputs as the trial recorded them.

        Raises PlanError where its arguments may change.
        """
        kind = _opaque_kind(inputs)
        if kind or self._state.trained_module.forward_graphs is None:
            what = f"and is given a {kind}" if kind else "and nothing is known of its outputs"
            raise _lockstep_error(f"the block '{name}' {reason}, {what}") from error
        dummy_inputs = self._state.loss.model_inputs(self._state.trained_module.dummy_batch)
        with ThreadPoolExecutor(1) as executor:  # this thread has modes and collectors of a forward under way
            forward_graph = executor.submit(
                partial(self._state.trained_module.forward_graphs.get, dummy_inputs, training=False)
            ).result()
        stub = forward_graph.stubs[name]
        for mark in capture_marks():
            mark.captured.extend(
                map_leaves(captured, _empty_placeholder)
                for channel, listed in stub.captured
                if channel == mark.channel
                for captured in listed
            )
        return map_leaves(stub.outputs, _empty_placeholder)


def _opaque_kind(inputs: Any) -> str:
    """Returns the class of an object among the inputs of a block that is no tensor, container or constant
    (a cache); "" without any.
    """
    opaque = (
        type(leaf).__name__
        for leaf in value_leaves(inputs)
        if not is_constant(leaf) and not isinstance(leaf, torch.Tensor)
    )
    return next(opaque, "")


def _lockstep_error(text: str) -> PlanError:
    fix = "pass use_cache=False, or call the model under a plan without a pipeline"
    return PlanError(text, fix=fix, location="model")


def _empty_placeholder(leaf: Any) -> Any:
    return torch.empty(0) if type(leaf) is ValueRef else leaf


def _encode_outputs(
    name: str, output_tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Returns a row per tensor: its dtype and shape, or, for one of the block's inputs, which of them."""
    tables = {id(tensor): -1 - table for table, tensor in enumerate(inputs)}
    descriptions = []
    for tensor in output_tensors:
        if isinstance(tensor, FakeTensor):
            text = (
                f"the block '{name}' computes with tensors of another rank, which it gets through an object"
            )
            raise PlanError(
                text,
                fix="pass them as arguments of the block, bare or in tuples and lists",
                location="model",
            )
        descriptions.append(
            [
                tables.get(id(tensor), BROADCAST_DTYPES.index(tensor.dtype)),
                tensor.ndim,
                *tensor.shape,
                *[0] * (MAX_DIMS - tensor.ndim),
            ]
        )
    return torch.tensor(descriptions, dtype=torch.int64).view(-1, 2 + MAX_DIMS)
