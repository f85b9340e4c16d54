"""Unbounded sources, read at exact positions: Redis streams, Kafka topics, growing directories, standard input."""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(__name__)
