"""`nest_layout` and `flatten_layout`: the layouts' tensors by name, and back."""

from typing import Any

from torch import Tensor

from shoal.errors import ConfigError
from shoal.proto.feature_configs import FeatureConfigs, OutType


def _layouts(feature_cfgs: Any) -> list[tuple[str, bool, int]]:
    """(name, is a list, number of tensors) in sorted order of the names."""
    if isinstance(feature_cfgs, bytes):
        feature_cfgs = FeatureConfigs.FromString(feature_cfgs)
    names = sorted(feature_cfgs.out_configs, key=lambda name: name.encode())
    configs = [feature_cfgs.out_configs[name] for name in names]
    return [
        (name, config.out_type == OutType.NONE, len(config.slice_configs) if config.out_type == OutType.NONE else 1)
        for name, config in zip(names, configs, strict=True)
    ]


def nest_layout(feature_cfgs: Any, tensors: Any) -> dict[str, Tensor | list[Tensor]]:
    """A dict by layout name: a list of tensors for NONE, one tensor for any other type."""
    layouts = _layouts(feature_cfgs)
    tensors = list(tensors)
    wanted = sum(count for _, _, count in layouts)
    if len(tensors) != wanted:
        raise ConfigError(f"nest_layout: there must be {wanted} tensors for the layouts, got {len(tensors)}")
    given = iter(tensors)
    return {name: [next(given) for _ in range(count)] if many else next(given) for name, many, count in layouts}


def flatten_layout(feature_cfgs: Any, nested: dict[str, Any]) -> list[Any]:
    """The inverse of `nest_layout`."""
    layouts = _layouts(feature_cfgs)
    if set(nested) != {name for name, _, _ in layouts}:
        raise ConfigError(f"flatten_layout: the layouts must be {[n for n, _, _ in layouts]}, got {sorted(nested)}")
    flat: list[Any] = []
    for name, many, count in layouts:
        tensors = list(nested[name]) if many else [nested[name]]
        if len(tensors) != count:
            raise ConfigError(f"flatten_layout: layout {name!r} must have {count} tensors, got {len(tensors)}")
        flat.extend(tensors)
    return flat
