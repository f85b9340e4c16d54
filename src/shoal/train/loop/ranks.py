"""The ranks of a run: one process alone, or those that ``torchrun`` or ``shoal launch`` started."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.ranks.control import broadcast_ints, gather_ints
from shoal.errors import ConfigError, DataError, PeerError, ShoalError

_DEADLINE = timedelta(minutes=10)
_KINDS: dict[str, type[Exception]] = {"config": ConfigError, "data": DataError}  # others are a `PeerError`


class Ranks:
    """Who this process is, and the few collectives that training needs; without others they do nothing."""

    def __init__(self) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.started = False
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_DEADLINE)
            self.started = True
        self.rank = dist.get_rank() if self.world > 1 else 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """In place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, which must be JSON; a tuple arrives as a list."""
        if self.world == 1:
            return value
        raw = json.dumps(value).encode() if self.first else b""
        (size,) = broadcast_ints([len(raw)])
        box = _boxed(raw, size)
        dist.broadcast(box, src=0)
        return json.loads(box.numpy().tobytes())

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; values must be JSON."""
        if self.world == 1:
            return [value]
        raw = json.dumps(value).encode()
        sizes = [size for (size,) in gather_ints([len(raw)])]
        boxes = [torch.empty(max(sizes), dtype=torch.uint8, device="cpu") for _ in sizes]
        dist.all_gather(boxes, _boxed(raw, max(sizes)))
        return [json.loads(box[:size].numpy().tobytes()) for box, size in zip(boxes, sizes, strict=True)]

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """What ``work``, which must not talk to other ranks, gives on every rank, by rank; results must be JSON.

        Where it fails on one rank, all ranks raise: that rank its own error, the others one of the same kind that names
        the rank.
        """
        error: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        ended = self.gather([result, None if error is None else _kind(error), str(error)])
        if error is not None:
            raise error
        for rank, (_, kind, text) in enumerate(ended):
            if kind is not None:
                raise _KINDS.get(kind, PeerError)(f"rank {rank}: {text}")
        return [result for result, _, _ in ended]

    def close(self) -> None:
        if self.started and dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def naming_the_lost(ranks: Ranks) -> Iterator[None]:
    """An error of the process group because another rank went away becomes a `PeerError` that says so."""
    try:
        yield
    except RuntimeError as error:
        if ranks.world == 1 or isinstance(error, ShoalError) or not _of_a_connection(error):
            raise
        why = str(error).strip().splitlines()[0].partition("] ")[2].partition(". ")[0]
        raise PeerError(
            f"rank {ranks.rank}: another rank has gone ({why}); the one that ended first says why"
        ) from None


def _of_a_connection(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def _kind(error: Exception) -> str:
    return next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "other")


def _boxed(raw: bytes, size: int) -> Tensor:
    """Bytes at the beginning of a tensor of ``size`` of them."""
    box = torch.zeros(size, dtype=torch.uint8, device="cpu")
    if raw:
        box[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return box


class GradientBucket:
    """All gradients of a model in one flat tensor with some numbers behind them, so that a step needs one all-reduce.

    Parameters' ``grad`` are views into it; `zero` replaces ``optimizer.zero_grad``.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], numbers: int) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        total = sum(p.numel() for p in self._parameters)
        first = self._parameters[0] if self._parameters else torch.empty(0, device="cpu")
        self.flat = torch.zeros(total + numbers, dtype=torch.float32, device=first.device)
        self.numbers = self.flat[total:]
        self._views, at = [], 0
        for parameter in self._parameters:
            self._views.append(self.flat[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()

    def zero(self) -> None:
        self.flat.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view
