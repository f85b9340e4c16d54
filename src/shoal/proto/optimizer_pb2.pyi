from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SgdOptimizerConfig(_message.Message):
    __slots__ = ("dim_size", "learning_rate", "warmup_steps")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    learning_rate: float
    warmup_steps: int
    def __init__(self, dim_size: _Optional[int] = ..., learning_rate: _Optional[float] = ..., warmup_steps: _Optional[int] = ...) -> None: ...

class AdagradOptimizerConfig(_message.Message):
    __slots__ = ("dim_size", "learning_rate", "initial_accumulator_value", "hessian_compression_times", "weight_decay_factor", "warmup_steps", "epsilon")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ACCUMULATOR_VALUE_FIELD_NUMBER: _ClassVar[int]
    HESSIAN_COMPRESSION_TIMES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FACTOR_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    learning_rate: float
    initial_accumulator_value: float
    hessian_compression_times: int
    weight_decay_factor: float
    warmup_steps: int
    epsilon: float
    def __init__(self, dim_size: _Optional[int] = ..., learning_rate: _Optional[float] = ..., initial_accumulator_value: _Optional[float] = ..., hessian_compression_times: _Optional[int] = ..., weight_decay_factor: _Optional[float] = ..., warmup_steps: _Optional[int] = ..., epsilon: _Optional[float] = ...) -> None: ...

class DynamicWdAdagradOptimizerConfig(_message.Message):
    __slots__ = ("dim_size", "learning_rate", "initial_accumulator_value", "hessian_compression_times", "weight_decay_factor", "warmup_steps", "decouple_weight_decay", "enable_dynamic_wd", "dynamic_wd_temperature", "flip_direction")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ACCUMULATOR_VALUE_FIELD_NUMBER: _ClassVar[int]
    HESSIAN_COMPRESSION_TIMES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FACTOR_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECOUPLE_WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    ENABLE_DYNAMIC_WD_FIELD_NUMBER: _ClassVar[int]
    DYNAMIC_WD_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    FLIP_DIRECTION_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    learning_rate: float
    initial_accumulator_value: float
    hessian_compression_times: int
    weight_decay_factor: float
    warmup_steps: int
    decouple_weight_decay: bool
    enable_dynamic_wd: bool
    dynamic_wd_temperature: float
    flip_direction: bool
    def __init__(self, dim_size: _Optional[int] = ..., learning_rate: _Optional[float] = ..., initial_accumulator_value: _Optional[float] = ..., hessian_compression_times: _Optional[int] = ..., weight_decay_factor: _Optional[float] = ..., warmup_steps: _Optional[int] = ..., decouple_weight_decay: bool = ..., enable_dynamic_wd: bool = ..., dynamic_wd_temperature: _Optional[float] = ..., flip_direction: bool = ...) -> None: ...

class FtrlOptimizerConfig(_message.Message):
    __slots__ = ("dim_size", "learning_rate", "beta", "initial_accumulator_value", "l1_regularization_strength", "l2_regularization_strength", "warmup_steps")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ACCUMULATOR_VALUE_FIELD_NUMBER: _ClassVar[int]
    L1_REGULARIZATION_STRENGTH_FIELD_NUMBER: _ClassVar[int]
    L2_REGULARIZATION_STRENGTH_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    learning_rate: float
    beta: float
    initial_accumulator_value: float
    l1_regularization_strength: float
    l2_regularization_strength: float
    warmup_steps: int
    def __init__(self, dim_size: _Optional[int] = ..., learning_rate: _Optional[float] = ..., beta: _Optional[float] = ..., initial_accumulator_value: _Optional[float] = ..., l1_regularization_strength: _Optional[float] = ..., l2_regularization_strength: _Optional[float] = ..., warmup_steps: _Optional[int] = ...) -> None: ...

