"""What a run evaluates beside its steps: the loss of samples, tasks, and a text that the model writes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.run.data.eval_samples import EvalSamples


@dataclass(frozen=True)
class Evaluations:
    """What a run evaluates; the functions are called on all ranks.

    `samples` have a loss, and `run_tasks` returns the metrics of tasks by name, on rank 0 at least.
    `sample_text` returns a text that the model has written: beside these, and after the last step.
    """

    samples: EvalSamples | None = None
    run_tasks: Callable[[], Mapping[str, float]] | None = None
    sample_text: Callable[[], str] | None = None

    @property
    def have_metrics(self) -> bool:
        """Whether there are samples or tasks."""
        return self.samples is not None or self.run_tasks is not None
