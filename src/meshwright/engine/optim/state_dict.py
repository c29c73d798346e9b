"""What a rank saves, and takes up again, by logical name: whole where every rank holds it, else its share of it.

    model/layers.0.weight              a whole tensor, or elements 4096 to 8192 of it
    optimizer/exp_avg/layers.0.weight  a moment, likewise
    buffer/..., guard/..., noise/...   the same on every rank

A share is a stretch of the flattened logical tensor, so a checkpoint does not depend on how many ranks there were, and every
rank of another plan finds in it what it holds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from meshwright.engine.optim.optimizers import Numbers, restore_state, state_tensors
from meshwright.engine.optim.rule import Rule, keys_by_block
from meshwright.engine.params.flat_params import Store
from meshwright.engine.runtime.state import Subject
from meshwright.model.tensors.lazy_tensors import OnDemand, shape_of
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.dim_split import Span
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.sharding.flat_param import BLOCK, Piece


@dataclass(frozen=True)
class Share:
    """The elements from `begin` on of a flattened tensor of `shape`; `values` is flat. One of shape () is all of a number.

    With `spans`, it is a part of what those leave of the tensor: of a slice.
    """

    values: torch.Tensor
    begin: int
    shape: tuple[int, ...]
    spans: tuple[Span, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """That of the elements."""
        return self.values.dtype


Saved = torch.Tensor | Share


def model_tensors(subject: Subject, store: Store) -> dict[str, Saved]:
    """The parameters and persistent buffers, as this rank holds them."""
    found: dict[str, Saved] = {}
    owned = store.owners.steps
    for weight in subject.anatomy.weights:
        name, piece, spans = weight.name, store.piece(weight.name), store.slices.spans(weight.name)
        if name in store.owners.names:
            found |= {f"model/{name}": _all_of(owned[name])} if name in owned else {}
        elif piece is not None and name in store.told:  # beside slices, copies of a shard may end elsewhere
            found[f"model/{name}"] = Share(store.stored(piece), piece.begin, weight.shape, spans)
        elif not store.holds(name):
            value = store.masters.value(name, subject.parameters[name])
            found[f"model/{name}"] = Share(value.reshape(-1), 0, weight.shape, spans) if spans else value
    return found | {f"buffer/{name}": buffer for name, buffer in persistent_buffers(subject.module)}


def of_part(saved: Mapping[str, Saved], subject: Subject) -> dict[str, Saved]:
    """`saved`; of a rank that runs a part of the model, what belongs to that: others hold the rest, and write it."""
    if not subject.elsewhere:
        return dict(saved)
    own = {block_of(visit) for visit in subject.anatomy.visits}
    foreign = tuple(f"buffer/{block}." for block in subject.blocks if block not in own)
    found: dict[str, Saved] = {}
    for name, value in saved.items():
        kind, _, entry = name.partition("/")
        alone = kind in ("model", "buffer") or (kind == "optimizer" and not entry.startswith("group."))
        if not name.startswith(foreign):
            found[name] = _all_of(value) if alone and isinstance(value, torch.Tensor) else value
    return found


def moments(optimizers: Sequence[torch.optim.Optimizer], subject: Subject, store: Store, numbers: Numbers) -> dict[str, Saved]:
    """The state of the optimizers, as this rank holds it, and the `numbers` of their groups that have changed."""
    found: dict[str, Saved] = {}
    shapes = {weight.name: weight.shape for weight in subject.anatomy.weights}
    owned, by_block = store.owned(), _by_block(optimizers)
    for entry, value in state_tensors(optimizers, owned, numbers).items():
        key, _, name = entry.partition("/")
        piece, spans = store.piece(name), store.slices.spans(name)
        if piece is not None and name not in store.told:
            continue
        if name in store.owners.names:
            found[f"optimizer/{entry}"] = _all_of(value)
        elif spans and not entry.startswith("group.") and value.ndim:
            found[f"optimizer/{entry}"] = _share(entry, value, piece, owned[name], shapes[name], spans)
        elif piece is None or entry.startswith("group."):
            found[f"optimizer/{entry}"] = value
        elif key in by_block[id(owned[name])]:
            num_blocks = -(-subject.parameters[name].numel() // BLOCK)
            found[f"optimizer/{entry}"] = Share(value, piece.begin // BLOCK, (num_blocks,))
        else:
            found[f"optimizer/{entry}"] = _share(entry, value, piece, owned[name], shapes[name])
    return found


def restore_model(subject: Subject, store: Store, saved: Mapping[str, torch.Tensor]) -> dict[str, torch.dtype]:
    """Take up the parameters and buffers of `saved`, whole tensors by full name, each cast to its dtypes here.

    Those of which nothing is kept are not read. Returns the dtypes that the others were saved in, by logical name.
    """
    dtypes: dict[str, torch.dtype] = {}
    with torch.no_grad():
        for name, parameter in subject.parameters.items():
            if store.holds(name) and not store.keeps(name):
                continue
            whole = saved[f"model/{name}"] if name in store.owners.steps else None
            mine = store.slices.read(name, saved, f"model/{name}") if whole is None else store.slices.mine(name, whole)
            dtypes[name] = mine.dtype
            if store.holds(name):
                store.take(name, mine)
            else:
                store.masters.take(name, parameter, mine)
            if whole is not None:
                store.owners.take(name, whole)
        for name, buffer in persistent_buffers(subject.module):
            buffer.copy_(saved[f"buffer/{name}"])
    return dtypes


def restore_moments(
    optimizers: Sequence[torch.optim.Optimizer],
    subject: Subject,
    store: Store,
    saved: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Take up the state of the optimizers from `saved`, whole tensors by name, as far as this rank steps what it belongs to.

    A moment that was saved in the dtype of its weight (`dtypes`, see `restore_model`) gets that of what is stepped here. One
    tensor at a time is read. Raises PlanError for state of a parameter that is not trained.
    """

    owned, by_block = store.owned(), _by_block(optimizers)
    shapes = {weight.name: weight.shape for weight in subject.anatomy.weights}
    alike = {id(p) for each in optimizers if _follows(each) for group in each.param_groups for p in group["params"]}

    def part(entry: str) -> torch.Tensor:
        key, _, name = entry.partition("/")
        piece, counts = store.piece(name), key.partition(":")[0] == "step" or name not in owned
        cut = not counts and name not in store.owners.steps and bool(store.slices.spans(name))
        sliced = cut and shape_of(saved, entry) == shapes[name]
        tensor = store.slices.read(name, saved, entry) if sliced else saved[entry]
        by_element = sliced or (not counts and tensor.shape == shapes[name])
        if by_element and id(owned[name]) in alike and tensor.dtype == dtypes.get(name):
            tensor = tensor.to(owned[name].dtype)
        if name not in owned or name in store.owners.steps or piece is None:  # what is not trained here is refused below
            return tensor
        if key in by_block[id(owned[name])]:
            return tensor[piece.begin // BLOCK : -(-piece.end // BLOCK)]
        return tensor.reshape(-1)[piece.begin : piece.end].view(owned[name].shape) if by_element else tensor

    names = ((entry, entry.partition("/")[2]) for entry in saved)
    mine = [entry for entry, name in names if name in owned or name not in {*subject.trainable, *subject.elsewhere}]
    restore_state(optimizers, owned, OnDemand(mine, part))


def _share(
    entry: str,
    value: torch.Tensor,
    piece: Piece | None,
    stepped: torch.Tensor,
    shape: tuple[int, ...],
    spans: tuple[Span, ...] = (),
) -> Share:
    """State of a part of a weight of `shape`, which the optimizer sees as `stepped`: by element, or a number, or all of anything.

    The part is a piece, or a slice (`spans`), or a piece of one. Raises PlanError for what belongs to a part and is neither.
    """
    begin = 0 if piece is None else piece.begin
    if value.ndim and value.shape == stepped.shape:
        return Share(value.reshape(-1), begin, shape, spans)
    if value.ndim and (spans or stepped.numel() < prod(shape)):
        which = f"elements {begin} to {begin + stepped.numel()} of a {'slice of a ' if spans else ''}weight"
        text = f"the optimizer keeps '{entry}' of shape {list(value.shape)} for {which}"
        fix = "keep one number, or one per element; or have no weight cut: optimizer.name = 'adafactor' cuts none"
        raise PlanError(text, fix=fix, where="optimizer")
    return _all_of(value)


def _all_of(value: torch.Tensor) -> Share:
    """All of `value`, which not every rank has."""
    return Share(value.detach().reshape(-1), 0, tuple(value.shape))


def _follows(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its moments have the dtype of what it steps."""
    return not isinstance(optimizer, Rule) or optimizer.keeps is None


def _by_block(optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, frozenset[str]]:
    """By the id of each parameter, the keys of its state that hold one element per block."""
    return {
        id(parameter): keys_by_block(optimizer)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that belong to the model's state, by name: what a state_dict holds, whatever hooks make of it."""
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer
