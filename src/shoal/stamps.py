"""Stamps: which of two values of a row, or of a model's weights, is the newer one."""

import time
from typing import NamedTuple


class Stamp(NamedTuple):
    """When a value was learnt. The greater of two stamps is the newer one.

    A run is one start of a trainer or of a parameter server, whether it starts from nothing or from a checkpoint. What
    it learns is newer than all that earlier runs learnt, even if it resumes from an earlier step than they reached.
    """

    run: int
    """Unix nanoseconds at which the run began, from `new_run`."""
    step: int
    """The number of the last update that the value contains."""


def new_run(former: int = 0) -> int:
    """The number of a run that begins now, greater than ``former``, the one of the checkpoint that it resumes from."""
    return max(time.time_ns(), former + 1)
