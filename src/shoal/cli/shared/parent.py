"""Ending a process together with its parent, so that a killed supervisor leaves no processes behind."""

import ctypes
import os
import signal
import sys

VARIABLE = "SHOAL_PARENT"
"""Environment variable with the pid of the parent."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """If the environment names a parent, have the kernel kill this process when that parent ends.

    The signal is SIGKILL: the other processes end too, and everything acknowledged is on disk. For children of this
    process, the environment names this process. On systems other than Linux, the next `shoal up` ends leftover
    processes.
    """
    parent = os.environ.get(VARIABLE, "")
    if not parent.isdecimal() or sys.platform != "linux":
        return
    os.environ[VARIABLE] = str(os.getpid())
    if os.getppid() == int(parent):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent) and not _alive(int(parent)):  # it may have ended before prctl
        raise SystemExit(1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
