"""Queues that turn a process group's point-to-point calls into reliable messages.

gloo's send waits for the receiver, a pending send dies with its work handle, and a receive that times out breaks the
connection. So sends are copied, started at once and kept until they are done; one thread per source completes
receives, even after the caller's timeout, and a late message goes to the next call.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.comm.ranks.buffers import writable_bytes
from shoal.comm.ranks.transport import Deadline
from shoal.errors import TransportError

if TYPE_CHECKING:
    from shoal.comm.ranks.process_group import ProcessGroupTransport

PIECE_BYTES = 1 << 30
QUEUED_BYTES = 256 << 20  # bytes in flight per peer before send waits
DRAIN_BYTES = 1 << 20  # a refused message up to this size is discarded, so that later ones still arrive
LINGER_S = 30.0  # how long an exiting process waits for its last messages to be received
LOOK_S = 0.1  # how often a send that waits for room checks that the peer is alive
IDLE_S = 5.0  # an idle helper thread exits after this
FOREVER = timedelta(days=3650)

_unsent: set["Outbox"] = set()
_helpers: set[threading.Thread] = set()
_boxes: weakref.WeakSet[Any] = weakref.WeakSet()
_flushing_pid: int | None = None


def _finish(work: Any, cuda: bool) -> None:
    """Wait for one operation without a timeout; raises if the peer is lost."""
    if not cuda:
        work.wait(FOREVER)
        return
    while not work.is_completed():
        time.sleep(0.0005)
    work.wait()


def _flush_all() -> None:
    """Send pending messages and end the helper threads: a thread that frees a tensor, or keeps a group alive, during
    interpreter shutdown would abort the process."""
    deadline = Deadline(LINGER_S)
    for box in list(_unsent):
        box.flush(deadline)
    for box in list(_boxes):
        box.close()
    deadline = Deadline(1.0)  # a thread that still waits for a peer stays
    for helper in list(_helpers):
        helper.join(deadline.left())


def _flush_at_exit() -> None:
    """Register the flush in the sending process: a forked child starts without finalizers."""
    global _flushing_pid
    if _flushing_pid != os.getpid():
        _flushing_pid = os.getpid()
        Finalize(None, _flush_all, exitpriority=100)  # runs in multiprocessing's children too, where atexit does not


def _after_fork() -> None:
    for known in (_unsent, _helpers, _boxes):  # these belong to the parent
        known.clear()


os.register_at_fork(after_in_child=_after_fork)


def _start(run: Callable[[], None], name: str) -> None:
    """Start a helper thread and keep track of it until it ends."""

    def work() -> None:
        try:
            run()
        finally:
            _helpers.discard(threading.current_thread())

    helper = threading.Thread(target=work, name=name, daemon=True)
    _helpers.add(helper)
    _flush_at_exit()
    helper.start()


class Outbox:
    """Messages in flight to one peer, oldest first, kept until the peer has received them."""

    def __init__(self, transport: "ProcessGroupTransport", dest: int, tag: int) -> None:
        self.transport, self.dest, self.tag = transport, dest, tag
        self.sequence = 0
        self.pending: deque[tuple[list[Any], list[torch.Tensor], int]] = deque()
        self.queued_bytes = 0
        self.error: Exception | None = None
        self.changed = threading.Condition()
        self.reaping = False
        self.closed = False
        _boxes.add(self)

    def put(self, view: memoryview, deadline: Deadline) -> None:
        owner, nbytes = self.transport, view.nbytes
        with self.changed:
            while self.error is None and self.pending and self.queued_bytes + nbytes > QUEUED_BYTES:
                if self.changed.wait(min(deadline.left(), LOOK_S)):
                    continue
                owner._check_peer(self.dest)
                if deadline.over():
                    raise owner._error(
                        f"rank {self.dest} received nothing for {deadline.seconds:g} s, and {self.queued_bytes} bytes "
                        "wait for it; see its log",
                        "timeout",
                        self.dest,
                    )
            if self.error is not None:
                raise owner._lost(self.dest, str(self.error)) from self.error
            tensors = [torch.tensor([nbytes, self.sequence], dtype=torch.int64, device="cpu")]
            if nbytes:
                raw = np.frombuffer(view if view.c_contiguous else view.tobytes(), np.uint8)
                tensors += torch.from_numpy(raw.copy()).split(PIECE_BYTES)
            tensors = [t.to(owner.device) for t in tensors]
            try:
                works = [owner.group.send([t], self.dest, self.tag) for t in tensors]
            except RuntimeError as error:
                self.error = error
                raise owner._lost(self.dest, str(error)) from error
            self.sequence += 1
            self.pending.append((works, tensors, nbytes))
            self.queued_bytes += nbytes
            _unsent.add(self)
            if not self.reaping:
                self.reaping = True
                _start(self._reap, f"shoal-send-{self.dest}")
            self.changed.notify_all()

    def _reap(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.pending or self.closed, IDLE_S)
                if not self.pending:
                    self.reaping = False
                    return
                works, _, nbytes = self.pending[0]
            try:
                for work in works:
                    _finish(work, self.transport.cuda)
            except RuntimeError as error:
                with self.changed:
                    self.error = error
                    self.pending.clear()
                    _unsent.discard(self)
                    self.changed.notify_all()
                return
            with self.changed:
                self.pending.popleft()
                self.queued_bytes -= nbytes
                if not self.pending:
                    _unsent.discard(self)
                self.changed.notify_all()

    def close(self) -> None:
        """Let the thread end once everything is sent."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def flush(self, deadline: Deadline) -> None:
        with self.changed:
            while self.pending and self.changed.wait(deadline.left()):
                pass


