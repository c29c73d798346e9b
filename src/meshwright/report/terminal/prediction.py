"""Shows a predicted step as a table and as plain values: seconds by category, peak memory, bytes sent; and
what `generate` is predicted to take.

Bytes come from the program and need no device; seconds need the hardware. The plain values are stored with a
run (run_info.json), so that its report can compare them with measurements (predicted_vs_measured.py).
"""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.plan.generation_program import Rollout
from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.plan import Plan
from meshwright.planner.program_cost.generation_cost import GenerationPrediction
from meshwright.planner.program_cost.prediction import StepBreakdown, StepPrediction
from meshwright.planner.program_cost.rank_memory import peak_nbytes_by_category
from meshwright.report.table import Column, Table
from meshwright.report.terminal.memory_and_sent_bytes import sent_nbytes_by_role

CATEGORY_TEXTS = {
    "compute_s": "blocks and the loss",
    "inner_comm_s": "communication inside blocks",
    "exposed_comm_s": "exposed communication between actions",
    "idle_s": "waiting for other ranks",
    "optimizer_s": "gradient norm and optimizer",
}
MAX_ROLES = 6  # roles in a table


def prediction_dict(plan: Plan, prediction: StepPrediction | None) -> dict[str, Any]:
    """Returns the peak memory and the bytes sent of `plan` by role, and the seconds if they are predicted.

    The peak is the expected one; `peak_memory_at_most` is that of any step, if it differs.
    """
    peaks, most = (
        {
            role.name: peak_nbytes_by_category(plan, role.ranks[0], at_most=is_most)
            for role in plan.program.roles
        }
        for is_most in (False, True)
    )
    at_most = {} if most == peaks else {"peak_memory_at_most": most}
    values = {"peak_memory": peaks, **at_most, "sent": sent_nbytes_by_role(plan)}
    return values if prediction is None else {**values, **prediction.as_dict()}


def prediction_view(plan: Plan, prediction: StepPrediction) -> RenderableType:
    """Returns the seconds of a step, in all and by category for each role."""
    return Group(
        Text(prediction_head(plan, prediction), style="bold"),
        _table(prediction),
        *(Text(f"  {note}") for note in prediction.notes),
    )


def prediction_head(plan: Plan, prediction: StepPrediction) -> str:
    """Returns the seconds of a step on its devices, and the tokens and FLOPs per second."""
    tokens = plan.job.train.batch * (1 if plan.job.data.source == "example" else plan.job.data.sequence)
    unit = "samples" if plan.job.data.source == "example" else "tokens"
    speed = (
        f"{tokens / prediction.step_s:,.0f} {unit} per second, "
        f"{prediction.flops / prediction.step_s / 1e9:,.4g} GFLOP/s"
    )
    share = "" if prediction.mfu is None else f", {100 * prediction.mfu:.1f} % of the peak"
    return (
        f"a step takes {format_seconds(prediction.step_s)} on {plan.mesh.world_size} x "
        f"{prediction.target_name}: {speed}{share}{_round_end_text(prediction)}"
    )


def generation_text(
    rollout: Rollout, weights: float, sent: Mapping[str, float], prediction: GenerationPrediction | None
) -> str:
    """Returns the bytes that the busiest rank sends: of `weights` in a call, and `sent` for each token of its
    sequences, by kind of action; and the seconds if they are predicted.
    """
    by_kind = ", ".join(f"{kind} {format_nbytes(round(nbytes))}" for kind, nbytes in sent.items())
    total = format_nbytes(round(sum(sent.values())))
    text = f"generate sends {total} a rank for each token of {rollout.num_seqs} sequences"
    text += f" ({by_kind})" if sent else ""
    text += f", and {format_nbytes(round(weights))} of weights once" if weights else ""
    if prediction is None:
        return text
    gathered = f"{format_seconds(prediction.gather_s)} to gather weights, " if prediction.gather_s else ""
    return (
        f"{text}; without Python between operations it takes {gathered}"
        f"{format_seconds(prediction.prefill_s)} for prompts of {rollout.num_prompt_tokens} tokens, then "
        f"{format_seconds(prediction.token_s)} a token: at most {prediction.tokens_per_s:,.0f} tokens per "
        "second of all ranks"
    )


def format_seconds(value: float) -> str:
    """Returns seconds in the unit that fits, three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def _table(prediction: StepPrediction) -> Table:
    roles = list(prediction.roles.items())
    shown = roles if len(roles) <= MAX_ROLES else [*roles[: MAX_ROLES - 1], roles[-1]]
    heads = [role for role, _ in shown] if len(roles) > 1 else ["seconds"]
    rows = [
        (name, *(category_seconds(each, name) for _, each in shown), text)
        for name, text in CATEGORY_TEXTS.items()
    ]
    return Table(
        ["step time", *(Column(head, format_seconds) for head in heads), ""],
        [row for row in rows if any(row[1:-1])],
        note=f"and {len(roles) - len(shown)} more roles between" if len(roles) > len(shown) else "",
    )


def category_seconds(breakdown: StepBreakdown, category: str) -> float:
    """Returns the seconds in one of CATEGORY_TEXTS."""
    return float(vars(breakdown)[category])


def _round_end_text(prediction: StepPrediction) -> str:
    if prediction.round_end_s is None:
        return ""
    return f"; a mean over a round, whose last step takes {format_seconds(prediction.round_end_s)}"
