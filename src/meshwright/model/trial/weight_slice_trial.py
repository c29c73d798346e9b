"""Checks a proposed split: runs the model on slices of fake weights, as the first of two ranks has them.

Every layer gets weights of the size of a slice, modules get the local values of their size attributes, and
blocks their part of per-head inputs. One block of each kind runs, on inputs like the recorded ones. It must
return outputs of the recorded shapes, but for those that only blocks take in all block calls of its kind (a
table of the rank's heads that one block passes to the next): then all that follows is as recorded. Otherwise
the whole model runs, which tells what fails, or that all runs with other shapes. What does not run is given
up, block after block, with a note: the layers of those blocks are not sharded.

Pairs that the user has declared, and whose features the flow could not follow, are tried behind the others:
what then fails is between them.

Whether code runs on other sizes than the recorded ones is no question to a recording: it needs live tensors,
but only blocks, and of them one of each kind.

A forward that hard-codes its number of heads may run all the same, and split the features into other heads.
So the feature flow is traced here too, and the units of a slice must be those of the full tensor, as many as
the rank has.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from logging import getLogger
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.model.blocks.block_forward_backward import ForwardDriver
from meshwright.model.blocks.discovery import WHOLE_MODEL
from meshwright.model.blocks.recorded_block_calls import MadeTensors, RecordedBlockCall, RecordedBlockCalls
from meshwright.model.recording.forward_recording import (
    AtenOp,
    FunctionCall,
    Recording,
    tensor_records,
)
from meshwright.model.recording.record_forward import ForwardRecorder
from meshwright.model.tensor_parallel.colwise_rowwise_groups import NUM_ATTEMPTS, find_layer_groups
from meshwright.model.tensor_parallel.feature_flow import FeatureFlow, traced_layer_kinds
from meshwright.model.tensor_parallel.layer_pairs import common_side, is_weight_transposed, split_param_dims
from meshwright.model.tensor_parallel.layer_roles import LAYER_NUMBER
from meshwright.model.tensor_parallel.split_proposal import (
    SplitProposal,
    local_size_attributes,
    take_local_heads,
)
from meshwright.model.tensors.fake_tensor_limits import depends_on_values
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.model_spec.param_dim_split import DimSplit
from meshwright.plan.model_spec.tensor_parallel_layers import PerHeadInput, SizeAttribute

TRIAL_RANKS = 2
"""The smallest number of ranks: what runs on the larger half runs on smaller slices."""
SLICES_FAIL = "does not run on slices"

_Failure = tuple[str, str, BaseException | None]  # (the block that fails, how, the error if there is one)
MakeModule = Callable[[], nn.Module]
PrepareForward = Callable[[nn.Module], AbstractContextManager[Callable[[], object]]]
ProposeSplits = Callable[[frozenset[str]], SplitProposal]


@dataclass(frozen=True)
class TriedSplits:
    """The `proposal` that runs on slices, and the size attributes with which it does.

    `failures` says for layers that were given up how their block fails; `notes` also what was not checked.
    """

    proposal: SplitProposal
    size_attributes: tuple[SizeAttribute, ...]
    failures: Mapping[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RecordedBlocks:
    """A recorded forward of the full weights: its block calls, and the feature flow that was read off it."""

    recording: Recording
    block_calls: RecordedBlockCalls
    feature_flow: FeatureFlow

    def are_separable(self, proposal: SplitProposal) -> bool:
        """Returns whether blocks can run without the model: all layers of the proposal lie in them, and
        nothing leaves them by side channels.
        """
        blocks = self.recording.blocks
        inside = (
            any(name == block or name.startswith(f"{block}.") for block in blocks) for name in proposal.roles
        )
        return WHOLE_MODEL not in blocks and not self.recording.boundaries.num_captured and all(inside)

    @cached_property
    def storages_outside(self) -> frozenset[int]:
        """The storages of the tensors that glue takes, or that the model returns."""
        taken: list[Any] = [self.recording.outputs]
        for event in self.recording.events:
            match event:
                # where the graph is cut, leaves are detached
                case AtenOp(block_call="", name=name) if name != "aten.detach.default":
                    taken.append((event.args, event.kwargs))
                case FunctionCall(block_call="", by_model=True):  # it may ask for a shape
                    taken.append((event.args, event.kwargs))
        return frozenset(record.storage for record in tensor_records(taken))

    def kinds(self, proposal: SplitProposal, numbers: Sequence[SizeAttribute]) -> dict[str, object]:
        """Returns what block calls share that run alike on the slices of `proposal`, if they are given alike,
        by their names.
        """
        found: dict[str, object] = {}
        for name in self.block_calls.calls:
            block = block_of(name)
            roles = _inside(block, proposal.roles)
            splits = _inside(block, proposal.dim_splits)
            sizes = [replace(each, module=rest) for each in numbers for rest in _inside(block, [each.module])]
            heads = [replace(each, block="") for each in proposal.per_head_inputs if each.block == block]
            same = self.block_calls.equal_calls.get(name, name)
            found[name] = same, *map(repr, (roles, splits, sizes, heads))
        return found


def _inside(block: str, by_name: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of modules in `block`, by their names there."""
    prefix, values = f"{block}.", by_name if isinstance(by_name, Mapping) else dict.fromkeys(by_name)
    return {
        name.removeprefix(block): value
        for name, value in values.items()
        if name == block or name.startswith(prefix)
    }


