"""Step times of published runs of models with experts, predicted by the planner against measured.

Rates of devices are those of the planner (planner/machine/rates.toml), which were fitted on models without
experts. What a code base does around experts has four constants (`ExpertConstants`): the rate of grouped
matmuls, passes over the rows, the exposed share of their transfers, and the kernel launches of a layer. They
are fitted for each code base, in Megatron-Bridge for each of three ages of its container and for hosts with
and without a Grace CPU, because the same configuration became up to 1.7 times faster in half a year.

    by row      constants are fitted on four fifths of the rows and score the last fifth, in turn: what a row
                of a known code base can count on. This is the figure
    by model    the same with whole groups (a model of a source on a number of devices) left out
    fitted      constants fitted on the very rows that they score
    alone       the planner's own constants, without any fit

Few rows of a code base hold several models, so constants of a code base also carry what the model form does
not know; `by model` shows how much. What code bases do was looked up with all rows in view. FILE has the
columns of data/published_runs.csv: constants are fitted on all shipped rows, and its rows are scored.

    python -m benchmarks.planner.planner_experts [FILE]

The result also has the CPU seconds of `meshwright search` for DeepSeek-V3, from its config, on 2,048 H100
(bar 60 s).
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from scipy.optimize import least_squares
from transformers import DeepseekV3Config

from benchmarks.harness.result import Result
from benchmarks.published_runs.rows import RUNS, Run, Skipped, read_runs
from meshwright.commands.search.search import SearchOptions, run_search
from meshwright.planner.analytic.closed_form_step_time import step_time
from meshwright.planner.analytic.parallel_config import ExpertCosts
from meshwright.report.search.search_result import config_text

NAME = "planner_experts"
CLAIM = (
    "step times of published runs of models with experts, on rows that no constant was fitted on: median "
    "error at most 12 %"
)
BAR = 0.12
SEARCH_BAR_S = 60.0
NUM_FOLDS = 5
STRENGTH = 0.15  # of the prior
LIMITS = {"matmul": (0.3, 1.5), "row_passes": (1.0, 20.0), "exposed": (0.05, 1.5), "launches": (0.2, 6.0)}
CONTAINERS = (("25.09", "25.09"), ("25.11", "26.04"), ("26.06", "99"))  # first and last of an age


@dataclass(frozen=True)
class ExpertConstants:
    """The fitted constants of a code base (parallel_config.py: ExpertCosts, launches)."""

    matmul: float = 1.0
    row_passes: float = 6.0
    exposed: float = 0.8
    launches: float = 1.0


PRIOR = ExpertConstants()
Constants = Mapping[tuple[str, ...], ExpertConstants]


def code_base(run: Run) -> tuple[str, ...]:
    """Returns the code base of `run`; of Megatron-Bridge with the age of its container and the host."""
    if "DeepSeek" in run.source:
        return ("DeepSeek",)
    if not run.source.startswith("Megatron-Bridge"):
        return (run.source.partition("/")[0],)
    version = next((word for word in run.full_source.split() if word[:2].isdigit() and "." in word), "99")
    age = next(first for first, last in CONTAINERS if version[:5] <= last)
    return run.source, age, "Grace" if run.machine.device.name.startswith("G") else "x86"


def predicted_s(run: Run, constants: ExpertConstants) -> float:
    """Returns the predicted seconds of a step of `run`."""
    costs: ExpertCosts = replace(
        run.layout.expert_costs,
        matmul=constants.matmul,
        row_passes=constants.row_passes,
        exposed=constants.exposed,
    )
    layout = replace(run.layout, expert_costs=costs, launches=constants.launches)
    return step_time(run.shape, layout, run.machine).seconds


def fit_constants(runs: Iterable[Run]) -> Constants:
    """Returns the constants of each code base of `runs`."""
    members: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        members.setdefault(code_base(run), []).append(run)
    return {code: _fit(each) for code, each in members.items()}


def _fit(runs: Sequence[Run]) -> ExpertConstants:
    start = [log(vars(PRIOR)[name]) for name in LIMITS]

    def constants(point: Sequence[float]) -> ExpertConstants:
        return ExpertConstants(**{name: exp(value) for name, value in zip(LIMITS, point, strict=True)})

    def errors(point: Sequence[float]) -> list[float]:
        tried = constants(point)
        off = [log(predicted_s(run, tried) / (run.seconds or 1.0)) for run in runs]
        return off + [STRENGTH * (value - prior) for value, prior in zip(point, start, strict=True)]

    bounds = tuple(zip(*((log(low), log(high)) for low, high in LIMITS.values()), strict=True))
    return constants(least_squares(errors, start, bounds=bounds, loss="soft_l1", f_scale=0.1).x)


def relative_errors(runs: Iterable[Run], constants: Constants) -> dict[str, float]:
    """Returns predicted over measured, less 1, by row; a code base without constants has the prior."""
    return {
        run.key: predicted_s(run, constants.get(code_base(run), PRIOR)) / (run.seconds or 1.0) - 1
        for run in runs
    }


def held_out_errors(runs: Sequence[Run], fold_name: Callable[[Run], str]) -> dict[str, float]:
    """Returns the errors of rows that no constant was fitted on: a fold's, by constants of the others."""
    folds = {run.key: sha256(fold_name(run).encode()).digest()[0] % NUM_FOLDS for run in runs}
    found: dict[str, float] = {}
    for fold in range(NUM_FOLDS):
        constants = fit_constants(run for run in runs if folds[run.key] != fold)
        found |= relative_errors((run for run in runs if folds[run.key] == fold), constants)
    return found


