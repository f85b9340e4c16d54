"""Which device a table's rows are on, and the checks of ids and gradients that may come from another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.table.arguments import as_ids, as_rows

CPU = torch.device("cpu")


def home(table: Any) -> torch.device:
    """Where the table reads ids and leaves rows: its ``device``, the CPU for one that has none."""
    return torch.device(getattr(table, "device", None) or CPU)


def ids_anywhere(ids: Any, name: str) -> Tensor:
    """`as_ids` that leaves CUDA ids where they are."""
    if not (isinstance(ids, Tensor) and ids.is_cuda):
        return as_ids(ids, name)
    if ids.dtype != torch.int64:
        raise ConfigError(f"table {name!r}: ids are int64, got {ids.dtype}; convert them with .long()")
    return ids.contiguous()


def rows_anywhere(values: Any, n: int, dim: int, name: str, what: str, device: torch.device) -> Tensor:
    """`as_rows` for values on any device, on the one that is wanted."""
    if isinstance(values, Tensor) and values.is_cuda:
        if values.dtype != torch.float32:
            raise ConfigError(f"table {name!r}: {what} are float32, got {values.dtype}; convert them with .float()")
        if values.numel() != n * dim:
            raise ConfigError(
                f"table {name!r}: {what} of shape {list(values.shape)} do not fit {n} ids of dim {dim}; "
                f"{n * dim} elements are needed"
            )
        return values.detach().contiguous().to(device)
    return as_rows(values, n, dim, name, what).to(device)


def host_ids(ids: Any, name: str, home: torch.device) -> Tensor:
    """Ids on the CPU, where they are routed. They may come from a GPU if the parts' ``home`` is one."""
    return as_ids(ids, name) if home == CPU else ids_anywhere(ids, name).cpu()


def host_rows(values: Any, n: int, dim: int, name: str, what: str, home: torch.device) -> Tensor:
    """Values on the CPU, by the same rule."""
    return as_rows(values, n, dim, name, what) if home == CPU else rows_anywhere(values, n, dim, name, what, CPU)


def place_of(ids: Any) -> torch.device:
    """Where rows of these ids are returned: with the ids."""
    return ids.device if isinstance(ids, Tensor) else CPU
