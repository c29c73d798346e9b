"""The memory of what is cut into shards: per bundle the shard that this rank steps, and the whole weights while they are needed.

    stored whole   whole  [ w0 | w1 | w2 | pad ]     one per bundle, for good; the shard is a stretch of it
    stored flat    shard  [ w1 | w2 ]                its own memory; the whole lies in a buffer that bundles take in turn

A parameter of the module is a view of its place in the whole, for good: a bundle always comes back to the same buffer, so what
autograd has saved of a weight is right again once UNSHARD has filled it, and no storage is ever exchanged under a graph.
The optimizer steps *pieces*: views of the shard, or of its master in a wider dtype, one parameter per weight with elements here.
Gradients are packed into the places of the arena, in a buffer; this rank's sum of its shard is `gradient`.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from meshwright.engine.params.flat_param import Held, Masters, Stepped
from meshwright.engine.params.matrix_owners import Owners
from meshwright.engine.params.param_slices import Slices
from meshwright.engine.runtime.mixed_precision import total_norm
from meshwright.engine.runtime.state import State
from meshwright.plan.model_spec.model_spec import ROOT, block_of
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.flat_param import Arena, Piece
from meshwright.plan.step.action import Action


class Store:
    """The arenas of one rank, filled from the values that the model's parameters have."""

    def __init__(self, plan: Plan, state: State) -> None:
        self._plan, self._state, self.slices = plan, state, Slices(plan, state.world)
        self._of: dict[str, Held] = {}  # by weight
        self.owners = Owners(plan, state, self._of)
        self.slices.cut(state.subject)
        roles = {role: getattr(torch, dtype) for role, dtype in plan.job.precision.roles.items()}
        self._dtype, self._wire, self._kept, self._master = (roles[r] for r in ("parameters", "reduce", "gradients", "master"))
        self._like = next(iter(state.subject.parameters.values()))  # buffers are of its kind: on its device, fake where it is
        self._buffers: dict[str, torch.Tensor] = {}
        self.arenas: dict[str, Held] = {}
        self.squared = torch.zeros(1, dtype=torch.float64)  # the norm's, of this rank's shards or of all
        taken = {action.tensors[0]: action.takes for action in plan.actions if action.kind == "UNSHARD"}
        self._homes = {home.weight.name: home for home in plan.space.homes}
        coordinate = plan.mesh.coordinate(state.world.rank)
        self._first, self.told = frozenset(plan.space.held_first(coordinate)), frozenset(plan.space.told_first(coordinate))
        for name, arena in plan.space.arenas().items():
            first = arena.weights[0][0]
            flat = self._homes[first].in_shards
            held = self._stored_flat(arena, taken[first][0].name, taken[first][0].nbytes) if flat else self._stored_whole(arena)
            self.arenas[name] = held
            self._of |= dict.fromkeys((weight for weight, _, _ in arena.weights), held)
            if self._homes[first].weight.trainable and first not in self.owners.names:
                held.steps = {p.name: nn.Parameter(held.value(p).detach().view(self._stepped_as(p))) for p in held.pieces}
        self.masters = Masters(plan, state, self._of.keys() | self.owners.names)
        sums = [action for action in plan.actions if action.kind in ("REDUCE", "ADD")]
        self._in_place = not any(action.kind == "ADD" or action.takes for action in sums)  # gradients stay where they are summed
        packs = (action for action in plan.actions if action.kind == "PACK")
        self._gathering = {hold.name for action in packs for hold in action.takes}  # buffers that gradients are packed into
        self._packed: dict[str, torch.Tensor] = {}  # what is under way, by the name of its PACK

    def owned(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps on this rank, by logical name: pieces of what is cut, and whole parameters."""
        found, apart = {}, self.masters.stepped | self.owners.steps
        for name in self._state.subject.trainable:
            if name in apart:
                found[name] = apart[name]
            elif name in self._of and name in self._of[name].steps:
                found[name] = self._of[name].steps[name]
        return found

    def bundles(self) -> Iterator[Stepped]:
        """What is stepped on this rank, one bundle after the other, with the gradients that the last backward and REDUCE left."""
        yield from (held.bundle(held.gradient) for held in self.arenas.values() if held.gradient is not None and held.steps)
        yield from self.masters.bundles()
        yield from self.owners.bundles()

    @property
    def together(self) -> bool:
        """Whether a forward needs all ranks: some weights are kept in shards or slices alone."""
        return bool(self.slices) or any(held.flat for held in self.arenas.values())

    def holds(self, name: str) -> bool:
        """Whether the weight `name` lies in an arena."""
        return name in self._of

    def piece(self, name: str) -> Piece | None:
        """What this rank has of the weight `name` in its shard; None where that is nothing, or the weight lies in no arena."""
        held = self._of.get(name)
        return None if held is None else next((piece for piece in held.pieces if piece.name == name), None)

    def keeps(self, name: str) -> bool:
        """Whether anything of the weight `name`, which lies in an arena, is kept on this rank between its uses."""
        return not self._of[name].flat or self.piece(name) is not None

    def stored(self, piece: Piece) -> torch.Tensor:
        """The values of a piece, flat: its master's, where it has one."""
        return self._of[piece.name].value(piece)

    def take(self, name: str, values: torch.Tensor) -> None:
        """Take up what this rank has of the weight `name`: its piece, and all of that where it is stored whole."""
        held, piece = self._of[name], self.piece(name)
        if piece is not None:
            held.take(piece, values)
        if not held.flat:
            held.views[name].copy_(values)

    def unshard(self, action: Action) -> None:
        """Start gathering a bundle from its shards."""
        held = self._of[action.tensors[0]]
        self._state.works[action.name] = held.group.all_gather(held.whole, held.shard, action=action.name)

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
        if self._in_place and held.gradient is None:  # the buffer is the bundle's for good
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
            direct = bool(action.takes) and self._wire == self._kept
            output = self._gradient(held) if direct else flat[held.mine]
            work = group.reduce_scatter(output, flat, action=action.name)
        self._state.works[action.name] = work

    def add(self, action: Action) -> None:
        """Add the shard of one micro-batch to the sum of those before it."""
        held = self._of[action.tensors[0]]
        mine = self._packed_by(action)[held.mine]
        gradient = self._gradient(held)
        gradient.copy_(mine) if action.takes else gradient.add_(mine)  # the first is there when it takes room

    def _packed_by(self, action: Action) -> torch.Tensor:
        """The buffer into which the gradients that `action` goes on with were packed."""
        return self._packed[replace(action, kind="PACK").name]

    def square(self) -> None:
        """Take the squared norm of the gradients that this rank is the first to hold; NORM adds it up."""
        mine = [part for held in self.arenas.values() if held.gradient is not None for part in self._counted(held, held.gradient)]
        whole = (p for name, p in self._state.subject.trainable.items() if name not in self._of and name in self._first)
        mine += [parameter.grad for parameter in whole if parameter.grad is not None]
        self.squared = total_norm(mine).double().square().view(1) if mine else torch.zeros_like(self.squared)

    def _counted(self, held: Held, gradient: torch.Tensor) -> list[torch.Tensor]:
        """The parts of the shard `gradient` that count here; all of it, mostly."""
        if all(name in self._first for name, _, _ in held.arena.weights):
            return [gradient]
        return [gradient[piece.at : piece.at + piece.numel] for piece in held.pieces if piece.name in self._first]

    @property
    def total_norm(self) -> torch.Tensor:
        """The norm of all gradients, when NORM has ended."""
        return self.squared.sqrt()[0]

    def refresh(self, action: str) -> None:
        """Bring weights up to date that stay whole: those stored so, and for a while those of the root; all ranks take part."""
        for held in self.arenas.values():
            if not held.flat or ROOT in held.visits:
                held.group.all_gather(held.whole, held.shard, action=action).wait()

    def fetch(self, block: str, action: str) -> None:
        """Have the weights whole that a visit of `block` uses, but for the root's; all ranks take part."""
        for held in self.arenas.values():
            if held.flat and ROOT not in held.visits and any(block_of(visit) == block for visit in held.visits):
                held.group.all_gather(held.whole, held.shard, action=action).wait()

    def values(self, action: str, *, exact: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Every logical parameter with its present value, one bundle after the other; all ranks take part.

        What is stored flat is gathered into memory of its own. `exact`: what has a master is that, but for what an owner steps.
        """
        for name, parameter in self._state.subject.parameters.items():
            if name not in self._of:
                value = self.masters.value(name, parameter) if exact else parameter.detach()
                yield name, self.slices.whole(name, value, action)
        for held in self.arenas.values():
            yield from self._gathered(held, held.stepped if exact else held.shard, action)

    def gradients(self, action: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The summed gradient of every logical parameter that is trained, likewise; NORM has ended."""
        for name, parameter in self._state.subject.trainable.items():
            if name not in self._of:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                yield name, self.slices.whole(name, gradient, action)
        for held in self.arenas.values():
            if held.gradient is not None:
                yield from self._gathered(held, held.gradient, action)

    def _gathered(self, held: Held, shard: torch.Tensor, action: str) -> Iterator[tuple[str, torch.Tensor]]:
        whole = shard.new_empty(held.arena.numel)
        held.group.all_gather(whole, shard, action=action).wait()
        for name, numel, start in held.arena.weights:
            yield name, self.slices.whole(name, whole[start : start + numel].view(held.views[name].shape), action)

    def _stored_whole(self, arena: Arena) -> Held:
        whole = self._like.new_zeros(arena.numel, dtype=self._dtype)
        held = self._with_master(self._held(arena, whole))
        pieces = {piece.name: piece for piece in held.pieces}
        for name, view in held.views.items():
            values = self._initial(name)
            with torch.no_grad():
                view.copy_(values)
                if name in pieces:
                    held.take(pieces[name], values)
            self._state.subject.parameters[name].data = view
        return held

    def _stored_flat(self, arena: Arena, buffer: str, nbytes: int) -> Held:
        dtype = self._state.subject.parameters[arena.weights[0][0]].dtype
        held = self._held(arena, self._buffer(buffer, nbytes, dtype)[: arena.numel])
        held.shard, held.flat = self._like.new_zeros(arena.shard, dtype=dtype), True
        held, parameters = self._with_master(held), self._state.subject.parameters
        with torch.no_grad():
            for piece in held.pieces:
                held.take(piece, self._initial(piece.name))
        for name, view in held.views.items():
            parameters[name].data = view
        return held

    def _initial(self, name: str) -> torch.Tensor:
        blank = self._state.subject.blank
        return blank[name] if name in blank else self._state.subject.parameters[name].detach()

    def _held(self, arena: Arena, whole: torch.Tensor) -> Held:
        group, shapes = self._state.world.group(arena.axes), self._state.subject.parameters
        views = {name: whole[start : start + numel].view(shapes[name].shape) for name, numel, start in arena.weights}
        held = Held(arena, group, whole, whole, views, self._homes[arena.weights[0][0]].weight.visits)
        held.shard = whole[held.mine]
        return held

    def _with_master(self, held: Held) -> Held:
        first = held.arena.weights[0][0]
        if self._master != self._dtype and self._homes[first].weight.trainable and first not in self.owners.names:
            held.master = held.shard.new_zeros(held.arena.shard, dtype=self._master)
        return held

    def _stepped_as(self, piece: Piece) -> tuple[int, ...]:
        """The shape in which the optimizer sees a piece: flat, but for weights that are never cut."""
        home = self._homes[piece.name]
        return home.weight.shape if home.grain == "matrix" else (piece.numel,)

    def _gradient(self, held: Held) -> torch.Tensor:
        gradient = held.gradient
        if gradient is None:
            gradient = held.shard.new_empty(held.arena.shard, dtype=self._kept)
            self._take_gradient(held, gradient)
        return gradient

    @staticmethod
    def _take_gradient(held: Held, gradient: torch.Tensor) -> None:
        held.gradient = gradient
        if gradient.dtype == held.stepped.dtype:  # else it is cast when it is read
            for piece in held.pieces if held.steps else ():
                held.steps[piece.name].grad = held.place(gradient, piece)

    def _buffer(self, name: str, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """The buffer of that name, made at its first use, as elements of `dtype`; it stays, and may serve others in turn."""
        if name not in self._buffers:
            self._buffers[name] = self._like.detach().new_empty(nbytes, dtype=torch.uint8)
        return self._buffers[name][: nbytes - nbytes % dtype.itemsize].view(dtype)

    def sizes(self) -> dict[str, int]:
        """Bytes by category: weights (shards, or wholes that hold them), masters, summed gradients, buffers.

        A buffer in which gradients stay is one of gradients.
        """
        held, sizes = self.arenas.values(), {name: buffer.nbytes for name, buffer in self._buffers.items()}
        kept = sum(0 if each.gradient is None or self._in_place else each.gradient.nbytes for each in held)
        stays = sum(sizes.pop(name) for name in list(sizes) if self._in_place and name in self._gathering)
        return {
            "parameters": sum((each.shard if each.flat else each.whole).nbytes for each in held),
            "master": sum(each.nbytes_of_master for each in held) + self.masters.nbytes + self.owners.nbytes,
            "gradients": kept + stays,
            "buffers": sum(sizes.values()),
        }
