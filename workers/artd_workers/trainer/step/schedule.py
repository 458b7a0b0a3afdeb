"""The learning rate of each optimizer step.

It is a function of the run's settings and of the step's number alone. The number is part of the optimizer's state on disk, so a
resume, a retry and a replay have the rate of the first time.
"""

from __future__ import annotations

import math

from artd_schema.run.spec import OptimizerSpec, ScheduleSpec


def learning_rate(spec: OptimizerSpec, update: int) -> float:
    """Return the rate of optimizer step `update`, which counts from 1.

    The first W = `warmup` steps get n / (W + 1) of `lr` (linear warm-up: arXiv:1706.02677, section 2.2; n / W there, but step 1 is not
    lost here and step W + 1 has `lr`). `_remaining` says what share each later step gets.
    """
    schedule = spec.schedule or ScheduleSpec()
    if update <= schedule.warmup:
        return spec.lr * update / (schedule.warmup + 1)
    return spec.lr * _remaining(schedule, update - schedule.warmup - 1)


def _remaining(schedule: ScheduleSpec, passed: int) -> float:
    """Return the share of `lr` that is left after `passed` steps of decay: 1 at first, `floor` from step `steps` + 1 on. cosine:
    arXiv:1608.03983, eq. 5, without restarts."""
    if schedule.kind == "constant" or not schedule.steps:
        return 1.0
    part = min(1.0, passed / (schedule.steps - schedule.warmup))
    left = 1.0 - part if schedule.kind == "linear" else (1.0 + math.cos(math.pi * part)) / 2.0
    return schedule.floor + (1.0 - schedule.floor) * left
