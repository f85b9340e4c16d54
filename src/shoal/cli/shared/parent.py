"""A process that ends with the one that started it, so that a supervisor that is killed leaves nothing behind."""

import ctypes
import os
import signal
import sys

VARIABLE = "SHOAL_PARENT"
"""The pid of the process that watches this one, in its environment."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Where the environment names this process's parent: has the kernel kill this process when the parent ends.

    SIGKILL, because whoever is still running then cannot count on the others; what was acknowledged is on the disk.
    What this process starts gets it as its parent. On systems other than Linux the next `shoal up` ends what is left.
    """
    parent = os.environ.get(VARIABLE, "")
    if not parent.isdecimal() or sys.platform != "linux":
        return
    os.environ[VARIABLE] = str(os.getpid())
    if os.getppid() == int(parent):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent) and not _alive(int(parent)):  # also where it ended before we asked
        raise SystemExit(1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
