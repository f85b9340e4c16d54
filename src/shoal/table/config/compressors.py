"""Compressor classes for configurations: how serving tables store weights and how training lookups round them."""

from typing import Any

from shoal.table.config.messages import FloatCompressorConfig
from shoal.table.config.optimizer import Choice, as_config


class _Compressor(Choice):
    message = FloatCompressorConfig
    rename = {"fixed_range": "r"}


class OneBitCompressor(_Compressor, kind="one_bit"):
    step_size: int = 200
    amplitude: float = 0.05


class FixedR8Compressor(_Compressor, kind="fixed_r8"):
    fixed_range: float = 1.0


class Fp16Compressor(_Compressor, kind="fp16"): ...


class Fp32Compressor(_Compressor, kind="fp32"): ...


def as_compressor_config(compressor: Any) -> FloatCompressorConfig:
    """The message for a compressor object; a message is returned unchanged."""
    return as_config(compressor, FloatCompressorConfig, "compressor")
