"""Row optimizers under short names: ``shoal.Adagrad(lr=0.05)``.

Each holds its learning rate, a number or a `LearningRateFunction`. Optimizers that ``torch.optim`` also has use the
same formula and defaults here: on ids that are in every batch both give the same weights.
(`shoal.table.AdagradOptimizer` and the other classes there use the defaults of their protobuf messages instead.)
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
    """SGD with momentum, as ``torch.optim.SGD`` defines it."""

    lr: LearningRate = 0.001
    _: KW_ONLY
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0


class Adagrad(RowOptimizer, kind="adagrad"):
    """Adagrad with one accumulator per weight; a good first choice when ids have very different frequencies.

    ``initial_accumulator`` above 0 makes the first steps small: under a mean loss, whose gradients are small, a row
    hardly moves until its squared gradients add up to that value.
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
    """Adam per row: the bias correction uses the number of updates of that id."""

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
    """Adam with each step scaled by the norm of the row's weights."""

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
    """FTRL-proximal; ``l1`` sets small weights to exactly zero."""

    _: KW_ONLY
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0
    initial_accumulator: float = 0.1


class GroupFtrl(RowOptimizer, kind="group_ftrl"):
    """FTRL whose ``l1`` sets entire rows to zero."""

    _: KW_ONLY
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0
    initial_accumulator: float = 0.0


class GroupAdagrad(RowOptimizer, kind="group_adagrad"):
    """Adagrad with one accumulator per row and a group lasso (``l2``) that sets entire rows to zero."""

    _: KW_ONLY
    l2: float = 0.0
    beta: float = 0.0
    initial_accumulator: float = 0.1
    weight_decay: float = 0.0


class MovingAverage(RowOptimizer, kind="moving_average"):
    """A moving average: the "gradient" is a sample and the weight averages the samples; ``lr`` has no effect."""

    _: KW_ONLY
    momentum: float = 0.9


class BatchSoftmax(RowOptimizer, kind="batch_softmax"):
    """An estimate of the steps between two appearances of the id, as its weight; for tables with dim 1."""

    lr: LearningRate = 0.1


ROW_OPTIMIZERS = RowOptimizer.kinds
"""Name -> class of every row optimizer."""


def as_row_optimizer(optimizer: Any, lr: LearningRate | None = None) -> tuple[OptimizerConfig, LearningRate]:
    """The message and the learning rate for a table's ``optimizer`` argument.

    ``optimizer`` is a `RowOptimizer`, a name such as ``"adagrad"`` (that class with its defaults), an `Optimizer`, or
    an `OptimizerConfig`; the last two have their rate in ``learning_rate``. ``lr`` overrides the rate.
    """
    if isinstance(optimizer, str):
        if optimizer not in ROW_OPTIMIZERS:
            raise ConfigError(f"optimizer must be one of {', '.join(sorted(ROW_OPTIMIZERS))}, got {optimizer!r}")
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
