"""Exchanges over MPI's non-blocking collectives, which are polled so that every wait has a deadline."""

import time
from typing import Any

import torch
from torch import Tensor

from shoal.comm.ranks.mpi import MpiTransport
from shoal.comm.ranks.transport import Deadline
from shoal.errors import TransportError
from shoal.train.aggregation.exchange import Exchange
from shoal.train.aggregation.exchange_group import GroupExchange


class MpiExchange(GroupExchange):
    """Exchanges over an MPI communicator; tensors are staged on the CPU."""

    def __init__(self, transport: MpiTransport) -> None:
        Exchange.__init__(self, transport.rank, transport.world_size)
        self.transport = transport
        self.device = torch.device("cpu")

    def to_wire(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def _run(self, start: Any) -> None:
        """Start one collective and wait for it, at most for the transport's timeout."""
        _Polled(self.transport, start).wait()

    def _max(self, tensor: Tensor) -> None:
        mpi, comm = self.transport.mpi, self.transport.comm
        self._run(lambda: comm.Iallreduce(mpi.IN_PLACE, tensor.numpy(), mpi.MAX))

    def _gather_all(self, everyone: Tensor, mine: Tensor) -> None:
        self._run(lambda: self.transport.comm.Iallgather(mine.numpy(), everyone.numpy()))

    def _gather_to(self, owner: int, mine: Tensor, parts: list[Tensor] | None) -> None:
        everyone = (
            torch.empty(self.world_size * mine.numel(), dtype=mine.dtype, device="cpu") if parts is not None else None
        )
        target = everyone.numpy() if everyone is not None else None
        self._run(lambda: self.transport.comm.Igather(mine.numpy(), target, owner))
        if parts is not None and everyone is not None:
            for part, got in zip(parts, everyone.split(max(1, mine.numel())), strict=bool(mine.numel())):
                part.copy_(got)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        self._run(lambda: self.transport.comm.Ibcast(tensor.numpy(), root))

    def _start_sum(self, flat: Tensor) -> Any:
        mpi, comm = self.transport.mpi, self.transport.comm
        return _Polled(self.transport, lambda: comm.Iallreduce(mpi.IN_PLACE, flat.numpy(), mpi.SUM))


class _Polled:
    """A running request, with the ``wait`` of torch's work handles."""

    def __init__(self, transport: MpiTransport, start: Any) -> None:
        self.transport = transport
        with transport.calls:
            self.request = start()

    def wait(self) -> None:
        deadline, turn = Deadline(self.transport.default_timeout_s), 0
        while True:
            with self.transport.calls:
                if self.request.Test():
                    return
            if deadline.over():
                raise TransportError(
                    f"rank {self.transport.rank} waited {deadline.seconds:g} s in an MPI collective; see the other "
                    "ranks' logs",
                    kind="timeout",
                )
            turn += 1
            time.sleep(0 if turn < 1000 else 0.0005)
