"""The trial: one forward on fake tensors, which shows what the module tree does not say.

The trial finds the order of block calls, the outputs and flops of each, which parameters each block call and
the glue use, whether a block is called twice, whether the model writes in place, which buffers it writes, and
where it draws random numbers. It runs the model's own forward, on a batch of `PROBE_BATCH` samples (a prime,
so that the batch dim can be told from others), under FakeTensorMode; a model whose forward depends on values
is run once on real tensors.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from meshwright.model.blocks.autograd_partition import split_graph
from meshwright.model.blocks.batch_coupling import BatchCouplingMode, TableUse
from meshwright.model.blocks.block_forward_backward import LARGER_BLOCK_FIX, ForwardDriver
from meshwright.model.blocks.inplace_writes_in_glue import UntrackedWrites
from meshwright.model.blocks.saved_activations import SavedActivations
from meshwright.model.blocks.user_checkpointing import in_user_checkpoint
from meshwright.model.tensor_parallel.feature_flow import FeatureFlow, traced_layer_kinds
from meshwright.model.tensor_parallel.layer_pairs import LayerUse, LayerUses
from meshwright.model.tensor_parallel.vocab_split_search import VocabFlow
from meshwright.model.tensors.clear_fake_caches import clear_fake_caches
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.model.trial.layer_costs import LayerCostRecorder, SavedStorage
from meshwright.model.trial.op_counter import FlopCounter
from meshwright.model.trial.output_graphs import OutputGraph, output_graphs
from meshwright.model.trial.value_dependent_sizes import ValueDependentSizes
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import ROOT, BatchNormCall, block_of

PROBE_BATCH = 3
ATTENTION_FUNCTIONS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


@dataclass
class TrialFindings:
    """The findings of one forward, per block call in order.

    `param_users` are, per parameter name, the block calls that use it (ROOT for glue); `written_buffers` the
    buffers that it writes; `outputs` its return value; `attention_calls` the block calls that call torch's
    attention; `num_captured` the number of tensors that left blocks by each side channel; `num_draws`, for
    each use of a layer, the draws of its block call before it; `vocab_flow` follows the weights and outputs
    of embeddings and heads; `layer_ranges` say when layers ran, and `saved_storages` what autograd saved
    meanwhile. `user_checkpointed_calls` are the block calls that the model itself recomputes in backward,
    `table_uses` the embeddings that couple the samples of a batch, and `untracked_write_lines` the lines of
    code in which glue writes without a version change. `outside_generators` are those that the forward uses
    beside torch's functions, and `output_graphs` the graphs behind the `outputs`.
    """

    block_calls: list[str] = field(default_factory=list)
    flops: list[int] = field(default_factory=list)
    output_numel: list[int] = field(default_factory=list)
    saved_numel: list[int] = field(default_factory=list)
    param_users: dict[str, set[str]] = field(default_factory=dict)
    written_buffers: list[str] = field(default_factory=list)
    writes_in_place: bool = False
    outputs: Any = None
    attention_calls: list[str] = field(default_factory=list)
    num_captured: dict[str, int] = field(default_factory=dict)
    layer_uses: LayerUses = field(default_factory=LayerUses)
    num_draws: list[int] = field(default_factory=list)
    feature_flow: FeatureFlow = field(default_factory=FeatureFlow)
    vocab_flow: VocabFlow = field(default_factory=lambda: VocabFlow(nn.Module(), {}))
    layer_ranges: LayerCostRecorder = field(default_factory=lambda: LayerCostRecorder(lambda: 0, lambda: 0))
    saved_storages: list[SavedStorage] = field(default_factory=list)
    user_checkpointed_calls: list[str] = field(default_factory=list)
    table_uses: list[TableUse] = field(default_factory=list)
    batch_norm_calls: list[BatchNormCall] = field(default_factory=list)
    untracked_write_lines: list[str] = field(default_factory=list)
    output_graphs: list[OutputGraph] = field(default_factory=list)
    outside_generators: tuple[str, ...] = ()


def run_trial(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    on_block_call: Callable[[str], None],
    run_forward: Callable[[], Any],
    layers: Mapping[str, str] | None = None,
    count_draws: Callable[[], int] = lambda: 0,
) -> TrialFindings:
    """Returns the findings of one training forward of `module`.

    `run_forward()` runs it on PROBE_BATCH samples, and `on_block_call` is called with the name of each block
    call. The uses of `layers` (name -> role) are recorded one by one; `count_draws` returns the draws of the
    block call so far.

    Raises PlanError for a tensor that bypasses the outputs of a block, and for gradients taken between
    blocks; errors of the forward itself pass through.
    """
    try:
        return _run_trial(
            module, blocks, on_block_call, run_forward, layers or {}, count_draws, in_place=False
        )
    except RuntimeError as error:
        if "leaf Variable" not in str(error):
            raise
        return _run_trial(
            module, blocks, on_block_call, run_forward, layers or {}, count_draws, in_place=True
        )


def make_fake(
    module: nn.Module, mode: FakeTensorMode, dtype_of: Callable[[str], torch.dtype] | None = None
) -> None:
    """Gives `module` fake CPU parameters and buffers, in place; tied parameters stay tied.

    A parameter gets the dtype `dtype_of(first name)`; without `dtype_of` each keeps its own.
    """
    clear_fake_caches(module)
    with mode:
        fakes = {
            id(parameter): _empty_parameter(
                parameter, parameter.dtype if dtype_of is None else dtype_of(name)
            )
            for name, parameter in module.named_parameters()
        }
        buffers = {id(buffer): mode.from_tensor(buffer) for buffer in module.buffers()}
    for owner in module.modules():
        owner._parameters.update(
            {name: fakes[id(p)] for name, p in owner._parameters.items() if p is not None}
        )
        owner._buffers.update({name: buffers[id(b)] for name, b in owner._buffers.items() if b is not None})


def _empty_parameter(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="cpu"), parameter.requires_grad)


def _run_trial(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    on_block_call: Callable[[str], None],
    run_forward: Callable[[], Any],
    layers: Mapping[str, str],
    count_draws: Callable[[], int],
    *,
    in_place: bool,
) -> TrialFindings:
    findings, counter, totals = TrialFindings(writes_in_place=in_place), FlopCounter(), list[int]()

    def before_block(block_call: str) -> None:
        totals.append(counter.total_flops)
        findings.block_calls.append(block_call)
        findings.feature_flow.begin_block_call(block_call)
        on_block_call(block_call)

    driver = ForwardDriver(blocks, in_place=in_place)
    current_call = lambda: "" if driver.in_glue or not findings.block_calls else findings.block_calls[-1]  # noqa: E731
    layer_ranges = LayerCostRecorder(lambda: counter.total_flops, lambda: len(findings.layer_uses.uses))
    saved_activations = SavedActivations(current_call, lambda: layer_ranges.clock)
    observer, versions_before = _TrialObserver(driver, findings), _buffer_versions(module)
    hear_inputs = partial(
        _hear_inputs, (saved_activations.exclude, observer.untracked_writes.add_block_inputs)
    )
    handles = [block.register_forward_pre_hook(hear_inputs, with_kwargs=True) for block in blocks.values()]
    handles += layer_ranges.attach_hooks(module, layers)  # before the use is recorded
    vocab_flow, sizes = VocabFlow(module, layers), ValueDependentSizes()
    findings.vocab_flow = vocab_flow
    for name in layers:
        layer = module.get_submodule(name)
        handles.append(layer.register_forward_pre_hook(partial(_enter_layer, vocab_flow, name)))
        handles.append(
            layer.register_forward_hook(partial(_record_use, driver, findings, count_draws, sizes, name))
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    couplings = BatchCouplingMode(dict(module.named_parameters()), current_call)
    on_block_call("")
    try:
        flow = findings.feature_flow.follow_forward(
            module, blocks, traced_layer_kinds(module), lambda: driver.in_glue
        )
        with counter, sizes, couplings, observer, saved_activations.recording(), vocab_flow, flow:
            outputs, final_call, forward_pass = driver.forward(before_block, run_forward)
            totals.append(counter.total_flops)
    finally:
        driver.detach()
        findings.layer_uses.live_inputs.clear()
        for handle in handles:
            handle.remove()
    findings.outputs, findings.table_uses = outputs, couplings.uses
    findings.batch_norm_calls = couplings.batch_norm_calls
    findings.output_graphs = output_graphs(outputs, forward_pass, final_call)
    findings.untracked_write_lines = observer.untracked_writes.lines
    versions = _buffer_versions(module)
    findings.written_buffers = [name for name in versions if versions[name] != versions_before.get(name)]
    findings.flops = [(end - start) // PROBE_BATCH for start, end in pairwise(totals)]
    block_outputs = [[leaf for _, leaf in each.outputs] for each in forward_pass.block_calls.values()]
    findings.output_numel = [sum(leaf.numel() for leaf in found) // PROBE_BATCH for found in block_outputs]
    saved_activations.exclude([*module.parameters(), *module.buffers(), *chain(*block_outputs)])
    findings.saved_numel = [numel // PROBE_BATCH for numel in saved_activations.numel(findings.block_calls)]
    findings.layer_ranges, findings.saved_storages = layer_ranges, saved_activations.saved_storages()
    findings.num_captured = dict(Counter(forward_pass.side_channels.values()))
    leaf_users = split_graph(forward_pass, final_call).users
    findings.param_users = {name: set(leaf_users.get(key, ())) for key, name in names.items()}
    for tensor in tree_tensors(outputs):
        if id(tensor) in names:  # a parameter among the outputs takes its gradient straight from the loss
            findings.param_users[names[id(tensor)]].add(ROOT)
    return findings


def param_block_calls(blocks: Sequence[str], users: set[str], block_calls: Sequence[str]) -> tuple[str, ...]:
    """Returns the block calls, in order, that may use a parameter: those of the `blocks` with it, and its
    `users`.

    ROOT comes last, if glue uses it or if no block call does.
    """
    used = tuple(
        block_call for block_call in block_calls if block_of(block_call) in blocks or block_call in users
    )
    return (*used, ROOT) if ROOT in users or not used else used


class _TrialObserver(TorchFunctionMode):
    def __init__(self, driver: ForwardDriver, findings: TrialFindings) -> None:
        super().__init__()
        self._driver, self._findings = driver, findings
        self.untracked_writes = UntrackedWrites()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (
            func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
            and self._driver.in_glue
        ):
            text = (
                f"the forward computes gradients itself ({func.__name__}) between blocks, where the graph "
                "is cut"
            )
            raise PlanError(text, fix=f"take them inside one block, or {LARGER_BLOCK_FIX}", location="model")
        if (
            not self._driver.in_glue
            and self._findings.block_calls[-1:] != self._findings.user_checkpointed_calls[-1:]
            and in_user_checkpoint()
        ):
            self._findings.user_checkpointed_calls += self._findings.block_calls[-1:]
        if func in ATTENTION_FUNCTIONS and not self._driver.in_glue:
            self._findings.attention_calls.append(self._findings.block_calls[-1])
            if func is F.scaled_dot_product_attention:
                self._findings.layer_uses.head_widths.append(
                    (len(self._findings.layer_uses.uses), args[0].shape[-1])
                )
        result = func(*args, **(kwargs or {}))
        if self._driver.in_glue:
            self.untracked_writes.check_call(func, args, kwargs or {}, result)
        return result


def _enter_layer(vocab_flow: VocabFlow, name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
    vocab_flow.enter_layer(name, args)


def _record_use(
    driver: ForwardDriver,
    findings: TrialFindings,
    count_draws: Callable[[], int],
    sizes: ValueDependentSizes,
    name: str,
    layer: nn.Module,
    args: tuple[Any, ...],
    output: Any,
) -> None:
    findings.vocab_flow.leave_layer(name, output)
    in_block = not driver.in_glue or driver.is_block(name)
    layer_input = args[0] if args else None  # a position embedding may be called with a shape
    if (
        in_block
        and findings.block_calls
        and isinstance(layer_input, torch.Tensor)
        and isinstance(output, torch.Tensor)
    ):
        findings.layer_uses.live_inputs.append(layer_input)
        if sizes.has_such_rows(layer_input):
            findings.layer_uses.value_dependent.add(name)
        findings.num_draws.append(count_draws())
        findings.layer_uses.uses.append(
            LayerUse(
                name,
                findings.block_calls[-1],
                id(layer_input),
                layer_input.numel(),
                layer_input.requires_grad,
                output.numel(),
            )
        )


def _hear_inputs(
    listeners: Sequence[Callable[[list[torch.Tensor]], None]], block: nn.Module, args: Any, kwargs: Any
) -> None:
    inputs = tree_tensors((args, kwargs))
    for listener in listeners:
        listener(inputs)


def _buffer_versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (id(buffer), buffer._version) for name, buffer in module.named_buffers()}
