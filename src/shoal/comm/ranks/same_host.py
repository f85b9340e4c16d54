"""All-to-all through shared memory, for a process group whose ranks all run on one machine.

gloo sends between local ranks through the loopback network. Rings in shared memory move the same bytes with two copies
in cache and no system call per piece. ``SHOAL_SHARED_MEMORY=0`` turns them off. If ranks are on several machines, or
cannot map each other's memory, the process group's own calls are used.
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
from shoal.buffers import empty_of
from shoal.comm.ranks.ranks import HEAD_WORDS
from shoal.errors import DeadlineError, PeerError
from shoal.switches import switch

RING_BYTES = 1 << 20
MAX_RANKS = 16  # the rings of all pairs take ranks² x 1 MiB once used
TICK_S = 0.5


class Rings:
    """The rings of one process group. All ranks must make the same calls in the same order, one thread at a time."""

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
        """Send ``send[r]`` elements of ``flat`` to rank ``r``; receive ``recv[r]`` elements from it in ``out``.

        Returns whether every rank sent the expected number, and the heads of all ranks. ``gave_up`` returns
        whether another rank has given up; it is called while no data moves.
        """
        if self._broken:
            raise PeerError(f"rank {self._rank}: an earlier exchange failed ({self._broken}); start the ranks again")
        size = flat.element_size()
        words = np.zeros(HEAD_WORDS, np.int64)
        words[: len(head)] = head
        own = send[self._rank]
        fits = own == recv[self._rank]
        if not fits:  # the other ranks need this one's data; what arrives here is discarded
            recv = [*recv[: self._rank], own, *recv[self._rank + 1 :]]
            out = empty_of(sum(recv), flat.dtype)
        sent, awaited = [n * size for n in send], [n * size for n in recv]
        try:
            self._native.start(flat.data_ptr(), sent, out.data_ptr(), awaited, words.ctypes.data)
            until = time.monotonic() + timeout_s
            while not self._native.run(TICK_S):
                self._check_peers(until, timeout_s)
                if gave_up():
                    raise RuntimeError("another rank gave up")
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        heads = np.empty((len(self._pids), HEAD_WORDS), np.int64)
        self._native.heads(heads.ctypes.data)
        return fits and not self._native.differences(), heads.tolist()

    def _check_peers(self, until: float, timeout_s: float) -> None:
        """Raise if a peer is lost or the deadline has passed; called after a tick in which no data moved."""
        gone = [rank for rank in self._native.open() if not _is_alive(self._pids[rank])]
        if gone and not self._native.run(0.0):  # its last bytes may have arrived since the last check
            for rank in set(gone).intersection(self._native.open()):
                why = f"rank {rank} (process {self._pids[rank]}) has exited while rank {self._rank} waits for it"
                raise PeerError(why, ranks=[rank])
        if time.monotonic() > until:
            missing = sorted(self._native.open())
            raise DeadlineError(
                f"rank {self._rank} waited {timeout_s:g} s for rank(s) {missing} in an exchange; see their logs, "
                "or raise the process group's timeout",
                ranks=missing,
            )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def open_rings(rank: int, ranks: int, all_gather: Callable[[list[int]], list[list[int]]]) -> Rings | None:
    """Open the rings of some ranks, which must all call this together; None if that is not possible.

    ``all_gather`` returns every rank's numbers, by rank.
    """
    if ranks > MAX_RANKS:
        return None
    total = _core.Rings.bytes(ranks, RING_BYTES)
    wanted = switch("SHOAL_SHARED_MEMORY", 1) != 0
    fd = _create(total) if rank == 0 and wanted else -1
    try:
        every = all_gather([_host(), os.getpid(), fd, int(wanted)])
        first_host, first_pid, first_fd, _ = every[0]
        same = all(host == first_host and host >= 0 and yes for host, _, _, yes in every) and first_fd >= 0
        memory = _attach(first_pid, first_fd, total) if same else None
        if not all(yes for (yes,) in all_gather([int(memory is not None)])):
            return None
        assert memory is not None
        return Rings(memory, rank, [pid for _, pid, _, _ in every])
    finally:
        if fd >= 0:
            os.close(fd)  # every rank has mapped it by now


def _host() -> int:
    """A number that is equal for ranks on one machine that see each other's processes; -1 if unknown."""
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
