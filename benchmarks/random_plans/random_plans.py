"""Random plans beside one device: any combination of techniques is refused with a repair, or computes what
one device computes.

A seed and a number define one plan (benchmarks/random_plans/random_draws.py): a model, a mesh of up to 24
ranks, strategies with random options, microbatches, gradient clipping. Either `make_plan` refuses it, every
diagnostic with a repair; or its ranks run as threads, and are compared with one ordinary PyTorch loop in
float64, as `verify` does: samples, loss, every gradient, the norm and every parameter after each of two SGD
steps. If the plan has a loss guard, a third step has a harmful loss, and the guard must leave the parameters
as they were. Any other outcome is a finding:

    crashed      an error other than a refusal was raised, or a plan was made and then refused
    differs      a number differs by more than 1e-10 of the largest magnitude in its block, or other messages
                 were sent than the program states
    hangs        the run did not end within some minutes
    no repair    the plan was refused, and a diagnostic has no repair
    new reason   the plan was refused for a reason that benchmarks/random_plans/combinations.toml does not
                 list

The table of pairs of techniques in docs/reference/combinations.md is made of the same results: how often each
pair was drawn, how often it matched, and, if it never did, the reasons of the refusals.

    python -m benchmarks.random_plans.random_plans             2,000 plans, and the result; an hour on 2 cores
    python -m benchmarks.random_plans.random_plans --only 17   one plan, with its messages; no result
    python -m benchmarks.random_plans.random_plans --shares    makes the plans of the tests, does not run
                                                               them, and prints the share of each pair that
                                                               is not refused

Rows are stored in benchmarks/scratch, by commit: a run continues where an earlier run of the same commit has
stopped.
"""

import sys
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from threading import Thread, get_ident
from typing import Any

import torch

from benchmarks.harness.result import Result
from benchmarks.random_plans.combinations import (
    FINDINGS,
    Pairs,
    Row,
    count_pairs,
    count_reasons,
    reason_of,
    reviewed,
)
from benchmarks.random_plans.compared_rows import compare_all
from benchmarks.random_plans.random_draws import TECHNIQUES, Draw, draw
from benchmarks.random_plans.random_models import MODELS, analyzed_model
from meshwright.engine.runtime.build_module import make_trained_module
from meshwright.model.loss.loss_definition import Batch
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from meshwright.run.training.trainer import select_local_batch
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.float64_parity_setup import make_parity_case
from meshwright.verifier.one_device.parity_case import ParityCase
from meshwright.verifier.one_device.recorded_run import record_run
from meshwright.verifier.parity import TOLERANCE, PlannedMessages, RankReport, compare_rank, make_verdict
from meshwright.verifier.reference import run_reference
from meshwright.verifier.verdict_and_cause import Verdict

NAME = "random_plans"
CLAIM = (
    "2,000 random plans (any techniques, up to 24 ranks, odd sizes, several "
    "microbatches; Llama, GPT-2, T5 and a "
    "model with two inputs) are each refused with a repair or equal one device to 1e-10 in "
    "float64; nothing else"
)
SEED, NUM_PLANS, LIMIT_S = 8, 2000, 240.0
CPU = torch.device("cpu")
HARM = "harm"  # the field of a batch that multiplies its loss
MATCHED = 0.8  # the least share of all plans that must match, not be refused


def try_plan(drawn: Draw, limit_s: float = LIMIT_S, device: torch.device = CPU) -> Row:
    """Returns the outcome of one plan, whose ranks compute on `device`: with the largest error if it was
    compared, with the diagnostics if it was refused.
    """
    torch.set_num_threads(1)
    row = draw_row(drawn)
    found: SimpleQueue[Row] = SimpleQueue()
    thread = Thread(target=lambda: found.put(_outcome(drawn, limit_s, device)), name="try_plan", daemon=True)
    thread.start()
    try:
        return {**row, **found.get(timeout=2 * limit_s)}
    except Empty:
        frames = sys._current_frames()
        stacks = [
            "".join(traceback.format_stack(frame)) for ident, frame in frames.items() if ident != get_ident()
        ]
        return {**row, "outcome": "hangs", "message": "\n\n".join(stacks)}


