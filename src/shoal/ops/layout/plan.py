"""A layout configuration, checked once and flattened into the work list that the kernels read."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.proto.feature_configs import (
    FeatureConfigs,
    Message,
    OutConfig,
    OutType,
    PoolingType,
    SliceConfig,
    shape_dims,
    watch,
)


@dataclass(frozen=True)
class Task:
    """One slice of one layout, with the fields of the native ``LayoutTask``.

    Its value for sample ``b``, sequence position ``t`` and column ``c`` is element
    ``b * sample_stride + place + t * sequence_stride + c`` of tensor ``output``.
    """

    output: int
    place: int
    sample_stride: int
    sequence_stride: int
    feature: int
    start: int
    width: int
    pooling: int
    max_length: int
    adds: int


@dataclass(frozen=True)
class Plan:
    """A configuration in the form that the op reads."""

    key: str
    """The configuration's proto bytes in base64; identifies the plan in compiled and exported programs."""
    feature_names: tuple[str, ...]
    widths: tuple[int, ...]
    """Per feature, the width of one embedding row."""
    tables: tuple[tuple[int, ...], ...]
    """Per table in sorted order, its features in sorted order."""
    shapes: tuple[tuple[int, ...], ...]
    """Per output; the first size is -1 for the batch."""
    tasks: tuple[Task, ...]
    """In order of features, then in the order of the layouts."""
    native: Tensor
    """The tasks as int64 ``[tasks, fields]``."""


def plan_of(configs: Any) -> Plan:
    """The plan of a configuration: an object, its proto bytes, or a protobuf message with the same fields."""
    if not isinstance(configs, FeatureConfigs):
        return plan_of_bytes(_message_bytes(configs))
    epoch = Message.epoch
    cached = configs.__dict__.get("_plan")
    if cached is not None and cached[0] == epoch:
        return cached[1]
    try:
        data = configs.SerializeToString()
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"feature_cfgs: a field has a value of the wrong type or range: {error}") from error
    plan = plan_of_bytes(data)
    watch(configs)
    object.__setattr__(configs, "_plan", (epoch, plan))
    return plan


def plan_of_bytes(data: bytes) -> Plan:
    """The plan of a configuration in proto bytes."""
    return plan_of_key(base64.b64encode(data).decode())


@lru_cache(maxsize=256)
def plan_of_key(key: str) -> Plan:
    """The plan with this `Plan.key`."""
    return _build(key, FeatureConfigs.FromString(base64.b64decode(key)))


def _message_bytes(configs: Any) -> bytes:
    if isinstance(configs, bytes):
        return configs
    if hasattr(configs, "SerializeToString"):
        return configs.SerializeToString(deterministic=True)
    raise ConfigError(f"feature_cfgs must be a FeatureConfigs, got {type(configs).__name__}")


def _byte_order(names: Any) -> list[str]:
    return sorted(names, key=lambda name: name.encode())


def _build(key: str, configs: FeatureConfigs) -> Plan:
    features = _byte_order(configs.feature_configs)
    index = {name: f for f, name in enumerate(features)}
    for name, config in configs.feature_configs.items():
        if not isinstance(config.pooling_type, PoolingType):
            raise ConfigError(f"feature {name!r}: pooling_type must be 0, 1 or 3, got {config.pooling_type}")
        if config.pooling_type == PoolingType.FIRSTN and config.max_sequence_length < 1:
            raise ConfigError(
                f"feature {name!r}: FIRSTN needs max_sequence_length >= 1, got {config.max_sequence_length}"
            )
        if any(dim < 0 for dim in config.slice_dims):
            raise ConfigError(f"feature {name!r}: slice_dims must be >= 0, got {list(config.slice_dims)}")
    tables = _byte_order({config.table for config in configs.feature_configs.values()})
    shapes: list[tuple[int, ...]] = []
    tasks: list[Task] = []
    for name in _byte_order(configs.out_configs):
        _Layout(name, configs, configs.out_configs[name], index).add(shapes, tasks)
    tasks.sort(key=lambda task: task.feature)
    rows = [[getattr(task, field) for field in Task.__dataclass_fields__] for task in tasks]
    return Plan(
        key,
        tuple(features),
        tuple(sum(configs.feature_configs[name].slice_dims) for name in features),
        tuple(tuple(index[n] for n in features if configs.feature_configs[n].table == table) for table in tables),
        tuple(shapes),
        tuple(tasks),
        torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(rows), len(Task.__dataclass_fields__)),
    )


