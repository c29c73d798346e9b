"""The rounds of an algorithm, played on tensors: what goes out, what comes in, and what becomes of it.

`playing` is one rank's part, without any transport: it yields the parcels of a round as flat tensors, and goes on when they
have been delivered. Processes deliver over send and receive, one round after another; threads play all ranks in turn
(`play_all`). So what is tested on threads is what runs on a network.

A parcel is sent from, and received into, the tensor itself wherever its pieces lie one behind the other and nothing is added
to them. Else it goes through memory of its own: what is to be added, and pieces that run over the end of the circle of pieces.
"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from meshwright.comm.algorithms.schedule import AllReduceAlgorithm, PieceMessage, Round, cached_rounds
from meshwright.comm.collectives.deterministic_sum import ordered_sum

PeerTensors = list[tuple[int, torch.Tensor]]  # the index of the peer, and flat memory
ElementRange = tuple[int, int]  # the first element, and the one behind the last


@dataclass(frozen=True)
class MessageRanges:
    """Where the pieces of one parcel lie in a flat tensor: runs of memory, as few as there can be."""

    peer: int
    ranges: tuple[ElementRange, ...]

    @property
    def numel(self) -> int:
        """The elements of all runs."""
        return sum(end - first for first, end in self.ranges)


@dataclass(frozen=True)
class SizedRound:
    """A round for tensors of one size. `scratch` are the elements that arrive beside the tensor; empty parcels are left out."""

    round: Round
    sends: tuple[MessageRanges, ...]
    receives: tuple[MessageRanges, ...]
    scratch_numel: int


def run_rounds(
    algorithm: AllReduceAlgorithm, size: int, index: int, flat: torch.Tensor
) -> Generator[tuple[PeerTensors, PeerTensors]]:
    """One rank's part of an all-reduce of `flat`, in place: what to send and what to fill, to be done before it goes on.

    Call it where gradients are off. A round in which this rank has nothing to do yields two empty lists.
    """
    steps = _sized_rounds(algorithm, size, index, flat.numel())
    operand = flat.clone() if any(step.round.uses_original_operand for step in steps) else flat
    # one piece of memory for all rounds: at 64 MiB, new pages in every round cost as much as the sums
    scratch = flat.new_empty(max((step.scratch_numel for step in steps), default=0))
    for step in steps:
        mine = operand if step.round.uses_original_operand else flat
        landings = _receive_views(flat, scratch, step)
        yield [(each.peer, _pack(mine, each)) for each in step.sends], landings
        if step.round.accumulate:
            _add_received(step, index, mine, flat, landings)
        else:
            _copy_received(step, flat, landings)


@torch.no_grad()
def run_all_ranks(algorithm: AllReduceAlgorithm, operands: Sequence[torch.Tensor]) -> None:
    """All-reduce `operands`, the flat tensors of all ranks in order, in place and in turn."""
    size = len(operands)
    parts = [run_rounds(algorithm, size, index, flat) for index, flat in enumerate(operands)]
    for rounds in zip(*parts, strict=True):
        sent = {(index, peer): parcel for index, (sends, _) in enumerate(rounds) for peer, parcel in sends}
        for index, (_, receives) in enumerate(rounds):
            for peer, landing in receives:
                landing.copy_(sent.pop((peer, index)))
        if sent:
            raise RuntimeError(
                f"{algorithm} among {size} ranks: nobody receives what {sorted(sent)} (from, to) send"
            )


@lru_cache(maxsize=512)
def _sized_rounds(algorithm: AllReduceAlgorithm, size: int, index: int, numel: int) -> tuple[SizedRound, ...]:
    cuts = [piece * numel // algorithm.num_pieces(size) for piece in range(algorithm.num_pieces(size) + 1)]

    def stretches(parcels: Iterable[PieceMessage]) -> tuple[MessageRanges, ...]:
        found = [
            MessageRanges(
                parcel.peer, _merge_ranges([(cuts[piece], cuts[piece + 1]) for piece in parcel.pieces])
            )
            for parcel in parcels
        ]
        return tuple(stretch for stretch in found if stretch.numel)

    steps = []
    for each in cached_rounds(algorithm, size, index):
        receives = stretches(each.receives)
        beside = sum(stretch.numel for stretch in receives if each.accumulate or len(stretch.ranges) > 1)
        steps.append(SizedRound(each, stretches(each.sends), receives, beside))
    return tuple(steps)


def _merge_ranges(pieces: Iterable[ElementRange]) -> tuple[ElementRange, ...]:
    """`pieces` with neighbours joined."""
    runs: list[ElementRange] = []
    for first, end in pieces:
        if runs and runs[-1][1] == first:
            runs[-1] = (runs[-1][0], end)
        elif end > first:
            runs.append((first, end))
    return tuple(runs)


def _pack(mine: torch.Tensor, stretch: MessageRanges) -> torch.Tensor:
    views = [mine[first:end] for first, end in stretch.ranges]
    return views[0] if len(views) == 1 else torch.cat(views)


def _receive_views(flat: torch.Tensor, scratch: torch.Tensor, step: SizedRound) -> PeerTensors:
    """Where the parcels of a round are to arrive: in their places, or in `scratch` one behind the other."""
    landings, used = [], 0
    for stretch in step.receives:
        if step.round.accumulate or len(stretch.ranges) > 1:
            numel = stretch.numel
            landings.append((stretch.peer, scratch[used : used + numel]))
            used += numel
        else:
            ((first, end),) = stretch.ranges
            landings.append((stretch.peer, flat[first:end]))
    return landings


def _copy_received(step: SizedRound, flat: torch.Tensor, landings: PeerTensors) -> None:
    for stretch, (_, arrived) in zip(step.receives, landings, strict=True):
        if len(stretch.ranges) > 1:
            for (first, end), part in _split_received(stretch, arrived):
                flat[first:end].copy_(part)


def _add_received(
    step: SizedRound, index: int, mine: torch.Tensor, flat: torch.Tensor, landings: PeerTensors
) -> None:
    """Add what has arrived to the own pieces: summands of one place in the order of the ranks, the own one among them."""
    places: dict[ElementRange, dict[int, torch.Tensor]] = {}
    for stretch, (peer, arrived) in zip(step.receives, landings, strict=True):
        for run, part in _split_received(stretch, arrived):
            places.setdefault(run, {})[peer] = part
    for (first, end), parts in places.items():
        if len(parts) == 1 and mine is flat:  # two summands: a + b is b + a
            flat[first:end].add_(*parts.values())
        else:
            everyone = {**parts, index: mine[first:end]}
            flat[first:end].copy_(ordered_sum([everyone[peer] for peer in sorted(everyone)]))


def _split_received(
    stretch: MessageRanges, arrived: torch.Tensor
) -> Iterable[tuple[ElementRange, torch.Tensor]]:
    return zip(stretch.ranges, arrived.split([end - first for first, end in stretch.ranges]), strict=True)
