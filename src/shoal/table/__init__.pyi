"""The public names, for type checkers and for `shoal.lazy`, which imports each on first use."""

from shoal.proto.ckpt_info_pb2 import *
from shoal.proto.embedding_hash_table_pb2 import *
from shoal.proto.float_compressor_pb2 import *
from shoal.proto.hash_table_pb2 import *
from shoal.proto.initializer_pb2 import *
from shoal.proto.optimizer_pb2 import *
from shoal.table.budget.evicted import EvictedRows as EvictedRows
from shoal.table.budget.evicted import EvictionStats as EvictionStats
from shoal.table.budget.evicted import MissRatioCurve as MissRatioCurve
from shoal.table.budget.limits import MemoryBudget as MemoryBudget
from shoal.table.budget.policies import EpochLfu as EpochLfu
from shoal.table.budget.policies import EpochLru as EpochLru
from shoal.table.budget.policies import Evict as Evict
from shoal.table.budget.policies import EvictionPolicy as EvictionPolicy
from shoal.table.budget.policies import Lfu as Lfu
from shoal.table.budget.policies import Lru as Lru
from shoal.table.budget.policies import Score as Score
from shoal.table.budget.policies import Slru as Slru
from shoal.table.checkpoint import Checkpoint as Checkpoint
from shoal.table.checkpoint import CheckpointNotFoundError as CheckpointNotFoundError
from shoal.table.checkpoint import HashFilterCheckpointRestorerListener as HashFilterCheckpointRestorerListener
from shoal.table.checkpoint import HashFilterCheckpointSaverListener as HashFilterCheckpointSaverListener
from shoal.table.checkpoint import HashTableCheckpointRestorerListener as HashTableCheckpointRestorerListener
from shoal.table.checkpoint import HashTableCheckpointSaverListener as HashTableCheckpointSaverListener
from shoal.table.checkpoint import HashTableRestorerSaverListener as HashTableRestorerSaverListener
from shoal.table.checkpoint import MultiHashTableCheckpointRestorerListener as MultiHashTableCheckpointRestorerListener
from shoal.table.checkpoint import MultiHashTableCheckpointSaverListener as MultiHashTableCheckpointSaverListener
from shoal.table.checkpoint import MultiHashTableRestorerSaverListener as MultiHashTableRestorerSaverListener
from shoal.table.checkpoint import Progress as Progress
from shoal.table.checkpoint import iterate_table_and_apply as iterate_table_and_apply
from shoal.table.checkpoint import latest_checkpoint as latest_checkpoint
from shoal.table.checkpoint import list_checkpoints as list_checkpoints
from shoal.table.checkpoint import prune_checkpoints as prune_checkpoints
from shoal.table.checkpoint import restore_hash_filter as restore_hash_filter
from shoal.table.checkpoint import restore_incremental as restore_incremental
from shoal.table.checkpoint import restore_table as restore_table
from shoal.table.checkpoint import save_hash_filter as save_hash_filter
from shoal.table.checkpoint import save_incremental as save_incremental
from shoal.table.checkpoint import save_table as save_table
from shoal.table.config.cached_config import CachedConfig as CachedConfig
from shoal.table.config.cached_config import convert_to_cached_config as convert_to_cached_config
from shoal.table.config.compressors import FixedR8Compressor as FixedR8Compressor
from shoal.table.config.compressors import Fp16Compressor as Fp16Compressor
from shoal.table.config.compressors import Fp32Compressor as Fp32Compressor
from shoal.table.config.compressors import OneBitCompressor as OneBitCompressor
from shoal.table.config.dc import DcOptimizer as DcOptimizer
from shoal.table.config.entry import CombineAsSegment as CombineAsSegment
from shoal.table.config.entry import CuckooHashTableConfig as CuckooHashTableConfig
from shoal.table.config.entry import HashTableConfigInstance as HashTableConfigInstance
from shoal.table.config.entry import infer_dim_size as infer_dim_size
from shoal.table.config.initializers import BatchSoftmaxInitializer as BatchSoftmaxInitializer
from shoal.table.config.initializers import ConstantsInitializer as ConstantsInitializer
from shoal.table.config.initializers import OnesInitializer as OnesInitializer
from shoal.table.config.initializers import RandomUniformInitializer as RandomUniformInitializer
from shoal.table.config.initializers import ZerosInitializer as ZerosInitializer
from shoal.table.config.learning_rate import LearningRateFunction as LearningRateFunction
from shoal.table.config.learning_rate import PolynomialDecay as PolynomialDecay
from shoal.table.config.learning_rate import get_global_step as get_global_step
from shoal.table.config.learning_rate import set_global_step as set_global_step
from shoal.table.config.optimizers import *
from shoal.table.cuda.cache import CachedHashTable as CachedHashTable
from shoal.table.export_mode import ExportContext as ExportContext
from shoal.table.export_mode import ExportMode as ExportMode
from shoal.table.export_mode import enter_export_mode as enter_export_mode
from shoal.table.export_mode import get_current_export_ctx as get_current_export_ctx
from shoal.table.export_mode import is_dry_run_or_exporting as is_dry_run_or_exporting
from shoal.table.export_mode import is_exporting as is_exporting
from shoal.table.export_mode import is_exporting_distributed as is_exporting_distributed
from shoal.table.export_mode import is_exporting_standalone as is_exporting_standalone
from shoal.table.filters.admission import DummyHashFilter as DummyHashFilter
from shoal.table.filters.admission import HashFilter as HashFilter
from shoal.table.filters.admission import ProbabilisticFilter as ProbabilisticFilter
from shoal.table.filters.admission import SlidingHashFilter as SlidingHashFilter
from shoal.table.filters.admission import create_dummy_hash_filter as create_dummy_hash_filter
from shoal.table.filters.admission import create_hash_filter as create_hash_filter
from shoal.table.filters.admission import create_hash_filters as create_hash_filters
from shoal.table.filters.admission import create_probabilistic_filter as create_probabilistic_filter
from shoal.table.filters.intercept import intercept_gradient as intercept_gradient
from shoal.table.fused import extract_slot_from_entry as extract_slot_from_entry
from shoal.table.fused import fused_apply_gradient as fused_apply_gradient
from shoal.table.fused import fused_lookup as fused_lookup
from shoal.table.fused import hash_table_lookup_gradient as hash_table_lookup_gradient
from shoal.table.merged import MergedMultiTypeHashTable as MergedMultiTypeHashTable
from shoal.table.multi import MultiHashTable as MultiHashTable
from shoal.table.multi_type import MultiTypeHashTable as MultiTypeHashTable
from shoal.table.registry import reset_registry as reset_registry
from shoal.table.small import test_hash_table as test_hash_table
from shoal.table.small import vocab_hash_table as vocab_hash_table
from shoal.table.table import HashTable as HashTable
from shoal.table.table import hash_table_from_config as hash_table_from_config
from shoal.table.tracking.touched import TouchedKeySet as TouchedKeySet
