"""20 kills of runs whose optimizer states and masters rest on disk: every one resumes, and leaves nothing.

    same plan      disk, every time                          bits of a run in memory that nothing disturbs
    memory alone   disk, memory, disk ... in turn            likewise
    other ranks    disk, on 2, 1, 2 ... pipeline ranks       bits of a run in memory on one rank; the gradient
                                                             norm, a sum over stages, to 1e-6
    other shards   disk, on 1 to 3 ranks of ZeRO-2           1e-10 in float64: sums have another order

A tiny Llama in bfloat16 with float32 masters and AdamW (the last kind: float64, SGD with momentum). Trials of
all kinds run in turn (`benchmarks.recovery.kill_trial`) until 20 kills have hit: of a rank, of all, of the
parent, at random moments of the start, of a step, and of a save. Every published checkpoint is compared. The
folder of the disk is the one in which a trial must leave no file. Rows are appended to FOLDER/rows.jsonl, so
the same command continues what was stopped:

    python -m benchmarks.recovery.disk_kills [--kills 20] [--folder FOLDER]

No time is measured. With fewer kills nothing is written.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.result import Result
from benchmarks.recovery.kill_trial import Kind, Trial
from benchmarks.recovery.resume_matrix import PRELOADED, read_rows, undisturbed_run, write_config
from meshwright.comm.shared_memory.compile_library import SharedMemoryUnavailable, load_library

NAME = "disk_kills"
CLAIM = (
    "runs with states on disk that are killed 20 times resume on disk, in memory and on other ranks, with "
    "the bits of a run in memory that nothing disturbs"
)
NUM_KILLS, SEED, MOST_TRIALS = 20, 28, 40
DISK = '{name = "disk_offload", folder = "tmp", num_buffers = 2}'  # kill_trial.is_leftover looks into tmp
SHARDS = '{name = "batch_split"}, {name = "zero", axis = "dp_replicate", stage = 2}'
STAGES = '{name = "pipeline", schedule = "1f1b"}'
MIXED = (
    *("--precision.parameters", "bfloat16", "--precision.compute", "bfloat16"),
    *("--precision.reduce", "bfloat16", "--precision.master", "float32"),
)
FLOAT64 = (
    *("--precision.parameters", "float64", "--precision.compute", "float64"),
    *("--precision.reduce", "float64", "--optimizer.name", "sgd", "--optimizer.momentum", "0.9"),
)
ONE_BY_ONE = ("--micro_batch", "3", "--train.clip", "0")  # no norm, of another order, scales a gradient


def with_strategies(*strategies: str, pp: int = 1) -> tuple[str, ...]:
    """Returns the options of a plan."""
    return ("--mesh.pp", str(pp), "--strategies", f"[{', '.join(strategies)}]")


KINDS = {  # and the plan of the undisturbed run
    Kind("same plan", MIXED, (2,), plans=(with_strategies(SHARDS, DISK),)): with_strategies(SHARDS),
    Kind(
        "memory alone", MIXED, (2,), plans=(with_strategies(SHARDS, DISK), with_strategies(SHARDS))
    ): with_strategies(SHARDS),
    Kind(
        "other ranks",
        (*MIXED, *ONE_BY_ONE),
        (1,),
        norm_tolerance=1e-6,
        plans=(with_strategies(STAGES, DISK, pp=2), with_strategies(DISK)),
    ): with_strategies(),
    Kind("other shards", FLOAT64, (2, 3, 1), 1e-10, plans=(with_strategies(SHARDS, DISK),)): with_strategies(
        SHARDS
    ),
}


def kills(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the attempts of a trial that were killed."""
    return [attempt for attempt in row["attempts"] if attempt["hit"]]


def run_trials(wanted: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of trials until `wanted` kills have hit; those in `folder` do not run again."""
    config, known, found = write_config(folder), read_rows(folder), 0
    for number in range(MOST_TRIALS):
        if found >= wanted:
            return
        if number not in known:
            kind = list(KINDS)[number % len(KINDS)]
            plain = replace(kind, options=(*kind.options, *KINDS[kind]))
            truth = undisturbed_run(plain, config, folder)
            place = folder / f"trial-{number}"
            trial = Trial(number, kind, config, truth, place, seed=SEED, cold=False)
            known[number] = trial.run_attempts().as_dict()
            with (folder / "rows.jsonl").open("a") as file:
                file.write(json.dumps(known[number]) + "\n")
        found += len(kills(known[number]))
        yield known[number]


def result(rows: Sequence[Mapping[str, Any]]) -> Result:
    """Returns the result of these trials: one value for each kill, the failures of its trial."""
    hits = [hit for row in rows for hit in kills(row)]
    detail = {
        "trials": dict(Counter(row["kind"] for row in rows)),
        "kills": dict(Counter(row["kind"] for row in rows for _ in kills(row))),
        "victims": dict(Counter(hit["victim"] for hit in hits)),
        "moments": dict(Counter(hit["moment"] for hit in hits)),
        "starts": sum(len(row["attempts"]) for row in rows),
        "failures": [f"trial {row['trial']}: {text}" for row in rows for text in row["failures"]],
    }
    values = [float(len(row["failures"])) for row in rows for _ in kills(row)]
    found = Result.of_count(NAME, CLAIM, values, limit=0.0, bar=NUM_KILLS, detail=detail)
    return replace(found, holds=found.holds is True and not detail["failures"])


def main() -> int:
    """Kill, resume, print the counts; writes the result of all kills. Returns 1 when a trial failed."""
    parser = argparse.ArgumentParser(description="kill and resume with states on disk")
    parser.add_argument("--kills", type=int, default=NUM_KILLS)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "disk-kills")
    args = parser.parse_args()
    for name in PRELOADED:
        import_module(name)
    with suppress(SharedMemoryUnavailable):
        load_library()  # compiled here, once
    torch.set_num_threads(1)
    rows = list[dict[str, Any]]()
    for row in run_trials(args.kills, args.folder.resolve()):
        rows.append(row)
        hits = ", ".join(f"{hit['victim']} at {hit['moment']}" for hit in kills(row))
        print(f"trial {row['trial']} ({row['kind']}): {hits}; {row['failures'] or 'good'}", file=sys.stderr)
    found = result(rows)
    print(json.dumps(found.detail, indent=1))
    if args.kills >= NUM_KILLS:
        print(found.write(NAME))
    return 1 if found.detail["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
