"""The exchanges of a step between a rank's tables and all ranks: counts, ids, rows, gradients."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.ranks.ranks import AllToAll, Heads, Ranks, as_ranks
from shoal.comm.ranks.telemetry import TELEMETRY
from shoal.errors import PeerError

FIND, ROWS, UPDATE, WRITE = range(1, 5)
_CALLS = {FIND: "find", ROWS: "the rows of find", UPDATE: "the update of find", WRITE: "write"}
_NAME_BYTES = 24


@dataclass(frozen=True)
class Call:
    """The identity of an exchange, sent to the other ranks; all ranks must be in the same one."""

    kind: int
    number: int
    names: tuple[str, ...]
    """The names of the tables."""
    detail: int = 0
    """The other values that must be equal on all ranks, as one number."""
    failed: bool = False
    """Whether this rank cannot do its part. The others learn it from this exchange and do not wait."""

    def head(self) -> list[int]:
        joined = "\0".join(self.names).encode()
        name = ", ".join(self.names).encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        words = [int.from_bytes(name[i : i + 8], "little", signed=True) for i in range(0, _NAME_BYTES, 8)]
        return [self.kind, self.number, zlib.crc32(joined), self.detail, int(self.failed), *words]

    def check(self, heads: Heads, rank: int) -> None:
        """Raise unless every rank is in this exchange and can do its part."""
        mine = heads[rank]
        failed = [r for r, head in enumerate(heads) if head[4] and r != rank]
        if failed and not self.failed:
            raise PeerError(
                f"rank {rank}, {_describe(mine)}: rank(s) {failed} refused their part; see their logs. Nothing was "
                "changed"
            )
        other = [r for r, head in enumerate(heads) if head[:4] != mine[:4]]
        if other and not self.failed:
            theirs = "; ".join(f"rank {r} is in {_describe(heads[r])}" for r in other[:4])
            raise PeerError(
                f"rank {rank} is in {_describe(mine)}, but {theirs}. All ranks must make the same calls in the same "
                "order, with the same arguments except ids and gradients; nothing was changed"
            )


def _describe(head: Sequence[int]) -> str:
    kind, number, _, detail, _, *words = head
    name = b"".join(word.to_bytes(8, "little", signed=True) for word in words).rstrip(b"\0").decode(errors="replace")
    more = f" [{detail}]" if detail else ""
    return f"{_CALLS.get(kind, 'another call')} {number}{more} of table(s) {name!r}"


class Exchange:
    """The exchanges of a step between a rank's tables and all ranks.

    While ``BYTEPS_TELEMETRY_ON`` is 1, each exchange is timed, as ``alltoall.id_sizes``, ``alltoall.ids``,
    ``alltoall.embeddings``, ``alltoall.gradients`` or ``alltoall.values``.
    """

    def __init__(self, backend: AllToAll, backward_dtype: torch.dtype, fake_cast: bool = False) -> None:
        self.backend = backend
        self.main: Ranks = as_ranks(backend)
        self.backward_dtype = backward_dtype
        self.fake_cast = fake_cast

    @property
    def ranks(self) -> Ranks:
        """The channel of the calling thread."""
        return self.main.current

    def send(
        self,
        name: str,
        call: Call | None,
        flat: Tensor,
        send: Sequence[int],
        recv: Sequence[int],
    ) -> Tensor:
        """Send ``send[r]`` elements to rank ``r``; returns the received ones, by rank. All ranks must be in ``call``.

        ``call`` is None if the exchange before this one has just checked that.
        """
        ranks = self.ranks
        rank = ranks.rank
        with TELEMETRY.timed(f"alltoall.{name}"):
            came, heads = ranks.exchange(flat, send, recv, None if call is None else call.head())
        if call is not None:
            call.check(heads, rank)
        if came is None and (call is None or not call.failed):
            exchange = name if call is None else f"{name} of {_describe(call.head())}"
            raise PeerError(
                f"rank {rank}, {exchange}: expected {recv} elements by rank, but one rank sent more or fewer"
            )
        return flat if came is None else came

    def ids(self, call: Call, all_fids: Tensor, sharded_slot_sizes: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Exchange counts, then ids; returns the received ids and their counts by table, ordered by sending rank."""
        n = self.ranks.world_size
        if n == 1:
            return all_fids, sharded_slot_sizes
        with self.ranks.turn:
            came = self.send("id_sizes", call, sharded_slot_sizes, [k] * n, [k] * n)
            send, recv = (sizes.view(n, k).sum(1).tolist() for sizes in (sharded_slot_sizes, came))
            return self.send("ids", None, all_fids, send, recv), came

    def rows(self, call: Call, rows: Tensor, send: Sequence[int], recv: Sequence[int]) -> Tensor:
        if self.ranks.world_size == 1:
            return rows
        return self.send("embeddings", call, rows, send, recv)

    def gradients(self, call: Call, flat: Tensor, send: Sequence[int], recv: Sequence[int]) -> Tensor:
        """Send gradients to the ranks that own the rows, as ``backward_dtype``; the received ones are float32."""
        return self.as_float(flat if self.ranks.world_size == 1 else self.send("gradients", call, flat, send, recv))

    def as_float(self, received: Tensor) -> Tensor:
        """Convert gradients received as ``backward_dtype`` to float32."""
        if received.dtype != torch.float32:
            received = received.float()
            if self.fake_cast:
                received = received * 0
        return received

    def cast(self, flat: Tensor) -> Tensor:
        return flat.to(self.backward_dtype)
