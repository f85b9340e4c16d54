"""Row optimizers under short names: ``shoal.Adagrad(lr=0.05)``.

Each holds its learning rate, a number or a `LearningRateFunction`, and converts to the message that tables are built
from. What ``torch.optim`` has is the same optimizer here, with the same formula and defaults: on ids that are in every
batch both give the same weights. (`shoal.table.AdagradOptimizer` and its neighbours keep their messages' defaults.)
"""

import math
from dataclasses import KW_ONLY, dataclass, fields
from numbers import Real
from typing import Any, ClassVar

from torch import Tensor

from shoal.errors import ConfigError
from shoal.table.config.entry import LearningRate, check_rate
from shoal.table.config.messages import OptimizerConfig
from shoal.table.config.optimizers import as_optimizer_config

# Our field -> the message's.
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


@dataclass(frozen=True)
class RowOptimizer:
    """Base of the optimizers that a table runs on each row it updates.

    ``stochastic_rounding``: after each step round the weights at random to float16 values (storage stays float32).
    """

    _kind: ClassVar[str]

    lr: LearningRate = 0.01
    _: KW_ONLY
    stochastic_rounding: bool = False

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
                _check(self, "betas", len(value) == 2 and all(0 <= beta < 1 for beta in value), "be two in [0, 1)")
            elif field.name in _FRACTIONS:
                _check(self, field.name, 0 <= value < 1, "be in [0, 1)")
            else:
                number = float(value) if isinstance(value, Real | Tensor) else math.nan
                _check(self, field.name, 0 <= number < math.inf, "be a finite number >= 0")

    def as_proto(self) -> OptimizerConfig:
        """The message; a rate that is a function is not part of it."""
        config = OptimizerConfig()
        message = getattr(config, self._kind)
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
            message.bias_corrected_epsilon = True  # as torch places it
        if self.stochastic_rounding:
            config.stochastic_rounding_float16 = True
        return config


def _check(optimizer: RowOptimizer, name: str, ok: bool, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{type(optimizer).__name__}: {name} must {rule}, got {getattr(optimizer, name)!r}")


@dataclass(frozen=True)
class Sgd(RowOptimizer):
    """``w -= lr * g``; no state."""

    _kind = "sgd"
    lr: LearningRate = 0.001


@dataclass(frozen=True)
class Momentum(RowOptimizer):
    """``torch.optim.SGD`` with its momentum."""

    _kind = "momentum"
    lr: LearningRate = 0.001
    _: KW_ONLY
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Adagrad(RowOptimizer):
    """One accumulator per weight. A good first choice for ids with very different frequencies.

    ``initial_accumulator`` above 0 makes the first steps small: under a mean loss, whose gradients are small, a row
    hardly moves before its squared gradients add up to as much.
    """

    _kind = "adagrad"
    _: KW_ONLY
    initial_accumulator: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0


@dataclass(frozen=True)
class RowwiseAdagrad(RowOptimizer):
    """One accumulator per row: Adagrad with 4 bytes of state, for tables that must be small."""

    _kind = "rowwise_adagrad"
    _: KW_ONLY
    initial_accumulator: float = 0.0
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Adadelta(RowOptimizer):
    _kind = "adadelta"
    lr: LearningRate = 1.0
    _: KW_ONLY
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Adam(RowOptimizer):
    """Adam per row: the bias correction counts the updates of that id."""

    _kind = "adam"
    lr: LearningRate = 0.001
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True)
class Amsgrad(Adam):
    _kind = "amsgrad"


@dataclass(frozen=True)
class AdamW(RowOptimizer):
    """Adam with decoupled weight decay."""

    _kind = "adamw"
    lr: LearningRate = 0.001
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01


@dataclass(frozen=True)
class Lamb(RowOptimizer):
    """Adam whose step is as long as the row's own norm says."""

    _kind = "lamb"
    lr: LearningRate = 0.001
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0


@dataclass(frozen=True)
class RmsProp(RowOptimizer):
    """``n = alpha * n + (1 - alpha) * g^2; w -= lr / (sqrt(n) + eps) * g``."""

    _kind = "rmsprop"
    _: KW_ONLY
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True)
class RmsPropV2(RowOptimizer):
    """``n = momentum * n + g^2; w -= lr / (sqrt(n) + 1) * g``."""

    _kind = "rmspropv2"
    _: KW_ONLY
    momentum: float = 0.9
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Ftrl(RowOptimizer):
    """FTRL-proximal; ``l1`` makes weights exactly zero."""

    _kind = "ftrl"
    _: KW_ONLY
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0
    initial_accumulator: float = 0.1


@dataclass(frozen=True)
class GroupFtrl(RowOptimizer):
    """FTRL whose ``l1`` makes whole rows zero."""

    _kind = "group_ftrl"
    _: KW_ONLY
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0
    initial_accumulator: float = 0.0


@dataclass(frozen=True)
class GroupAdagrad(RowOptimizer):
    """Adagrad with one accumulator and a group lasso (``l2``) that makes whole rows zero."""

    _kind = "group_adagrad"
    _: KW_ONLY
    l2: float = 0.0
    beta: float = 0.0
    initial_accumulator: float = 0.1
    weight_decay: float = 0.0


@dataclass(frozen=True)
class MovingAverage(RowOptimizer):
    """The "gradient" is a sample and the weight its moving average; ``lr`` has no effect."""

    _kind = "moving_average"
    _: KW_ONLY
    momentum: float = 0.9


@dataclass(frozen=True)
class BatchSoftmax(RowOptimizer):
    """For tables of dim 1: the weight estimates the steps between two appearances of the id."""

    _kind = "batch_softmax"
    lr: LearningRate = 0.1


ROW_OPTIMIZERS = {cls._kind: cls for cls in RowOptimizer.__subclasses__()} | {"amsgrad": Amsgrad}
"""Name -> class of every row optimizer."""


def as_row_optimizer(optimizer: Any, lr: LearningRate | None = None) -> tuple[OptimizerConfig, LearningRate]:
    """The message and the learning rate of whatever a user may give as a table's optimizer.

    ``optimizer`` is an object of this module, a name such as ``"adagrad"`` (its class with defaults), an object of
    `shoal.table.config.entry`, or an `OptimizerConfig`; the last two carry their rate in ``learning_rate``. ``lr``
    overrides.
    """
    if isinstance(optimizer, str):
        if optimizer not in ROW_OPTIMIZERS:
            raise ConfigError(f"unknown optimizer {optimizer!r}; there are {', '.join(sorted(ROW_OPTIMIZERS))}")
        optimizer = ROW_OPTIMIZERS[optimizer]()
    config = as_optimizer_config(optimizer)
    if lr is None:
        kind = config.WhichOneof("type")
        lr = (
            optimizer.lr
            if isinstance(optimizer, RowOptimizer)
            else getattr(getattr(config, kind or "sgd"), "learning_rate", 0.0)
        )
    return config, lr