def try_on_slices(
    propose: ProposeSplits,
    make_module: MakeModule,
    prepare: PrepareForward,
    recorded: RecordedBlocks,
) -> TriedSplits:
    """Returns the proposal that runs, with what had to be given up for that.

    `propose` makes a proposal without some layers, `make_module` a module on fake tensors, and `prepare`
    returns the function that runs its forward, once everything is ready for that. `recorded` is a forward of
    the full weights.
    """
    blocks = () if recorded.recording.blocks == (WHOLE_MODEL,) else recorded.recording.blocks
    given_up, notes = dict[str, str](), list[str]()
    while True:
        proposal = propose(frozenset(given_up))
        if not proposal.roles:
            return TriedSplits(proposal, (), given_up, tuple(notes))
        failures: list[_Failure] = []
        for attempt in range(NUM_ATTEMPTS):
            module = make_module()
            numbers = proposal.size_attributes(module, attempt)
            if recorded.are_separable(proposal):
                if _blocks_run(module, proposal, numbers, prepare, recorded):
                    return TriedSplits(proposal, numbers, given_up, tuple(notes))
                module = make_module()
            failure = _find_failure(module, proposal, numbers, prepare, blocks)
            if failure is None:
                return TriedSplits(proposal, numbers, given_up, tuple(notes))
            failures.append(failure)
        block, reason, error = failures[0]
        removed_layers = _layers_of_block(proposal, block)
        if (error is not None and depends_on_values(error)) or not removed_layers:
            notes.append(f"whether layers run on slices could not be checked: {reason}")
            numbers = proposal.size_attributes(make_module(), 0)
            return TriedSplits(proposal, numbers, given_up, tuple(notes))
        pattern = LAYER_NUMBER.sub("*", block)
        given_up |= dict.fromkeys(removed_layers, f"{pattern} {SLICES_FAIL}: {reason}")
        notes.append(f"layers of {pattern} are not sharded, because it {SLICES_FAIL}: {reason}")


def _prepare_slices(
    module: nn.Module, proposal: SplitProposal, numbers: Sequence[SizeAttribute], blocks: Sequence[str]
) -> ForwardRecorder:
    """Makes `module` one of slices, in place; returns a recorder of its forwards."""
    shrink_to_slice(module, proposal)
    for name in dict.fromkeys(number.module for number in numbers):
        owner = module.get_submodule(name)
        vars(owner).update(
            local_size_attributes(owner, [each for each in numbers if each.module == name], 0, TRIAL_RANKS)
        )
    for portion in proposal.per_head_inputs:
        block = module.get_submodule(portion.block)
        block.register_forward_pre_hook(partial(_take_portion, portion), with_kwargs=True)
    block_modules = {name: module.get_submodule(name) for name in blocks}
    return ForwardRecorder(module, block_modules, 0, layer_kinds=traced_layer_kinds(module))


