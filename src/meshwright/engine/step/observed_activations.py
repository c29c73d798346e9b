"""What codes of activations have lost on all ranks in a step, as one device can play it.

    sent       lost by a value on its way to a stage, of the whole global batch: the parts of all ranks
    forwarded  a stage has what the stage has that it came from, less what was lost on the way
    returned   lost by the gradient that came back from a stage
    inside     lost inside blocks by what layers take and return, and by its gradient

All ranks call these functions, after a step and beside its program, as those of observed_sums.py.
"""

import json
from collections.abc import Iterator, Mapping
from math import prod

import torch

from meshwright.engine.forward_backward.observed_codes import BACKWARD, FORWARD, TAKEN
from meshwright.engine.runtime.rank_state import RankState
from meshwright.engine.step.observed_sums import ACTION, largest_of_ranks
from meshwright.model.blocks.rounded_layers import RoundedLayers, Rounding, UseKey
from meshwright.model.pipeline.rounded_values import RoundedValues
from meshwright.plan.model_spec.stage_transfers import StageTransfer, stage_transfers
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.step.program import Action
from meshwright.plan.step.single_device_program import FORWARD_KINDS

MAX_DIMS = 15  # of a value
LostByKey = Mapping[tuple[str, ...], torch.Tensor]


def rounded_values(state: RankState) -> RoundedValues | None:
    """Returns what each stage saw of the values of others in this step, and what layers took and returned
    inside blocks; None if nothing was rounded.
    """
    plan, keys = state.plan, _keys_of_all_ranks(state)
    lost = _lost_by_key(state, [key for key in keys if key[0] != TAKEN])
    if not lost:
        return None
    uses = frozenset[UseKey](key[1:] for key in keys if key[0] == TAKEN)
    layers = _rounded_layers(lost, uses, plan.job.train.batch) if uses else None
    roundings = _roundings_by_stage(plan, lost)
    stages = plan.sharding.stages
    numbers = {block_call: number for number, stage in enumerate(stages) for block_call in stage.block_calls}
    return RoundedValues(roundings, numbers, plan.job.train.batch, layers)


def _rounded_layers(lost: LostByKey, uses: frozenset[UseKey], num_samples: int) -> RoundedLayers:
    roundings = {use: Rounding(lost.get((FORWARD, *use)), lost.get((BACKWARD, *use))) for use in uses}
    return RoundedLayers(roundings, uses, num_samples)


def _roundings_by_stage(plan: Plan, lost: LostByKey) -> dict[tuple[str, int], Rounding]:
    roundings: dict[tuple[str, int], Rounding] = {}
    for transfer, microbatches in _transfers(plan):
        name, target = transfer.value.name, transfer.target
        known = roundings.get((name, transfer.source))
        sent = lost.get(("SEND", transfer.subject(backward=False)))
        before = None if known is None else known.lost
        summand = before if sent is None else sent
        if summand is None:
            continue
        found = roundings.get((name, target))
        total = torch.zeros_like(summand) if found is None or found.lost is None else found.lost
        _add_samples(total, (sent, before), transfer, plan, microbatches)
        roundings[name, target] = Rounding(total, lost.get(("SEND_GRAD", transfer.subject(backward=True))))
    return roundings


def largest_code_error(state: RankState) -> float:
    """Returns the largest loss of any code of this step on any rank, in units of what its codec allows."""
    return largest_of_ranks(state, max((each.error for each in state.observed_codes or ()), default=0.0))


def _keys_of_all_ranks(state: RankState) -> list[tuple[str, ...]]:
    """Returns the keys under which any rank has noted something, sorted."""
    mine = json.dumps(sorted({each.key for each in state.observed_codes or ()})).encode()
    text = torch.tensor(list(mine), dtype=torch.uint8, device=state.world.device)
    longest = int(_of_all_ranks(state, torch.tensor([len(mine)], device=text.device)).max())
    padded = torch.full((longest,), ord(" "), dtype=torch.uint8, device=text.device)
    padded[: len(mine)] = text
    found = (json.loads(bytes(each.tolist())) for each in _of_all_ranks(state, padded))
    return sorted({tuple(key) for keys in found for key in keys})


def _lost_by_key(state: RankState, keys: list[tuple[str, ...]]) -> dict[tuple[str, ...], torch.Tensor]:
    """Returns what all ranks have lost, by key, in the shape of the value, on the CPU."""
    lost, group, device = dict[tuple[str, ...], torch.Tensor](), state.world.group(AXES), state.world.device
    for key in keys:
        mine = [each for each in state.observed_codes or () if each.key == key]
        described = torch.zeros(MAX_DIMS + 1, dtype=torch.int64, device=device)
        for each in mine[:1]:
            described[: len(each.shape) + 1] = described.new_tensor((len(each.shape), *each.shape))
        num_dims, *sizes = _of_all_ranks(state, described).amax(0).tolist()
        if not num_dims:
            continue  # in this step no rank had codes of it
        shape = sizes[:num_dims]
        total = torch.zeros(prod(shape) + 1, dtype=torch.float64, device=device)  # one more: padding
        for each in mine:
            total.index_add_(0, each.index.to(device) % len(total), each.lost.double())
        group.all_reduce(total, action=ACTION).wait()
        lost[key] = total[:-1].view(shape).cpu()
    return lost


def _of_all_ranks(state: RankState, mine: torch.Tensor) -> torch.Tensor:
    group = state.world.group(AXES)
    found = mine.new_empty(group.size, mine.numel())
    group.all_gather(found, mine, action=ACTION).wait()
    return found


def _transfers(plan: Plan) -> Iterator[tuple[StageTransfer, list[int]]]:
    """Yields the transfers of all values between stages, in the order of their targets, each with the
    microbatches that take this way.
    """
    by_ranks: dict[tuple[int, ...], list[int]] = {}
    runs = _stage_ranks(plan)
    for microbatch in range(plan.num_microbatches):
        ranks = tuple(runs[number, microbatch] for number in range(len(plan.sharding.stages)))
        by_ranks.setdefault(ranks, []).append(microbatch)
    for ranks, microbatches in by_ranks.items():
        for transfer in stage_transfers(plan.sharding.stages, ranks):
            yield transfer, microbatches


def _stage_ranks(plan: Plan) -> Mapping[tuple[int, int], int]:
    """Returns the rank along pp that runs each stage of each microbatch."""
    first = {stage.block_calls[0]: number for number, stage in enumerate(plan.sharding.stages)}

    def runs(actions: tuple[Action, ...]) -> Iterator[tuple[int, int]]:
        for action in actions:
            if action.kind in FORWARD_KINDS and action.subject in first:
                yield first[action.subject], action.microbatch or 0

    return {key: pp_rank for pp_rank in range(plan.mesh.pp) for key in runs(plan.stage_role(pp_rank).actions)}


def _add_samples(
    total: torch.Tensor,
    summands: tuple[torch.Tensor | None, ...],
    transfer: StageTransfer,
    plan: Plan,
    microbatches: list[int],
) -> None:
    """Adds the part of `summands` that belongs to the samples of `microbatches` to `total`."""
    dim = transfer.value.sample_dim or 0
    size = plan.num_data * plan.micro_batch * transfer.value.dim_sizes[dim][1]
    for microbatch in microbatches:
        for each in summands:
            if each is not None:
                total.narrow(dim, microbatch * size, size).add_(each.narrow(dim, microbatch * size, size))
