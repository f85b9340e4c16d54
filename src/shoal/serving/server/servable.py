"""What a loaded version can do: its signatures, the tables behind them, and the pushes they take."""

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.serving.export.manifest import SignatureSpec
from shoal.serving.predict import PredictCall, join_calls
from shoal.serving.server.push_log import Mark, PushLog
from shoal.serving.status import invalid_argument
from shoal.serving.tensors import NAME_OF_DTYPE, TensorHead
from shoal.stamps import Stamp
from shoal.table.arguments import device_of


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
        self.device: torch.device = device_of(self._subs[0] if self._subs else None)
        """Where the rows are."""
        self.reads: list[Callable[[torch.Tensor], torch.Tensor]] = [sub.lookup for sub in self._subs]
        """ids -> rows of each sub-table, both on its device."""
        self.lookups = self.reads if self.device.type == "cpu" else [self._homely(read) for read in self.reads]
        """ids -> rows of each sub-table, both in host memory."""
        self.dims = [int(sub.dim_size) for sub in self._subs]
        self.slots = dict(slots) if slots else {name: name for name in self.sub_tables}
        self.pushes = 0
        self.pushed_rows = 0
        self.last_push = 0.0
        self.lag = 0.0
        """Seconds from the oldest gradient of the last push to its being servable, 0 when the pusher did not say."""
        self.push_logs = [PushLog() for _ in self._subs]
        """What was pushed to each sub-table, for the version that comes after."""
        self.logs_pushes = True

    def _homely(self, read: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda ids: read(ids.to(self.device)).cpu()

    def renamed(self, name: str) -> "TableView":
        """The same table under another name, as one of several shards."""
        view = TableView(self.table, self.slots)
        view.name = name
        if not self.multi:
            view.sub_tables = [name]
            view.slots = dict.fromkeys(self.slots, name)
        return view

    def native(self, number: int) -> Any:
        """The native table of a sub-table, None where its rows are elsewhere."""
        return self._subs[number].native

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

    def assign_sub(self, number: int, ids: torch.Tensor, values: torch.Tensor, mark: Mark | float) -> None:
        """Writes rows that were pushed, stamped now. ``mark``: where they come from, or when they were read."""
        self._subs[number].assign(ids.to(self.device), values.to(self.device), int(time.time()))
        mark = mark if isinstance(mark, Mark) else Mark.at(mark)
        if self.logs_pushes or mark.source:
            self.push_logs[number].add(ids, mark)

    def erase_sub(self, number: int, ids: torch.Tensor, mark: Mark) -> None:
        """Removes rows that a push has deleted, and remembers that."""
        self._subs[number].erase(ids.to(self.device))
        self.push_logs[number].add(ids, mark, gone=True)

    def copy_sub(self, number: int, ids: torch.Tensor, other: "TableView", its: int) -> None:
        """Makes rows what they are in a sub-table of another view; those that are not there are removed."""
        there = other._subs[its].contains(ids.to(other.device)).cpu()
        rows = other.lookups[its](ids[there]).to(self.device)
        self._subs[number].assign(ids[there].to(self.device), rows, int(time.time()))
        self._subs[number].erase(ids[~there].to(self.device))

    def ids_sub(self, number: int) -> torch.Tensor:
        """The ids of all rows."""
        parts = list(self._subs[number].all_ids())
        return torch.cat(parts).cpu() if parts else torch.empty(0, dtype=torch.int64, device="cpu")

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
    tables: Sequence[tuple[str, int]] = ()
    """(name, dim) of the tables that it writes pushed rows to, in their order."""
    native: Any = None
    """The ``NativePredictor`` that answers it without the interpreter, if one can."""

    def check(self, where: str, inputs: Tensors) -> None:
        """Raises invalid argument where the inputs, given as tensors or as heads, are not those of the signature."""
        wanted = self.spec.inputs
        if inputs.keys() != wanted.keys():
            missing, extra = sorted(wanted.keys() - inputs.keys()), sorted(inputs.keys() - wanted.keys())
            raise invalid_argument(f"{where}: inputs must be {sorted(wanted)}; missing {missing}, unexpected {extra}")
        for alias, value in inputs.items():
            spec = wanted[alias]
            got = value.dtype if isinstance(value, TensorHead) else dtype_of(value)
            if got != spec.dtype and got not in (self.accepts or {}).get(alias, ()):
                takes = " or ".join((spec.dtype, *(self.accepts or {}).get(alias, ())))
                raise invalid_argument(f"{where}: input {alias!r} must be {takes}, got {got}")
            shape = tuple(value.shape)
            if spec.shape is not None and (
                len(shape) != len(spec.shape)
                or any(want is not None and want != have for want, have in zip(spec.shape, shape, strict=True))
            ):
                raise invalid_argument(
                    f"{where}: input {alias!r} must have shape {spec.shape} (None = any), got {list(shape)}"
                )
        if self.samples and len({value.shape[0] for value in inputs.values()}) > 1:
            rows = {alias: value.shape[0] for alias, value in sorted(inputs.items())}
            raise invalid_argument(f"{where}: inputs must have one row per sample each, got different numbers: {rows}")

    def convert(self, inputs: Tensors) -> Tensors:
        """What `run` takes of inputs that were checked."""
        return inputs

    def join(self, where: str, calls: Sequence[PredictCall]) -> tuple[Tensors, list[int]] | None:
        """What `run` takes of several requests together, and the rows of each, as `Batcher` says."""
        joined = join_calls(calls)
        if joined is not None:
            self.check(where, joined[0])
        return joined


def dtype_of(tensor: torch.Tensor | np.ndarray) -> str:
    """The name of a tensor's dtype as signatures write it; arrays hold strings."""
    return "string" if isinstance(tensor, np.ndarray) else NAME_OF_DTYPE.get(tensor.dtype) or str(tensor.dtype)


class Servable:
    """A loaded version: its signatures, the tables behind them, and the pushes they take.

    Attributes:
        rows_read_at: Unix time at which the export began to read its rows; None where nobody knows.
        stamps: source -> up to when the export has what it learnt; empty where nobody knows.
        version: its number.
        token: names this loading of the version in this process.
        complete: source -> up to when it has everything, by the export and by pushes since.
        program: the dense program, if it has one.
        rounds: the ``Rounds`` of pushes that are on their way here.
        weights: of the last push of dense weights.
        exported_step: the step of the export.
        fresh_at: Unix time by which the newest of its rows had been read from the trainer; None where nobody knows.
    """

    def __init__(
        self,
        signatures: Mapping[str, Signature],
        tables: Mapping[str, TableView] | None = None,
        rows_read_at: float | None = None,
        *,
        stamps: Mapping[str, Stamp] | None = None,
        version: int = 0,
        exported_step: int = 0,
    ) -> None:
        self.signatures = dict(signatures)
        self.tables = dict(tables or {})
        self.rows_read_at = rows_read_at
        self.stamps = dict(stamps or {})
        self.version = version
        self.exported_step = exported_step
        self.fresh_at = rows_read_at
        self.token = uuid.uuid4().hex
        self.complete = dict(self.stamps)
        self.program: Any = None
        self.rounds: Any = None
        self.weights: Mark | None = None
        self.push_lock = threading.Lock()
        self.successor: Servable | None = None
        self.graphs: Any = None
        """The ``SubGraphs`` that its signatures call, if they call any."""
        self.warm_up: Callable[[], int] | None = None
        """Has it answer what it is likely to be asked, before requests come."""

    def is_newer(self, mark: Mark) -> bool | None:
        """Whether what was pushed with a mark is newer than what the export has; None where nobody knows."""
        if mark.source and self.stamps:
            return mark.stamp > self.stamps.get(mark.source, min(self.stamps.values()))
        return None if self.rows_read_at is None else mark.read_at >= self.rows_read_at

    @property
    def step(self) -> int:
        """The trainer's step that it has come to, by the export and by pushes since."""
        known = [self.weights.stamp] if self.weights is not None else list(self.complete.values())
        return max(known).step if known else self.exported_step

    def refreshed(self, read_at: float) -> None:
        """Rows that had been read from the trainer by a Unix time are here now."""
        self.fresh_at = max(read_at, self.fresh_at or 0.0)

    def missing(self) -> str:
        """What it needs from other servers and does not get yet, "" if that is nothing. May take seconds."""
        return self.graphs.missing() if self.graphs is not None else ""

    def close(self) -> None:
        """Frees what the version holds."""
        for signature in self.signatures.values():
            if signature.native is not None:
                signature.native.close()
        self.signatures, self.tables, self.program = {}, {}, None
