"""Checkpoints of tables and filters: files, folders, increments, and the listeners that a training loop calls."""

from shoal.table.checkpoint.iterate import iterate_table_and_apply, save_as_tensor
from shoal.table.checkpoint.naming import CheckpointNotFoundError
from shoal.table.checkpoint.single import restore_table, save_table

__all__ = [
    "CheckpointNotFoundError",
    "iterate_table_and_apply",
    "restore_table",
    "save_as_tensor",
    "save_table",
]
