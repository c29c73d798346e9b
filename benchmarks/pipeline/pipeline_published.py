"""Published bubble rates against the simulation of our schedules: 1F1B, interleaved, ZB-H1, H2, 1p, 2p, V,
DualPipe.

data/bubble_rates.csv has the rates, data/bubble_profiles.csv the machine for which they were computed:
milliseconds of F, I and W of a stage, and of a transfer, one line per model. Nothing is fitted to a rate. The
other inputs follow:

    F, I, W     in proportion to the microbatch size and to the layers per stage: (layers + 2) / p, as the
                paper leaves out a layer at both ends
    transfer    in proportion to the microbatch size: messages of 10 MB and more, over the same links
    memory      for 1p and 2p: F keeps 34 h + 5 a s, of which 32 h are kept from I to W (h hidden size,
                a heads, s tokens; table 1 of the paper)
    rate      = (cost - m (F + I + W)) / cost, with cost the longest time of a rank from the begin of its
                first action to the end of its last

All stages have the same cost here. In fact the last one has the head as well: that of GPT-1.5B is 1.7 layers.
But the profile is the average of the stages, and the published rates were computed from that average: 0.1 %
for ZB-2p leaves no room for a stage that is more than 0.1 % above it. `head` in the result is the rate if the
cost of the head is moved from the average to the last stage.

The row of DeepSeek-V3 was measured, not computed: its bubble includes exposed communication. It counts like
the others.

    python -m benchmarks.pipeline.pipeline_published [FILE]    FILE: other rates, in the same columns; scored,
                                                               and not written
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
VOCAB_SIZE = 50304


@dataclass(frozen=True)
class Profile:
    """The published profile of a model on its machine; times in ms."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    ranks: int
    samples: int
    forward: float
    input_grad: float
    weight_grad: float
    transfer: float

    @property
    def weight_grad_memory_share(self) -> float:
        """The share of a microbatch's memory that is kept from I to W."""
        return 32 * self.hidden / (34 * self.hidden + 5 * self.heads * self.sequence)

    @property
    def head(self) -> float:
        """The operations of the head, in layers."""
        return 2 * self.hidden * VOCAB_SIZE / (24 * self.hidden**2 + 4 * self.sequence * self.hidden)


@dataclass(frozen=True)
class Row:
    """A published rate."""

    model: str
    ranks: int
    samples: int
    num_microbatches: int
    schedule: str
    virtual_stages: int
    rate: float

    def __str__(self) -> str:
        return f"{self.model} p {self.ranks} m {self.num_microbatches} {self.schedule}"


