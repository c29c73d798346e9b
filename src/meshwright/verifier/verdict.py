"""What a comparison with one device found, in words and as JSON.

Four causes look alike on a loss curve and are told apart here, in this order: the initial values differ (`init`), the
samples differ (`data order`), all gradients differ by one factor (`loss scale`), or the technique computes something
else (`technique`).
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

QUANTITIES = ("initial value", "samples", "loss", "gradient", "grad norm", "parameter", "replica")


@dataclass(frozen=True)
class Difference:
    """One thing that differs beyond the tolerance: `error` is relative to the largest magnitude in its block."""

    step: int
    quantity: str
    name: str
    block: str
    error: float
    rank: int
    factor: float | None = None

    def __str__(self) -> str:
        where = f" of {self.name} in block {self.block}" if self.name else ""
        size = f"by {self.error:.3g} of the block's scale" if self.name else f"by {self.error:.3g}"
        return f"step {self.step}: the {self.quantity}{where} differs {size} on rank {self.rank}"


@dataclass(frozen=True)
class Verdict:
    """The outcome: `passed` when nothing differs beyond `tolerance`. `worst` is the largest error per quantity."""

    plan: str
    mesh: str
    model: str
    body: str
    steps: int
    tolerance: float
    passed: bool
    worst: dict[str, float]
    bytes_planned: dict[str, int] = field(default_factory=dict)
    cause: str = ""
    first: Difference | None = None
    others: int = 0
    versions: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the verdict as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def __str__(self) -> str:
        errors = ", ".join(f"{quantity} {error:.2g}" for quantity, error in self.worst.items())
        if self.passed:
            seen = f"largest relative errors: {errors}; allowed {self.tolerance:g}"
            return f"{self.mesh} equals one device after {self.steps} steps ({seen})"
        more = f"\n  and {self.others} more differences" if self.others else ""
        return f"{self.mesh} does NOT equal one device (allowed {self.tolerance:g}; cause: {self.cause})\n  {self.first}{more}"


def diagnose(differences: list[Difference]) -> str:
    """The cause of the earliest differences, one of `init`, `data order`, `loss scale`, `technique`."""
    if not differences:
        return ""
    if any(d.quantity == "initial value" for d in differences):
        return "init"
    if any(d.quantity == "samples" for d in differences):
        return "data order"
    first = min(d.step for d in differences)
    factors = [d.factor for d in differences if d.step == first and d.quantity == "gradient"]
    known = [factor for factor in factors if factor is not None]
    uniform = bool(known) and len(known) == len(factors) and max(known) - min(known) <= 1e-6 * abs(max(known, key=abs))
    return "loss scale" if uniform and abs(known[0] - 1) > 1e-6 else "technique"
