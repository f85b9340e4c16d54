"""`Prefetch`: the batches of a stream, read ahead by a thread of their own.

Parsing is native and lets go of the interpreter, so it overlaps with training.
"""

from shoal.background.ahead import ReadAhead as Prefetch

__all__ = ["Prefetch"]
