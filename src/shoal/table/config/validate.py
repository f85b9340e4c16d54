"""Validation of table configurations; every error names the field."""

import math
from collections.abc import Sized
from typing import Any

from shoal.errors import ConfigError
from shoal.fid import MAX_SLOT_V2
from shoal.table.config.messages import (
    EmbeddingHashTableConfig,
    EntryConfig,
    OptimizerConfig,
    SlotExpireTimeConfig,
    SlotOccurrenceThresholdConfig,
)


def validate_table_config(
    config: EmbeddingHashTableConfig, learning_rate_fns: Sized | None = None, name: str = ""
) -> None:
    """Raises `ConfigError` (a ``ValueError``) if no table can be built from ``config``.

    Raises:
        NotImplementedError: ``dynamic_wd_adagrad`` with ``enable_dynamic_wd``, which has no public definition.
    """
    where = f"table {name!r}: " if name else ""
    entry = config.entry_config
    if config.WhichOneof("type") is None:
        raise ConfigError(f"{where}no table kind is set in the config's oneof type; set cuckoo")
    if entry.entry_type not in (EntryConfig.TRAINING, EntryConfig.SERVING):
        raise ConfigError(f"{where}entry_config.entry_type must be TRAINING or SERVING, got {entry.entry_type}")
    if not entry.segments:
        raise ConfigError(f"{where}entry_config.segments must have at least one segment, got none")
    serving = entry.entry_type == EntryConfig.SERVING
    for index, segment in enumerate(entry.segments):
        _validate_segment(segment, serving, f"{where}segments[{index}].")
    if config.skip_zero_embedding and not serving:
        raise ConfigError(f"{where}skip_zero_embedding is only for entry_type SERVING")
    if config.enable_feature_eviction and config.feature_evict_every_n_hours <= 0:
        hours = config.feature_evict_every_n_hours
        raise ConfigError(f"{where}feature_evict_every_n_hours must be above 0, got {hours}")
    validate_slot_expire_time_config(config.slot_expire_time_config, where)
    if learning_rate_fns is not None and len(learning_rate_fns) != len(entry.segments):
        raise ConfigError(
            f"{where}sizes of learning_rate_fns and segments must be equal, "
            f"got {len(learning_rate_fns)} and {len(entry.segments)}"
        )


def _validate_segment(segment: EntryConfig.Segment, serving: bool, where: str) -> None:
    if segment.dim_size <= 0:
        raise ConfigError(f"{where}dim_size must be above 0, got {segment.dim_size}")
    compressor = segment.comp_config.WhichOneof("type")
    if serving and compressor is None:
        raise ConfigError(f"{where}comp_config must be set in every segment of a serving table")
    if compressor is not None:
        _validate_compressor(segment.comp_config, f"{where}comp_config.{compressor}.")
    if serving:
        return
    initializer = segment.init_config.WhichOneof("type")
    if initializer is None:
        raise ConfigError(f"{where}init_config is not set; choose an initializer such as zeros")
    _finite(getattr(segment.init_config, initializer), f"{where}init_config.{initializer}.")
    if initializer == "random_uniform":
        uniform = segment.init_config.random_uniform
        if uniform.minval > uniform.maxval:
            raise ConfigError(
                f"{where}init_config.random_uniform.minval must not exceed maxval, "
                f"got {uniform.minval:g} and {uniform.maxval:g}"
            )
    validate_optimizer(segment.opt_config, segment.dim_size, where)


def validate_optimizer(config: OptimizerConfig, dim_size: int, where: str = "") -> None:
    """Raises `ConfigError` if a segment of ``dim_size`` weights cannot have this optimizer."""
    kind = config.WhichOneof("type")
    if kind is None:
        raise ConfigError(f"{where}opt_config is not set; choose an optimizer such as adagrad")
    message = getattr(config, kind)
    _finite(message, f"{where}opt_config.{kind}.")
    for name in ("beta1", "beta2"):
        if name in message.DESCRIPTOR.fields_by_name and not 0 <= getattr(message, name) < 1:
            raise ConfigError(f"{where}opt_config.{kind}.{name} must be in [0, 1), got {getattr(message, name):g}")
    if kind == "dc":
        raise ConfigError(f"{where}opt_config.dc cannot be built from a table config; use DcOptimizer")
    if kind == "batch_softmax" and dim_size != 1:
        raise ConfigError(f"{where}dim_size must be 1 with opt_config.batch_softmax, got {dim_size}")
    if kind == "dynamic_wd_adagrad" and message.enable_dynamic_wd:
        raise NotImplementedError(
            f"{where}opt_config.dynamic_wd_adagrad.enable_dynamic_wd has no public definition; set it to false"
        )


def _validate_compressor(config: Any, where: str) -> None:
    kind = config.WhichOneof("type")
    _finite(getattr(config, kind), where)
    if kind == "fixed_r8" and not config.fixed_r8.r > 0:
        raise ConfigError(f"{where}r must be above 0, got {config.fixed_r8.r:g}")
    if kind == "one_bit" and config.one_bit.step_size < 1:
        raise ConfigError(f"{where}step_size must be at least 1, got {config.one_bit.step_size}")


def _finite(message: Any, where: str) -> None:
    for field, value in message.ListFields():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where}{field.name} must be finite, got {value}")


def validate_slot_expire_time_config(config: SlotExpireTimeConfig, where: str = "") -> None:
    """Raises `ConfigError` for an override for a slot number that cannot exist."""
    for item in config.slot_expire_times:
        if item.slot > MAX_SLOT_V2:
            raise ConfigError(f"{where}slot_expire_times.slot must be 0..{MAX_SLOT_V2}, got {item.slot}")


def validate_slot_occurrence_threshold_config(config: SlotOccurrenceThresholdConfig) -> None:
    """Raises `ConfigError` for an override for a slot number that cannot exist."""
    for item in config.slot_occurrence_thresholds:
        if item.slot > MAX_SLOT_V2:
            raise ConfigError(f"slot_occurrence_thresholds.slot must be 0..{MAX_SLOT_V2}, got {item.slot}")
