"""A piecewise against a two-parameter cost model, on published all-reduce times (NCCL on A100, V100, H200,
B200).

data/allreduce_measured.csv holds them, each row with its source. Of every series (one machine, one number of
ranks) one size is left out, both models are fitted to the others, and the left-out time is predicted; so for
every size. The banded model has `BANDS` bands of message size, fixed beforehand, each with a latency and a
rate; the other has one of each.

The claim: over all left-out sizes, the banded model's mean error is below that of the two-parameter model.
The noise of a published table is unknown, so the interval is a bootstrap over the series, of the difference
of both errors.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness.result import Result
from meshwright.comm.tuning.network_fit import fit_link

NAME = "allreduce_published"
CLAIM = (
    "all-reduce times others published, one size left out: the banded model's mean error is "
    "below the two-parameter model's"
)
DATA = Path(__file__).parents[1] / "data" / "allreduce_measured.csv"
BANDS = 4
LEAST_SIZES = 8  # of a series

Series = tuple[list[int], list[float]]  # bytes, seconds


def series(path: Path = DATA) -> dict[str, Series]:
    """Returns the published series by name, by rising size, without rows that have no time and without short
    series.
    """
    found: dict[str, dict[int, float]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["time_us"] and row["bytes"].isdecimal():
                name = f"{row['hardware']}, {row['ranks']} ranks"
                found.setdefault(name, {})[int(row["bytes"])] = float(row["time_us"]) / 1e6
    sizes = {name: sorted(cells) for name, cells in found.items() if len(cells) >= LEAST_SIZES}
    return {name: (each, [found[name][nbytes] for nbytes in each]) for name, each in sizes.items()}


def errors(nbytes: Sequence[int], took: Sequence[float], num_bands: int) -> list[float]:
    """Returns the relative error at every size, each predicted from all others."""
    found = []
    for left_out in range(len(nbytes)):
        others = [index for index in range(len(nbytes)) if index != left_out]
        link = fit_link([nbytes[index] for index in others], [took[index] for index in others], num_bands)
        found.append(abs(link.seconds(nbytes[left_out]) / took[left_out] - 1))
    return found


def compare(found: dict[str, Series]) -> Result:
    """Returns the result of both models on the series `found`."""
    plain = {name: errors(*each, 1) for name, each in found.items()}
    bands = {name: errors(*each, BANDS) for name, each in found.items()}
    ratios = [float(np.mean(bands[name]) / np.mean(plain[name])) for name in found]
    every = [np.concatenate([np.array(each[name]) for name in found]).mean() for each in (bands, plain)]
    rng, names = np.random.default_rng(0), list(found)
    drawn = []
    for _ in range(2000):
        some = rng.choice(names, len(names))
        drawn.append(sum(sum(bands[name]) for name in some) / sum(sum(plain[name]) for name in some))
    low, high = np.quantile(drawn, [0.025, 0.975])
    rows = {
        name: {
            "sizes": len(found[name][0]),
            "banded": float(np.mean(bands[name])),
            "two parameters": float(np.mean(plain[name])),
        }
        for name in found
    }
    detail = {
        "bands": BANDS,
        "mean error": {"banded": float(every[0]), "two parameters": float(every[1])},
        "series": rows,
    }
    ratio = float(every[0] / every[1])
    figures = {"values": ratios, "median": ratio, "spread": (float(low), float(high)), "bar": 1.0}
    return Result.of(
        NAME, CLAIM, **figures, holds=bool(ratio < 1), repeats=sum(map(len, plain.values())), detail=detail
    )


def main() -> None:
    """Compare both models on the published data, print the errors and write the result."""
    result = compare(series())
    for name, row in dict(result.detail["series"]).items():  # pyrefly: ignore[no-matching-overload]  a mapping of rows
        print(
            f"{name:<52}{row['sizes']:>4} sizes   banded {row['banded']:6.1%}   two parameters "
            f"{row['two parameters']:6.1%}"
        )
    print(result.detail["mean error"], "holds:", result.holds)
    print(result.write(NAME))


if __name__ == "__main__":
    main()
