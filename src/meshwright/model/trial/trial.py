"""One forward on fake tensors: what cannot be read off the module tree is learnt from a run that computes nothing.

The trial finds the order in which blocks are visited, what each hands on, the operations it costs, which parameters each
visit and the glue use, whether a block is called twice, whether the model writes in place, which buffers it writes, and
where it draws random numbers. It runs the model's own forward, on a batch of `PROBE_BATCH` samples (a prime, so that a
batch dim is told apart from others), under FakeTensorMode; a model whose forward depends on values is run once on real
ones.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode

from meshwright.model.blocks.batch_coupling import TableUse, TableUseMode
from meshwright.model.blocks.driver import LARGER_BLOCK_FIX, ForwardDriver
from meshwright.model.blocks.graph_check import split_graph
from meshwright.model.blocks.inplace_writes import UntrackedWrites
from meshwright.model.blocks.saved_activations import SavedActivations
from meshwright.model.blocks.user_checkpointing import in_user_checkpoint
from meshwright.model.tensor_parallel.feature_flow import FeatureFlow, traced_layer_kinds
from meshwright.model.tensor_parallel.layer_pairs import LayerUse, LayerUses
from meshwright.model.tensor_parallel.vocab_split import VocabFlow
from meshwright.model.tensors.fake_cache import clear_fake_caches
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.model.trial.layer_ranges import LayerRangeRecorder, SavedStorage
from meshwright.model.trial.op_counter import FlopCounter
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import ROOT, block_of

PROBE_BATCH = 3
ATTENTION_FUNCTIONS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
# What torch says of fake tensors elsewhere; the last is the fake kernel of grouped_mm, stricter than the real one.
FAKE_TENSOR_LIMITS = ("tensor subclass", "not allocated", "fake impl", "Expected inputs of BF16 type")


@dataclass
class TrialFindings:
    """What one forward showed, per visit in order.

    `users` are, per parameter by name, the visits that use it (ROOT for glue); `stateful` the buffers that are written;
    `outputs` is what it returned; `attends` the visits that call torch's attention; `captured` how many tensors left blocks
    by each side channel; `drawn`, for each use of a layer, the draws of its visit before it; `followed` what became of the
    weights and outputs of tables and heads; `stretches` when layers ran, and `saved` what was kept meanwhile. `reruns` are the
    visits that the model itself runs again in backward, `tables` those of embeddings that look at all rows of a batch, and
    `unseen` the lines of code in which glue writes with nobody told. `elsewhere`: numpy's own generator was drawn from meanwhile.
    """

    block_calls: list[str] = field(default_factory=list)
    flops: list[int] = field(default_factory=list)
    output_numel: list[int] = field(default_factory=list)
    saved_numel: list[int] = field(default_factory=list)
    param_users: dict[str, set[str]] = field(default_factory=dict)
    written_buffers: list[str] = field(default_factory=list)
    writes_in_place: bool = False
    draws_from_numpy: bool = False
    outputs: Any = None
    attention_calls: list[str] = field(default_factory=list)
    num_captured: dict[str, int] = field(default_factory=dict)
    layer_uses: LayerUses = field(default_factory=LayerUses)
    num_draws: list[int] = field(default_factory=list)
    feature_flow: FeatureFlow = field(default_factory=FeatureFlow)
    vocab_flow: VocabFlow = field(default_factory=lambda: VocabFlow(nn.Module(), {}))
    layer_ranges: LayerRangeRecorder = field(default_factory=lambda: LayerRangeRecorder(lambda: 0, lambda: 0))
    saved_storages: list[SavedStorage] = field(default_factory=list)
    user_checkpointed: list[str] = field(default_factory=list)
    table_uses: list[TableUse] = field(default_factory=list)
    untracked_write_lines: list[str] = field(default_factory=list)


def run_trial(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    on_block_call: Callable[[str], None],
    run_forward: Callable[[], Any],
    layers: Mapping[str, str] | None = None,
    count_draws: Callable[[], int] = lambda: 0,
) -> TrialFindings:
    """What one training forward of `module` shows; `call()` runs it on PROBE_BATCH samples, `enter` hears of each visit.

    The uses of `layers`, by name and role, are seen one by one; `drawn` counts the draws of the visit so far.

    Raises PlanError for a tensor that goes round the border of a block, and for gradients taken between blocks; what the
    forward itself raises passes through.
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
    """Give `module` fake CPU parameters and buffers, in place, ties kept: the shapes of everything, the storage of nothing.

    A parameter becomes `dtype_of` its first name; None leaves each its own dtype.
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


def depends_on_values(error: BaseException) -> bool:
    """Whether `error`, or what led to it, says that the forward needs what fake tensors lack: values, memory, a kernel."""
    if isinstance(error, NEEDS_VALUES) or any(phrase in str(error) for phrase in FAKE_TENSOR_LIMITS):
        return True
    before = error.__cause__ or error.__context__
    return before is not None and depends_on_values(before)


def _run_trial(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    enter: Callable[[str], None],
    call: Callable[[], Any],
    layers: Mapping[str, str],
    drawn: Callable[[], int],
    *,
    in_place: bool,
) -> TrialFindings:
    found, counter = TrialFindings(writes_in_place=in_place), FlopCounter()
    totals: list[int] = []

    def reach(visit: str) -> None:
        totals.append(counter.total_flops)
        found.block_calls.append(visit)
        found.feature_flow.begin_block_call(visit)
        enter(visit)

    drive = ForwardDriver(blocks, in_place=in_place)
    here = lambda: "" if drive.in_glue or not found.block_calls else found.block_calls[-1]  # noqa: E731  what a name would say twice
    stretches = LayerRangeRecorder(lambda: counter.total_flops, lambda: len(found.layer_uses.uses))
    inside = SavedActivations(here, lambda: stretches.clock)
    watched, before = _TrialObserver(drive, found), _buffer_versions(module)
    given = partial(_hear_inputs, (inside.exclude, watched.untracked_writes.add_block_inputs))
    seeing = [block.register_forward_pre_hook(given, with_kwargs=True) for block in blocks.values()]
    seeing += stretches.attach_hooks(module, layers)  # before the use is noted
    found.vocab_flow = followed = VocabFlow(module, layers)
    for name in layers:
        layer = module.get_submodule(name)
        seeing.append(layer.register_forward_pre_hook(partial(_enter_layer, followed, name)))
        seeing.append(layer.register_forward_hook(partial(_record_use, drive, found, drawn, name)))
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    tables = TableUseMode(dict(module.named_parameters()), here)
    enter("")
    try:
        flow = found.feature_flow.follow_forward(
            module, blocks, traced_layer_kinds(module), lambda: drive.in_glue
        )
        with counter, tables, watched, inside.recording(), followed, flow:
            outputs, closing, passed = drive.forward(reach, call)
            totals.append(counter.total_flops)
    finally:
        drive.detach()
        found.layer_uses.live_inputs.clear()
        for handle in seeing:
            handle.remove()
    found.outputs, found.table_uses, found.untracked_write_lines = (
        outputs,
        tables.uses,
        watched.untracked_writes.lines,
    )
    found.written_buffers = [
        name for name, now in _buffer_versions(module).items() if now != before.get(name)
    ]
    found.flops = [(end - start) // PROBE_BATCH for start, end in pairwise(totals)]
    found.output_numel = [
        sum(leaf.numel() for _, leaf in visit.outputs) // PROBE_BATCH for visit in passed.block_calls.values()
    ]
    inside.exclude([*module.parameters(), *module.buffers()])
    inside.exclude(leaf for visit in passed.block_calls.values() for _, leaf in visit.outputs)
    found.saved_numel = [numel // PROBE_BATCH for numel in inside.numel(found.block_calls)]
    found.layer_ranges, found.saved_storages = stretches, inside.saved_storages()
    found.num_captured = dict(Counter(passed.side_channels.values()))
    users = split_graph(passed, closing).users
    found.param_users = {name: set(users.get(key, ())) for key, name in names.items()}
    for tensor in tree_tensors(
        outputs
    ):  # a parameter among the outputs takes its gradient straight from the loss
        if id(tensor) in names:
            found.param_users[names[id(tensor)]].add(ROOT)
    return found


def param_block_calls(blocks: Sequence[str], users: set[str], block_calls: Sequence[str]) -> tuple[str, ...]:
    """The visits, in order, that may use a parameter: those of the `blocks` that hold it, and those among its `users`.

    ROOT comes last, when glue uses it, or when no visit does.
    """
    used = tuple(visit for visit in block_calls if block_of(visit) in blocks or visit in users)
    return (*used, ROOT) if ROOT in users or not used else used


class _TrialObserver(TorchFunctionMode):
    """Notes who attends, and refuses a gradient taken between blocks: the graph ends at the last border before it."""

    def __init__(self, drive: ForwardDriver, found: TrialFindings) -> None:
        super().__init__()
        self._drive, self._found = drive, found
        self.untracked_writes = UntrackedWrites()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (
            func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
            and self._drive.in_glue
        ):
            text = (
                f"the forward takes gradients itself ({func.__name__}) between blocks, where the graph is cut"
            )
            raise PlanError(text, fix=f"take them inside one block, or {LARGER_BLOCK_FIX}", location="model")
        if (
            not self._drive.in_glue
            and self._found.block_calls[-1:] != self._found.user_checkpointed[-1:]
            and in_user_checkpoint()
        ):
            self._found.user_checkpointed += self._found.block_calls[-1:]
        if func in ATTENTION_FUNCTIONS and not self._drive.in_glue:
            self._found.attention_calls.append(self._found.block_calls[-1])
            if func is F.scaled_dot_product_attention:
                self._found.layer_uses.head_widths.append(
                    (len(self._found.layer_uses.uses), args[0].shape[-1])
                )
        result = func(*args, **(kwargs or {}))
        if self._drive.in_glue:
            self.untracked_writes.check_call(func, args, kwargs or {}, result)
        return result


def _enter_layer(followed: VocabFlow, name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
    followed.enter_layer(name)


def _record_use(
    drive: ForwardDriver,
    found: TrialFindings,
    drawn: Callable[[], int],
    name: str,
    layer: nn.Module,
    args: tuple[Any, ...],
    output: Any,
) -> None:
    found.vocab_flow.leave_layer(name, output)
    inside = not drive.in_glue or drive.is_block(name)
    given = args[0] if args else None  # a table of positions may be called with a shape
    if inside and found.block_calls and isinstance(given, torch.Tensor) and isinstance(output, torch.Tensor):
        found.layer_uses.live_inputs.append(given)
        found.num_draws.append(drawn())
        found.layer_uses.uses.append(
            LayerUse(
                name, found.block_calls[-1], id(given), given.numel(), given.requires_grad, output.numel()
            )
        )


def _hear_inputs(
    hear: Sequence[Callable[[list[torch.Tensor]], None]], block: nn.Module, args: Any, kwargs: Any
) -> None:
    found = tree_tensors((args, kwargs))
    for each in hear:
        each(found)


def _buffer_versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """What changes when a buffer is written or replaced, by name."""
    return {name: (id(buffer), buffer._version) for name, buffer in module.named_buffers()}
