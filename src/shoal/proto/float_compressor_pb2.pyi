from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FloatCompressorConfig(_message.Message):
    __slots__ = ("fp32", "fp16", "fixed_r8", "one_bit")
    class Fp32(_message.Message):
        __slots__ = ("dim_size",)
        DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
        dim_size: int
        def __init__(self, dim_size: _Optional[int] = ...) -> None: ...
    class Fp16(_message.Message):
        __slots__ = ("dim_size",)
        DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
        dim_size: int
        def __init__(self, dim_size: _Optional[int] = ...) -> None: ...
    class FixedR8(_message.Message):
        __slots__ = ("dim_size", "r")
        DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
        R_FIELD_NUMBER: _ClassVar[int]
        dim_size: int
        r: float
        def __init__(self, dim_size: _Optional[int] = ..., r: _Optional[float] = ...) -> None: ...
    class OneBit(_message.Message):
        __slots__ = ("dim_size", "step_size", "init_scale", "max_scale", "amplitude")
        DIM_SIZE_FIELD_NUMBER: _ClassVar[int]
        STEP_SIZE_FIELD_NUMBER: _ClassVar[int]
        INIT_SCALE_FIELD_NUMBER: _ClassVar[int]
        MAX_SCALE_FIELD_NUMBER: _ClassVar[int]
        AMPLITUDE_FIELD_NUMBER: _ClassVar[int]
        dim_size: int
        step_size: int
        init_scale: float
        max_scale: float
        amplitude: float
        def __init__(self, dim_size: _Optional[int] = ..., step_size: _Optional[int] = ..., init_scale: _Optional[float] = ..., max_scale: _Optional[float] = ..., amplitude: _Optional[float] = ...) -> None: ...
    FP32_FIELD_NUMBER: _ClassVar[int]
    FP16_FIELD_NUMBER: _ClassVar[int]
    FIXED_R8_FIELD_NUMBER: _ClassVar[int]
    ONE_BIT_FIELD_NUMBER: _ClassVar[int]
    fp32: FloatCompressorConfig.Fp32
    fp16: FloatCompressorConfig.Fp16
    fixed_r8: FloatCompressorConfig.FixedR8
    one_bit: FloatCompressorConfig.OneBit
    def __init__(self, fp32: _Optional[_Union[FloatCompressorConfig.Fp32, _Mapping]] = ..., fp16: _Optional[_Union[FloatCompressorConfig.Fp16, _Mapping]] = ..., fixed_r8: _Optional[_Union[FloatCompressorConfig.FixedR8, _Mapping]] = ..., one_bit: _Optional[_Union[FloatCompressorConfig.OneBit, _Mapping]] = ...) -> None: ...
