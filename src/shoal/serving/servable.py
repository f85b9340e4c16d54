"""What a loaded version can do: signatures over tables, and the tables' serving form."""

import contextvars
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.serving.manifest import SignatureSpec, TensorSpec
from shoal.serving.quantise import asked, asked_multi, decode, decode_multi, multi_bytes, wire_dtype
from shoal.serving.status import invalid_argument
from shoal.serving.tensors import NAME_OF_DTYPE
from shoal.table.messages import EntryConfig
from shoal.table.touched import TouchedKeySet

SERVING = EntryConfig.SERVING

Tensors = dict[str, Any]

touched_at: contextvars.ContextVar[float] = contextvars.ContextVar("shoal_touched_at", default=0.0)
"""Unix time of the oldest gradient in the push being applied, 0 when the pusher did not say."""


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
    accepts: Mapping[str, tuple[str, ...]] | None = None
    """Further dtypes that an input takes beside the one in the specification."""
    hints: Mapping[str, str] | None = None
    """alias -> the form that this replica would rather get, told in its metadata."""

    def check(self, where: str, inputs: Tensors) -> None:
        """Raises invalid argument where the inputs are not those of the signature."""
        wanted = self.spec.inputs
        if inputs.keys() != wanted.keys():
            missing, extra = sorted(wanted.keys() - inputs.keys()), sorted(inputs.keys() - wanted.keys())
            raise invalid_argument(
                f"{where}: inputs do not match; missing {missing}, unexpected {extra}; it takes {sorted(wanted)}"
            )
        for alias, value in inputs.items():
            spec = wanted[alias]
            got = "string" if isinstance(value, np.ndarray) else dtype_of(value)
            if got != spec.dtype and got not in (self.accepts or {}).get(alias, ()):
                raise invalid_argument(f"{where}: input {alias!r} is {got}, expected {spec.dtype}")
            shape = tuple(value.shape)
            if spec.shape is not None and (
                len(shape) != len(spec.shape)
                or any(want is not None and want != have for want, have in zip(spec.shape, shape, strict=True))
            ):
                raise invalid_argument(
                    f"{where}: input {alias!r} has shape {list(shape)}, expected {spec.shape} (null = any)"
                )


def dtype_of(tensor: torch.Tensor) -> str:
    """The name of a tensor's dtype as signatures write it."""
    return NAME_OF_DTYPE.get(tensor.dtype) or str(tensor.dtype)


class Servable:
    """A loaded version: its signatures, the tables behind them, and the pushes they take."""

    def __init__(self, signatures: Mapping[str, Signature], tables: Mapping[str, "TableView"] | None = None) -> None:
        self.signatures = dict(signatures)
        self.tables = dict(tables or {})
        self.push_lock = threading.Lock()
        self.successor: Servable | None = None

    def close(self) -> None:
        """Frees what the version holds."""
        self.signatures, self.tables = {}, {}

    def hand_over_to(self, successor: "Servable") -> None:
        """From now on ``successor`` gets every push too; rows pushed before are copied to it.

        Rows that were pushed are newer than those of an export, so a version that replaces another keeps them.
        """
        with self.push_lock:
            self.successor = successor
        for name, view in self.tables.items():
            other = successor.tables.get(name)
            if other is None or other.dims != view.dims:
                continue
            for number, ids in view.pushed_ids().items():
                for begin in range(0, len(ids), 65536):
                    part = ids[begin : begin + 65536]
                    with self.push_lock:
                        other.assign_sub(number, part, view.lookup_sub(number, part), None)


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
        self.dims = [int(sub.dim_size) for sub in self._subs]
        self.slots = dict(slots) if slots else {name: name for name in self.sub_tables}
        self.pushes = 0
        self.pushed_rows = 0
        self.last_push = 0.0
        self.lag = 0.0
        """Seconds from the oldest gradient of the last push to its being servable, 0 when the pusher did not say."""
        self._pushed = TouchedKeySet()
        self._recent: list[tuple[int, torch.Tensor]] = []  # pushed ids that are not in the set yet
        self._recent_rows = 0
        self._log_lock = threading.Lock()
        self._sorting = threading.Lock()

    def rows(self) -> int:
        return sum(self.sub_rows())

    def sub_rows(self) -> list[int]:
        return [sub.size() for sub in self._subs]

    def memory_bytes(self) -> int:
        return sum(sub.memory_bytes() for sub in self._subs)

    def configs(self) -> list[Any]:
        """The ``EmbeddingHashTableConfig`` of each sub-table."""
        return [sub.table_config for sub in self._subs]

    def lookup_sub(self, number: int, ids: torch.Tensor) -> torch.Tensor:
        return self._subs[number].lookup(ids)

    def assign_sub(self, number: int, ids: torch.Tensor, values: torch.Tensor, req_time: int | None) -> None:
        """Writes rows, stamped now unless a time is given, and remembers that they were pushed."""
        self._subs[number].assign(ids, values, int(time.time()) if req_time is None else req_time)
        with self._log_lock:
            self._recent.append((number, ids))
            self._recent_rows += len(ids)
            many = self._recent_rows > 1_000_000 and not self._sorting.locked()
            if many:
                self._recent_rows = 0
        if many:
            threading.Thread(target=self._sort, name="shoal-pushed", daemon=True).start()

    def _sort(self) -> None:
        """Moves the log of pushed ids into the set, away from the push that filled it."""
        with self._sorting:
            with self._log_lock:
                recent, self._recent = self._recent, []
                self._recent_rows = 0
            for number, ids in recent:
                self._pushed.insert(ids, number)

    def pushed_ids(self) -> dict[int, torch.Tensor]:
        """sub-table number -> ids that pushes wrote; they are kept."""
        self._sort()
        ids, numbers = self._pushed.steal_pairs()
        found = {int(number): ids[numbers == number] for number in numbers.unique()}
        for number, group in found.items():
            self._pushed.insert(group, number)
        return found

    def count_push(self, rows: int, since: float) -> None:
        self.pushes += 1
        self.pushed_rows += rows
        self.last_push = time.time()
        self.lag = self.last_push - since if since else 0.0


