"""What watches a run from its rank 0: the terminal, the trackers; and what the run says of itself for its report."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.planner.prediction import Prediction
from meshwright.report.prediction import prediction_dict
from meshwright.report.progress import Figures, Show, training_view
from meshwright.report.states import held_nbytes
from meshwright.report.terminal import plan_words
from meshwright.run.about import write_about
from meshwright.run.adapters import ADAPTERS
from meshwright.run.callbacks import Callback, Moment
from meshwright.run.config import as_dict
from meshwright.run.launchers import Ranked
from meshwright.run.trackers import Told, tracked
from meshwright.verbs.plan import Resolved
from meshwright.verbs.predict import predicted

logger = logging.getLogger(__name__)


@contextmanager
def watching(
    resolved: Resolved, available: int | None, first: int, device: torch.device, console: Console
) -> Iterator[tuple[Callback, ...]]:
    """Callbacks of rank 0 for a run that goes on after step `first` and has data for `available` steps (None: endless)."""
    request, ready = resolved
    plan = ready.plan
    folder = Path(plan.run.folder)
    try:
        write_about(plan, plan_words(plan), held_nbytes(plan), device, prediction_dict(plan, _priced(plan)))
    except OSError as error:
        logger.warning("what the run is cannot be written, and its report will know less: %s", error)
    told = Told(folder, folder.resolve().name, plan.run.tracker_project, as_dict(request), first)
    steps = min(plan.job.train.steps, available or plan.job.train.steps)
    with tracked(plan.run.trackers, told, ADAPTERS) as trackers, training_view(console, steps, first) as show:
        yield (Callback(on_step_end=partial(_show, show)), *trackers)


def _priced(plan: Plan) -> Prediction | None:
    """What a step is predicted to take; where that cannot be said any more, the run goes on without it."""
    try:
        return predicted(plan, plan.run.hardware, plan.run.cluster)
    except PlanError as error:
        logger.warning("what a step takes cannot be predicted: %s", error)
        return None


def terminal_of(ranked: Ranked, console: Console) -> Callable[[str], None] | None:
    """Where `ranked` shows a warning; None for a rank whose output goes into its log."""
    if ranked.rank and ranked.place is None:
        return None
    return partial(console.print, style="yellow", markup=False, soft_wrap=True)


def _show(show: Show, moment: Moment) -> None:
    line = moment.line
    if line is not None:
        speeds = (line.tokens_per_s, line.flops_per_s, line.mfu)
        show(Figures(line.step, line.loss, line.grad_norm, line.lr, line.memory, *speeds, line.loss_scale))
