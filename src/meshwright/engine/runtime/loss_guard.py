"""Steps that would do harm: a loss or gradient norm that is not finite, or far above what it usually is.

Every rank judges, between CLIP and STEP, from the loss and the norm that all ranks share; so all of them
decide alike, and nothing is sent. A step that is judged harmful leaves parameters and optimizer as they were.
It does not enter the window of what is usual either, and is looked into once more (`engine.suspects`) to name
where it came from.

The window is saved with a checkpoint, so a resumed run judges as one that was never stopped.
"""

from collections import deque
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
    'lower optimizer.lr, clip (train.clip), or look at these samples; guard.action = "skip" goes '
    "on without such steps"
)


@dataclass(frozen=True)
class RankSpikeReport:
    """What one rank's own samples did.

    Its share of the loss and the norm of its gradient, before anything was summed. The norm is that of its
    micro-batches' gradients side by side, as if they were one long vector. `stage` and `block` say where a
    number first was not finite; else `parameter` is the one with the largest gradient.
    """

    rank: int
    loss: float
    grad_norm: float
    phase: StepPhase = ""
    block: str = ""
    parameter: str = ""

    def __str__(self) -> str:
        numbers = f"rank {self.rank}: loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}"
        held = f" of {self.parameter}" if self.parameter else ""
        block = f" of block {self.block}" if self.block else ""
        said = {
            "forward": f"the forward{block} is the first that is not finite",
            "loss": "the forward is finite and the loss is not",
            "backward": f"the gradient{held}{block} is the first that is not finite",
            "": f"the largest gradient is that{held}{block}" if self.parameter else "no samples",
        }
        return f"{numbers}; {said[self.phase]}"


@dataclass(frozen=True)
class LossSpike:
    """A harmful step: its loss and gradient norm over all ranks, why it is one, and what each rank's own samples did."""

    step: int
    loss: float
    grad_norm: float
    reasons: tuple[str, ...]
    rank_reports: tuple[RankSpikeReport, ...]

    @property
    def culprit(self) -> RankSpikeReport | None:
        """The first rank with a number that is not finite, else the one with the largest gradient.

        None: the sum did it.
        """
        odd = [suspect for suspect in self.rank_reports if suspect.phase]
        if odd or not isfinite(self.grad_norm):
            return odd[0] if odd else None
        return max(self.rank_reports, key=lambda suspect: suspect.grad_norm)

    def __str__(self) -> str:
        culprit = self.culprit
        text = str(culprit) if culprit else "every rank's own gradients are finite: their sum is not"
        return f"{' and '.join(self.reasons)}; {text}"


class LossSpikeError(PlanError):
    """A harmful step under guard.action = "stop", or one too many under "skip".

    `spike` says what happened, `more` why now.
    `samples` are the ids of the step's samples by rank, where the caller knows them.
    """

    def __init__(
        self, spike: LossSpike, stop_reason: str = "", samples: Mapping[int, list[int]] | None = None
    ) -> None:
        self.spike, self.stop_reason = spike, stop_reason
        lines = [f"{' and '.join(spike.reasons)}{stop_reason}"]
        first = [spike.culprit] if spike.culprit else []
        ordered = [*first, *(suspect for suspect in spike.rank_reports if suspect not in first)]
        for suspect in ordered[:MAX_SHOWN_RANKS]:
            ids = (samples or {}).get(suspect.rank)
            lines.append(
                str(suspect) if ids is None else f"{suspect}; samples {', '.join(map(str, ids)) or 'none'}"
            )
        lines += (
            [f"and {len(ordered) - MAX_SHOWN_RANKS} more ranks"] if len(ordered) > MAX_SHOWN_RANKS else []
        )
        super().__init__("\n  ".join(lines), fix=SPIKE_FIX, location=f"step {spike.step}")


class SpikeDetector:
    """What is usual, and what is not: judges one step after the other as `guard` says."""

    def __init__(self, guard: LossGuard) -> None:
        self.guard = guard
        self._usual: dict[str, deque[float]] = {
            name: deque(maxlen=guard.window) for name in ("loss", "gradient norm")
        }
        self._in_a_row = 0

    def check_step(self, loss: float, grad_norm: float) -> tuple[str, ...]:
        """Why a step of this `loss` and `grad_norm` would do harm, in words.

        () for a good one, which becomes usual.
        """
        found = {"loss": loss, "gradient norm": grad_norm}
        reasons = tuple(self._reasons(found))
        if reasons:
            self._in_a_row += 1
            return reasons
        self._in_a_row = 0
        for name, value in found.items():
            self._usual[name].append(value)
        return ()

    @property
    def repeated_skip_reason(self) -> str:
        """Why skipping leads nowhere, in words, when a whole window of steps was skipped without a good one between."""
        full = self._in_a_row >= self.guard.window
        return (
            f"; the last {self._in_a_row} steps were all skipped, so this is no passing spike" if full else ""
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What must be saved: the window, oldest first, as (steps, 2), and how many steps were skipped in a row."""
        window = torch.tensor(list(zip(*self._usual.values(), strict=True)), dtype=torch.float64).view(-1, 2)
        return {"window": window, "num_skipped_in_a_row": torch.tensor(self._in_a_row)}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Take up what `tensors` gave; the newest that fit, when the window is shorter now."""
        for column, usual in enumerate(self._usual.values()):
            usual.clear()
            usual.extend(state_dict["window"][:, column].tolist())
        self._in_a_row = int(state_dict["num_skipped_in_a_row"])

    def _reasons(self, found: Mapping[str, float]) -> Iterator[str]:
        for name, value in found.items():
            usual = self._usual[name]
            if not isfinite(value):
                yield f"the {name} is {value}"
            elif self.guard.factor and len(usual) == self.guard.window and value > 0:
                middle = median(usual)
                if 0 < middle * self.guard.factor < value:
                    yield (
                        f"the {name} {value:.4g} is {value / middle:.3g} times its median {middle:.4g} "
                        f"of {len(usual)} steps"
                    )
