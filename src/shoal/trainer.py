"""The library behind `shoal train`, implemented in `shoal.train.loop`."""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(__name__)
