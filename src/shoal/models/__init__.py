"""Ready-made click models over rows of a table: DeepFM, DLRM, DCN-v2, two towers, or your own module."""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(__name__)
