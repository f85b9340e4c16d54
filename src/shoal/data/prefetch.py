"""`Prefetch`: reads the batches of a stream ahead, in a separate thread.

Parsing is native and releases the GIL, so it overlaps with training.
"""

from shoal.background.ahead import ReadAhead as Prefetch

__all__ = ["Prefetch"]
