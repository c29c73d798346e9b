"""Bytes between the ranks of distributed experts, 64 experts of which 8 are chosen: the law, the ledger, and
transformers' expert parallelism.

    per layer and step, over all n ranks, of which each sends what others need
      counts      16 n (n-1)           of rows and of their pairs
      forward     rows (D w + 8 k)  there,   rows D w           back
      backward    rows D w          there,   rows (D w + 4 k)   back        rows: distinct (token, other rank)

The choices are those that the routers have made in the step; the ledger must equal the law to the byte, on 2
ranks and on 3 (uneven: 22, 21 and 21 experts). The ratio is that to the rows that transformers sends on 2
ranks: one for each pair of token and expert, without its indices and counts.

    python -m benchmarks.experts.expert_bytes       a minute
"""

from typing import Any, cast

import torch

from benchmarks.experts.mixtral_steps import Step, join_and_parallelize, peer
from benchmarks.harness.rank_processes import Ranks
from benchmarks.harness.result import Result
from benchmarks.models.llama_steps import fresh_store

NAME, BAR = "expert_bytes", 0.30
CLAIM = (
    "64 experts of which 8 are chosen: a step sends exactly the bytes of the law of distinct (token, other "
    "rank), and on 2 ranks at most 0.30 x the rows of transformers' expert parallelism"
)
RANKS, STEPS = (2, 3), 2
PRELOAD = ("torch", "transformers.models.mixtral.modeling_mixtral", "meshwright.api")


def counted(rank: int, size: int, store: str) -> Step:
    """Returns our step; it returns the bytes of this rank's ledger, and the rows that its tokens need on
    other ranks, from the choices of the routers.
    """
    engine, next_batch = join_and_parallelize(rank, size, store)
    ledger, model = engine.world.ledger, cast(Any, engine.executor.state.trained_module.module)
    experts = torch.arange(64).tensor_split(size)  # the first ranks have one more
    rank_of = torch.cat([torch.full_like(each, number) for number, each in enumerate(experts)])
    rows: list[int] = []

    def record(module: object, args: object, found: tuple[torch.Tensor, ...]) -> None:
        reached = torch.zeros(len(found[2]), size, dtype=torch.bool)
        reached.scatter_(1, rank_of[found[2]], value=True)
        reached[:, rank] = False
        rows.append(int(reached.sum()))

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(record)

    def step() -> dict[str, float]:
        rows.clear()
        ledger.entries.clear()
        engine.step(engine.local_batch(next_batch()))
        sent = [each for each in ledger.entries if each.collective.startswith("all_to_all")]
        return {"sent": sum(each.sent_nbytes for each in sent), "rows": sum(rows), "layers": len(rows)}

    return step


def law(notes: list[dict[str, float]], width: int, chosen: int) -> float:
    """Returns the bytes of a step over all ranks; `notes` are what `counted` returns on each."""
    size, rows = len(notes), sum(note["rows"] for note in notes)
    counts = 16 * size * (size - 1) * notes[0]["layers"]
    return counts + rows * (4 * width * 4 + (8 + 4) * chosen)


def notes_of(name: str, build: Any, size: int) -> list[list[dict[str, float]]]:
    """Returns what each rank says of each step."""
    with Ranks(name, build, size, preload=PRELOAD, store=fresh_store()) as ranks:
        return [[cast(dict[str, float], note) for note in ranks.step().notes] for _ in range(STEPS)]


def main() -> None:
    """Counts, compares and writes the result."""
    rows, sent = [], dict[int, float]()
    for size in RANKS:
        steps = notes_of("ours", counted, size)
        found = [sum(note["sent"] for note in notes) for notes in steps]
        expected = [law(notes, 256, 8) for notes in steps]
        sent[size] = sum(found)
        rows.append({"ranks": size, "ledger": found, "law": expected, "equal": found == expected})
        print(rows[-1], flush=True)
    theirs = sum(note["exchanged"] for notes in notes_of("transformers", peer, RANKS[0]) for note in notes)
    ratio = sent[RANKS[0]] / theirs
    print(f"ratio {ratio:.4f}")
    result = Result.of(
        NAME,
        CLAIM,
        values=[ratio],
        median=ratio,
        spread=(ratio, ratio),
        bar=BAR,
        holds=ratio <= BAR and all(row["equal"] for row in rows),
        repeats=1,
        discarded=0,
        detail={"cases": rows, "transformers": theirs},
    )
    print(result.write(NAME))


if __name__ == "__main__":
    main()
