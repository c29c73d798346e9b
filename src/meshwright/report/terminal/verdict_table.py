"""Shows the verdict of a verification as a table: errors of numbers, or messages and bytes sent."""

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.plan.job.errors import format_nbytes
from meshwright.report.table import Table
from meshwright.verifier.message_trace import TraceVerdict
from meshwright.verifier.verdict_and_cause import Verdict


def verdict_view(verdict: Verdict) -> RenderableType:
    """Returns a verdict as a short table.

    The outcome, then the largest error per quantity, or the first difference.
    """
    if not verdict.passed:
        return Text(str(verdict), style="red")
    rows = [("largest relative errors", f"(allowed: {verdict.tolerance:g})")]
    rows += [(f"  {quantity}", f"{error:.2g}") for quantity, error in verdict.max_errors.items()]
    head = (
        f"{verdict.mesh} equals {verdict.reference} after {verdict.num_steps} steps of "
        f"{verdict.model}, on "
        f"{verdict.rank_backend}"
    )
    style = "green" if verdict.has_model_loss else "yellow"
    note = [Text(verdict.model_loss_note.strip(), style=style)] if verdict.model_loss_note else []
    return Group(Text(head, style="green"), Table(["", ""], rows), *note)


def trace_view(verdict: TraceVerdict) -> RenderableType:
    """Returns a trace verdict as a short table.

    The outcome and what was sent, or every action that differs.
    """
    if not verdict.passed:
        return Text(str(verdict), style="red")
    rows = [
        ("  model", f"{verdict.model}, on {verdict.tensor_kind} tensors"),
        ("  collectives", f"{verdict.num_messages} per rank and step"),
        ("  sent", f"{format_nbytes(verdict.sent_nbytes)} per rank and step"),
    ]
    return Group(Text(str(verdict), style="green"), Table(["", ""], rows))
