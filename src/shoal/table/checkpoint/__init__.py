"""Checkpoints of tables and filters: files, folders, increments, and the listeners that a training loop calls."""

from importlib import import_module
from typing import Any

# Module of this package -> its public names, imported on first use: some need the tables, which need the others.
_PUBLIC: dict[str, tuple[str, ...]] = {
    "chain": ("Checkpoint", "latest_checkpoint", "list_checkpoints", "prune_checkpoints"),
    "filters": (
        "HashFilterCheckpointRestorerListener",
        "HashFilterCheckpointSaverListener",
        "restore_hash_filter",
        "save_hash_filter",
    ),
    "incremental": ("restore_incremental", "save_incremental"),
    "iterate": ("iterate_table_and_apply", "save_as_tensor"),
    "listeners": (
        "HashTableCheckpointRestorerListener",
        "HashTableCheckpointSaverListener",
        "HashTableRestorerSaverListener",
        "MultiHashTableCheckpointRestorerListener",
        "MultiHashTableCheckpointSaverListener",
        "MultiHashTableRestorerSaverListener",
    ),
    "multi": ("feature_stat", "restore_multi_table", "save_multi_table"),
    "naming": ("CheckpointNotFoundError",),
    "single": ("Progress", "restore_table", "save_table"),
}
_WHERE = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'shoal.table.checkpoint' has no attribute {name!r}")
    value = getattr(import_module(f"shoal.table.checkpoint.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
