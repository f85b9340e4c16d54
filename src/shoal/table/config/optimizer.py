"""Base classes of row optimizers: validation of their fields and conversion to messages."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from numbers import Real
from typing import Any, ClassVar, TypeVar, dataclass_transform

from google.protobuf.message import Message
from torch import Tensor

from shoal.errors import ConfigError
from shoal.table.config.learning_rate import LearningRate, check_rate
from shoal.table.config.messages import OptimizerConfig

# Field of the class -> field of the message.
_FIELD = {
    "weight_decay": "weight_decay_factor",
    "initial_accumulator": "initial_accumulator_value",
    "eps": "epsilon",
    "rho": "averaging_ratio",
    "alpha": "momentum",
    "nesterov": "use_nesterov",
    "l1": "l1_regularization_strength",
    "l2": "l2_regularization_strength",
    "stochastic_rounding": None,
    "lr": None,
}
_FRACTIONS = {"momentum", "alpha", "rho"}


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class RowOptimizer:
    """Base class of the optimizers that a table runs on each row it updates.

    ``stochastic_rounding`` rounds the weights at random to float16 values after each step (storage stays float32).
    """

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type["RowOptimizer"]]] = {}

    lr: LearningRate = 0.01
    _: KW_ONLY
    stochastic_rounding: bool = False

    def __init_subclass__(cls, *, kind: str = "") -> None:
        if kind:
            cls.kind = kind
            RowOptimizer.kinds[kind] = cls
            dataclass(frozen=True)(cls)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is bool:
                continue
            if field.name == "lr":
                check_rate(value, f"{type(self).__name__}: lr")
                if callable(value):
                    continue
            if field.name == "betas":
                valid = len(value) == 2 and all(0 <= beta < 1 for beta in value)
                _check(self, "betas", valid, "be two numbers in [0, 1)")
            elif field.name in _FRACTIONS:
                _check(self, field.name, 0 <= value < 1, "be in [0, 1)")
            else:
                number = float(value) if isinstance(value, Real | Tensor) else math.nan
                _check(self, field.name, 0 <= number < math.inf, "be a finite number >= 0")

    def as_proto(self) -> OptimizerConfig:
        """The message. A learning rate that is a function is not part of it."""
        config = OptimizerConfig()
        message = getattr(config, self.kind)
        message.SetInParent()
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "betas":
                message.beta1, message.beta2 = value
                continue
            name = _FIELD.get(field.name, field.name)
            if name is not None:
                setattr(message, name, value)
        if not callable(self.lr) and "learning_rate" in message.DESCRIPTOR.fields_by_name:
            message.learning_rate = self.lr
        if "bias_corrected_epsilon" in message.DESCRIPTOR.fields_by_name:
            message.bias_corrected_epsilon = True  # as in torch.optim
        if self.stochastic_rounding:
            config.stochastic_rounding_float16 = True
        return config


def _check(optimizer: RowOptimizer, name: str, ok: bool, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{type(optimizer).__name__}: {name} must {rule}, got {getattr(optimizer, name)!r}")


@dataclass_transform()
class Choice:
    """Base of the dataclasses for one alternative of a ``oneof`` message, with the fields of that alternative.

    A field that is None is not written, so the message's default applies.
    """

    message: ClassVar[type[Any]]
    kind: ClassVar[str]
    rename: ClassVar[Mapping[str, str]] = {}
    """Fields whose name in the message is different."""

    def __init_subclass__(cls, *, kind: str = "") -> None:
        if kind:
            cls.kind = kind
            dataclass(cls)

    def as_proto(self) -> Any:
        config = self.message()
        message = getattr(config, self.kind)
        message.SetInParent()
        for field in fields(self):  # pyrefly: ignore
            value = getattr(self, field.name)
            if value is not None:
                setattr(message, self.rename.get(field.name, field.name), value)
        return config


class Optimizer(Choice):
    """Base of the optimizer classes; ``as_proto()`` gives the message."""

    kinds: ClassVar[dict[str, type["Optimizer"]]] = {}
    native: ClassVar[Mapping[str, float]] = {}
    """Attributes of the native segment for which the message has no field."""
    message = OptimizerConfig
    rename = {
        "l1_regularization": "l1_regularization_strength",
        "l2_regularization": "l2_regularization_strength",
    }

    def __init_subclass__(cls, *, kind: str = "", native: Mapping[str, float] | None = None) -> None:
        super().__init_subclass__(kind=kind)
        if kind:
            cls.native = native or {}
            Optimizer.kinds[kind] = cls


Config = TypeVar("Config", bound=Message)


def as_config(given: Any, kind: type[Config], what: str) -> Config:
    """Converts an object with ``as_proto()``, or the message of one alternative, to a message of class ``kind``."""
    if isinstance(given, kind):
        return given
    if isinstance(given, Message):  # such as AdagradOptimizerConfig instead of OptimizerConfig(adagrad=...)
        for field in kind.DESCRIPTOR.oneofs_by_name["type"].fields:
            if field.message_type is given.DESCRIPTOR:
                return kind(**{field.name: given})
    config = given.as_proto() if hasattr(given, "as_proto") else None
    if not isinstance(config, kind):
        hint = "; torch.optim is for dense parameters, use for example shoal.Adam(lr=0.01) for rows"
        hint = hint if "torch.optim" in f"{getattr(given, '__module__', '')}" else ""
        name = kind.DESCRIPTOR.name
        raise ConfigError(f"{what} must be an object of shoal.table or of type {name}, got {given!r}{hint}")
    return config


def as_optimizer_config(optimizer: Any) -> OptimizerConfig:
    """The message for an optimizer object; a message is returned unchanged."""
    return as_config(optimizer, OptimizerConfig, "optimizer")
