"""Asserts the two laws of every tensor-parallel plan: it equals one device, and issues what its program
states.
"""

from collections.abc import Sequence

from meshwright.api import trace, verify
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import Batch, Loss
from meshwright.plan.plan import Plan


def assert_exact(
    analyzed: AnalyzedModel,
    plan: Plan,
    given: Sequence[Batch],
    loss: Loss | None = None,
    *,
    fake: bool = False,
) -> None:
    """`plan` equals one device on the batches `given`, and issues what its program states.

    A trace of real tensors takes a tenth of the time of `fake` ones, which each technique is shown to be able
    to play once.
    """
    verdict = verify(analyzed, plan, given, loss=loss)
    assert verdict.passed, str(verdict)
    traced = trace(analyzed, plan, loss=loss, fake=fake)
    assert traced.passed, str(traced)