def table_signatures(views: Sequence[TableView], owner: Callable[[], Servable]) -> dict[str, Signature]:
    """An embedding shard's: ``lookup``, ``raw_lookup``, ``hashtable_assign``, ``<mtable>/raw_assign``."""
    signatures: dict[str, Signature] = {}
    slots = {alias: (view, view.sub_tables.index(sub)) for view in views for alias, sub in view.slots.items()}
    if slots:
        spec = SignatureSpec(
            {alias: TensorSpec("int64", [None]) for alias in slots},
            {alias: TensorSpec("float", [None, view.dims[number]]) for alias, (view, number) in slots.items()},
        )

        def lookup(inputs: Tensors) -> Tensors:
            return {alias: view.lookup_sub(number, inputs[alias]) for alias, (view, number) in slots.items()}

        signatures["lookup"] = Signature(spec, lookup)
    if singles := [view for view in views if not view.multi]:
        signatures["hashtable_assign"] = _assign_signature(singles, owner)
    for view in views:
        if view.multi:
            signatures[f"{view.name}/raw_assign"] = _raw_assign_signature(view, owner)
            signatures["raw_lookup"] = _raw_lookup_signature(view)
    return signatures


def _apply(owner: Callable[[], Servable], write: Callable[[Servable], None]) -> None:
    """One push, to the servable and to the version that is about to replace it."""
    servable = owner()
    with servable.push_lock:
        write(servable)
        if servable.successor is not None:
            write(servable.successor)


def _assign_signature(views: Sequence[TableView], owner: Callable[[], Servable]) -> Signature:
    spec = SignatureSpec()
    accepts: dict[str, tuple[str, ...]] = {}
    codecs: dict[str, str] = {}
    hints: dict[str, str] = {}
    for view in views:
        spec.inputs[f"{view.name}_id"] = TensorSpec("int64", [None])
        spec.inputs[f"{view.name}_value"] = TensorSpec("float", [None, view.dims[0]])
        spec.outputs[f"{view.name}_result"] = TensorSpec("int32", [])
        codec = codecs[view.name] = (
            asked(view.configs()[0]) if view.configs()[0].entry_config.entry_type == SERVING else ""
        )
        if codec:
            accepts[f"{view.name}_value"] = (wire_dtype(codec),)
            hints[f"{view.name}_value"] = codec

    def assign(inputs: Tensors) -> Tensors:
        work = []
        for view in views:
            ids, values = inputs[f"{view.name}_id"], inputs[f"{view.name}_value"]
            if len(ids) != len(values):
                raise invalid_argument(f"table {view.name!r}: {len(ids)} ids for {len(values)} rows of values")
            work.append((view.name, ids, decode(codecs[view.name], values)))

        def write(servable: Servable) -> None:
            for name, ids, values in work:
                if len(ids) and name in servable.tables:
                    servable.tables[name].assign_sub(0, ids, values, None)

        _apply(owner, write)
        for view, (_, ids, _) in zip(views, work, strict=True):
            view.count_push(len(ids), touched_at.get())
        return {f"{name}_result": torch.tensor(len(ids), dtype=torch.int32) for name, ids, _ in work}

    return Signature(spec, assign, push=True, accepts=accepts, hints=hints)


