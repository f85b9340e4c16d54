"""The protobuf messages of tables, under the names that users import from `shoal.table`."""

from shoal.proto import (
    ckpt_info_pb2,
    embedding_hash_table_pb2,
    float_compressor_pb2,
    hash_table_pb2,
    initializer_pb2,
    optimizer_pb2,
)
from shoal.proto.ckpt_info_pb2 import CkptInfo
from shoal.proto.embedding_hash_table_pb2 import (
    CuckooEmbeddingHashTableConfig,
    EmbeddingHashTableConfig,
    EntryConfig,
    EntryDump,
    HashFilterSplitDataDump,
    HashFilterSplitMetaDump,
    MultiEmbeddingHashTableConfig,
    MultiHashTableMetadata,
    SlidingHashFilterMetaDump,
    SlotExpireTimeConfig,
    SlotOccurrenceThresholdConfig,
)
from shoal.proto.float_compressor_pb2 import FloatCompressorConfig
from shoal.proto.hash_table_pb2 import HashTableProto, MonolithCheckpointState, MultiHashTableProto
from shoal.proto.initializer_pb2 import InitializerConfig
from shoal.proto.optimizer_pb2 import OptimizerConfig, OptimizerDump, SingleOptimizerDump

# The ones above are written out for readers and type checkers; the optimizers' and initializers' own configuration
# and dump messages (AdamOptimizerConfig, AdamOptimizerDump, ZerosInitializerConfig, ...) come from here.
_FILES = (
    ckpt_info_pb2,
    embedding_hash_table_pb2,
    float_compressor_pb2,
    hash_table_pb2,
    initializer_pb2,
    optimizer_pb2,
)
_ALL = {name: getattr(file, name) for file in _FILES for name in file.DESCRIPTOR.message_types_by_name}
globals().update(_ALL)

NAMES = tuple(sorted(_ALL))

__all__ = [
    "CkptInfo",
    "CuckooEmbeddingHashTableConfig",
    "EmbeddingHashTableConfig",
    "EntryConfig",
    "EntryDump",
    "FloatCompressorConfig",
    "HashFilterSplitDataDump",
    "HashFilterSplitMetaDump",
    "HashTableProto",
    "InitializerConfig",
    "MonolithCheckpointState",
    "MultiEmbeddingHashTableConfig",
    "MultiHashTableMetadata",
    "MultiHashTableProto",
    "OptimizerConfig",
    "OptimizerDump",
    "SingleOptimizerDump",
    "SlidingHashFilterMetaDump",
    "SlotExpireTimeConfig",
    "SlotOccurrenceThresholdConfig",
]
