"""Waves of raw chunks from their owners to the ranks that need them: compressed bytes travel, never gradients."""

import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.gather.errors import GatherError
from shoal.gather.payload.codec import VALUE_DTYPES, value_table
from shoal.gather.payload.payload_ref import CODES, quant_bytes, value_itemsize
from shoal.gather.protocol.control import Control
from shoal.gather.protocol.holding import Holding, chunk_bytes_of, run_of

HEADER_BYTES = 16
_HEADER = struct.Struct("<4sIQ")
_OK, _POISON = 0, 1


class Poisoned(GatherError):
    """An owner could not read a payload that it had validated; all ranks abandon the update together."""


@dataclass
class Slice:
    """Some chunks of one parameter of one peer, ready for summing."""

    uid: int
    idxs: Tensor
    vals: Tensor
    table: Tensor
    code: str


@dataclass
class Pending:
    """A started wave: its works, its buffers, and their host memory."""

    index: int
    ids: Tensor
    uids: Sequence[int]
    replicated: bool
    works: list[Any] = field(default_factory=list)
    buffers: dict[int, Tensor] = field(default_factory=dict)
    unreadable: set[int] = field(default_factory=set)
    keep: list[Tensor] = field(default_factory=list)
    staged_bytes: int = 0
    copied_bytes: int = 0  # of these, copies that are only sent


