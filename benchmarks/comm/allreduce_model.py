"""Predicted against measured all-reduce times, and the choice of `auto` against the fastest algorithm.

Every algorithm is measured at 1 KiB .. 64 MiB with 2, 3 and 4 processes, interleaved
(comm/tuning/allreduce_bench.py). The samples of a cell form two halves, those of even sweeps and of odd ones:
an A/A run inside the measurement. The difference of the halves is noise.

    fit      on every other size: the network model, corrected by measured times
             (comm/tuning/choose_size_rule.py)
    errors   at the sizes between: predicted against measured, the median over sizes and numbers of ranks, per
             algorithm
    auto     a rule from the fitted sizes, at all sizes: the algorithm that it picks against the best one

All measurements use gloo: shared memory between ranks of one host is so much faster that there would be
nothing to choose.

The best algorithm is named by one half and timed by the other, both ways, because the quickest of eight noisy
times is partly luck. A cell is a hit when the pick takes at most 10 % more than the best, beyond the noise of
the two in that cell.

    python -m benchmarks.comm.allreduce_model            about ten minutes, on a quiet machine
    python -m benchmarks.comm.allreduce_model --quick    a trial of one minute; writes nothing
    python -m benchmarks.comm.allreduce_model --table    a Markdown table of the stored result
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import exp, log, sqrt
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from benchmarks.harness.interleaved_timing import Verdict, interval, overall
from benchmarks.harness.rank_processes import Ranks, Step
from benchmarks.harness.result import RESULTS, Result
from meshwright.comm.allreduce import BACKEND, FLAT_ALGORITHMS, get_algorithm
from meshwright.comm.tuning.allreduce_bench import time_all_reduces
from meshwright.comm.tuning.choose_size_rule import choose_rule, predict_all_reduce_s
from meshwright.comm.tuning.network_fit import fit_alpha_beta, fit_network, group_into_series
from meshwright.comm.world import init_world
from meshwright.plan.hardware.measured_cluster import AllReduceTiming, Cluster, FitError
from meshwright.plan.hardware.network_model import NetworkModel
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.sharding.mesh import AXES, Mesh

NAME = "allreduce_model"
CLAIM = (
    "all-reduce, 1 KiB to 64 MiB, 2 to 4 processes: predicted within 15 % of measured (median per "
    "algorithm, sizes that were not fitted); auto within 10 % of the best in 95 % of cells beyond noise"
)
ERROR_BAR, WITHIN, SHARE_BAR = 0.15, 0.10, 0.95
NAMES = tuple(str(each) for each in FLAT_ALGORITHMS)
SIZES, RANKS, BUDGET_S, LEAST = tuple(1 << power for power in range(10, 27)), (2, 3, 4), 150.0, 6
TABLE_SIZES = (1 << 10, 1 << 20, 1 << 26)
QUICK_SIZES, QUICK_RANKS, QUICK_S, QUICK_LEAST = (
    tuple(1 << power for power in range(10, 23, 2)),
    (2, 3),
    6.0,
    4,
)

Cells = Mapping[tuple[str, int, int], AllReduceTiming]  # by algorithm, ranks, bytes


def build(rank: int, size: int, store: str, sizes: Sequence[int], budget_s: float, least: int) -> Step:
    """Builds one rank that measures all cells in one step; its note is the transport, and a row per cell with
    all its samples.
    """
    torch.set_num_threads(1)
    stack = ExitStack()
    world = stack.enter_context(
        init_world(Mesh(dp_replicate=size), rank, store_path=store, shared_memory=False)
    )

    def step() -> object:
        with stack:
            found = time_all_reduces(world, NAMES, sizes, budget_s, min_samples=least)
            rows = [
                (each.algorithm, each.ranks, each.nbytes, each.seconds, each.spread, each.samples)
                for each in found
            ]
            return (world.group(AXES).transport, rows)

    return step


def measure_cells(
    ranks: Sequence[int], sizes: Sequence[int], budget_s: float, least: int
) -> tuple[str, list[AllReduceTiming]]:
    """Returns the transport, and the times of every algorithm, measured by processes of this machine."""
    timings: list[AllReduceTiming] = []
    transport = ""
    for world in ranks:
        with TemporaryDirectory() as folder:
            arguments = {
                "store": str(Path(folder) / "store"),
                "sizes": list(sizes),
                "budget_s": budget_s,
                "least": least,
            }
            with Ranks(f"{world} ranks", build, world, timeout_s=900.0, **arguments) as configuration:
                cost = configuration.step()
        note = cost.notes[0]
        if not isinstance(note, tuple):
            raise TypeError(f"rank 0 returned {note!r}; needed are the transport and the rows. Look at build")
        transport, rows = note
        timings += [AllReduceTiming(*row) for row in rows]
        print(f"measured {world} ranks over {transport} in {cost.wall_s:.0f} s", flush=True)
    return transport, timings


def halves(cell: AllReduceTiming) -> tuple[float, float]:
    """Returns the medians of the samples of even sweeps, and of odd ones."""
    return median(cell.samples[::2]), median(cell.samples[1::2] or cell.samples)


def noise(cell: AllReduceTiming) -> float:
    """Returns the relative difference of the two halves of a cell."""
    one, other = halves(cell)
    return exp(abs(log(one / other))) - 1


def half_fitted(transport: str, timings: Sequence[AllReduceTiming]) -> Cluster:
    """Returns the cluster fitted to every other size."""
    sizes = sorted({cell.nbytes for cell in timings})[::2]
    kept = [cell for cell in timings if cell.nbytes in sizes]
    return Cluster(
        "",
        "",
        torch.__version__,
        transport,
        0,
        FitError(0.0, 0.0),
        fit_network(kept),
        group_into_series(kept),
    )


def errors(cluster: Cluster, cell: AllReduceTiming) -> tuple[float, float]:
    """Returns the relative errors at one cell: of the model alone, and corrected."""
    predictions = (
        predict_all_reduce_s(each, cell.algorithm, cell.ranks, cell.nbytes)
        for each in (cluster.without_measurements(), cluster)
    )
    uncorrected, corrected = (abs(predicted / cell.seconds - 1) for predicted in predictions)
    return uncorrected, corrected


def cells_of_auto(cluster: Cluster, cells: Cells) -> list[dict[str, object]]:
    """Returns, for every number of ranks and size, the pick of auto, the best by each half, the extra time of
    the pick, and the noise.
    """
    found: list[dict[str, object]] = []
    for ranks in sorted({ranks for _, ranks, _ in cells}):
        rule = choose_rule(cluster, ranks).rule
        for nbytes in sorted({nbytes for _, _, nbytes in cells}):
            here = {name: cells[name, ranks, nbytes] for name in NAMES if (name, ranks, nbytes) in cells}
            pick = here[rule.algorithm_for(nbytes)]
            best = [min(here.values(), key=lambda cell, half=half: halves(cell)[half]) for half in (0, 1)]
            more = sqrt(halves(pick)[1] / halves(best[0])[1] * halves(pick)[0] / halves(best[1])[0]) - 1
            scatter = max(noise(pick), *map(noise, best))
            names = {"picked": pick.algorithm, "best": [cell.algorithm for cell in best]}
            hit = more <= WITHIN + scatter
            found.append(
                {
                    "ranks": ranks,
                    "bytes": nbytes,
                    **names,
                    "more": round(more, 4),
                    "noise": round(scatter, 4),
                    "hit": hit,
                }
            )
    return found


def decide(transport: str, timings: Sequence[AllReduceTiming]) -> Result:
    """Returns the result of the claim for `timings`."""
    cells = {(cell.algorithm, cell.ranks, cell.nbytes): cell for cell in timings}
    cluster = half_fitted(transport, timings)
    fitted_sizes = set(cluster.sizes)
    rows: dict[str, dict[str, float]] = {}
    verdicts: list[Verdict] = []
    for name in NAMES:
        left_out = [cell for cell in timings if cell.algorithm == name and cell.nbytes not in fitted_sizes]
        uncorrected, corrected = zip(*(errors(cluster, cell) for cell in left_out), strict=True)
        scatter = median(noise(cell) for cell in timings if cell.algorithm == name)
        rows[name] = {"model alone": median(uncorrected), "corrected": median(corrected), "noise": scatter}
        if name == "backend":
            del rows[name]["model alone"]  # no list of rounds
        verdicts.append(
            True if median(corrected) <= ERROR_BAR else "unresolved" if scatter > ERROR_BAR else False
        )
    auto = cells_of_auto(cluster, cells)
    share = sum(bool(cell["hit"]) for cell in auto) / len(auto)
    rules = {str(ranks): str(choose_rule(cluster, ranks).rule) for ranks in cluster.ranks}
    times = [
        [cell.algorithm, cell.ranks, cell.nbytes, cell.seconds, round(cell.spread, 3), len(cell.samples)]
        for cell in timings
    ]
    values = [row["corrected"] for row in rows.values()]
    worst, spread = max(values), interval(values)
    detail = {
        "transport": transport,
        "algorithms": rows,
        "auto": {"share": share, "bar": SHARE_BAR, "rules": rules, "cells": auto},
    }
    figures = {"values": values, "median": worst, "spread": (spread.low, spread.high), "bar": ERROR_BAR}
    holds = overall([*verdicts, share >= SHARE_BAR])
    repeats = min(len(cell.samples) for cell in timings)
    return Result.of(
        NAME, CLAIM, **figures, holds=holds, repeats=repeats, detail={**detail, "measured": times}
    )


def markdown_table(path: Path) -> str:
    """Returns a Markdown table of the measured milliseconds of every algorithm, and those of its formula,
    from a stored result.
    """
    stored = json.loads(path.read_text(encoding="utf-8"))
    timings = [
        AllReduceTiming(name, ranks, nbytes, took)
        for name, ranks, nbytes, took, *_ in stored["detail"]["measured"]
    ]
    cluster = Cluster(
        "",
        "",
        "",
        stored["detail"]["transport"],
        0,
        FitError(0.0, 0.0),
        NetworkModel(),
        group_into_series(timings),
    )
    lines = [
        (
            f"{stored['date'][:10]}, {stored['machine']['cpu']}, {stored['machine']['cores']} cores, over "
            f"{cluster.transport}:"
        ),
        "",
    ]
    columns = [(ranks, nbytes) for nbytes in TABLE_SIZES for ranks in cluster.ranks]
    lines += [
        (
            f"| milliseconds (by the formula) | "
            f"{' | '.join(f'{format_nbytes(nbytes)}, n = {n}' for n, nbytes in columns)} |"
        )
    ]
    lines += ["| --- |" + " --- |" * len(columns)]
    figures = {ranks: fit_alpha_beta(cluster, ranks) for ranks in cluster.ranks}
    took = {(cell.algorithm, cell.ranks, cell.nbytes): 1e3 * cell.seconds for cell in timings}
    for name in NAMES:
        cells = []
        for ranks, nbytes in columns:
            formula_ms = 1e3 * get_algorithm(name).seconds(
                ranks, nbytes, figures[ranks].latency_s, figures[ranks].bytes_per_s
            )
            cells.append(
                f"{took[name, ranks, nbytes]:.3g}" + ("" if name == BACKEND else f" ({formula_ms:.3g})")
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    fits = (
        (
            f"n = {ranks}: a = {1e6 * each.latency_s:.0f} us, B = {each.bytes_per_s / 1e9:.2f} GB/s, "
            f"median error {each.error:.0%}"
        )
        for ranks, each in figures.items()
    )
    return "\n".join([*lines, "", "; ".join(fits)])


def main() -> None:
    """Measure, decide, print; write the result unless it is a quick trial."""
    if "--table" in sys.argv[1:]:
        print(markdown_table(RESULTS / f"{NAME}.json"))
        return
    quick = "--quick" in sys.argv[1:]
    settings = (QUICK_RANKS, QUICK_SIZES, QUICK_S, QUICK_LEAST) if quick else (RANKS, SIZES, BUDGET_S, LEAST)
    result = decide(*measure_cells(*settings))
    for name, row in result.detail["algorithms"].items():  # pyrefly: ignore[missing-attribute]  a mapping of rows
        print(f"{name:<12}" + "   ".join(f"{key} {value:6.1%}" for key, value in row.items()))
    auto = result.detail["auto"]
    print({key: value for key, value in auto.items() if key != "cells"})  # pyrefly: ignore[missing-attribute]  a mapping
    print("holds:", result.holds)
    if not quick:
        print(result.write(NAME))


if __name__ == "__main__":
    main()
