"""Numbers of lm-evaluation-harness on the ranks of a plan beside its own class for models of transformers
(`HFLM`) on one device: Llama and GPT-2 in float64, under copies, ZeRO-3, tp, pp and cp.

    requests    loglikelihood of nine continuations, loglikelihood_rolling of two texts, generate_until of
                four: greedy flags and texts equal, log-likelihoods to 1e-10
    results     the tables of `simple_evaluate` for a task of each kind, with its metrics: to 12 digits

The harness runs once per case, as a user calls it, with data that lie in tests/integrations/lm_eval_cases.py.
The figure is the number of cases (a model under a plan) on all of whose ranks all is equal.

    pip install lm_eval==0.4.13
    python -m benchmarks.generation.lm_eval
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from math import isclose
from typing import Any

import meshwright as mw
from benchmarks.harness.result import Result
from meshwright.comm.collectives.group import World
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.testing.ranks import run_on_threads

NAME = "lm_eval"
MESHES = {
    "one device": mw.Mesh(),
    "copies": mw.Mesh(dp_replicate=2),
    "ZeRO-3": mw.Mesh(dp_shard=2),
    "tp": mw.Mesh(tp=2),
    "pp": mw.Mesh(pp=2),
    "cp": mw.Mesh(cp=2),
}
MODELS = ("llama", "gpt2")
LOGLIKELIHOOD_TOLERANCE, DIGITS = 1e-10, 12
CLAIM = (
    "tasks of lm-evaluation-harness give on the ranks of a plan the numbers of the harness' own class for "
    "models of transformers on one device: log-likelihoods to 1e-10 in float64, the same generated texts, "
    "and every metric to 12 digits, for Llama and GPT-2 under copies, ZeRO-3, tp, pp and cp of 2 ranks"
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """What a model says to all requests, and the tables of its tasks."""

    likelihoods: list[tuple[float, bool]]
    rolling: list[float]
    texts: list[str]
    tables: Mapping[str, Mapping[str, object]]


def ask(model: Any) -> Found:
    """Returns what `model`, of the harness, says."""
    cases, harness = import_module("tests.integrations.lm_eval_cases"), import_module("lm_eval")
    ran = harness.simple_evaluate(model=model, tasks=cases.local_tasks(), bootstrap_iters=0)
    likelihoods, rolling, texts = cases.responses(model)
    return Found(likelihoods, rolling, texts, ran["results"])


def on_ranks(family: str, mesh: mw.Mesh) -> list[Found]:
    """Returns what each rank of the plan of `mesh` gets."""
    cases = import_module("tests.integrations.lm_eval_cases")
    adapter = import_module("meshwright.integrations.lm_eval")
    analyzed = cases.analyzed(family)
    precision = mw.PrecisionConfig("float64", "float64", "float64")
    plan = mw.make_plan(analyzed, Job(train=TrainConfig(steps=1, batch=4), precision=precision), mesh)

    def rank(world: World) -> Found:
        with mw.parallelize(analyzed, plan, world=world) as trainer:
            return ask(adapter.MeshwrightLM(trainer, cases.tokenizer(), batch_size=2))

    return run_on_threads(rank, mesh)


def compare(found: Found, expected: Found) -> Row:
    """Returns the largest difference of a log-likelihood, and what is not equal."""
    numbers = [[*(each[0] for each in asked.likelihoods), *asked.rolling] for asked in (found, expected)]
    largest = max(abs(mine - theirs) for mine, theirs in zip(*numbers, strict=True))
    wrong = [] if largest <= LOGLIKELIHOOD_TOLERANCE else [f"log-likelihoods differ by {largest:.2g}"]
    if [each[1] for each in found.likelihoods] != [each[1] for each in expected.likelihoods]:
        wrong.append("greedy flags")
    wrong += [] if found.texts == expected.texts else ["texts"]
    if {task: set(table) for task, table in found.tables.items()} != {
        task: set(table) for task, table in expected.tables.items()
    }:
        wrong.append("tasks and metrics")
    else:
        wrong += [
            f"{task} {name}: {number!r} for {expected.tables[task][name]!r}"
            for task, table in found.tables.items()
            for name, number in table.items()
            if not is_equal(number, expected.tables[task][name])
        ]
    return {"difference": largest, "wrong": wrong}


def is_equal(found: object, expected: object) -> bool:
    """Returns whether two numbers of a table have the same first digits, or two texts are the same."""
    if isinstance(found, float) and isinstance(expected, float):
        return isclose(found, expected, rel_tol=10.0**-DIGITS, abs_tol=0.0)
    return found == expected


def result(rows: Mapping[str, Row], num_metrics: int) -> Result:
    """Returns the result of all cases, by their name."""
    equal = float(sum(not row["wrong"] for row in rows.values()))
    detail = {
        "cases": len(rows),
        "metrics of each": num_metrics,
        "largest difference of a log-likelihood": max(row["difference"] for row in rows.values()),
        "wrong": {name: row["wrong"] for name, row in rows.items() if row["wrong"]},
        "lm_eval": import_module("importlib.metadata").version("lm_eval"),
    }
    return Result.of(
        NAME,
        CLAIM,
        values=[float(not row["wrong"]) for row in rows.values()],
        median=equal,
        spread=(equal, equal),
        bar=float(len(MODELS) * len(MESHES)),
        holds=equal == len(MODELS) * len(MESHES),
        repeats=1,
        detail=detail,
    )


def main() -> None:
    """Compares all cases, and writes the result."""
    cases, rows, num_metrics = import_module("tests.integrations.lm_eval_cases"), dict[str, Row](), 0
    for family in MODELS:
        expected = ask(cases.reference(family))
        num_metrics = sum(
            isinstance(number, float) for table in expected.tables.values() for number in table.values()
        )
        for name, mesh in MESHES.items():
            by_rank = [compare(found, expected) for found in on_ranks(family, mesh)]
            rows[f"{family}, {name}"] = {
                "difference": max(row["difference"] for row in by_rank),
                "wrong": sorted({text for row in by_rank for text in row["wrong"]}),
            }
            print(family, name, rows[f"{family}, {name}"], file=sys.stderr, flush=True)
    print(result(rows, num_metrics).write(NAME))


if __name__ == "__main__":
    main()
