"""How long one wait for another rank may last, by what the run is doing.

A limit holds for ONE wait, not for a phase: a step that takes an hour of computing on every rank waits for nobody. What it
must cover is how far apart ranks may drift: a slow file system at the start, the compilation of a first step, a callback on
rank 0 for which all others wait in the next step, the slowest writer of a checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import isfinite
from typing import Literal, Self

from meshwright.core.errors import Fault

Phase = Literal["init", "first_step", "step", "evaluate", "save"]


@dataclass(frozen=True)
class Limits:
    """The seconds that one wait for another rank may last; then the rank that did not come is reported, and the run ends.

    `init_s` holds outside the loop (starting, resuming, leaving), `first_step_s` in the first step of a process, `step_s` in
    every later one, callbacks included, `evaluate_s` in an evaluation, `save_s` while a checkpoint is saved.
    """

    init_s: float = 600.0
    first_step_s: float = 600.0
    step_s: float = 300.0
    evaluate_s: float = 300.0
    save_s: float = 600.0

    @classmethod
    def every(cls, seconds: float) -> Self:
        """The same limit for every phase."""
        return cls(*(seconds for _ in fields(cls)))

    @property
    def longest(self) -> float:
        """The longest of them."""
        return max(self.init_s, self.first_step_s, self.step_s, self.evaluate_s, self.save_s)

    def of(self, phase: Phase) -> float:
        """The limit of `phase`, in seconds."""
        match phase:
            case "init":
                return self.init_s
            case "first_step":
                return self.first_step_s
            case "step":
                return self.step_s
            case "evaluate":
                return self.evaluate_s
            case "save":
                return self.save_s

    def faults(self) -> Iterator[Fault]:
        """Everything that is wrong with them."""
        said = {"init": self.init_s, "first_step": self.first_step_s, "step": self.step_s}
        for name, seconds in {**said, "evaluate": self.evaluate_s, "save": self.save_s}.items():
            if not (isfinite(seconds) and seconds > 0):
                fix = "name a number of seconds above 0, such as 300; one wait for a slow rank must fit into it"
                yield Fault(f"{name}_s = {seconds:g}: no wait can last that long", fix, f"run.limits.{name}_s")
