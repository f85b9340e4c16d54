"""Rows of ids that may be unknown, with the rows that the first update of an unknown one will start from."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal import _core
from shoal.table.table import HashTable


def read_rows(table: HashTable, ids: Tensor, out: Tensor, *, initial: bool) -> None:
    """Writes the rows of ``ids`` to flat ``out``; changes nothing. Unknown ids give zeros.

    With ``initial`` they give their initial rows, unless an admission filter decides whether they get one.
    """
    n = ids.numel()
    if not initial or not n or table.serving or table._native.has_filter():
        table._native.lookup(ids.data_ptr(), n, out.data_ptr(), 0)
        return
    known = torch.empty(n, dtype=torch.bool, device="cpu")
    table._native.lookup(ids.data_ptr(), n, out.data_ptr(), known.data_ptr())
    if not known.all():
        unknown = ~known
        out.view(n, -1)[unknown] = _initial_rows(table, ids[unknown])


def _initial_rows(table: HashTable, ids: Tensor) -> Tensor:
    """``[n, dim]``, made by an empty table of the same layout and seed, on which alone a first row depends."""
    empty = _core.Table(table._native.layout, table.seed, ids.numel())
    empty.set_scales(table._native.scales())
    rows = torch.empty(ids.numel(), table.dim_size, dtype=torch.float32, device="cpu")
    empty.lookup_or_insert(ids.data_ptr(), ids.numel(), 0, rows.data_ptr())
    return rows
