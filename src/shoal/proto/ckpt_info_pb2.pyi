from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class CkptInfo(_message.Message):
    __slots__ = ("slot_counts", "feature_counts")
    class SlotCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class FeatureCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SLOT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    slot_counts: _containers.ScalarMap[int, int]
    feature_counts: _containers.ScalarMap[str, int]
    def __init__(self, slot_counts: _Optional[_Mapping[int, int]] = ..., feature_counts: _Optional[_Mapping[str, int]] = ...) -> None: ...