def draw_row(drawn: Draw) -> Row:
    """Returns what the row of a plan says of the plan itself."""
    return {
        "case": str(drawn),
        "number": drawn.number,
        "perturbation": drawn.perturbation,
        "techniques": list(drawn.techniques),
    }


def _outcome(drawn: Draw, limit_s: float, device: torch.device) -> Row:
    try:
        plan = plan_or_refusal(drawn)
        if not isinstance(plan, Plan):
            return plan
        return verdict_outcome(compare(drawn, plan, limit_s, device))
    except Exception:  # stored as a row: one plan must not end the run
        return {"outcome": "crashed", "message": traceback.format_exc()}


def verdict_outcome(verdict: Verdict) -> Row:
    """Returns the part of a row that says how a plan compares with one device."""
    error = max(verdict.max_errors.values(), default=float("inf"))
    return (
        {"outcome": "matched", "error": error}
        if verdict.passed
        else {"outcome": "differs", "message": str(verdict)}
    )


def plan_or_refusal(drawn: Draw) -> Plan | Row:
    """Returns the plan, or the row of its refusal."""
    try:
        return drawn.plan()
    except PlanError as refused:
        diagnostics = [asdict(diagnostic) for diagnostic in refused.diagnostics]
    message = "\n".join(f"{each['problem']} -> {each['fix']}" for each in diagnostics)
    row: Row = {"diagnostics": diagnostics, "message": message}
    if not all(each["problem"] and each["fix"] for each in diagnostics):
        return {**row, "outcome": "no repair"}
    reasons = {reason_of(each["problem"]) for each in diagnostics}
    return {
        **row,
        "outcome": "refused" if all(reasons) else "new reason",
        "reasons": sorted(map(str, reasons)),
    }


def accepted_draws(draws: Iterator[Draw], wanted: int) -> list[Draw]:
    """Returns the first `wanted` of `draws` that are not refused."""
    return list(islice((each for each in draws if isinstance(plan_or_refusal(each), Plan)), wanted))


def compare(drawn: Draw, plan: Plan, limit_s: float, device: torch.device = CPU) -> Verdict:
    """Returns the verdict over all ranks, which compute on `device`, beside one device, the CPU; no rank
    waits longer than `limit_s` seconds for another one.
    """
    case = draw_case(drawn, plan)
    make_module = partial(make_trained_module, analyzed_model(drawn.model), device, torch.float64)
    on_ranks = partial(run_on_threads, mesh=plan.mesh, timeout_s=limit_s, device=device)
    ranks = replace(case, make_trained_module=make_module)  # one device is the CPU
    recorded = on_ranks(lambda world: record_run(ranks, world, drawn.num_steps))
    reference = run_reference(case, drawn.num_steps, recorded[0])
    if drawn.guard:
        case = replace(case, plan=replace(case.plan, job=replace(case.plan.job, guard=plan.job.guard)))
        ranks = replace(ranks, plan=case.plan)
        reference.steps[-1] = replace(reference.steps[-1], parameters=reference.steps[-2].parameters)
    reports = on_ranks(lambda world: compare_rank(ranks, world, reference))
    for report in reports if drawn.guard else ():
        _drop_last_step(report, PlannedMessages(case))
    return make_verdict(case, reports, "threads", {})


def draw_case(drawn: Draw, plan: Plan) -> ParityCase:
    """Returns the comparison of `plan` with one device on random samples."""
    model = MODELS[drawn.model]
    batches = model.batches(drawn.num_steps, drawn.num_samples)
    num_last = drawn.num_samples - drawn.num_missing_samples
    batches[-1] = {key: value[:num_last] for key, value in batches[-1].items()}
    loss = model.loss()
    if drawn.guard:
        batches[-1][HARM] = torch.full((num_last, 1), 1e6)
        loss = replace(loss.wrap_total(_multiplied), targets=(*loss.targets, HARM))

    def read_batch(plan: Plan, rank: int) -> Callable[[int], Batch | None]:
        return lambda step: select_local_batch(batches[step], plan, rank)

    return make_parity_case(analyzed_model(drawn.model), plan, loss, read_batch)