class GroupFtrlOptimizerConfig(_message.Message):
    __slots__ = ("dim_size", "learning_rate", "beta", "initial_accumulator_value", "l1_regularization_strength", "l2_regularization_strength", "warmup_steps")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ACCUMULATOR_VALUE_FIELD_NUMBER: _ClassVar[int]
    L1_REGULARIZATION_STRENGTH_FIELD_NUMBER: _ClassVar[int]
    L2_REGULARIZATION_STRENGTH_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    learning_rate: float
    beta: float
    initial_accumulator_value: float
    l1_regularization_strength: float
    l2_regularization_strength: float
    warmup_steps: int
    def __init__(self, dim_size: _Optional[int] = ..., learning_rate: _Optional[float] = ..., beta: _Optional[float] = ..., initial_accumulator_value: _Optional[float] = ..., l1_regularization_strength: _Optional[float] = ..., l2_regularization_strength: _Optional[float] = ..., warmup_steps: _Optional[int] = ...) -> None: ...

class GroupAdaGradOptimizerConfig(_message.Message):
    __slots__ = ("dim_size", "learning_rate", "beta", "initial_accumulator_value", "l2_regularization_strength", "weight_decay_factor", "warmup_steps")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ACCUMULATOR_VALUE_FIELD_NUMBER: _ClassVar[int]
    L2_REGULARIZATION_STRENGTH_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FACTOR_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    learning_rate: float
    beta: float
    initial_accumulator_value: float
    l2_regularization_strength: float
    weight_decay_factor: float
    warmup_steps: int
    def __init__(self, dim_size: _Optional[int] = ..., learning_rate: _Optional[float] = ..., beta: _Optional[float] = ..., initial_accumulator_value: _Optional[float] = ..., l2_regularization_strength: _Optional[float] = ..., weight_decay_factor: _Optional[float] = ..., warmup_steps: _Optional[int] = ...) -> None: ...

class AdadeltaOptimizerConfig(_message.Message):
    __slots__ = ("dim_size", "learning_rate", "weight_decay_factor", "averaging_ratio", "epsilon", "warmup_steps")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FACTOR_FIELD_NUMBER: _ClassVar[int]
    AVERAGING_RATIO_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    learning_rate: float
    weight_decay_factor: float
    averaging_ratio: float
    epsilon: float
    warmup_steps: int
    def __init__(self, dim_size: _Optional[int] = ..., learning_rate: _Optional[float] = ..., weight_decay_factor: _Optional[float] = ..., averaging_ratio: _Optional[float] = ..., epsilon: _Optional[float] = ..., warmup_steps: _Optional[int] = ...) -> None: ...

class AdamOptimizerConfig(_message.Message):
    __slots__ = ("dim_size", "learning_rate", "beta1", "beta2", "use_beta1_warmup", "weight_decay_factor", "use_nesterov", "epsilon", "warmup_steps", "bias_corrected_epsilon")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    USE_BETA1_WARMUP_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FACTOR_FIELD_NUMBER: _ClassVar[int]
    USE_NESTEROV_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    BIAS_CORRECTED_EPSILON_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    learning_rate: float
    beta1: float
    beta2: float
    use_beta1_warmup: bool
    weight_decay_factor: float
    use_nesterov: bool
    epsilon: float
    warmup_steps: int
    bias_corrected_epsilon: bool
    def __init__(self, dim_size: _Optional[int] = ..., learning_rate: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., use_beta1_warmup: bool = ..., weight_decay_factor: _Optional[float] = ..., use_nesterov: bool = ..., epsilon: _Optional[float] = ..., warmup_steps: _Optional[int] = ..., bias_corrected_epsilon: bool = ...) -> None: ...

