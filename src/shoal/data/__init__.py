"""Reading samples: files of clicks into batches of labels, numbers and ids, shuffled, sharded and resumable."""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(__name__)
