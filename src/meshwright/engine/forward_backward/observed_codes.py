"""Notes what codes of activations lose, for the verifier: between pipeline stages, and inside blocks.

Each rank notes it for what it sends, as a part of the value that the global batch has: the samples of the
microbatch, and of these the tokens, features or chunk that the rank has. Of ranks that send the same value
one notes it. What several codes of one value lose is added up: of all summands of a sum, and of the sum.

Inside blocks the forward of a microbatch notes what each layer takes, coded or not, so that one device knows
which layers share a value; a forward that runs again notes nothing, and its backward what gradients lose.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from meshwright.comm.collectives.coded_redistribution import ObserveFn
from meshwright.comm.collectives.group import Group
from meshwright.engine.runtime.rank_state import RankState
from meshwright.plan.model_spec.stage_transfers import StageValue
from meshwright.plan.sharding.stage_value_shards import StageValueShards
from meshwright.plan.sharding.tensor_placements import Placement
from meshwright.plan.step.program import Action
from meshwright.plan.step.single_device_program import FORWARD_KINDS
from meshwright.plan.strategy_interface import ActivationCodec, ActivationName, ObservedCodes

TAKEN = "taken"  # the first word of the key of what a layer takes; else the direction: SEND, forward ...
FORWARD, BACKWARD = "forward", "backward"
HEAD_DIM = 1  # of what attention takes and returns


def observe_stage_value(
    state: RankState,
    value_shards: StageValueShards,
    action: Action,
    value: StageValue,
    tensor: torch.Tensor,
    codes: torch.Tensor,
) -> None:
    """Adds what the `codes` of `tensor`, all that this rank sends of `value`, lose to `state.observed_codes`.

    Nothing for a dummy, or where another rank sends the same.
    """
    microbatch, view = action.microbatch or 0, state.plan.view
    codec = None if action.transfer is None else state.activation_codecs.get(action.transfer.axes[0])
    if codec is None or state.observed_codes is None or microbatch >= state.step.num_real_microbatches:
        return
    chunk_axes = action.transfer.replica_axes if action.transfer is not None else ()
    copies = () if chunk_axes else value_shards.replicated_axes(value)
    if value.sequence_dim is None and action.kind == "SEND":
        copies += view.plan.token_axes
    if any(view.coordinate[axis] for axis in copies):
        return
    lost, error = lost_and_error(codec, tensor, codes)
    shape, index = _global_index(state, value_shards, value, microbatch)
    if chunk_axes:
        first = state.world.group(chunk_axes).index * len(lost)
        index = index[first : first + len(lost)]
        lost = lost[: len(index)]
    state.observed_codes.append(ObservedCodes((action.kind, action.subject), shape, index, lost, error))


def lost_and_error(
    codec: ActivationCodec, tensor: torch.Tensor, codes: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Returns what `codes` lose of `tensor`, flat, and the largest such loss in units of what is allowed."""
    decoded = torch.empty_like(tensor)
    with torch._C.DisableTorchFunction():  # as the codes were made: scales stay float32
        codec.decode(codes, decoded)
        lost = (tensor - decoded).view(-1)
        return lost, codec.error_in_units(tensor, lost)


def _global_index(
    state: RankState, value_shards: StageValueShards, value: StageValue, microbatch: int
) -> tuple[tuple[int, ...], torch.Tensor]:
    """Returns the shape of `value` for the global batch, and the places in it of this rank's elements."""
    plan, dim = state.plan, value.sample_dim
    if dim is None:
        raise ValueError(f"'{value}' belongs to no sample, and travels as codes; code values of samples only")
    shape = value.shape(plan.job.train.batch)
    num_samples = next(iter(state.step.microbatches[microbatch].values())).shape[0]
    positions = value_shards.local_positions(value, num_samples)
    first = plan.microbatch_starts(plan.data_index(state.world.rank))[microbatch]
    per_sample = value.dim_sizes[dim][1]
    positions[dim] = list(range(first * per_sample, (first + num_samples) * per_sample))
    return shape, _places(shape, positions).reshape(-1)


def _places(shape: tuple[int, ...], positions: Mapping[int, list[int]]) -> torch.Tensor:
    """Returns the places in a flat value of `shape` of the elements at `positions` along its dims; -1 where a
    position is.
    """
    index = torch.arange(prod(shape)).view(shape)
    for each, places in positions.items():
        chosen = torch.tensor(places, dtype=torch.int64)
        along = [1] * len(shape)
        along[each] = len(places)
        index = torch.where(chosen.view(along) < 0, -1, index.index_select(each, chosen.clamp(min=0)))
    return index


