"""Reference versions of initializers, serving codecs, quantization-aware lookups and stochastic rounding."""

from typing import Any

import numpy as np

from shoal.table.config.messages import FloatCompressorConfig, InitializerConfig

F = np.float32
FLOAT16_MAX = F(65504)


def initial_weights(config: InitializerConfig, dim: int, random: np.random.Generator) -> np.ndarray:
    """The weights of a new row."""
    match config.WhichOneof("type"):
        case "ones":
            return np.ones(dim, F)
        case "constants":
            return np.full(dim, config.constants.constant, F)
        case "random_uniform":
            low, high = F(config.random_uniform.minval), F(config.random_uniform.maxval)
            drawn = low + (high - low) * random.random(dim, F)
            return np.where(drawn < high, drawn, low)  # rounding must not reach the open end
    return np.zeros(dim, F)


def stochastic_round_float16(w: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Rounds each weight to the float16 above it with probability ``(w - lo) / (hi - lo)``, else to the one below.

    ``uniform`` are random numbers in [0, 1). Exact float16 values are unchanged; larger ones are clamped to its range.
    """
    w = np.clip(w, -FLOAT16_MAX, FLOAT16_MAX)
    near = w.astype(np.float16)
    wide = near.astype(F)
    with np.errstate(over="ignore"):
        lo = np.where(wide <= w, near, np.nextafter(near, np.float16(-np.inf))).astype(F)
        hi = np.where(wide >= w, near, np.nextafter(near, np.float16(np.inf))).astype(F)
    gap = np.where(hi > lo, hi - lo, F(1))
    return np.where(wide == w, w, np.where(uniform < (w - lo) / gap, hi, lo)).astype(F)


def fixed_r8_codes(w: np.ndarray, r: float) -> np.ndarray:
    """int8 multiples of ``r / 128``: rounded to the nearest, ties away from zero, and clamped; NaN is 0."""
    step = F(r) / F(128)
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = np.trunc((w + np.copysign(step / F(2), w)) / step)
        return np.clip(np.nan_to_num(scaled, nan=0.0, posinf=127, neginf=-128), -128, 127).astype(np.int8)


def fixed_r8_values(codes: np.ndarray, r: float) -> np.ndarray:
    return codes.astype(F) * (F(r) / F(128))


def encode(config: FloatCompressorConfig, w: np.ndarray) -> np.ndarray:
    """The codes that a serving table stores for a segment."""
    match config.WhichOneof("type"):
        case "fp16":
            with np.errstate(over="ignore"):
                return w.astype(np.float16)
        case "fixed_r8":
            return fixed_r8_codes(w, config.fixed_r8.r)
        case "one_bit":
            return np.where(w > 0, 1, -1).astype(np.int8)
    return w.astype(F)


def decode(config: FloatCompressorConfig, codes: np.ndarray) -> np.ndarray:
    """The weights that a lookup in a serving table returns."""
    match config.WhichOneof("type"):
        case "fixed_r8":
            return fixed_r8_values(codes, config.fixed_r8.r)
        case "one_bit":
            return codes.astype(F) * F(config.one_bit.amplitude)
    return codes.astype(F)


class HashNet:
    """The ``one_bit`` segment in training: a tanh that sharpens as training proceeds. One scale for all rows."""

    def __init__(self, config: Any) -> None:
        self.amplitude = F(config.amplitude)
        self.init_scale = config.init_scale
        self.max_scale = config.max_scale
        self.step_size = config.step_size
        self.scale = F(config.init_scale)

    def advance(self, global_step: int) -> None:
        """Updates the scale; called before the optimizer step of each row."""
        if global_step >= 0 and global_step % self.step_size == 0:
            self.scale = F(min(self.init_scale * (1 + 0.005 * global_step) ** 0.5, self.max_scale))

    def value(self, w: np.ndarray) -> np.ndarray:
        return self.amplitude * np.tanh(self.scale * w)

    def gradient(self, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        t = np.tanh(self.scale * w)
        return g * self.amplitude * self.scale * (F(1) - t * t)
