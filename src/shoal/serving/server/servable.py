"""What a loaded version can do: its signatures, the tables behind them, and the pushes they take."""

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.errors import ConfigError
from shoal.serving.export.manifest import SignatureSpec
from shoal.serving.predict import PredictCall, join_calls
from shoal.serving.server.push_log import Mark, PushLog
from shoal.serving.status import invalid_argument
from shoal.serving.tensors import NAME_OF_DTYPE, TensorHead
from shoal.stamps import Stamp
from shoal.table.arguments import device_of


class TableView:
    """A common view of hash tables and multi-tables: numbered sub-tables with names and dims.

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
        """Seconds from the last push's oldest gradient until it was servable; 0 if the sender did not say."""
        self.push_logs = [PushLog() for _ in self._subs]
        """The log of pushes to each sub-table, for the next version."""
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
        """The native table of a sub-table; None if its rows are elsewhere."""
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
        """The number of the sub-table with that name (a hash table counts as its own); None if its dim differs."""
        number = self.sub_tables.index(sub_table) if sub_table in self.sub_tables else -1
        return number if number >= 0 and self.dims[number] == dim else None

    def refuses(self, number: int, values: torch.Tensor) -> bool:
        """Whether pushed rows hold NaN or infinity, and a sub-table would refuse them. Tables of exports take any."""
        finite_only = getattr(self._subs[number], "finite_values", False)
        if not finite_only or bool(values.sum().isfinite()):  # if the sum is finite, all are
            return False
        return not bool(values.isfinite().all())

    def assign_sub(self, number: int, ids: torch.Tensor, values: torch.Tensor, mark: Mark | float) -> None:
        """Write pushed rows with the current timestamp. ``mark``: their origin, or when they were read."""
        self._subs[number].assign(ids.to(self.device), values.to(self.device), int(time.time()))
        mark = mark if isinstance(mark, Mark) else Mark.at(mark)
        if self.logs_pushes or mark.source:
            self.push_logs[number].add(ids, mark)

    def erase_sub(self, number: int, ids: torch.Tensor, mark: Mark) -> None:
        """Remove rows that a push deleted, and log the deletion."""
        self._subs[number].erase(ids.to(self.device))
        self.push_logs[number].add(ids, mark, gone=True)

    def copy_sub(self, number: int, ids: torch.Tensor, other: "TableView", its: int) -> None:
        """Copy rows from a sub-table of another view; rows that are missing there are removed here."""
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
    """Views of a table, several tables or ``{alias: table}``; views are returned unchanged."""
    if isinstance(tables, Mapping):
        return [
            TableView(table, None if hasattr(table, "raw_assign") else {alias: table.name})
            for alias, table in tables.items()
        ]
    listed = tables if isinstance(tables, list | tuple) else [tables]
    if wrong := [each for each in listed if not hasattr(each, "name")]:
        raise ConfigError(f"tables must be HashTable or MultiHashTable objects, got {type(wrong[0]).__name__}")
    return [table if isinstance(table, TableView) else TableView(table) for table in listed]


Tensors = dict[str, Any]


@dataclass(slots=True)
class Signature:
    """One callable of a servable.

    ``push``: it writes rows; ``batch``: its requests may be joined; ``waits``: it waits for other servers.
    """

    spec: SignatureSpec
    run: Callable[[Tensors], Tensors]
    push: bool = False
    batch: bool = False
    waits: bool = False
    samples: bool = False
    """Whether every input has one row per sample, so that all have the same number of rows."""
    accepts: Mapping[str, tuple[str, ...]] | None = None
    """Further dtypes that an input accepts in addition to the one in its spec."""
    hints: Mapping[str, str] | None = None
    """alias -> the form that this replica prefers; published in its metadata."""
    tables: Sequence[tuple[str, int]] = ()
    """(name, dim) of the tables that it writes pushed rows to, in order."""
    native: Any = None
    """The ``NativePredictor`` that answers it without the interpreter, if one can."""

    def check(self, where: str, inputs: Tensors) -> None:
        """Raise INVALID_ARGUMENT if the inputs, given as tensors or heads, do not match the signature."""
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
        """Convert checked inputs to the arguments of `run`."""
        return inputs

    def join(self, where: str, calls: Sequence[PredictCall]) -> tuple[Tensors, list[int]] | None:
        """The joined arguments of `run` for several requests, and the rows of each; see `Batcher`."""
        joined = join_calls(calls)
        if joined is not None:
            self.check(where, joined[0])
        return joined


def dtype_of(tensor: torch.Tensor | np.ndarray) -> str:
    """The name of a tensor's dtype in signatures; arrays hold strings."""
    return "string" if isinstance(tensor, np.ndarray) else NAME_OF_DTYPE.get(tensor.dtype) or str(tensor.dtype)


class Servable:
    """A loaded version: its signatures, the tables behind them, and the pushes they take.

    Attributes:
        rows_read_at: Unix time at which the export began to read its rows; None if unknown.
        stamps: source -> the stamp up to which the export has its changes; empty if unknown.
        version: its number.
        token: names this loading of the version in this process.
        complete: source -> the stamp up to which it has all changes, from the export and later pushes.
        program: the dense program, if it has one.
        rounds: the incomplete ``Rounds`` of pushes.
        weights: the mark of the last push of dense weights.
        exported_step: the step of the export.
        fresh_at: Unix time by which the newest of its rows had been read from the trainer; None if unknown.
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
        """Warms it up with likely requests before real ones arrive."""

    def is_newer(self, mark: Mark) -> bool | None:
        """Whether rows pushed with a mark are newer than the export's; None if unknown."""
        if mark.source and self.stamps:
            return mark.stamp > self.stamps.get(mark.source, min(self.stamps.values()))
        return None if self.rows_read_at is None else mark.read_at >= self.rows_read_at

    @property
    def step(self) -> int:
        """The trainer's step that it has reached, through the export and later pushes."""
        known = [self.weights.stamp] if self.weights is not None else list(self.complete.values())
        return max(known).step if known else self.exported_step

    def refreshed(self, read_at: float) -> None:
        """Record that rows read from the trainer up to a Unix time are now here."""
        self.fresh_at = max(read_at, self.fresh_at or 0.0)

    def missing(self) -> str:
        """What it still lacks from other servers; "" if nothing. May take seconds."""
        return self.graphs.missing() if self.graphs is not None else ""

    def close(self) -> None:
        """Free the version's resources."""
        for signature in self.signatures.values():
            if signature.native is not None:
                signature.native.close()
        self.signatures, self.tables, self.program = {}, {}, None