class AmsgradOptimizerConfig(_message.Message):
    __slots__ = ("dim_size", "learning_rate", "beta1", "beta2", "weight_decay_factor", "use_nesterov", "epsilon", "warmup_steps", "bias_corrected_epsilon")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FACTOR_FIELD_NUMBER: _ClassVar[int]
    USE_NESTEROV_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    BIAS_CORRECTED_EPSILON_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    learning_rate: float
    beta1: float
    beta2: float
    weight_decay_factor: float
    use_nesterov: bool
    epsilon: float
    warmup_steps: int
    bias_corrected_epsilon: bool
    def __init__(self, dim_size: _Optional[int] = ..., learning_rate: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., weight_decay_factor: _Optional[float] = ..., use_nesterov: bool = ..., epsilon: _Optional[float] = ..., warmup_steps: _Optional[int] = ..., bias_corrected_epsilon: bool = ...) -> None: ...

class MomentumOptimizerConfig(_message.Message):
    __slots__ = ("dim_size", "learning_rate", "weight_decay_factor", "use_nesterov", "momentum", "warmup_steps")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FACTOR_FIELD_NUMBER: _ClassVar[int]
    USE_NESTEROV_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    learning_rate: float
    weight_decay_factor: float
    use_nesterov: bool
    momentum: float
    warmup_steps: int
    def __init__(self, dim_size: _Optional[int] = ..., learning_rate: _Optional[float] = ..., weight_decay_factor: _Optional[float] = ..., use_nesterov: bool = ..., momentum: _Optional[float] = ..., warmup_steps: _Optional[int] = ...) -> None: ...

class MovingAverageOptimizerConfig(_message.Message):
    __slots__ = ("dim_size", "momentum")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    momentum: float
    def __init__(self, dim_size: _Optional[int] = ..., momentum: _Optional[float] = ...) -> None: ...

class BatchSoftmaxOptimizerConfig(_message.Message):
    __slots__ = ("dim_size", "learning_rate")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    learning_rate: float
    def __init__(self, dim_size: _Optional[int] = ..., learning_rate: _Optional[float] = ...) -> None: ...

class RmspropOptimizerConfig(_message.Message):
    __slots__ = ("dim_size", "learning_rate", "weight_decay_factor", "momentum", "epsilon")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FACTOR_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    learning_rate: float
    weight_decay_factor: float
    momentum: float
    epsilon: float
    def __init__(self, dim_size: _Optional[int] = ..., learning_rate: _Optional[float] = ..., weight_decay_factor: _Optional[float] = ..., momentum: _Optional[float] = ..., epsilon: _Optional[float] = ...) -> None: ...

class RmspropV2OptimizerConfig(_message.Message):
    __slots__ = ("dim_size", "learning_rate", "weight_decay_factor", "momentum")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FACTOR_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    learning_rate: float
    weight_decay_factor: float
    momentum: float
    def __init__(self, dim_size: _Optional[int] = ..., learning_rate: _Optional[float] = ..., weight_decay_factor: _Optional[float] = ..., momentum: _Optional[float] = ...) -> None: ...

class DcOptimizerConfig(_message.Message):
    __slots__ = ("dim_size", "lambda_")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAMBDA__FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    lambda_: float
    def __init__(self, dim_size: _Optional[int] = ..., lambda_: _Optional[float] = ...) -> None: ...

class RowwiseAdagradOptimizerConfig(_message.Message):
    __slots__ = ("dim_size", "learning_rate", "initial_accumulator_value", "weight_decay_factor", "epsilon")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ACCUMULATOR_VALUE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FACTOR_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    learning_rate: float
    initial_accumulator_value: float
    weight_decay_factor: float
    epsilon: float
    def __init__(self, dim_size: _Optional[int] = ..., learning_rate: _Optional[float] = ..., initial_accumulator_value: _Optional[float] = ..., weight_decay_factor: _Optional[float] = ..., epsilon: _Optional[float] = ...) -> None: ...

class AdamwOptimizerConfig(_message.Message):
    __slots__ = ("dim_size", "learning_rate", "beta1", "beta2", "weight_decay_factor", "epsilon")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FACTOR_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    learning_rate: float
    beta1: float
    beta2: float
    weight_decay_factor: float
    epsilon: float
    def __init__(self, dim_size: _Optional[int] = ..., learning_rate: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., weight_decay_factor: _Optional[float] = ..., epsilon: _Optional[float] = ...) -> None: ...

