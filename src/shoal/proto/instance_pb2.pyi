from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InstanceFidList(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, value: _Optional[_Iterable[int]] = ...) -> None: ...

class InstanceFeature(_message.Message):
    __slots__ = ("name", "fid", "fid_list")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FID_FIELD_NUMBER: _ClassVar[int]
    FID_LIST_FIELD_NUMBER: _ClassVar[int]
    name: str
    fid: _containers.RepeatedScalarFieldContainer[int]
    fid_list: _containers.RepeatedCompositeFieldContainer[InstanceFidList]
    def __init__(self, name: _Optional[str] = ..., fid: _Optional[_Iterable[int]] = ..., fid_list: _Optional[_Iterable[_Union[InstanceFidList, _Mapping]]] = ...) -> None: ...

class Instance(_message.Message):
    __slots__ = ("fid", "feature")
    FID_FIELD_NUMBER: _ClassVar[int]
    FEATURE_FIELD_NUMBER: _ClassVar[int]
    fid: _containers.RepeatedScalarFieldContainer[int]
    feature: _containers.RepeatedCompositeFieldContainer[InstanceFeature]
    def __init__(self, fid: _Optional[_Iterable[int]] = ..., feature: _Optional[_Iterable[_Union[InstanceFeature, _Mapping]]] = ...) -> None: ...
