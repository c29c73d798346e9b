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

from meshwright.engine.params.flat_param import FlatParam, MasterWeights, UpdateGroup
from meshwright.engine.params.matrix_owners import MatrixOwners
from meshwright.engine.params.param_slices import ParamSlices
from meshwright.engine.runtime.mixed_precision import total_norm
from meshwright.engine.runtime.state import RankState
from meshwright.plan.model_spec.model_spec import ROOT, block_of
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.flat_param import FlatParamSpec, ParamShard
from meshwright.plan.step.action import Action


class FlatParams:
    """The arenas of one rank, filled from the values that the model's parameters have."""

    def __init__(self, plan: Plan, state: RankState) -> None:
        self._plan, self._state, self.param_slices = plan, state, ParamSlices(plan, state.world)
        self._of: dict[str, FlatParam] = {}  # by weight
        self.matrix_owners = MatrixOwners(plan, state, self._of)
        self.param_slices.slice_params(state.trained_module)
        roles = {role: getattr(torch, dtype) for role, dtype in plan.job.precision.roles.items()}
        self._dtype, self._wire, self._kept, self._master = (
            roles[r] for r in ("parameters", "reduce", "gradients", "master")
        )
        self._like = next(
            iter(state.trained_module.parameters.values())
        )  # buffers are of its kind: on its device, fake where it is
        self._buffers: dict[str, torch.Tensor] = {}
        self.by_param_group: dict[str, FlatParam] = {}
        self.grad_sqnorm = torch.zeros(1, dtype=torch.float64)  # the norm's, of this rank's shards or of all
        taken = {action.tensors[0]: action.allocations for action in plan.actions if action.kind == "UNSHARD"}
        self._homes = {home.param.name: home for home in plan.sharding.param_shardings}
        coordinate = plan.mesh.coordinate(state.world.rank)
        self._first, self.reported_param_names = (
            frozenset(plan.sharding.params_counted_in_norm(coordinate)),
            frozenset(plan.sharding.params_counted_in_sum(coordinate)),
        )
        for name, arena in plan.sharding.flat_param_specs().items():
            first = arena.params[0][0]
            flat = self._homes[first].is_stored_sharded
            held = (
                self._stored_flat(arena, taken[first][0].name, taken[first][0].nbytes)
                if flat
                else self._stored_whole(arena)
            )
            self.by_param_group[name] = held
            self._of |= dict.fromkeys((weight for weight, _, _ in arena.params), held)
            if self._homes[first].param.trainable and first not in self.matrix_owners.param_names:
                held.optimizer_params = {
                    p.name: nn.Parameter(held.shard_values(p).detach().view(self._stepped_as(p)))
                    for p in held.param_shards
                }
        self.master_weights = MasterWeights(plan, state, self._of.keys() | self.matrix_owners.param_names)
        sums = [action for action in plan.actions if action.kind in ("REDUCE", "ACCUMULATE")]
        self._in_place = not any(
            action.kind == "ACCUMULATE" or action.allocations for action in sums
        )  # gradients stay where they are summed
        packs = (action for action in plan.actions if action.kind == "PACK")
        self._gathering = {
            hold.name for action in packs for hold in action.allocations
        }  # buffers that gradients are packed into
        self._packed: dict[str, torch.Tensor] = {}  # what is under way, by the name of its PACK

    def optimizer_params(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps on this rank, by logical name: pieces of what is cut, and whole parameters."""
        found, apart = {}, self.master_weights.optimizer_params | self.matrix_owners.optimizer_params
        for name in self._state.trained_module.trainable_parameters:
            if name in apart:
                found[name] = apart[name]
            elif name in self._of and name in self._of[name].optimizer_params:
                found[name] = self._of[name].optimizer_params[name]
        return found

    def update_groups(self) -> Iterator[UpdateGroup]:
        """What is stepped on this rank, one bundle after the other, with the gradients that the last backward and REDUCE left."""
        yield from (
            held.update_group(held.gradient)
            for held in self.by_param_group.values()
            if held.gradient is not None and held.optimizer_params
        )
        yield from self.master_weights.update_groups()
        yield from self.matrix_owners.update_groups()

    @property
    def forward_is_collective(self) -> bool:
        """Whether a forward needs all ranks: some weights are kept in shards or slices alone."""
        return bool(self.param_slices) or any(held.is_sharded for held in self.by_param_group.values())

    def is_flattened(self, name: str) -> bool:
        """Whether the weight `name` lies in an arena."""
        return name in self._of

    def param_shard(self, name: str) -> ParamShard | None:
        """What this rank has of the weight `name` in its shard; None where that is nothing, or the weight lies in no arena."""
        held = self._of.get(name)
        return (
            None if held is None else next((piece for piece in held.param_shards if piece.name == name), None)
        )

    def stores_locally(self, name: str) -> bool:
        """Whether anything of the weight `name`, which lies in an arena, is kept on this rank between its uses."""
        return not self._of[name].is_sharded or self.param_shard(name) is not None

    def shard_values(self, param_shard: ParamShard) -> torch.Tensor:
        """The values of a piece, flat: its master's, where it has one."""
        return self._of[param_shard.name].shard_values(param_shard)

    def load_values(self, name: str, values: torch.Tensor) -> None:
        """Take up what this rank has of the weight `name`: its piece, and all of that where it is stored whole."""
        held, piece = self._of[name], self.param_shard(name)
        if piece is not None:
            held.load_values(piece, values)
        if not held.is_sharded:
            held.views[name].copy_(values)

    def unshard(self, action: Action) -> None:
        """Start gathering a bundle from its shards."""
        held = self._of[action.tensors[0]]
        self._state.works[action.name] = held.group.all_gather(
            held.full_tensor, held.shard, action=action.name
        )

    def pack(self, action: Action) -> bool:
        """Put the gradients of a bundle into the places of its arena; False when it lies in none."""
        held = self._of.get(action.tensors[0])
        if held is None:
            return False
        flat = self._buffer(action.allocations[0].name, action.allocations[0].nbytes, self._wire)[
            : held.spec.numel
        ]
        parameters, end = self._state.trained_module.parameters, 0
        for name, numel, start in sorted(held.spec.params, key=lambda each: each[2]):
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
            self._take_gradient(held, flat[held.shard_slice])
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
            direct = bool(action.allocations) and self._wire == self._kept
            output = self._gradient(held) if direct else flat[held.shard_slice]
            work = group.reduce_scatter(output, flat, action=action.name)
        self._state.works[action.name] = work

    def accumulate(self, action: Action) -> None:
        """Add the shard of one micro-batch to the sum of those before it."""
        held = self._of[action.tensors[0]]
        mine = self._packed_by(action)[held.shard_slice]
        gradient = self._gradient(held)
        gradient.copy_(mine) if action.allocations else gradient.add_(
            mine
        )  # the first is there when it takes room

    def _packed_by(self, action: Action) -> torch.Tensor:
        """The buffer into which the gradients that `action` goes on with were packed."""
        return self._packed[replace(action, kind="PACK").name]

    def compute_sqnorm(self) -> None:
        """Take the squared norm of the gradients that this rank is the first to hold; GLOBAL_NORM adds it up."""
        mine = [
            part
            for held in self.by_param_group.values()
            if held.gradient is not None
            for part in self._counted(held, held.gradient)
        ]
        whole = (
            p
            for name, p in self._state.trained_module.trainable_parameters.items()
            if name not in self._of and name in self._first
        )
        mine += [parameter.grad for parameter in whole if parameter.grad is not None]
        self.grad_sqnorm = (
            total_norm(mine).double().square().view(1) if mine else torch.zeros_like(self.grad_sqnorm)
        )

    def _counted(self, held: FlatParam, gradient: torch.Tensor) -> list[torch.Tensor]:
        """The parts of the shard `gradient` that count here; all of it, mostly."""
        if all(name in self._first for name, _, _ in held.spec.params):
            return [gradient]
        return [
            gradient[piece.shard_offset : piece.shard_offset + piece.numel]
            for piece in held.param_shards
            if piece.name in self._first
        ]

    @property
    def total_norm(self) -> torch.Tensor:
        """The norm of all gradients, when GLOBAL_NORM has ended."""
        return self.grad_sqnorm.sqrt()[0]

    def refresh_unsharded(self, action: str) -> None:
        """Bring weights up to date that stay whole: those stored so, and for a while those of the root; all ranks take part."""
        for held in self.by_param_group.values():
            if not held.is_sharded or ROOT in held.block_calls:
                held.group.all_gather(held.full_tensor, held.shard, action=action).wait()

    def unshard_block(self, block: str, action: str) -> None:
        """Have the weights whole that a visit of `block` uses, but for the root's; all ranks take part."""
        for held in self.by_param_group.values():
            if (
                held.is_sharded
                and ROOT not in held.block_calls
                and any(block_of(visit) == block for visit in held.block_calls)
            ):
                held.group.all_gather(held.full_tensor, held.shard, action=action).wait()

    def full_values(self, action: str, *, use_masters: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Every logical parameter with its present value, one bundle after the other; all ranks take part.

        What is stored flat is gathered into memory of its own. `exact`: what has a master is that, but for what an owner steps.
        """
        for name, parameter in self._state.trained_module.parameters.items():
            if name not in self._of:
                value = (
                    self.master_weights.exact_value(name, parameter) if use_masters else parameter.detach()
                )
                yield name, self.param_slices.gather_full(name, value, action)
        for held in self.by_param_group.values():
            yield from self._gathered(held, held.optimizer_tensor if use_masters else held.shard, action)

    def full_gradients(self, action: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The summed gradient of every logical parameter that is trained, likewise; GLOBAL_NORM has ended."""
        for name, parameter in self._state.trained_module.trainable_parameters.items():
            if name not in self._of:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                yield name, self.param_slices.gather_full(name, gradient, action)
        for held in self.by_param_group.values():
            if held.gradient is not None:
                yield from self._gathered(held, held.gradient, action)

    def _gathered(
        self, held: FlatParam, shard: torch.Tensor, action: str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        whole = shard.new_empty(held.spec.numel)
        held.group.all_gather(whole, shard, action=action).wait()
        for name, numel, start in held.spec.params:
            yield (
                name,
                self.param_slices.gather_full(
                    name, whole[start : start + numel].view(held.views[name].shape), action
                ),
            )

    def _stored_whole(self, arena: FlatParamSpec) -> FlatParam:
        whole = self._like.new_zeros(arena.numel, dtype=self._dtype)
        held = self._with_master(self._held(arena, whole))
        pieces = {piece.name: piece for piece in held.param_shards}
        for name, view in held.views.items():
            values = self._initial(name)
            with torch.no_grad():
                view.copy_(values)
                if name in pieces:
                    held.load_values(pieces[name], values)
            self._state.trained_module.parameters[name].data = view
        return held

    def _stored_flat(self, arena: FlatParamSpec, buffer: str, nbytes: int) -> FlatParam:
        dtype = self._state.trained_module.parameters[arena.params[0][0]].dtype
        held = self._held(arena, self._buffer(buffer, nbytes, dtype)[: arena.numel])
        held.shard, held.is_sharded = self._like.new_zeros(arena.shard_numel, dtype=dtype), True
        held, parameters = self._with_master(held), self._state.trained_module.parameters
        with torch.no_grad():
            for piece in held.param_shards:
                held.load_values(piece, self._initial(piece.name))
        for name, view in held.views.items():
            parameters[name].data = view
        return held

    def _initial(self, name: str) -> torch.Tensor:
        blank = self._state.trained_module.initial_values
        return blank[name] if name in blank else self._state.trained_module.parameters[name].detach()

    def _held(self, arena: FlatParamSpec, whole: torch.Tensor) -> FlatParam:
        group, shapes = self._state.world.group(arena.axes), self._state.trained_module.parameters
        views = {
            name: whole[start : start + numel].view(shapes[name].shape) for name, numel, start in arena.params
        }
        held = FlatParam(arena, group, whole, whole, views, self._homes[arena.params[0][0]].param.block_calls)
        held.shard = whole[held.shard_slice]
        return held

    def _with_master(self, held: FlatParam) -> FlatParam:
        first = held.spec.params[0][0]
        if (
            self._master != self._dtype
            and self._homes[first].param.trainable
            and first not in self.matrix_owners.param_names
        ):
            held.master = held.shard.new_zeros(held.spec.shard_numel, dtype=self._master)
        return held

    def _stepped_as(self, piece: ParamShard) -> tuple[int, ...]:
        """The shape in which the optimizer sees a piece: flat, but for weights that are never cut."""
        home = self._homes[piece.name]
        return home.param.shape if home.shard_alignment == "matrix" else (piece.numel,)

    def _gradient(self, held: FlatParam) -> torch.Tensor:
        gradient = held.gradient
        if gradient is None:
            gradient = held.shard.new_empty(held.spec.shard_numel, dtype=self._kept)
            self._take_gradient(held, gradient)
        return gradient

    @staticmethod
    def _take_gradient(held: FlatParam, gradient: torch.Tensor) -> None:
        held.gradient = gradient
        if gradient.dtype == held.optimizer_tensor.dtype:  # else it is cast when it is read
            for piece in held.param_shards if held.optimizer_params else ():
                held.optimizer_params[piece.name].grad = held.shard_view(gradient, piece)

    def _buffer(self, name: str, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """The buffer of that name, made at its first use, as elements of `dtype`; it stays, and may serve others in turn."""
        if name not in self._buffers:
            self._buffers[name] = self._like.detach().new_empty(nbytes, dtype=torch.uint8)
        return self._buffers[name][: nbytes - nbytes % dtype.itemsize].view(dtype)

    def memory_by_category(self) -> dict[str, int]:
        """Bytes by category: weights (shards, or wholes that hold them), masters, summed gradients, buffers.

        A buffer in which gradients stay is one of gradients.
        """
        held, sizes = (
            self.by_param_group.values(),
            {name: buffer.nbytes for name, buffer in self._buffers.items()},
        )
        kept = sum(0 if each.gradient is None or self._in_place else each.gradient.nbytes for each in held)
        stays = sum(sizes.pop(name) for name in list(sizes) if self._in_place and name in self._gathering)
        return {
            "parameters": sum((each.shard if each.is_sharded else each.full_tensor).nbytes for each in held),
            "master": sum(each.master_nbytes for each in held)
            + self.master_weights.nbytes
            + self.matrix_owners.nbytes,
            "gradients": kept + stays,
            "buffers": sum(sizes.values()),
        }
