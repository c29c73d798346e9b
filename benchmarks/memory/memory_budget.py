"""What `memory_budget` chooses: as good as trying everything.

200 random chains of up to 10 block calls: bytes and seconds of every choice on the front of the dynamic
program, against those of all choices, each played forward and backward (bar: equal). Nothing is timed; how
fast a chosen step is, `memory_budget_speed` measures.

python -m benchmarks.memory.memory_budget             a minute
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.harness.result import Result
from benchmarks.memory.random_chains import all_choices, played, random_chain
from meshwright.plan.step.memory.activation_budget import ActivationBudget, ChainBlock

NAME = "memory_budget"
CLAIM = "on 200 random chains memory_budget has the bytes and seconds of the best of all choices"
NUM_CHAINS, MOST_BLOCKS, SEED = 200, 10, 0
Front = list[tuple[int, float]]  # bytes and seconds; more bytes, fewer seconds


@dataclass(frozen=True)
class Outcome:
    """One chain: its block calls, the number of all choices, the points of the best of them, and how many of
    these the dynamic program misses, or has besides.
    """

    blocks: int
    choices: int
    points: int
    differing: int


def best_of_all(blocks: Sequence[ChainBlock], loss: int) -> tuple[Front, int]:
    """Returns the front of all choices for a chain, each played, and how many there are."""
    best: dict[int, float] = {}
    count = 0
    for parts in all_choices(blocks):
        nbytes, seconds = played(blocks, parts, loss)
        best[nbytes] = min(seconds, best.get(nbytes, seconds))
        count += 1
    front: Front = []
    for nbytes, seconds in sorted(best.items()):
        if not front or seconds < front[-1][1]:
            front.append((nbytes, seconds))
    return front, count


def outcomes(count: int, most: int) -> list[Outcome]:
    """Returns the outcomes of `count` random chains of up to `most` block calls."""
    rng, found = Random(SEED), []
    for _ in range(count):
        blocks, loss = random_chain(rng, most), rng.randint(0, 60)
        front, choices = best_of_all(blocks, loss)
        chosen = [(each.peak_nbytes, each.seconds) for each in ActivationBudget(blocks, loss).choices()]
        differing = len({*front} ^ {*chosen}) + (len(chosen) != len({*chosen}))
        found.append(Outcome(len(blocks), choices, len(front), differing))
    return found


def result(found: Sequence[Outcome]) -> Result:
    """Returns the result of these chains."""
    detail = {
        "seed": SEED,
        "choices": sum(each.choices for each in found),
        "most_choices": max(each.choices for each in found),
        "points": sum(each.points for each in found),
        "block_calls": {str(n): sum(each.blocks == n for each in found) for n in range(2, MOST_BLOCKS + 1)},
    }
    values = [float(each.differing) for each in found]
    return Result.of_count(NAME, CLAIM, values, limit=0.0, bar=NUM_CHAINS, detail=detail)


def main() -> None:
    """Tries all choices of all chains, and writes the result."""
    found = result(outcomes(NUM_CHAINS, MOST_BLOCKS))
    print(f"{found.median:.0f} of {NUM_CHAINS} chains equal", file=sys.stderr)
    print(found.write(NAME))


if __name__ == "__main__":
    main()
