"""Notes what codes of values between pipeline stages lose, for the verifier.

Each rank notes it for what it sends, as a part of the value that the global batch has: the samples of the
microbatch, and of these the tokens, features or chunk that the rank has. Of ranks that send the same value
one notes it.
"""

from math import prod

import torch

from meshwright.engine.runtime.rank_state import RankState
from meshwright.plan.model_spec.stage_transfers import StageValue
from meshwright.plan.sharding.stage_value_shards import StageValueShards
from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import ActivationCodec, ObservedCodes


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
    microbatch, codec, view = action.microbatch or 0, state.activation_codec, state.plan.view
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
    index = torch.arange(prod(shape)).view(shape)
    for each, places in positions.items():
        chosen = torch.tensor(places, dtype=torch.int64)
        along = [1] * len(shape)
        along[each] = len(places)
        index = torch.where(chosen.view(along) < 0, -1, index.index_select(each, chosen.clamp(min=0)))
    return shape, index.reshape(-1)
