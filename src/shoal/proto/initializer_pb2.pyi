from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ZerosInitializerConfig(_message.Message):
    __slots__ = ("dim_size",)
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    def __init__(self, dim_size: _Optional[int] = ...) -> None: ...

class OnesInitializerConfig(_message.Message):
    __slots__ = ("dim_size",)
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    def __init__(self, dim_size: _Optional[int] = ...) -> None: ...

class ConstantsInitializerConfig(_message.Message):
    __slots__ = ("dim_size", "constant")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONSTANT_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    constant: float
    def __init__(self, dim_size: _Optional[int] = ..., constant: _Optional[float] = ...) -> None: ...

class RandomUniformInitializerConfig(_message.Message):
    __slots__ = ("dim_size", "minval", "maxval")
    DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
    MINVAL_FIELD_NUMBER: _ClassVar[int]
    MAXVAL_FIELD_NUMBER: _ClassVar[int]
    dim_size: int
    minval: float
    maxval: float
    def __init__(self, dim_size: _Optional[int] = ..., minval: _Optional[float] = ..., maxval: _Optional[float] = ...) -> None: ...

class InitializerConfig(_message.Message):
    __slots__ = ("zeros", "random_uniform", "ones", "constants")
    ZEROS_FIELD_NUMBER: _ClassVar[int]
    RANDOM_UNIFORM_FIELD_NUMBER: _ClassVar[int]
    ONES_FIELD_NUMBER: _ClassVar[int]
    CONSTANTS_FIELD_NUMBER: _ClassVar[int]
    zeros: ZerosInitializerConfig
    random_uniform: RandomUniformInitializerConfig
    ones: OnesInitializerConfig
    constants: ConstantsInitializerConfig
    def __init__(self, zeros: _Optional[_Union[ZerosInitializerConfig, _Mapping]] = ..., random_uniform: _Optional[_Union[RandomUniformInitializerConfig, _Mapping]] = ..., ones: _Optional[_Union[OnesInitializerConfig, _Mapping]] = ..., constants: _Optional[_Union[ConstantsInitializerConfig, _Mapping]] = ...) -> None: ...
