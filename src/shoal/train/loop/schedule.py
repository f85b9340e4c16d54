"""Learning-rate schedules: the factor for the learning rates of the dense part and of rows in each step."""

from __future__ import annotations

import math

from shoal.train.loop.config import TrainConfig


def factor(train: TrainConfig, step: int) -> float:
    """The factor for the learning rates in ``step``, which counts from 0.

    >>> train = TrainConfig(schedule="linear", warmup_steps=2, schedule_steps=6)
    >>> [factor(train, step) for step in range(8)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    if step < train.warmup_steps:
        return (step + 1) / train.warmup_steps
    after = step - train.warmup_steps
    if train.schedule == "step":
        return max(train.lr_end, train.decay ** (after // (train.decay_every or 1)))
    if train.schedule == "constant":
        return 1.0
    ends = train.schedule_steps or train.max_steps or 1
    share = min(1.0, after / max(1, ends - train.warmup_steps))
    left = 1 - share if train.schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return train.lr_end + (1 - train.lr_end) * left
