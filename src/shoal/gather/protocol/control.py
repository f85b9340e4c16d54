"""Small messages between ranks: our own gloo group, a deadline on every wait, and the numbers of missing ranks."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shoal.comm.ranks import collectives
from shoal.comm.ranks.started import Started
from shoal.comm.ranks.torch_ranks import ProcessGroup
from shoal.errors import DeadlineError, PeerError
from shoal.gather.errors import RankFailure

_ranks: "WeakKeyDictionary[Any, ProcessGroup]" = WeakKeyDictionary()


def _control_ranks(group: Any, timeout_s: float) -> ProcessGroup:
    """The gloo group that is created once for a user's group, and again after it has failed."""
    ranks, timeout = _ranks.get(group), timedelta(seconds=timeout_s)
    if ranks is None or ranks.watch.broken:  # the same on every rank: ranks must create groups in the same order
        ranks = _ranks[group] = ProcessGroup(collectives.gloo_group(collectives.members(group), timeout))
    else:
        ranks.key._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
    ranks.timeout_s = timeout_s
    return ranks


class Control:
    """The collectives of a gather over one group; ``group=None`` is this process alone and every call is local.

    All methods block and must be called on a worker thread. A failure becomes RankFailure with the missing ranks.
    """

    def __init__(self, group: Any = None, *, timeout_s: float = 240.0) -> None:
        self.timeout_s = timeout_s
        self.rank, self.world = 0, 1
        self._ranks: ProcessGroup | None = None
        if group is not None:
            self.rank, self.world = collectives.rank_in(group), collectives.size_of(group)
            if self.world > 1:
                try:
                    self._ranks = _control_ranks(group, max(timeout_s, 1.0))
                except Exception as error:
                    raise RankFailure((), f"the control group could not be created ({error})") from error

    @property
    def ranks(self) -> ProcessGroup:
        assert self._ranks is not None
        return self._ranks

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (DeadlineError, PeerError) as error:
            raise RankFailure(error.ranks, str(error)) from error

    def answer(self) -> bool:
        """Whether another rank gave up; if so, report in its roll call that this rank, though busy, is alive."""
        return self._ranks is not None and self._ranks.watch.answer()

    def give_up(self) -> None:
        """Notify the others, which may wait for this rank in a collective, that it left."""
        if self._ranks is not None and not self._ranks.watch.broken:
            self._ranks.watch.roll_call(time.monotonic())

    # ---- collectives

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return rank 0's bytes on every rank."""
        if self.world == 1:
            return data
        size = torch.tensor([len(data)], device="cpu")
        self.wait([self.start_broadcast(size, 0)])
        buffer = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
        if self.rank == 0 and data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if len(buffer):
            self.wait([self.start_broadcast(buffer, 0)])
        return buffer.numpy().tobytes()

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank."""
        if self.world == 1:
            return [data]
        sizes = self._gather(torch.tensor([len(data)], device="cpu"))
        longest = int(sizes.max())
        if longest == 0:
            return [b""] * self.world
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = self._gather(padded).view(self.world, longest)
        return [part[:size].numpy().tobytes() for part, size in zip(parts, sizes.tolist(), strict=True)]

    def _gather(self, mine: Tensor) -> Tensor:
        everyone = mine.new_empty(self.world * len(mine))
        with self._failing():
            self.ranks.start_gather(everyone, mine).wait(self.timeout_s)
        return everyone

    def reduce_ints(self, values: list[int], op: collectives.Op) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        self.reduce_tensor(tensor, op)
        return tensor.tolist()

    def reduce_tensor(self, tensor: Tensor, op: collectives.Op) -> Tensor:
        """all_reduce in place."""
        if self.world > 1:
            with self._failing():
                self.ranks.start_reduce(tensor, op).wait(self.timeout_s)
        return tensor

    def minimum(self, value: int) -> int:
        return self.reduce_ints([value], "min")[0]

    def agree(self, value: int) -> bool:
        """Whether all ranks have the same 63-bit value."""
        low, high = self.reduce_ints([value, -value], "min")
        return low == -high

    def all_to_all(self, flat: Tensor, send: Sequence[int], recv: Sequence[int]) -> Tensor:
        """Send ``send[r]`` elements to rank ``r``; return the received ones, by rank."""
        if self.world == 1:
            return flat
        with self._failing():
            return self.ranks.all_to_all(flat, send, recv)

    # ---- pieces of larger exchanges: the caller waits, with the same deadline

    def start_broadcast(self, tensor: Tensor, src: int) -> Started:
        with self._failing():
            return self.ranks.start_broadcast(tensor, src)

    def start_send(self, tensor: Tensor, dst: int) -> Started:
        with self._failing():
            return self.ranks.start_send(tensor, dst)

    def start_recv(self, tensor: Tensor, src: int) -> Started:
        with self._failing():
            return self.ranks.start_recv(tensor, src)

    def wait(self, works: Sequence[Started]) -> None:
        """Wait for started pieces."""
        with self._failing():
            for work in works:
                work.wait(self.timeout_s)
