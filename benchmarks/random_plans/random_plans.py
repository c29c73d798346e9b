"""Plans by chance beside one device: any techniques together are refused with a repair, or compute what one
device computes.

Of each number under a seed one plan follows (benchmarks/random_plans/random_draws.py): a model, a mesh of up to 24 ranks,
strategies with options of their own, microbatches, clipping. `make_plan` refuses it, each fault with a
repair, or it is compared, its ranks as threads, with one ordinary PyTorch loop in float64, as `verify` does:
samples, loss, every gradient, the norm and every parameter after each of two SGD steps; from a third, which
does harm, a guard must spare them. Nothing else may happen. What does is a finding:

    crashed      something else than a refusal was raised, or a plan was made and then refused
    differs      by more than 1e-10 of the largest magnitude in its block, or sent what it did not say
    hangs        it had not ended after some minutes
    no repair    it was refused, and a fault says no repair
    new reason   it was refused for a reason that benchmarks/random_plans/combinations.toml does not list

From the same rows comes the table of pairs of techniques in docs/combinations.md: how often each pair was
drawn, and how often it matched; and for which reasons it was refused where it never did.

    python -m benchmarks.random_plans.random_plans                   2,000 plans, and the result; an hour on two cores
    python -m benchmarks.random_plans.random_plans --only 17         one of them, with what it says; no result
    python -m benchmarks.random_plans.random_plans --shares          plans those of the tests alone, and prints the shares
                                                        that they have

What has been found lies in benchmarks/scratch, by commit: a run goes on where another one of the same commit
has ended.
"""

import sys
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from queue import Empty, SimpleQueue
from threading import Thread, get_ident
from typing import Any

import torch

from benchmarks.harness.case_store import CaseStore
from benchmarks.harness.result import Result
from benchmarks.random_plans.combinations import (
    FINDINGS,
    Pairs,
    Row,
    of_pairs,
    reason_of,
    refused_by,
    reviewed,
)
from benchmarks.random_plans.random_draws import TECHNIQUES, Draw, draw
from benchmarks.random_plans.random_models import KNOWN, reading_of
from meshwright.engine.runtime.loss import Batch
from meshwright.plan.hardware.device_specs import available_cores
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.run.training.engine import select_local_batch
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.parity import TOLERANCE, PlannedMessages, RankReport, compare_rank, make_verdict
from meshwright.verifier.parity_case import make_parity_case
from meshwright.verifier.reference import run_reference
from meshwright.verifier.verdict import Verdict

NAME = "random_plans"
CLAIM = (
    "2,000 plans drawn by chance (any techniques, up to 24 ranks, odd sizes, several "
    "microbatches; Llama, GPT-2, T5 and a "
    "model with two inputs) are each refused with a repair or equal one device to 1e-10 in "
    "float64; nothing else"
)
SEED, COUNT, LIMIT_S = 8, 2000, 240.0
HARM = "harm"  # the column of a batch by which its loss is multiplied
MATCHED = 0.8  # the least share of all that must be equal, not refused


def tried(drawn: Draw, limit_s: float = LIMIT_S) -> Row:
    """What becomes of one plan: its outcome, the worst error where it was compared, its faults where it was
    refused.
    """
    torch.set_num_threads(1)
    row: Row = {
        "case": str(drawn),
        "number": drawn.number,
        "spoilt": drawn.spoilt,
        "techniques": list(drawn.techniques),
    }
    found: SimpleQueue[Row] = SimpleQueue()
    thread = Thread(target=lambda: found.put(_tried(drawn, limit_s)), name="tried", daemon=True)
    thread.start()
    try:
        return {**row, **found.get(timeout=2 * limit_s)}
    except Empty:
        frames = sys._current_frames()
        stacks = [
            "".join(traceback.format_stack(frame)) for ident, frame in frames.items() if ident != get_ident()
        ]
        return {**row, "outcome": "hangs", "said": "\n\n".join(stacks)}


def _tried(drawn: Draw, limit_s: float) -> Row:
    try:
        planned = plan_or_refusal(drawn)
        if not isinstance(planned, Plan):
            return planned
        verdict = compared(drawn, planned, limit_s)
    except Exception:  # told with the others: one plan must not end all
        return {"outcome": "crashed", "said": traceback.format_exc()}
    worst = max(verdict.max_errors.values(), default=float("inf"))
    return (
        {"outcome": "matched", "error": worst}
        if verdict.passed
        else {"outcome": "differs", "said": str(verdict)}
    )


def plan_or_refusal(drawn: Draw) -> Plan | Row:
    """The plan, or what is told of its refusal."""
    try:
        return drawn.plan()
    except PlanError as refused:
        faults = [asdict(fault) for fault in refused.diagnostics]
    row: Row = {"faults": faults, "said": "\n".join(f"{each['problem']} -> {each['fix']}" for each in faults)}
    if not all(each["problem"] and each["fix"] for each in faults):
        return {**row, "outcome": "no repair"}
    reasons = {reason_of(each["problem"]) for each in faults}
    return {
        **row,
        "outcome": "refused" if all(reasons) else "new reason",
        "reasons": sorted(map(str, reasons)),
    }


