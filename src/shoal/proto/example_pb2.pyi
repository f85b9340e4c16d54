from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FeatureListType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INDIVIDUAL: _ClassVar[FeatureListType]
    SHARED: _ClassVar[FeatureListType]

class PoolingType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SUM: _ClassVar[PoolingType]
    MEAN: _ClassVar[PoolingType]
    FIRSTN: _ClassVar[PoolingType]

class OutType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONCAT: _ClassVar[OutType]
    STACK: _ClassVar[OutType]
    ADDN: _ClassVar[OutType]
    NONE: _ClassVar[OutType]
INDIVIDUAL: FeatureListType
SHARED: FeatureListType
SUM: PoolingType
MEAN: PoolingType
FIRSTN: PoolingType
CONCAT: OutType
STACK: OutType
ADDN: OutType
NONE: OutType

class FidList(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, value: _Optional[_Iterable[int]] = ...) -> None: ...

class Feature(_message.Message):
    __slots__ = ("fid_v1_list", "fid_v2_list")
    FID_V1_LIST_FIELD_NUMBER: _ClassVar[int]
    FID_V2_LIST_FIELD_NUMBER: _ClassVar[int]
    fid_v1_list: FidList
    fid_v2_list: FidList
    def __init__(self, fid_v1_list: _Optional[_Union[FidList, _Mapping]] = ..., fid_v2_list: _Optional[_Union[FidList, _Mapping]] = ...) -> None: ...

class NamedFeature(_message.Message):
    __slots__ = ("name", "feature", "id", "sorted_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FEATURE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    SORTED_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    feature: Feature
    id: int
    sorted_id: int
    def __init__(self, name: _Optional[str] = ..., feature: _Optional[_Union[Feature, _Mapping]] = ..., id: _Optional[int] = ..., sorted_id: _Optional[int] = ...) -> None: ...

class Example(_message.Message):
    __slots__ = ("named_feature",)
    NAMED_FEATURE_FIELD_NUMBER: _ClassVar[int]
    named_feature: _containers.RepeatedCompositeFieldContainer[NamedFeature]
    def __init__(self, named_feature: _Optional[_Iterable[_Union[NamedFeature, _Mapping]]] = ...) -> None: ...

class NamedFeatureList(_message.Message):
    __slots__ = ("name", "feature", "type", "id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FEATURE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    feature: _containers.RepeatedCompositeFieldContainer[Feature]
    type: FeatureListType
    id: int
    def __init__(self, name: _Optional[str] = ..., feature: _Optional[_Iterable[_Union[Feature, _Mapping]]] = ..., type: _Optional[_Union[FeatureListType, str]] = ..., id: _Optional[int] = ...) -> None: ...

class ExampleBatch(_message.Message):
    __slots__ = ("named_feature_list", "batch_size")
    NAMED_FEATURE_LIST_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    named_feature_list: _containers.RepeatedCompositeFieldContainer[NamedFeatureList]
    batch_size: int
    def __init__(self, named_feature_list: _Optional[_Iterable[_Union[NamedFeatureList, _Mapping]]] = ..., batch_size: _Optional[int] = ...) -> None: ...

class SliceConfig(_message.Message):
    __slots__ = ("feature_name", "start", "end", "feature_idx", "slice_idx", "pooling_type", "max_sequence_length")
    FEATURE_NAME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FEATURE_IDX_FIELD_NUMBER: _ClassVar[int]
    SLICE_IDX_FIELD_NUMBER: _ClassVar[int]
    POOLING_TYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    feature_name: str
    start: int
    end: int
    feature_idx: int
    slice_idx: int
    pooling_type: PoolingType
    max_sequence_length: int
    def __init__(self, feature_name: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., feature_idx: _Optional[int] = ..., slice_idx: _Optional[int] = ..., pooling_type: _Optional[_Union[PoolingType, str]] = ..., max_sequence_length: _Optional[int] = ...) -> None: ...

class TensorShape(_message.Message):
    __slots__ = ("dims",)
    DIMS_FIELD_NUMBER: _ClassVar[int]
    dims: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dims: _Optional[_Iterable[int]] = ...) -> None: ...

class OutConfig(_message.Message):
    __slots__ = ("slice_configs", "out_type", "shape")
    SLICE_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    OUT_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    slice_configs: _containers.RepeatedCompositeFieldContainer[SliceConfig]
    out_type: OutType
    shape: _containers.RepeatedCompositeFieldContainer[TensorShape]
    def __init__(self, slice_configs: _Optional[_Iterable[_Union[SliceConfig, _Mapping]]] = ..., out_type: _Optional[_Union[OutType, str]] = ..., shape: _Optional[_Iterable[_Union[TensorShape, _Mapping]]] = ...) -> None: ...

class FeatureConfig(_message.Message):
    __slots__ = ("table", "pooling_type", "slice_dims", "max_sequence_length")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    POOLING_TYPE_FIELD_NUMBER: _ClassVar[int]
    SLICE_DIMS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    table: str
    pooling_type: PoolingType
    slice_dims: _containers.RepeatedScalarFieldContainer[int]
    max_sequence_length: int
    def __init__(self, table: _Optional[str] = ..., pooling_type: _Optional[_Union[PoolingType, str]] = ..., slice_dims: _Optional[_Iterable[int]] = ..., max_sequence_length: _Optional[int] = ...) -> None: ...

class FeatureConfigs(_message.Message):
    __slots__ = ("feature_configs", "out_configs")
    class FeatureConfigsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: FeatureConfig
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[FeatureConfig, _Mapping]] = ...) -> None: ...
    class OutConfigsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: OutConfig
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[OutConfig, _Mapping]] = ...) -> None: ...
    FEATURE_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    OUT_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    feature_configs: _containers.MessageMap[str, FeatureConfig]
    out_configs: _containers.MessageMap[str, OutConfig]
    def __init__(self, feature_configs: _Optional[_Mapping[str, FeatureConfig]] = ..., out_configs: _Optional[_Mapping[str, OutConfig]] = ...) -> None: ...
