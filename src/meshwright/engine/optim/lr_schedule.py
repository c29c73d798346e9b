"""Learning-rate schedules: constant, cosine and warmup-stable-decay, each with a linear warm-up.

    constant    1
    cosine      floor + (1 - floor) * (1 + cos(pi t)) / 2       t from 0 to 1 after the warm-up
    wsd         1, and in the last `decay` steps linearly down to floor (MiniCPM, 2024, arXiv:2404.06395)

The factor multiplies the learning rate of every parameter group.
"""

from math import cos, pi

from meshwright.plan.job.job import LRScheduleConfig


def lr_factor(schedule: LRScheduleConfig, step: int, num_steps: int) -> float:
    """Returns the factor of the base learning rate at `step` (0 for the first) of a run of `num_steps` steps.

    Warm-up rises linearly and reaches 1 at step `warmup`; the last step of cosine and wsd takes `floor`.
    """
    if step < schedule.warmup:
        return (step + 1) / (schedule.warmup + 1)
    if schedule.name == "cosine":
        done = (step - schedule.warmup) / max(1, num_steps - 1 - schedule.warmup)
        return schedule.floor + (1 - schedule.floor) * 0.5 * (1 + cos(pi * min(1.0, done)))
    into_decay = step - (num_steps - schedule.decay) + 1
    if schedule.name == "wsd" and schedule.decay and into_decay > 0:
        return 1 - (1 - schedule.floor) * min(1.0, into_decay / schedule.decay)
    return 1.0
