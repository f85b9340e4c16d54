"""All-to-all through shared memory, for the ranks of a process group that all run on one machine.

gloo sends between local ranks through the loopback network. Rings in shared memory move the same bytes with two copies
in a cache and no system call per piece. ``SHOAL_SHARED_MEMORY=0`` turns them off; where ranks are on several machines,
or cannot reach each other's memory, the process group is used as it is.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from shoal import _core
from shoal.comm.ranks.ranks import HEAD_WORDS
from shoal.errors import ConfigError, DeadlineError, PeerError
from shoal.switches import switch

RING_BYTES = 1 << 20
MAX_RANKS = 16  # rings of all pairs take ranks² x 1 MiB once they have been used
TICK_S = 0.5


class Rings:
    """The rings of one process group. Calls come in the same order on every rank, from one thread at a time."""

    def __init__(self, memory: mmap.mmap, rank: int, pids: Sequence[int]) -> None:
        self._memory = memory
        self._view = np.frombuffer(memory, np.uint8)
        self._native = _core.Rings(self._view.ctypes.data, rank, len(pids), RING_BYTES)
        self._rank, self._pids = rank, list(pids)
        self._broken = ""

    def exchange(
        self,
        out: Tensor,
        flat: Tensor,
        recv: Sequence[int],
        send: Sequence[int],
        head: Sequence[int],
        timeout_s: float,
        gave_up: Callable[[], bool],
    ) -> tuple[bool, list[list[int]]]:
        """``send[r]`` elements of ``flat`` go to rank ``r``, ``recv[r]`` of it come to ``out``.

        Whether every rank sent what was awaited, and the heads of all ranks. ``gave_up`` says whether another rank
        will not come; it is asked while nothing moves.
        """
        if self._broken:
            raise PeerError(f"rank {self._rank}: an earlier exchange failed ({self._broken}); start the ranks again")
        size = flat.element_size()
        words = np.zeros(HEAD_WORDS, np.int64)
        words[: len(head)] = head
        if send[self._rank] != recv[self._rank]:
            raise ConfigError(f"rank {self._rank} must give itself what it takes, got {send} and {recv}")
        sent, awaited = [n * size for n in send], [n * size for n in recv]
        try:
            self._native.start(flat.data_ptr(), sent, out.data_ptr(), awaited, words.ctypes.data)
            until = time.monotonic() + timeout_s
            while not self._native.run(TICK_S):
                self._look(until, timeout_s)
                if gave_up():
                    raise RuntimeError("another rank gave up")
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        heads = np.empty((len(self._pids), HEAD_WORDS), np.int64)
        self._native.heads(heads.ctypes.data)
        return not self._native.differences(), heads.tolist()

    def _look(self, until: float, timeout_s: float) -> None:
        """Nothing has moved for a tick: is a peer gone that this exchange needs, is it too late?"""
        gone = [rank for rank in self._native.open() if not _lives(self._pids[rank])]
        if gone and not self._native.run(0.0):  # what it did before it ended may have come since the last look
            for rank in set(gone).intersection(self._native.open()):
                why = f"rank {rank} (process {self._pids[rank]}) has ended while rank {self._rank} waits for it"
                raise PeerError(why, ranks=[rank])
        if time.monotonic() > until:
            missing = sorted(self._native.open())
            raise DeadlineError(
                f"rank {self._rank} waited {timeout_s:g} s for rank(s) {missing} in an exchange; see their logs, "
                "or raise the process group's timeout",
                ranks=missing,
            )


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def open_rings(rank: int, ranks: int, all_gather: Callable[[list[int]], list[list[int]]]) -> Rings | None:
    """The rings of some ranks, which all of them open together; None where they cannot be.

    ``all_gather`` gives every rank the numbers of all, by rank.
    """
    if ranks > MAX_RANKS:
        return None
    total = _core.Rings.bytes(ranks, RING_BYTES)
    wanted = switch("SHOAL_SHARED_MEMORY", 1) != 0
    fd = _create(total) if rank == 0 and wanted else -1
    try:
        told = all_gather([_host(), os.getpid(), fd, int(wanted)])
        same = all(host == told[0][0] and host >= 0 and yes for host, _, _, yes in told) and told[0][2] >= 0
        memory = _attach(told[0][1], told[0][2], total) if same else None
        if not all(yes for (yes,) in all_gather([int(memory is not None)])):
            return None
        assert memory is not None
        return Rings(memory, rank, [pid for _, pid, _, _ in told])
    finally:
        if fd >= 0:
            os.close(fd)  # everybody has mapped it by now


def _host() -> int:
    """A number that ranks share when they run on one machine and see each other's processes; -1 where none is known."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = int(file.read().replace("-", ""), 16)
        return (boot ^ os.stat("/proc/self/ns/pid").st_ino) & ((1 << 62) - 1)
    except (OSError, ValueError):
        return -1


def _create(total: int) -> int:
    try:
        fd = os.memfd_create("shoal-rings", os.MFD_CLOEXEC)
        os.ftruncate(fd, total)
        return fd
    except (AttributeError, OSError):
        return -1


def _attach(pid: int, fd: int, total: int) -> mmap.mmap | None:
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
        return mmap.mmap(file.fileno(), total)
    return None
