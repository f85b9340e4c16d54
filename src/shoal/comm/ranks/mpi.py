"""A transport over MPI (``mpi4py``, started by ``mpirun``)."""

import threading
import time
from typing import Any

import numpy as np

from shoal.comm.ranks.buffers import writable_bytes
from shoal.comm.ranks.transport import DEFAULT_TIMEOUT_S, MAX_MESSAGE_BYTES, BaseTransport, Deadline
from shoal.errors import TransportError, missing_extra

PIECE_BYTES = 1 << 30
HEADER_TAG, PAYLOAD_TAG, CLOSE_TAG = 0x5341, 0x5342, 0x5343


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise missing_extra("mpi4py (with an MPI library)", "mpi") from error
    return MPI


class _Pause:
    """Sleeps between polls, growing from 0 to 1 ms."""

    def __init__(self) -> None:
        self.turn = 0

    def __call__(self) -> None:
        self.turn += 1
        time.sleep(0 if self.turn < 100 else min(0.001, 1e-6 * self.turn))


class MpiTransport(BaseTransport):
    """Byte messages over an MPI communicator (``comm=None``: a duplicate of ``COMM_WORLD``).

    Messages are as in ``ProcessGroupTransport``: an int64 header ``[length, sequence]``, then the payload. When a rank
    dies, ``mpirun`` ends the job; one that closes is ``peer_lost`` to the others. Only one thread at a time calls MPI,
    so MPI does not need thread support.

    Example:
        mpirun -n 2 python -c "from shoal.comm import MpiTransport as T; t = T(); t.barrier(); print(t.rank)"
    """

    collectives = True

    def __init__(
        self,
        comm: Any = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        default_timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.mpi = _mpi()
        self.comm = self.mpi.COMM_WORLD.Dup() if comm is None else comm
        super().__init__(self.comm.Get_rank(), self.comm.Get_size(), default_timeout_s, max_message_bytes)
        self.calls = threading.RLock()
        self._pending: list[tuple[Any, np.ndarray]] = []
        self._sent = [0] * self.world_size
        self._received = [0] * self.world_size
        self._gone: dict[int, int] = {}  # closed ranks, and how many messages each had sent to this one
        self._barriers_of_gone: dict[int, int] = {}  # closed ranks, and how many barriers each had passed
        self._barriers = 0
        self._barrier_request: Any = None

    def _send(self, dest: int, view: memoryview) -> None:
        with self.calls:
            self._look_for_closed()
            if dest in self._gone:
                raise self._lost(dest, "it closed its transport")
            self._reap()
            self._isend(np.array([view.nbytes, self._sent[dest]], np.int64), dest, HEADER_TAG)
            self._sent[dest] += 1
            if view.nbytes:
                raw = np.frombuffer(view if view.c_contiguous else view.tobytes(), np.uint8).copy()
                for start in range(0, raw.size, PIECE_BYTES):
                    self._isend(raw[start : start + PIECE_BYTES], dest, PAYLOAD_TAG)

    def _isend(self, data: np.ndarray, dest: int, tag: int) -> None:
        self._pending.append((self.comm.Isend(data, dest, tag), data))

    def _reap(self) -> None:
        """Drop completed sends, which also lets MPI make progress."""
        self._pending = [(request, data) for request, data in self._pending if not request.Test()]

    def _recv(self, src: int, deadline: Deadline) -> bytes:
        pause = _Pause()
        while True:
            over = deadline.over()
            with self.calls:
                if self._closed:
                    raise self._closed_error()
                self._reap()
                header = self._header(src)
                self._look_for_closed()
            if header is not None:
                return self._payload(src, *header)
            if self._received[src] >= self._gone.get(src, self._received[src] + 1):
                raise self._lost(src, "it closed its transport")
            if over:
                raise self._timed_out(src, deadline)
            pause()

    def _header(self, src: int) -> tuple[int, int] | None:
        if not self.comm.Iprobe(src, HEADER_TAG):
            return None
        header = np.empty(2, np.int64)
        self.comm.Recv(header, src, HEADER_TAG)
        length, sequence = header.tolist()
        return length, sequence

    def _payload(self, src: int, length: int, sequence: int) -> bytes:
        if sequence != self._received[src] or length < 0:
            raise self._error(
                f"rank {src} sent header [length={length}, sequence={sequence}] where message {self._received[src]} "
                "was expected; something else uses this communicator",
                "protocol",
                src,
            )
        self._received[src] += 1
        try:
            self._check_size(length, src)
        except TransportError:
            self._drain(src, length)
            raise
        data, view = writable_bytes(length)
        for start in range(0, length, PIECE_BYTES):
            self._take(view[start : start + PIECE_BYTES], src)
        return data

    def _drain(self, src: int, length: int) -> None:
        """Receive and discard a refused payload; allocates only as much as was really sent."""
        for start in range(0, length, PIECE_BYTES):
            size = min(PIECE_BYTES, length - start)
            pause, deadline, status = _Pause(), Deadline(self.default_timeout_s), self.mpi.Status()
            while True:
                with self.calls:
                    if self.comm.Iprobe(src, PAYLOAD_TAG, status):
                        break
                    self._reap()
                if deadline.over():
                    return
                pause()
            if status.Get_count(self.mpi.BYTE) != size:
                return
            self._take(np.empty(size, np.uint8), src)

    def _take(self, piece: np.ndarray, src: int) -> None:
        """Fill ``piece`` with the next bytes of a message whose header was received."""
        pause, deadline = _Pause(), Deadline(self.default_timeout_s)
        with self.calls:
            request = self.comm.Irecv(piece, src, PAYLOAD_TAG)
        while True:
            with self.calls:
                if request.Test():
                    return
                self._reap()
            if deadline.over():
                self._pending.append((request, piece))  # MPI may still write there
                raise self._lost(src, f"it announced a message and sent none of it for {deadline.seconds:g} s")
            pause()

    def _barrier(self, deadline: Deadline) -> None:
        """Wait for the barrier; one that timed out continues in the next call, because MPI cannot cancel it."""
        pause = _Pause()
        with self.calls:
            if self._barrier_request is None:
                self._barrier_request = self.comm.Ibarrier()
        while True:
            over = deadline.over()
            with self.calls:
                if self._closed:
                    raise self._closed_error()
                self._reap()
                if self._barrier_request.Test():
                    self._barrier_request = None
                    self._barriers += 1
                    return
                self._look_for_closed()
            # A rank that passed this barrier may close before the others see it complete.
            missing = [rank for rank, passed in self._barriers_of_gone.items() if passed <= self._barriers]
            if missing:
                raise self._lost(min(missing), "it closed its transport, so the barrier cannot complete")
            if over:
                text = f"waited {deadline.seconds:g} s in the barrier; a rank is missing, see the other ranks' logs"
                raise self._error(text, "timeout")
            pause()

    def _look_for_closed(self) -> None:
        status = self.mpi.Status()
        while self.comm.Iprobe(self.mpi.ANY_SOURCE, CLOSE_TAG, status):
            farewell = np.empty(2, np.int64)
            self.comm.Recv(farewell, status.source, CLOSE_TAG)
            self._gone[status.source], self._barriers_of_gone[status.source] = farewell.tolist()

    def _close(self) -> None:
        with self.calls:
            for peer in range(self.world_size):
                if peer != self.rank:
                    self._isend(np.array([self._sent[peer], self._barriers], np.int64), peer, CLOSE_TAG)
            self._reap()
