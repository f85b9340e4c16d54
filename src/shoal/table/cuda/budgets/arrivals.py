"""Numbers on their way from the device to the host: whoever sent them does not wait for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_UNDER_WAY = 32  # that may be; a further one waits for the first


class Sent:
    """Copies of tensors in host memory, as soon as they have arrived."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors[0].device.type != "cuda":
            self.homes = [tensor.clone() for tensor in tensors]
            return
        self.homes = [
            torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(
                tensor, non_blocking=True
            )
            for tensor in tensors
        ]
        self._event = torch.cuda.Event()
        self._event.record()

    def arrived(self, wait: bool = False) -> bool:
        """Whether they have; ``wait``: once they have."""
        if self._event is None:
            return True
        if wait:
            self._event.synchronize()
        return wait or self._event.query()


class Arrivals:
    """A queue: what was sent first is told first."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[Sent, Callable[..., Any]]] = deque()
        self._lock = threading.RLock()

    def send(self, tensors: Sequence[Tensor], told: Callable[..., Any]) -> None:
        """Has ``told`` called with copies in host memory, in the order of the calls, some time after they arrive."""
        self.expect(Sent(tensors), told)

    def expect(self, sent: Sent, told: Callable[..., Any]) -> None:
        """The same of what was sent already, to several."""
        with self._lock:
            self._under_way.append((sent, told))
        self.settle(leave=_UNDER_WAY)

    def settle(self, leave: int = 0) -> None:
        """Tells of what has arrived, and waits for it while more than ``leave`` are under way."""
        with self._lock:
            while self._under_way:
                sent, told = self._under_way[0]
                if not sent.arrived(wait=len(self._under_way) > leave):
                    return
                self._under_way.popleft()
                told(*sent.homes)
