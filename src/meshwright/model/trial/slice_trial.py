"""Whether a model runs on slices: what was proposed is tried on fake tensors, as the first of two ranks would hold it.

Every layer gets weights of the size of a slice, modules the numbers of it, blocks their portions of what they are given. What
does not run is given up, block after block, and said: the layers of those blocks stay whole.

A forward that writes its number of heads down may run all the same, and make other heads of the features that it finds. So
features are followed here too, and the units of a slice must be those of the whole, as many as the rank has.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from logging import getLogger
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.model.tensor_parallel.feature_flow import Flow, kinds_of
from meshwright.model.tensor_parallel.layer_pairs import common_side, lies_transposed, part_of
from meshwright.model.tensor_parallel.layer_roles import NUMBERED
from meshwright.model.tensor_parallel.pair_search import ATTEMPTS, groups
from meshwright.model.tensor_parallel.slice_plan import Proposal, local_numbers, portioned
from meshwright.model.trial.trial import depends_on_values
from meshwright.plan.model_spec.dim_split import Cut
from meshwright.plan.model_spec.layer_calls import Number, Portion

RANKS = 2
"""The smallest number of ranks: what runs on the larger half runs on smaller slices."""

_Fault = tuple[str, str, BaseException | None]  # the block that does not run, how, and the error if there is one
Make = Callable[[], nn.Module]
Ready = Callable[[nn.Module], AbstractContextManager[Callable[[], object]]]
Propose = Callable[[frozenset[str]], Proposal]


def tried(
    propose: Propose, make: Make, ready: Ready, blocks: Sequence[str]
) -> tuple[Proposal, tuple[Number, ...], tuple[str, ...]]:
    """The proposal that runs, the numbers with which it does, and what was given up, in words.

    `propose` makes a proposal without some layers, `make` a module on fake tensors, and `ready` what runs its forward,
    once all is ready for that.
    """
    without: frozenset[str] = frozenset()
    notes: list[str] = []
    while True:
        proposal = propose(without)
        if not proposal.roles:
            return proposal, (), tuple(notes)
        faults: list[_Fault] = []
        for attempt in range(ATTEMPTS):
            module = make()
            numbers = proposal.numbers(module, attempt)
            fault = _fault(module, proposal, numbers, ready, blocks)
            if fault is None:
                return proposal, numbers, tuple(notes)
            faults.append(fault)
        block, why, error = faults[0]
        given_up = frozenset(_of_block(proposal, block))
        if (error is not None and depends_on_values(error)) or not given_up:
            notes.append(f"that layers run on slices could not be tried: {why}")
            return proposal, proposal.numbers(make(), 0), tuple(notes)
        without |= given_up
        pattern = NUMBERED.sub("*", block)
        notes.append(f"layers of {pattern} stay whole, for it does not run on slices: {why}")


def _fault(
    module: nn.Module, proposal: Proposal, numbers: Sequence[Number], ready: Ready, blocks: Sequence[str]
) -> _Fault | None:
    """What does not run; None if all does."""
    flow, reached = Flow(), [""]
    cut_down(module, proposal)
    for name in dict.fromkeys(number.module for number in numbers):
        holder = module.get_submodule(name)
        vars(holder).update(local_numbers(holder, [each for each in numbers if each.module == name], 0, RANKS))
    for portion in proposal.portions:
        block = module.get_submodule(portion.block)
        block.register_forward_pre_hook(partial(_portion, portion), with_kwargs=True)
    held, depth = {name: module.get_submodule(name) for name in blocks}, [0]

    def enter(name: str, block: nn.Module, args: tuple[Any, ...]) -> None:
        depth[0] += 1
        reached.append(name)
        flow.begin(name)

    def leave(block: nn.Module, args: tuple[Any, ...], out: object) -> None:
        depth[0] -= 1

    try:
        following = flow.following(module, held, kinds_of(module), lambda: bool(blocks) and not depth[0])
        with quiet(), ready(module) as forward, following:  # the flow meets dropout before its numbers are drawn
            for name, block in held.items():  # inside of what the flow notes where a block begins and ends
                block.register_forward_pre_hook(partial(enter, name))
                block.register_forward_hook(leave, prepend=True)
            forward()
    except Exception as error:  # whatever it is, it is told
        return reached[-1], f"{type(error).__name__}: {_short(error)}", error
    return _otherwise(flow, proposal)


def _otherwise(flow: Flow, proposal: Proposal) -> _Fault | None:
    """A layer of which a slice has other units than the whole says."""
    roles = {node.name: proposal.roles.get(node.name, "replicated") for node in flow.nodes if node.kind == "linear"}
    shown = {}
    for group in groups(flow, roles):
        shown |= {node.name: cut for node, cut in (*group.sources.items(), *group.rows.items())}
    for node in flow.nodes:
        whole, mine = proposal.cuts.get(node.name), shown.get(node.name)
        if whole is None or node.kind == "argument":
            continue
        wanted = _slice_of(whole)
        if mine != wanted and (mine is not None or wanted.most > 1):
            units = "none" if mine is None else str(mine.most)
            return node.visit, f"of {wanted.most} heads or features of {node.name} in a slice it makes {units}", None
    return None


def _slice_of(cut: Cut) -> Cut:
    """How the first of the ranks' slices of what `cut` divides is divided itself."""
    first, end = cut.units_of(0, RANKS)
    sections = tuple(part.size(0, RANKS) for part in cut.by_section)
    if cut.units >= RANKS or not cut.heads:
        units, heads, own = end - first, (end - first) * (cut.heads // cut.units), cut.own
    else:
        units, heads = 1, end - first
        own = tuple(each // cut.heads * cut.units * heads for each in cut.own)
    if units == 1:  # where one section ends and another begins does not show
        sections, own = (sum(sections),), own[:1]
    return replace(cut, units=units, sections=sections, heads=0 if heads == units else heads, own=() if heads == units else own)


@contextmanager
def quiet() -> Iterator[None]:
    """Meanwhile torch does not write on the terminal that a fake operation failed: here that is an answer."""
    log = getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def cut_down(module: nn.Module, proposal: Proposal) -> None:
    """Leave the layers of `module`, in place, the shapes of a slice, and have them compute with that."""
    done: dict[int, nn.Parameter] = {}
    for name, role in proposal.roles.items():
        layer = module.get_submodule(name)
        for leaf, parameter in list(layer._parameters.items()):
            if parameter is None or name not in proposal.cuts:
                continue
            cuts = part_of(layer, parameter, role, proposal.cuts[name])
            shape = tuple(parameter.shape)
            for cut in cuts:
                shape = cut.local(shape, 0, RANKS) if cut.side == common_side(role) else shape
            if id(parameter) not in done:
                done[id(parameter)] = nn.Parameter(parameter.new_empty(shape), parameter.requires_grad)
            layer._parameters[leaf] = done[id(parameter)]
        if role in ("columns", "rows"):
            layer.forward = partial(_product, layer)


def _product(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = layer.get_parameter("weight")
    return F.linear(x, weight.t() if lies_transposed(layer) else weight, layer._parameters.get("bias"))


def _portion(portion: Portion, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return portioned(portion, 0, RANKS, args, kwargs)


def _of_block(proposal: Proposal, block: str) -> Iterator[str]:
    """The layers of all blocks like `block`: those with heads, or all where none have."""
    pattern = NUMBERED.sub("*", block)
    inside = [name for name in proposal.roles if NUMBERED.sub("*", name).startswith(pattern + ".") or name == block]
    heads = [name for name in inside if name in proposal.cuts and _counts(proposal.cuts[name])]
    return iter(heads or inside)


def _counts(cut: Cut) -> bool:
    return any(length != cut.units for length in cut.sections)


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:160] if str(error) else ""
