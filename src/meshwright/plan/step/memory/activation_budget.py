"""Chooses for a chain of block calls what keeps, and what recomputes, the activations of their backwards.

A block call i returns o bytes and saves a bytes inside; its backward needs both, and s bytes more. There are
several ways to have the a bytes when its backward runs, each with seconds and with bytes that it holds until
then (`ActivationOption`):

    keep          0 s      a bytes held           recompute     one forward      0 bytes held
    selective     a part of a forward: operations whose outputs are held do not run in it
    others        as they say: encoded values (`gist`), a copy on the host (`offload`)

Several block calls in a row may be a *segment* (recomputed_segments.py): their outputs but the last are not
held either. Before its backward all of them run again; each but the last saves its a bytes then, or runs a
third time. What is saved then is written to memory and read later, where a rerun just before its backward
finds it in the cache: that takes seconds of its own.

The peak is taken while forwards run in order, then backwards. P_i are the bytes that block calls before i
hold between the two: their outputs, those inside segments left out, and what their options hold.

    backward of i                  P_i + o_i + a_i + s_i
    its rerun, if it is alone      P_i + o_i + r_i + o_i            r_i: a_i, and what is held for the rerun
                                                                    alone; the gradient of its output
    both, if i - 1 is on the host  as much and a_i-1, which comes back meanwhile; in a segment that begins at
                                   i from the rerun of i that saves on
    backward in a segment          P_a + Q_i + o_i + a_i + s_i      Q_i: o, and a if saved, of a .. i-1
    first rerun in a segment       P_a + Q_i + o_i + a_i + 2 o_b    its end b keeps o_b and a gradient
    the loss                       P_n + its own bytes

With w microbatches in flight, those that wait hold the same once more each. The dynamic program goes from the
last block call to the first. It keeps the *front*: all pairs of bytes and seconds of which none is worse than
another in both. Bytes are those above P_i, so nothing depends on the budget: the front of the chain has the
answer for every budget, and its first pair has the least bytes with which anything works.

    front_i = best of   front_i+1 + P of an option of i        for every option; front_i+1 with or without
                                                               what comes back meanwhile
                        front_b+1 + front of the reruns i .. b    for every segment that begins at i

Fronts are exact up to a number of points. Longer ones keep, in equal ranges of bytes, the fastest pair each.
Bytes are never rounded: what is chosen fits. For n block calls, segments of up to m and fronts of k points it
takes O(n m k) steps; k is such that 200 block calls take about a second.

Paper: Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains: how to train deep neural
networks with limited memory", arXiv 1911.13214 (here a block call runs at most three times, and more ways
than two hold activations); Jain et al. 2020, "Checkmate", arXiv 1910.02653.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isqrt
from operator import itemgetter
from typing import Any, NamedTuple

from meshwright.plan.step.memory.recomputed_segments import RecomputedSegment

KEEP, RECOMPUTE = "keep", "recompute"
Way = tuple[Any, ...]  # bytes, seconds, and the other fields of a point or a rerun
MAX_STEPS = 400_000  # of the dynamic program, which decides how many points a front may have
MIN_POINTS = 64
SHORT_CHAIN = 12  # block calls, in which any segment is tried
ROUNDING = 1e-12  # sums of seconds in another order are equal


@dataclass(frozen=True)
class ActivationOption:
    """A way to have what a block call saves when its backward runs: `seconds` beyond those of a step that
    keeps everything, bytes held between forward and backward, bytes during the backward, and bytes when its
    rerun ends; 0: it does not run again. `arriving_nbytes` come back during the backward of the block call
    behind it, and its rerun.
    """

    name: str
    seconds: float
    held_nbytes: int
    backward_nbytes: int
    rerun_nbytes: int = 0
    arriving_nbytes: int = 0


@dataclass(frozen=True)
class ChainBlock:
    """One block call of a chain. `saved_nbytes` are what it saves inside, `scratch_nbytes` what its backward
    needs beyond that and its output. `options` are ways besides keeping and recomputing it. `reload_s`: it
    takes so much longer to read what an early rerun has saved than what the last one has. A rerun whose
    output nobody reads takes `unread_s` less than a forward.

    `can_rerun`: it may run again. `can_drop_output`: only the next block call reads its output, so a segment
    may go on behind it. `in_flight` is the number of microbatches whose backward it waits for.
    """

    block_call: str
    forward_s: float
    output_nbytes: int
    saved_nbytes: int
    scratch_nbytes: int = 0
    options: tuple[ActivationOption, ...] = ()
    can_rerun: bool = True
    can_drop_output: bool = False
    in_flight: int = 1
    reload_s: float = 0.0
    unread_s: float = 0.0


@dataclass(frozen=True)
class ActivationChoice:
    """What is done with each block call, the seconds that it adds, and the peak of the bytes (see the
    module).

    `options` names, per block call, an option; those of `segments` run again.
    """

    peak_nbytes: int
    seconds: float
    options: dict[str, str]
    segments: tuple[RecomputedSegment, ...]


class _Rerun(NamedTuple):
    """A way to run a segment from some block call to its end again: bytes above those of the block calls
    before it, seconds of third runs and of reloads, whether the first rerun saves, and how it goes on.
    """

    nbytes: int
    seconds: float
    saves: bool = True
    behind: "_Rerun | None" = None


class _Point(NamedTuple):
    """A way for the block calls from some number on: bytes above those held before it, seconds, the option of
    the first, or the rerun of the segment up to `last`, and how it goes on.
    """

    nbytes: int
    seconds: float
    option: ActivationOption | None = None
    rerun: _Rerun | None = None
    last: int = -1
    behind: "_Point | None" = None


Points = dict[int, list[_Point]]  # by the bytes that come back during the first backward
Reruns = dict[int, list[_Rerun]]


class ActivationBudget:
    """The front of a chain of block calls, whose loss takes `loss_nbytes`; without `use_segments`, every
    block call keeps its input.
    """

    def __init__(
        self, blocks: Sequence[ChainBlock], loss_nbytes: int = 0, *, use_segments: bool = True
    ) -> None:
        self._blocks, self._use_segments = tuple(blocks), use_segments
        count = len(self._blocks)
        self._max_length = count if count <= SHORT_CHAIN else max(SHORT_CHAIN, 2 * isqrt(count))
        # by block call, the bytes that may come back during its backward
        self._arrivals = [{0}, *({0, *(each.arriving_nbytes for each in block.options)} for block in blocks)]
        num_fronts = sum(map(len, self._arrivals[:-1]))
        self._max_points = max(MIN_POINTS, MAX_STEPS // max(1, num_fronts * self._max_length))
        fronts: list[Points] = [{} for _ in range(count)]
        fronts.append({arriving: [_Point(loss_nbytes, 0.0)] for arriving in self._arrivals[count]})
        reruns = [list(self._rerun_fronts(last)) for last in range(count)]  # by last, then by length - 2
        for first in reversed(range(count)):
            for arriving in self._arrivals[first]:
                points: list[Way] = list(self._single_block(first, fronts[first + 1], arriving))
                for last in range(first + 1, min(count, first + self._max_length)):
                    if last - first - 1 < len(reruns[last]):
                        ways = reruns[last][last - first - 1][arriving]
                        points += self._segment(first, last, ways, fronts[last + 1][0])
                fronts[first][arriving] = [_Point(*point) for point in _front(points, self._max_points)]
        self._front = fronts[0][0]

    def choices(self) -> list[ActivationChoice]:
        """Returns the choices of which none has fewer bytes and fewer seconds than another, by bytes."""
        return [self._choice(point) for point in self._front]

    def fastest(self, nbytes: float) -> ActivationChoice | None:
        """Returns the fastest choice with at most `nbytes`; None if even the smallest has more."""
        fitting = [point for point in self._front if point.nbytes <= nbytes]
        return self._choice(fitting[-1]) if fitting else None

    def smallest(self) -> ActivationChoice:
        """Returns the choice with the least bytes."""
        return self._choice(self._front[0])

    def _single_block(self, number: int, ahead: Points, arriving: int) -> Iterator[Way]:
        """Yields points, as tuples, in which block call `number` is no part of a longer segment, and
        `arriving` bytes come back during its backward.
        """
        block = self._blocks[number]
        for option in _options(block):
            held = block.output_nbytes + option.held_nbytes
            rerun = option.rerun_nbytes + block.output_nbytes if option.rerun_nbytes else 0
            own = block.output_nbytes + max(rerun, option.backward_nbytes + block.scratch_nbytes) + arriving
            for point in ahead[option.arriving_nbytes]:
                nbytes = _with_waiting(block, point.nbytes, held, own)
                yield nbytes, point.seconds + option.seconds, option, None, number, point

    def _rerun_fronts(self, last: int) -> Iterator[Reruns]:
        """Yields the fronts of the reruns of each segment that ends with block call `last`, of 2, 3, ...
        block calls, by the bytes that come back during the backward of its first.
        """
        end = self._blocks[last]
        if not (self._use_segments and end.can_rerun):
            return
        at_end = end.output_nbytes + end.saved_nbytes + max(end.scratch_nbytes, end.output_nbytes)
        front = [_Rerun(at_end, 0.0)]
        for number in reversed(range(max(0, last - self._max_length + 1), last)):
            block = self._blocks[number]
            if not (block.can_rerun and block.can_drop_output):
                return
            fronts = {
                arriving: [
                    _Rerun(*way) for way in _front(_reruns(block, end, front, arriving), self._max_points)
                ]
                for arriving in self._arrivals[number]
            }
            yield fronts
            front = fronts[0]

    def _segment(
        self, first: int, last: int, reruns: Sequence[_Rerun], ahead: Sequence[_Point]
    ) -> Iterator[Way]:
        """Yields points, as tuples, in which block calls `first` to `last` are a segment."""
        end = self._blocks[last]
        seconds = sum(block.forward_s for block in self._blocks[first : last + 1]) - end.unread_s
        held = end.output_nbytes
        if max(block.in_flight for block in self._blocks[first : last + 1]) > 1:
            for point in ahead:
                for rerun in reruns:
                    nbytes = _with_waiting(end, point.nbytes, held, rerun.nbytes)
                    yield nbytes, seconds + point.seconds + rerun.seconds, None, rerun, last, point
            return
        at = 0  # of the reruns, the fastest within the bytes
        for number, point in enumerate(ahead):
            nbytes = max(point.nbytes + held, reruns[0].nbytes)
            while at + 1 < len(reruns) and reruns[at + 1].nbytes <= nbytes:
                at += 1
            yield nbytes, seconds + point.seconds + reruns[at].seconds, None, reruns[at], last, point
            until = ahead[number + 1].nbytes + held if number + 1 < len(ahead) else inf
            for rerun in reruns[at + 1 :]:
                if rerun.nbytes >= until:
                    break
                yield rerun.nbytes, seconds + point.seconds + rerun.seconds, None, rerun, last, point

    def _choice(self, point: _Point) -> ActivationChoice:
        peak, seconds, number, options = point.nbytes, point.seconds, 0, dict[str, str]()
        segments = list[RecomputedSegment]()
        while point.behind is not None:
            calls = tuple(block.block_call for block in self._blocks[number : point.last + 1])
            options |= dict.fromkeys(calls, RECOMPUTE if point.option is None else point.option.name)
            if point.option is None or point.option.rerun_nbytes:
                segments.append(RecomputedSegment(calls, frozenset(_saved_calls(calls, point.rerun))))
            number, point = point.last + 1, point.behind
        return ActivationChoice(peak, seconds, options, tuple(segments))


def _reruns(block: ChainBlock, end: ChainBlock, behind: Sequence[_Rerun], arriving: int) -> Iterator[Way]:
    """Yields reruns, as tuples, of a segment from `block` to `end`, which go on as those `behind`; `arriving`
    bytes come back from the rerun of `block` that saves on.
    """
    output, saved = block.output_nbytes, block.saved_nbytes
    own = output + saved + block.scratch_nbytes
    last = output + saved + max(block.scratch_nbytes, output) + arriving
    again = max(last, output + saved + 2 * end.output_nbytes)
    for each in behind:
        nbytes = max(each.nbytes + output + saved, own) + arriving
        yield nbytes, each.seconds + block.reload_s, True, each
        if saved:
            third_s = block.forward_s - block.unread_s
            yield max(each.nbytes + output, again), each.seconds + third_s, False, each


def _saved_calls(calls: Sequence[str], rerun: _Rerun | None) -> Iterator[str]:
    for block_call in calls[:-1]:
        if rerun is not None and rerun.saves:
            yield block_call
        rerun = None if rerun is None else rerun.behind


def _options(block: ChainBlock) -> Iterator[ActivationOption]:
    yield ActivationOption(KEEP, 0.0, block.saved_nbytes, block.saved_nbytes)
    if block.can_rerun and block.saved_nbytes:
        seconds = block.forward_s - block.unread_s
        yield ActivationOption(RECOMPUTE, seconds, 0, *2 * (block.saved_nbytes,))
    yield from block.options


def _with_waiting(block: ChainBlock, ahead: int, held: int, own: int) -> int:
    """Returns the bytes above those before `block`, which holds `held` and whose backward takes `own`, if
    those behind it take `ahead`.

    The microbatches that wait hold the same, and of what is behind at most their part of `ahead`.
    """
    waiting = block.in_flight - 1
    if not waiting:
        return max(ahead + held, own)
    return max(ahead + (waiting + 1) * held, own + waiting * held + waiting * ahead // (waiting + 1))


def _front(ways: Iterable[Way], max_points: int) -> list[Way]:
    """Returns the `ways` of which none has fewer bytes and fewer seconds than another, by bytes.

    Of more than `max_points`, it returns the one with the least bytes, and the fastest in each of as many
    ranges of bytes.
    """
    found, best = list[Way](), inf
    for way in sorted(ways, key=itemgetter(0, 1)):
        if way[1] < best:
            found.append(way)
            best = way[1] * (1 - ROUNDING)
    if len(found) <= max_points:
        return found
    low, width = found[0][0], (found[-1][0] - found[0][0]) / max_points
    fastest = {int((way[0] - low) / width): way for way in found}
    return [*([found[0]] if fastest[0] is not found[0] else []), *fastest.values()]
