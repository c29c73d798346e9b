"""Kill and resume, 200 times: no corrupt load, every resume bitwise, no orphan process, no leftover store.

    two, three      the same plan on 2 or 3 ranks, AdamW in float32      the undisturbed run, bit for bit
    elastic 32, 64  SGD, every attempt on 1, 2 or 3 ranks by chance      to 1e-6 (float32), 1e-10 (float64)

A trial is described in `benchmarks.recovery.kill_trial`. Every tenth starts real commands, the others fork them from this
process, which has imported everything (`benchmarks.recovery.forked_command`); two trials run at a time. Rows are appended to
FOLDER/rows.jsonl as they come, so a matrix that was stopped is continued by the same command:

    python -m benchmarks.recovery.resume_matrix [--trials 200] [--seed 0] [--folder FOLDER]
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from random import Random

import tomli_w
import torch

from benchmarks.harness.result import RESULTS, Result
from benchmarks.recovery.forked_command import Forked
from benchmarks.recovery.kill_trial import SAVE_EVERY, STEPS, Kind, Trial, start, train_words
from meshwright.comm.shared_memory.build import SharedMemoryUnavailable, load_library

TRIALS, AT_A_TIME, COLD_EVERY = 200, 2, 10
CLAIM = (
    "of 200 kill-resume trials at random moments none fails: no corrupt load, no inexact "
    "resume, no orphan, no leftover"
)
PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "meshwright.cli",
    "meshwright.commands.train",
    "meshwright.run.launch.local_launcher",
)
SGD = (
    "--optimizer.name",
    "sgd",
    "--optimizer.lr",
    "0.01",
)  # AdamW would blow rounding up where a gradient is nearly zero
WIDE = (
    "--precision.parameters",
    "float64",
    "--precision.compute",
    "float64",
    "--precision.reduce",
    "float64",
)
KINDS = {
    Kind("two", (), (2,)): 6,
    Kind("three", (), (3,)): 2,
    Kind("elastic 32", SGD, (2, 3, 1), 1e-6): 1,
    Kind("elastic 64", (*SGD, *WIDE), (2, 3, 1), 1e-10): 1,
}
LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 16},
    **{"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"max_position_embeddings": 64, "tie_word_embeddings": False},
}


def lay_out(folder: Path) -> Path:
    """The config of a tiny Llama on arithmetic, in `folder` with all it names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "llama.json").write_text(json.dumps(LLAMA))
    (folder / "text.txt").write_text("".join(f"{n} times {n + 1} makes {n * (n + 1)}\n" for n in range(300)))
    document = {
        "model": {"source": "llama.json"},
        "data": {"source": "text.txt", "sequence": 16},
        "train": {"steps": STEPS, "batch": 12},
        "optimizer": {"lr": 1e-2},
        "run": {"save_every": SAVE_EVERY, "keep": 3},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(document))
    return folder / "config.toml"


def alone(kind: Kind, config: Path, folder: Path) -> Path:
    """The run of `kind` that nobody disturbs, with every checkpoint kept; made once per folder."""
    place = folder / "alone" / kind.name.replace(" ", "-")
    if not (place / "whole").exists():
        (place / "tmp").mkdir(parents=True, exist_ok=True)
        words = [
            *train_words(config, place / "run", kind, kind.ranks[0]),
            "--run.save_every",
            "1",
            "--run.keep",
            str(STEPS),
        ]
        with (place / "output.txt").open("wb") as output:
            code = start(words, output, place, cold=False).wait(600)
        if code:
            raise RuntimeError(
                f"the undisturbed run ended with {code}: {(place / 'output.txt').read_text()}; "
                f"repair it first"
            )
        (place / "whole").touch()
    return place / "run"


def chosen(number: int, seed: int) -> Kind:
    """The kind of trial `number`."""
    return Random(f"kind {seed} {number}").choices(list(KINDS), list(KINDS.values()))[0]


def read_rows(folder: Path) -> dict[int, dict]:
    """The rows in `folder`, by trial."""
    path = folder / "rows.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["trial"]: row for row in map(json.loads, lines)}


def play(numbers: Sequence[int], seed: int, folder: Path, *, colds: bool) -> int:
    """Play these trials one after the other, appending a row for each; returns 0, as a process does."""
    config = folder / "config.toml"
    for number in numbers:
        kind = chosen(number, seed)
        cold = colds and number % COLD_EVERY == COLD_EVERY - 1
        undisturbed = alone(kind, config, folder)
        row = Trial(
            number, kind, config, undisturbed, folder / f"trial-{number}", seed=seed, cold=cold
        ).play()
        with (folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row.as_dict()) + "\n")
        hits = ", ".join(f"{a.victim} at {a.moment}" for a in row.attempts if a.hit)
        print(
            f"trial {number} ({kind.name}): {row.seconds} s; {hits or 'no hit'}; {row.failures or 'good'}",
            file=sys.stderr,
        )
    return 0


def matrix(trials: int, seed: int, folder: Path, *, colds: bool) -> list[dict]:
    """The rows of all trials; those that stand in `folder` already are not played again."""
    for name in PRELOADED:
        import_module(name)
    with suppress(SharedMemoryUnavailable):
        load_library()  # compiled here: in a forked launcher the compiler would be started as a rank
    torch.set_num_threads(1)
    config = lay_out(folder)
    todo = [number for number in range(trials) if number not in read_rows(folder)]
    for kind in {chosen(number, seed) for number in todo}:
        alone(kind, config, folder)
    shares = [todo[i::AT_A_TIME] for i in range(AT_A_TIME)]
    workers = [
        Forked(lambda mine=mine: play(mine, seed, folder, colds=colds), dict(os.environ)) for mine in shares
    ]
    for worker in workers:
        worker.wait()
    rows = read_rows(folder)
    return [rows[number] for number in range(trials) if number in rows]


def main() -> int:
    """Play the matrix and say what came of it; the whole one is written as a result.

    Returns 1 when a trial failed.
    """
    words = argparse.ArgumentParser(description="kill and resume")
    words.add_argument("--trials", type=int, default=TRIALS)
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "resume-matrix")
    words.add_argument("--results", type=Path, default=RESULTS)
    words.add_argument("--only-forks", action="store_true")
    said = words.parse_args()
    rows = matrix(said.trials, said.seed, said.folder.resolve(), colds=not said.only_forks)
    hits = [attempt for row in rows for attempt in row["attempts"] if attempt["hit"]]
    counts = {
        "kinds": dict(Counter(row["kind"] for row in rows)),
        "victims": dict(Counter(hit["victim"] for hit in hits)),
        "moments": dict(Counter(hit["moment"] for hit in hits)),
        "starts": sum(len(row["attempts"]) for row in rows),
        "real commands": sum(row["cold"] for row in rows),
        "seconds": round(sum(row["seconds"] for row in rows)),
        "failures": [f"trial {row['trial']}: {text}" for row in rows for text in row["failures"]],
    }
    print(json.dumps(counts, indent=1))
    values = [float(len(row["failures"])) for row in rows]
    result = Result.of_count("resume_matrix", CLAIM, values, limit=0.0, bar=said.trials, detail=counts)
    if said.trials >= TRIALS:
        print(result.write("resume_matrix", said.results))
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
