"""The configuration of features and layouts as plain dataclasses, with exact conversions to and from proto bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class PoolingType(IntEnum):
    """How the vectors of one sample become one value; 2 is not used."""

    SUM = 0
    MEAN = 1
    FIRSTN = 3


class OutType(IntEnum):
    """How slices are placed in a layout."""

    CONCAT = 0
    STACK = 1
    ADDN = 2
    NONE = 3


class Message:
    """Counts the changes of all configurations, so that results derived from them can be renewed."""

    epoch = 0

    def __setattr__(self, name: str, value: Any) -> None:
        Message.epoch += 1
        object.__setattr__(self, name, value)


def _watched(kind: type, *methods: str) -> type:
    """A subclass of a container whose changes are counted as changes of a configuration."""

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def change(self: Any, *args: Any, **kwargs: Any) -> Any:
            Message.epoch += 1
            return method(self, *args, **kwargs)

        return change

    members = {name: counted(getattr(kind, name)) for name in (*methods, "pop", "clear", "__setitem__", "__delitem__")}
    return type(f"Watched{kind.__name__.title()}", (kind,), members | {"__module__": __name__})


WatchedList = _watched(list, "append", "extend", "insert", "remove", "sort", "reverse", "__iadd__", "__imul__")
WatchedDict = _watched(dict, "update", "popitem", "setdefault", "__ior__")


def watch(value: Any) -> Any:
    """The same configuration, with its lists and dicts replaced by ones that count their changes."""
    if isinstance(value, Message):
        for name in value.__dataclass_fields__:  # type: ignore[attr-defined]
            object.__setattr__(value, name, watch(getattr(value, name)))
    elif isinstance(value, list):
        value = value if type(value) is WatchedList else WatchedList(value)
        list.__setitem__(value, slice(None), [watch(item) for item in value])
    elif isinstance(value, dict):
        value = value if type(value) is WatchedDict else WatchedDict(value)
        for item in value.values():
            watch(item)
    return value


@dataclass
class TensorShape(Message):
    """A shape whose first size is -1 for the batch."""

    dims: Sequence[int] = field(default_factory=list)


@dataclass
class SliceConfig(Message):
    """Columns ``[start, end)`` of a feature's embedding; the last four fields are derived and ignored as input."""

    feature_name: str = ""
    start: int = 0
    end: int = 0
    feature_idx: int = 0
    slice_idx: int = 0
    pooling_type: PoolingType | int = PoolingType.SUM
    max_sequence_length: int = 0


@dataclass
class OutConfig(Message):
    """One layout: its slices and the shapes of its tensors (each a `TensorShape` or a list of ints)."""

    slice_configs: list[SliceConfig] = field(default_factory=list)
    out_type: OutType | int = OutType.CONCAT
    shape: list[TensorShape | Sequence[int]] = field(default_factory=list)


@dataclass
class FeatureConfig(Message):
    """A feature: its table, the widths of its embedding's parts and how it is pooled."""

    table: str = ""
    pooling_type: PoolingType | int = PoolingType.SUM
    slice_dims: list[int] = field(default_factory=list)
    max_sequence_length: int = 0


@dataclass
class FeatureConfigs(Message):
    """All features and layouts of a model, by name.

    An op derives its work list from it at the first use, and again after a change of any configuration.
    """

    feature_configs: dict[str, FeatureConfig] = field(default_factory=dict)
    out_configs: dict[str, OutConfig] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_plan"}

    def SerializeToString(self) -> bytes:
        """Proto bytes of ``shoal.example.FeatureConfigs``, map entries in order of their names."""
        from shoal.proto import example_pb2 as pb

        message = pb.FeatureConfigs()
        for name, feature in self.feature_configs.items():
            message.feature_configs[name].CopyFrom(
                pb.FeatureConfig(
                    table=feature.table,
                    pooling_type=int(feature.pooling_type),  # type: ignore[arg-type]
                    slice_dims=feature.slice_dims,
                    max_sequence_length=feature.max_sequence_length,
                )
            )
        for name, out in self.out_configs.items():
            message.out_configs[name].CopyFrom(
                pb.OutConfig(
                    slice_configs=[
                        pb.SliceConfig(**vars(s) | {"pooling_type": int(s.pooling_type)}) for s in out.slice_configs
                    ],
                    out_type=int(out.out_type),  # type: ignore[arg-type]
                    shape=[pb.TensorShape(dims=shape_dims(shape)) for shape in out.shape],
                )
            )
        return message.SerializeToString(deterministic=True)

    @classmethod
    def FromString(cls, data: bytes) -> FeatureConfigs:
        """Parse proto bytes; an unknown enum value is kept as an int."""
        from google.protobuf.message import DecodeError

        from shoal.errors import DataError
        from shoal.proto import example_pb2 as pb

        try:
            message = pb.FeatureConfigs.FromString(data)
        except DecodeError as error:
            raise DataError(f"FeatureConfigs: {len(data)} bytes are not a valid message: {error}") from None
        return cls(
            {
                name: FeatureConfig(
                    f.table, _enum(PoolingType, f.pooling_type), list(f.slice_dims), f.max_sequence_length
                )
                for name, f in sorted(message.feature_configs.items())
            },
            {
                name: OutConfig(
                    [
                        SliceConfig(
                            s.feature_name, s.start, s.end, s.feature_idx, s.slice_idx,
                            _enum(PoolingType, s.pooling_type), s.max_sequence_length,
                        )
                        for s in o.slice_configs
                    ],
                    _enum(OutType, o.out_type),
                    [TensorShape(list(shape.dims)) for shape in o.shape],
                )
                for name, o in sorted(message.out_configs.items())
            },
        )  # fmt: skip


def shape_dims(shape: TensorShape | Sequence[int]) -> list[int]:
    """The sizes of a shape in either form."""
    return [int(d) for d in (shape.dims if isinstance(shape, TensorShape) else shape)]


def _enum(kind: type[IntEnum], value: int) -> Any:
    return kind(value) if value in kind._value2member_map_ else value
