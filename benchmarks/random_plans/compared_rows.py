"""Compares random plans on all cores and keeps their rows by commit; and figures that all of these share."""

import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from benchmarks.harness.case_store import CaseStore
from benchmarks.random_plans.combinations import FINDINGS, Row
from benchmarks.random_plans.random_draws import Draw
from meshwright.plan.hardware.device_specs import available_cores


def compare_all(name: str, chosen: Sequence[Draw], compare: Callable[[Draw], Row]) -> list[Row]:
    """Returns the row of each plan in `chosen`, as `compare` makes it or an earlier run of the benchmark
    `name` at this commit has made it; tells the outcomes on stderr.
    """
    store = CaseStore(name)
    found = store.read()
    with ProcessPoolExecutor(available_cores(), get_context("spawn")) as pool:
        for ended in as_completed([pool.submit(compare, each) for each in chosen if str(each) not in found]):
            if ended.exception() is not None:
                pool.shutdown(wait=False, cancel_futures=True)  # or the others run first, for an hour
            row = ended.result()
            found[row["case"]] = row
            store.add(row)
            message = f"\n{row['message']}" if row["outcome"] in FINDINGS else ""
            print(row["outcome"], row.get("error", ""), row["case"], message, file=sys.stderr, flush=True)
    return [found[str(each)] for each in chosen]


def matched_errors(rows: Iterable[Row]) -> list[float]:
    """Returns the error of each plan; infinite where it did not match."""
    return [
        float(row.get("error", float("inf"))) if row["outcome"] == "matched" else float("inf") for row in rows
    ]


def technique_counts(rows: Sequence[Row]) -> dict[str, int]:
    """Returns how many plans have each technique, by name."""
    names = sorted({name for row in rows for name in row["techniques"]})
    return {name: sum(name in row["techniques"] for row in rows) for name in names}
