"""The memory of what is cut into shards: per bundle the shard that this rank steps, and the whole weights while they are needed.

    stored whole   whole  [ w0 | w1 | w2 | pad ]     one per bundle, for good; the shard is a stretch of it
    stored flat    shard  [ w1 | w2 ]                its own memory; the whole lies in a buffer that bundles take in turn

A parameter of the module is a view of its place in the whole, for good: a bundle always comes back to the same buffer, so what
autograd has saved of a weight is right again once UNSHARD has filled it, and no storage is ever exchanged under a graph.
The optimizer steps *pieces*: views of the shard in the dtype `master`, one parameter per weight that has elements here.
Gradients are packed into the places of the arena, in a buffer; this rank's sum of its shard is `gradient`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from meshwright.comm.group import Group
from meshwright.core.anatomy import ROOT
from meshwright.core.arena import Arena, Piece
from meshwright.core.layout import FLAT, Place
from meshwright.core.plan import Plan
from meshwright.core.program import Action
from meshwright.core.steps import ROLE
from meshwright.engine.state import State


@dataclass
class Held:
    """One arena in this rank's memory. Flat tensors: `whole` has arena.numel elements, `shard` and `gradient` arena.shard."""

    arena: Arena
    group: Group
    shard: torch.Tensor
    whole: torch.Tensor
    views: dict[str, torch.Tensor]
    visits: tuple[str, ...]
    flat: bool = False
    gradient: torch.Tensor | None = None
    steps: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What lies in the shard."""
        return self.arena.pieces(self.group.index)

    @property
    def mine(self) -> slice:
        """Where the shard lies in a whole."""
        return slice(self.group.index * self.arena.shard, (self.group.index + 1) * self.arena.shard)


class Store:
    """The arenas of one rank, filled from the values that the model's parameters have."""

    def __init__(self, plan: Plan, state: State) -> None:
        self._plan, self._state = plan, state
        precision = plan.job.precision
        self._dtype, self._wire = getattr(torch, precision.parameters), getattr(torch, precision.reduce)
        self._like = next(iter(state.subject.parameters.values()))  # buffers are of its kind: on its device, fake where it is
        self._buffers: dict[str, torch.Tensor] = {}
        self.arenas: dict[str, Held] = {}
        self._of: dict[str, Held] = {}  # by weight
        self.squared = torch.zeros(1, dtype=torch.float64)  # the norm's, of this rank's shards or of all
        taken = {action.tensors[0]: action.takes for action in plan.program.actions(ROLE) if action.kind == "UNSHARD"}
        self._homes = {home.weight.name: home for home in plan.space.homes}
        for name, arena in plan.space.arenas().items():
            first = arena.weights[0][0]
            flat = any(place == Place("S", FLAT) for _, place in self._homes[first].stored.places)
            held = self._stored_flat(arena, taken[first][0].name, taken[first][0].nbytes) if flat else self._stored_whole(arena)
            self.arenas[name] = held
            self._of |= dict.fromkeys((weight for weight, _, _ in arena.weights), held)
            if self._homes[first].weight.trainable:
                self._step_pieces(held)
        sums = [action for action in plan.program.actions(ROLE) if action.kind in ("REDUCE", "ADD")]
        self._in_place = not any(action.kind == "ADD" or action.takes for action in sums)  # gradients stay where they are summed
        self._packed: dict[str, torch.Tensor] = {}  # what is under way, by the name of its PACK

    def owned(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps on this rank, by logical name: pieces of what is cut, and whole parameters."""
        found: dict[str, nn.Parameter] = {}
        for name, parameter in self._state.subject.trainable.items():
            if name not in self._of:
                found[name] = parameter
            elif name in self._of[name].steps:
                found[name] = self._of[name].steps[name]
        return found

    def holds(self, name: str) -> bool:
        """Whether the weight `name` lies in an arena."""
        return name in self._of

    def piece(self, name: str) -> Piece | None:
        """What this rank has of the weight `name` in its shard; None where that is nothing, or the weight lies in no arena."""
        held = self._of.get(name)
        return None if held is None else next((piece for piece in held.pieces if piece.name == name), None)

    def stored(self, piece: Piece) -> torch.Tensor:
        """The values of a piece, flat."""
        return self._of[piece.name].shard[piece.at : piece.at + piece.numel]

    def take(self, name: str, values: torch.Tensor) -> None:
        """Take up the whole weight `name`: its piece, and all of it where it is stored whole."""
        held, piece = self._of[name], self.piece(name)
        if not held.flat:
            held.views[name].copy_(values)
        elif piece is not None:
            self.stored(piece).copy_(values.reshape(-1)[piece.begin : piece.end])

    def unshard(self, action: Action) -> None:
        """Start gathering a bundle from its shards."""
        held = self._of[action.tensors[0]]
        self._state.works[action.name] = held.group.all_gather(held.whole, held.shard, action=action.name)

    def reshard(self, action: Action) -> None:
        """Let go of a bundle: its buffer is the next one's."""

    def pack(self, action: Action) -> bool:
        """Put the gradients of a bundle into the places of its arena; False when it lies in none."""
        held = self._of.get(action.tensors[0])
        if held is None:
            return False
        flat = self._buffer(action.takes[0].name, action.takes[0].nbytes, self._wire)[: held.arena.numel]
        parameters, end = self._state.subject.parameters, 0
        for name, numel, start in sorted(held.arena.weights, key=lambda each: each[2]):
            flat[end:start].zero_()
            end = start + numel
            parameter, place = parameters[name], flat[start:end]
            if parameter.grad is None:
                place.zero_()
            else:
                place.copy_(parameter.grad.view(-1))
            parameter.grad = place.view(parameter.shape) if self._in_place else None
        flat[end:].zero_()
        self._packed[action.name] = flat
        if self._in_place:
            self._take_gradient(held, flat[held.mine])
        return True

    def reduce(self, action: Action) -> None:
        """Start summing what was packed into shards, or shards over replicas."""
        held, move = self._of[action.tensors[0]], action.transfer
        if move is None:
            return
        group = self._state.world.group(move.axes)
        if move.collective == "all_reduce":
            work = group.all_reduce(self._gradient(held), action=action.name)
        else:
            flat = self._packed_by(action)
            direct = bool(action.takes) and self._wire == self._dtype
            output = self._gradient(held) if direct else flat[held.mine]
            work = group.reduce_scatter(output, flat, action=action.name)
        self._state.works[action.name] = work

    def add(self, action: Action) -> None:
        """Add the shard of one micro-batch to the sum of those before it."""
        held = self._of[action.tensors[0]]
        mine = self._packed_by(action)[held.mine]
        gradient = self._gradient(held)
        gradient.copy_(mine) if action.micro in (0, None) else gradient.add_(mine)

    def _packed_by(self, action: Action) -> torch.Tensor:
        """The buffer into which the gradients that `action` goes on with were packed."""
        return self._packed[replace(action, kind="PACK").name]

    def square(self) -> None:
        """Take the squared norm of this rank's shards; NORM adds it up."""
        shards = [held.gradient for held in self.arenas.values() if held.gradient is not None]
        self.squared = torch.nn.utils.get_total_norm(shards).double().square().view(1)

    @property
    def total_norm(self) -> torch.Tensor:
        """The norm of all gradients, when NORM has ended."""
        return self.squared.sqrt()[0]

    def refresh(self, action: str) -> None:
        """Bring weights that are stored whole up to date with what was stepped since; all ranks take part."""
        for held in self.arenas.values():
            if not held.flat:
                held.group.all_gather(held.whole, held.shard, action=action).wait()

    def fetch(self, block: str, action: str) -> None:
        """Have the weights whole that a visit of `block` uses, and those of the root; all ranks take part."""
        for held in self.arenas.values():
            if held.flat and any(visit.split("#")[0] in (block, ROOT) for visit in held.visits):
                held.group.all_gather(held.whole, held.shard, action=action).wait()

    def values(self, action: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Every logical parameter with its present value, one bundle after the other; all ranks take part.

        What is stored flat is gathered into memory of its own.
        """
        for name, parameter in self._state.subject.parameters.items():
            if name not in self._of:
                yield name, parameter.detach()
        for held in self.arenas.values():
            yield from self._gathered(held, held.shard, action)

    def gradients(self, action: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The summed gradient of every logical parameter that is trained, likewise; NORM has ended."""
        for name, parameter in self._state.subject.trainable.items():
            if name not in self._of:
                yield name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for held in self.arenas.values():
            if held.gradient is not None:
                yield from self._gathered(held, held.gradient, action)

    @staticmethod
    def _gathered(held: Held, shard: torch.Tensor, action: str) -> Iterator[tuple[str, torch.Tensor]]:
        whole = shard.new_empty(held.arena.numel)
        held.group.all_gather(whole, shard, action=action).wait()
        for name, numel, start in held.arena.weights:
            yield name, whole[start : start + numel].view(held.views[name].shape)

    def _stored_whole(self, arena: Arena) -> Held:
        whole = self._like.new_zeros(arena.numel, dtype=self._dtype)
        held = self._held(arena, whole)
        for name, view in held.views.items():
            parameter = self._state.subject.parameters[name]
            with torch.no_grad():
                view.copy_(parameter)
            parameter.data = view
        return held

    def _stored_flat(self, arena: Arena, buffer: str, nbytes: int) -> Held:
        whole = self._buffer(buffer, nbytes, self._dtype)[: arena.numel]
        held = self._held(arena, whole)
        held.shard, held.flat = self._like.new_zeros(arena.shard, dtype=self._dtype), True
        parameters = self._state.subject.parameters
        with torch.no_grad():
            for piece in held.pieces:
                values = parameters[piece.name].detach().reshape(-1)[piece.begin : piece.end]
                held.shard[piece.at : piece.at + piece.numel].copy_(values)
        for name, view in held.views.items():
            parameters[name].data = view
        return held

    def _held(self, arena: Arena, whole: torch.Tensor) -> Held:
        group, shapes = self._state.world.group(arena.axes), self._state.subject.parameters
        views = {name: whole[start : start + numel].view(shapes[name].shape) for name, numel, start in arena.weights}
        held = Held(arena, group, whole, whole, views, self._homes[arena.weights[0][0]].weight.visits)
        held.shard = whole[held.mine]
        return held

    def _step_pieces(self, held: Held) -> None:
        for piece in held.pieces:
            held.steps[piece.name] = nn.Parameter(held.shard[piece.at : piece.at + piece.numel].detach())

    def _gradient(self, held: Held) -> torch.Tensor:
        if held.gradient is None:
            self._take_gradient(held, held.shard.new_empty(held.arena.shard))
        gradient = held.gradient
        if gradient is None:
            raise RuntimeError(f"{held.arena.name} has no gradient; put a REDUCE before its use")
        return gradient

    @staticmethod
    def _take_gradient(held: Held, gradient: torch.Tensor) -> None:
        held.gradient = gradient
        for piece in held.pieces:
            held.steps[piece.name].grad = gradient[piece.at : piece.at + piece.numel]

    def _buffer(self, name: str, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """The buffer of that name, made at its first use; it stays."""
        if name not in self._buffers:
            self._buffers[name] = self._like.detach().new_empty(nbytes // dtype.itemsize, dtype=dtype)
        return self._buffers[name]

    def sizes(self) -> dict[str, int]:
        """Bytes by category: weights (shards, or wholes that hold them), summed gradients, buffers."""
        held = self.arenas.values()
        inside = set(map(id, self._buffers.values()))
        kept = sum(0 if each.gradient is None or self._in_place else each.gradient.nbytes for each in held)
        return {
            "parameters": sum((each.shard if each.flat else each.whole).nbytes for each in held),
            "gradients": kept,
            "buffers": sum(buffer.nbytes for buffer in self._buffers.values()) if inside else 0,
        }
