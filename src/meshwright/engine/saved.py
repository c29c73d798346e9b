"""What a rank saves, and takes up again, by logical name: whole where every rank holds it, else its share of it.

    model/layers.0.weight              a whole tensor, or elements 4096 to 8192 of it
    optimizer/exp_avg/layers.0.weight  a moment, likewise
    buffer/..., guard/..., noise/...   the same on every rank

A share is a stretch of the flattened logical tensor, so a checkpoint does not depend on how many ranks there were, and every
rank of another plan finds in it what it holds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.core.arena import Piece
from meshwright.engine.optimizers import Numbers, restore_state, state_tensors
from meshwright.engine.state import Subject
from meshwright.engine.store import Store


@dataclass(frozen=True)
class Share:
    """The elements from `begin` on of a flattened tensor of `shape`; `values` is flat. One of shape () is all of a number."""

    values: torch.Tensor
    begin: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """That of the elements."""
        return self.values.dtype


Saved = torch.Tensor | Share


def model_tensors(subject: Subject, store: Store) -> dict[str, Saved]:
    """The parameters and persistent buffers, as this rank holds them."""
    found: dict[str, Saved] = {}
    for name, parameter in subject.parameters.items():
        piece = store.piece(name)
        if piece is not None:
            found[f"model/{name}"] = Share(store.stored(piece), piece.begin, tuple(parameter.shape))
        elif not store.holds(name):
            found[f"model/{name}"] = parameter.detach()
    return found | {f"buffer/{name}": buffer for name, buffer in _persistent_buffers(subject.module)}


def moments(optimizers: Sequence[torch.optim.Optimizer], subject: Subject, store: Store, numbers: Numbers) -> dict[str, Saved]:
    """The state of the optimizers, as this rank holds it, and the `numbers` of their groups that have changed."""
    found: dict[str, Saved] = {}
    for entry, value in state_tensors(optimizers, store.owned(), numbers).items():
        name = entry.partition("/")[2]
        piece = store.piece(name)
        whole = piece is None or entry.startswith("group.")
        found[f"optimizer/{entry}"] = value if whole else _share(value, piece, tuple(subject.parameters[name].shape))
    return found


def restore_model(subject: Subject, store: Store, saved: Mapping[str, torch.Tensor]) -> None:
    """Take up the parameters and buffers of `saved`, whole tensors by full name."""
    with torch.no_grad():
        for name, parameter in subject.parameters.items():
            if store.holds(name):
                store.take(name, saved[f"model/{name}"])
            else:
                parameter.copy_(saved[f"model/{name}"])
        for name, buffer in _persistent_buffers(subject.module):
            buffer.copy_(saved[f"buffer/{name}"])


def restore_moments(
    optimizers: Sequence[torch.optim.Optimizer], subject: Subject, store: Store, saved: Mapping[str, torch.Tensor]
) -> None:
    """Take up the state of the optimizers from `saved`, whole tensors by name, as far as this rank steps what it belongs to.

    Raises PlanError for state of a parameter that is not trained.
    """
    mine: dict[str, torch.Tensor] = {}
    for entry, tensor in saved.items():
        name = entry.partition("/")[2]
        piece = store.piece(name)
        if piece is not None and not entry.startswith("step") and tensor.shape == subject.parameters[name].shape:
            mine[entry] = tensor.reshape(-1)[piece.begin : piece.end]
        elif piece is not None or not store.holds(name):
            mine[entry] = tensor
    restore_state(optimizers, store.owned(), mine)


def _share(value: torch.Tensor, piece: Piece, shape: tuple[int, ...]) -> Share:
    if value.ndim and value.numel() == piece.numel:
        return Share(value.reshape(-1), piece.begin, shape)
    return Share(value.reshape(-1), 0, tuple(value.shape))


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that belong to the model's state, by name: what a state_dict holds, whatever hooks make of it."""
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer
