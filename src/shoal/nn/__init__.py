"""Modules that people write models with."""

from importlib import import_module
from typing import Any

# Module under shoal.nn -> the public names that live in it; imported on first use.
_PUBLIC: dict[str, tuple[str, ...]] = {
    "bag": ("HashEmbeddingBag",),
    "clip": ("clip_grad_norm", "clip_grad_value"),
    "combiners": ("Combiner", "FirstN", "ReduceMean", "ReduceSum"),
    "dcp": ("load_dcp",),
    "embedding": ("HashEmbedding",),
    "optimizer": ("SparseOptimizer",),
    "protocol": ("EmbeddingTable",),
}
_WHERE = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'shoal.nn' has no attribute {name!r}")
    value = getattr(import_module(f"shoal.nn.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