def _blocks_run(
    module: nn.Module,
    proposal: SplitProposal,
    numbers: Sequence[SizeAttribute],
    ready: PrepareForward,
    recorded: RecordedBlocks,
) -> bool:
    """Returns whether one block of each kind runs on slices, on recorded inputs, and returns outputs of the
    recorded shapes.
    """
    recorder, flow = _prepare_slices(module, proposal, numbers, recorded.recording.blocks), FeatureFlow()
    try:
        # the recorder must see dropout before its mask is drawn
        with silence_fake_errors(), ready(module), recorder.recording():
            if not _calls_fit(recorder, flow, recorded, recorded.kinds(proposal, numbers)):
                return False
    except Exception:  # the whole model tells what fails
        return False
    return _unit_mismatch(flow.read(recorder.finish(None)), proposal) is None


def _calls_fit(
    recorder: ForwardRecorder, flow: FeatureFlow, recorded: RecordedBlocks, kinds: Mapping[str, object]
) -> bool:
    """Returns whether block calls get what is known of their inputs, and return the recorded shapes; `flow`
    is told of inputs.
    """
    made, outputs_by_kind = MadeTensors(), dict[object, Any]()
    for name, call in recorded.block_calls.calls.items():
        kind = kinds[name], made.sliced_shapes(call.inputs)
        if kind not in outputs_by_kind:
            if not _know_inputs(call, made, recorded.feature_flow, flow, recorder):
                return False
            args, kwargs = call.make_inputs(made)
            recorder.begin_block_call(name)
            outputs_by_kind[kind] = recorder.blocks[block_of(name)](*args, **kwargs)
        if not _fits(outputs_by_kind[kind], call.outputs, recorded.storages_outside):
            return False
        made.add_outputs(call.outputs, outputs_by_kind[kind])
    return True


def _know_inputs(
    call: RecordedBlockCall,
    made: MadeTensors,
    full_flow: FeatureFlow,
    flow: FeatureFlow,
    recorder: ForwardRecorder,
) -> bool:
    """Notes in `flow` what `full_flow` knows of the inputs of a block call that no earlier one has made.

    Returns whether that is all: features of a block that glue has changed are unknown.
    """
    for record in call.inputs:
        if made.find(record) is not None:
            continue
        if full_flow.features.get(record) is not None:
            return False
        given = recorder.describe(made.replace(record))
        if full_flow.features.is_known(record):
            flow.features.set_constant(given, full_flow.features.varying_dims(record))
    return True


def _fits(outputs: Any, full: Any, storages_outside: frozenset[int]) -> bool:
    """Returns whether the `outputs` of a block on slices have the shapes of the `full` ones, where these are
    taken outside of blocks.
    """
    tensors, records = tree_tensors(outputs), tensor_records(full)
    return len(tensors) == len(records) and all(
        one.dtype == other.dtype and (one.shape == other.shape or other.storage not in storages_outside)
        for one, other in zip(tensors, records, strict=True)
    )


def _find_failure(
    module: nn.Module,
    proposal: SplitProposal,
    numbers: Sequence[SizeAttribute],
    ready: PrepareForward,
    blocks: Sequence[str],
) -> _Failure | None:
    recorder = _prepare_slices(module, proposal, numbers, blocks)
    try:
        # the recorder must see dropout before its mask is drawn
        with silence_fake_errors(), ready(module) as forward, recorder.recording():
            driver = ForwardDriver(recorder.blocks, cut_graph=False)
            driver.forward(recorder.begin_block_call, forward)
    except Exception as error:  # any failure is a result, reported in a note
        block = block_of(recorder.last_block_call)
        return block, f"{type(error).__name__}: {_first_line(error)}", error
    return _unit_mismatch(FeatureFlow().read(recorder.finish(None)), proposal)


