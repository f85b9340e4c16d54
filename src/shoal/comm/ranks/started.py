"""Asynchronous collectives: started first, awaited later; the defaults here use `Ranks.exchange`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Op = Literal["sum", "min", "max"]


class Started(Protocol):
    """A started collective."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for completion; raises after ``timeout_s`` (default: that of the ranks) and names missing ranks."""

    def get_future(self) -> torch.futures.Future[Any]:
        """A future for its completion, for code that must not block."""
        ...


class Done:
    """A collective that was complete when its call returned."""

    def wait(self, timeout_s: float | None = None) -> None:
        pass

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


class Starting(ABC):
    """The asynchronous calls. All ranks must make them in the same order, with tensors of the same shape and dtype.

    Here each call is complete when it returns; a subclass starts its backend's own collective instead.
    """

    rank: int
    world_size: int
    before_call: Callable[[str], None] | None = None
    """Called with the name of every call before it talks to other ranks; tests inject faults here."""

    @abstractmethod
    def all_to_all(self, flat: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int] | None = None) -> Tensor:
        """See `Ranks`."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """See `Ranks`."""

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """See `Ranks`."""

    def on_wire(self, tensor: Tensor) -> Tensor:
        """``tensor`` on a device where the calls below can read and write it."""
        return tensor

    def start_reduce(self, tensor: Tensor, op: Op = "sum") -> Started:
        """Reduce over ranks, in place."""
        if op == "sum":
            self.sum(tensor)
            return Done()
        everyone = tensor.new_empty(self.world_size * tensor.numel())
        self.start_gather(everyone, tensor)
        rows = everyone.view(self.world_size, -1)
        tensor.copy_((rows.amin(0) if op == "min" else rows.amax(0)).view_as(tensor))
        return Done()

    def start_gather(self, everyone: Tensor, mine: Tensor) -> Started:
        """Gather every rank's tensor into ``everyone``, by rank."""
        each = [mine.numel()] * self.world_size
        everyone.copy_(self.all_to_all(mine.reshape(-1).repeat(self.world_size), each, each).view_as(everyone))
        return Done()

    def start_scatter(self, share: Tensor, flat: Tensor) -> Started:
        """Reduce-scatter: sum ``flat`` over ranks; this rank's share of the sum goes into ``share``."""
        share.copy_(self.sum(flat.clone()).view(self.world_size, -1)[self.rank].view_as(share))
        return Done()

    def start_broadcast(self, tensor: Tensor, root: int) -> Started:
        """Broadcast rank ``root``'s tensor, in place."""
        tensor.copy_(self.broadcast(tensor, root))
        return Done()

    def gather_to(self, root: int, mine: Tensor, parts: list[Tensor] | None) -> None:
        """Gather every rank's tensor into ``parts`` on rank ``root``; the others pass None."""
        n = mine.numel()
        send = [n if rank == root else 0 for rank in range(self.world_size)]
        recv = [n if parts is not None else 0] * self.world_size
        came = self.all_to_all(mine.reshape(-1), send, recv)
        for part, got in zip(parts or [], came.split(n) if n else (), strict=False):
            part.copy_(got.view_as(part))
