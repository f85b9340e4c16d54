"""Waves of raw chunks from their owners to the ranks that need them: compressed bytes travel, never gradients."""

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.gather.codec import VALUE_DTYPES, value_table
from shoal.gather.control import Control
from shoal.gather.errors import GatherError
from shoal.gather.holding import Holding, chunk_bytes_of
from shoal.gather.payload_ref import CODES, quant_bytes

HEADER_BYTES = 16
_HEADER = struct.Struct("<4sIQ")
_OK, _POISON = 0, 1


class Poisoned(GatherError):
    """An owner could not read a payload that it had validated; every rank leaves the update together."""


@dataclass
class Slot:
    """Some chunks of one parameter of one peer, ready to be added."""

    uid: int
    idxs: Tensor
    vals: Tensor
    table: Tensor
    code: str


@dataclass
class Pending:
    """A wave under way: its works, its buffers, and the number of chunks in them."""

    index: int
    ids: Tensor
    uids: Sequence[int]
    replicated: bool
    works: list[Any] = field(default_factory=list)
    buffers: dict[int, Tensor] = field(default_factory=dict)
    poison: str = ""
    keep: list[Tensor] = field(default_factory=list)


class Exchange:
    """Starts and finishes waves. With everything on this rank, a wave is a look into the spill files."""

    def __init__(self, holding: Holding, control: Control) -> None:
        self.holding, self.control = holding, control
        self.local = control.world == 1 or holding.everywhere
        self.bytes_received = 0
        self.seconds = 0.0

    def start(self, index: int, ids: Sequence[Tensor], uids: Sequence[int], *, replicated: bool) -> Pending:
        """Begins to bring chunks ``ids[rank]`` of a parameter of some peers to each rank; the same on every rank."""
        begin = time.perf_counter()
        mine = ids[self.control.rank]
        pending = Pending(index, mine, uids, replicated)
        if not self.local:
            for uid in uids:
                owner = self.holding.owners[uid]
                if replicated:
                    buffer = self._buffer(uid, index, mine, owner, pending)
                    pending.buffers[uid] = buffer
                    pending.works.append(self.control.start_broadcast(buffer, owner))
                elif owner == self.control.rank:
                    for rank in range(self.control.world):
                        buffer = self._buffer(uid, index, ids[rank], owner, pending)
                        if rank == owner:
                            pending.buffers[uid] = buffer
                        else:
                            pending.keep.append(buffer)
                            pending.works.append(self.control.start_send(buffer, rank))
                else:
                    buffer = self._buffer(uid, index, mine, owner, pending)
                    pending.buffers[uid] = buffer
                    pending.works.append(self.control.start_recv(buffer, owner))
        self.seconds += time.perf_counter() - begin
        return pending

    def _buffer(self, uid: int, index: int, ids: Tensor, owner: int, pending: Pending) -> Tensor:
        """A slot: empty on the receivers, filled on the owner; a poison header when the owner's read fails."""
        buffer = torch.empty(HEADER_BYTES + self.holding.slot_bytes(uid, index, len(ids)), dtype=torch.uint8)
        if owner != self.control.rank:
            return buffer
        status = _OK
        try:
            ref = self.holding.refs[uid]
            ref.check_readable()
            at = HEADER_BYTES
            parts = [torch.from_numpy(np.frombuffer(bytearray(ref.quant_block(index)), dtype=np.uint8))]
            for part in [*parts, *chunk_bytes_of(ref, index, ids)]:
                buffer[at : at + len(part)] = part
                at += len(part)
        except Exception as error:
            status, pending.poison = _POISON, str(error)
        header = _HEADER.pack(b"SLOT", status, uid)
        buffer[:HEADER_BYTES] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        return buffer

    def finish(self, pending: Pending) -> list[Slot]:
        """The slots of a wave, in the order of its UIDs. Raises Poisoned on every rank when an owner could not read."""
        if self.local:
            return [self._local_slot(uid, pending) for uid in pending.uids]
        begin = time.perf_counter()
        self.control.wait(pending.works, "exchange", sliced=pending.replicated)
        pending.keep.clear()
        slots = []
        for uid in pending.uids:
            buffer = pending.buffers[uid]
            magic, status, said = _HEADER.unpack(buffer[:HEADER_BYTES].numpy().tobytes())
            if magic != b"SLOT" or said != uid or status != _OK:
                raise Poisoned(f"rank {self.holding.owners[uid]} cannot read peer {uid}'s payload any more")
            if self.holding.owners[uid] != self.control.rank:
                self.bytes_received += len(buffer)
            slots.append(self._parse(uid, pending, buffer))
        self.seconds += time.perf_counter() - begin
        return slots

    def drain(self, pending: Sequence[Pending]) -> None:
        """Waits for waves that nobody will use, so that no rank is left inside one."""
        for wave in pending:
            self.control.wait(wave.works, "exchange", sliced=wave.replicated)

    def _local_slot(self, uid: int, pending: Pending) -> Slot:
        ref = self.holding.refs[uid]
        try:
            ref.check_readable()
        except OSError as error:
            raise Poisoned(f"peer {uid}'s payload cannot be read any more: {error}") from error
        idxs, vals = chunk_bytes_of(ref, pending.index, pending.ids)
        return Slot(uid, idxs, vals, ref.table(pending.index), self.holding.codes[uid][pending.index])

    def _parse(self, uid: int, pending: Pending, buffer: Tensor) -> Slot:
        holding = self.holding
        param, code = holding.spec.params[pending.index], holding.codes[uid][pending.index]
        bins = holding.spec.quant.bins if holding.spec.quant is not None else 0
        quant = HEADER_BYTES + (quant_bytes(code, bins) if bins else 0)
        split = quant + len(pending.ids) * param.index_bytes
        table = table_of(buffer[HEADER_BYTES:quant].numpy().tobytes(), code, bins)
        return Slot(uid, buffer[quant:split], buffer[split:], table, code)


def table_of(block: bytes, code: str, bins: int) -> Tensor:
    """The value table that a quant block describes."""
    name = CODES[code][1]
    if name is None:
        return torch.zeros(256)
    shift = np.frombuffer(block, dtype="<f4", count=1)[0]
    lookup = torch.from_numpy(np.frombuffer(block, dtype="<f4", count=bins, offset=16).astype(np.float32))
    return value_table((float(shift), 1.0, 0, lookup, VALUE_DTYPES[name]))
