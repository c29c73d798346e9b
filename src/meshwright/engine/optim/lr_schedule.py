"""Learning-rate schedules: the factor of the learning rate at a step, with a linear warm-up.

    constant      1
    cosine        floor + (1 - floor) * (1 + cos(pi t)) / 2       t from 0 to 1 after the warm-up
    wsd           1, and in the last `decay` steps linearly down to floor (MiniCPM, 2024, arXiv:2404.06395)

    linear        1 - s                                           s from 0 to 1 after the warm-up
    polynomial    floor + (1 - floor) * (1 - s) ** power
    inverse_sqrt  1 / sqrt((step - warmup + timescale) / timescale), not below floor

The last three are those of transformers (`get_linear_schedule_with_warmup` and so on), step by step: their
warm-up begins at 0, so the first step changes nothing, and s reaches 1 one step after the last one. The first
three begin at 1 / (warmup + 1), and their last step takes `floor`.

The factor multiplies the learning rate of every parameter group.
"""

from math import cos, pi, sqrt

from meshwright.plan.job.job import TRANSFORMERS_SCHEDULES, LRScheduleConfig

DEFAULT_TIMESCALE = 10_000  # that of transformers for an inverse square root without a warm-up


def lr_factor(schedule: LRScheduleConfig, step: int, num_steps: int) -> float:
    """Returns the factor of the base learning rate at `step` (0 for the first) of a run of `num_steps` steps.

    Warm-up rises linearly and reaches 1 at step `warmup`.
    """
    if schedule.name in TRANSFORMERS_SCHEDULES:
        return _transformers_factor(schedule, step, num_steps)
    if step < schedule.warmup:
        return (step + 1) / (schedule.warmup + 1)
    if schedule.name == "cosine":
        done = (step - schedule.warmup) / max(1, num_steps - 1 - schedule.warmup)
        return schedule.floor + (1 - schedule.floor) * 0.5 * (1 + cos(pi * min(1.0, done)))
    into_decay = step - (num_steps - schedule.decay) + 1
    if schedule.name == "wsd" and schedule.decay and into_decay > 0:
        return 1 - (1 - schedule.floor) * min(1.0, into_decay / schedule.decay)
    return 1.0


def _transformers_factor(schedule: LRScheduleConfig, step: int, num_steps: int) -> float:
    if step < schedule.warmup:
        return step / schedule.warmup
    if schedule.name == "inverse_sqrt":
        timescale = schedule.timescale or schedule.warmup or DEFAULT_TIMESCALE
        return max(schedule.floor, 1 / sqrt((step - schedule.warmup + timescale) / timescale))
    remaining = max(0.0, (num_steps - step) / max(1, num_steps - schedule.warmup))
    power = schedule.power if schedule.name == "polynomial" else 1.0
    return schedule.floor + (1 - schedule.floor) * remaining**power
