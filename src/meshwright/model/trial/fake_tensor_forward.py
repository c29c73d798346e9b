"""The trial: one recorded forward on fake tensors, which shows what the module tree does not say.

The recording tells the order of block calls, the outputs and flops of each, which parameters each block call
and the glue use, whether a block is called twice, whether the model writes in place, which buffers it
writes, and where it draws random numbers. It runs the model's own forward, on a batch of `PROBE_BATCH`
samples (a prime, so that the batch dim can be told from others), under FakeTensorMode; a model whose forward
depends on values is run once on real tensors.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from meshwright.model.blocks.autograd_partition import split_graph
from meshwright.model.blocks.batch_coupling import BatchCoupling, TableUse
from meshwright.model.blocks.block_forward_backward import (
    LARGER_BLOCK_FIX,
    BlockCall,
    BlockInterceptor,
    ForwardDriver,
    ForwardPass,
)
from meshwright.model.blocks.inplace_writes_in_glue import untracked_write_lines
from meshwright.model.blocks.relu_activations import relu_activations
from meshwright.model.blocks.saved_activations import SavedActivations
from meshwright.model.recording.forward_recording import (
    AtenOp,
    BlockBoundaries,
    BlockStart,
    FunctionCall,
    ModelRecompute,
    ModuleEnd,
    RandomDraw,
    Recording,
    TensorRecord,
)
from meshwright.model.recording.record_forward import ForwardRecorder
from meshwright.model.tensor_parallel.feature_flow import FeatureFlow, traced_layer_kinds
from meshwright.model.tensor_parallel.layer_pairs import LayerUse, LayerUses
from meshwright.model.tensor_parallel.vocab_split_search import VocabFlow
from meshwright.model.tensors.clear_fake_caches import clear_fake_caches
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.model.trial.experts_calls import experts_calls
from meshwright.model.trial.kept_outputs import OutputStorage, output_storages, unread_products
from meshwright.model.trial.layer_costs import LayerRanges, SavedStorage
from meshwright.model.trial.output_graphs import OutputGraph, output_graphs
from meshwright.model.trial.value_dependent_sizes import ValueDependentSizes
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import ROOT, BatchNormCall, ExpertsCall, ReluActivations, block_of
from meshwright.plan.model_spec.op_sizes_and_memory import UnreadProduct

PROBE_BATCH = 3
SDPA = "scaled_dot_product_attention"
ATTENTION_FUNCTIONS = (SDPA, "multi_head_attention_forward")
GRAD_FUNCTIONS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


@dataclass(frozen=True)
class RecordedTrial:
    """A recorded forward, the tensors that it returned, and the graphs behind them.

    `storage_number` returns the number of the storage of a tensor in the recording.
    """

    recording: Recording
    outputs: Any
    output_graphs: Sequence[OutputGraph]
    storage_number: Callable[[torch.Tensor], int]


@dataclass
class TrialFindings:
    """What a recorded forward shows, per block call in order.

    `param_users` are, per parameter name, the block calls that use it (ROOT for glue); `written_buffers` the
    buffers that it writes; `attention_calls` the block calls that call torch's attention; `num_captured` the
    number of tensors that left blocks by each side channel; `num_draws`, for each use of a layer, the draws
    of its block call before it; `vocab_flow` follows the weights and outputs of embeddings and heads;
    `layer_ranges` say when layers ran, `saved_storages` what autograd saved meanwhile, and `output_storages`
    what matrix products and attention made, `unread_products` the products that a rerun need not compute.
    `user_checkpointed_calls` are the block calls that the model itself recomputes in backward, `table_uses`
    the embeddings that couple the samples of a batch, and `untracked_write_lines` the lines of code in which
    glue writes without a version change. `outside_generators` are those that the forward uses beside torch's
    functions.
    """

    block_calls: list[str]
    flops: list[int]
    output_numel: list[int]
    saved_numel: list[int]
    param_users: Mapping[str, frozenset[str]]
    written_buffers: list[str]
    writes_in_place: bool
    attention_calls: list[str]
    num_captured: dict[str, int]
    layer_uses: LayerUses
    num_draws: list[int]
    feature_flow: FeatureFlow
    vocab_flow: VocabFlow
    layer_ranges: LayerRanges
    saved_storages: list[SavedStorage]
    output_storages: list[OutputStorage]
    unread_products: tuple[UnreadProduct, ...]
    user_checkpointed_calls: list[str]
    table_uses: list[TableUse]
    batch_norm_calls: list[BatchNormCall]
    experts_calls: list[ExpertsCall]
    relu_activations: list[ReluActivations]
    untracked_write_lines: list[str]
    outside_generators: tuple[str, ...] = ()


def record_trial(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    on_block_call: Callable[[str], None],
    run_forward: Callable[[], Any],
    layers: Mapping[str, str] | None = None,
    count_draws: Callable[[], int] = lambda: 0,
    num_samples: int = PROBE_BATCH,
    interceptor: BlockInterceptor | None = None,
) -> RecordedTrial:
    """Returns the recording of one training forward of `module`.

    `run_forward()` runs it on `num_samples` samples, and `on_block_call` is called with the name of each
    block call. `layers` (name -> role) are those whose uses are read one by one; `count_draws` returns the
    draws of the block call so far; `interceptor` is called in place of each block.

    Raises PlanError for a tensor that bypasses the outputs of a block, and for gradients taken between
    blocks; errors of the forward itself pass through.
    """

    def record(*, in_place: bool) -> RecordedTrial:
        roles, kinds = layers or {}, traced_layer_kinds(module)
        recorder = ForwardRecorder(
            module, blocks, num_samples, roles, kinds, count_draws, _refuse_gradients_in_glue
        )
        return _record(recorder, on_block_call, run_forward, interceptor, in_place=in_place)

    try:
        return record(in_place=False)
    except RuntimeError as error:
        if "leaf Variable" not in str(error):
            raise
        return record(in_place=True)


def _record(
    recorder: ForwardRecorder,
    on_block_call: Callable[[str], None],
    run_forward: Callable[[], Any],
    interceptor: BlockInterceptor | None,
    *,
    in_place: bool,
) -> RecordedTrial:
    def before_block(block_call: str) -> None:
        recorder.begin_block_call(block_call)
        on_block_call(block_call)

    on_block_call("")
    with recorder.recording():
        driver = ForwardDriver(recorder.blocks, in_place=in_place)
        intercepted = nullcontext() if interceptor is None else driver.use_interceptor(interceptor)
        try:
            with intercepted:
                outputs, final_call, forward_pass = driver.forward(before_block, run_forward)
        finally:
            driver.detach()
    graphs = output_graphs(outputs, forward_pass, final_call)
    boundaries = _block_boundaries(recorder, outputs, forward_pass, final_call)
    recording = recorder.finish(outputs, boundaries, writes_in_place=in_place)
    return RecordedTrial(recording, outputs, graphs, recorder.storage_number)


def _refuse_gradients_in_glue(function: Any) -> None:
    if function in GRAD_FUNCTIONS:
        called = f"({function.__name__}) between blocks, where the graph is cut"
        text = f"the forward computes gradients itself {called}"
        raise PlanError(text, fix=f"take them inside one block, or {LARGER_BLOCK_FIX}", location="model")


def _block_boundaries(
    recorder: ForwardRecorder, outputs: Any, forward_pass: ForwardPass, final_call: BlockCall
) -> BlockBoundaries:
    """Returns what the graph of a finished forward shows where it is cut."""
    module = recorder.module
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    leaf_users = split_graph(forward_pass, final_call).users
    param_users = {name: set(leaf_users.get(key, ())) for key, name in names.items()}
    for tensor in tree_tensors(outputs):
        if id(tensor) in names:  # a parameter among the outputs takes its gradient straight from the loss
            param_users[names[id(tensor)]].add(ROOT)
    block_outputs = [[leaf for _, leaf in each.outputs] for each in forward_pass.block_calls.values()]
    kept = chain(module.parameters(), module.buffers(), *block_outputs)
    return BlockBoundaries(
        tuple(sum(leaf.numel() for leaf in found) for found in block_outputs),
        frozenset(recorder.storage_number(tensor) for tensor in kept),
        {name: frozenset(users) for name, users in param_users.items()},
        dict(Counter(forward_pass.side_channels.values())),
    )


def read_trial(recording: Recording) -> TrialFindings:
    """Returns what a recorded forward shows."""
    boundaries, block_calls = recording.boundaries, list(recording.block_calls)
    layer_uses, num_draws, use_times = _read_layer_uses(recording)
    saved, couplings = SavedActivations(recording, boundaries.kept_storages), BatchCoupling(recording)
    layer_ranges, of_samples = LayerRanges(recording, use_times), recording.num_samples
    unread = unread_products(recording)
    return TrialFindings(
        block_calls=block_calls,
        flops=[flops // of_samples for flops in layer_ranges.block_flops],
        output_numel=[numel // of_samples for numel in boundaries.output_numel],
        saved_numel=[numel // of_samples for numel in saved.numel(block_calls)],
        param_users=boundaries.param_users,
        written_buffers=list(recording.written_buffers),
        writes_in_place=recording.writes_in_place,
        attention_calls=[
            call.block_call
            for call in recording.calls()
            if call.name in ATTENTION_FUNCTIONS and call.block_call
        ],
        num_captured=dict(boundaries.num_captured),
        layer_uses=layer_uses,
        num_draws=num_draws,
        feature_flow=FeatureFlow().read(recording),
        vocab_flow=VocabFlow(recording),
        layer_ranges=layer_ranges,
        saved_storages=saved.saved_storages(),
        output_storages=output_storages(recording, unread),
        unread_products=tuple(unread.values()),
        user_checkpointed_calls=[
            event.block_call for event in recording.events if type(event) is ModelRecompute
        ],
        table_uses=couplings.uses,
        batch_norm_calls=couplings.batch_norm_calls,
        experts_calls=list(experts_calls(recording)),
        relu_activations=list(relu_activations(recording, boundaries.kept_storages)),
        untracked_write_lines=untracked_write_lines(recording),
    )


def _read_layer_uses(recording: Recording) -> tuple[LayerUses, list[int], set[int]]:
    """Returns the uses of layers with roles, the draws of the block call before each of them, and their times
    as indices of events.
    """
    found, num_draws, times, sizes = LayerUses(), list[int](), set[int](), ValueDependentSizes()
    draws, block_call = 0, ""
    for time, event in enumerate(recording.events):
        match event:
            case AtenOp():
                sizes.read_op(event)
                if event.name == "aten.view.default" and event.inputs[0].ndim == 2 != event.outputs[0].ndim:
                    viewed = recording.parameter_names.get(event.inputs[0].id, "")
                    found.reshaped.add(viewed.rpartition(".")[0])
            case BlockStart():
                block_call, draws = event.block_call, 0
            case RandomDraw():
                draws += 1
            case FunctionCall(name=name) if name == SDPA and event.block_call:
                query = event.args[0] if event.args else event.kwargs["query"]
                found.head_widths.append((len(found.uses), query.shape[-1]))
            case ModuleEnd(name=name, args=args, results=out) if name in recording.layer_roles:
                in_block = bool(event.block_call) or name in recording.blocks
                given = args[0] if args else None  # a position embedding may be called with a shape
                is_use = isinstance(given, TensorRecord) and isinstance(out, TensorRecord)
                if not (in_block and block_call and is_use):
                    continue
                if sizes.has_such_rows(given):
                    found.value_dependent.add(name)
                use = LayerUse(name, block_call, given.id, given.numel(), given.requires_grad, out.numel())
                found.uses.append(use)
                num_draws.append(draws)
                times.add(time)
    return found, num_draws, times


def make_fake(
    module: nn.Module,
    mode: FakeTensorMode,
    dtype_of: Callable[[str], torch.dtype] | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Gives `module` fake parameters and buffers on `device`, in place; tied parameters stay tied.

    A parameter gets the dtype `dtype_of(first name)`; without `dtype_of` each keeps its own.
    """
    clear_fake_caches(module)
    fakes = {
        id(parameter): _empty_parameter(
            parameter, mode, parameter.dtype if dtype_of is None else dtype_of(name), device
        )
        for name, parameter in module.named_parameters()
    }
    with mode:
        buffers = {id(buffer): make_fake_tensor(buffer, mode, device) for buffer in module.buffers()}
    for owner in module.modules():
        owner._parameters.update(
            {name: fakes[id(p)] for name, p in owner._parameters.items() if p is not None}
        )
        owner._buffers.update({name: buffers[id(b)] for name, b in owner._buffers.items() if b is not None})


