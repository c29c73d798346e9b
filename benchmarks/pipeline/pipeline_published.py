"""Bubble rates that others have published, against our lists played on paper: 1F1B, interleaved, ZB-H1, H2,
1p, 2p, V, DualPipe.

data/bubble_rates.csv holds the rates, data/bubble_profiles.csv the machine they were computed for:
milliseconds of F, I and W of a stage, and of a transfer, one line per model. Nothing is fitted to a rate.
What a row needs beyond its model's line follows:

    F, I, W     in proportion to microbatch and layers per stage: (layers + 2) / p, as the paper leaves out a
                layer at both ends
    transfer    in proportion to microbatch: messages of 10 MB and more, over the same links
    memory      for 1p and 2p: F holds 34 h + 5 a s, of which 32 h stay from I to W (h hidden, a heads, s
                tokens; table 1 there)
    rate      = (cost - m (F + I + W)) / cost, cost the longest that a rank takes from its first slot to its
              last

Every stage costs the same here. The last one has a head, and it is not even: that of GPT-1.5B is 1.7 layers.
But the profile is the average of the stages, and the published rates were computed from that average: 0.1 %
for ZB-2p leaves no room for a stage that is more than 0.1 % above it. `head` in the result says what comes
out when the head is taken out of the average and put onto the last stage.

The row of DeepSeek-V3 was measured, not computed: its bubble holds what messages could not be hidden. It
counts like the others.

    python -m benchmarks.pipeline.pipeline_published [FILE]       FILE: other rates, in the same columns; scored, and
                                                         not written
"""

import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness.result import Result
from meshwright.parallel.pipeline.schedules import interleaved, one_f_one_b
from meshwright.parallel.pipeline.schedules.dualpipe import dualpipe_schedule
from meshwright.parallel.pipeline.schedules.list_scheduler import longest_rank_time
from meshwright.parallel.pipeline.schedules.schedule import Schedule, StageCosts, simulate
from meshwright.parallel.pipeline.schedules.zb_v import zb_v_schedule
from meshwright.parallel.pipeline.schedules.zero_bubble import (
    zb_h1_schedule,
    zb_h2_schedule,
    zb_schedule_within_memory,
)

NAME = "pipeline_published"
CLAIM = "published bubble rates of pipelines, from published times alone: within 1 point on average"
DATA = Path(__file__).parents[1] / "data"
RATES, PROFILES = DATA / "bubble_rates.csv", DATA / "bubble_profiles.csv"
BAR = 0.01
VOCABULARY = 50304


@dataclass(frozen=True)
class Profile:
    """What was published of a model on its machine; times in ms."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    ranks: int
    samples: int
    forward: float
    inputs: float
    weights: float
    transfer: float

    @property
    def late(self) -> float:
        """The share of a microbatch's memory that stays from I to W."""
        return 32 * self.hidden / (34 * self.hidden + 5 * self.heads * self.sequence)

    @property
    def head(self) -> float:
        """The operations of the head, in layers."""
        return 2 * self.hidden * VOCABULARY / (24 * self.hidden**2 + 4 * self.sequence * self.hidden)


@dataclass(frozen=True)
class Row:
    """A published rate."""

    model: str
    ranks: int
    samples: int
    micros: int
    schedule: str
    chunks: int
    rate: float

    def __str__(self) -> str:
        return f"{self.model} p {self.ranks} m {self.micros} {self.schedule}"


