"""What divided matrices send, by the ledgers of real ranks, held against the laws of `tensor_laws`: to the
byte.

1-D with and without a divided sequence, with recompute, with fewer keys than ranks; 2-D, 2.5-D and 3-D. Ranks
are threads: their ledgers count what they were asked to send, in the second step, and the program must state
the same.

    python -m benchmarks.tensor_parallel.tensor_bytes                 a few minutes
    python -m benchmarks.tensor_parallel.tensor_bytes --only llama    the cases with this in their name; no result
"""

import sys
from argparse import ArgumentParser
from fractions import Fraction

import torch

from benchmarks.harness.result import Result
from benchmarks.tensor_parallel.tensor_families import batches, loss_of
from benchmarks.tensor_parallel.tensor_laws import Case, cases
from meshwright.api import parallelize
from meshwright.comm.collectives.collective_call import min_max_sent_nbytes
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.testing.ranks import run_on_threads

NAME = "tensor_bytes"
CLAIM = (
    "bytes sent per rank and layer by divided matrices, 1-D, with a divided sequence, 2-D, "
    "2.5-D and 3-D, are the laws', exactly"
)
PARTS = {"F": "streams", "B": "streams", "UNSHARD": "weights", "REDUCE": "weights"}


def part_of(action: str, case: Case) -> str | None:
    """The part of the law to which what `action` sends belongs; None: it is not of the layer."""
    kind, _, rest = action.partition("(")
    subject = rest.rstrip(")").split(", ")[0]
    if case.layer.name not in subject:
        return None
    return kind if kind in case.law else PARTS.get(kind)


def planned(plan: Plan, case: Case) -> dict[str, Fraction]:
    """What each rank sends in a step for the layer, by the program."""
    found = dict.fromkeys(case.law, Fraction(0))
    for action in plan.actions:
        part = part_of(action.name, case)
        for move in action.transfers if part in found else ():
            sent = min_max_sent_nbytes(move, plan.mesh.group_size(move.axes))[1]
            found[str(part)] += Fraction(sent).limit_denominator(10**6)  # a third of a byte is one
    return found


def told(world: World, case: Case, reading: AnalyzedModel, plan: Plan) -> dict[str, Fraction]:
    """What this rank sends in its second step for the layer, by its ledger."""
    with parallelize(reading, plan, world=world, loss=loss_of(case.family)) as engine:
        for batch in batches(case.family, 2, case.rows):
            before = dict(world.ledger.sent_nbytes)
            engine.step(engine.local_batch(batch))
    found = dict.fromkeys(case.law, Fraction(0))
    for action, nbytes in world.ledger.sent_nbytes.items():
        part = part_of(action, case)
        if part in found:
            found[str(part)] += Fraction(nbytes - before.get(action, 0.0)).limit_denominator(10**6)
    return found


def compared(case: Case) -> dict[str, object]:
    """How far the program and all ledgers are from the law, relative to it; infinite where the plan is
    refused.
    """
    reading = case.reading()
    try:
        plan = case.plan(reading)
    except PlanError as refused:
        return {"case": str(case), "off": float("inf"), "refused": str(refused)}
    law = {part: amount(case) for part, amount in case.law.items()}
    ledgers = run_on_threads(lambda world: told(world, case, reading, plan), case.mesh, timeout_s=600)
    sources = (planned(plan, case), *ledgers)
    off = max(float(abs(source[part] - law[part]) / law[part]) for source in sources for part in law)
    rows = {
        part: {"law": float(law[part]), "found": sorted({float(each[part]) for each in sources})}
        for part in law
    }
    return {"case": str(case), "off": off, **rows}


def result(rows: list[dict[str, object]]) -> Result:
    """The result of all cases: how many agree to the byte."""
    values = [float(str(row["off"])) for row in rows]
    kept = [{**row, "off": -1.0 if row["off"] == float("inf") else row["off"]} for row in rows]
    return Result.of_count(NAME, CLAIM, values, limit=0.0, bar=len(values), detail={"cases": kept})


def main() -> None:
    """Compare the cases that are asked for, and write the result when all were."""
    parser = ArgumentParser(description="what divided matrices send, beside the laws")
    parser.add_argument("--only", default="", help="words that the name of a case contains")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    rows = []
    for case in (case for case in cases() if only in str(case)):
        rows.append(compared(case))
        print(*(f"{key}: {value}" for key, value in rows[-1].items()), sep="; ", file=sys.stderr, flush=True)
    if not only:
        print(result(rows).write(NAME))


if __name__ == "__main__":
    main()