class Inbox:
    """Messages from one peer. Its thread receives and keeps one message per request."""

    def __init__(
        self, transport: "ProcessGroupTransport", src: int, tag: int, changed: threading.Condition | None = None
    ) -> None:
        self.transport, self.src, self.tag = transport, src, tag
        self.sequence = 0
        self.received = 0  # complete messages; sequence also counts the one in progress
        self.asked = False
        self.message: bytes | None = None
        self.error: TransportError | None = None
        self.final = False  # the error stays
        self.changed = changed or threading.Condition()
        self.receiving = False
        self.closed = False
        _boxes.add(self)

    @property
    def ready(self) -> bool:
        return self.message is not None or self.error is not None

    def ask(self) -> None:
        """Start receiving the next message, unless one has arrived or is being received."""
        with self.changed:
            if not self.ready and not self.asked:
                self.asked = True
                if not self.receiving:
                    self.receiving = True
                    _start(self._run, f"shoal-recv-{self.src}")
                self.changed.notify_all()

    def take(self, seconds: float) -> bytes | None:
        """The requested message, or None if it has not arrived within ``seconds``; raises the error of the receive."""
        with self.changed:
            if not self.ready:
                self.changed.wait_for(lambda: self.ready, seconds)
            if self.message is not None:
                data, self.message = self.message, None
                return data
            error = self.error
            if error is not None:
                self.error = error if self.final else None
                raise error
            return None

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.asked or self.closed, IDLE_S)
                if not self.asked:
                    self.receiving = False
                    return
            message, error, final = None, None, False
            try:
                message = self._receive()
            except _Drained as failure:
                error = failure.error
            except TransportError as failure:
                error, final = failure, True
            except RuntimeError as failure:
                error, final = self.transport._lost(self.src, str(failure)), True
            with self.changed:
                self.message, self.error, self.final, self.asked = message, error, final, False
                self.received = self.sequence
                self.changed.notify_all()
                if final:
                    return

    def close(self) -> None:
        """Let the thread end once the requested messages have arrived."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _receive(self) -> bytes:
        owner = self.transport
        length, sequence = self._tensor(2, torch.int64).tolist()
        if sequence != self.sequence or length < 0:
            raise owner._error(
                f"rank {self.src} sent header [length={length}, sequence={sequence}] where message {self.sequence} was "
                "expected; something else uses this group's point-to-point calls",
                "protocol",
                self.src,
            )
        self.sequence += 1
        try:
            owner._check_size(length, self.src)
        except TransportError as error:
            if length > DRAIN_BYTES:
                raise
            self._tensor(length, torch.uint8)
            raise _Drained(error) from error
        data, view = writable_bytes(length)
        for start in range(0, length, PIECE_BYTES):
            piece = torch.from_numpy(view[start : start + PIECE_BYTES])
            if owner.cuda:
                piece.copy_(self._tensor(len(piece), torch.uint8))
            else:
                self._fill(piece)
        return data

    def _tensor(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        return self._fill(torch.empty(n, dtype=dtype, device=self.transport.device))

    def _fill(self, tensor: torch.Tensor) -> torch.Tensor:
        owner = self.transport
        _finish(owner.group.recv([tensor], self.src, self.tag), owner.cuda)
        return tensor


class _Drained(Exception):
    """A message was refused and discarded; later messages still arrive."""

    def __init__(self, error: TransportError) -> None:
        self.error = error
