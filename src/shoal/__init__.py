"""Shoal: sparse models that never stop learning, for PyTorch."""

from importlib.metadata import PackageNotFoundError, version

from shoal.lazy import exports

try:
    __version__ = version("shoal")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

__all__, __getattr__, __dir__ = exports(__name__)
__all__ += ["__version__"]
