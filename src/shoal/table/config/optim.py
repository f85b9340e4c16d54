"""Row optimizers under short names: ``shoal.Adagrad(lr=0.05)``.

Each holds its learning rate, a number or a `LearningRateFunction`. What ``torch.optim`` has is the same optimizer here,
with the same formula and defaults: on ids that are in every batch both give the same weights.
(`shoal.table.AdagradOptimizer` and its neighbours keep their messages' defaults.)
"""

from dataclasses import KW_ONLY
from typing import Any

from shoal.errors import ConfigError
from shoal.table.config.learning_rate import LearningRate
from shoal.table.config.messages import OptimizerConfig
from shoal.table.config.optimizer import RowOptimizer, as_optimizer_config

__all__ = [
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Amsgrad",
    "BatchSoftmax",
    "Ftrl",
    "GroupAdagrad",
    "GroupFtrl",
    "Lamb",
    "Momentum",
    "MovingAverage",
    "RmsProp",
    "RmsPropV2",
    "RowwiseAdagrad",
    "Sgd",
]


class Sgd(RowOptimizer, kind="sgd"):
    """``w -= lr * g``; no state."""

    lr: LearningRate = 0.001


class Momentum(RowOptimizer, kind="momentum"):
    """``torch.optim.SGD`` with its momentum."""

    lr: LearningRate = 0.001
    _: KW_ONLY
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0


class Adagrad(RowOptimizer, kind="adagrad"):
    """One accumulator per weight. A good first choice for ids with very different frequencies.

    ``initial_accumulator`` above 0 makes the first steps small: under a mean loss, whose gradients are small, a row
    hardly moves before its squared gradients add up to as much.
    """

    _: KW_ONLY
    initial_accumulator: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0


class RowwiseAdagrad(RowOptimizer, kind="rowwise_adagrad"):
    """One accumulator per row: Adagrad with 4 bytes of state, for tables that must be small."""

    _: KW_ONLY
    initial_accumulator: float = 0.0
    eps: float = 1e-8
    weight_decay: float = 0.0


class Adadelta(RowOptimizer, kind="adadelta"):
    lr: LearningRate = 1.0
    _: KW_ONLY
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0


class Adam(RowOptimizer, kind="adam"):
    """Adam per row: the bias correction counts the updates of that id."""

    lr: LearningRate = 0.001
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    nesterov: bool = False


class Amsgrad(Adam, kind="amsgrad"): ...


class AdamW(RowOptimizer, kind="adamw"):
    """Adam with decoupled weight decay."""

    lr: LearningRate = 0.001
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01


class Lamb(RowOptimizer, kind="lamb"):
    """Adam whose step is as long as the row's own norm says."""

    lr: LearningRate = 0.001
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0


class RmsProp(RowOptimizer, kind="rmsprop"):
    """``n = alpha * n + (1 - alpha) * g^2; w -= lr / (sqrt(n) + eps) * g``."""

    _: KW_ONLY
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0


class RmsPropV2(RowOptimizer, kind="rmspropv2"):
    """``n = momentum * n + g^2; w -= lr / (sqrt(n) + 1) * g``."""

    _: KW_ONLY
    momentum: float = 0.9
    weight_decay: float = 0.0


class Ftrl(RowOptimizer, kind="ftrl"):
    """FTRL-proximal; ``l1`` makes weights exactly zero."""

    _: KW_ONLY
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0
    initial_accumulator: float = 0.1


class GroupFtrl(RowOptimizer, kind="group_ftrl"):
    """FTRL whose ``l1`` makes whole rows zero."""

    _: KW_ONLY
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0
    initial_accumulator: float = 0.0


class GroupAdagrad(RowOptimizer, kind="group_adagrad"):
    """Adagrad with one accumulator and a group lasso (``l2``) that makes whole rows zero."""

    _: KW_ONLY
    l2: float = 0.0
    beta: float = 0.0
    initial_accumulator: float = 0.1
    weight_decay: float = 0.0


class MovingAverage(RowOptimizer, kind="moving_average"):
    """The "gradient" is a sample and the weight its moving average; ``lr`` has no effect."""

    _: KW_ONLY
    momentum: float = 0.9


class BatchSoftmax(RowOptimizer, kind="batch_softmax"):
    """For tables of dim 1: the weight estimates the steps between two appearances of the id."""

    lr: LearningRate = 0.1


ROW_OPTIMIZERS = RowOptimizer.kinds
"""Name -> class of every row optimizer."""


def as_row_optimizer(optimizer: Any, lr: LearningRate | None = None) -> tuple[OptimizerConfig, LearningRate]:
    """The message and the learning rate of whatever a user may give as a table's optimizer.

    ``optimizer`` is a `RowOptimizer`, a name such as ``"adagrad"`` (its class with defaults), an `Optimizer`, or an
    `OptimizerConfig`; the last two carry their rate in ``learning_rate``. ``lr`` overrides.
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
