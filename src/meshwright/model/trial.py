"""One forward on fake tensors: what cannot be read off the module tree is learnt from a run that computes nothing.

The trial finds the order in which blocks are visited, what each hands on, the operations it costs, whether a block is
called twice, whether glue uses parameters directly, whether the model writes in place, and where it draws random
numbers. It runs the model's own forward, on a batch of `PROBE_BATCH` samples (a prime, so that a batch dim is told
apart from others), under FakeTensorMode; a model whose forward depends on values is run once on real ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from meshwright.core.anatomy import ROOT
from meshwright.core.errors import PlanError
from meshwright.model.drive import Drive, Pass, Visit
from meshwright.model.values import tensors

PROBE_BATCH = 3


@dataclass
class Findings:
    """What one forward showed, per visit in order; `direct` are names of parameters that glue uses without their block."""

    visits: list[str] = field(default_factory=list)
    flops: list[int] = field(default_factory=list)
    stream_numel: list[int] = field(default_factory=list)
    direct: set[str] = field(default_factory=set)
    in_place: bool = False


def observe(
    module: nn.Module, blocks: Mapping[str, nn.Module], enter: Callable[[str], None], call: Callable[[], Any]
) -> Findings:
    """What one training forward of `module` shows; `call()` runs it on PROBE_BATCH samples, `enter` hears of each visit.

    Raises PlanError when a tensor leaves a block behind its outputs, or when the forward fails.
    """
    try:
        return _observe(module, blocks, enter, call, in_place=False)
    except RuntimeError as error:
        if "leaf Variable" not in str(error):
            raise
        return _observe(module, blocks, enter, call, in_place=True)


def fake_copy(module: nn.Module, mode: FakeTensorMode) -> None:
    """Give `module` fake CPU parameters and buffers, in place, ties kept: the shapes of everything, the storage of nothing."""
    fakes: dict[int, nn.Parameter] = {}
    with mode:
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if id(parameter) not in fakes:
                    blank = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                    fakes[id(parameter)] = nn.Parameter(blank, requires_grad=parameter.requires_grad)
                setattr(owner, name, fakes[id(parameter)])
            for name, buffer in owner.named_buffers(recurse=False):
                setattr(owner, name, mode.from_tensor(buffer))


def depends_on_values(error: BaseException) -> bool:
    """Whether `error` says that the forward looked at the values of a fake tensor."""
    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))


def _observe(
    module: nn.Module, blocks: Mapping[str, nn.Module], enter: Callable[[str], None], call: Callable[[], Any], *, in_place: bool
) -> Findings:
    found, counter = Findings(in_place=in_place), FlopCounterMode(display=False)
    totals: list[int] = []

    def reach(visit: str) -> None:
        totals.append(counter.get_total_flops())
        found.visits.append(visit)
        enter(visit)

    drive = Drive(blocks, in_place=in_place)
    try:
        with counter:
            _, closing, seen = drive.forward(reach, call)
            totals.append(counter.get_total_flops())
    finally:
        drive.detach()
    found.flops = [(end - start) // PROBE_BATCH for start, end in pairwise(totals)]
    found.stream_numel = [sum(t.numel() for t, _ in visit.outputs) // PROBE_BATCH for visit in seen.visits.values()]
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found.direct = _direct_uses(seen, closing, names)
    return found


def _direct_uses(seen: Pass, closing: Visit, names: Mapping[int, str]) -> set[str]:
    """Names of the parameters that glue reaches without passing through a block; refuses paths that pass through one."""
    inside: dict[Any, str] = {}
    for visit in seen.visits.values():
        for node in _nodes(tensor for tensor, _ in visit.outputs):
            if not _is_leaf(node):
                inside[node] = visit.name
    roots = [tensor for visit in (*seen.visits.values(), closing) for tensor, _ in visit.glue]
    direct = set()
    for node in _nodes(roots):
        if node in inside:
            text = f"a tensor left the block '{inside[node]}' behind its outputs and came back in the glue between blocks"
            raise PlanError(
                text,
                fix="return that tensor among the outputs of its block, or declare a larger block that holds both",
                where="model",
            )
        if _is_leaf(node) and id(node.variable) in names:
            direct.add(names[id(node.variable)])
    return direct


def _nodes(roots: Any) -> set[Any]:
    todo = [root.grad_fn for root in tensors(list(roots)) if root.grad_fn is not None]
    known = set(todo)
    while todo:
        following = [node for node, _ in todo.pop().next_functions if node is not None and node not in known]
        known.update(following)
        todo.extend(following)
    return known


def _is_leaf(node: Any) -> bool:
    return node.name() == "torch::autograd::AccumulateGrad"


def visits_of(blocks: Sequence[str], direct: bool, found: Findings) -> tuple[str, ...]:
    """The visits that use a parameter held by `blocks`, in forward order; ROOT when glue uses it, or no visited block does."""
    used = tuple(visit for visit in found.visits if visit.split("#")[0] in blocks)
    return (*used, ROOT) if direct or not used else used
