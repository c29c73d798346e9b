"""Limits of waiting for other ranks, in seconds, by phase of a run.

A limit holds for ONE wait, not for a phase: a step that takes an hour of computing on every rank waits for no
rank. It must cover how far ranks may drift apart: a slow file system at the start, the compilation of a first
step, a callback on rank 0 for which all others wait in the next step, the slowest writer of a checkpoint.
"""

from dataclasses import dataclass, field, fields
from typing import Literal, Self

from meshwright.plan.job.field_constraints import above

RunPhase = Literal["init", "first_step", "step", "evaluate", "save"]
LIMIT = above(0, "name a number of seconds above 0, such as 300; one wait for a slow rank must fit into it")


@dataclass(frozen=True)
class WaitLimits:
    """The seconds that one wait for another rank may last; then the missing rank is reported, and the run
    ends.

    `init_s` holds outside the loop (start, resume, exit), `first_step_s` in the first step of a process,
    `step_s` in every later one with its callbacks, `evaluate_s` in an evaluation, `save_s` while a checkpoint
    is saved.
    """

    init_s: float = field(default=600.0, metadata=LIMIT)
    first_step_s: float = field(default=600.0, metadata=LIMIT)
    step_s: float = field(default=300.0, metadata=LIMIT)
    evaluate_s: float = field(default=300.0, metadata=LIMIT)
    save_s: float = field(default=600.0, metadata=LIMIT)

    @classmethod
    def uniform(cls, seconds: float) -> Self:
        """Returns the same limit for every phase."""
        return cls(*(seconds for _ in fields(cls)))

    @property
    def longest_s(self) -> float:
        """The longest limit."""
        return max(self.init_s, self.first_step_s, self.step_s, self.evaluate_s, self.save_s)

    def for_phase(self, phase: RunPhase) -> float:
        """Returns the limit of `phase`, in seconds."""
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
