"""Checkpoints of tables and filters: files, folders, increments, and the listeners that a training loop calls."""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(__name__)