def read_rows(path: Path = RATES) -> list[Row]:
    """Returns the rows of `path` that have a rate."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_row(row) for row in csv.DictReader(file) if row["bubble_rate_published"]]


def _row(row: Mapping[str, str]) -> Row:
    samples, virtual_stages = int(row["micro_batch"] or 1), int(row["v"] or 1)
    rate = float(row["bubble_rate_published"])
    return Row(row["model"], int(row["p"]), samples, int(row["m"]), row["schedule"], virtual_stages, rate)


def read_profiles(path: Path = PROFILES) -> dict[str, Profile]:
    """Returns the profiles by model."""
    int_columns = ("layers", "hidden", "heads", "sequence", "p", "micro_batch")
    float_columns = ("forward_ms", "inputs_ms", "weights_ms", "transfer_ms")
    with path.open(encoding="utf-8", newline="") as file:
        return {
            row["model"]: Profile(
                *(int(row[key]) for key in int_columns), *(float(row[key]) for key in float_columns)
            )
            for row in csv.DictReader(file)
        }


def costs_of(row: Row, machines: Mapping[str, Profile], num_stages: int, *, head: bool = False) -> StageCosts:
    """Returns the costs of `num_stages` stages.

    With `head`, the last stage has the head, and the first and last have one layer less; the average is the
    same.
    """
    machine = machines[row.model]
    more = row.samples / machine.samples
    shares = np.full(num_stages, (machine.layers + 2) / num_stages)
    if head:
        shares[0] -= 1
        shares[-1] += machine.head - 1
    shares *= more * machine.ranks / num_stages / shares.mean()
    forward, input_grad, weight_grad = (
        [float(s * each) for s in shares]
        for each in (machine.forward, machine.input_grad, machine.weight_grad)
    )
    return StageCosts(
        forward,
        input_grad,
        weight_grad,
        more * machine.transfer,
        [1.0] * num_stages,
        [machine.weight_grad_memory_share] * num_stages,
    )


MakeSchedule = Callable[[Row, StageCosts], Schedule]
SCHEDULES: Mapping[str, MakeSchedule] = {
    "1F1B": lambda row, costs: one_f_one_b.one_f_one_b_schedule(row.ranks, row.num_microbatches),
    "interleaved-1F1B": lambda row, costs: interleaved.interleaved_schedule(
        row.ranks, row.num_microbatches, row.virtual_stages
    ),
    "ZB-H1": lambda row, costs: zb_h1_schedule(row.ranks, row.num_microbatches),
    "ZB-H2": lambda row, costs: zb_h2_schedule(row.ranks, row.num_microbatches),
    "ZB-1p": lambda row, costs: zb_schedule_within_memory(row.ranks, row.num_microbatches, costs, row.ranks),
    "ZB-2p": lambda row, costs: zb_schedule_within_memory(
        row.ranks, row.num_microbatches, costs, 2 * row.ranks
    ),
    "ZB-V": lambda row, costs: zb_v_schedule(row.ranks, row.num_microbatches),
    "DualPipe": lambda row, costs: dualpipe_schedule(row.ranks, row.num_microbatches),
}
VIRTUAL_STAGES = {"ZB-V": 2}


def simulated_rate(row: Row, machines: Mapping[str, Profile], *, head: bool = False) -> float:
    """Returns the simulated bubble rate of our schedule for `row`."""
    num_stages = row.ranks * VIRTUAL_STAGES.get(row.schedule, row.virtual_stages)
    costs = costs_of(row, machines, num_stages, head=head)
    cost = longest_rank_time(simulate(SCHEDULES[row.schedule](row, costs), costs))
    work = (
        row.num_microbatches
        * (sum(costs.forward) + sum(costs.input_grad) + sum(costs.weight_grad))
        / row.ranks
    )
    return (cost - work) / cost


def closed_form_rate(row: Row, machines: Mapping[str, Profile]) -> float | None:
    """Returns the rate by the formula of the paper, without transfers and memory; None if there is none."""
    machine = machines[row.model]
    total = machine.forward + machine.input_grad + machine.weight_grad
    idle = {
        "1F1B": total,
        "interleaved-1F1B": total / row.virtual_stages,
        "ZB-H1": total - 2 * machine.weight_grad,
        "ZB-H2": total - 3 * machine.weight_grad,
    }.get(row.schedule)
    return (
        None
        if idle is None
        else (row.ranks - 1) * idle / ((row.ranks - 1) * idle + row.num_microbatches * total)
    )


def score(found: Sequence[Row], machines: Mapping[str, Profile]) -> Result:
    """Returns the result of all rows: our rate, its distance from the published one, and the errors by
    schedule.

    Prints one line per row to stderr.
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
        line = {"published": row.rate, "ours": simulated_rate(row, machines)}
        if row.schedule in ("1F1B", "interleaved-1F1B", "ZB-H1", "ZB-H2", "ZB-V"):
            line["head"] = simulated_rate(row, machines, head=True)
        formula = closed_form_rate(row, machines)
        if formula is not None:
            line["formula"] = formula
        print(f"{row!s:<50} published {row.rate:.4f}   ours {line['ours']:.4f}", file=sys.stderr)
        yield line


def _error(table: Sequence[Mapping[str, float]], what: str) -> tuple[float, float] | None:
    """Returns the (mean, worst) distance from the published rates, None if no row has the rate `what`."""
    errors = [abs(line[what] - line["published"]) for line in table if what in line]
    return (float(np.mean(errors)), max(errors)) if errors else None


def main() -> None:
    """Simulates all rows, prints the errors, and writes the result unless another file was scored."""
    found, machines = read_rows(Path(sys.argv[1])) if sys.argv[1:] else read_rows(), read_profiles()
    unknown = {row.model for row in found} - set(machines) | {row.schedule for row in found} - set(SCHEDULES)
    if unknown:
        sys.exit(
            f"unknown: {', '.join(sorted(unknown))}; a model needs its line in {PROFILES}, a "
            f"schedule its function in SCHEDULES"
        )
    result = score(found, machines)
    for schedule, line in dict(result.detail["mean and worst error"]).items():  # pyrefly: ignore[no-matching-overload]  a mapping
        print(
            f"{schedule:<20}{line['rows']:>4} rows   ",
            *(f"{what} {_format_error(line[what])}" for what in ("ours", "head", "formula")),
        )
    print(f"mean error {result.median:.4f}, at most {BAR}: {'holds' if result.holds else 'does not hold'}")
    if not sys.argv[1:]:
        print(result.write(NAME))


def _format_error(error: Sequence[float] | None) -> str:
    return f"{error[0]:.4f} (worst {error[1]:.4f})  " if error else "-" + " " * 22


if __name__ == "__main__":
    main()