def timed_runs(file: Path) -> tuple[list[Run], list[Skipped]]:
    """Returns the rows of `file` with experts and a time, and those with experts that are skipped."""
    runs, skipped = read_runs(file, experts=True)
    return [run for run in runs if run.seconds], [each for each in skipped if each.why != "no experts"]


def summary(errors: Mapping[str, float]) -> dict[str, float]:
    """Returns the number of rows, the median and mean of absolute errors, the mean error, and the worst."""
    sizes = [abs(error) for error in errors.values()]
    return {
        "rows": len(sizes),
        "median": median(sizes),
        "mean": fmean(sizes),
        "bias": fmean(errors.values()),
        "worst": max(sizes),
    }


def search_deepseek() -> tuple[float, str]:
    """Returns the CPU seconds of a search for DeepSeek-V3 on 2,048 H100, and its best configuration."""
    config = DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"])
    begin = time.process_time()
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        found = run_search(SearchOptions(folder, 2048, "h100", 15360, 4096))
    return time.process_time() - begin, config_text(found.result.best[0])


def result(runs: Sequence[Run], skipped: Sequence[Skipped]) -> Result:
    """Returns the scores of all rows."""
    search_s, best = search_deepseek()
    constants = fit_constants(runs)
    by_row = held_out_errors(runs, lambda run: run.key)
    scores = {
        "by row": by_row,
        "by model": held_out_errors(runs, lambda run: run.group),
        "fitted": relative_errors(runs, constants),
        "alone": relative_errors(runs, {}),
    }
    values = sorted(abs(error) for error in by_row.values())
    codes = {code: [run.key for run in runs if code_base(run) == code] for code in constants}
    figure = median(values)
    return Result.of(
        NAME,
        CLAIM,
        values=values,
        median=figure,
        spread=(values[len(values) // 4], values[3 * len(values) // 4]),
        bar=BAR,
        holds=figure <= BAR and search_s <= SEARCH_BAR_S,
        repeats=1,
        detail={
            "scores": {name: summary(errors) for name, errors in scores.items()},
            "code bases": {
                " ".join(code): {
                    "constants": vars(constants[code]),
                    **summary({key: by_row[key] for key in keys}),
                }
                for code, keys in codes.items()
            },
            "rows": {run.key: [run.seconds, by_row[run.key]] for run in runs},
            "skipped": {each.key: each.why for each in skipped},
            "DeepSeek-V3 on 2,048 H100": {"search_s": round(search_s, 1), "best": best},
            "not held out": "what code bases do that rows do not say (published_runs/experts.py)",
        },
    )


def main(arguments: Sequence[str]) -> int:
    """Scores the shipped rows and writes the result, or scores those of a file."""
    runs, skipped = timed_runs(RUNS)
    if not arguments:
        found = result(runs, skipped)
        print(json.dumps(found.detail["scores"], indent=1))
        print(found.write(NAME))
        return 0
    others, skipped = timed_runs(Path(arguments[0]))
    if not others:
        whys = sorted({each.why for each in skipped})
        print(f"no row of {arguments[0]} has experts and a time; skipped: {whys}", file=sys.stderr)
        return 2
    errors = relative_errors(others, fit_constants(runs))
    for run in others:
        print(f"{run.key} {run.shape.name} {run.full_source}: {100 * errors[run.key]:+.1f} %")
    print(summary(errors), f"{len(skipped)} skipped: {sorted({each.why for each in skipped})}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
