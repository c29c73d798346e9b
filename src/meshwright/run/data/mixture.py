"""Mixes several data sources by weight. The source of each sample is computed, not stored.

Weights are fractions of samples. The quota method assigns the positions of the global order: position k
goes, among the sources that have had less than their fraction of the first k + 1 positions, to the one with
the smallest (count + 1) / weight. Then every source has its fraction of any first k positions, rounded up or
down; it is never off by a whole sample.

    weights 5 : 3 : 2       position  0 1 2 3 4 5 6 7 8 9 | 0 1 2 ...
                            source    a b a c a b a b a c | a b a ...     5, 3 and 2 of each 10

The sequence repeats after one period (10 positions above). The period is computed when the mixture is
opened, and any position is found by one division: a run resumes anywhere, on any number of ranks. Weights
that need a period of more than 2^16 positions are rounded. Each source has a shuffle of its own and repeats
as often as its fraction needs; with `epochs` = n the mixture ends before a source would begin for the n +
1st time.

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

from meshwright.model.loss.loss_definition import IGNORE_INDEX
from meshwright.run.data.shuffle import ABSENT_SAMPLE, ShuffledOrder
from meshwright.run.data.token_dataset import TokenCount, TokenDataset, check_ids

MAX_PERIOD = 1 << 16


def integer_shares(weights: Sequence[float]) -> list[int]:
    """Returns integers in the ratios of `weights`, without a common divisor.

    If their sum would exceed 2^16, they are rounded to that sum, with at least 1 each.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    whole = [int(weight * lcm(*(each.denominator for each in exact))) for weight in exact]
    total = sum(whole)
    if total // gcd(*whole) > MAX_PERIOD:
        whole = [max(1, round(Fraction(weight * MAX_PERIOD, total))) for weight in whole]
        whole[whole.index(max(whole))] += MAX_PERIOD - sum(whole)
    return [weight // gcd(*whole) for weight in whole]


def interleave(shares: Sequence[int]) -> np.ndarray:
    """Returns one period: for each of sum(shares) positions its source; source s has shares[s] positions."""
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
    """The samples of each global step of a mixture; sample i of source s has the id i + the samples of the
    sources before s.
    """

    sizes: tuple[int, ...]
    shares: tuple[int, ...]
    seed: int
    epochs: int = 0

    @cached_property
    def _period(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each position of a period, and the number of earlier positions of the same
        source.
        """
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
        """The number of positions until a source would begin once too often; None without end."""
        if not self.epochs:
            return None
        sources, before = self._period
        ends = []
        for s, (size, share) in enumerate(zip(self.sizes, self.shares, strict=True)):
            rounds, index = divmod(size * self.epochs, share)
            ends.append(rounds * len(sources) + int(np.flatnonzero((sources == s) & (before == index))[0]))
        return min(ends)

    def ids(self, step: int, batch: int) -> list[int]:
        """Returns the `batch` global sample ids of global step `step`, from 0; -1 (absent) after the end."""
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
    """The samples of all `datasets`, numbered one dataset after the other; `weights` are their fractions."""

    def __init__(self, datasets: Sequence[TokenDataset], weights: Sequence[float]) -> None:
        self.datasets, self.shares = tuple(datasets), tuple(integer_shares(weights))
        self.sequence, self.tokenizer = datasets[0].sequence, datasets[0].tokenizer
        self.notes = tuple(note for part in datasets for note in part.notes)
        said = [f"{share} {part.digest}" for share, part in zip(self.shares, datasets, strict=True)]
        self.digest = sha256("\n".join(said).encode()).hexdigest()
        self._ends = np.cumsum([len(part) for part in datasets])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def count_tokens(self) -> TokenCount | None:
        counts = [part.count_tokens() for part in self.datasets]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            return None
        return TokenCount(
            sum(count.num_positions for count in known),
            sum(count.num_tokens for count in known),
            sum(count.num_labels for count in known),
        )

    def epochs(self, num_samples: int) -> tuple[float, ...]:
        """Returns how often each dataset is read by the first `num_samples` samples of the mixture."""
        total = sum(self.shares)
        return tuple(
            num_samples * share / total / len(part)
            for share, part in zip(self.shares, self.datasets, strict=True)
        )

    def source_size(self, i: int) -> int:
        """Returns the number of samples of the dataset that sample `i` is from."""
        return len(self.datasets[int(np.searchsorted(self._ends, i, side="right"))])

    def order(self, seed: int, epochs: int) -> MixedOrder:
        """Returns the order in which the samples are read."""
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
    return int.from_bytes(blake2b(f"part {part} of {seed}".encode(), digest_size=8).digest())