class _Layout:
    """Checks one layout and appends its shapes and tasks."""

    def __init__(self, name: str, configs: FeatureConfigs, out: OutConfig, index: dict[str, int]) -> None:
        self.name, self.configs, self.out, self.index = name, configs, out, index

    def _fail(self, message: str) -> None:
        raise ConfigError(f"layout {self.name!r}: {message}")

    def add(self, shapes: list[tuple[int, ...]], tasks: list[Task]) -> None:
        kind, slices = self.out.out_type, self.out.slice_configs
        if not isinstance(kind, OutType):
            self._fail(f"out_type must be 0, 1, 2 or 3, got {kind}")
        for s in slices:
            self._check_slice(s)
        wanted = len(slices) if kind == OutType.NONE else 1
        if len(self.out.shape) != wanted:
            rule = f"one shape per slice, {wanted}" if kind == OutType.NONE else "one shape"
            self._fail(f"{OutType(kind).name} must have {rule}, got {len(self.out.shape)}")
        if not slices and kind != OutType.NONE:
            self._fail("slice_configs must not be empty, got no slices")
        given = [shape_dims(shape) for shape in self.out.shape]
        widths = [s.end - s.start for s in slices]
        if kind == OutType.NONE:
            for s, w, shape in zip(slices, widths, given, strict=True):
                length = self._check_shape(shape, [s], [w])
                tasks.append(self._task(s, len(shapes), 0, shape, w if length else 0, False))
                shapes.append(tuple(shape))
            return
        (shape,) = given
        if kind != OutType.CONCAT and len(set(widths)) > 1:
            self._fail(f"all slices of {OutType(kind).name} must have one width, got {widths}")
        tail = {
            OutType.CONCAT: [sum(widths)],
            OutType.STACK: [len(slices), widths[0]],
            OutType.ADDN: [widths[0]],
        }[OutType(kind)]
        length = self._check_shape(shape, slices, tail)
        place = 0
        for i, (s, w) in enumerate(zip(slices, widths, strict=True)):
            if kind == OutType.STACK:
                place = i * w * (length or 1)
            step = tail[-1] if length else 0
            tasks.append(self._task(s, len(shapes), place, shape, step, kind == OutType.ADDN))
            if kind == OutType.CONCAT:
                place += w
        shapes.append(tuple(shape))

    def _check_slice(self, s: SliceConfig) -> None:
        config = self.configs.feature_configs.get(s.feature_name)
        if config is None:
            raise ConfigError(f"layout {self.name!r}: feature {s.feature_name!r} is not in feature_configs")
        width = sum(config.slice_dims)
        if not 0 <= s.start < s.end <= width:
            self._fail(f"slice [{s.start}, {s.end}) of feature {s.feature_name!r} is not within its {width} columns")

    def _sequence(self, slices: Sequence[SliceConfig]) -> int:
        """The longest max_sequence_length of the FIRSTN features, or 0 if there are none."""
        configs = [self.configs.feature_configs[s.feature_name] for s in slices]
        firstn = [config.pooling_type == PoolingType.FIRSTN for config in configs]
        if not any(firstn):
            return 0
        if not all(firstn):
            self._fail("a layout must not mix FIRSTN features with pooled ones")
        if self.out.out_type == OutType.ADDN:
            self._fail("ADDN must not have FIRSTN features")
        return max(config.max_sequence_length for config in configs)

    def _check_shape(self, shape: list[int], slices: Sequence[SliceConfig], tail: list[int]) -> int:
        """Raise unless the shape fits its slices; return the length of the sequence axis, or 0."""
        longest = self._sequence(slices)
        expected = [*tail[:-1], *([None] if longest else []), tail[-1]]
        if len(shape) != 1 + len(expected):
            self._fail(f"the shape must have {1 + len(expected)} sizes, got {shape}")
        if shape[0] < -1:
            self._fail(f"the first size of the shape must be -1 for the batch, or a number of rows, got {shape}")
        for size, want in zip(shape[1:], expected, strict=True):
            if want is not None and size != want:
                self._fail(
                    f"the shape must be [-1, {', '.join('L' if e is None else str(e) for e in expected)}], got {shape}"
                )
        if not longest:
            return 0
        length = shape[-2]
        if length < longest:
            self._fail(f"the sequence axis must not be shorter than max_sequence_length {longest}, got {shape}")
        return length

    def _task(self, s: SliceConfig, output: int, place: int, shape: list[int], step: int, adds: bool) -> Task:
        config = self.configs.feature_configs[s.feature_name]
        stride = 1
        for size in shape[1:]:
            stride *= size
        return Task(
            output, place, stride, step, self.index[s.feature_name], s.start, s.end - s.start,
            int(config.pooling_type), config.max_sequence_length, int(adds),
        )  # fmt: skip
