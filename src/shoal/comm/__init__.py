"""Who am I, and how bytes reach the others."""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(__name__)
