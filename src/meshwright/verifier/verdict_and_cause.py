"""The outcome of a comparison with one device, in words and as JSON.

A comparison that left something out proves nothing: it fails as `incomplete`. Why a plan differs:
divergence_cause.py.
"""

import json
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from meshwright.plan.job.errors import PlanError

CAUSE_NOTES = {
    "init": "the initial values depend on more than the seed: construct the model in one way only",
    "data": "samples depend on the rank that reads them: read them by their index alone",
    "plan": "the program sends other bytes than planned: this is a bug, report the plan",
    "randomness": "two runs on one device differ: the forward draws numbers that the seed does not determine",
    "choice of experts": (
        "of scores that nearly tie, rounding decides which expert a token gets. If the margin is as small as "
        "rounding, nothing is wrong: verify with other samples, or with scores in float64"
    ),
    "loss": (
        "on one device too, the batch in two parts has another gradient: the loss or the model couples "
        "samples; return a sum over samples, or set Loss(whole_batch=True)"
    ),
}
MODEL_LOSS_TOLERANCE = 1e-4  # relative, between two sums in float32
# by every rank
COMPARED_QUANTITIES = (
    "initial value",
    "samples",
    "gradient",
    "loss",
    "grad norm",
    "parameter",
)
# within a step, the earlier one is the cause of the later
QUANTITIES = (
    *COMPARED_QUANTITIES[:2],
    "choice of experts",
    "sum of codes",
    "rounded loss",
    *COMPARED_QUANTITIES[2:],
    "replica",
    "ledger",
)


@dataclass(frozen=True)
class Difference:
    """One quantity that differs beyond the tolerance.

    `error` is relative to the largest magnitude in the block; None where a difference has no size (samples,
    bytes). `factor` is the number by which all gradients of this step on this rank differ, if there is one.
    """

    step: int
    quantity: str
    name: str
    block: str
    error: float | None
    rank: int
    factor: float | None = None

    def __str__(self) -> str:
        location = (f" of {self.name}" if self.name else "") + (
            f" in block {self.block}" if self.block else ""
        )
        amount = (
            ""
            if self.error is None
            else f" by {self.error:.3g}" + (" of the block's scale" if self.block else "")
        )
        return f"step {self.step}: the {self.quantity}{location} differs{amount} on rank {self.rank}"


@dataclass(frozen=True)
class Verdict:
    """The outcome: `passed` when everything was compared and nothing differs beyond `tolerance`.

    `max_errors` is the largest error per quantity; `not_compared` lists in sentences what was left out;
    `reference` says what the plan was compared with; `rank_backend` where the ranks ran. `loss` is the loss
    of the first samples in eval mode, `model_loss` the one that the model computes itself of them.
    """

    plan: str
    mesh: str
    model: str
    rank_backend: str
    num_steps: int
    tolerance: float
    passed: bool
    max_errors: dict[str, float]
    planned_nbytes: dict[str, int] = field(default_factory=dict)
    cause: str = ""
    first_difference: Difference | None = None
    num_other_differences: int = 0
    not_compared: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    reference: str = "one device"
    loss: float | None = None
    model_loss: float | None = None

    def raise_if_failed(self) -> None:
        """Raises PlanError, with the first difference, unless the plan computes what one device computes."""
        if not self.passed:
            fix = "repair the plan or the model, then verify again"
            raise PlanError(str(self), fix=fix, location="verify")

    def write(self, path: Path) -> None:
        """Writes the verdict as JSON; an error that is not finite becomes the text "nan" or "inf"."""
        write_json(path, asdict(self))

    @property
    def cause_note(self) -> str:
        """What the cause means to the user, as a line; empty for a fault of the technique."""
        return f"\n  {CAUSE_NOTES[self.cause]}" if self.cause in CAUSE_NOTES else ""

    @property
    def has_model_loss(self) -> bool:
        """Whether `loss` is the loss that the model computes itself, but for rounding in float32."""
        if self.loss is None or self.model_loss is None:
            return False
        return abs(self.loss - self.model_loss) <= MODEL_LOSS_TOLERANCE * abs(self.model_loss)

    @property
    def model_loss_note(self) -> str:
        """The loss beside the model's own, as a line; empty if it computes none."""
        if self.loss is None or self.model_loss is None:
            return ""
        judgement = "the same" if self.has_model_loss else "NOT the same: check the loss and its labels"
        return f"\n  loss {self.loss:.6g}, the model's own {self.model_loss:.6g}: {judgement}"

    def __str__(self) -> str:
        errors = ", ".join(f"{quantity} {error:.2g}" for quantity, error in self.max_errors.items())
        if self.passed:
            errors_text = f"largest relative errors: {errors}; allowed {self.tolerance:g}"
            text = f"{self.mesh} equals {self.reference} after {self.num_steps} steps ({errors_text})"
            return f"{text}{self.model_loss_note}"
        if self.first_difference is None:
            return f"{self.mesh} was NOT compared with {self.reference}: {'; '.join(self.not_compared)}"
        others = (
            f"\n  and {self.num_other_differences} more differences" if self.num_other_differences else ""
        )
        return (
            f"{self.mesh} does NOT equal {self.reference} (allowed {self.tolerance:g}; cause: "
            f"{self.cause})\n  {self.first_difference}{others}{self.cause_note}"
        )


def write_json(path: Path, document: Any) -> None:
    """Writes `document`, into a new folder too; a number that is not finite becomes a text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_plain(document), indent=2, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