class LambOptimizerConfig(_message.Message):
    __slots__ = ("dim_size", "learning_rate", "beta1", "beta2", "weight_decay_factor", "epsilon")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FACTOR_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    learning_rate: float
    beta1: float
    beta2: float
    weight_decay_factor: float
    epsilon: float
    def __init__(self, dim_size: _Optional[int] = ..., learning_rate: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., weight_decay_factor: _Optional[float] = ..., epsilon: _Optional[float] = ...) -> None: ...

class OptimizerConfig(_message.Message):
    __slots__ = ("adagrad", "sgd", "ftrl", "dynamic_wd_adagrad", "adadelta", "adam", "amsgrad", "momentum", "moving_average", "rmsprop", "rmspropv2", "dc", "group_ftrl", "batch_softmax", "group_adagrad", "rowwise_adagrad", "adamw", "lamb", "stochastic_rounding_float16")
    ADAGRAD_FIELD_NUMBER: _ClassVar[int]
    SGD_FIELD_NUMBER: _ClassVar[int]
    FTRL_FIELD_NUMBER: _ClassVar[int]
    DYNAMIC_WD_ADAGRAD_FIELD_NUMBER: _ClassVar[int]
    ADADELTA_FIELD_NUMBER: _ClassVar[int]
    ADAM_FIELD_NUMBER: _ClassVar[int]
    AMSGRAD_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    MOVING_AVERAGE_FIELD_NUMBER: _ClassVar[int]
    RMSPROP_FIELD_NUMBER: _ClassVar[int]
    RMSPROPV2_FIELD_NUMBER: _ClassVar[int]
    DC_FIELD_NUMBER: _ClassVar[int]
    GROUP_FTRL_FIELD_NUMBER: _ClassVar[int]
    BATCH_SOFTMAX_FIELD_NUMBER: _ClassVar[int]
    GROUP_ADAGRAD_FIELD_NUMBER: _ClassVar[int]
    ROWWISE_ADAGRAD_FIELD_NUMBER: _ClassVar[int]
    ADAMW_FIELD_NUMBER: _ClassVar[int]
    LAMB_FIELD_NUMBER: _ClassVar[int]
    STOCHASTIC_ROUNDING_FLOAT16_FIELD_NUMBER: _ClassVar[int]
    adagrad: AdagradOptimizerConfig
    sgd: SgdOptimizerConfig
    ftrl: FtrlOptimizerConfig
    dynamic_wd_adagrad: DynamicWdAdagradOptimizerConfig
    adadelta: AdadeltaOptimizerConfig
    adam: AdamOptimizerConfig
    amsgrad: AmsgradOptimizerConfig
    momentum: MomentumOptimizerConfig
    moving_average: MovingAverageOptimizerConfig
    rmsprop: RmspropOptimizerConfig
    rmspropv2: RmspropV2OptimizerConfig
    dc: DcOptimizerConfig
    group_ftrl: GroupFtrlOptimizerConfig
    batch_softmax: BatchSoftmaxOptimizerConfig
    group_adagrad: GroupAdaGradOptimizerConfig
    rowwise_adagrad: RowwiseAdagradOptimizerConfig
    adamw: AdamwOptimizerConfig
    lamb: LambOptimizerConfig
    stochastic_rounding_float16: bool
    def __init__(self, adagrad: _Optional[_Union[AdagradOptimizerConfig, _Mapping]] = ..., sgd: _Optional[_Union[SgdOptimizerConfig, _Mapping]] = ..., ftrl: _Optional[_Union[FtrlOptimizerConfig, _Mapping]] = ..., dynamic_wd_adagrad: _Optional[_Union[DynamicWdAdagradOptimizerConfig, _Mapping]] = ..., adadelta: _Optional[_Union[AdadeltaOptimizerConfig, _Mapping]] = ..., adam: _Optional[_Union[AdamOptimizerConfig, _Mapping]] = ..., amsgrad: _Optional[_Union[AmsgradOptimizerConfig, _Mapping]] = ..., momentum: _Optional[_Union[MomentumOptimizerConfig, _Mapping]] = ..., moving_average: _Optional[_Union[MovingAverageOptimizerConfig, _Mapping]] = ..., rmsprop: _Optional[_Union[RmspropOptimizerConfig, _Mapping]] = ..., rmspropv2: _Optional[_Union[RmspropV2OptimizerConfig, _Mapping]] = ..., dc: _Optional[_Union[DcOptimizerConfig, _Mapping]] = ..., group_ftrl: _Optional[_Union[GroupFtrlOptimizerConfig, _Mapping]] = ..., batch_softmax: _Optional[_Union[BatchSoftmaxOptimizerConfig, _Mapping]] = ..., group_adagrad: _Optional[_Union[GroupAdaGradOptimizerConfig, _Mapping]] = ..., rowwise_adagrad: _Optional[_Union[RowwiseAdagradOptimizerConfig, _Mapping]] = ..., adamw: _Optional[_Union[AdamwOptimizerConfig, _Mapping]] = ..., lamb: _Optional[_Union[LambOptimizerConfig, _Mapping]] = ..., stochastic_rounding_float16: bool = ...) -> None: ...

