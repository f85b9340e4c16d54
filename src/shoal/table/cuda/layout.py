"""A row in GPU memory: the words of the CPU table's row, and what kernels must know of each segment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal import _core
from shoal.errors import UnsupportedError
from shoal.table.cuda.launch import power_of_2
from shoal.table.messages import EmbeddingHashTableConfig
from shoal.table.native import CODECS, OPTIMIZERS, native_layout, native_segment

# Optimizer -> vectors of state, what follows them (see `fresh` in row_kernels), whether the first vector starts with
# the initial accumulator.
_STATES: dict[str, tuple[int, int, bool]] = {
    "sgd": (0, 0, False),
    "adagrad": (1, 0, True),
    "dynamic_wd_adagrad": (1, 1, True),
    "adadelta": (2, 0, False),
    "adam": (2, 2, False),
    "amsgrad": (3, 2, False),
    "momentum": (1, 0, False),
    "moving_average": (0, 0, False),
    "rmsprop": (1, 0, False),
    "rmspropv2": (1, 0, False),
    "ftrl": (2, 0, True),
    "group_ftrl": (2, 0, True),
    "group_adagrad": (0, 3, True),
    "batch_softmax": (0, 1, False),
    "rowwise_adagrad": (0, 3, True),
    "adamw": (2, 2, False),
    "lamb": (2, 2, False),
}
_TAIL_WORDS = (0, 2, 2, 1)


@dataclass(frozen=True)
class Segment:
    """One segment as its kernels see it."""

    native: _core.Segment
    index: int
    dim: int
    weight: int
    """First word of its weights in a row."""
    state: int
    """First word of its state."""
    vectors: int
    tail: int
    first: tuple[float, float, float]
    """Of the initializer: the low end (or the constant), the high end, and the largest number below it."""
    init: int
    accumulator: float

    @property
    def width(self) -> int:
        return power_of_2(self.dim)

    @property
    def codec(self) -> str:
        return CODECS[self.native.codec]

    @property
    def kind(self) -> str:
        return OPTIMIZERS[self.native.opt]

    def numbers(self, lr: float, scale: float) -> tuple[float, ...]:
        """What the optimizer's formula needs, in the order that the kernels unpack."""
        s = self.native
        return (
            float(lr),
            s.weight_decay,
            s.beta1,
            s.beta2,
            s.epsilon,
            s.beta,
            s.l1,
            s.l2,
            self.accumulator,
            s.amplitude,
            float(scale),
        )


@dataclass(frozen=True)
class RowLayout:
    """All of a row. ``words`` are what it holds, ``stride`` what it takes."""

    segments: tuple[Segment, ...]
    dim: int
    words: int
    stride: int
    native: _core.Layout

    @property
    def plain(self) -> bool:
        """Whether lookups are copies of the weights."""
        return all(s.codec in ("fp32", "fp16") for s in self.segments)


def row_layout(config: EmbeddingHashTableConfig, name: str) -> RowLayout:
    """The layout of a validated configuration.

    Raises:
        UnsupportedError: the table is for serving, which the CPU's tables do.
    """
    native = native_layout(config)
    if native.serving:
        raise UnsupportedError(f"table {name!r}: serving entries live in CPU tables; build it without device='cuda'")
    parts: list[dict[str, Any]] = []
    weight = 0
    for index, message in enumerate(config.entry_config.segments):
        s = native_segment(message, False)
        vectors, tail, accumulated = _STATES[OPTIMIZERS[s.opt]]
        low, high = (1.0, 1.0) if s.init == 1 else (0.0, 0.0) if s.init == 0 else (s.init_low, s.init_high)
        last = float(np.nextafter(np.float32(high), np.float32(low))) if high > low else low
        parts.append(
            {
                "native": s,
                "index": index,
                "dim": s.dim,
                "weight": weight,
                "vectors": vectors,
                "tail": tail,
                "init": s.init,
                "first": (low, high, last),
                "accumulator": s.initial_accumulator if accumulated else 0.0,
            }
        )
        weight += s.dim
    state = weight
    segments = []
    for part in parts:
        segments.append(Segment(state=state, **part))
        state += part["vectors"] * part["dim"] + _TAIL_WORDS[part["tail"]]
    assert 4 * state == native.row_bytes, (state, native.row_bytes)
    # Rows begin at 16 bytes, so that four words are read at once; wide ones at 32, the unit of device memory.
    grain = 8 if state >= 16 else 4 if state >= 4 else 1
    return RowLayout(tuple(segments), weight, state, math.ceil(state / grain) * grain, native)
