"""Local embedding tables: configuration, tables, admission filters, touched keys, checkpoints."""

from importlib import import_module
from typing import Any

# Module under shoal.table -> the public names that live in it; imported on first use.
_PUBLIC: dict[str, tuple[str, ...]] = {
    "checkpoint": (
        "Checkpoint",
        "CheckpointNotFoundError",
        "HashFilterCheckpointRestorerListener",
        "HashFilterCheckpointSaverListener",
        "HashTableCheckpointRestorerListener",
        "HashTableCheckpointSaverListener",
        "HashTableRestorerSaverListener",
        "MultiHashTableCheckpointRestorerListener",
        "MultiHashTableCheckpointSaverListener",
        "MultiHashTableRestorerSaverListener",
        "Progress",
        "iterate_table_and_apply",
        "latest_checkpoint",
        "list_checkpoints",
        "prune_checkpoints",
        "restore_hash_filter",
        "restore_incremental",
        "restore_table",
        "save_hash_filter",
        "save_incremental",
        "save_table",
    ),
    "compressors": ("FixedR8Compressor", "Fp16Compressor", "Fp32Compressor", "OneBitCompressor"),
    "dc": ("DcOptimizer",),
    "entry": ("CombineAsSegment", "CuckooHashTableConfig", "HashTableConfigInstance", "infer_dim_size"),
    "filters": (
        "DummyHashFilter",
        "HashFilter",
        "ProbabilisticFilter",
        "SlidingHashFilter",
        "create_dummy_hash_filter",
        "create_hash_filter",
        "create_hash_filters",
        "create_probabilistic_filter",
        "intercept_gradient",
    ),
    "fused": ("extract_slot_from_entry", "fused_apply_gradient", "fused_lookup", "hash_table_lookup_gradient"),
    "initializers": (
        "BatchSoftmaxInitializer",
        "ConstantsInitializer",
        "OnesInitializer",
        "RandomUniformInitializer",
        "ZerosInitializer",
    ),
    "export_mode": (
        "ExportContext",
        "ExportMode",
        "enter_export_mode",
        "get_current_export_ctx",
        "is_dry_run_or_exporting",
        "is_exporting",
        "is_exporting_distributed",
        "is_exporting_standalone",
    ),
    "learning_rate": ("LearningRateFunction", "PolynomialDecay", "get_global_step", "set_global_step"),
    "merged": ("MergedMultiTypeHashTable",),
    "multi": ("CachedConfig", "MultiHashTable", "convert_to_cached_config"),
    "multi_type": ("MultiTypeHashTable",),
    "optimizers": (
        "AdaGradWithGroupLassoOptimizer",
        "AdadeltaOptimizer",
        "AdagradOptimizer",
        "AdamOptimizer",
        "AdamWOptimizer",
        "AmsgradOptimizer",
        "BatchSoftmaxOptimizer",
        "DynamicWdAdagradOptimizer",
        "FTRLWithGroupSparsityOptimizer",
        "FtrlOptimizer",
        "LambOptimizer",
        "MomentumOptimizer",
        "MovingAverageOptimizer",
        "Optimizer",
        "RmspropOptimizer",
        "RmspropV2Optimizer",
        "RowwiseAdagradOptimizer",
        "SgdOptimizer",
        "StochasticRoundingFloat16OptimizerWrapper",
    ),
    "touched": ("TouchedKeySet",),
    "registry": ("reset_registry",),
    "small": ("test_hash_table", "vocab_hash_table"),
    "table": ("HashTable", "hash_table_from_config"),
}
_WHERE = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = list(_WHERE)  # and the messages, by name


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(import_module(f"shoal.table.{_WHERE[name]}"), name)
    else:  # a message: AdamOptimizerConfig, EntryDump, ...
        messages = import_module("shoal.table.messages")
        if name not in messages.NAMES:
            raise AttributeError(f"module 'shoal.table' has no attribute {name!r}")
        value = getattr(messages, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_WHERE, *import_module("shoal.table.messages").NAMES])