def _unit_mismatch(flow: FeatureFlow, proposal: SplitProposal) -> _Failure | None:
    roles = {
        node.name: proposal.roles.get(node.name, "replicated") for node in flow.nodes if node.kind == "linear"
    }
    traced_splits = {}
    for group in find_layer_groups(flow, roles):
        traced_splits |= {node.name: cut for node, cut in (*group.sources.items(), *group.rowwise.items())}
    for node in flow.nodes:
        proposed, traced = proposal.dim_splits.get(node.name), traced_splits.get(node.name)
        if proposed is None or node.kind == "argument" or node.name in proposal.declared:
            continue
        expected = _local_split(proposed)
        if traced != expected and (traced is not None or expected.max_ranks > 1):
            units = "none" if traced is None else str(traced.max_ranks)
            return (
                block_of(node.block_call),
                f"of {expected.max_ranks} heads or features of {node.name} in a slice it makes {units}",
                None,
            )
    return None


def _local_split(cut: DimSplit) -> DimSplit:
    """The division of the first rank's slice into units."""
    first, end = cut.units_of(0, TRIAL_RANKS)
    sections = tuple(part.size(0, TRIAL_RANKS) for part in cut.section_splits)
    if cut.num_units >= TRIAL_RANKS or not cut.num_heads:
        units, heads, per_head_numel = (
            end - first,
            (end - first) * (cut.num_heads // cut.num_units),
            cut.per_head_numel,
        )
    else:
        units, heads = 1, end - first
        per_head_numel = tuple(each // cut.num_heads * cut.num_units * heads for each in cut.per_head_numel)
    if units == 1:  # where one section ends and the next begins cannot be seen
        sections, per_head_numel = (sum(sections),), per_head_numel[:1]
    return replace(
        cut,
        num_units=units,
        sections=sections,
        num_heads=0 if heads == units else heads,
        per_head_numel=() if heads == units else per_head_numel,
    )


@contextmanager
def silence_fake_errors() -> Iterator[None]:
    """Context manager: torch does not print that a fake operation failed; here a failure is a result."""
    log = getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def shrink_to_slice(module: nn.Module, proposal: SplitProposal) -> None:
    """Gives the layers of `module`, in place, weights of the size of a slice, and a forward for them."""
    done: dict[int, nn.Parameter] = {}
    for name, role in proposal.roles.items():
        layer = module.get_submodule(name)
        for leaf, parameter in list(layer._parameters.items()):
            if parameter is None or name not in proposal.dim_splits:
                continue
            cuts = split_param_dims(layer, parameter, role, proposal.dim_splits[name])
            shape = tuple(parameter.shape)
            for cut in cuts:
                shape = cut.local_shape(shape, 0, TRIAL_RANKS) if cut.side == common_side(role) else shape
            if id(parameter) not in done:
                done[id(parameter)] = nn.Parameter(parameter.new_empty(shape), parameter.requires_grad)
            layer._parameters[leaf] = done[id(parameter)]
        if role in ("colwise", "rowwise"):
            layer.forward = partial(_product, layer)


def _product(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = layer.get_parameter("weight")
    return F.linear(x, weight.t() if is_weight_transposed(layer) else weight, layer._parameters.get("bias"))


def _take_portion(
    portion: PerHeadInput, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return take_local_heads(portion, 0, TRIAL_RANKS, args, kwargs)


def _layers_of_block(proposal: SplitProposal, block: str) -> list[str]:
    pattern = LAYER_NUMBER.sub("*", block)
    inside = [
        name
        for name in proposal.roles
        if LAYER_NUMBER.sub("*", name).startswith(pattern + ".") or name == block
    ]
    declared = [name for name in inside if name in proposal.declared]
    heads = [name for name in inside if name in proposal.dim_splits and _has_heads(proposal.dim_splits[name])]
    return declared or heads or inside or list(proposal.declared)


def _has_heads(cut: DimSplit) -> bool:
    return any(length != cut.num_units for length in cut.sections)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:160] if str(error) else ""
