"""Bytes that tensor parallelism sends, by the ledgers of all ranks: equal to the byte to the formulas of
`tensor_byte_formulas`.

1d with and without sequence parallelism, with activation checkpointing, and with fewer KV heads than ranks;
2d, 2.5d and 3d. Ranks are threads. Their ledgers count the bytes of the collectives of the second step, and
the program must state the same.

    python -m benchmarks.tensor_parallel.tensor_bytes                 all cases, and the result; a few minutes
    python -m benchmarks.tensor_parallel.tensor_bytes --only llama    the cases whose label contains this; no
                                                                      result
"""

import sys
from argparse import ArgumentParser
from fractions import Fraction

import torch

from benchmarks.harness.result import Result
from benchmarks.tensor_parallel.tensor_byte_formulas import Case, cases
from benchmarks.tensor_parallel.tensor_families import batches, loss_of
from meshwright.api import parallelize
from meshwright.comm.collectives.comm_volume import min_max_sent_nbytes
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.testing.ranks import run_on_threads

NAME = "tensor_bytes"
CLAIM = (
    "bytes sent per rank and layer by tensor parallelism, 1-D, with sequence parallelism, 2-D, "
    "2.5-D and 3-D, equal the formulas exactly"
)
FORMULA_KEYS = {"F": "streams", "B": "streams", "UNSHARD": "weights", "REDUCE": "weights"}


def formula_key(action: str, case: Case) -> str | None:
    """Returns the key of the formula that counts the bytes of `action`; None: it is not of the layer."""
    kind, _, rest = action.partition("(")
    subject = rest.rstrip(")").split(", ")[0]
    if case.layer.name not in subject:
        return None
    return kind if kind in case.formulas else FORMULA_KEYS.get(kind)


def planned(plan: Plan, case: Case) -> dict[str, Fraction]:
    """Returns the bytes that each rank sends in a step for the layer, by the program."""
    found = dict.fromkeys(case.formulas, Fraction(0))
    for action in plan.for_rank(0).actions:
        key = formula_key(action.name, case)
        for transfer in action.transfers if key in found else ():
            sent = min_max_sent_nbytes(transfer, plan.mesh.group_size(transfer.axes))[1]
            found[str(key)] += Fraction(sent).limit_denominator(10**6)  # a third of a byte is one
    return found


def ledger_nbytes(world: World, case: Case, analyzed: AnalyzedModel, plan: Plan) -> dict[str, Fraction]:
    """Returns the bytes that this rank sends in its second step for the layer, by its ledger."""
    with parallelize(analyzed, plan, world=world, loss=loss_of(case.family)) as engine:
        for batch in batches(case.family, 2, case.num_samples):
            before = dict(world.ledger.sent_nbytes)
            engine.step(engine.local_batch(batch))
    found = dict.fromkeys(case.formulas, Fraction(0))
    for action, nbytes in world.ledger.sent_nbytes.items():
        key = formula_key(action, case)
        if key in found:
            found[str(key)] += Fraction(nbytes - before.get(action, 0.0)).limit_denominator(10**6)
    return found


def compare(case: Case) -> dict[str, object]:
    """Returns the largest difference of the program and all ledgers from the formulas, relative to them;
    infinite where the plan is refused.
    """
    analyzed = case.analyzed_model()
    try:
        plan = case.plan(analyzed)
    except PlanError as refused:
        return {"case": str(case), "off": float("inf"), "refused": str(refused)}
    expected = {key: formula(case) for key, formula in case.formulas.items()}
    ledgers = run_on_threads(
        lambda world: ledger_nbytes(world, case, analyzed, plan), case.mesh, timeout_s=600
    )
    sources = (planned(plan, case), *ledgers)
    off = max(
        float(abs(source[key] - nbytes) / nbytes) for source in sources for key, nbytes in expected.items()
    )
    rows = {
        key: {"formula": float(nbytes), "found": sorted({float(each[key]) for each in sources})}
        for key, nbytes in expected.items()
    }
    return {"case": str(case), "off": off, **rows}


def result(rows: list[dict[str, object]]) -> Result:
    """Returns the result of all cases: how many agree to the byte."""
    values = [float(str(row["off"])) for row in rows]
    kept = [{**row, "off": -1.0 if row["off"] == float("inf") else row["off"]} for row in rows]
    return Result.of_count(NAME, CLAIM, values, limit=0.0, bar=len(values), detail={"cases": kept})


def main() -> None:
    """Compare the selected cases, and write the result when all were selected."""
    parser = ArgumentParser(description="bytes that tensor parallelism sends, against the formulas")
    parser.add_argument("--only", default="", help="text that the label of a case contains")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    rows = []
    for case in (case for case in cases() if only in str(case)):
        rows.append(compare(case))
        print(*(f"{key}: {value}" for key, value in rows[-1].items()), sep="; ", file=sys.stderr, flush=True)
    if not only:
        print(result(rows).write(NAME))


if __name__ == "__main__":
    main()