def compared(drawn: Draw, plan: Plan, limit_s: float) -> Verdict:
    """The verdict over all ranks; no rank waits longer than `limit_s` for another one."""
    known, reading = KNOWN[drawn.model], reading_of(drawn.model)
    batches = known.batches(drawn.steps, drawn.rows)
    batches[-1] = {key: value[: drawn.rows - drawn.missing] for key, value in batches[-1].items()}
    loss = known.loss()
    if drawn.guard:
        batches[-1][HARM] = torch.full((drawn.rows - drawn.missing, 1), 1e6)
        loss = replace(loss.wrap_total(_harmed), targets=(*loss.targets, HARM))
    case = make_parity_case(
        reading, plan, loss, lambda plan, rank: lambda step: select_local_batch(batches[step], plan, rank)
    )
    reference = run_reference(case, drawn.steps)
    if drawn.guard:
        case = replace(case, plan=replace(case.plan, job=replace(case.plan.job, guard=plan.job.guard)))
        reference.steps[-1] = replace(reference.steps[-1], parameters=reference.steps[-2].parameters)
    reports = run_on_threads(lambda world: compare_rank(case, world, reference), plan.mesh, timeout_s=limit_s)
    for report in reports if drawn.guard else ():
        _without_last(report, PlannedMessages(case))
    return make_verdict(case, reports, "threads", {})


def _without_last(report: RankReport, stated: PlannedMessages) -> None:
    """Forget what was sent in the last step, in which it is asked who did harm: that is in no program."""
    report.num_steps -= 1
    report.microbatch_shapes = report.microbatch_shapes[: report.num_steps]
    report.sent_entries = report.sent_entries[
        : len(list(stated.messages(report.rank, report.microbatch_shapes or [()] * report.num_steps)))
    ]


def _harmed(total: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`total` as many times as large as the batch says, of which the model hears nothing."""

    def harmed(outputs: Any, batch: Batch, *more: Any) -> torch.Tensor:
        return total(outputs, batch, *more) * (
            batch[HARM].amax() if HARM in batch and len(batch[HARM]) else 1.0
        )

    return harmed


def planned(seed: int, numbers: Iterable[int]) -> list[Row]:
    """What becomes of plans when nobody runs them: a plan that is made counts as one that matches."""
    rows = []
    for number in numbers:
        drawn = draw(seed, number)
        found = plan_or_refusal(drawn)
        said = {"outcome": "matched"} if isinstance(found, Plan) else found
        rows.append(
            {"case": str(drawn), "spoilt": drawn.spoilt, "techniques": list(drawn.techniques), **said}
        )
    return rows


def result(seed: int, rows: list[Row]) -> Result:
    """The result of all that were drawn: how many matched, the worst gap of those, what was refused for which
    reason.
    """
    ran = [row for row in rows if row["outcome"] != "refused"]
    errors = [float(row.get("error", float("inf"))) for row in ran]
    pairs = {
        " + ".join(pair): {"drawn": found.drawn, "matched": found.matched, "refused": dict(found.reasons)}
        for pair, found in of_pairs(rows).items()
    }
    detail = {
        "seed": seed,
        "drawn": len(rows),
        "matched": sum(row["outcome"] == "matched" for row in rows),
        "refused": sum(row["outcome"] == "refused" for row in rows),
        "by_reason": refused_by(rows),
        "worst": max((row["error"] for row in rows if "error" in row), default=-1.0),
        "findings": [row for row in rows if row["outcome"] in FINDINGS],
        "kinds": {
            name: kind for name, kind in TECHNIQUES.items() if any(name in row["techniques"] for row in rows)
        },
        "pairs": pairs,
    }
    return Result.of_count(NAME, CLAIM, errors, limit=TOLERANCE, bar=int(MATCHED * len(rows)), detail=detail)


def shares(found: Pairs) -> list[str]:
    """By pair of techniques that meet, in how many plans, and the share of those that are not refused."""
    return [
        f"{' + '.join(pair)}: {each.straight}, {each.share:.2f}"
        for pair, each in sorted(found.items())
        if each.straight
    ]


def main() -> None:
    """Try the plans that are asked for, and write the result when all were."""
    parser = ArgumentParser(description="plans by chance beside one device")
    parser.add_argument("--count", type=int, default=COUNT, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", type=int, default=-1, help="the number of one of them")
    parser.add_argument(
        "--shares", action="store_true", help="plan those of the tests, and print what pairs have"
    )
    options = parser.parse_args()
    if options.shares:
        wanted = reviewed()
        print("\n".join(shares(of_pairs(planned(wanted.seed, range(wanted.count))))))
        return
    if options.only >= 0:
        row = tried(draw(options.seed, options.only))
        print(row["case"], row["outcome"], row.get("error", ""), row.get("said", ""), sep="\n")
        return
    kept = CaseStore(NAME)
    found = kept.read()
    chosen = [draw(options.seed, number) for number in range(options.count)]
    with ProcessPoolExecutor(available_cores(), get_context("spawn")) as pool:
        for ended in as_completed([pool.submit(tried, each) for each in chosen if str(each) not in found]):
            row = ended.result()
            found[row["case"]] = row
            kept.add(row)
            told = f"\n{row['said']}" if row["outcome"] in FINDINGS else ""
            print(row["outcome"], row.get("error", ""), row["case"], told, file=sys.stderr, flush=True)
    rows = [found[str(each)] for each in chosen]
    print(
        f"seed {options.seed}: {sum(row['outcome'] == 'matched' for row in rows)} of {len(rows)} matched",
        file=sys.stderr,
    )
    if (options.seed, options.count) == (SEED, COUNT):
        print(result(options.seed, rows).write(NAME))


if __name__ == "__main__":
    main()
