from shoal.proto import float_compressor_pb2 as _float_compressor_pb2
from shoal.proto import initializer_pb2 as _initializer_pb2
from shoal.proto import optimizer_pb2 as _optimizer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EntryConfig(_message.Message):
    __slots__ = ("segments", "entry_type")
    class EntryType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[EntryConfig.EntryType]
        TRAINING: _ClassVar[EntryConfig.EntryType]
        SERVING: _ClassVar[EntryConfig.EntryType]
    UNKNOWN: EntryConfig.EntryType
    TRAINING: EntryConfig.EntryType
    SERVING: EntryConfig.EntryType
    class Segment(_message.Message):
        __slots__ = ("init_config", "opt_config", "comp_config", "dim_size")
        INIT_CONFIG_FIELD_NUMBER: _ClassVar[int]
        OPT_CONFIG_FIELD_NUMBER: _ClassVar[int]
        COMP_CONFIG_FIELD_NUMBER: _ClassVar[int]
        DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
        init_config: _initializer_pb2.InitializerConfig
        opt_config: _optimizer_pb2.OptimizerConfig
        comp_config: _float_compressor_pb2.FloatCompressorConfig
        dim_size: int
        def __init__(self, init_config: _Optional[_Union[_initializer_pb2.InitializerConfig, _Mapping]] = ..., opt_config: _Optional[_Union[_optimizer_pb2.OptimizerConfig, _Mapping]] = ..., comp_config: _Optional[_Union[_float_compressor_pb2.FloatCompressorConfig, _Mapping]] = ..., dim_size: _Optional[int] = ...) -> None: ...
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    ENTRY_TYPE_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[EntryConfig.Segment]
    entry_type: EntryConfig.EntryType
    def __init__(self, segments: _Optional[_Iterable[_Union[EntryConfig.Segment, _Mapping]]] = ..., entry_type: _Optional[_Union[EntryConfig.EntryType, str]] = ...) -> None: ...

class EntryDump(_message.Message):
    __slots__ = ("id", "num", "opt", "last_update_ts_sec")
    ID_FIELD_NUMBER: _ClassVar[int]
    NUM_FIELD_NUMBER: _ClassVar[int]
    OPT_FIELD_NUMBER: _ClassVar[int]
    LAST_UPDATE_TS_SEC_FIELD_NUMBER: _ClassVar[int]
    id: int
    num: _containers.RepeatedScalarFieldContainer[float]
    opt: _optimizer_pb2.OptimizerDump
    last_update_ts_sec: int
    def __init__(self, id: _Optional[int] = ..., num: _Optional[_Iterable[float]] = ..., opt: _Optional[_Union[_optimizer_pb2.OptimizerDump, _Mapping]] = ..., last_update_ts_sec: _Optional[int] = ...) -> None: ...

class SlotExpireTimeConfig(_message.Message):
    __slots__ = ("slot_expire_times", "default_expire_time", "default_expire_hours")
    class SlotExpireTime(_message.Message):
        __slots__ = ("slot", "expire_time", "expire_hours")
        SLOT_FIELD_NUMBER: _ClassVar[int]
        EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
        EXPIRE_HOURS_FIELD_NUMBER: _ClassVar[int]
        slot: int
        expire_time: int
        expire_hours: int
        def __init__(self, slot: _Optional[int] = ..., expire_time: _Optional[int] = ..., expire_hours: _Optional[int] = ...) -> None: ...
    SLOT_EXPIRE_TIMES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_EXPIRE_HOURS_FIELD_NUMBER: _ClassVar[int]
    slot_expire_times: _containers.RepeatedCompositeFieldContainer[SlotExpireTimeConfig.SlotExpireTime]
    default_expire_time: int
    default_expire_hours: int
    def __init__(self, slot_expire_times: _Optional[_Iterable[_Union[SlotExpireTimeConfig.SlotExpireTime, _Mapping]]] = ..., default_expire_time: _Optional[int] = ..., default_expire_hours: _Optional[int] = ...) -> None: ...

class EvictionConfig(_message.Message):
    __slots__ = ("policy", "max_rows", "max_bytes", "min_age_s", "epoch_s", "if_better")
    class Policy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LRU: _ClassVar[EvictionConfig.Policy]
        LFU: _ClassVar[EvictionConfig.Policy]
        EPOCH_LRU: _ClassVar[EvictionConfig.Policy]
        EPOCH_LFU: _ClassVar[EvictionConfig.Policy]
        SCORE: _ClassVar[EvictionConfig.Policy]
        SLRU: _ClassVar[EvictionConfig.Policy]
    LRU: EvictionConfig.Policy
    LFU: EvictionConfig.Policy
    EPOCH_LRU: EvictionConfig.Policy
    EPOCH_LFU: EvictionConfig.Policy
    SCORE: EvictionConfig.Policy
    SLRU: EvictionConfig.Policy
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    MIN_AGE_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_S_FIELD_NUMBER: _ClassVar[int]
    IF_BETTER_FIELD_NUMBER: _ClassVar[int]
    policy: EvictionConfig.Policy
    max_rows: int
    max_bytes: int
    min_age_s: int
    epoch_s: int
    if_better: bool
    def __init__(self, policy: _Optional[_Union[EvictionConfig.Policy, str]] = ..., max_rows: _Optional[int] = ..., max_bytes: _Optional[int] = ..., min_age_s: _Optional[int] = ..., epoch_s: _Optional[int] = ..., if_better: bool = ...) -> None: ...

