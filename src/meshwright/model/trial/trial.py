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

from meshwright.model.blocks.batch_coupling import Looked, Tables
from meshwright.model.blocks.driver import LARGER, Drive
from meshwright.model.blocks.graph_check import pieces
from meshwright.model.blocks.inplace_writes import Behind
from meshwright.model.blocks.saved_activations import Inside
from meshwright.model.blocks.user_checkpointing import checkpointed
from meshwright.model.tensor_parallel.feature_flow import Flow, kinds_of
from meshwright.model.tensor_parallel.layer_pairs import Seen, Use
from meshwright.model.tensor_parallel.vocab_split import Followed
from meshwright.model.tensors.fake_cache import forget_fakes
from meshwright.model.tensors.pytree import tensors
from meshwright.model.trial.layer_ranges import Saved, Stretches
from meshwright.model.trial.op_counter import Flops
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import ROOT, block_of

PROBE_BATCH = 3
ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
# What torch says of fake tensors elsewhere; the last is the fake kernel of grouped_mm, stricter than the real one.
LACKS = ("tensor subclass", "not allocated", "fake impl", "Expected inputs of BF16 type")


@dataclass
class Findings:
    """What one forward showed, per visit in order.

    `users` are, per parameter by name, the visits that use it (ROOT for glue); `stateful` the buffers that are written;
    `outputs` is what it returned; `attends` the visits that call torch's attention; `captured` how many tensors left blocks
    by each side channel; `drawn`, for each use of a layer, the draws of its visit before it; `followed` what became of the
    weights and outputs of tables and heads; `stretches` when layers ran, and `saved` what was kept meanwhile. `reruns` are the
    visits that the model itself runs again in backward, `tables` those of embeddings that look at all rows of a batch, and
    `unseen` the lines of code in which glue writes with nobody told. `elsewhere`: numpy's own generator was drawn from meanwhile.
    """

    visits: list[str] = field(default_factory=list)
    flops: list[int] = field(default_factory=list)
    stream_numel: list[int] = field(default_factory=list)
    inside_numel: list[int] = field(default_factory=list)
    users: dict[str, set[str]] = field(default_factory=dict)
    stateful: list[str] = field(default_factory=list)
    in_place: bool = False
    elsewhere: bool = False
    outputs: Any = None
    attends: list[str] = field(default_factory=list)
    captured: dict[str, int] = field(default_factory=dict)
    seen: Seen = field(default_factory=Seen)
    drawn: list[int] = field(default_factory=list)
    flow: Flow = field(default_factory=Flow)
    followed: Followed = field(default_factory=lambda: Followed(nn.Module(), {}))
    stretches: Stretches = field(default_factory=lambda: Stretches(lambda: 0, lambda: 0))
    saved: list[Saved] = field(default_factory=list)
    reruns: list[str] = field(default_factory=list)
    tables: list[Looked] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)


def observe(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    enter: Callable[[str], None],
    call: Callable[[], Any],
    layers: Mapping[str, str] | None = None,
    drawn: Callable[[], int] = lambda: 0,
) -> Findings:
    """What one training forward of `module` shows; `call()` runs it on PROBE_BATCH samples, `enter` hears of each visit.

    The uses of `layers`, by name and role, are seen one by one; `drawn` counts the draws of the visit so far.

    Raises PlanError for a tensor that goes round the border of a block, and for gradients taken between blocks; what the
    forward itself raises passes through.
    """
    try:
        return _observe(module, blocks, enter, call, layers or {}, drawn, in_place=False)
    except RuntimeError as error:
        if "leaf Variable" not in str(error):
            raise
        return _observe(module, blocks, enter, call, layers or {}, drawn, in_place=True)


def fake_copy(module: nn.Module, mode: FakeTensorMode, dtype_of: Callable[[str], torch.dtype] | None = None) -> None:
    """Give `module` fake CPU parameters and buffers, in place, ties kept: the shapes of everything, the storage of nothing.

    A parameter becomes `dtype_of` its first name; None leaves each its own dtype.
    """
    forget_fakes(module)
    with mode:
        fakes = {
            id(parameter): _blank(parameter, parameter.dtype if dtype_of is None else dtype_of(name))
            for name, parameter in module.named_parameters()
        }
        buffers = {id(buffer): mode.from_tensor(buffer) for buffer in module.buffers()}
    for owner in module.modules():
        owner._parameters.update({name: fakes[id(p)] for name, p in owner._parameters.items() if p is not None})
        owner._buffers.update({name: buffers[id(b)] for name, b in owner._buffers.items() if b is not None})


def _blank(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="cpu"), parameter.requires_grad)


def depends_on_values(error: BaseException) -> bool:
    """Whether `error`, or what led to it, says that the forward needs what fake tensors lack: values, memory, a kernel."""
    if isinstance(error, NEEDS_VALUES) or any(phrase in str(error) for phrase in LACKS):
        return True
    before = error.__cause__ or error.__context__
    return before is not None and depends_on_values(before)


