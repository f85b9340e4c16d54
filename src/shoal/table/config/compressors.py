"""How serving tables store weights and what training lookups show, as the classes configurations are written with."""

from dataclasses import dataclass
from typing import Any

from shoal.table.config.messages import FloatCompressorConfig
from shoal.table.config.optimizer import as_config, write_fields


@dataclass
class OneBitCompressor:
    step_size: int = 200
    amplitude: float = 0.05

    def as_proto(self) -> FloatCompressorConfig:
        config = FloatCompressorConfig()
        write_fields(self, config.one_bit)
        return config


@dataclass
class FixedR8Compressor:
    fixed_range: float = 1.0

    def as_proto(self) -> FloatCompressorConfig:
        config = FloatCompressorConfig()
        write_fields(self, config.fixed_r8, {"fixed_range": "r"})
        return config


@dataclass
class Fp16Compressor:
    def as_proto(self) -> FloatCompressorConfig:
        config = FloatCompressorConfig()
        write_fields(self, config.fp16)
        return config


@dataclass
class Fp32Compressor:
    def as_proto(self) -> FloatCompressorConfig:
        config = FloatCompressorConfig()
        write_fields(self, config.fp32)
        return config


def as_compressor_config(compressor: Any) -> FloatCompressorConfig:
    """The message of a compressor object, or the message itself."""
    return as_config(compressor, FloatCompressorConfig, "compressor")
