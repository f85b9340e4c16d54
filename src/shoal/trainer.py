"""What `shoal train` runs, as a library; it lives in `shoal.train.loop`."""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(__name__)
