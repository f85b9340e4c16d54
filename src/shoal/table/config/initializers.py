"""Initializer classes for table configurations: the weights of a new row."""

from typing import Any

from shoal.errors import ConfigError
from shoal.table.config.messages import InitializerConfig
from shoal.table.config.optimizer import Choice, as_config


class _Initializer(Choice):
    message = InitializerConfig


class ZerosInitializer(_Initializer, kind="zeros"): ...


class OnesInitializer(_Initializer, kind="ones"): ...


class ConstantsInitializer(_Initializer, kind="constants"):
    constant: float


class RandomUniformInitializer(_Initializer, kind="random_uniform"):
    """Independent and uniform in ``[minval, maxval)``; the message's defaults are -0.05 and 0.05."""

    minval: float | None = None
    maxval: float | None = None


class BatchSoftmaxInitializer:
    """The initial estimate of the steps between two appearances of an id, for `BatchSoftmaxOptimizer`."""

    def __init__(self, init_step_interval: float) -> None:
        if init_step_interval < 1:
            raise ConfigError(
                f"BatchSoftmaxInitializer: init_step_interval must be at least 1, got {init_step_interval}"
            )
        self.init_step_interval = init_step_interval

    def as_proto(self) -> InitializerConfig:
        return ConstantsInitializer(self.init_step_interval).as_proto()


def as_initializer_config(initializer: Any) -> InitializerConfig:
    """The message for an initializer object; a message is returned unchanged."""
    return as_config(initializer, InitializerConfig, "initializer")
