"""The order of samples: a shuffle that is computed, not stored.

Each epoch is a permutation of all samples, keyed by (seed, epoch). It is a Feistel network: the index is
split into a left and a right half, and each round replaces (left, right) by (right, left XOR f(right, key)).
For any f a round can be inverted, so the network is a bijection on the numbers below 4^h. Where 4^h is
larger than the number of samples, an index that falls outside is sent through again until it falls inside
("cycle walking", under 4 times on average), which is a bijection too.

So sample 10^12 of epoch 7 costs as much as the first: microseconds, and no memory. The position in the data
is step x batch; a checkpoint needs only its step, and the order does not depend on the number of ranks.
Ranks split a step's list of samples (`rank_sample_ids`) after the order is fixed.

Ciphers with arbitrary finite domains: Black and Rogaway, CT-RSA 2002 (cycle walking).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from meshwright.plan.job.errors import Diagnostic, raise_diagnostics

ABSENT_SAMPLE = -1
FEISTEL_ROUNDS = 6
MAX_SAMPLES = 1 << 60  # both halves of an index and their products stay inside 64 bits


@dataclass(frozen=True)
class ShuffledOrder:
    """The samples of each global step: every sample once per epoch, for `epochs` epochs (0: without end)."""

    num_samples: int
    seed: int
    epochs: int = 0

    def __post_init__(self) -> None:
        raise_diagnostics(self._diagnostics())

    def _diagnostics(self) -> Iterator[Diagnostic]:
        if not 1 <= self.num_samples <= MAX_SAMPLES:
            yield Diagnostic(
                f"{self.num_samples} samples; needed are 1 to 2^60",
                "point data.source at more text",
                "data.source",
            )
        if self.epochs < 0:
            yield Diagnostic(
                f"{self.epochs} epochs",
                "0 repeats without end; 1, 2, 3... stop after that many",
                "data.epochs",
            )

    def ids(self, step: int, batch: int) -> list[int]:
        """Returns the `batch` global sample ids of global step `step`, from 0; steps continue across epochs.

        Positions after the last epoch hold -1, an absent sample.
        """
        if step < 0 or batch < 1:
            raise ValueError(
                f"step {step} with {batch} samples; needed are a step from 0 and at least 1 "
                f"sample: count steps from 0"
            )
        return self.ids_at(step * batch, batch)

    def ids_at(self, position: int, count: int) -> list[int]:
        """Returns the `count` sample ids from `position` of the sequence of epochs on; -1 after the last
        epoch.
        """
        found: list[int] = []
        end = position + count
        last = end if self.num_total is None else min(end, self.num_total)
        while position < last:
            epoch, first = divmod(position, self.num_samples)
            num = min(self.num_samples - first, last - position)
            found += self._shuffle(epoch, np.arange(first, first + num, dtype=np.uint64))
            position += num
        return found + [ABSENT_SAMPLE] * (count - len(found))

    @property
    def num_total(self) -> int | None:
        """The number of samples of all epochs; None without end."""
        return self.epochs * self.num_samples or None

    def _shuffle(self, epoch: int, index: np.ndarray) -> list[int]:
        half = max(1, ((self.num_samples - 1).bit_length() + 1) // 2)
        seed = blake2b(f"order {self.seed} {epoch}".encode(), digest_size=8 * FEISTEL_ROUNDS).digest()
        keys = np.frombuffer(seed, dtype="<u8").astype(np.uint64)
        index = _network(index, keys, half)
        while (outside := index >= self.num_samples).any():
            index[outside] = _network(index[outside], keys, half)
        return index.tolist()


def rank_sample_ids(
    ids: Sequence[int], microbatch: int, num_microbatches: int, data_rank: int, num_data_ranks: int
) -> list[int]:
    """Returns the ids of data rank `data_rank` in microbatch `microbatch`: a contiguous slice of `ids`.

    With k = len(ids) / (num_microbatches x num_data_ranks), rounded up, microbatch m of rank r is the slice
    of k ids at (m x num_data_ranks + r) x k.
    """
    if not (0 <= microbatch < num_microbatches and 0 <= data_rank < num_data_ranks):
        raise ValueError(
            f"microbatch {microbatch} of {num_microbatches} on data rank {data_rank} of {num_data_ranks} "
            f"does not exist; both count from 0, "
            "so pass numbers below their totals"
        )
    k = -(-len(ids) // (num_microbatches * num_data_ranks))
    first = (microbatch * num_data_ranks + data_rank) * k
    mine = list(ids[first : first + k])
    return mine + [ABSENT_SAMPLE] * (k - len(mine))


def _network(index: np.ndarray, keys: np.ndarray, half: int) -> np.ndarray:
    mask = np.uint64((1 << half) - 1)
    left, right = index >> np.uint64(half), index & mask
    for r in range(keys.size):
        left, right = right, left ^ (_mix_bits(right + keys[r]) & mask)
    return (left << np.uint64(half)) | right


def _mix_bits(bits: np.ndarray) -> np.ndarray:
    """Each 64-bit number turned into another that shares no visible pattern with it (the finaliser of
    SplitMix64).
    """
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