def rows(path: Path = RATES) -> list[Row]:
    """The rows of `path` that have a rate."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_row(row) for row in csv.DictReader(file) if row["bubble_rate_published"]]


def _row(row: Mapping[str, str]) -> Row:
    samples, chunks = int(row["micro_batch"] or 1), int(row["v"] or 1)
    rate = float(row["bubble_rate_published"])
    return Row(row["model"], int(row["p"]), samples, int(row["m"]), row["schedule"], chunks, rate)


def profiles(path: Path = PROFILES) -> dict[str, Profile]:
    """The machines by model."""
    whole = ("layers", "hidden", "heads", "sequence", "p", "micro_batch")
    times = ("forward_ms", "inputs_ms", "weights_ms", "transfer_ms")
    with path.open(encoding="utf-8", newline="") as file:
        return {
            row["model"]: Profile(*(int(row[key]) for key in whole), *(float(row[key]) for key in times))
            for row in csv.DictReader(file)
        }


def costs_of(row: Row, machines: Mapping[str, Profile], parts: int, *, head: bool = False) -> StageCosts:
    """The costs of each of `parts` parts; with `head`, the last has the head and both ends a layer less, the
    average stays.
    """
    machine = machines[row.model]
    more = row.samples / machine.samples
    shares = np.full(parts, (machine.layers + 2) / parts)
    if head:
        shares[0] -= 1
        shares[-1] += machine.head - 1
    shares *= more * machine.ranks / parts / shares.mean()
    forward, inputs, weights = (
        [float(s * each) for s in shares] for each in (machine.forward, machine.inputs, machine.weights)
    )
    return StageCosts(
        forward, inputs, weights, more * machine.transfer, [1.0] * parts, [machine.late] * parts
    )


Maker = Callable[[Row, StageCosts], Schedule]
MAKERS: Mapping[str, Maker] = {
    "1F1B": lambda row, costs: one_f_one_b.one_f_one_b_schedule(row.ranks, row.micros),
    "interleaved-1F1B": lambda row, costs: interleaved.interleaved_schedule(
        row.ranks, row.micros, row.chunks
    ),
    "ZB-H1": lambda row, costs: zb_h1_schedule(row.ranks, row.micros),
    "ZB-H2": lambda row, costs: zb_h2_schedule(row.ranks, row.micros),
    "ZB-1p": lambda row, costs: zb_schedule_within_memory(row.ranks, row.micros, costs, row.ranks),
    "ZB-2p": lambda row, costs: zb_schedule_within_memory(row.ranks, row.micros, costs, 2 * row.ranks),
    "ZB-V": lambda row, costs: zb_v_schedule(row.ranks, row.micros),
    "DualPipe": lambda row, costs: dualpipe_schedule(row.ranks, row.micros),
}
CHUNKS = {"ZB-V": 2}


def simulated(row: Row, machines: Mapping[str, Profile], *, head: bool = False) -> float:
    """The bubble rate of our list for `row`."""
    parts = row.ranks * CHUNKS.get(row.schedule, row.chunks)
    costs = costs_of(row, machines, parts, head=head)
    cost = longest_rank_time(simulate(MAKERS[row.schedule](row, costs), costs))
    work = row.micros * (sum(costs.forward) + sum(costs.input_grad) + sum(costs.weight_grad)) / row.ranks
    return (cost - work) / cost


def closed(row: Row, machines: Mapping[str, Profile]) -> float | None:
    """The rate by the formula of the paper, which knows neither transfers nor memory; None where there is
    none.
    """
    machine = machines[row.model]
    whole = machine.forward + machine.inputs + machine.weights
    idle = {
        "1F1B": whole,
        "interleaved-1F1B": whole / row.chunks,
        "ZB-H1": whole - 2 * machine.weights,
        "ZB-H2": whole - 3 * machine.weights,
    }.get(row.schedule)
    return None if idle is None else (row.ranks - 1) * idle / ((row.ranks - 1) * idle + row.micros * whole)


def compared(found: Sequence[Row], machines: Mapping[str, Profile]) -> Result:
    """All rows: our rate, how far it is from the published one, and the errors by schedule.

    One line each goes to stderr.
    """
    table = list(_table(found, machines))
    errors = np.array([abs(line["ours"] - line["published"]) for line in table])
    rng = np.random.default_rng(0)
    low, high = np.quantile(rng.choice(errors, (2000, len(errors))).mean(axis=1), [0.025, 0.975])
    summary = {}
    for schedule in sorted({row.schedule for row in found}):
        mine = [line for row, line in zip(found, table, strict=True) if row.schedule == schedule]
        summary[schedule] = {
            "rows": len(mine),
            **{what: _error(mine, what) for what in ("ours", "head", "formula")},
        }
    summary["all"] = {
        "rows": len(table),
        **{what: _error(table, what) for what in ("ours", "head", "formula")},
    }
    detail = {
        "mean and worst error": summary,
        "rows": [{"row": str(row), **line} for row, line in zip(found, table, strict=True)],
    }
    mean = float(errors.mean())
    figures = {"values": errors.tolist(), "median": mean, "spread": (float(low), float(high)), "bar": BAR}
    return Result.of(NAME, CLAIM, **figures, holds=mean <= BAR, repeats=len(errors), detail=detail)


def _table(found: Sequence[Row], machines: Mapping[str, Profile]) -> Iterator[dict[str, float]]:
    for row in found:
        line = {"published": row.rate, "ours": simulated(row, machines)}
        if row.schedule in ("1F1B", "interleaved-1F1B", "ZB-H1", "ZB-H2", "ZB-V"):
            line["head"] = simulated(row, machines, head=True)
        formula = closed(row, machines)
        if formula is not None:
            line["formula"] = formula
        print(f"{row!s:<50} published {row.rate:.4f}   ours {line['ours']:.4f}", file=sys.stderr)
        yield line


def _error(table: Sequence[Mapping[str, float]], what: str) -> tuple[float, float] | None:
    """(mean, worst) distance from the published rates, where there is one."""
    errors = [abs(line[what] - line["published"]) for line in table if what in line]
    return (float(np.mean(errors)), max(errors)) if errors else None


def main() -> None:
    """Play all rows, print the errors, and write the result unless another file was scored."""
    found, machines = rows(Path(sys.argv[1])) if sys.argv[1:] else rows(), profiles()
    unknown = {row.model for row in found} - set(machines) | {row.schedule for row in found} - set(MAKERS)
    if unknown:
        sys.exit(
            f"unknown: {', '.join(sorted(unknown))}; a model needs its line in {PROFILES}, a "
            f"schedule its maker in MAKERS"
        )
    result = compared(found, machines)
    for schedule, line in dict(result.detail["mean and worst error"]).items():  # pyrefly: ignore[no-matching-overload]  a mapping
        print(
            f"{schedule:<20}{line['rows']:>4} rows   ",
            *(f"{what} {_shown(line[what])}" for what in ("ours", "head", "formula")),
        )
    print(f"mean error {result.median:.4f}, at most {BAR}: {'holds' if result.holds else 'does not hold'}")
    if not sys.argv[1:]:
        print(result.write(NAME))


def _shown(error: Sequence[float] | None) -> str:
    return f"{error[0]:.4f} (worst {error[1]:.4f})  " if error else "-" + " " * 22


if __name__ == "__main__":
    main()
