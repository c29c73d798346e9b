"""The learning rate as a factor, in global steps: what it is does not depend on how many ranks take the step."""

from math import cos, pi

from meshwright.core.job import Schedule


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """The factor of the base learning rate at `step` (0 for the first) of a run of `steps` steps.

    Warm-up rises linearly and reaches 1 at step `warmup`; the last step of cosine and wsd takes `floor`.
    """
    if step < schedule.warmup:
        return (step + 1) / (schedule.warmup + 1)
    if schedule.name == "cosine":
        done = (step - schedule.warmup) / max(1, steps - 1 - schedule.warmup)
        return schedule.floor + (1 - schedule.floor) * 0.5 * (1 + cos(pi * min(1.0, done)))
    into_decay = step - (steps - schedule.decay) + 1
    if schedule.name == "wsd" and schedule.decay and into_decay > 0:
        return 1 - (1 - schedule.floor) * min(1.0, into_decay / schedule.decay)
    return 1.0
