"""The exchanges of a step between a rank's tables and all ranks: counts, ids, rows, gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.ranks.telemetry import TELEMETRY
from shoal.sharded.all_to_all.backend import AllToAll


class Exchange:
    """The exchanges of a step, between a rank's tables and all ranks.

    While ``BYTEPS_TELEMETRY_ON`` is 1 each is timed, as ``alltoall.id_sizes``, ``alltoall.ids``,
    ``alltoall.embeddings``, ``alltoall.gradients`` and ``alltoall.values``.
    """

    def __init__(self, backend: AllToAll, backward_dtype: torch.dtype, fake_cast: bool = False) -> None:
        self.backend = backend
        self.backward_dtype = backward_dtype
        self.fake_cast = fake_cast

    def ids(self, all_fids: Tensor, sharded_slot_sizes: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Ids and their counts by table, ordered by the rank they came from. The counts tell how many ids will come."""
        if self.backend.world_size == 1:
            return all_fids, sharded_slot_sizes
        came = self.counts(sharded_slot_sizes, k)
        return self.counted_ids(all_fids, sharded_slot_sizes, came, k), came

    def counts(self, sharded_slot_sizes: Tensor, k: int) -> Tensor:
        """Every rank's counts for this one."""
        n = self.backend.world_size
        return self.send("id_sizes", sharded_slot_sizes, [k] * n, [k] * n)

    def counted_ids(self, all_fids: Tensor, sharded_slot_sizes: Tensor, came: Tensor, k: int) -> Tensor:
        n = self.backend.world_size
        send, recv = (sizes.view(n, k).sum(1).tolist() for sizes in (sharded_slot_sizes, came))
        return self.send("ids", all_fids, send, recv)

    def rows(self, rows: Tensor, send: Tensor, recv: Tensor, name: str = "embeddings") -> Tensor:
        if self.backend.world_size == 1:
            return rows
        return self.send(name, rows, send.tolist(), recv.tolist())

    def send(self, name: str, flat: Tensor, send: Sequence[int], recv: Sequence[int] | None = None) -> Tensor:
        """``send[r]`` elements to rank ``r``; what came, by rank."""
        with TELEMETRY.timed(f"alltoall.{name}"):
            return self.backend.all_to_all(flat, send, recv)

    def gradients(self, flat: Tensor, send: Tensor, recv: Tensor) -> Tensor:
        """Gradients to the ranks that own the rows, in ``backward_dtype`` on their way and float32 again after it."""
        received = self.rows(flat, send, recv, "gradients")
        if received.dtype != torch.float32:
            received = received.float()
            if self.fake_cast:
                received = received * 0
        return received

    def cast(self, flat: Tensor) -> Tensor:
        return flat.to(self.backward_dtype)
