"""Copies from the device to the host for which the caller does not wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_MOST_PENDING = 32  # another copy waits for the first


class Sent:
    """Copies of tensors to host memory, available once they have arrived."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors[0].device.type != "cuda":
            self.copies = [tensor.clone() for tensor in tensors]
            return
        self.copies = [
            torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(
                tensor, non_blocking=True
            )
            for tensor in tensors
        ]
        self._event = torch.cuda.Event()
        self._event.record()

    def arrived(self, wait: bool = False) -> bool:
        """Whether the copies have arrived; with ``wait``, waits until they have."""
        if self._event is None:
            return True
        if wait:
            self._event.synchronize()
        return wait or self._event.query()


class Arrivals:
    """A queue of copies, reported in the order in which they were sent."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Sent, Callable[..., Any]]] = deque()
        self._lock = threading.RLock()

    def send(self, tensors: Sequence[Tensor], receive: Callable[..., Any]) -> None:
        """Calls ``receive`` with copies in host memory, in the order of the calls, some time after they arrive."""
        self.expect(Sent(tensors), receive)

    def expect(self, sent: Sent, receive: Callable[..., Any]) -> None:
        """As `send`, for copies that were already sent and can have several receivers."""
        with self._lock:
            self._pending.append((sent, receive))
        self.settle(leave=_MOST_PENDING)

    def settle(self, leave: int = 0) -> None:
        """Reports the copies that have arrived, and waits while more than ``leave`` are pending."""
        with self._lock:
            while self._pending:
                sent, receive = self._pending[0]
                if not sent.arrived(wait=len(self._pending) > leave):
                    return
                self._pending.popleft()
                receive(*sent.copies)
