"""Several sources as one: which source each sample comes from is computed, not remembered.

Weights are shares of samples. The positions of the global order are given to the sources one after the other by the quota
method: position k goes, among the sources that have had less than their share of the first k + 1 positions, to the one
that is furthest behind, the least (count + 1) / weight. Then every source has, of any first k positions, its share of k,
rounded up or down; it is never a whole sample off.

    weights 5 : 3 : 2       position  0 1 2 3 4 5 6 7 8 9 | 0 1 2 ...
                            source    a b a c a b a b a c | a b a ...     5, 3 and 2 of each 10

The sequence repeats once every source has had its weight in whole numbers (10 positions above), so one such period is
computed when the mixture is opened, and any position is found by one division: a run resumes anywhere, on any number of
ranks. Weights that need more than 2^16 positions are rounded to them. Each source is played in an order of its own, as
often as its share needs; with `epochs` = n the mixture ends before a source would begin for the n + 1st time.

Paper: Balinski and Young, The quota method of apportionment, American Mathematical Monthly 82, 1975.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from hashlib import blake2b, sha256
from math import gcd, lcm

import numpy as np
import torch

from meshwright.run.data.shuffle import ABSENT_SAMPLE, ShuffledOrder
from meshwright.run.data.tokenizer import IGNORE_INDEX, TokenDataset, check_ids

MAX_PERIOD = 1 << 16


def integer_shares(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the ratios of `weights`, without a common divisor.

    Where they would need a sum above 2^16 they are rounded to that sum, with at least 1 each.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    whole = [int(weight * lcm(*(each.denominator for each in exact))) for weight in exact]
    total = sum(whole)
    if total // gcd(*whole) > MAX_PERIOD:
        whole = [max(1, round(Fraction(weight * MAX_PERIOD, total))) for weight in whole]
        whole[whole.index(max(whole))] += MAX_PERIOD - sum(whole)
    return [weight // gcd(*whole) for weight in whole]


def interleave(shares: Sequence[int]) -> np.ndarray:
    """One period: for each of sum(shares) positions the source that it belongs to; source s has shares[s] of them."""
    period, counts, found = sum(shares), [0] * len(shares), []
    least = lcm(*shares)
    behind = [
        least // share for share in shares
    ]  # (count + 1) / share in whole numbers, each in units of 1 / least
    for k in range(1, period + 1):
        s = min((behind[s], s) for s, share in enumerate(shares) if counts[s] * period < share * k)[1]
        counts[s] += 1
        behind[s] += least // shares[s]
        found.append(s)
    return np.asarray(found, np.int64)


@dataclass(frozen=True)
class MixedOrder:
    """Which samples of a mixture make up each global step; sample i of source s has the id i + the samples before s."""

    sizes: tuple[int, ...]
    shares: tuple[int, ...]
    seed: int
    epochs: int = 0

    @cached_property
    def _period(self) -> tuple[np.ndarray, np.ndarray]:
        """The source of each position of a period, and how many of that source's positions come before it."""
        sources = interleave(self.shares)
        before = np.zeros_like(sources)
        for s, share in enumerate(self.shares):
            before[sources == s] = np.arange(share)
        return sources, before

    @cached_property
    def _orders(self) -> tuple[ShuffledOrder, ...]:
        return tuple(
            ShuffledOrder(size, _seed(self.seed, s), self.epochs) for s, size in enumerate(self.sizes)
        )

    @cached_property
    def num_total(self) -> int | None:
        """The positions until a source would begin once too often; None without end."""
        if not self.epochs:
            return None
        sources, before = self._period
        ends = []
        for s, (size, share) in enumerate(zip(self.sizes, self.shares, strict=True)):
            rounds, index = divmod(size * self.epochs, share)
            ends.append(rounds * len(sources) + int(np.flatnonzero((sources == s) & (before == index))[0]))
        return min(ends)

    def ids(self, step: int, batch: int) -> list[int]:
        """The `batch` global sample ids of global step `step`, from 0. Places after the end hold -1, an absent sample."""
        first = step * batch
        num = batch if self.num_total is None else min(max(self.num_total - first, 0), batch)
        found = np.full(batch, ABSENT_SAMPLE, np.int64)
        rounds, at = np.divmod(np.arange(first, first + num), sum(self.shares))
        sources, before = (table[at] for table in self._period)
        offset = 0
        for s, (size, share) in enumerate(zip(self.sizes, self.shares, strict=True)):
            mine = np.flatnonzero(sources == s)
            if mine.size:  # the places of one source follow each other in its own order
                begin = int(rounds[mine[0]] * share + before[mine[0]])
                found[mine] = np.asarray(self._orders[s].ids_at(begin, mine.size)) + offset
            offset += size
        return found.tolist()


class Mixture(TokenDataset):
    """The samples of all `parts`, numbered one part after the other; `weights` are their shares."""

    def __init__(self, datasets: Sequence[TokenDataset], weights: Sequence[float]) -> None:
        self.datasets, self.shares = tuple(datasets), tuple(integer_shares(weights))
        self.sequence, self.tokenizer = datasets[0].sequence, datasets[0].tokenizer
        self.notes = tuple(note for part in datasets for note in part.notes)
        said = [f"{share} {part.digest}" for share, part in zip(self.shares, datasets, strict=True)]
        self.digest = sha256("\n".join(said).encode()).hexdigest()
        self._ends = np.cumsum([len(part) for part in datasets])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def order(self, seed: int, epochs: int) -> MixedOrder:
        """The order in which the samples are played."""
        return MixedOrder(tuple(len(part) for part in self.datasets), self.shares, seed, epochs)

    def batch(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        rows = check_ids(ids, len(self))
        owner = np.where(rows >= 0, np.searchsorted(self._ends, rows, side="right"), 0)
        found = {
            "input_ids": torch.zeros((len(rows), self.sequence), dtype=torch.int64),
            "labels": torch.full((len(rows), self.sequence), IGNORE_INDEX, dtype=torch.int64),
        }
        for s, part in enumerate(self.datasets):
            mine = np.flatnonzero(owner == s)
            if mine.size:
                first = int(self._ends[s]) - len(part)
                here = part.batch(np.where(rows[mine] >= 0, rows[mine] - first, ABSENT_SAMPLE).tolist())
                for key, value in found.items():
                    value[torch.from_numpy(mine)] = here[key]
        return found


def _seed(seed: int, part: int) -> int:
    """A seed for the order of one part: parts of one size are not played in step."""
    return int.from_bytes(blake2b(f"part {part} of {seed}".encode(), digest_size=8).digest())
