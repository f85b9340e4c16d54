"""Collectives that are started first and awaited later, as backends have them; here they are made of an exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Op = Literal["sum", "min", "max"]


class Started(Protocol):
    """A collective under way."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when it is over; raises within ``timeout_s`` (that of the ranks) and names who is missing."""

    def get_future(self) -> torch.futures.Future[Any]:
        """The same for code that must not wait."""
        ...


class Done:
    """A collective that was over when its call returned."""

    def wait(self, timeout_s: float | None = None) -> None:
        pass

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


class Starting(ABC):
    """The calls. All ranks make them in the same order, with tensors of the same shape and type.

    Where a backend has a collective of its own a subclass starts that one; here each call is over when it returns.
    """

    rank: int
    world_size: int
    before_call: Callable[[str], None] | None = None
    """Called with the name of every call before it talks to other ranks: where tests put faults."""

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
        """``tensor`` where the calls below can read and write it."""
        return tensor

    def start_reduce(self, tensor: Tensor, op: Op = "sum") -> Started:
        """Reduces over ranks, in place."""
        if op == "sum":
            self.sum(tensor)
            return Done()
        everyone = tensor.new_empty(self.world_size * tensor.numel())
        self.start_gather(everyone, tensor)
        rows = everyone.view(self.world_size, -1)
        tensor.copy_((rows.amin(0) if op == "min" else rows.amax(0)).view_as(tensor))
        return Done()

    def start_gather(self, everyone: Tensor, mine: Tensor) -> Started:
        """Every rank's tensor into ``everyone``, by rank."""
        each = [mine.numel()] * self.world_size
        everyone.copy_(self.all_to_all(mine.reshape(-1).repeat(self.world_size), each, each).view_as(everyone))
        return Done()

    def start_scatter(self, share: Tensor, flat: Tensor) -> Started:
        """The sum over ranks of one share of ``flat`` per rank, this rank's into ``share``."""
        share.copy_(self.sum(flat.clone()).view(self.world_size, -1)[self.rank].view_as(share))
        return Done()

    def start_broadcast(self, tensor: Tensor, root: int) -> Started:
        """Rank ``root``'s tensor, in place."""
        tensor.copy_(self.broadcast(tensor, root))
        return Done()

    def gather_to(self, root: int, mine: Tensor, parts: list[Tensor] | None) -> None:
        """Every rank's tensor into ``parts`` of rank ``root``; the others give None."""
        n = mine.numel()
        send = [n if rank == root else 0 for rank in range(self.world_size)]
        recv = [n if parts is not None else 0] * self.world_size
        came = self.all_to_all(mine.reshape(-1), send, recv)
        for part, got in zip(parts or [], came.split(n) if n else (), strict=False):
            part.copy_(got.view_as(part))
