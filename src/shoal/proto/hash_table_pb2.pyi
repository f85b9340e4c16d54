from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HashTableProto(_message.Message):
    __slots__ = ("table_tensor", "dim_size", "shared_name", "slot_expire_time_config", "learning_rate_tensor", "saver_parallel", "extra_restore_names", "export_share_embedding")
    class ExportShareEmbedding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        kBoolNone: _ClassVar[HashTableProto.ExportShareEmbedding]
        kFalse: _ClassVar[HashTableProto.ExportShareEmbedding]
        kTrue: _ClassVar[HashTableProto.ExportShareEmbedding]
    kBoolNone: HashTableProto.ExportShareEmbedding
    kFalse: HashTableProto.ExportShareEmbedding
    kTrue: HashTableProto.ExportShareEmbedding
    TABLE_TENSOR_FIELD_NUMBER: _ClassVar[int]
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHARED_NAME_FIELD_NUMBER: _ClassVar[int]
    SLOT_EXPIRE_TIME_CONFIG_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_TENSOR_FIELD_NUMBER: _ClassVar[int]
    SAVER_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    EXTRA_RESTORE_NAMES_FIELD_NUMBER: _ClassVar[int]
    EXPORT_SHARE_EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    table_tensor: str
    dim_size: int
    shared_name: str
    slot_expire_time_config: bytes
    learning_rate_tensor: str
    saver_parallel: int
    extra_restore_names: _containers.RepeatedScalarFieldContainer[str]
    export_share_embedding: HashTableProto.ExportShareEmbedding
    def __init__(self, table_tensor: _Optional[str] = ..., dim_size: _Optional[int] = ..., shared_name: _Optional[str] = ..., slot_expire_time_config: _Optional[bytes] = ..., learning_rate_tensor: _Optional[str] = ..., saver_parallel: _Optional[int] = ..., extra_restore_names: _Optional[_Iterable[str]] = ..., export_share_embedding: _Optional[_Union[HashTableProto.ExportShareEmbedding, str]] = ...) -> None: ...

class MultiHashTableProto(_message.Message):
    __slots__ = ("dims", "slot_expire_time_config", "table_names", "learning_rate_tensor", "shared_name", "saver_parallel", "initializer_op", "handle_tensor")
    DIMS_FIELD_NUMBER: _ClassVar[int]
    SLOT_EXPIRE_TIME_CONFIG_FIELD_NUMBER: _ClassVar[int]
    TABLE_NAMES_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_TENSOR_FIELD_NUMBER: _ClassVar[int]
    SHARED_NAME_FIELD_NUMBER: _ClassVar[int]
    SAVER_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_OP_FIELD_NUMBER: _ClassVar[int]
    HANDLE_TENSOR_FIELD_NUMBER: _ClassVar[int]
    dims: _containers.RepeatedScalarFieldContainer[int]
    slot_expire_time_config: bytes
    table_names: _containers.RepeatedScalarFieldContainer[str]
    learning_rate_tensor: str
    shared_name: str
    saver_parallel: int
    initializer_op: str
    handle_tensor: str
    def __init__(self, dims: _Optional[_Iterable[int]] = ..., slot_expire_time_config: _Optional[bytes] = ..., table_names: _Optional[_Iterable[str]] = ..., learning_rate_tensor: _Optional[str] = ..., shared_name: _Optional[str] = ..., saver_parallel: _Optional[int] = ..., initializer_op: _Optional[str] = ..., handle_tensor: _Optional[str] = ...) -> None: ...

class MonolithCheckpointState(_message.Message):
    __slots__ = ("exempt_model_checkpoint_paths", "last_checkpoint_save_timestamp", "builtin_hash_table_type")
    class HashTableType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[MonolithCheckpointState.HashTableType]
        CUCKOO_HASH_MAP: _ClassVar[MonolithCheckpointState.HashTableType]
        MULTI_CUCKOO_HASH_MAP: _ClassVar[MonolithCheckpointState.HashTableType]
    UNKNOWN: MonolithCheckpointState.HashTableType
    CUCKOO_HASH_MAP: MonolithCheckpointState.HashTableType
    MULTI_CUCKOO_HASH_MAP: MonolithCheckpointState.HashTableType
    EXEMPT_MODEL_CHECKPOINT_PATHS_FIELD_NUMBER: _ClassVar[int]
    LAST_CHECKPOINT_SAVE_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    BUILTIN_HASH_TABLE_TYPE_FIELD_NUMBER: _ClassVar[int]
    exempt_model_checkpoint_paths: _containers.RepeatedScalarFieldContainer[str]
    last_checkpoint_save_timestamp: int
    builtin_hash_table_type: MonolithCheckpointState.HashTableType
    def __init__(self, exempt_model_checkpoint_paths: _Optional[_Iterable[str]] = ..., last_checkpoint_save_timestamp: _Optional[int] = ..., builtin_hash_table_type: _Optional[_Union[MonolithCheckpointState.HashTableType, str]] = ...) -> None: ...
