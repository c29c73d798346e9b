"""`--plot FILE.html`: draws step time against memory, and the schedule of the best plan.

The search keeps the fastest candidates, which are seldom the smallest. So it is repeated with less and less
memory, and the candidates that fit then are drawn too.
"""

from dataclasses import replace
from pathlib import Path

from meshwright.commands.search.search import SearchOutcome
from meshwright.parallel.pipeline.schedules.registry import find_schedule
from meshwright.parallel.pipeline.schedules.schedule import StageCosts, schedule_spans, simulate
from meshwright.plan.job.errors import refuse_write_errors
from meshwright.plan.step.simulator import SpansByRank
from meshwright.planner.analytic.closed_form_step_time import boundary_send_s, microbatch_time
from meshwright.planner.analytic.layer_time import PassTime
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import Candidate, search
from meshwright.report.search.search_page import search_page
from meshwright.report.search.search_result import ranking_reasons

MEMORY_FRACTIONS = (1.0, 0.8, 0.65, 0.5, 0.35, 0.25, 0.15)  # fractions of a device's memory
MAX_CANDIDATES = 30  # of each
NUM_ROUNDS = 2  # microbatches in the drawing, in units of pp


def write_plot(outcome: SearchOutcome, path: Path) -> None:
    """Writes the page. Raises PlanError when the file cannot be written."""
    best = outcome.result.best[0]
    rows = winner_timeline(outcome.request, best) if best.config.pp > 1 and not best.layer_assignment else []
    why = ranking_reasons(outcome.request, outcome.result, outcome.comparison)
    text = search_page(outcome.request, plotted_candidates(outcome), rows, why)
    fix = "name a file in a folder that can be written to: --plot FILE.html"
    with refuse_write_errors("the plot", path, fix):
        path.write_text(text, encoding="utf-8")


def plotted_candidates(outcome: SearchOutcome) -> list[Candidate]:
    """Returns the found candidates, and more that fit in less memory; the fastest first, each once."""
    request, found = outcome.request, list(outcome.result.best)
    for share in MEMORY_FRACTIONS if not any(each.layer_assignment for each in found) else ():
        device = replace(request.machine.device, memory=request.machine.device.memory * share)
        found += search(
            replace(request, machine=replace(request.machine, device=device)), MAX_CANDIDATES
        ).best
    seen: dict[tuple[object, ...], Candidate] = {}
    for each in found:
        seen.setdefault((each.config, each.schedule, each.layer_assignment), each)
    return sorted(seen.values(), key=lambda each: each.seconds)


def winner_timeline(request: SearchRequest, best: Candidate) -> SpansByRank:
    """Returns the timeline of the first microbatches of a step under `best`, with times of the analytic
    model.
    """
    config, schedule = best.config, find_schedule(best.schedule)
    if schedule is None:
        raise ValueError(
            f"the search chose a schedule that does not exist: '{best.schedule}'; "
            "fix commands/search/constraints.py"
        )
    count = config.pp * config.virtual_stages
    made = microbatch_time(request.shape, config, request.machine)
    one = made.layer + made.collectives
    again = one.forward if config.recompute == "layers" else 0.0
    per = request.shape.layers / count
    costs = [PassTime(per * one.forward, per * (one.backward + again)) for _ in range(count)]
    costs[0] += made.embedding
    costs[-1] += made.head
    # the busiest rank takes the seconds of the analytic estimate, gathers and Python's time included
    lying = schedule.virtual_stages(config.pp, config.virtual_stages)
    busy = [
        sum(costs[stage.stage].total for stage in lying if stage.pp_rank == rank) for rank in range(config.pp)
    ]
    scale = (
        (best.step.compute + best.step.tp_comm)
        / config.num_microbatches
        / max(busy)
        * (2 if config.schedule_profile.is_bidirectional else 1)
    )
    halves = [scale * each.backward / 2 for each in costs]
    sent = boundary_send_s(request.shape, config, request.machine)
    stage_costs = StageCosts([scale * each.forward for each in costs], halves, halves, transfer=sent)
    micros = int(min(config.num_microbatches, max(8, NUM_ROUNDS * config.pp)))
    order = schedule.build(config.pp, micros, config.virtual_stages, stage_costs)
    return schedule_spans(simulate(order, stage_costs), stage_costs)
