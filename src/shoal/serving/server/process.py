"""Settings of a process that does nothing but serve."""

import contextlib
import ctypes
import resource
import sys

KEPT_BYTES = 256 << 20
ARENAS = 4
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


def tune_server_process() -> None:
    """For the main program of a server; a library that serves next to other work leaves the process as it is.

    Threads get the interpreter back soon: a batch gives it up at every operation. The memory of messages is kept for
    the next ones, up to 256 MiB, instead of being returned to the system and taken again: fresh pages cost more than
    reading a push does. Glibc keeps it by arena, of which it makes eight per core; here there are four. As many
    connections may be open as the system allows this process.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sys.setswitchinterval(0.0005)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    mallopt(_M_ARENA_MAX, ARENAS)
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES // ARENAS)
