"""Rows between a GPU table and a CPU one of the same configuration: what checkpoints and entries go through.

The bytes of a row are the same on both sides, so a checkpoint that either wrote is one that the other reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.table.cuda.group import Group

CHUNK_BYTES = 256 << 20


def to_host(group: Group, ids: Tensor, rows: Tensor, native: _core.Table) -> None:
    """Copies rows of distinct ids into a CPU table, a chunk at a time."""
    layout = group.layout
    chunk = max(1, CHUNK_BYTES // (4 * layout.words))
    for begin in range(0, ids.numel(), chunk):
        part = slice(begin, begin + chunk)
        words = group.gather(rows[part], layout.words).cpu()
        import_words(native, ids[part].cpu(), group.row_times(rows[part]).cpu(), words, layout.dim)


def import_words(native: _core.Table, ids: Tensor, times: Tensor, words: Tensor, dim: int) -> None:
    """Inserts or replaces rows of a CPU table."""
    import_parts(native, ids, times, words[:, :dim].contiguous(), words[:, dim:].contiguous())


def import_parts(native: _core.Table, ids: Tensor, times: Tensor, heads: Tensor, states: Tensor) -> None:
    """`import_words` of weights and states apart."""
    _core.import_rows(
        native, ids.data_ptr(), times.data_ptr(), heads.data_ptr(), states.data_ptr() if states.numel() else 0, len(ids)
    )


def copy_of(native: _core.Table) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, times and words ``[n, words]`` of all rows of a CPU table."""
    copied = _core.copy_rows(native)
    n, state = len(copied), copied.row_bytes - copied.head_bytes
    ids, times = torch.empty(n, dtype=torch.int64), torch.empty(n, dtype=torch.int64)
    heads = torch.empty(n, copied.head_bytes // 4, dtype=torch.float32)
    states = torch.empty(n, state // 4, dtype=torch.float32)
    copied.copy_to(ids.data_ptr(), times.data_ptr(), heads.data_ptr(), states.data_ptr())
    return ids, times, torch.cat([heads, states], 1) if state else heads


def fetch(native: _core.Table, ids: Tensor, dim: int, words: int, pin: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which of ``ids`` a CPU table has (bool), and the times, weights and states of those, in order."""
    n = ids.numel()
    found = torch.zeros(n, dtype=torch.bool)
    times = torch.empty(n, dtype=torch.int64, pin_memory=pin)
    heads = torch.empty(n, dim, dtype=torch.float32, pin_memory=pin)
    states = torch.empty(n, words - dim, dtype=torch.float32, pin_memory=pin and words > dim)
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
    home = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    home.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return home


def to_device(group: Group, table: int, ids: Tensor, times: Tensor, words: Tensor) -> None:
    """Inserts or replaces rows of distinct ids, a chunk at a time.

    Raises:
        CapacityError: the GPU is full; chunks before are in.
    """
    chunk = max(1, CHUNK_BYTES // (4 * group.layout.words))
    for begin in range(0, ids.numel(), chunk):
        part = slice(begin, begin + chunk)
        there = ids[part].to(group.device)
        counts = [0] * group.tables
        counts[table] = there.numel()
        rows = group.insert(there, table, counts=counts) & ((1 << 30) - 1)
        group.scatter(rows, words[part].to(group.device))
        group.set_times(rows, times[part].to(group.device))


class Staged:
    """A CPU table that stands in for a GPU one while files are written or read."""

    on_gpu = False

    def __init__(self, table: Any, native: _core.Table) -> None:
        self._native = native
        self._expiry = table._expiry
        self.name = table.name
        self.serving = False
        self.saver_parallel = table.saver_parallel
        self.table_config = table.table_config
        self.dim_size = table.dim_size
        native.raise_max_update_time(table.max_update_time)
        native.set_scales(table._host.scales())

    def size(self) -> int:
        return self._native.size()