class Waves:
    """Starts and finishes waves. If everything is on this rank, a wave reads the spill files directly.

    A wave stages at most one slice per peer, for any number of ranks: an owner sends adjacent chunks directly from
    its mapping, and copies other chunks for as many ranks at a time as it owns peers of the wave.
    """

    def __init__(self, holding: Holding, control: Control) -> None:
        self.holding, self.control = holding, control
        self.local = control.world == 1 or holding.everywhere
        self.bytes_received = 0
        self.staged_bytes = self.peak_staged_bytes = 0
        self.seconds = 0.0

    def start(self, index: int, ids: Sequence[Tensor], uids: Sequence[int], *, replicated: bool) -> Pending:
        """Start sending chunks ``ids[rank]`` of a parameter of some peers to each rank; all ranks must call it."""
        begin = time.perf_counter()
        pending = Pending(index, ids[self.control.rank], uids, replicated)
        if not self.local and replicated:
            self._broadcast(pending)
        elif not self.local:
            # Receives first: a send may have to wait for a rank that is itself about to send.
            for uid in uids:
                if self.holding.owners[uid] != self.control.rank:
                    self._receive(uid, pending)
            self._send([uid for uid in uids if self.holding.owners[uid] == self.control.rank], ids, pending)
        self.seconds += time.perf_counter() - begin
        return pending

    def _stage(self, pending: Pending, n: int) -> Tensor:
        self._account(pending, n)
        return torch.empty(n, dtype=torch.uint8, device="cpu")

    def _account(self, pending: Pending, n: int) -> None:
        pending.staged_bytes += n
        self.staged_bytes += n
        self.peak_staged_bytes = max(self.peak_staged_bytes, self.staged_bytes)

    def _unstage(self, pending: Pending, n: int) -> None:
        pending.staged_bytes -= n
        self.staged_bytes -= n

    def release(self, pending: Pending) -> None:
        """Free a finished wave's memory; its slices must not be used afterwards."""
        pending.buffers.clear()
        pending.keep.clear()
        self._unstage(pending, pending.staged_bytes)

    def _sizes(self, uid: int, index: int, chunks: int) -> tuple[int, int, int]:
        """Bytes of a slice's head (header and quant block), indices and values."""
        param, code = self.holding.spec.params[index], self.holding.codes[uid][index]
        idxs = chunks * param.index_bytes
        raw = self.holding.slice_bytes(uid, index, chunks)
        vals = chunks * value_itemsize(code) * param.k
        return HEADER_BYTES + raw - idxs - vals, idxs, vals

    def _head(self, uid: int, pending: Pending) -> bytes:
        """Header and quant block of this rank's peer's slice; a poison header if it cannot be read."""
        status, quant = _OK, b""
        try:
            ref = self.holding.refs[uid]
            ref.check_readable()
            quant = ref.quant_block(pending.index)
        except Exception:
            status = _POISON
            pending.unreadable.add(uid)
        head = _HEADER.pack(b"SLOT", status, uid) + quant
        return head.ljust(self._sizes(uid, pending.index, 0)[0], b"\0")

    def _broadcast(self, pending: Pending) -> None:
        for uid in pending.uids:
            owner = self.holding.owners[uid]
            buffer = pending.buffers[uid] = self._stage(pending, sum(self._sizes(uid, pending.index, len(pending.ids))))
            if owner == self.control.rank:
                head = self._head(uid, pending)
                at = len(head)
                buffer[:at] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
                if uid not in pending.unreadable:
                    for part in chunk_bytes_of(self.holding.refs[uid], pending.index, pending.ids):
                        buffer[at : at + len(part)] = part
                        at += len(part)
            pending.works.append(self.control.start_broadcast(buffer, owner))

    def _receive(self, uid: int, pending: Pending) -> None:
        sizes = self._sizes(uid, pending.index, len(pending.ids))
        buffer = pending.buffers[uid] = self._stage(pending, sum(sizes))
        for part in buffer.split(sizes):
            if len(part):
                pending.works.append(self.control.start_recv(part, self.holding.owners[uid]))

    def _send(self, own: Sequence[int], ids: Sequence[Tensor], pending: Pending) -> None:
        """Send each rank its chunks of this rank's peers. At most ``len(own)`` copies exist at a time."""
        copies: deque[tuple[int, list[Any], list[Tensor]]] = deque()
        for uid in own:
            head = self._stage(pending, self._sizes(uid, pending.index, 0)[0])
            head.copy_(torch.frombuffer(bytearray(self._head(uid, pending)), dtype=torch.uint8))
            pending.keep.append(head)
            for rank in (r for r in range(self.control.world) if r != self.control.rank):
                size = sum(self._sizes(uid, pending.index, len(ids[rank]))[1:])
                copy = uid in pending.unreadable or run_of(ids[rank]) is None
                if copy and len(copies) >= len(own):
                    n, works, _ = copies.popleft()
                    self.control.wait(works)
                    self._unstage(pending, n)
                if uid in pending.unreadable:  # bytes that a receiver waits for, but never reads
                    parts = list(self._stage(pending, size).split(self._sizes(uid, pending.index, len(ids[rank]))[1:]))
                else:
                    parts = list(chunk_bytes_of(self.holding.refs[uid], pending.index, ids[rank]))
                    self._account(pending, size if copy else 0)
                works = [self.control.start_send(part, rank) for part in (head, *parts) if len(part)]
                if copy:
                    copies.append((size, works, parts))
                else:
                    pending.works += works
                    pending.keep += parts
        for n, works, parts in copies:
            pending.copied_bytes += n
            pending.works += works
            pending.keep += parts

    def finish(self, pending: Pending) -> list[Slice]:
        """Return the slices of a wave, in the order of its UIDs. If an owner cannot read, all ranks raise Poisoned."""
        if self.local:
            return [self._local_slice(uid, pending) for uid in pending.uids]
        begin = time.perf_counter()
        self.control.wait(pending.works)
        pending.keep.clear()
        self._unstage(pending, pending.copied_bytes)
        slices = []
        for uid in pending.uids:
            owner, buffer = self.holding.owners[uid], pending.buffers.get(uid)
            if buffer is not None:
                magic, status, said = _HEADER.unpack(buffer[:HEADER_BYTES].numpy().tobytes())
            else:
                magic, status, said = b"SLOT", _POISON if uid in pending.unreadable else _OK, uid
            if magic != b"SLOT" or said != uid or status != _OK:
                raise Poisoned(f"rank {owner} can no longer read peer {uid}'s payload")
            if buffer is None:
                slices.append(self._own_slice(uid, pending))
                continue
            if owner != self.control.rank:
                self.bytes_received += len(buffer)
            slices.append(self._parse(uid, pending, buffer))
        self.seconds += time.perf_counter() - begin
        return slices

    def drain(self, pending: Sequence[Pending]) -> None:
        """Wait for unused waves, so that no rank is left inside one."""
        for wave in pending:
            self.control.wait(wave.works)

    def _local_slice(self, uid: int, pending: Pending) -> Slice:
        try:
            self.holding.refs[uid].check_readable()
        except OSError as error:
            raise Poisoned(f"peer {uid}'s payload can no longer be read: {error}") from error
        return self._own_slice(uid, pending)

    def _own_slice(self, uid: int, pending: Pending) -> Slice:
        ref = self.holding.refs[uid]
        idxs, vals = chunk_bytes_of(ref, pending.index, pending.ids)
        if run_of(pending.ids) is None:
            self._account(pending, len(idxs) + len(vals))
        return Slice(uid, idxs, vals, ref.table(pending.index), self.holding.codes[uid][pending.index])

    def _parse(self, uid: int, pending: Pending, buffer: Tensor) -> Slice:
        holding = self.holding
        param, code = holding.spec.params[pending.index], holding.codes[uid][pending.index]
        bins = holding.spec.quant.bins if holding.spec.quant is not None else 0
        quant = HEADER_BYTES + (quant_bytes(code, bins) if bins else 0)
        split = quant + len(pending.ids) * param.index_bytes
        table = table_of(buffer[HEADER_BYTES:quant].numpy().tobytes(), code, bins)
        return Slice(uid, buffer[quant:split], buffer[split:], table, code)


def table_of(block: bytes, code: str, bins: int) -> Tensor:
    """The value table that a quant block describes."""
    name = CODES[code][1]
    if name is None:
        return torch.zeros(256, device="cpu")
    shift = np.frombuffer(block, dtype="<f4", count=1)[0]
    lookup = torch.from_numpy(np.frombuffer(block, dtype="<f4", count=bins, offset=16).astype(np.float32))
    return value_table((float(shift), 1.0, 0, lookup, VALUE_DTYPES[name]))
