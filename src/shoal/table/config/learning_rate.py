"""Learning rates that depend on the step, and the process-wide step that they read when none is given."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from numbers import Real
from typing import Any, SupportsFloat, SupportsInt

import torch

from shoal.errors import ConfigError

_global_step = 0


def get_global_step() -> int:
    """The process-wide training step, 0 until it is set."""
    return _global_step


def set_global_step(step: SupportsInt) -> None:
    """Sets the step that `LearningRateFunction` objects use when they are called without one."""
    global _global_step
    step = int(step)
    if step < 0:
        raise ConfigError(f"global_step must be >= 0, got {step}")
    _global_step = step


class LearningRateFunction(ABC):
    """A learning rate as a function of the step.

    Objects of one class with equal attributes have equal ``str()``, so that tables with equal schedules can be merged.
    Tables call the function with the ``global_step`` given to ``apply_gradients``. For a dense optimizer, set its rate
    to ``fn(step)`` before each step.
    """

    @abstractmethod
    def __call__(self, global_step: SupportsFloat | None = None) -> float:
        """The rate at ``global_step``, or at the process-wide step."""

    def __str__(self) -> str:
        params = ",".join(f"{name}={value}" for name, value in sorted(vars(self).items()))
        return f'LearningRateFunction("{type(self).__name__}",Params:{params})'

    __repr__ = __str__


class PolynomialDecay(LearningRateFunction):
    """Polynomial decay from ``initial_learning_rate`` to ``end_learning_rate`` over ``decay_steps`` steps.

    After ``decay_steps`` the rate stays at ``end_learning_rate``; with ``cycle`` the decay is stretched to the next
    multiple of ``decay_steps`` instead. ``end_learning_rate`` can exceed ``initial_learning_rate``.

    >>> PolynomialDecay(0.5, 8, 0.1)(2)
    0.4
    """

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: float,
        end_learning_rate: float = 0.0001,
        power: float = 1.0,
        cycle: bool = False,
        name: str | None = None,
    ) -> None:
        if decay_steps <= 0:
            raise ConfigError(f"PolynomialDecay: decay_steps must be above 0, got {decay_steps}")
        if power < 0:
            raise ConfigError(f"PolynomialDecay: power must be >= 0, got {power}")
        self.initial_learning_rate = initial_learning_rate
        self.decay_steps = decay_steps
        self.end_learning_rate = end_learning_rate
        self.power = power
        self.cycle = cycle
        self.name = name

    def __call__(self, global_step: SupportsFloat | None = None) -> float:
        step = float(get_global_step() if global_step is None else global_step)
        if step < 0:
            raise ConfigError(f"PolynomialDecay: the step must be >= 0, got {step:g}")
        span = float(self.decay_steps)
        if self.cycle:
            span *= max(1, math.ceil(step / span))
        else:
            step = min(step, span)
        start, end = float(self.initial_learning_rate), float(self.end_learning_rate)
        return (start - end) * (1.0 - step / span) ** self.power + end


LearningRate = float | Callable[[], Any] | LearningRateFunction
"""A number, a schedule that is called with the step, or any other callable, which is called without arguments."""


def check_rate(rate: Any, subject: str) -> None:
    """Raises unless ``rate`` is a number or a callable; the message starts with ``subject``."""
    if callable(rate) or (isinstance(rate, Real) and not isinstance(rate, bool)):
        return
    if isinstance(rate, torch.Tensor) and rate.numel() == 1 and not rate.is_complex():
        return
    raise ConfigError(f"{subject} must be a number or a function of the step, got {rate!r}")
