"""What `shoal train` runs: configuration, tables, the loop, metrics, checkpoints, and what is shown of it."""

from importlib import import_module
from typing import Any

# Module -> the public names that live in it; imported on first use.
_PUBLIC: dict[str, tuple[str, ...]] = {
    "shoal.trainer.config": ("Config",),
    "shoal.trainer.loop": ("Trainer", "train"),
    "shoal.trainer.metrics": ("Metrics", "exact_auc"),
    "shoal.trainer.toml": ("load_config",),
}
_WHERE = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'shoal.trainer' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
