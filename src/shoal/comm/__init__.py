"""This process's rank, and how bytes reach the other ranks."""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(__name__)
