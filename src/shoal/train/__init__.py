"""Data- and pipeline-parallel training."""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(__name__)
