"""The layout of a row in GPU memory: the words of the CPU table's row, and the kernels' parameters of each segment."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal import _core
from shoal.table.config.messages import EmbeddingHashTableConfig
from shoal.table.config.native import CODECS, OPTIMIZERS, native_layout, native_segment
from shoal.table.cuda.launch import power_of_2


def _state(fields: list[tuple[int, int]]) -> tuple[int, int, bool]:
    """The number of state vectors, the kind of tail (see `_start_rows` in kernels/rows.py), and whether the state
    starts with the accumulator."""
    types = [type_ for type_, _ in fields]
    tail = 1 if 2 in types else (0, 3, 2)[types.count(1)]
    return types.count(0), tail, any(start == 1 for _, start in fields)


_STATES = {name: _state(fields) for name, fields in _core.OPTIMIZERS}
_TAIL_WORDS = (0, 2, 2, 1)
_CODE_BYTES = {"fp32": 4, "fp16": 2, "fixed_r8": 1, "one_bit": 1}  # bytes of a weight in a serving row


@dataclass(frozen=True)
class Segment:
    """One segment in the form that its kernels use."""

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
    """The initializer's low end (or constant), its high end, and the largest number below that."""
    init: int
    accumulator: float
    code: int = 0
    """First word of its codes in a serving row."""

    @property
    def width(self) -> int:
        return power_of_2(self.dim)

    @property
    def held(self) -> int:
        """The number of words of its state."""
        return self.vectors * self.dim + _TAIL_WORDS[self.tail]

    @property
    def codec(self) -> str:
        return CODECS[self.native.codec]

    @property
    def kind(self) -> str:
        return OPTIMIZERS[self.native.opt]

    @property
    def fp_fusion(self) -> bool:
        """Whether kernels can use fused multiply-adds; they make FTRL's difference of roots inexact."""
        return self.kind not in ("ftrl", "group_ftrl")

    @property
    def code_bytes(self) -> int:
        return self.dim * _CODE_BYTES[self.codec]

    @property
    def unit(self) -> float:
        """The factor of a code: the step of fixed_r8, the amplitude of one_bit."""
        return self.native.r / 128 if self.codec == "fixed_r8" else self.native.amplitude

    def numbers(self, lr: float, scale: float) -> tuple[float, ...]:
        """The parameters of the optimizer's formula, in the order that the kernels unpack."""
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
            float(s.corrected_epsilon),
        )


@dataclass(frozen=True)
class RowLayout:
    """The layout of a row. ``words`` is the number of words with data, ``stride`` the number allocated."""

    segments: tuple[Segment, ...]
    dim: int
    words: int
    stride: int
    native: _core.Layout
    skip_zero: bool = False
    """Whether all-zero vectors of serving rows are not stored."""

    @property
    def serving(self) -> bool:
        return self.native.serving

    @property
    def plain(self) -> bool:
        """Whether lookups return the stored weights unchanged."""
        return self.serving or all(s.codec in ("fp32", "fp16") for s in self.segments)

    def from_native(self, rows: Tensor) -> Tensor:
        """Converts serving rows of a CPU table, uint8 ``[n, bytes]`` with codes without gaps, to words."""
        out = torch.zeros(rows.shape[0], 4 * self.words, dtype=torch.uint8, device="cpu")
        for s, begin in zip(self.segments, self._native_codes(), strict=True):
            out[:, 4 * s.code : 4 * s.code + s.code_bytes] = rows[:, begin : begin + s.code_bytes]
        return out.view(torch.float32)

    def to_native(self, words: Tensor) -> Tensor:
        """Converts words to serving rows of a CPU table; the inverse of `from_native`."""
        rows = words.contiguous().view(torch.uint8)
        return torch.cat([rows[:, 4 * s.code : 4 * s.code + s.code_bytes] for s in self.segments], 1)

    def _native_codes(self) -> list[int]:
        return [0, *itertools.accumulate(s.code_bytes for s in self.segments)][:-1]


def row_layout(config: EmbeddingHashTableConfig, first_column: int = 0) -> RowLayout:
    """The layout of a validated configuration; ``first_column`` as in `HashTable.from_config`."""
    native = native_layout(config)
    if native.serving:
        return _serving_layout(config, native)
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
                "init": s.init + (4 * first_column if s.init == 3 else 0),
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
    return RowLayout(tuple(segments), weight, state, _stride(state), native)


def _serving_layout(config: EmbeddingHashTableConfig, native: _core.Layout) -> RowLayout:
    """The layout of a serving row: the codes of its segments, each aligned to a word."""
    segments: list[Segment] = []
    weight = code = 0
    for index, message in enumerate(config.entry_config.segments):
        s = native_segment(message, True)
        none = (0.0, 0.0, 0.0)
        segments.append(Segment(s, index, s.dim, weight, 0, 0, 0, none, 0, 0.0, code))
        weight += s.dim
        code += math.ceil(segments[-1].code_bytes / 4)
    return RowLayout(tuple(segments), weight, code, _stride(code), native, config.skip_zero_embedding)


def _stride(words: int) -> int:
    """Rows are aligned to 16 bytes, so that four words are read at once; wide rows to 32, the unit of device memory."""
    grain = 8 if words >= 16 else 4 if words >= 4 else 1
    return math.ceil(words / grain) * grain
