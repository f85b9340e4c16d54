"""The exchanges that aggregators are built from, over a process group or over any byte transport.

Both kinds count their traffic: ``bytes_sent``, ``bytes_received``, ``messages`` (sent) and ``wait_s``.
"""

import hashlib
import re
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.comm.launch.config import DistributedConfig
from shoal.errors import AggregationError, ConfigError, DeadlineError, DistributedError, PeerError, TransportError


@contextmanager
def named_errors(what: str, rank: int) -> Iterator[None]:
    """Turn errors of `Ranks` or a backend into a ``TransportError`` that names the operation and the missing rank."""
    try:
        yield
    except DistributedError:
        raise
    except (DeadlineError, PeerError) as error:
        kind = "timeout" if isinstance(error, DeadlineError) else "peer_lost"
        peer = error.ranks[0] if error.ranks else None
        raise TransportError(f"rank {rank}: {what} failed: {error}", kind=kind, peer=peer) from error
    except RuntimeError as error:
        text = str(error)
        if re.search(r"time[d ]*.?out", text, re.IGNORECASE):
            kind = "timeout"
        elif re.search(r"closed|connect|reset|broken pipe|peer|abort", text, re.IGNORECASE):
            kind = "peer_lost"
        else:
            kind = "protocol"
        raise TransportError(f"rank {rank}: {what} failed: {text}", kind=kind) from error


class Exchange:
    """Base of both kinds of exchange, with their counters."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.start()

    def start(self) -> None:
        self.bytes_sent = self.bytes_received = self.messages = 0
        self.wait_s = 0.0

    def extremes(self, value: int) -> tuple[int, int]:
        """The smallest and the largest ``value`` (63 bits and a sign) of all ranks."""
        raise NotImplementedError

    def share(self, value: bytes) -> list[bytes]:
        """Every rank's ``value``, by rank; at most 64 bytes, and the same length on all ranks."""
        raise NotImplementedError

    def share_int(self, value: int) -> list[int]:
        return [struct.unpack("<q", v)[0] for v in self.share(struct.pack("<q", value))]

    def share_float(self, value: float) -> list[float]:
        return [struct.unpack("<d", v)[0] for v in self.share(struct.pack("<d", value))]

    def all_gather(self, data: Tensor) -> list[Tensor]:
        """Every rank's ``data`` (uint8, the same length on all ranks), by rank."""
        raise NotImplementedError

    def sum_in_order(self, flat: Tensor, owner: int, divisor: float | None) -> Tensor:
        """The sum of ``flat`` in rank order, divided by ``divisor``; ``owner`` computes it and sends it to all."""
        raise NotImplementedError

    def broadcast_tensors(self, tensors: Sequence[Tensor] | None, bucket_bytes: int) -> list[Tensor]:
        """Rank 0's tensors, on every rank; ``AggregationError`` on all ranks if rank 0 passes None."""
        raise NotImplementedError

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.wait_s += time.perf_counter() - began


def add_in_order(parts: Sequence[Tensor], divisor: float | None) -> Tensor:
    """Add the parts in rank order, then divide once."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return divide_(total, divisor)


def divide_(flat: Tensor, divisor: float | None) -> Tensor:
    """Divide in place, by a tensor: given a number, CUDA multiplies by a rounded reciprocal instead."""
    if divisor is not None and flat.numel():
        flat /= torch.full((), divisor, dtype=flat.dtype, device=flat.device)
    return flat


def check_world(config: DistributedConfig, transport: Any, who: str) -> None:
    if config.world_size == 1:
        return
    if transport is None:
        raise ConfigError(f"{who}: transport must not be None when world_size is {config.world_size}")
    if (transport.rank, transport.world_size) != (config.rank, config.world_size):
        raise ConfigError(
            f"{who}: the transport must have the configuration's rank {config.rank} of {config.world_size}, got rank "
            f"{transport.rank} of {transport.world_size}"
        )


def make_exchange(transport: Any) -> Exchange:
    """The exchange over `Ranks` or a transport; a transport without collectives exchanges byte messages."""
    from shoal.comm.ranks.mpi import MpiTransport
    from shoal.comm.ranks.ranks import Ranks
    from shoal.comm.ranks.torch_ranks import default_ranks
    from shoal.train.aggregation.exchange_bytes import ByteExchange
    from shoal.train.aggregation.exchange_group import GroupExchange
    from shoal.train.aggregation.exchange_mpi import MpiExchange

    if isinstance(transport, Ranks):
        return GroupExchange(transport, ordered=True)
    if isinstance(transport, MpiTransport):
        return MpiExchange(transport)
    if getattr(transport, "collectives", False):
        return GroupExchange(default_ranks(transport.group))
    return ByteExchange(transport)


def signature(gradients: Sequence[Any], extra: Any = None) -> int:
    """A 63-bit hash of count, shapes, dtypes and ``extra``."""
    text = repr(([(tuple(g.shape), str(g.dtype)) for g in gradients], extra))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def agree(exchange: Exchange, gradients: Sequence[Tensor], extra: Any = None, problem: Exception | None = None) -> None:
    """Raise ``AggregationError`` on every rank unless all reduce the same tensors.

    A rank with a ``problem`` raises that instead. It first sends a value that no signature can have, so that the other
    ranks do not wait for it.
    """
    mine = -1 - exchange.rank if problem is not None else signature(gradients, extra)
    low, high = exchange.extremes(mine)
    if problem is not None:
        raise problem
    if low != high:
        shapes = ", ".join(f"{tuple(g.shape)} {str(g.dtype).removeprefix('torch.')}" for g in gradients[:8]) or "none"
        more = f" and {len(gradients) - 8} more" if len(gradients) > 8 else ""
        raise AggregationError(
            f"rank {exchange.rank} of {exchange.world_size}: all ranks must pass gradients of the same count, shapes "
            "and dtypes to aggregators with the same settings, but they differ or a rank failed earlier; the gradients "
            f"of this rank ({len(gradients)}): "
            f"{shapes}{more}. Nothing was reduced."
        )


def as_numpy(flat: Tensor) -> np.ndarray:
    return flat.detach().cpu().numpy()
