"""`RawTables`: tables sorted by name, all read or written in one call with ragged, flat or fused arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.ragged import Ragged
from shoal.table.arguments import as_flat, as_ids, as_int, as_time
from shoal.table.fused import FusedCalls, apply_blocks, concatenated_rates, lookup_blocks
from shoal.table.table import HashTable, check_values


class RawTables(FusedCalls):
    """Reads and writes of all tables at once. `MultiHashTable` adds the calls by name.

    Ids are a `Ragged` (or ``(values, row_splits)``) with one row per table, values one flat float32 vector, table after
    table.
    """

    def __init__(self, name: str, tables: dict[str, HashTable]) -> None:
        self.name = name
        self._tables = tables
        self.device = next((table.device for table in tables.values()), torch.device("cpu"))

    @property
    def table_names(self) -> list[str]:
        return list(self._tables)

    def get_table_dim_sizes(self) -> list[int]:
        """The tables' dimensions, by sorted name."""
        return [table.dim_size for table in self._tables.values()]

    def get_ragged_id(self, slot_to_id: Mapping[str, Tensor]) -> Ragged:
        """The ids of all T tables, one row per table, sorted by name; names that do not exist are left out."""
        ids = [as_ids(slot_to_id.get(name, ()), name, device=self.device).view(-1) for name in self._tables]
        return self._join_ids(ids)

    def get_flat_value(self, slot_to_value: Mapping[str, Tensor]) -> Tensor:
        """The values of all tables as one vector in the same order."""
        self._check_names(slot_to_value)
        parts = []
        for name in self._tables:
            values = torch.as_tensor(slot_to_value.get(name, ()), dtype=torch.float32, device=self.device)
            parts.append(as_flat(values, values.numel(), name, device=self.device))
        return self._join(parts, torch.float32)

    def get_embeddings(self, ragged_id: Ragged | tuple[Tensor, Tensor], flat: Tensor) -> dict[str, Tensor]:
        """``{name: [n, dim]}`` for all tables, from the result of `raw_lookup` for one request."""
        floats, flat = self._flat(self._ragged(ragged_id), flat)
        parts = torch.split(flat, floats)
        return {
            name: part.view(-1, table.dim_size) for (name, table), part in zip(self._tables.items(), parts, strict=True)
        }

    def raw_lookup(self, ragged_id: Ragged | tuple[Tensor, Tensor]) -> Tensor:
        """The embeddings as flat float32, table after table; R requests can be concatenated (``T * R`` rows)."""
        ids = self._ragged(ragged_id)
        requests, rest = divmod(ids.nrows(), len(self._tables)) if self._tables else (0, ids.nrows())
        if rest or (self._tables and requests == 0):
            raise ConfigError(
                f"table {self.name!r}: raw_lookup needs a positive multiple of {len(self._tables)} rows of ids, "
                f"got {ids.nrows()}"
            )
        sizes = ids.row_lengths().contiguous()
        dims = torch.tensor(self.get_table_dim_sizes(), dtype=torch.int64, device="cpu").repeat(requests)
        values = as_ids(ids.values, self.name, device=self.device).view(-1)
        return lookup_blocks(list(self._tables.values()), values, sizes, requests, int((sizes * dims).sum()))

    def raw_assign(self, ragged_id: Ragged | tuple[Tensor, Tensor], flat: Tensor, req_time: Any = None) -> Self:
        """`assign` on all tables."""
        ids = self._ragged(ragged_id)
        values = self.get_embeddings(ids, flat)
        parts = torch.split(as_ids(ids.values, self.name, device=self.device).view(-1), ids.row_lengths().tolist())
        seconds = as_time(req_time, self.name)
        for name, table in self._tables.items():
            check_values(table, values[name])
        for part, (name, table) in zip(parts, self._tables.items(), strict=True):
            table.assign(part, values[name], seconds)
        return self

    def raw_apply_gradients(
        self, ragged_id: Ragged | tuple[Tensor, Tensor], flat: Tensor, global_step: Any = 0, req_time: Any = None
    ) -> Self:
        """`apply_gradients` on all tables."""
        ids = self._ragged(ragged_id)
        _, flat = self._flat(ids, flat)
        step, seconds = as_int(global_step, self.name, "global_step"), as_time(req_time, self.name)
        tables = list(self._tables.values())
        apply_blocks(
            tables,
            as_ids(ids.values, self.name, device=self.device).view(-1),
            ids.row_lengths().contiguous(),
            1,
            flat,
            concatenated_rates(tables, step),
            step,
            seconds,
            False,
        )
        return self

    def _join(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=self.device)

    def _join_ids(self, parts: list[Tensor]) -> Ragged:
        """One row of ids per table; the lengths are always on the host."""
        lengths = torch.tensor([part.numel() for part in parts], dtype=torch.int64, device="cpu")
        return Ragged.from_row_lengths(self._join(parts, torch.int64), lengths)

    def _ragged(self, ragged_id: Any) -> Ragged:
        if isinstance(ragged_id, Ragged):
            return ragged_id if ragged_id.row_splits.is_cpu else Ragged(ragged_id.values, ragged_id.row_splits.cpu())
        values, row_splits = ragged_id
        if not isinstance(row_splits, Tensor):
            row_splits = torch.as_tensor(row_splits, device="cpu")
        row_splits = row_splits.cpu()  # the lengths are needed on the host
        return Ragged(as_ids(values, self.name, device=self.device).view(-1), row_splits)

    def _flat(self, ids: Ragged, flat: Tensor) -> tuple[list[int], Tensor]:
        """The number of floats of each table for one request, and all values as a checked vector."""
        sizes = ids.row_lengths().tolist()
        if len(sizes) != len(self._tables):
            raise ConfigError(
                f"table {self.name!r}: a request must have {len(self._tables)} rows of ids, got {len(sizes)}"
            )
        floats = [size * dim for size, dim in zip(sizes, self.get_table_dim_sizes(), strict=True)]
        return floats, as_flat(flat, sum(floats), self.name, device=self.device)

    def _check_names(self, names: Mapping[str, Any]) -> None:
        for name in names:
            if name not in self._tables:
                known = ", ".join(self._tables) or "none"
                raise KeyError(f"table {self.name!r}: there is no table {name!r}; tables are {known}")