class CuckooEmbeddingHashTableConfig(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EmbeddingHashTableConfig(_message.Message):
    __slots__ = ("entry_config", "entry_type", "initial_capacity", "slot_expire_time_config", "cuckoo", "enable_feature_eviction", "feature_evict_every_n_hours", "skip_zero_embedding", "eviction")
    class EntryType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PACKED: _ClassVar[EmbeddingHashTableConfig.EntryType]
        RAW: _ClassVar[EmbeddingHashTableConfig.EntryType]
    PACKED: EmbeddingHashTableConfig.EntryType
    RAW: EmbeddingHashTableConfig.EntryType
    ENTRY_CONFIG_FIELD_NUMBER: _ClassVar[int]
    ENTRY_TYPE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    SLOT_EXPIRE_TIME_CONFIG_FIELD_NUMBER: _ClassVar[int]
    CUCKOO_FIELD_NUMBER: _ClassVar[int]
    ENABLE_FEATURE_EVICTION_FIELD_NUMBER: _ClassVar[int]
    FEATURE_EVICT_EVERY_N_HOURS_FIELD_NUMBER: _ClassVar[int]
    SKIP_ZERO_EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    EVICTION_FIELD_NUMBER: _ClassVar[int]
    entry_config: EntryConfig
    entry_type: EmbeddingHashTableConfig.EntryType
    initial_capacity: int
    slot_expire_time_config: SlotExpireTimeConfig
    cuckoo: CuckooEmbeddingHashTableConfig
    enable_feature_eviction: bool
    feature_evict_every_n_hours: int
    skip_zero_embedding: bool
    eviction: EvictionConfig
    def __init__(self, entry_config: _Optional[_Union[EntryConfig, _Mapping]] = ..., entry_type: _Optional[_Union[EmbeddingHashTableConfig.EntryType, str]] = ..., initial_capacity: _Optional[int] = ..., slot_expire_time_config: _Optional[_Union[SlotExpireTimeConfig, _Mapping]] = ..., cuckoo: _Optional[_Union[CuckooEmbeddingHashTableConfig, _Mapping]] = ..., enable_feature_eviction: bool = ..., feature_evict_every_n_hours: _Optional[int] = ..., skip_zero_embedding: bool = ..., eviction: _Optional[_Union[EvictionConfig, _Mapping]] = ...) -> None: ...

class MultiEmbeddingHashTableConfig(_message.Message):
    __slots__ = ("names", "configs")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    CONFIGS_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    configs: _containers.RepeatedCompositeFieldContainer[EmbeddingHashTableConfig]
    def __init__(self, names: _Optional[_Iterable[str]] = ..., configs: _Optional[_Iterable[_Union[EmbeddingHashTableConfig, _Mapping]]] = ...) -> None: ...

class SlotOccurrenceThresholdConfig(_message.Message):
    __slots__ = ("slot_occurrence_thresholds", "default_occurrence_threshold")
    class SlotOccurrenceThreshold(_message.Message):
        __slots__ = ("slot", "occurrence_threshold")
        SLOT_FIELD_NUMBER: _ClassVar[int]
        OCCURRENCE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
        slot: int
        occurrence_threshold: int
        def __init__(self, slot: _Optional[int] = ..., occurrence_threshold: _Optional[int] = ...) -> None: ...
    SLOT_OCCURRENCE_THRESHOLDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_OCCURRENCE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    slot_occurrence_thresholds: _containers.RepeatedCompositeFieldContainer[SlotOccurrenceThresholdConfig.SlotOccurrenceThreshold]
    default_occurrence_threshold: int
    def __init__(self, slot_occurrence_thresholds: _Optional[_Iterable[_Union[SlotOccurrenceThresholdConfig.SlotOccurrenceThreshold, _Mapping]]] = ..., default_occurrence_threshold: _Optional[int] = ...) -> None: ...

class SlidingHashFilterMetaDump(_message.Message):
    __slots__ = ("split_num", "max_forward_step", "max_backward_step", "max_step", "head", "head_increment", "failure_count")
    SPLIT_NUM_FIELD_NUMBER: _ClassVar[int]
    MAX_FORWARD_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_BACKWARD_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    HEAD_INCREMENT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_COUNT_FIELD_NUMBER: _ClassVar[int]
    split_num: int
    max_forward_step: int
    max_backward_step: int
    max_step: int
    head: int
    head_increment: int
    failure_count: int
    def __init__(self, split_num: _Optional[int] = ..., max_forward_step: _Optional[int] = ..., max_backward_step: _Optional[int] = ..., max_step: _Optional[int] = ..., head: _Optional[int] = ..., head_increment: _Optional[int] = ..., failure_count: _Optional[int] = ...) -> None: ...

class HashFilterSplitMetaDump(_message.Message):
    __slots__ = ("failure_count", "total_size", "num_elements", "fill_rate", "sliding_hash_filter_meta")
    FAILURE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    FILL_RATE_FIELD_NUMBER: _ClassVar[int]
    SLIDING_HASH_FILTER_META_FIELD_NUMBER: _ClassVar[int]
    failure_count: int
    total_size: int
    num_elements: int
    fill_rate: float
    sliding_hash_filter_meta: SlidingHashFilterMetaDump
    def __init__(self, failure_count: _Optional[int] = ..., total_size: _Optional[int] = ..., num_elements: _Optional[int] = ..., fill_rate: _Optional[float] = ..., sliding_hash_filter_meta: _Optional[_Union[SlidingHashFilterMetaDump, _Mapping]] = ...) -> None: ...

class HashFilterSplitDataDump(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[_Iterable[int]] = ...) -> None: ...

class MultiHashTableMetadata(_message.Message):
    __slots__ = ("table_name", "num_entries")
    TABLE_NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    table_name: str
    num_entries: int
    def __init__(self, table_name: _Optional[str] = ..., num_entries: _Optional[int] = ...) -> None: ...
