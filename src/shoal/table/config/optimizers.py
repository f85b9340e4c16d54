"""The row optimizers of a segment, as the classes that table configurations are written with.

Each class has the fields of its message. A field that is ``None`` is not written, so the message's default applies; a
field with another default here is written even where the message's default differs. `shoal.Adagrad` and its
neighbours in `shoal.table.config.optim` are the shorter spelling for new code.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from google.protobuf.message import Message

from shoal.errors import ConfigError
from shoal.table.config.messages import OptimizerConfig


def write_fields(source: Any, message: Message, rename: dict[str, str] | None = None) -> None:
    """Marks ``message`` as present and writes the fields of a dataclass that are not None."""
    message.SetInParent()
    for field in fields(source):
        value = getattr(source, field.name)
        if value is not None:
            setattr(message, (rename or {}).get(field.name, field.name), value)


class Optimizer:
    """Base of the optimizer classes; ``as_proto()`` gives the message."""

    _kind: ClassVar[str]
    _rename: ClassVar[dict[str, str]] = {
        "l1_regularization": "l1_regularization_strength",
        "l2_regularization": "l2_regularization_strength",
    }

    def as_proto(self) -> OptimizerConfig:
        config = OptimizerConfig()
        write_fields(self, getattr(config, self._kind), self._rename)
        return config


@dataclass
class SgdOptimizer(Optimizer):
    _kind = "sgd"
    learning_rate: float | None = None


@dataclass
class AdagradOptimizer(Optimizer):
    _kind = "adagrad"
    learning_rate: float | None = None
    initial_accumulator_value: float | None = None
    hessian_compression_times: int = 1
    warmup_steps: int = 0
    weight_decay_factor: float = 0.0


@dataclass
class DynamicWdAdagradOptimizer(Optimizer):
    """No table can be built with ``enable_dynamic_wd``, which has no public definition."""

    _kind = "dynamic_wd_adagrad"
    learning_rate: float | None = None
    initial_accumulator_value: float | None = None
    hessian_compression_times: int = 1
    warmup_steps: int = 0
    weight_decay_factor: float = 0.0
    decouple_weight_decay: bool = True
    enable_dynamic_wd: bool = True
    flip_direction: bool = True
    dynamic_wd_temperature: float = 1.0


@dataclass
class AdadeltaOptimizer(Optimizer):
    _kind = "adadelta"
    learning_rate: float | None = None
    weight_decay_factor: float = 0.0
    averaging_ratio: float = 0.9
    epsilon: float = 0.01
    warmup_steps: int = 0


@dataclass
class AdamOptimizer(Optimizer):
    _kind = "adam"
    learning_rate: float | None = None
    beta1: float = 0.9
    beta2: float = 0.99
    use_beta1_warmup: bool = False
    weight_decay_factor: float = 0.0
    use_nesterov: bool = False
    epsilon: float = 0.01
    warmup_steps: int = 0


@dataclass
class AmsgradOptimizer(Optimizer):
    _kind = "amsgrad"
    learning_rate: float | None = None
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay_factor: float = 0.0
    use_nesterov: bool = False
    epsilon: float = 0.01
    warmup_steps: int = 0


@dataclass
class BatchSoftmaxOptimizer(Optimizer):
    """Only for segments of one weight: it learns the steps between two appearances of the id."""

    _kind = "batch_softmax"
    learning_rate: float | None = None


@dataclass
class MomentumOptimizer(Optimizer):
    _kind = "momentum"
    learning_rate: float | None = None
    weight_decay_factor: float = 0.0
    use_nesterov: bool = False
    momentum: float = 0.9
    warmup_steps: int = 0


@dataclass
class MovingAverageOptimizer(Optimizer):
    """The "gradient" is the new sample of which the weight keeps a moving average; the rate has no effect."""

    _kind = "moving_average"
    momentum: float = 0.9


@dataclass
class RmspropOptimizer(Optimizer):
    _kind = "rmsprop"
    learning_rate: float | None = None
    weight_decay_factor: float = 0.0
    momentum: float = 0.9


@dataclass
class RmspropV2Optimizer(RmspropOptimizer):
    _kind = "rmspropv2"


@dataclass
class FtrlOptimizer(Optimizer):
    _kind = "ftrl"
    learning_rate: float | None = None
    initial_accumulator_value: float | None = None
    beta: float | None = None
    warmup_steps: int = 0
    l1_regularization: float | None = None
    l2_regularization: float | None = None


@dataclass
class FTRLWithGroupSparsityOptimizer(FtrlOptimizer):
    _kind = "group_ftrl"


@dataclass
class AdaGradWithGroupLassoOptimizer(Optimizer):
    _kind = "group_adagrad"
    learning_rate: float | None = None
    beta: float | None = None
    initial_accumulator_value: float | None = None
    l2_regularization: float | None = None
    weight_decay_factor: float = 0.0
    warmup_steps: int = 0


@dataclass
class RowwiseAdagradOptimizer(Optimizer):
    """Adagrad with one accumulator for the whole segment: 4 bytes of state a row."""

    _kind = "rowwise_adagrad"
    learning_rate: float | None = None
    initial_accumulator_value: float | None = None
    weight_decay_factor: float | None = None
    epsilon: float | None = None


@dataclass
class AdamWOptimizer(Optimizer):
    """Adam with decoupled weight decay."""

    _kind = "adamw"
    learning_rate: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    weight_decay_factor: float | None = None
    epsilon: float | None = None


@dataclass
class LambOptimizer(Optimizer):
    """Adam whose step is scaled by the norm of the segment's weights."""

    _kind = "lamb"
    learning_rate: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    weight_decay_factor: float | None = None
    epsilon: float | None = None


class StochasticRoundingFloat16OptimizerWrapper(Optimizer):
    """Another optimizer, after each step of which the weights are rounded at random to float16 values."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def as_proto(self) -> OptimizerConfig:
        config = OptimizerConfig()
        config.CopyFrom(as_optimizer_config(self.optimizer))
        config.stochastic_rounding_float16 = True
        return config


Config = TypeVar("Config", bound=Message)


def as_config(given: Any, kind: type[Config], what: str) -> Config:
    """The message ``kind`` of an object that has ``as_proto()``, of one of its choices, or the message itself."""
    if isinstance(given, kind):
        return given
    if isinstance(given, Message):  # AdagradOptimizerConfig in place of OptimizerConfig(adagrad=...)
        for field in kind.DESCRIPTOR.oneofs_by_name["type"].fields:
            if field.message_type is given.DESCRIPTOR:
                return kind(**{field.name: given})
    config = given.as_proto() if hasattr(given, "as_proto") else None
    if not isinstance(config, kind):
        hint = "; optimizers of torch step dense parameters, rows take shoal.Adam(lr=0.01) and the like"
        hint = hint if "torch.optim" in f"{getattr(given, '__module__', '')}" else ""
        raise ConfigError(f"{what} must be an object of shoal.table or of {kind.DESCRIPTOR.name}, got {given!r}{hint}")
    return config


def as_optimizer_config(optimizer: Any) -> OptimizerConfig:
    """The message of an optimizer object, or the message itself."""
    return as_config(optimizer, OptimizerConfig, "optimizer")
