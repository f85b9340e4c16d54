"""Small ready-made tables for tests and first steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from shoal.table.config.compressors import Fp32Compressor
from shoal.table.config.entry import CombineAsSegment, HashTableConfigInstance
from shoal.table.config.initializers import ZerosInitializer
from shoal.table.config.learning_rate import LearningRate
from shoal.table.config.messages import (
    CuckooEmbeddingHashTableConfig,
    EmbeddingHashTableConfig,
    EntryConfig,
    SlotExpireTimeConfig,
    SlotOccurrenceThresholdConfig,
)
from shoal.table.config.optimizers import AdagradOptimizer, SgdOptimizer
from shoal.table.filters.admission import create_hash_filter
from shoal.table.table import HashTable, hash_table_from_config

_unnamed = itertools.count()


def test_hash_table(
    dim_size: int,
    enable_hash_filter: bool = False,
    name_suffix: str | None = None,
    learning_rate: LearningRate | Callable[[], float] = 1.0,
    occurrence_threshold: int = 0,
    use_adagrad: bool = False,
    expire_time: int = 36500,
    sync_client: Any = None,
    saver_parallel: int = -1,
    extra_restore_names: Iterable[str] | None = None,
) -> HashTable:
    """A small table for tests: one segment, zeros, SGD (or Adagrad), fp32. The default suffix is unique."""
    config = EmbeddingHashTableConfig(
        entry_config=EntryConfig(
            segments=[
                CombineAsSegment(
                    dim_size,
                    ZerosInitializer(),
                    AdagradOptimizer() if use_adagrad else SgdOptimizer(),
                    Fp32Compressor(),
                )
            ]
        ),
        cuckoo=CuckooEmbeddingHashTableConfig(),
        slot_expire_time_config=SlotExpireTimeConfig(default_expire_time=expire_time),
    )
    hash_filter = None
    suffix = f"test_{next(_unnamed)}" if name_suffix is None else name_suffix
    if enable_hash_filter:
        thresholds = SlotOccurrenceThresholdConfig(default_occurrence_threshold=occurrence_threshold)
        hash_filter = create_hash_filter(3000000, 7, thresholds.SerializeToString(), suffix)
    return hash_table_from_config(
        HashTableConfigInstance(config, [learning_rate], extra_restore_names),
        hash_filter,
        suffix,
        sync_client,
        saver_parallel,
    )


test_hash_table.__test__ = False  # type: ignore[attr-defined]  # not a test, despite its name


def vocab_hash_table(
    vocab_size: int, dim_size: int, enable_hash_filter: bool = False, learning_rate: LearningRate = 1.0
) -> HashTable:
    """`test_hash_table` under another name, for compatibility; ``vocab_size`` is ignored."""
    return test_hash_table(dim_size, enable_hash_filter, learning_rate=learning_rate)
