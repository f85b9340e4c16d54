"""Rows between a GPU table and a CPU one of the same configuration: what checkpoints and entries go through.

The bytes of a row are the same on both sides, so a checkpoint that either wrote is one that the other reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.table.cuda.storage import ROW, Storage

CHUNK_BYTES = 256 << 20
SAVED_BYTES = 32 << 20  # of rows that a save takes at once; host memory holds as many as it has writers, and two more


def to_host(storage: Storage, ids: Tensor, rows: Tensor, native: _core.Table) -> None:
    """Copies rows of distinct ids into a CPU table, a chunk at a time."""
    layout = storage.layout
    chunk = max(1, CHUNK_BYTES // (4 * layout.words))
    for begin in range(0, ids.numel(), chunk):
        part = slice(begin, begin + chunk)
        words = storage.arena.gather(rows[part], layout.words).cpu()
        times = storage.arena.row_times(rows[part]).cpu()
        if layout.serving:
            import_parts(native, ids[part].cpu(), times, layout.to_native(words), words[:, :0])
            continue
        import_parts(native, ids[part].cpu(), times, words[:, : layout.dim].contiguous(),
                     words[:, layout.dim :].contiguous())  # fmt: skip


def import_parts(native: _core.Table, ids: Tensor, times: Tensor, heads: Tensor, states: Tensor) -> None:
    """Inserts or replaces rows of a CPU table: weights and states."""
    _core.import_rows(
        native, ids.data_ptr(), times.data_ptr(), heads.data_ptr(), states.data_ptr() if states.numel() else 0, len(ids)
    )


def copy_of(native: _core.Table, stripe: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, times and words ``[n, words]`` of all rows of a CPU table, or of a stripe's; bytes of serving rows."""
    copied = _core.copy_rows(native, stripe)
    n, head, state = len(copied), copied.head_bytes, copied.row_bytes - copied.head_bytes
    ids, times = torch.empty(2, n, dtype=torch.int64, device="cpu").unbind()
    heads, states = (torch.empty(n, size, dtype=torch.uint8, device="cpu") for size in (head, state))
    copied.copy_to(ids.data_ptr(), times.data_ptr(), heads.data_ptr(), states.data_ptr())
    rows = torch.cat([heads, states], 1) if state else heads
    return ids, times, rows if native.layout.serving else rows.view(torch.float32)


def fetch(native: _core.Table, ids: Tensor, dim: int, words: int, pin: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which of ``ids`` a CPU table has (bool), and the times, weights and states of those, in order."""
    n = ids.numel()
    found = torch.zeros(n, dtype=torch.bool, device="cpu")
    times = torch.empty(n, dtype=torch.int64, device="cpu", pin_memory=pin)
    heads = torch.empty(n, dim, dtype=torch.float32, device="cpu", pin_memory=pin)
    states = torch.empty(n, words - dim, dtype=torch.float32, device="cpu", pin_memory=pin and words > dim)
    count = _core.fetch_rows(
        native,
        ids.data_ptr(),
        n,
        found.data_ptr(),
        times.data_ptr(),
        heads.data_ptr(),
        states.data_ptr() if states.numel() else 0,
    )
    return found, times[:count], heads[:count], states[:count]


def from_device(tensor: Tensor) -> Tensor:
    """A copy in host memory, by way of pinned memory."""
    if tensor.device.type != "cuda":
        return tensor.contiguous()
    home = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    home.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return home


def to_device(storage: Storage, table: int, native: _core.Table) -> None:
    """Inserts or replaces the rows of a CPU table, a chunk at a time.

    Raises:
        CapacityError: the GPU has no room for them; nothing has changed.
    """
    size, layout = native.size(), storage.layout
    counts = [0] * storage.tables
    counts[table] = size
    storage.make_room(counts)
    chunk = max(1, CHUNK_BYTES // (4 * layout.words))
    for stripe in range(_core.Table.num_stripes) if size > chunk else (-1,):
        ids, times, words = copy_of(native, stripe)
        words = layout.from_native(words) if layout.serving else words
        for begin in range(0, ids.numel(), chunk):
            part = slice(begin, begin + chunk)
            there = ids[part].to(storage.device)
            counts[table] = there.numel()
            rows = storage.insert(there, table, counts=counts) & ROW
            storage.arena.scatter(rows, words[part].to(storage.device))
            storage.arena.set_times(rows, times[part].to(storage.device))


class RowSource:
    """The rows of a GPU table for a save: its ids are listed now, their rows are copied a part at a time.

    Other calls may come in between. A row is as it was at one moment; one that is gone by then is left out.
    """

    def __init__(self, table: Any, since: int) -> None:
        self._table = table
        with table._storage as storage:
            self._ids = self._list(storage, table._number, since)
        bytes_ = self._ids.numel() * 4 * table._layout.words
        self.parts = max(_core.Table.num_stripes, -(-bytes_ // SAVED_BYTES))
        self._taken: tuple[Tensor, ...] = ()

    @staticmethod
    def _list(storage: Storage, number: int, since: int) -> Tensor:
        home = []
        for ids, rows, _ in storage.chunks(number):
            chosen = ids[storage.arena.written_since(rows, since)] if since else ids
            home.append(chosen.cpu())
        return torch.cat(home)

    def take(self, part: int) -> tuple[int, int, int, int]:
        """Addresses of ids, times and rows, good until the next call, and how many there are."""
        n = self._ids.numel()
        ids = self._ids[n * part // self.parts : n * (part + 1) // self.parts]
        if ids.numel() == 0:
            return 0, 0, 0, 0
        table = self._table
        with table._storage as storage:
            rows = storage.find(ids.to(storage.device), table._number, "rows")
            words = storage.arena.gather(rows, storage.layout.words)
            copies = [rows, storage.arena.row_times(rows.clamp(min=0)), words]
            rows, times, words = map(from_device, copies)
        there = rows >= 0
        if not bool(there.all()):
            ids, times, words = ids[there], times[there], words[there]
        self._taken = ids, times, words
        return ids.data_ptr(), times.data_ptr(), words.data_ptr(), ids.numel()


class Staged:
    """A CPU table that stands in for a GPU one while files are read, or its rows are looked at."""

    on_gpu = False

    def __init__(self, table: Any, native: _core.Table) -> None:
        self._native = self._host = native
        self._expiry = table._expiry
        self.name = table.name
        self.serving = table.serving
        self.clocked = table.clocked
        self.saver_parallel = table.saver_parallel
        self.table_config = table.table_config
        self.dim_size = table.dim_size
        native.raise_max_update_time(table.max_update_time)
        native.set_scales(table._host.scales())

    def size(self) -> int:
        return self._native.size()
