"""Tables that span processes: parameter servers, all-to-all, partitioned layouts, and the queues around them."""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(__name__)
