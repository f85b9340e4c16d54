"""Conversion of a table to and from tensors with fixed names, for the ``state_dict`` of modules."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import DataError
from shoal.table.arguments import MAX_TIME
from shoal.table.config.messages import EntryConfig
from shoal.table.table import HashTable

NAMES = ("ids", "rows", "state", "times", "config", "scales")
KEPT = "kept"
"""Additional tensor of a table with a budget: its eviction policy's state of each row."""


def table_state(table: HashTable) -> dict[str, Tensor]:
    """All rows as tensors, in no particular order.

    ``ids`` int64 ``[n]``; ``rows`` float32 ``[n, dim]`` (the stored bytes of a serving table); ``state`` uint8
    ``[n, bytes]``, the optimizer state; ``times`` int64 ``[n]``, seconds; ``config`` uint8, the serialized
    `EntryConfig`; ``scales`` float32, one per segment; for a table with a budget also ``kept`` int64 ``[n]``, the
    eviction policy's state. Takes the memory of two copies of the rows while it runs. Each row is consistent; rows
    written meanwhile can be included or not.
    """
    native = table.staged()._native
    copied = _core.copy_rows(native)
    n = len(copied)
    ids, times, kept = (torch.empty(n, dtype=torch.int64, device="cpu") for _ in range(3))
    heads = torch.empty(n, copied.head_bytes, dtype=torch.uint8, device="cpu")
    states = torch.empty(n, copied.row_bytes - copied.head_bytes, dtype=torch.uint8, device="cpu")
    copied.copy_to(ids.data_ptr(), times.data_ptr(), heads.data_ptr(), states.data_ptr(), kept.data_ptr())
    rows = heads if table.serving else heads.view(torch.float32).view(n, table.dim_size)
    config = table.table_config.entry_config.SerializeToString(deterministic=True)
    return {
        "ids": ids,
        "rows": rows,
        "state": states,
        "times": times,
        "config": torch.frombuffer(bytearray(config), dtype=torch.uint8),
        "scales": torch.tensor(native.scales(), dtype=torch.float32, device="cpu"),
        **({KEPT: kept} if table.has_budget else {}),
    }


def load_table_state(table: HashTable, state: dict[str, Tensor]) -> None:
    """Replaces all rows of ``table``, atomically for other threads. With a budget, only rows that fit are kept.

    Raises:
        DataError: the tensors do not fit together or are from another kind of table; nothing has changed.
    """
    ids, rows, states, times, config, scales = (state[name].detach().cpu().contiguous() for name in NAMES)
    load = RowLoad(table, config)
    load.add(ids, rows, states, times, state[KEPT].detach().cpu() if KEPT in state else None)
    load.commit(scales)


class RowLoad:
    """A load of rows into a table in several batches; `commit` replaces all rows of the table with them."""

    def __init__(self, table: HashTable, config: Tensor, shape: HashTable | None = None) -> None:
        """``config`` is the rows' configuration (that of ``shape``, with full rows, if ``table`` has slices)."""
        _check_config(table if shape is None else shape, config)
        self._table = table
        staging = table.staging()._native
        layout = staging.layout
        self._native = _core.empty_twin(staging)
        self._head = layout.row_bytes if table.serving else 4 * layout.dim
        self._state, self._dim = layout.row_bytes - self._head, layout.dim
        self._ids: list[Tensor] = []
        self._latest = 0

    def add(self, ids: Tensor, rows: Tensor, states: Tensor, times: Tensor, kept: Tensor | None = None) -> None:
        """Adds rows in the form that `table_state` returns."""
        table, n = self._table, ids.numel()
        if not table.serving and rows.is_floating_point():
            rows = rows.float()
        _check(table, "ids", ids, torch.int64, [n])
        _check(table, "times", times, torch.int64, [n])
        kept = torch.zeros_like(ids) if kept is None else kept
        _check(table, KEPT, kept, torch.int64, [n])
        kind = (torch.uint8, [n, self._head]) if table.serving else (torch.float32, [n, self._dim])
        _check(table, "rows", rows, *kind)
        _check(table, "state", states, torch.uint8, [n, self._state])
        if n and not 0 <= int(times.min()) <= int(times.max()) <= MAX_TIME:
            raise DataError(
                f"table {table.name!r}: times must be 0..{MAX_TIME}, got {int(times.min())}..{int(times.max())}"
            )
        ids, rows, states, times, kept = (tensor.contiguous() for tensor in (ids, rows, states, times, kept))
        _core.import_rows(self._native, ids.data_ptr(), times.data_ptr(), rows.data_ptr(), states.data_ptr(), n,
                          kept.data_ptr())  # fmt: skip
        self._ids.append(ids)
        self._latest = max(self._latest, int(times.max()) if n else 0)

    def commit(self, scales: Tensor) -> None:
        """Replaces all rows of the table with the rows added."""
        table, native = self._table, self._native
        _check(table, "scales", scales, torch.float32, [len(native.scales())])
        n = sum(ids.numel() for ids in self._ids)
        if native.size() != n and (distinct := torch.cat(self._ids).unique().numel()) != n:
            raise DataError(f"table {table.name!r}: ids must be distinct, but {n} of them name {distinct} rows")
        native.raise_max_update_time(self._latest)
        native.set_scales(scales.tolist())
        table.adopt(native)


def copy_table(table: HashTable) -> HashTable:
    """A new table with the same configuration, rows and training state; it shares the filter, not the sync client."""
    other = HashTable.from_config(
        table.config,
        name=table.name,
        hash_filter=table.hash_filter,
        saver_parallel=table.saver_parallel,
        on_bad_gradient=table.on_bad_gradient,  # pyrefly: ignore[bad-argument-type]
        seed=table.seed,
        device=table.device,
        clocked=table.clocked,
        first_column=table.first_column,
        evict=table.own_policy,
    )
    load_table_state(other, table_state(table))
    other.set_training_state(table.training_state())
    return other


def _check(table: HashTable, name: str, tensor: Tensor, dtype: torch.dtype, shape: list[int]) -> None:
    if tensor.dtype != dtype or list(tensor.shape) != shape:
        raise DataError(
            f"table {table.name!r}: {name} of a state dict must be {dtype} {shape}, "
            f"got {tensor.dtype} {list(tensor.shape)}"
        )


def _check_config(table: HashTable, config: Tensor) -> None:
    theirs = EntryConfig()
    try:
        theirs.ParseFromString(bytes(config.to(torch.uint8).numpy()))
    except Exception as error:
        raise DataError(f"table {table.name!r}: config is not a serialized EntryConfig ({error})") from None
    have, given = (_kinds(entry) for entry in (table.table_config.entry_config, theirs))
    if have != given:
        raise DataError(f"table {table.name!r} has rows of {have}, but the state dict has rows of {given}")


def _kinds(entry: EntryConfig) -> list[str]:
    """The parts of a configuration that determine the layout of a row; hyperparameters can differ."""
    serving = entry.entry_type == EntryConfig.SERVING
    configs = [(s.dim_size, s.comp_config if serving else s.opt_config) for s in entry.segments]
    return [f"{dim} x {config.WhichOneof('type')}" for dim, config in configs]
