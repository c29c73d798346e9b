"""Executes the rounds of an all-reduce algorithm on tensors.

`run_rounds` is one rank's part, without any transport: it yields the messages of a round as flat tensors, and
continues when they have been delivered. Processes deliver them by send and receive, round by round; threads
run all ranks in turn (`run_all_ranks`). So the tests on threads test the code that runs on a network.

A message is sent from, and received into, the tensor itself if its chunks are adjacent and nothing is added
to them. Otherwise it goes through a scratch buffer: summands, and chunks that wrap around the end.
"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from meshwright.comm.allreduce.algorithm_as_rounds import (
    AllReduceAlgorithm,
    ChunkMessage,
    Round,
    cached_rounds,
)
from meshwright.comm.collectives.deterministic_sum import ordered_sum
from meshwright.comm.collectives.group import PeerTensors, Rounds

ElementRange = tuple[int, int]  # the first element, and the one behind the last


@dataclass(frozen=True)
class MessageRanges:
    """The element ranges of one message in a flat tensor, adjacent ones merged."""

    peer: int
    ranges: tuple[ElementRange, ...]

    @property
    def numel(self) -> int:
        """The number of elements of all ranges."""
        return sum(end - first for first, end in self.ranges)


@dataclass(frozen=True)
class SizedRound:
    """A round for tensors of one size.

    `scratch_numel` elements arrive in the scratch buffer; empty messages are left out.
    """

    round: Round
    sends: tuple[MessageRanges, ...]
    receives: tuple[MessageRanges, ...]
    scratch_numel: int


def run_rounds(
    algorithm: AllReduceAlgorithm, size: int, index: int, flat: torch.Tensor
) -> Generator[tuple[PeerTensors, PeerTensors]]:
    """Yields, round by round, what this rank sends and the buffers to receive into.

    For an all-reduce of `flat` in place. The caller delivers the messages before it continues the generator,
    and disables gradients. A round in which this rank has nothing to do yields two empty lists.
    """
    steps = _sized_rounds(algorithm, size, index, flat.numel())
    operand = flat.clone() if any(step.round.uses_original_operand for step in steps) else flat
    # one piece of memory for all rounds: at 64 MiB, new pages in every round cost as much as the sums
    scratch = flat.new_empty(max((step.scratch_numel for step in steps), default=0))
    for step in steps:
        mine = operand if step.round.uses_original_operand else flat
        buffers = _receive_views(flat, scratch, step)
        yield [(each.peer, _pack(mine, each)) for each in step.sends], buffers
        if step.round.accumulate:
            _add_received(step, index, mine, flat, buffers)
        else:
            _copy_received(step, flat, buffers)


@torch.no_grad()
def run_all_ranks(algorithm: AllReduceAlgorithm, operands: Sequence[torch.Tensor]) -> None:
    """All-reduces `operands`, the flat tensors of all ranks in order, in place."""
    size = len(operands)
    deliver_rounds(
        [run_rounds(algorithm, size, index, flat) for index, flat in enumerate(operands)], str(algorithm)
    )


def deliver_rounds(rounds_by_index: Sequence[Rounds], name: str) -> None:
    """Delivers the messages of all ranks, round by round; `name` is for errors.

    Raises RuntimeError for a message that no rank receives.
    """
    for rounds in zip(*rounds_by_index, strict=True):
        sent = {(index, peer): message for index, (sends, _) in enumerate(rounds) for peer, message in sends}
        for index, (_, receives) in enumerate(rounds):
            for peer, buffer in receives:
                buffer.copy_(sent.pop((peer, index)))
        if sent:
            raise RuntimeError(
                f"{name} among {len(rounds_by_index)} ranks: no rank receives what {sorted(sent)} (from, to) "
                "send"
            )


@lru_cache(maxsize=512)
def _sized_rounds(algorithm: AllReduceAlgorithm, size: int, index: int, numel: int) -> tuple[SizedRound, ...]:
    cuts = [chunk * numel // algorithm.num_chunks(size) for chunk in range(algorithm.num_chunks(size) + 1)]

    def ranges_of(messages: Iterable[ChunkMessage]) -> tuple[MessageRanges, ...]:
        found = [
            MessageRanges(
                message.peer, _merge_ranges([(cuts[chunk], cuts[chunk + 1]) for chunk in message.chunks])
            )
            for message in messages
        ]
        return tuple(message for message in found if message.numel)

    steps = []
    for each in cached_rounds(algorithm, size, index):
        receives = ranges_of(each.receives)
        beside = sum(message.numel for message in receives if each.accumulate or len(message.ranges) > 1)
        steps.append(SizedRound(each, ranges_of(each.sends), receives, beside))
    return tuple(steps)


def _merge_ranges(chunks: Iterable[ElementRange]) -> tuple[ElementRange, ...]:
    runs: list[ElementRange] = []
    for first, end in chunks:
        if runs and runs[-1][1] == first:
            runs[-1] = (runs[-1][0], end)
        elif end > first:
            runs.append((first, end))
    return tuple(runs)


def _pack(mine: torch.Tensor, message: MessageRanges) -> torch.Tensor:
    views = [mine[first:end] for first, end in message.ranges]
    return views[0] if len(views) == 1 else torch.cat(views)


def _receive_views(flat: torch.Tensor, scratch: torch.Tensor, step: SizedRound) -> PeerTensors:
    """The buffers of the messages of a round: in place, or in `scratch` one after the other."""
    buffers, used = [], 0
    for message in step.receives:
        if step.round.accumulate or len(message.ranges) > 1:
            numel = message.numel
            buffers.append((message.peer, scratch[used : used + numel]))
            used += numel
        else:
            ((first, end),) = message.ranges
            buffers.append((message.peer, flat[first:end]))
    return buffers


def _copy_received(step: SizedRound, flat: torch.Tensor, buffers: PeerTensors) -> None:
    for message, (_, arrived) in zip(step.receives, buffers, strict=True):
        if len(message.ranges) > 1:
            for (first, end), part in _split_received(message, arrived):
                flat[first:end].copy_(part)


def _add_received(
    step: SizedRound, index: int, mine: torch.Tensor, flat: torch.Tensor, buffers: PeerTensors
) -> None:
    """Adds what was received: all summands of a range in rank order, this rank's own among them."""
    places: dict[ElementRange, dict[int, torch.Tensor]] = {}
    for message, (peer, arrived) in zip(step.receives, buffers, strict=True):
        for run, part in _split_received(message, arrived):
            places.setdefault(run, {})[peer] = part
    for (first, end), parts in places.items():
        if len(parts) == 1 and mine is flat:  # two summands: a + b is b + a
            flat[first:end].add_(*parts.values())
        else:
            everyone = {**parts, index: mine[first:end]}
            flat[first:end].copy_(ordered_sum([everyone[peer] for peer in sorted(everyone)]))


def _split_received(
    message: MessageRanges, arrived: torch.Tensor
) -> Iterable[tuple[ElementRange, torch.Tensor]]:
    return zip(message.ranges, arrived.split([end - first for first, end in message.ranges]), strict=True)