class AdagradOptimizerDump(_message.Message):
    __slots__ = ("norm",)
    NORM_FIELD_NUMBER: _ClassVar[int]
    norm: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, norm: _Optional[_Iterable[float]] = ...) -> None: ...

class DynamicWdAdagradOptimizerDump(_message.Message):
    __slots__ = ("norm", "last_update_step")
    NORM_FIELD_NUMBER: _ClassVar[int]
    LAST_UPDATE_STEP_FIELD_NUMBER: _ClassVar[int]
    norm: _containers.RepeatedScalarFieldContainer[float]
    last_update_step: int
    def __init__(self, norm: _Optional[_Iterable[float]] = ..., last_update_step: _Optional[int] = ...) -> None: ...

class SgdOptimizerDump(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FtrlOptimizerDump(_message.Message):
    __slots__ = ("zero", "norm")
    ZERO_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    zero: _containers.RepeatedScalarFieldContainer[float]
    norm: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, zero: _Optional[_Iterable[float]] = ..., norm: _Optional[_Iterable[float]] = ...) -> None: ...

class GroupFtrlOptimizerDump(_message.Message):
    __slots__ = ("zero", "norm")
    ZERO_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    zero: _containers.RepeatedScalarFieldContainer[float]
    norm: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, zero: _Optional[_Iterable[float]] = ..., norm: _Optional[_Iterable[float]] = ...) -> None: ...

class GroupAdaGradOptimizerDump(_message.Message):
    __slots__ = ("grad_square_sum",)
    GRAD_SQUARE_SUM_FIELD_NUMBER: _ClassVar[int]
    grad_square_sum: float
    def __init__(self, grad_square_sum: _Optional[float] = ...) -> None: ...

class AdadeltaOptimizerDump(_message.Message):
    __slots__ = ("accum", "accum_update")
    ACCUM_FIELD_NUMBER: _ClassVar[int]
    ACCUM_UPDATE_FIELD_NUMBER: _ClassVar[int]
    accum: _containers.RepeatedScalarFieldContainer[float]
    accum_update: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, accum: _Optional[_Iterable[float]] = ..., accum_update: _Optional[_Iterable[float]] = ...) -> None: ...

class AdamOptimizerDump(_message.Message):
    __slots__ = ("m", "v", "beta1_power", "beta2_power")
    M_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    BETA1_POWER_FIELD_NUMBER: _ClassVar[int]
    BETA2_POWER_FIELD_NUMBER: _ClassVar[int]
    m: _containers.RepeatedScalarFieldContainer[float]
    v: _containers.RepeatedScalarFieldContainer[float]
    beta1_power: float
    beta2_power: float
    def __init__(self, m: _Optional[_Iterable[float]] = ..., v: _Optional[_Iterable[float]] = ..., beta1_power: _Optional[float] = ..., beta2_power: _Optional[float] = ...) -> None: ...

