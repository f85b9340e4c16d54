"""Conversion of a table's configuration for the native core: the layout of a row and when rows expire."""

from shoal import _core
from shoal.table.clock import DAY_S, HOUR_S
from shoal.table.config.messages import (
    EmbeddingHashTableConfig,
    EntryConfig,
    FloatCompressorConfig,
    OptimizerConfig,
    SlotExpireTimeConfig,
)
from shoal.table.config.optimizers import Optimizer

# In the order of the enums in csrc/table/rows/layout.h and kinds.h.
OPTIMIZERS: tuple[str, ...] = tuple(name for name, _ in _core.OPTIMIZERS)
INITIALIZERS = ("zeros", "ones", "constants", "random_uniform")
CODECS = ("fp32", "fp16", "fixed_r8", "one_bit")

# Field of an optimizer's message -> attribute of the native segment.
_ATTRIBUTE = {
    "initial_accumulator_value": "initial_accumulator",
    "weight_decay_factor": "weight_decay",
    "averaging_ratio": "beta1",
    "momentum": "beta1",
    "beta1": "beta1",
    "beta2": "beta2",
    "epsilon": "epsilon",
    "bias_corrected_epsilon": "corrected_epsilon",
    "beta": "beta",
    "l1_regularization_strength": "l1",
    "l2_regularization_strength": "l2",
    "use_nesterov": "nesterov",
    "decouple_weight_decay": "decoupled",
}


def native_layout(config: EmbeddingHashTableConfig, first_column: int = 0) -> _core.Layout:
    """The layout of a row. ``config`` must have passed `shoal.table.config.validate.validate_table_config`."""
    serving = config.entry_config.entry_type == EntryConfig.SERVING
    segments = [native_segment(segment, serving) for segment in config.entry_config.segments]
    if first_column:
        segments[0].init_column = first_column
    return _core.Layout(segments, serving, config.skip_zero_embedding)


def native_segment(segment: EntryConfig.Segment, serving: bool) -> _core.Segment:
    """One segment; with ``serving`` it has neither initializer nor optimizer."""
    native = _core.Segment()
    native.dim = segment.dim_size
    _write_codec(native, segment.comp_config)
    if not serving:
        _write_initializer(native, segment)
        _write_optimizer(native, segment.opt_config)
    return native


def _write_optimizer(native: _core.Segment, config: OptimizerConfig) -> None:
    kind = config.WhichOneof("type")
    message = getattr(config, kind)
    native.opt = OPTIMIZERS.index(kind)
    for name, value in Optimizer.kinds[kind].native.items():
        setattr(native, name, value)
    for field in message.DESCRIPTOR.fields:
        if field.name in _ATTRIBUTE:  # an unset field has the message's default
            setattr(native, _ATTRIBUTE[field.name], getattr(message, field.name))
    native.stochastic_rounding = config.stochastic_rounding_float16


def _write_initializer(native: _core.Segment, segment: EntryConfig.Segment) -> None:
    config = segment.init_config
    kind = config.WhichOneof("type")
    native.init = INITIALIZERS.index(kind)
    if kind == "constants":
        native.init_low = config.constants.constant
    elif kind == "random_uniform":
        native.init_low, native.init_high = config.random_uniform.minval, config.random_uniform.maxval


def _write_codec(native: _core.Segment, config: FloatCompressorConfig) -> None:
    kind = config.WhichOneof("type") or "fp32"
    native.codec = CODECS.index(kind)
    if kind == "fixed_r8":
        native.r = config.fixed_r8.r
    elif kind == "one_bit":
        for name in ("step_size", "init_scale", "max_scale", "amplitude"):
            setattr(native, name, getattr(config.one_bit, name))


def native_expiry(config: SlotExpireTimeConfig) -> _core.Expiry:
    """The native form of a validated expiry configuration."""
    return _core.Expiry(default_expiry_s(config), list(slot_expiry_s(config).items()))


def default_expiry_s(config: SlotExpireTimeConfig) -> int:
    """Seconds without a write after which rows are stale, for slots without their own setting."""
    if config.HasField("default_expire_hours"):
        return config.default_expire_hours * HOUR_S
    return config.default_expire_time * DAY_S


def slot_expiry_s(config: SlotExpireTimeConfig) -> dict[int, int]:
    """Slot -> seconds without a write after which its rows are stale, for slots with their own setting."""
    return {
        item.slot: item.expire_hours * HOUR_S if item.HasField("expire_hours") else item.expire_time * DAY_S
        for item in config.slot_expire_times
    }
