"""Settings for a process that only serves."""

import contextlib
import ctypes
import resource
import sys

KEPT_BYTES = 256 << 20
ARENAS = 4
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # from glibc's malloc.h


def tune_server_process() -> None:
    """Tune the process. Only for a server's main program, not for a library that serves alongside other work.

    The interpreter's switch interval is short, because a batch releases the GIL at every operation. Up to 256 MiB of
    message memory is kept for reuse instead of being returned to the system: fresh pages cost more than reading a push.
    Glibc keeps it per arena; there are four instead of its default of eight per core. The limit on open files is raised
    to the maximum allowed.
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