def _observe(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    enter: Callable[[str], None],
    call: Callable[[], Any],
    layers: Mapping[str, str],
    drawn: Callable[[], int],
    *,
    in_place: bool,
) -> Findings:
    found, counter = Findings(in_place=in_place), Flops()
    totals: list[int] = []

    def reach(visit: str) -> None:
        totals.append(counter.total)
        found.visits.append(visit)
        found.flow.begin(visit)
        enter(visit)

    drive = Drive(blocks, in_place=in_place)
    here = lambda: "" if drive.in_glue or not found.visits else found.visits[-1]  # noqa: E731  what a name would say twice
    stretches = Stretches(lambda: counter.total, lambda: len(found.seen.uses))
    inside = Inside(here, lambda: stretches.now)
    watched, before = _Watched(drive, found), _versions(module)
    given = partial(_given, (inside.leave_out, watched.behind.give))
    seeing = [block.register_forward_pre_hook(given, with_kwargs=True) for block in blocks.values()]
    seeing += stretches.watch(module, layers)  # before the use is noted
    found.followed = followed = Followed(module, layers)
    for name in layers:
        layer = module.get_submodule(name)
        seeing.append(layer.register_forward_pre_hook(partial(_entered, followed, name)))
        seeing.append(layer.register_forward_hook(partial(_used, drive, found, drawn, name)))
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    tables = Tables(dict(module.named_parameters()), here)
    enter("")
    try:
        flow = found.flow.following(module, blocks, kinds_of(module), lambda: drive.in_glue)
        with counter, tables, watched, inside.watching(), followed, flow:
            outputs, closing, passed = drive.forward(reach, call)
            totals.append(counter.total)
    finally:
        drive.detach()
        found.seen.alive.clear()
        for handle in seeing:
            handle.remove()
    found.outputs, found.tables, found.unseen = outputs, tables.found, watched.behind.lines
    found.stateful = [name for name, now in _versions(module).items() if now != before.get(name)]
    found.flops = [(end - start) // PROBE_BATCH for start, end in pairwise(totals)]
    found.stream_numel = [sum(leaf.numel() for _, leaf in visit.outputs) // PROBE_BATCH for visit in passed.visits.values()]
    inside.leave_out([*module.parameters(), *module.buffers()])
    inside.leave_out(leaf for visit in passed.visits.values() for _, leaf in visit.outputs)
    found.inside_numel = [numel // PROBE_BATCH for numel in inside.numel(found.visits)]
    found.stretches, found.saved = stretches, inside.saved()
    found.captured = dict(Counter(passed.side.values()))
    users = pieces(passed, closing).users
    found.users = {name: set(users.get(key, ())) for key, name in names.items()}
    for tensor in tensors(outputs):  # a parameter among the outputs takes its gradient straight from the loss
        if id(tensor) in names:
            found.users[names[id(tensor)]].add(ROOT)
    return found


def visits_of(blocks: Sequence[str], users: set[str], visits: Sequence[str]) -> tuple[str, ...]:
    """The visits, in order, that may use a parameter: those of the `blocks` that hold it, and those among its `users`.

    ROOT comes last, when glue uses it, or when no visit does.
    """
    used = tuple(visit for visit in visits if block_of(visit) in blocks or visit in users)
    return (*used, ROOT) if ROOT in users or not used else used


class _Watched(TorchFunctionMode):
    """Notes who attends, and refuses a gradient taken between blocks: the graph ends at the last border before it."""

    def __init__(self, drive: Drive, found: Findings) -> None:
        super().__init__()
        self._drive, self._found = drive, found
        self.behind = Behind()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward) and self._drive.in_glue:
            text = f"the forward takes gradients itself ({func.__name__}) between blocks, where the graph is cut"
            raise PlanError(text, fix=f"take them inside one block, or {LARGER}", where="model")
        if not self._drive.in_glue and self._found.visits[-1:] != self._found.reruns[-1:] and checkpointed():
            self._found.reruns += self._found.visits[-1:]
        if func in ATTENTION and not self._drive.in_glue:
            self._found.attends.append(self._found.visits[-1])
            if func is F.scaled_dot_product_attention:
                self._found.seen.heads.append((len(self._found.seen.uses), args[0].shape[-1]))
        result = func(*args, **(kwargs or {}))
        if self._drive.in_glue:
            self.behind.watch(func, args, kwargs or {}, result)
        return result


def _entered(followed: Followed, name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
    followed.enter(name)


def _used(
    drive: Drive,
    found: Findings,
    drawn: Callable[[], int],
    name: str,
    layer: nn.Module,
    args: tuple[Any, ...],
    output: Any,
) -> None:
    found.followed.leave(name, output)
    inside = not drive.in_glue or drive.is_block(name)
    given = args[0] if args else None  # a table of positions may be called with a shape
    if inside and found.visits and isinstance(given, torch.Tensor) and isinstance(output, torch.Tensor):
        found.seen.alive.append(given)
        found.drawn.append(drawn())
        found.seen.uses.append(Use(name, found.visits[-1], id(given), given.numel(), given.requires_grad, output.numel()))


def _given(hear: Sequence[Callable[[list[torch.Tensor]], None]], block: nn.Module, args: Any, kwargs: Any) -> None:
    found = tensors((args, kwargs))
    for each in hear:
        each(found)


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """What changes when a buffer is written or replaced, by name."""
    return {name: (id(buffer), buffer._version) for name, buffer in module.named_buffers()}
