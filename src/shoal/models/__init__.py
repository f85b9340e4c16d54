"""Ready-made click models over rows of a table: DeepFM, DLRM, DCN-v2, two towers, or a module of yours."""

from importlib import import_module
from typing import Any

# Module -> the public names that live in it; imported on first use.
_PUBLIC: dict[str, tuple[str, ...]] = {
    "shoal.models.build": ("MODELS", "build_model"),
    "shoal.models.dcn": ("DcnV2",),
    "shoal.models.deepfm": ("DeepFm",),
    "shoal.models.dlrm": ("Dlrm",),
    "shoal.models.inputs": ("Inputs",),
    "shoal.models.interactions": ("fm", "pair_dots"),
    "shoal.models.mlp": ("Mlp",),
    "shoal.models.two_tower": ("TwoTower",),
}
_WHERE = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'shoal.models' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
