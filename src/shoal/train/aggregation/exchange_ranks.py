"""Exchanges on `Ranks`, whatever carries them: waits have deadlines, and errors name the ranks that are missing."""

from typing import Any

import torch
from torch import Tensor

from shoal.comm.ranks.ranks import Ranks
from shoal.train.aggregation.exchange import Exchange
from shoal.train.aggregation.exchange_group import GroupExchange


class RanksExchange(GroupExchange):
    """Exchanges between `Ranks`; tensors may be on any device."""

    def __init__(self, ranks: Ranks) -> None:
        Exchange.__init__(self, ranks.rank, ranks.world_size)
        self.ranks = ranks
        self.device = torch.device("cpu")

    def to_wire(self, tensor: Tensor) -> Tensor:
        return tensor

    def _max(self, tensor: Tensor) -> None:
        everyone = tensor.new_empty(self.world_size * tensor.numel())
        self._gather_all(everyone, tensor)
        tensor.copy_(everyone.view(self.world_size, -1).amax(0).view_as(tensor))

    def _gather_all(self, everyone: Tensor, mine: Tensor) -> None:
        each = [mine.numel()] * self.world_size
        everyone.copy_(self.ranks.all_to_all(mine.reshape(-1).repeat(self.world_size), each, each).view_as(everyone))

    def _gather_to(self, owner: int, mine: Tensor, parts: list[Tensor] | None) -> None:
        n = mine.numel()
        send = [n if rank == owner else 0 for rank in range(self.world_size)]
        recv = [n if parts is not None else 0] * self.world_size
        came = self.ranks.all_to_all(mine.reshape(-1), send, recv)
        for part, got in zip(parts or [], came.view(-1 if n else self.world_size, n), strict=False):
            part.copy_(got.view_as(part))

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        tensor.copy_(self.ranks.broadcast(tensor, root))

    def _start_sum(self, flat: Tensor) -> Any:
        """Sums at once; the handle has nothing left to wait for."""
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(self.ranks.sum(flat))
        return done
