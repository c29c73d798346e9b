"""What is counted of a schedule: ranks, micro-batches and parts at all, and how often each part was done for each micro-batch.

How often each of the four kinds was done is kept as one number, in sixteen bits each; so whole lists are counted in one pass.
"""

from collections.abc import Iterator, Mapping, Sequence

from meshwright.core.errors import Fault

KEY = "strategies.pipeline"  # of the one strategy whose data schedules are
BITS = 16
WEIGHTS: Mapping[str, int] = {"F": 1, "B": 1 << BITS, "I": 1 << 2 * BITS, "W": 1 << 3 * BITS}
WHOLE = (WEIGHTS["F"] + WEIGHTS["B"], WEIGHTS["F"] + WEIGHTS["I"] + WEIGHTS["W"])


def count_faults(ranks: int, micros: int, chunks: int = 1) -> Iterator[Fault]:
    """What no schedule can do: no rank, no micro-batch, no part per rank."""
    for count, what, key in (
        (ranks, "ranks", "mesh.pp"),
        (micros, "micro-batches", "micro_batch"),
        (chunks, "parts per rank", f"{KEY}.chunks"),
    ):
        if count < 1:
            yield Fault(f"{count} {what}; needed is at least one", "write a positive number", key)


def missing(done: Mapping[tuple[int, int], int], parts: int, micros: Sequence[int]) -> Iterator[str]:
    """What parts have not done of micro-batches, or too often; alike ones in one line."""
    wrong: dict[tuple[int, int], list[int]] = {}
    for part in range(parts):
        for micro in micros:
            count = done.get((part, micro), 0)
            if count not in WHOLE:
                wrong.setdefault((part, count), []).append(micro)
    for (part, count), which in wrong.items():
        found = "".join(kind * (count // weight % (1 << BITS)) for kind, weight in WEIGHTS.items()) or "nothing"
        several = f"micro-batches {numbers(which)} have" if len(which) > 1 else f"micro-batch {which[0]} has"
        yield f"{several} {found} in part {part}: needed is one F, and one B or one I and one W"


def numbers(rising: Sequence[int]) -> str:
    """Rising numbers in words: 0 .. 3, 5, 7 .. 9."""
    runs: list[list[int]] = []
    for number in rising:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} .. {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
