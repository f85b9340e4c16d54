"""Row optimizer classes for table configurations, with the fields of their messages.

A field that is ``None`` is not written, so the message's default applies; a field with another default here is always
written, even if the message's default differs. New code can use the shorter `shoal.Adagrad` and similar classes.
"""

from typing import Any

from shoal.table.config.messages import OptimizerConfig
from shoal.table.config.optimizer import Optimizer, as_optimizer_config

__all__ = [
    "AdaGradWithGroupLassoOptimizer",
    "AdadeltaOptimizer",
    "AdagradOptimizer",
    "AdamOptimizer",
    "AdamWOptimizer",
    "AmsgradOptimizer",
    "BatchSoftmaxOptimizer",
    "DynamicWdAdagradOptimizer",
    "FTRLWithGroupSparsityOptimizer",
    "FtrlOptimizer",
    "LambOptimizer",
    "MomentumOptimizer",
    "MovingAverageOptimizer",
    "Optimizer",
    "RmspropOptimizer",
    "RmspropV2Optimizer",
    "RowwiseAdagradOptimizer",
    "SgdOptimizer",
    "StochasticRoundingFloat16OptimizerWrapper",
]


class SgdOptimizer(Optimizer, kind="sgd"):
    learning_rate: float | None = None


class MomentumOptimizer(Optimizer, kind="momentum"):
    learning_rate: float | None = None
    weight_decay_factor: float = 0.0
    use_nesterov: bool = False
    momentum: float = 0.9
    warmup_steps: int = 0


class AdagradOptimizer(Optimizer, kind="adagrad"):
    learning_rate: float | None = None
    initial_accumulator_value: float | None = None
    hessian_compression_times: int = 1
    warmup_steps: int = 0
    weight_decay_factor: float = 0.0


class RowwiseAdagradOptimizer(Optimizer, kind="rowwise_adagrad"):
    """Adagrad with one accumulator for the entire segment: 4 bytes of state per row."""

    learning_rate: float | None = None
    initial_accumulator_value: float | None = None
    weight_decay_factor: float | None = None
    epsilon: float | None = None


class DynamicWdAdagradOptimizer(Optimizer, kind="dynamic_wd_adagrad"):
    """Tables reject this optimizer with ``enable_dynamic_wd``, which has no public definition."""

    learning_rate: float | None = None
    initial_accumulator_value: float | None = None
    hessian_compression_times: int = 1
    warmup_steps: int = 0
    weight_decay_factor: float = 0.0
    decouple_weight_decay: bool = True
    enable_dynamic_wd: bool = True
    flip_direction: bool = True
    dynamic_wd_temperature: float = 1.0


class AdadeltaOptimizer(Optimizer, kind="adadelta"):
    learning_rate: float | None = None
    weight_decay_factor: float = 0.0
    averaging_ratio: float = 0.9
    epsilon: float = 0.01
    warmup_steps: int = 0


class AdamOptimizer(Optimizer, kind="adam"):
    learning_rate: float | None = None
    beta1: float = 0.9
    beta2: float = 0.99
    use_beta1_warmup: bool = False
    weight_decay_factor: float = 0.0
    use_nesterov: bool = False
    epsilon: float = 0.01
    warmup_steps: int = 0


class AmsgradOptimizer(Optimizer, kind="amsgrad"):
    learning_rate: float | None = None
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay_factor: float = 0.0
    use_nesterov: bool = False
    epsilon: float = 0.01
    warmup_steps: int = 0


class AdamWOptimizer(Optimizer, kind="adamw", native={"corrected_epsilon": True}):
    """Adam with decoupled weight decay."""

    learning_rate: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    weight_decay_factor: float | None = None
    epsilon: float | None = None


class LambOptimizer(Optimizer, kind="lamb"):
    """Adam whose step is scaled by the norm of the segment's weights."""

    learning_rate: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    weight_decay_factor: float | None = None
    epsilon: float | None = None


class RmspropOptimizer(Optimizer, kind="rmsprop"):
    learning_rate: float | None = None
    weight_decay_factor: float = 0.0
    momentum: float = 0.9


class RmspropV2Optimizer(RmspropOptimizer, kind="rmspropv2", native={"epsilon": 1.0}): ...


class FtrlOptimizer(Optimizer, kind="ftrl"):
    learning_rate: float | None = None
    initial_accumulator_value: float | None = None
    beta: float | None = None
    warmup_steps: int = 0
    l1_regularization: float | None = None
    l2_regularization: float | None = None


class FTRLWithGroupSparsityOptimizer(FtrlOptimizer, kind="group_ftrl"): ...


class AdaGradWithGroupLassoOptimizer(Optimizer, kind="group_adagrad"):
    learning_rate: float | None = None
    beta: float | None = None
    initial_accumulator_value: float | None = None
    l2_regularization: float | None = None
    weight_decay_factor: float = 0.0
    warmup_steps: int = 0


class MovingAverageOptimizer(Optimizer, kind="moving_average"):
    """A moving average: the "gradient" is a sample and the weight averages the samples; the rate has no effect."""

    momentum: float = 0.9


class BatchSoftmaxOptimizer(Optimizer, kind="batch_softmax"):
    """An estimate of the steps between two appearances of the id; only for segments with one weight."""

    learning_rate: float | None = None


class StochasticRoundingFloat16OptimizerWrapper(Optimizer):
    """Wraps an optimizer and rounds the weights at random to float16 values after each of its steps."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def as_proto(self) -> OptimizerConfig:
        config = OptimizerConfig()
        config.CopyFrom(as_optimizer_config(self.optimizer))
        config.stochastic_rounding_float16 = True
        return config
