"""Which device a table's rows are on, and the checks of ids and gradients that may come from another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.table.arguments import as_ids, as_rows

CPU = torch.device("cpu")


def home(table: Any) -> torch.device:
    """Where the table reads ids and leaves rows: its ``device``, the CPU for one that has none."""
    return torch.device(getattr(table, "device", None) or CPU)


def ids_anywhere(ids: Any, name: str) -> Tensor:
    """`as_ids` that leaves CUDA ids where they are."""
    return as_ids(ids, name, device=ids.device if isinstance(ids, Tensor) and ids.is_cuda else CPU)


def rows_anywhere(values: Any, n: int, dim: int, name: str, what: str, device: torch.device) -> Tensor:
    """`as_rows` for values on any device, on the one that is wanted."""
    here = values.device if isinstance(values, Tensor) and values.is_cuda else CPU
    return as_rows(values, n, dim, name, what, here).to(device)


def host_ids(ids: Any, name: str, home: torch.device) -> Tensor:
    """Ids on the CPU, where they are routed. They may come from a GPU if the parts' ``home`` is one."""
    return as_ids(ids, name) if home == CPU else ids_anywhere(ids, name).cpu()


def host_rows(values: Any, n: int, dim: int, name: str, what: str, home: torch.device) -> Tensor:
    """Values on the CPU, by the same rule."""
    return as_rows(values, n, dim, name, what) if home == CPU else rows_anywhere(values, n, dim, name, what, CPU)


def place_of(ids: Any) -> torch.device:
    """Where rows of these ids are returned: with the ids."""
    return ids.device if isinstance(ids, Tensor) else CPU
