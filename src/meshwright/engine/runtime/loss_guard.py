"""Detects steps that would do harm: a loss or gradient norm that is not finite, or far above the usual.

Every rank checks, between CLIP and STEP, the loss and the norm that all ranks share; so all ranks decide
alike without a message. A harmful step leaves parameters and optimizer unchanged. It does not enter the
window of usual values, and is replayed (step/spike_diagnosis.py) to find the rank, block and parameter that
caused it.

The window is strategy state (plan/strategy_state.py), so a resumed run decides as one that was never stopped.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Literal

import torch

from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import LossGuard

StepPhase = Literal["", "forward", "loss", "backward"]  # where a number first was not finite; "": nowhere
MAX_SHOWN_RANKS = 8  # ranks in a message
SPIKE_FIX = (
    'lower optimizer.lr, clip (train.clip), or look at these samples; guard.action = "skip" '
    "leaves such steps out"
)


@dataclass(frozen=True)
class RankSpikeReport:
    """The loss and the gradient norm of one rank's own samples, before any sum over ranks.

    The norm is that of its microbatches' gradients as one long vector. `phase` and `block` say where a value
    first was not finite; else `parameter` is the one with the largest gradient.
    """

    rank: int
    loss: float
    grad_norm: float
    phase: StepPhase = ""
    block: str = ""
    parameter: str = ""

    def __str__(self) -> str:
        numbers = f"rank {self.rank}: loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}"
        of_parameter = f" of {self.parameter}" if self.parameter else ""
        block = f" of block {self.block}" if self.block else ""
        description = {
            "forward": f"the forward{block} is the first that is not finite",
            "loss": "the forward is finite and the loss is not",
            "backward": f"the gradient{of_parameter}{block} is the first that is not finite",
            "": f"the largest gradient is that{of_parameter}{block}" if self.parameter else "no samples",
        }
        return f"{numbers}; {description[self.phase]}"


@dataclass(frozen=True)
class LossSpike:
    """A harmful step: its loss and gradient norm over all ranks, the reasons, and each rank's report."""

    step: int
    loss: float
    grad_norm: float
    reasons: tuple[str, ...]
    rank_reports: tuple[RankSpikeReport, ...]

    @property
    def culprit(self) -> RankSpikeReport | None:
        """The first rank with a value that is not finite, else the one with the largest gradient.

        None when every rank's gradients are finite and only their sum is not.
        """
        non_finite = [rank_report for rank_report in self.rank_reports if rank_report.phase]
        if non_finite or not isfinite(self.grad_norm):
            return non_finite[0] if non_finite else None
        return max(self.rank_reports, key=lambda rank_report: rank_report.grad_norm)

    def __str__(self) -> str:
        culprit = self.culprit
        text = str(culprit) if culprit else "every rank's own gradients are finite: their sum is not"
        return f"{' and '.join(self.reasons)}; {text}"


class LossSpikeError(PlanError):
    """A harmful step under guard.action = "stop", or one too many under "skip".

    `stop_reason` says why the run stops now. `samples` are the ids of the step's samples by rank, where the
    caller knows them.
    """

    def __init__(
        self, spike: LossSpike, stop_reason: str = "", samples: Mapping[int, list[int]] | None = None
    ) -> None:
        self.spike, self.stop_reason = spike, stop_reason
        lines = [f"{' and '.join(spike.reasons)}{stop_reason}"]
        culprit_first = [spike.culprit] if spike.culprit else []
        ordered_reports = [
            *culprit_first,
            *(rank_report for rank_report in spike.rank_reports if rank_report not in culprit_first),
        ]
        for rank_report in ordered_reports[:MAX_SHOWN_RANKS]:
            ids = (samples or {}).get(rank_report.rank)
            lines.append(
                str(rank_report)
                if ids is None
                else f"{rank_report}; samples {', '.join(map(str, ids)) or 'none'}"
            )
        lines += (
            [f"and {len(ordered_reports) - MAX_SHOWN_RANKS} more ranks"]
            if len(ordered_reports) > MAX_SHOWN_RANKS
            else []
        )
        super().__init__("\n  ".join(lines), fix=SPIKE_FIX, location=f"step {spike.step}")


class SpikeDetector:
    """The usual loss and gradient norm of recent steps, with which each step is compared as `guard` says.

    They lie in the tensors `guard_states`, which checkpoints hold: a row per good step, the newest last.
    """

    def __init__(self, guard: LossGuard, tensors: Mapping[str, torch.Tensor]) -> None:
        self.guard = guard
        self._window, self._num_skipped = tensors["window"], tensors["num_skipped_in_a_row"]

    def check_step(self, loss: float, grad_norm: float) -> tuple[str, ...]:
        """Returns the reasons why a step would do harm; () for a good one, which enters the window."""
        values = {"loss": loss, "gradient norm": grad_norm}
        reasons = tuple(self._reasons(values))
        if reasons:
            self._num_skipped += 1
            return reasons
        self._num_skipped.zero_()
        self._window.copy_(self._window.roll(-1, 0))
        self._window[-1] = torch.tensor([loss, grad_norm], dtype=torch.float64)
        return ()

    @property
    def repeated_skip_reason(self) -> str:
        """The reason why skipping fails, when a whole window of steps was skipped in a row; else ""."""
        num_skipped = int(self._num_skipped.item())
        full = num_skipped >= self.guard.window
        return (
            f"; the last {num_skipped} steps were all skipped, so this is not a transient spike"
            if full
            else ""
        )

    def _reasons(self, values: Mapping[str, float]) -> Iterator[str]:
        is_full = bool(self._window[0].isfinite().all())  # rows that no step has filled are inf
        for column, (name, value) in enumerate(values.items()):
            if not isfinite(value):
                yield f"the {name} is {value}"
            elif self.guard.factor and is_full and value > 0:
                history = self._window[:, column].tolist()
                median_value = median(history)
                if 0 < median_value * self.guard.factor < value:
                    yield (
                        f"the {name} {value:.4g} is {value / median_value:.3g} times its median "
                        f"{median_value:.4g} "
                        f"of {len(history)} steps"
                    )
