"""Checkpoints of tables and filters: files, folders, increments, and the listeners that a training loop calls."""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "shoal.table.checkpoint.chain": (
            "Checkpoint",
            "latest_checkpoint",
            "list_checkpoints",
            "prune_checkpoints",
        ),
        "shoal.table.checkpoint.filters": (
            "HashFilterCheckpointRestorerListener",
            "HashFilterCheckpointSaverListener",
            "restore_hash_filter",
            "save_hash_filter",
        ),
        "shoal.table.checkpoint.incremental": (
            "restore_incremental",
            "save_incremental",
        ),
        "shoal.table.checkpoint.iterate": (
            "iterate_table_and_apply",
            "save_as_tensor",
        ),
        "shoal.table.checkpoint.listeners": (
            "HashTableCheckpointRestorerListener",
            "HashTableCheckpointSaverListener",
            "HashTableRestorerSaverListener",
            "MultiHashTableCheckpointRestorerListener",
            "MultiHashTableCheckpointSaverListener",
            "MultiHashTableRestorerSaverListener",
        ),
        "shoal.table.checkpoint.multi": (
            "feature_stat",
            "restore_multi_table",
            "save_multi_table",
        ),
        "shoal.table.checkpoint.naming": ("CheckpointNotFoundError",),
        "shoal.table.checkpoint.single": (
            "Progress",
            "restore_table",
            "save_table",
        ),
    },
)
