"""Transfer of rows between a GPU table and a CPU table with the same configuration, for checkpoints and entries.

The bytes of a row are the same on both sides, so each can read the checkpoints of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.table.cuda.storage import ROW, Storage

CHUNK_BYTES = 256 << 20
SAVED_BYTES = 32 << 20  # size of one part of a save; host memory holds one part per writer, and two more


def to_host(
    storage: Storage, ids: Tensor, rows: Tensor, native: _core.Table, scores: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Copies rows of distinct ids to a CPU table in chunks; ``scores`` returns the eviction policy's state of rows."""
    layout = storage.layout
    chunk = max(1, CHUNK_BYTES // (4 * layout.words))
    for begin in range(0, ids.numel(), chunk):
        part = slice(begin, begin + chunk)
        words = storage.arena.gather(rows[part], layout.words).cpu()
        times = storage.arena.row_times(rows[part]).cpu()
        kept = None if scores is None else scores(rows[part]).cpu()
        if layout.serving:
            import_parts(native, ids[part].cpu(), times, layout.to_native(words), words[:, :0], kept)
            continue
        import_parts(native, ids[part].cpu(), times, words[:, : layout.dim].contiguous(),
                     words[:, layout.dim :].contiguous(), kept)  # fmt: skip


def import_parts(
    native: _core.Table, ids: Tensor, times: Tensor, heads: Tensor, states: Tensor, scores: Tensor | None = None,
    *, written: bool = False,
) -> None:  # fmt: skip
    """Inserts or replaces rows of a CPU table: weights, states and the eviction policy's state.

    With ``written``, the policy treats them as written, not as restored.
    """
    _core.import_rows(
        native, ids.data_ptr(), times.data_ptr(), heads.data_ptr(), states.data_ptr() if states.numel() else 0,
        len(ids), 0 if scores is None else scores.data_ptr(), written,
    )  # fmt: skip


def copy_of(native: _core.Table, stripe: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, times and words ``[n, words]`` of all rows of a CPU table, or of one stripe; bytes for serving rows."""
    return copy_with_scores(native, stripe)[:3]


def copy_with_scores(native: _core.Table, stripe: int = -1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`copy_of`, and the eviction policy's state of the rows, int64; 0: unknown."""
    copied = _core.copy_rows(native, stripe)
    n, head, state = len(copied), copied.head_bytes, copied.row_bytes - copied.head_bytes
    ids, times, scores = torch.empty(3, n, dtype=torch.int64, device="cpu").unbind()
    heads, states = (torch.empty(n, size, dtype=torch.uint8, device="cpu") for size in (head, state))
    copied.copy_to(ids.data_ptr(), times.data_ptr(), heads.data_ptr(), states.data_ptr(), scores.data_ptr())
    rows = torch.cat([heads, states], 1) if state else heads
    return ids, times, rows if native.layout.serving else rows.view(torch.float32), scores


def fetch(native: _core.Table, ids: Tensor, dim: int, words: int, pin: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which of ``ids`` are in a CPU table (bool), and the times, weights and states of those, in order."""
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
    """A copy in pinned host memory."""
    if tensor.device.type != "cuda":
        return tensor.contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def to_device(storage: Storage, table: int, native: _core.Table, restored: Any = None) -> None:
    """Copies the rows of a CPU table into a storage in chunks, inserting or replacing.

    For a table with a budget, ``restored`` is a `Restored`, which decides which rows fit and has their scores.

    Raises:
        CapacityError: the GPU does not have enough memory; nothing has changed.
    """
    size, layout = native.size(), storage.layout
    counts = [0] * storage.tables
    counts[table] = size
    storage.make_room(counts)
    if restored is not None:
        restored.choose(storage.arena.room - 1)
    chunk = max(1, CHUNK_BYTES // (4 * layout.words))
    for stripe in range(_core.Table.num_stripes) if size > chunk else (-1,):
        ids, times, words, scores = copy_with_scores(native, stripe)
        words = layout.from_native(words) if layout.serving else words
        if restored is not None:
            stays = restored.stay(times, scores)
            ids, times, words, scores = ids[stays], times[stays], words[stays], scores[stays]
        for begin in range(0, ids.numel(), chunk):
            part = slice(begin, begin + chunk)
            there = ids[part].to(storage.device)
            counts[table] = there.numel()
            rows = storage.insert(there, table, counts=counts) & ROW
            storage.arena.scatter(rows, words[part].to(storage.device))
            storage.arena.set_times(rows, times[part].to(storage.device))
            if restored is not None:
                restored.write(storage, rows, times[part], scores[part])


class RowSource:
    """The rows of a GPU table for a save: its ids are listed now, their rows are copied part by part.

    Other calls can run in between. Each row is copied as it is at that moment; a row removed by then is left out.
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
        listed = []
        for ids, rows, _ in storage.chunks(number):
            chosen = ids[storage.arena.written_since(rows, since)] if since else ids
            listed.append(chosen.cpu())
        return torch.cat(listed)

    def take(self, part: int) -> tuple[int, int, int, int, int]:
        """Addresses of ids, times, rows and the eviction policy's state (or 0), valid until the next call, and the
        number of rows."""
        n = self._ids.numel()
        ids = self._ids[n * part // self.parts : n * (part + 1) // self.parts]
        if ids.numel() == 0:
            return 0, 0, 0, 0, 0
        table = self._table
        with table._storage as storage:
            rows = storage.find(ids.to(storage.device), table._number, "rows")
            words = storage.arena.gather(rows, storage.layout.words)
            at = rows.clamp(min=0)
            copies = [rows, storage.arena.row_times(at), words]
            if table._budget is not None:
                copies.append(table._budget.lasting(storage, at))
            rows, *taken = map(from_device, copies)
        there = rows >= 0
        self._taken = tuple(each if bool(there.all()) else each[there] for each in (ids, *taken))
        ids, times, words, *scores = self._taken
        address = scores[0].data_ptr() if scores else 0
        return ids.data_ptr(), times.data_ptr(), words.data_ptr(), address, ids.numel()


class Staged:
    """A CPU table that stands in for a GPU table while files are read or rows are inspected."""

    on_gpu = False

    def __init__(self, table: Any, native: _core.Table) -> None:
        self._native = self._host = native
        self._expiry = table._expiry
        self.name = table.name
        self.serving = table.serving
        self.clocked = table.clocked
        self.rank_share = table.rank_share
        self.saver_parallel = table.saver_parallel
        self.table_config = table.table_config
        self.dim_size = table.dim_size
        native.raise_max_update_time(table.max_update_time)
        native.set_scales(table._host.scales())

    def size(self) -> int:
        return self._native.size()
