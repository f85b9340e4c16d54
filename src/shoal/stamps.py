"""Stamps tell which of two values of a row, or of a model's weights, is newer."""

import time
from typing import NamedTuple


class Stamp(NamedTuple):
    """When a value was learnt. The greater of two stamps is the newer one.

    A run is one start of a trainer or a parameter server, with or without a checkpoint. Its values are newer than those
    of all earlier runs, even if it resumes from an earlier step than they reached.
    """

    run: int
    """Unix nanoseconds at which the run began, from `new_run`."""
    step: int
    """The number of the last update that the value contains."""


def new_run(former: int = 0) -> int:
    """The number for a run that begins now; greater than ``former``, the run of the checkpoint that it resumes from."""
    return max(time.time_ns(), former + 1)
