"""The device of a table's rows, and checks of ids and gradients that can come from another device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.table.arguments import as_ids, as_rows

CPU = torch.device("cpu")


def home(table: Any) -> torch.device:
    """The table's ``device``, where it reads ids and returns rows; the CPU if it has no such attribute."""
    return torch.device(getattr(table, "device", None) or CPU)


def ids_anywhere(ids: Any, name: str) -> Tensor:
    """`as_ids` that leaves CUDA ids where they are."""
    return as_ids(ids, name, device=ids.device if isinstance(ids, Tensor) and ids.is_cuda else CPU)


def rows_anywhere(values: Any, n: int, dim: int, name: str, what: str, device: torch.device) -> Tensor:
    """`as_rows` for values on any device, moved to ``device``."""
    here = values.device if isinstance(values, Tensor) and values.is_cuda else CPU
    return as_rows(values, n, dim, name, what, here).to(device)


def host_ids(ids: Any, name: str, home: torch.device) -> Tensor:
    """Ids on the CPU, where they are routed. CUDA ids are accepted only if the parts' ``home`` is a GPU."""
    return as_ids(ids, name) if home == CPU else ids_anywhere(ids, name).cpu()


def host_rows(values: Any, n: int, dim: int, name: str, what: str, home: torch.device) -> Tensor:
    """Values on the CPU, by the same rule as `host_ids`."""
    return as_rows(values, n, dim, name, what) if home == CPU else rows_anywhere(values, n, dim, name, what, CPU)


def place_of(ids: Any) -> torch.device:
    """The device on which rows of these ids are returned: the ids' own."""
    return ids.device if isinstance(ids, Tensor) else CPU