class AmsgradOptimizerDump(_message.Message):
    __slots__ = ("m", "v", "vhat", "beta1_power", "beta2_power")
    M_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    VHAT_FIELD_NUMBER: _ClassVar[int]
    BETA1_POWER_FIELD_NUMBER: _ClassVar[int]
    BETA2_POWER_FIELD_NUMBER: _ClassVar[int]
    m: _containers.RepeatedScalarFieldContainer[float]
    v: _containers.RepeatedScalarFieldContainer[float]
    vhat: _containers.RepeatedScalarFieldContainer[float]
    beta1_power: float
    beta2_power: float
    def __init__(self, m: _Optional[_Iterable[float]] = ..., v: _Optional[_Iterable[float]] = ..., vhat: _Optional[_Iterable[float]] = ..., beta1_power: _Optional[float] = ..., beta2_power: _Optional[float] = ...) -> None: ...

class MomentumOptimizerDump(_message.Message):
    __slots__ = ("n",)
    N_FIELD_NUMBER: _ClassVar[int]
    n: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, n: _Optional[_Iterable[float]] = ...) -> None: ...

class BatchSoftmaxOptimizerDump(_message.Message):
    __slots__ = ("global_step",)
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    global_step: int
    def __init__(self, global_step: _Optional[int] = ...) -> None: ...

class RmspropOptimizerDump(_message.Message):
    __slots__ = ("n",)
    N_FIELD_NUMBER: _ClassVar[int]
    n: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, n: _Optional[_Iterable[float]] = ...) -> None: ...

class RmspropV2OptimizerDump(_message.Message):
    __slots__ = ("n",)
    N_FIELD_NUMBER: _ClassVar[int]
    n: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, n: _Optional[_Iterable[float]] = ...) -> None: ...

class RowwiseAdagradOptimizerDump(_message.Message):
    __slots__ = ("norm",)
    NORM_FIELD_NUMBER: _ClassVar[int]
    norm: float
    def __init__(self, norm: _Optional[float] = ...) -> None: ...

class AdamwOptimizerDump(_message.Message):
    __slots__ = ("m", "v", "beta1_power", "beta2_power")
    M_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    BETA1_POWER_FIELD_NUMBER: _ClassVar[int]
    BETA2_POWER_FIELD_NUMBER: _ClassVar[int]
    m: _containers.RepeatedScalarFieldContainer[float]
    v: _containers.RepeatedScalarFieldContainer[float]
    beta1_power: float
    beta2_power: float
    def __init__(self, m: _Optional[_Iterable[float]] = ..., v: _Optional[_Iterable[float]] = ..., beta1_power: _Optional[float] = ..., beta2_power: _Optional[float] = ...) -> None: ...

class LambOptimizerDump(_message.Message):
    __slots__ = ("m", "v", "beta1_power", "beta2_power")
    M_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    BETA1_POWER_FIELD_NUMBER: _ClassVar[int]
    BETA2_POWER_FIELD_NUMBER: _ClassVar[int]
    m: _containers.RepeatedScalarFieldContainer[float]
    v: _containers.RepeatedScalarFieldContainer[float]
    beta1_power: float
    beta2_power: float
    def __init__(self, m: _Optional[_Iterable[float]] = ..., v: _Optional[_Iterable[float]] = ..., beta1_power: _Optional[float] = ..., beta2_power: _Optional[float] = ...) -> None: ...

