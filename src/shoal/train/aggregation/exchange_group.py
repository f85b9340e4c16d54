"""Exchanges over `Ranks`: waits have deadlines, and errors name the missing ranks."""

import json
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.ranks.ranks import Ranks
from shoal.comm.ranks.serialization import DTYPES
from shoal.comm.ranks.started import Done
from shoal.errors import AggregationError
from shoal.train.aggregation.buckets import flatten, make_buckets, unflatten
from shoal.train.aggregation.exchange import Exchange, add_in_order, named_errors

NAMES = {str(d).removeprefix("torch."): d for d in DTYPES}


class GroupExchange(Exchange):
    """Exchanges between `Ranks`.

    Args:
        ordered: add rank 0, 1, ..., W - 1, so that the bits of sums are reproducible; otherwise the backend sums.
    """

    def __init__(self, ranks: Ranks, *, ordered: bool = False) -> None:
        super().__init__(ranks.rank, ranks.world_size)
        self.ranks = ranks
        self.ordered = ordered
        self.device = ranks.on_wire(torch.empty(0, device="cpu")).device

    def _max(self, tensor: Tensor) -> None:
        self.ranks.start_reduce(tensor, "max").wait()

    def _gather_all(self, everyone: Tensor, mine: Tensor) -> None:
        self.ranks.start_gather(everyone, mine).wait()

    def _gather_to(self, owner: int, mine: Tensor, parts: list[Tensor] | None) -> None:
        self.ranks.gather_to(owner, mine, parts)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        self.ranks.start_broadcast(tensor, root).wait()

    def _start_sum(self, flat: Tensor) -> Any:
        if self.ordered:
            self.ranks.sum(flat)
            return Done()
        return self.ranks.start_reduce(flat)

    def extremes(self, value: int) -> tuple[int, int]:
        both = torch.tensor([value, -value], dtype=torch.int64, device=self.device)
        with named_errors("the agreement before the reduction", self.rank), self.waiting():
            self._max(both)
        high, low = both.tolist()
        return -low, high

    def share(self, value: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(value), dtype=torch.uint8).to(self.device)
        everyone = torch.empty(self.world_size * len(value), dtype=torch.uint8, device=self.device)
        with named_errors("an exchange of flags", self.rank), self.waiting():
            self._gather_all(everyone, mine)
        return [bytes(part) for part in everyone.cpu().reshape(self.world_size, -1).tolist()]

    def to_wire(self, tensor: Tensor) -> Tensor:
        """``tensor`` on a device that the group's backend can read; int16 becomes int32, as no backend supports it."""
        return self.ranks.on_wire(tensor.int() if tensor.dtype == torch.int16 else tensor)

    def all_gather(self, data: Tensor) -> list[Tensor]:
        if not len(data):
            return [data] * self.world_size
        device, data = data.device, self.to_wire(data)
        everyone = torch.empty(self.world_size * len(data), dtype=torch.uint8, device=data.device)
        with named_errors("all_gather", self.rank), self.waiting():
            self._gather_all(everyone, data)
        self._count((self.world_size - 1) * len(data), (self.world_size - 1) * len(data), self.world_size - 1)
        return list(everyone.to(device).reshape(self.world_size, -1))

    def _count(self, sent: int, received: int, messages: int) -> None:
        self.bytes_sent += sent
        self.bytes_received += received
        self.messages += messages

    def all_reduce(self, flat: Tensor) -> Any:
        """Start the backend's sum of ``flat``, in place; bytes are counted as if by a ring."""
        moved = 2 * (self.world_size - 1) * flat.nbytes // self.world_size
        self._count(moved, moved, 1)
        with named_errors("all_reduce", self.rank):
            return self._start_sum(flat)

    def finish(self, work: Any) -> None:
        with named_errors("all_reduce", self.rank), self.waiting():
            work.wait()

    def sum_in_order(self, flat: Tensor, owner: int, divisor: float | None) -> Tensor:
        mine, flat = self.rank == owner, self.to_wire(flat)
        parts = [torch.empty_like(flat) for _ in range(self.world_size)] if mine else None
        with named_errors("gather to the rank that adds", self.rank), self.waiting():
            self._gather_to(owner, flat, parts)
        total = add_in_order(parts, divisor) if parts is not None else torch.empty_like(flat)
        with named_errors("broadcast of the sum", self.rank), self.waiting():
            self._broadcast(total, owner)
        peers = self.world_size - 1 if mine else 1
        self._count(peers * flat.nbytes, peers * flat.nbytes, peers)
        return total

    def broadcast_tensors(self, tensors: Sequence[Tensor] | None, bucket_bytes: int) -> list[Tensor]:
        head = self._broadcast_head(tensors)
        if head is None:
            raise AggregationError(f"rank {self.rank}: rank 0 has no parameters to broadcast")
        if self.rank == 0:
            assert tensors is not None
            given = [t.detach() for t in tensors]
        else:
            given = [torch.empty(shape, dtype=NAMES[name], device=device) for shape, name, device in head]
        result: list[Tensor] = [torch.empty(0, device="cpu")] * len(given)
        for bucket in make_buckets(given, bucket_bytes):
            flat = flatten([given[i] for i in bucket])
            wire = self.to_wire(flat)
            if wire.numel():
                with named_errors("broadcast of the parameters", self.rank), self.waiting():
                    self._broadcast(wire.view(torch.uint8), 0)
            for i, tensor in zip(bucket, unflatten(wire, [given[i] for i in bucket]), strict=True):
                result[i] = tensor
            peers = self.world_size - 1
            self._count(*((peers * flat.nbytes, 0, peers) if self.rank == 0 else (0, flat.nbytes, 0)))
        return result

    def _broadcast_head(self, tensors: Sequence[Tensor] | None) -> list | None:
        """Shapes, dtypes and device types, so that the others can allocate; None when rank 0 has no tensors."""
        text = b""
        if self.rank == 0:
            described = None
            if tensors is not None:
                described = [(list(t.shape), str(t.dtype).removeprefix("torch."), t.device.type) for t in tensors]
            text = json.dumps(described).encode()
        (size,) = struct.unpack("<q", self._from_root(struct.pack("<q", len(text)), 8))
        return json.loads(self._from_root(text, size))

    def _from_root(self, data: bytes, size: int) -> bytes:
        raw = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if self.rank == 0
            else torch.empty(size, dtype=torch.uint8, device="cpu")
        )
        raw = raw.to(self.device)
        with named_errors("broadcast of the parameters' description", self.rank), self.waiting():
            self._broadcast(raw, 0)
        return bytes(raw.cpu().tolist())