def _drop_last_step(report: RankReport, planned: PlannedMessages) -> None:
    """Drops the messages of the last step, in which the guard looks for the harmful rank: no program states
    them.
    """
    report.num_steps -= 1
    report.microbatch_shapes = report.microbatch_shapes[: report.num_steps]
    report.sent_entries = report.sent_entries[: len(list(planned.messages(report)))]


def _multiplied(total: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns `total` multiplied by the field `HARM` of the batch, which the model does not see."""

    def multiplied(outputs: Any, batch: Batch, *more: Any) -> torch.Tensor:
        return total(outputs, batch, *more) * (
            batch[HARM].amax() if HARM in batch and len(batch[HARM]) else 1.0
        )

    return multiplied


def make_plans(seed: int, numbers: Iterable[int]) -> list[Row]:
    """Returns the rows of plans that are made and not run: a plan that is made counts as matched."""
    rows = []
    for number in numbers:
        drawn = draw(seed, number)
        plan = plan_or_refusal(drawn)
        outcome = {"outcome": "matched"} if isinstance(plan, Plan) else plan
        rows.append(
            {
                "case": str(drawn),
                "perturbation": drawn.perturbation,
                "techniques": list(drawn.techniques),
                **outcome,
            }
        )
    return rows


def result(seed: int, rows: list[Row]) -> Result:
    """Returns the result of these rows: how many plans matched, their largest error, and the refusals by
    reason.
    """
    ran = [row for row in rows if row["outcome"] != "refused"]
    errors = [float(row.get("error", float("inf"))) for row in ran]
    pairs = {
        " + ".join(pair): {"drawn": found.drawn, "matched": found.matched, "refused": dict(found.reasons)}
        for pair, found in count_pairs(rows).items()
    }
    detail = {
        "seed": seed,
        "drawn": len(rows),
        "matched": sum(row["outcome"] == "matched" for row in rows),
        "refused": sum(row["outcome"] == "refused" for row in rows),
        "by_reason": count_reasons(rows),
        "worst": max((row["error"] for row in rows if "error" in row), default=-1.0),
        "findings": [row for row in rows if row["outcome"] in FINDINGS],
        "kinds": {
            name: kind for name, kind in TECHNIQUES.items() if any(name in row["techniques"] for row in rows)
        },
        "pairs": pairs,
    }
    return Result.of_count(NAME, CLAIM, errors, limit=TOLERANCE, bar=int(MATCHED * len(rows)), detail=detail)


def shares(found: Pairs) -> list[str]:
    """Returns one line per pair of techniques: the number of plans with both, and the share that is not
    refused.
    """
    return [
        f"{' + '.join(pair)}: {each.unperturbed}, {each.share:.2f}"
        for pair, each in sorted(found.items())
        if each.unperturbed
    ]


def main() -> None:
    """Tries the selected plans, and writes the result if all were tried."""
    parser = ArgumentParser(description="random plans beside one device")
    parser.add_argument("--count", type=int, default=NUM_PLANS, help="number of plans")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", type=int, default=-1, help="the number of one plan")
    parser.add_argument(
        "--shares", action="store_true", help="make the plans of the tests, and print the share of each pair"
    )
    options = parser.parse_args()
    if options.shares:
        wanted = reviewed()
        print("\n".join(shares(count_pairs(make_plans(wanted.seed, range(wanted.count))))))
        return
    if options.only >= 0:
        row = try_plan(draw(options.seed, options.only))
        print(row["case"], row["outcome"], row.get("error", ""), row.get("message", ""), sep="\n")
        return
    rows = compare_all(NAME, [draw(options.seed, number) for number in range(options.count)], try_plan)
    print(
        f"seed {options.seed}: {sum(row['outcome'] == 'matched' for row in rows)} of {len(rows)} matched",
        file=sys.stderr,
    )
    if (options.seed, options.count) == (SEED, NUM_PLANS):
        print(result(options.seed, rows).write(NAME))


if __name__ == "__main__":
    main()