def make_fake_tensor(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device | str) -> torch.Tensor:
    """Returns a fake tensor like `tensor` on `device`, which this host need not have."""
    fake = mode.from_tensor(tensor)
    if fake.device.type == torch.device(device).type:
        return fake
    with mode:
        return torch.empty_like(fake, device=device)


def _empty_parameter(
    parameter: nn.Parameter, mode: FakeTensorMode, dtype: torch.dtype, device: torch.device | str
) -> nn.Parameter:
    """Returns a fake parameter like `parameter`, made without an operation: a third of the time."""
    meta = torch.empty(parameter.shape, dtype=dtype, device="meta")
    made: Any = FakeTensor(mode, meta, torch.device(device))
    made._is_param = True  # what makes it an nn.Parameter, as for any class of tensors
    return made.requires_grad_(parameter.requires_grad)


def param_block_calls(
    blocks: Sequence[str], users: Collection[str], block_calls: Sequence[str]
) -> tuple[str, ...]:
    """Returns the block calls, in order, that may use a parameter: those of the `blocks` with it, and its
    `users`.

    ROOT comes last, if glue uses it or if no block call does.
    """
    used = tuple(
        block_call for block_call in block_calls if block_of(block_call) in blocks or block_call in users
    )
    return (*used, ROOT) if ROOT in users or not used else used
