"""What a loaded version can do: its signatures, the tables behind them, and the pushes they take."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.serving.export.manifest import SignatureSpec
from shoal.serving.server.push_log import PushLog
from shoal.serving.status import invalid_argument
from shoal.serving.tensors import NAME_OF_DTYPE, TensorHead


class TableView:
    """A hash table or a multi-table, seen alike: numbered sub-tables with names and dims.

    Args:
        table: a ``HashTable`` or a ``MultiHashTable``.
        slots: alias of the lookup signature -> sub-table name.
    """

    def __init__(self, table: Any, slots: Mapping[str, str] | None = None) -> None:
        self.table = table
        self.name: str = table.name
        self.multi = hasattr(table, "raw_assign")
        if self.multi:
            self._subs = list(table.tables.values())
            self.sub_tables = list(table.tables)
        else:
            self._subs, self.sub_tables = [table], [table.name]
        self.lookups: list[Callable[[torch.Tensor], torch.Tensor]] = [sub.lookup for sub in self._subs]
        """ids -> rows of each sub-table."""
        self.dims = [int(sub.dim_size) for sub in self._subs]
        self.slots = dict(slots) if slots else {name: name for name in self.sub_tables}
        self.pushes = 0
        self.pushed_rows = 0
        self.last_push = 0.0
        self.lag = 0.0
        """Seconds from the oldest gradient of the last push to its being servable, 0 when the pusher did not say."""
        self.push_logs = [PushLog() for _ in self._subs]
        """When the rows of each sub-table were pushed, for the version that comes after."""
        self.logs_pushes = True

    def renamed(self, name: str) -> "TableView":
        """The same table under another name, as one of several shards."""
        view = TableView(self.table, self.slots)
        view.name = name
        if not self.multi:
            view.sub_tables = [name]
            view.slots = dict.fromkeys(self.slots, name)
        return view

    def rows(self) -> int:
        return sum(self.sub_rows())

    def sub_rows(self) -> list[int]:
        return [sub.size() for sub in self._subs]

    def memory_bytes(self) -> int:
        return sum(sub.memory_bytes() for sub in self._subs)

    def configs(self) -> list[Any]:
        """The ``EmbeddingHashTableConfig`` of each sub-table."""
        return [sub.table_config for sub in self._subs]

    def number_of(self, sub_table: str, dim: int) -> int | None:
        """The number of the sub-table of that name (of a hash table: of the table itself), None if its dim differs."""
        number = self.sub_tables.index(sub_table) if sub_table in self.sub_tables else -1
        return number if number >= 0 and self.dims[number] == dim else None

    def assign_sub(self, number: int, ids: torch.Tensor, values: torch.Tensor, read_at: np.ndarray | float) -> None:
        """Writes rows that were pushed, stamped now. ``read_at``: when they were read from the trainer."""
        self._subs[number].assign(ids, values, int(time.time()))
        if self.logs_pushes:
            self.push_logs[number].add(ids, read_at)

    def count_push(self, rows: int, since: float) -> None:
        self.pushes += 1
        self.pushed_rows += rows
        self.last_push = time.time()
        self.lag = self.last_push - since if since else 0.0


def as_views(tables: Any) -> list[TableView]:
    """Views of a table, of several, of ``{alias: table}``; views stay as they are."""
    if isinstance(tables, Mapping):
        return [
            TableView(table, None if hasattr(table, "raw_assign") else {alias: table.name})
            for alias, table in tables.items()
        ]
    listed = tables if isinstance(tables, list | tuple) else [tables]
    return [table if isinstance(table, TableView) else TableView(table) for table in listed]


Tensors = dict[str, Any]


@dataclass(slots=True)
class Signature:
    """One callable of a servable.

    ``push`` marks those that write rows, ``batch`` those whose rows may be joined, ``waits`` those that wait on others.
    """

    spec: SignatureSpec
    run: Callable[[Tensors], Tensors]
    push: bool = False
    batch: bool = False
    waits: bool = False
    samples: bool = False
    """Whether every input has one row per sample, so that all have the same number of rows."""
    accepts: Mapping[str, tuple[str, ...]] | None = None
    """Further dtypes that an input takes besides the one in the specification."""
    hints: Mapping[str, str] | None = None
    """alias -> the form that this replica prefers, which its metadata says."""

    def check(self, where: str, inputs: Tensors) -> None:
        """Raises invalid argument where the inputs, given as tensors or as heads, are not those of the signature."""
        wanted = self.spec.inputs
        if inputs.keys() != wanted.keys():
            missing, extra = sorted(wanted.keys() - inputs.keys()), sorted(inputs.keys() - wanted.keys())
            raise invalid_argument(
                f"{where}: inputs do not match; missing {missing}, unexpected {extra}; it takes {sorted(wanted)}"
            )
        for alias, value in inputs.items():
            spec = wanted[alias]
            got = value.dtype if isinstance(value, TensorHead) else dtype_of(value)
            if got != spec.dtype and got not in (self.accepts or {}).get(alias, ()):
                takes = " or ".join((spec.dtype, *(self.accepts or {}).get(alias, ())))
                raise invalid_argument(f"{where}: input {alias!r} is {got}, expected {takes}")
            shape = tuple(value.shape)
            if spec.shape is not None and (
                len(shape) != len(spec.shape)
                or any(want is not None and want != have for want, have in zip(spec.shape, shape, strict=True))
            ):
                raise invalid_argument(
                    f"{where}: input {alias!r} has shape {list(shape)}, expected {spec.shape} (null = any)"
                )
        if self.samples and len({value.shape[0] for value in inputs.values()}) > 1:
            rows = {alias: value.shape[0] for alias, value in sorted(inputs.items())}
            raise invalid_argument(f"{where}: inputs must have one row per sample each, got different numbers: {rows}")


def dtype_of(tensor: torch.Tensor | np.ndarray) -> str:
    """The name of a tensor's dtype as signatures write it; arrays hold strings."""
    return "string" if isinstance(tensor, np.ndarray) else NAME_OF_DTYPE.get(tensor.dtype) or str(tensor.dtype)


class Servable:
    """A loaded version: its signatures, the tables behind them, and the pushes they take.

    Attributes:
        rows_read_at: Unix time at which the export began to read its rows; None where nobody knows.
    """

    def __init__(
        self,
        signatures: Mapping[str, Signature],
        tables: Mapping[str, TableView] | None = None,
        rows_read_at: float | None = None,
    ) -> None:
        self.signatures = dict(signatures)
        self.tables = dict(tables or {})
        self.rows_read_at = rows_read_at
        self.push_lock = threading.Lock()
        self.successor: Servable | None = None
        self.graphs: Any = None
        """The ``SubGraphs`` that its signatures call, if they call any."""

    def missing(self) -> str:
        """What it needs from other servers and does not get yet, "" if that is nothing. May take seconds."""
        return self.graphs.missing() if self.graphs is not None else ""

    def close(self) -> None:
        """Frees what the version holds."""
        self.signatures, self.tables = {}, {}
