"""Local embedding tables: configuration, tables, admission filters, touched keys, checkpoints."""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(__name__)
