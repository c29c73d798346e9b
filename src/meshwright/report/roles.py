"""The dtype of each role as a table (`engine/precision.py` says what they are for), and in one line."""

from rich.table import Column, Table
from rich.text import Text

from meshwright.core.plan import Plan
from meshwright.core.rules import HALVED, QUANTISED

MEANINGS = {
    "parameters": "what blocks use and what is gathered",
    "master": "what the optimizer steps, and checkpoints hold",
    "compute": "operands of matrix products",
    "gradients": "the sum that the optimizer reads",
    "reduce": "gradients under way",
    "moments": "what the optimizer remembers",
}


def roles_of(plan: Plan) -> dict[str, str]:
    """The dtype of each role, in words."""
    roles, rule = plan.job.precision.roles, plan.job.optimizer.name
    moments = "bfloat16" if rule in HALVED else "8 bits, scales float32" if rule in QUANTISED else roles["moments"]
    return {**roles, "moments": moments}


def roles_words(plan: Plan) -> str:
    """The roles by dtype, in one line: those of one dtype together."""
    found: dict[str, list[str]] = {}
    roles = roles_of(plan)
    if _steps_itself(plan):
        roles.pop("master")
    for role, dtype in roles.items():
        found.setdefault(dtype, []).append(role)
    said = "; ".join(f"{dtype} {', '.join(roles)}" for dtype, roles in found.items())
    precision = plan.job.precision
    return f"{said}; loss scale from {precision.loss_scale:g}" if precision.scales_loss else said


def roles_table(plan: Plan) -> Table:
    """Role, dtype, and what it is."""
    table = Table(Column("role", min_width=12), "dtype", Column("what it is", overflow="fold"), box=None, header_style="bold")
    table.padding = (0, 2, 0, 0)
    same = {"master": "the parameters themselves"} if _steps_itself(plan) else {}
    for role, dtype in roles_of(plan).items():
        table.add_row(role, Text(dtype), Text(same.get(role, MEANINGS[role])))
    return table


def _steps_itself(plan: Plan) -> bool:
    """Whether the optimizer steps the parameters, and no copy of them."""
    return plan.job.precision.resolved.master == plan.job.precision.parameters
