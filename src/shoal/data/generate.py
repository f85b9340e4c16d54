"""Synthetic click logs in Criteo's format, drawn from a known model."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shoal.durable import appearing, make_parents
from shoal.errors import ConfigError

_CHUNK = 1 << 14
# Roughly the cardinalities of the features in Criteo's one-week data set, in order.
_CARDINALITY = (
    1460, 583, 500_000, 200_000, 305, 24, 12_517, 633, 3, 93_145, 5_683, 400_000, 3_194, 27, 14_992, 300_000, 10,
    5_652, 2_173, 4, 350_000, 18, 15, 150_000, 105, 80_000,
)  # fmt: skip
_HEX = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriteoLike:
    """``rows`` lines with a label, 13 counts and 26 categories of 8 hex digits each; some values are missing.

    Clicks depend on biases of the categories, on pairs of categories, and on the counts; about a quarter of the lines
    are clicks. A few categories are frequent and most are rare. ``scale`` multiplies the number of categories.
    """

    rows: int
    seed: int = 0
    scale: float = 1.0
    first_row: int = 0
    """Skip this many lines, to draw different lines from the same model."""

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise ConfigError(f"generate: the number of rows must be >= 0, got {self.rows}")
        if not self.scale > 0:
            raise ConfigError(f"generate: scale must be above 0, got {self.scale}")

    def chunks(self) -> Iterator[bytes]:
        """Yield the text, several thousand lines at a time."""
        for number, begin in enumerate(range(0, self.rows, _CHUNK)):
            random = np.random.default_rng((self.seed, number + -(-self.first_row // _CHUNK)))
            yield self._chunk(random, min(_CHUNK, self.rows - begin))

    def _chunk(self, random: np.random.Generator, n: int) -> bytes:
        counts = np.floor(np.exp(random.normal(1.0, 1.5, (n, 13)))).astype(np.int64) - 1
        cardinality = np.maximum(3, np.array(_CARDINALITY) * self.scale)
        # Exponentials of uniform numbers give rank r a weight of about 1 / r.
        rank = np.floor(np.exp(random.random((n, 26)) * np.log(cardinality))).astype(np.uint64)
        words = _mix(rank * np.uint64(26) + np.arange(26, dtype=np.uint64) + np.uint64(self.seed << 40))
        bias = _normal(words) * np.where(cardinality < 20_000, 0.42, 0.2)
        pairs = sum(_normal(words[:, a] ^ words[:, b]) for a, b in ((0, 5), (8, 16), (3, 21), (13, 19), (6, 22)))
        logit = -1.6 + bias.sum(1) + 0.4 * pairs + 0.12 * (np.log1p(np.maximum(counts[:, :4], 0)) - 1).sum(1)
        label = random.random(n) < 1 / (1 + np.exp(-logit))
        return _lines(label, counts, random.random((n, 13)) < 0.1, words, random.random((n, 26)) < 0.03)


def write_criteo(path: str | os.PathLike[str], config: CriteoLike) -> int:
    """Write the lines, as gzip if the name ends in ``.gz``; return the size. The file appears once it is complete."""
    path = os.fspath(path)
    make_parents(path)
    with appearing(path) as part, gzip.open(part, "wb", 3) if path.endswith(".gz") else open(part, "wb") as file:
        for chunk in config.chunks():
            file.write(chunk)
    return os.path.getsize(path)


def _mix(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(32))


def _normal(words: np.ndarray) -> np.ndarray:
    """Derive a roughly normal number from each word: the sum of four uniform ones."""
    mixed = _mix(words)
    parts = [((mixed >> np.uint64(16 * i)) & np.uint64(0xFFFF)).astype(np.float64) / 65536 - 0.5 for i in range(4)]
    return sum(parts) * np.sqrt(3.0)


def _lines(
    label: np.ndarray, counts: np.ndarray, no_count: np.ndarray, words: np.ndarray, no_word: np.ndarray
) -> bytes:
    """Lay out cells of fixed width next to each other; zero bytes are padding and are dropped at the end."""
    n = len(label)
    out = np.zeros((n, 2 + 13 * 9 + 26 * 9), dtype=np.uint8)
    out[:, 0] = ord("0") + label
    out[:, 1] = ord("\t")
    numbers = out[:, 2 : 2 + 13 * 9].reshape(n, 13, 9)
    text = np.char.mod("%d", np.minimum(counts, 9_999_999)).astype("S8")
    numbers[..., :8] = np.where(no_count[..., None], 0, text.view(np.uint8).reshape(n, 13, 8))
    numbers[..., 8] = ord("\t")
    cells = out[:, 2 + 13 * 9 :].reshape(n, 26, 9)
    for digit in range(8):
        cells[..., digit] = np.where(no_word, 0, _HEX[(words >> np.uint64(4 * digit)).astype(np.int64) & 15])
    cells[..., 8] = ord("\t")
    cells[:, 25, 8] = ord("\n")
    return out[out != 0].tobytes()
