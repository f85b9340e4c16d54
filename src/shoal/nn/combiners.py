"""Combiners: turn the embeddings of one row's ids into one value by sum, mean, or the first few in order."""

from abc import ABC, abstractmethod
from numbers import Integral
from typing import Any

from torch import Tensor

from shoal.errors import ConfigError, ContractError
from shoal.ops import checks
from shoal.ops.ragged_ops import fused_value_rowids
from shoal.ops.reduce.by_index import mean_by_index, sum_by_index
from shoal.ops.reduce.by_splits import first_n
from shoal.ragged import Ragged


class Combiner(ABC):
    """Combines a ragged batch's embeddings row by row. ``max_seq_length`` is 0 unless the result is a sequence."""

    def __init__(self, max_seq_length: int) -> None:
        self._max_seq_length = max_seq_length

    @property
    def max_seq_length(self) -> int:
        """Number of embeddings of a row that are kept in order; 0 when they are pooled."""
        return self._max_seq_length

    @abstractmethod
    def combine(self, key: Ragged, embedding: Any, name: str | None = None) -> Tensor:
        """Pool ``embedding`` ``[n, d]``, one row per value of ``key``; only the row splits of ``key`` are used."""

    def _arguments(self, key: Any, embedding: Any) -> tuple[Ragged, Tensor]:
        name = type(self).__name__
        if not isinstance(key, Ragged):
            key = checks.ragged(key, name, "key")
        embedding = checks.floats(embedding, name, "embedding")
        count = key.values.nrows() if isinstance(key.values, Ragged) else key.values.shape[0]
        if embedding.dim() != 2:
            raise ConfigError(f"{name}: embedding must be 2-D, got shape {list(embedding.shape)}")
        checks.check_same(name, "the number of embedding rows", embedding.shape[0], "the number of key values", count)
        if key.row_splits.device != embedding.device:
            key = Ragged.trusted(key.values, key.row_splits.to(embedding.device))
        return key, embedding

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._max_seq_length or ''})"


class ReduceSum(Combiner):
    """``[B, d]``: the sum of each row's embeddings; zero for an empty row."""

    def __init__(self) -> None:
        super().__init__(0)

    def combine(self, key: Ragged, embedding: Any, name: str | None = None) -> Tensor:
        key, embedding = self._arguments(key, embedding)
        return sum_by_index(fused_value_rowids(key), embedding, key.nrows())


class ReduceMean(Combiner):
    """``[B, d]``: the mean of each row's embeddings; zero for an empty row."""

    def __init__(self) -> None:
        super().__init__(0)

    def combine(self, key: Ragged, embedding: Any, name: str | None = None) -> Tensor:
        key, embedding = self._arguments(key, embedding)
        return mean_by_index(fused_value_rowids(key), embedding, key.nrows())


class FirstN(Combiner):
    """``[B, seq_length, d]``: the first ``seq_length`` embeddings of each row, zero padded."""

    def __init__(self, seq_length: int) -> None:
        if not isinstance(seq_length, Integral) or seq_length < 1:
            raise ContractError(f"FirstN: seq_length must be a whole number of at least 1, got {seq_length!r}")
        super().__init__(int(seq_length))

    def combine(self, key: Ragged, embedding: Any, name: str | None = None) -> Tensor:
        key, embedding = self._arguments(key, embedding)
        return first_n(embedding, key.row_splits, self.max_seq_length)
