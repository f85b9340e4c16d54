"""Reading samples: files of clicks into batches of labels, numbers and ids, shuffled, sharded and resumable."""

from importlib import import_module
from typing import Any

# Module -> the public names that live in it; imported on first use.
_PUBLIC: dict[str, tuple[str, ...]] = {
    "shoal.data.formats": ("FORMATS", "make_format"),
    "shoal.data.generate": ("CriteoLike", "write_criteo"),
    "shoal.data.prefetch": ("Prefetch",),
    "shoal.data.samples": ("Samples",),
    "shoal.data.schema": ("CRITEO", "Schema", "text_fid"),
    "shoal.data.source": ("BadRow", "Cursor", "Format", "Unit"),
    "shoal.data.stream": ("Batch", "Stream"),
}
_WHERE = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'shoal.data' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
