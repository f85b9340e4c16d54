"""The public names, for type checkers and for `shoal.lazy`, which imports each on first use."""

from shoal.table.checkpoint.chain import Checkpoint as Checkpoint
from shoal.table.checkpoint.chain import latest_checkpoint as latest_checkpoint
from shoal.table.checkpoint.chain import list_checkpoints as list_checkpoints
from shoal.table.checkpoint.chain import prune_checkpoints as prune_checkpoints
from shoal.table.checkpoint.filters import HashFilterCheckpointRestorerListener as HashFilterCheckpointRestorerListener
from shoal.table.checkpoint.filters import HashFilterCheckpointSaverListener as HashFilterCheckpointSaverListener
from shoal.table.checkpoint.filters import restore_hash_filter as restore_hash_filter
from shoal.table.checkpoint.filters import save_hash_filter as save_hash_filter
from shoal.table.checkpoint.incremental import restore_incremental as restore_incremental
from shoal.table.checkpoint.incremental import save_incremental as save_incremental
from shoal.table.checkpoint.iterate import iterate_table_and_apply as iterate_table_and_apply
from shoal.table.checkpoint.iterate import save_as_tensor as save_as_tensor
from shoal.table.checkpoint.listeners import HashTableCheckpointRestorerListener as HashTableCheckpointRestorerListener
from shoal.table.checkpoint.listeners import HashTableCheckpointSaverListener as HashTableCheckpointSaverListener
from shoal.table.checkpoint.listeners import HashTableRestorerSaverListener as HashTableRestorerSaverListener
from shoal.table.checkpoint.listeners import (
    MultiHashTableCheckpointRestorerListener as MultiHashTableCheckpointRestorerListener,
)
from shoal.table.checkpoint.listeners import (
    MultiHashTableCheckpointSaverListener as MultiHashTableCheckpointSaverListener,
)
from shoal.table.checkpoint.listeners import MultiHashTableRestorerSaverListener as MultiHashTableRestorerSaverListener
from shoal.table.checkpoint.multi import feature_stat as feature_stat
from shoal.table.checkpoint.multi import restore_multi_table as restore_multi_table
from shoal.table.checkpoint.multi import save_multi_table as save_multi_table
from shoal.table.checkpoint.naming import CheckpointNotFoundError as CheckpointNotFoundError
from shoal.table.checkpoint.single import Progress as Progress
from shoal.table.checkpoint.single import restore_table as restore_table
from shoal.table.checkpoint.single import save_table as save_table
