"""Shows the verdict of a verification as a table: errors of numbers, messages and bytes sent, or losses."""

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.plan.job.errors import format_nbytes
from meshwright.report.table import Table
from meshwright.verifier.loss_curves import CurveVerdict
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


def curve_view(verdict: CurveVerdict) -> RenderableType:
    """Returns a verdict on curves: the outcome, the losses and the gap of each seed, and why."""
    rows = [
        (f"  {exact.seed}", f"{exact.first:.4f}", f"{exact.last:.4f}", f"{lossy.last:.4f}", f"{gap:+.2%}")
        for (exact, lossy), gap in zip(verdict.pairs, verdict.gaps, strict=True)
    ]
    head, _, reason = str(verdict).partition(": ")
    style = "green" if verdict.passed else "red"
    table = Table(["  seed", "first loss", "exact", "lossy", "gap"], rows)
    return Group(Text(f"{head}, in {verdict.num_steps} steps", style=style), table, Text(reason, style=style))
