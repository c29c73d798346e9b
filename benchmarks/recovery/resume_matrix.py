"""Kill and resume, 200 times: no corrupt load, every resume bitwise exact, no orphan process, no leftover
store.

    two, three      the same plan on 2 or 3 ranks, AdamW in float32   equals the undisturbed run bit for bit
    elastic 32, 64  SGD, every attempt on 1, 2 or 3 random ranks      equals it to 1e-6 (float32), 1e-10
                                                                      (float64)

A trial is described in `benchmarks.recovery.kill_trial`. Every tenth starts real commands; the others fork
them from this process, which has done the imports (`benchmarks.recovery.forked_command`). Two trials run at a
time. Rows are appended to FOLDER/rows.jsonl, so the same command continues a matrix that was stopped:

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
from benchmarks.recovery.kill_trial import SAVE_EVERY, STEPS, Kind, Trial, start, train_argv
from meshwright.comm.shared_memory.compile_library import SharedMemoryUnavailable, load_library

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
)  # AdamW would amplify rounding where a gradient is nearly zero
FLOAT64 = (
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
    Kind("elastic 64", (*SGD, *FLOAT64), (2, 3, 1), 1e-10): 1,
}
LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 16},
    **{"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"max_position_embeddings": 64, "tie_word_embeddings": False},
}


def write_config(folder: Path) -> Path:
    """Writes the config of a tiny Llama, its model and its data to `folder`; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "llama.json").write_text(json.dumps(LLAMA))
    (folder / "text.txt").write_text("".join(f"{n} times {n + 1} makes {n * (n + 1)}\n" for n in range(300)))
    config = {
        "model": {"source": "llama.json"},
        "data": {"source": "text.txt", "sequence": 16},
        "train": {"steps": STEPS, "batch": 12},
        "optimizer": {"lr": 1e-2},
        "run": {"save_every": SAVE_EVERY, "keep": 3},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    return folder / "config.toml"


def undisturbed_run(kind: Kind, config: Path, folder: Path) -> Path:
    """Returns the folder of an undisturbed run of `kind`, with every checkpoint kept; run once per folder."""
    place = folder / "undisturbed" / kind.name.replace(" ", "-")
    if not (place / "finished").exists():
        (place / "tmp").mkdir(parents=True, exist_ok=True)
        argv = [
            *train_argv(config, place / "run", kind, kind.ranks[0]),
            "--run.save_every",
            "1",
            "--run.keep",
            str(STEPS),
        ]
        with (place / "output.txt").open("wb") as output:
            code = start(argv, output, place, cold=False).wait(600)
        if code:
            raise RuntimeError(
                f"the undisturbed run ended with {code}: {(place / 'output.txt').read_text()}; "
                f"repair it first"
            )
        (place / "finished").touch()
    return place / "run"


def kind_of(number: int, seed: int) -> Kind:
    """Returns the kind of trial `number`."""
    return Random(f"kind {seed} {number}").choices(list(KINDS), list(KINDS.values()))[0]


def read_rows(folder: Path) -> dict[int, dict]:
    """Returns the rows in `folder`, by trial."""
    path = folder / "rows.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["trial"]: row for row in map(json.loads, lines)}


def run_trials(numbers: Sequence[int], seed: int, folder: Path, *, real_commands: bool) -> int:
    """Runs these trials one after the other, appending a row for each; returns 0, the exit code."""
    config = folder / "config.toml"
    for number in numbers:
        kind = kind_of(number, seed)
        cold = real_commands and number % COLD_EVERY == COLD_EVERY - 1
        undisturbed = undisturbed_run(kind, config, folder)
        row = Trial(
            number, kind, config, undisturbed, folder / f"trial-{number}", seed=seed, cold=cold
        ).run_attempts()
        with (folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row.as_dict()) + "\n")
        hits = ", ".join(f"{a.victim} at {a.moment}" for a in row.attempts if a.hit)
        print(
            f"trial {number} ({kind.name}): {row.seconds} s; {hits or 'no hit'}; {row.failures or 'good'}",
            file=sys.stderr,
        )
    return 0


def run_matrix(trials: int, seed: int, folder: Path, *, real_commands: bool) -> list[dict]:
    """Returns the rows of all trials; those that are in `folder` already do not run again."""
    for name in PRELOADED:
        import_module(name)
    with suppress(SharedMemoryUnavailable):
        load_library()  # compiled here, once
    torch.set_num_threads(1)
    config = write_config(folder)
    todo = [number for number in range(trials) if number not in read_rows(folder)]
    for kind in {kind_of(number, seed) for number in todo}:
        undisturbed_run(kind, config, folder)
    shares = [todo[i::AT_A_TIME] for i in range(AT_A_TIME)]
    workers = [
        Forked(
            lambda share=share: run_trials(share, seed, folder, real_commands=real_commands), dict(os.environ)
        )
        for share in shares
    ]
    for worker in workers:
        worker.wait()
    rows = read_rows(folder)
    return [rows[number] for number in range(trials) if number in rows]


def main() -> int:
    """Run the matrix and print its counts; a complete one is written as a result.

    Returns 1 when a trial failed.
    """
    parser = argparse.ArgumentParser(description="kill and resume")
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "resume-matrix")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only-forks", action="store_true")
    args = parser.parse_args()
    rows = run_matrix(args.trials, args.seed, args.folder.resolve(), real_commands=not args.only_forks)
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
    result = Result.of_count("resume_matrix", CLAIM, values, limit=0.0, bar=args.trials, detail=counts)
    if args.trials >= TRIALS:
        print(result.write("resume_matrix", args.results))
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
