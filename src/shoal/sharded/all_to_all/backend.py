"""The one thing that synchronous tables ask of a network: ``all_to_all`` of flat tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.buffers import empty_flat
from shoal.errors import ConfigError
from shoal.sharded.all_to_all.same_host import rings_of


class AllToAll(Protocol):
    """N ranks that exchange parts of flat tensors; all of them call in the same order."""

    rank: int
    world_size: int

    def all_to_all(self, flat: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int] | None = None) -> Tensor:
        """Sends ``send_splits[r]`` elements to rank ``r``; what came, rank 0's part first."""
        ...

    def gather_totals(self, value: int) -> list[int]:
        """Every rank's value, by rank."""
        ...


class SingleRank:
    """No network: one rank that owns everything."""

    rank = 0
    world_size = 1

    def all_to_all(self, flat: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int] | None = None) -> Tensor:
        return flat

    def gather_totals(self, value: int) -> list[int]:
        return [value]


class ProcessGroup:
    """A torch process group (the default one unless given): gloo or NCCL, as it was started.

    CPU tensors of gloo's ranks on one machine go through shared memory (`all_to_all.same_host`). Tensors may be on any
    device: what the group cannot send from where it is is copied to where it can (NCCL takes the current GPU's memory,
    gloo the host's), and what came is copied to the device of what was sent.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ConfigError("a synchronous table needs a process group; call torch.distributed.init_process_group()")
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        backends = str(dist.get_backend_config(group))
        self._gpu = "nccl" in backends
        self._host = "gloo" in backends or "mpi" in backends

    def _wire(self, device: torch.device) -> torch.device:
        """Where tensors of a device are sent from."""
        if device.type == "cuda":
            return device if self._gpu else torch.device("cpu")
        return device if self._host or not self._gpu else torch.device("cuda", torch.cuda.current_device())

    def all_to_all(self, flat: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int] | None = None) -> Tensor:
        if recv_splits is None:
            recv_splits = self._one_each(torch.tensor(send_splits, dtype=torch.int64, device="cpu"))
        total = sum(recv_splits)
        sent = flat.to(self._wire(flat.device))
        out = empty_flat(total) if sent.dtype == torch.float32 and sent.is_cpu else sent.new_empty(total)
        self._exchange(out, sent, recv_splits, send_splits)
        return out.to(flat.device)

    def _exchange(self, out: Tensor, flat: Tensor, recv: Sequence[int], send: Sequence[int]) -> None:
        rings = rings_of(self.group) if flat.is_cpu and self.world_size > 1 else None
        if rings is None:
            dist.all_to_all_single(out, flat, list(recv), list(send), group=self.group)
            return
        if sum(send) != flat.numel():
            raise ConfigError(f"send_splits add up to {sum(send)}, the tensor has {flat.numel()} elements")
        rings.all_to_all(out, flat.contiguous(), recv, send)

    def gather_totals(self, value: int) -> list[int]:
        return self._one_each(torch.full((self.world_size,), value, dtype=torch.int64, device="cpu"))

    def _one_each(self, mine: Tensor) -> list[int]:
        """Element ``r`` goes to rank ``r``."""
        mine = mine.to(self._wire(mine.device))
        out = torch.empty_like(mine)
        self._exchange(out, mine, [1] * self.world_size, [1] * self.world_size)
        return out.tolist()


def default_backend(group: Any = None) -> AllToAll:
    """The process group where there is one, else a single rank."""
    if group is not None or (dist.is_available() and dist.is_initialized()):
        return ProcessGroup(group)
    return SingleRank()