def _splits(view: TableView, ids: torch.Tensor, splits: torch.Tensor, repeats: bool) -> None:
    count = len(view.sub_tables)
    length = len(splits) - 1
    if length < 0 or length % count or (length != count and not repeats):
        raise invalid_argument(
            f"multi-table {view.name!r}: id_split has {len(splits)} entries; {count} tables need {count + 1}"
        )
    if splits[0] != 0 or splits[-1] != len(ids) or bool((splits[1:] < splits[:-1]).any()):
        raise invalid_argument(
            f"multi-table {view.name!r}: id_split must rise from 0 to the {len(ids)} ids, got {splits[:8].tolist()}"
        )


def _raw_lookup_signature(view: TableView) -> Signature:
    spec = SignatureSpec(
        {"id": TensorSpec("int64", [None]), "id_split": TensorSpec("int64", [None])},
        {"flat_emb": TensorSpec("float", [None])},
    )

    def raw_lookup(inputs: Tensors) -> Tensors:
        _splits(view, inputs["id"], inputs["id_split"], repeats=True)
        return {"flat_emb": view.table.raw_lookup((inputs["id"], inputs["id_split"]))}

    return Signature(spec, raw_lookup)


def _raw_assign_signature(view: TableView, owner: Callable[[], Servable]) -> Signature:
    spec = SignatureSpec(
        {
            "id": TensorSpec("int64", [None]),
            "id_split": TensorSpec("int64", [None]),
            "flat_value": TensorSpec("float", [None]),
        },
        {"result": TensorSpec("int32", [])},
    )
    dims = torch.tensor(view.dims)
    stored = all(config.entry_config.entry_type == SERVING for config in view.configs())
    codecs = asked_multi(view.configs()) if stored else ""

    def raw_assign(inputs: Tensors) -> Tensors:
        ids, splits, flat = inputs["id"], inputs["id_split"], inputs["flat_value"]
        _splits(view, ids, splits, repeats=False)
        counts = splits[1:] - splits[:-1]
        sizes = (counts * dims).tolist()
        packed = flat.dtype == torch.uint8
        need = sum(multi_bytes(codecs, sizes) if packed else sizes)
        if need != len(flat):
            unit = "bytes" if packed else "values"
            raise invalid_argument(f"multi-table {view.name!r}: these ids need {need} {unit}, got {len(flat)}")
        if packed:
            flat = decode_multi(codecs, sizes, flat)

        def write(servable: Servable) -> None:
            target = servable.tables.get(view.name)
            if target is None or target.dims != view.dims:
                return
            begin = 0
            for number, (count, dim) in enumerate(zip(counts.tolist(), view.dims, strict=True)):
                part = ids[int(splits[number]) : int(splits[number]) + count]
                if count:
                    target.assign_sub(number, part, flat[begin : begin + count * dim].reshape(count, dim), None)
                begin += count * dim

        _apply(owner, write)
        view.count_push(len(ids), touched_at.get())
        return {"result": torch.tensor(0, dtype=torch.int32)}

    accepts = {"flat_value": ("uint8",)} if codecs else None
    return Signature(spec, raw_assign, push=True, accepts=accepts, hints={"flat_value": codecs} if codecs else None)


def as_views(tables: Any) -> list[TableView]:
    """Views of a table, of several, of ``{alias: table}``; views stay as they are."""
    if isinstance(tables, Mapping):
        return [
            TableView(table, None if hasattr(table, "raw_assign") else {alias: table.name})
            for alias, table in tables.items()
        ]
    listed = tables if isinstance(tables, list | tuple) else [tables]
    return [table if isinstance(table, TableView) else TableView(table) for table in listed]


def live_servable(tables: Any) -> Servable:
    """A servable over tables of this process, given as :func:`as_views` takes them."""
    views = as_views(tables)
    servable = Servable({}, {view.name: view for view in views})
    servable.signatures = table_signatures(views, lambda: servable)
    return servable