class SingleOptimizerDump(_message.Message):
    __slots__ = ("adagrad", "sgd", "ftrl", "dynamic_wd_adagrad", "adadelta", "adam", "amsgrad", "momentum", "rmsprop", "rmspropv2", "group_ftrl", "batch_softmax", "group_adagrad", "rowwise_adagrad", "adamw", "lamb")
    ADAGRAD_FIELD_NUMBER: _ClassVar[int]
    SGD_FIELD_NUMBER: _ClassVar[int]
    FTRL_FIELD_NUMBER: _ClassVar[int]
    DYNAMIC_WD_ADAGRAD_FIELD_NUMBER: _ClassVar[int]
    ADADELTA_FIELD_NUMBER: _ClassVar[int]
    ADAM_FIELD_NUMBER: _ClassVar[int]
    AMSGRAD_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    RMSPROP_FIELD_NUMBER: _ClassVar[int]
    RMSPROPV2_FIELD_NUMBER: _ClassVar[int]
    GROUP_FTRL_FIELD_NUMBER: _ClassVar[int]
    BATCH_SOFTMAX_FIELD_NUMBER: _ClassVar[int]
    GROUP_ADAGRAD_FIELD_NUMBER: _ClassVar[int]
    ROWWISE_ADAGRAD_FIELD_NUMBER: _ClassVar[int]
    ADAMW_FIELD_NUMBER: _ClassVar[int]
    LAMB_FIELD_NUMBER: _ClassVar[int]
    adagrad: AdagradOptimizerDump
    sgd: SgdOptimizerDump
    ftrl: FtrlOptimizerDump
    dynamic_wd_adagrad: DynamicWdAdagradOptimizerDump
    adadelta: AdadeltaOptimizerDump
    adam: AdamOptimizerDump
    amsgrad: AmsgradOptimizerDump
    momentum: MomentumOptimizerDump
    rmsprop: RmspropOptimizerDump
    rmspropv2: RmspropV2OptimizerDump
    group_ftrl: GroupFtrlOptimizerDump
    batch_softmax: BatchSoftmaxOptimizerDump
    group_adagrad: GroupAdaGradOptimizerDump
    rowwise_adagrad: RowwiseAdagradOptimizerDump
    adamw: AdamwOptimizerDump
    lamb: LambOptimizerDump
    def __init__(self, adagrad: _Optional[_Union[AdagradOptimizerDump, _Mapping]] = ..., sgd: _Optional[_Union[SgdOptimizerDump, _Mapping]] = ..., ftrl: _Optional[_Union[FtrlOptimizerDump, _Mapping]] = ..., dynamic_wd_adagrad: _Optional[_Union[DynamicWdAdagradOptimizerDump, _Mapping]] = ..., adadelta: _Optional[_Union[AdadeltaOptimizerDump, _Mapping]] = ..., adam: _Optional[_Union[AdamOptimizerDump, _Mapping]] = ..., amsgrad: _Optional[_Union[AmsgradOptimizerDump, _Mapping]] = ..., momentum: _Optional[_Union[MomentumOptimizerDump, _Mapping]] = ..., rmsprop: _Optional[_Union[RmspropOptimizerDump, _Mapping]] = ..., rmspropv2: _Optional[_Union[RmspropV2OptimizerDump, _Mapping]] = ..., group_ftrl: _Optional[_Union[GroupFtrlOptimizerDump, _Mapping]] = ..., batch_softmax: _Optional[_Union[BatchSoftmaxOptimizerDump, _Mapping]] = ..., group_adagrad: _Optional[_Union[GroupAdaGradOptimizerDump, _Mapping]] = ..., rowwise_adagrad: _Optional[_Union[RowwiseAdagradOptimizerDump, _Mapping]] = ..., adamw: _Optional[_Union[AdamwOptimizerDump, _Mapping]] = ..., lamb: _Optional[_Union[LambOptimizerDump, _Mapping]] = ...) -> None: ...

class OptimizerDump(_message.Message):
    __slots__ = ("dump",)
    DUMP_FIELD_NUMBER: _ClassVar[int]
    dump: _containers.RepeatedCompositeFieldContainer[SingleOptimizerDump]
    def __init__(self, dump: _Optional[_Iterable[_Union[SingleOptimizerDump, _Mapping]]] = ...) -> None: ...
