"""Serving: export, model server, remote predict, parameter sync, discovery."""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(__name__)
