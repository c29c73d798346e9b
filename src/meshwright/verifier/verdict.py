"""What a comparison with one device found, in words and as JSON.

Four causes look alike on a loss curve and are told apart here, in this order: the initial values differ (`init`), the
samples differ (`data order`), all gradients differ by one factor (`loss scale`), or the technique computes something
else (`technique`). A comparison that left something out proves nothing: it fails as `incomplete`.
"""

import json
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from meshwright.plan.job.errors import PlanError

COMPARED_QUANTITIES = (
    "initial value",
    "samples",
    "gradient",
    "loss",
    "grad norm",
    "parameter",
)  # by every rank
QUANTITIES = (
    *COMPARED_QUANTITIES,
    "replica",
    "ledger",
)  # within a step, the earlier one is the cause of the later


@dataclass(frozen=True)
class Difference:
    """One thing that differs beyond the tolerance.

    `error` is relative to the largest magnitude in the block; None where a difference has no size (samples, bytes).
    `factor` is the number by which all gradients of this step on this rank differ, if there is one.
    """

    step: int
    quantity: str
    name: str
    block: str
    error: float | None
    rank: int
    factor: float | None = None

    def __str__(self) -> str:
        where = (f" of {self.name}" if self.name else "") + (f" in block {self.block}" if self.block else "")
        size = (
            ""
            if self.error is None
            else f" by {self.error:.3g}" + (" of the block's scale" if self.block else "")
        )
        return f"step {self.step}: the {self.quantity}{where} differs{size} on rank {self.rank}"


@dataclass(frozen=True)
class Verdict:
    """The outcome: `passed` when all was compared and nothing differs beyond `tolerance`.

    `worst` is the largest error per quantity, `missing` says in sentences what was not compared, `beside` with what all was.
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

    def raise_if_failed(self) -> None:
        """Raises PlanError, with the first difference, unless the plan computes what one device computes."""
        if not self.passed:
            fix = "repair the plan or the model, then verify again"
            raise PlanError(str(self), fix=fix, location="verify")

    def write(self, path: Path) -> None:
        """Write the verdict as JSON; an error that is no finite number becomes the text "nan" or "inf"."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_plain(asdict(self)), indent=2, allow_nan=False) + "\n")

    def __str__(self) -> str:
        errors = ", ".join(f"{quantity} {error:.2g}" for quantity, error in self.max_errors.items())
        if self.passed:
            seen = f"largest relative errors: {errors}; allowed {self.tolerance:g}"
            return f"{self.mesh} equals {self.reference} after {self.num_steps} steps ({seen})"
        if self.first_difference is None:
            return f"{self.mesh} was NOT compared with {self.reference}: {'; '.join(self.not_compared)}"
        more = f"\n  and {self.num_other_differences} more differences" if self.num_other_differences else ""
        return f"{self.mesh} does NOT equal {self.reference} (allowed {self.tolerance:g}; cause: {self.cause})\n  {self.first_difference}{more}"


def diagnose_cause(differences: list[Difference]) -> str:
    """The cause of the earliest differences, one of `init`, `data order`, `loss scale`, `technique`; "" without any."""
    if not differences:
        return ""
    start = min(difference.step for difference in differences)
    early = [difference for difference in differences if difference.step == start]
    seen = {difference.quantity for difference in early}
    if "initial value" in seen:
        return "init"
    if "samples" in seen:
        return "data order"
    factors = [difference.factor for difference in early if difference.quantity == "gradient"]
    known = [factor for factor in factors if factor is not None]
    uniform = (
        bool(known)
        and len(known) == len(factors)
        and max(known) - min(known) <= 1e-6 * abs(max(known, key=abs))
    )
    return "loss scale" if uniform else "technique"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
