"""Shoal: sparse models that never stop learning, for PyTorch."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("shoal")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

# Public names and where they live, imported on first use so that `import shoal` stays quick.
_LAZY = {
    "Ragged": "shoal.ragged",
    "set_num_threads": "shoal._core",
    "num_threads": "shoal._core",
    "Adadelta": "shoal.table.optim",
    "Adagrad": "shoal.table.optim",
    "Adam": "shoal.table.optim",
    "AdamW": "shoal.table.optim",
    "Amsgrad": "shoal.table.optim",
    "BatchSoftmax": "shoal.table.optim",
    "Ftrl": "shoal.table.optim",
    "GroupAdagrad": "shoal.table.optim",
    "GroupFtrl": "shoal.table.optim",
    "Lamb": "shoal.table.optim",
    "Momentum": "shoal.table.optim",
    "MovingAverage": "shoal.table.optim",
    "RmsProp": "shoal.table.optim",
    "RmsPropV2": "shoal.table.optim",
    "RowwiseAdagrad": "shoal.table.optim",
    "Sgd": "shoal.table.optim",
    "HashTable": "shoal.table.table",
}
_MODULES = (
    "comm", "data", "errors", "fid", "gather", "models", "nn", "ops", "serving", "sharded", "table", "testing", "train",
    "trainer",
)  # fmt: skip

__all__ = ["__version__", *_LAZY, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
    elif name in _MODULES:
        value = import_module(f"shoal.{name}")
    else:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