class BlockCodeObserver:
    """Notes the codes of one rank inside blocks."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._num_uses = Counter[tuple[str, str, str]]()

    def begin_block(self) -> None:
        """Begins a block: it has taken nothing yet."""
        self._num_uses.clear()

    @cached_property
    def _actions(self) -> Mapping[str, Action]:
        return {action.name: action for action in self._state.plan.actions}

    def take(self, name: ActivationName) -> "ObservedUse | None":
        """Notes that a layer takes or returns `name` now; returns where to note its codes. None: nowhere."""
        state = self._state
        if state.observed_codes is None:
            return None
        action = self._actions.get(state.current_action)
        if action is None or (action.microbatch or 0) >= state.step.num_real_microbatches:
            return None
        is_first_run, keys = action.kind in FORWARD_KINDS, list[tuple[str, ...]]()
        for module in (name.module, *name.others):
            place = module, name.side, name.slot
            self._num_uses[place] += (name.samples is None or name.samples[0] == 0) and not name.is_recoded
            keys.append((action.subject, *place, str(self._num_uses[place])))
            if is_first_run:
                nothing = torch.zeros(0, dtype=torch.int64)
                found = ObservedCodes((TAKEN, *keys[-1]), (), nothing, nothing.double(), 0.0)
                state.observed_codes.append(found)
        return ObservedUse(state, name, tuple(keys), action.microbatch or 0, notes_forward=is_first_run)


@dataclass(frozen=True)
class ObservedUse:
    """One use of an activation by a layer. The first of `keys` names it on all ranks; the others name the
    summands of other layers in a sum, whose gradient is the same.
    """

    state: RankState
    name: ActivationName
    keys: tuple[tuple[str, ...], ...]
    microbatch: int
    notes_forward: bool

    def note(
        self,
        codec: ActivationCodec,
        local: torch.Tensor,
        placement: Placement,
        group: Group,
        *,
        is_backward: bool,
    ) -> ObserveFn | None:
        """Returns the function that notes what codes of `local`, placed as `placement` along `group`, lose;
        None: another run, or rank, notes it.
        """
        if self.name.places is not None:
            return self.note_part(
                codec, tuple(local.shape), self.name.places(is_backward), is_backward=is_backward
            )
        if not (is_backward or self.notes_forward):
            return None
        found = self._places(tuple(local.shape), placement, group)
        return None if found is None else self._note_at(codec, *found, is_backward=is_backward)

    def note_part(
        self,
        codec: ActivationCodec,
        local_shape: tuple[int, ...],
        places: Mapping[int, tuple[int, Sequence[int]]],
        *,
        is_backward: bool,
    ) -> ObserveFn | None:
        """Returns the same for a part of what attention takes, of `local_shape`; `places` as those of an
        `ActivationName`.
        """
        if not (is_backward or self.notes_forward):
            return None
        found = self._places_in_attention(local_shape, places)
        return self._note_at(codec, *found, is_backward=is_backward)

    def _note_at(
        self, codec: ActivationCodec, shape: tuple[int, ...], index: torch.Tensor, *, is_backward: bool
    ) -> ObserveFn | None:
        observed = self.state.observed_codes
        if observed is None:
            return None
        direction, keys = (BACKWARD, self.keys) if is_backward else (FORWARD, self.keys[:1])

        def note(
            values: torch.Tensor, codes: torch.Tensor, places: Callable[[torch.Tensor], torch.Tensor]
        ) -> None:
            lost, error = lost_and_error(codec, values, codes)
            where = places(index).reshape(-1)
            observed.extend(ObservedCodes((direction, *key), shape, where, lost, error) for key in keys)

        return note

    def _places(
        self, local_shape: tuple[int, ...], placement: Placement, group: Group
    ) -> tuple[tuple[int, ...], torch.Tensor] | None:
        """Returns the shape of the value for the global batch, and the places of this rank's elements in it,
        in their shape; None where another rank along the sequence has the same value.
        """
        plan, shape, positions = self.state.plan, list(local_shape), dict[int, list[int]]()
        if placement.dim is not None:
            dim, size = placement.dim % len(shape), local_shape[placement.dim]
            shape[dim] = size * group.size
            positions[dim] = list(range(group.index * size, (group.index + 1) * size))
        sequence_info, sharding = plan.sharding.model_spec.sequence_info, plan.sharding.sequence_sharding
        if sharding is not None and sequence_info is not None:
            index = plan.mesh.index(plan.view.coordinate, plan.sharding.token_axes)
            length = sequence_info.num_sharded_tokens(self.keys[0][0], self.name.module)
            if not length:
                return None if index else self._with_samples(shape, positions)
            spans = sharding.token_ranges(length, index)
            tokens = [position for begin, end in spans for position in range(begin, end)]
            tokens += [-1] * (shape[1] - len(tokens))
            shape[1] = length
            positions[1] = [tokens[at] for at in positions.get(1, range(len(tokens)))]
        return self._with_samples(shape, positions)

    def _places_in_attention(
        self, local_shape: tuple[int, ...], known: Mapping[int, tuple[int, Sequence[int]]]
    ) -> tuple[tuple[int, ...], torch.Tensor]:
        """Returns the same for what attention takes or returns, [samples, heads, tokens, width]; the heads of
        tensor-parallel ranks follow one another.
        """
        shape, positions = list(local_shape), {dim: list(places) for dim, (_, places) in known.items()}
        for dim, (size, _) in known.items():
            shape[dim] = size
        group = self.state.world.group(("tp",))
        counts = torch.zeros(group.size, dtype=torch.int64, device=self.state.world.device)
        group.all_gather(counts, counts.new_tensor([shape[HEAD_DIM]]), action=self.keys[0][0]).wait()
        first = int(counts[: group.index].sum())
        own = positions.get(HEAD_DIM, range(shape[HEAD_DIM]))
        positions[HEAD_DIM] = [at if at < 0 else first + at for at in own]
        shape[HEAD_DIM] = int(counts.sum())
        return self._with_samples(shape, positions)

    def _with_samples(
        self, shape: list[int], positions: dict[int, list[int]]
    ) -> tuple[tuple[int, ...], torch.Tensor]:
        plan, num_rows = self.state.plan, shape[0]
        num_read = next(iter(self.state.step.microbatches[self.microbatch].values())).shape[0]
        first_of_chunk, num_samples = self.name.samples or (0, num_read)
        per_sample = num_rows // num_samples
        first = plan.microbatch_starts(plan.data_index(self.state.world.rank))[self.microbatch]
        first += first_of_chunk
        shape[0] = plan.job.train.batch * per_sample
        positions[0] = list(range(first * per_sample, first * per_sample + num_rows))
        return tuple(shape), _places(tuple(shape), positions)
