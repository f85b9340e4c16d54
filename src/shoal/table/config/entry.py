"""Table configurations: segments, and a table's configuration with its learning rates."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.errors import ConfigError
from shoal.table.config.compressors import as_compressor_config
from shoal.table.config.initializers import as_initializer_config
from shoal.table.config.learning_rate import LearningRate, LearningRateFunction, check_rate
from shoal.table.config.messages import EmbeddingHashTableConfig, EntryConfig
from shoal.table.config.optimizer import as_optimizer_config


def CombineAsSegment(dim_size: int, initializer: Any, optimizer: Any, compressor: Any = None) -> EntryConfig.Segment:
    """A segment of ``dim_size`` weights; the other arguments are configuration objects or protobuf messages."""
    segment = EntryConfig.Segment(dim_size=dim_size)
    segment.init_config.CopyFrom(as_initializer_config(initializer))
    segment.opt_config.CopyFrom(as_optimizer_config(optimizer))
    if compressor is not None:
        segment.comp_config.CopyFrom(as_compressor_config(compressor))
    return segment


@dataclass
class CuckooHashTableConfig:
    """The kind and expected size of a table. ``feature_evict_every_n_hours`` above 0 evicts stale rows that often."""

    initial_capacity: int = 1
    feature_evict_every_n_hours: int = 0

    def mutate_table(self, table_config: EmbeddingHashTableConfig) -> None:
        """Writes these settings into a table's configuration."""
        table_config.initial_capacity = self.initial_capacity
        table_config.cuckoo.SetInParent()
        if self.feature_evict_every_n_hours > 0:
            table_config.enable_feature_eviction = True
            table_config.feature_evict_every_n_hours = self.feature_evict_every_n_hours


class HashTableConfigInstance:
    """A table's configuration with one learning rate per segment.

    ``str()`` of two instances is equal exactly when their serialized configurations and the ``str()`` of their rates
    are; tables with equal strings can be merged. A lambda's ``str`` is unique, so use numbers or
    `LearningRateFunction` objects for tables that should merge.
    """

    def __init__(
        self,
        table_config: EmbeddingHashTableConfig,
        learning_rate_fns: Sequence[LearningRate],
        extra_restore_names: Iterable[str] | None = None,
    ) -> None:
        if isinstance(extra_restore_names, str):
            raise ConfigError(f"extra_restore_names must be a list of names, got {extra_restore_names!r}")
        self.table_config = table_config
        self.learning_rate_fns = list(learning_rate_fns)
        for index, rate in enumerate(self.learning_rate_fns):
            check_rate(rate, f"learning_rate_fns[{index}]")
        self.extra_restore_names = list(extra_restore_names or ())

    def call_learning_rate_fns_fewer_ops(self, global_step: Any = None) -> list[float]:
        """The learning rates at ``global_step`` (None: the process-wide step), in segment order."""
        if not len(self.learning_rate_fns):
            raise ConfigError("learning_rate_fns must have one learning rate per segment, got none")
        return [_rate(fn, global_step) for fn in self.learning_rate_fns]

    def call_learning_rate_fns(self, global_step: Any = None) -> torch.Tensor:
        """The learning rates at ``global_step`` as a float32 vector."""
        return torch.tensor(self.call_learning_rate_fns_fewer_ops(global_step), dtype=torch.float32, device="cpu")

    def __str__(self) -> str:
        rates = ", ".join(str(fn) for fn in self.learning_rate_fns)
        return f"TableConfigPB: {self.table_config.SerializeToString()}, LearningRateFns: [{rates}]"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"


def _rate(fn: Any, global_step: Any) -> float:
    if type(fn) is float:
        return fn
    if isinstance(fn, LearningRateFunction):
        return float(fn(global_step))
    return float(fn() if callable(fn) else fn)


def infer_dim_size(table_config: EmbeddingHashTableConfig) -> int:
    """The table's dimension: the sum of its segments' dimensions."""
    return sum(segment.dim_size for segment in table_config.entry_config.segments)
