"""Export of tables to Parquet and CSV, and import of rows from Parquet, CSV and npz files into a checkpoint."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from shoal.durable import file_bases, make_parents, temporary_path
from shoal.errors import ConfigError, DataError, missing_extra
from shoal.table.checkpoint import naming
from shoal.table.offline.scan import Batch, Floats, Ints
from shoal.table.offline.source import Source
from shoal.table.offline.write import folder_writer

Seen = Callable[[int], None]
_ROW_GROUP = 1 << 17
_NUMBERED = re.compile(r"(?:e|emb|dim|f|v|w|x)?_?(\d+)")


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise missing_extra("pyarrow", "train") from None
    return pyarrow


# --- out --------------------------------------------------------------------------------------------------------------


def export(
    source: Source, wanted: Sequence[str], out: str, *, kind: str = "parquet", state: bool = False,
    seen: Seen | None = None,
) -> dict[str, tuple[str, int]]:  # fmt: skip
    """Writes the wanted tables as ``parquet`` or ``csv``; returns table -> (file, number of rows).

    One table goes to the file ``out``, several to ``out/<table>.<kind>``. Columns: ``id``, ``time`` and ``embedding``
    (a list of floats; in CSV ``e0``, ``e1``, ...), and with ``state`` the serialized optimizer state, so that
    `import_rows` restores the rows bit for bit. Files appear when all of them are complete.
    """
    alone = len(wanted) == 1 and not os.path.isdir(out)
    bases = file_bases(wanted)
    paths = {name: out if alone else os.path.join(out, f"{bases[name]}.{kind}") for name in wanted}
    for path in paths.values():
        if os.path.lexists(path):
            raise ConfigError(f"{path} exists already; choose another name")
        make_parents(path)
    drafts = {name: temporary_path(path) for name, path in paths.items()}
    make = _ParquetFile if kind == "parquet" else _CsvFile
    files: dict[str, Any] = {}
    counts = dict.fromkeys(wanted, 0)
    try:
        for name, batch in source.scan(wanted):
            if name not in files:
                files[name] = make(drafts[name], name, batch.dim, state)
            files[name].add(batch)
            counts[name] += len(batch)
            if seen is not None:
                seen(len(batch))
        for name in wanted:
            if name not in files:
                files[name] = make(drafts[name], name, 0, state)
            files[name].close()
        for name, path in paths.items():
            os.replace(drafts[name], path)
    finally:
        for file in files.values():
            file.abandon()
        for draft in drafts.values():
            if os.path.exists(draft):
                os.unlink(draft)
    return {name: (path, counts[name]) for name, path in paths.items()}


class _ParquetFile:
    def __init__(self, path: str, name: str, dim: int, state: bool) -> None:
        pa = _arrow()
        import pyarrow.parquet as pq

        self._state = state
        fields = [("id", pa.int64()), ("time", pa.int64()), ("embedding", pa.list_(pa.float32(), dim))]
        if state:
            fields.append(("state", pa.binary()))
        about = {"shoal.table": name, "shoal.dim": str(dim)}
        self._schema = pa.schema(fields, metadata=about)
        # No dictionaries: floats hardly compress and ids never repeat.
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd", use_dictionary=False)
        self._held: list[Any] = []
        self._rows = 0

    def add(self, batch: Batch) -> None:
        pa = _arrow()
        flat = pa.array(np.ascontiguousarray(batch.weights).reshape(-1))
        columns = [
            pa.array(batch.ids),
            pa.array(batch.times),
            pa.FixedSizeListArray.from_arrays(flat, batch.dim),
        ]
        if self._state:
            columns.append(pa.array([batch.state(i) for i in range(len(batch))], pa.binary()))
        self._held.append(pa.record_batch(columns, schema=self._schema))
        self._rows += len(batch)
        if self._rows >= _ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            table = _arrow().Table.from_batches(self._held)
            self._writer.write_table(table, row_group_size=len(table))
        self._held, self._rows = [], 0

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def abandon(self) -> None:
        self._writer.close()


class _CsvFile:
    def __init__(self, path: str, name: str, dim: int, state: bool) -> None:
        if state:
            raise ConfigError("CSV files cannot hold optimizer state; use --parquet with --state")
        self._file = open(path, "x", encoding="ascii")  # noqa: SIM115
        self._file.write(",".join(["id", "time", *(f"e{d}" for d in range(dim))]) + "\n")

    def add(self, batch: Batch) -> None:
        lines = []
        for id, time, row in zip(batch.ids.tolist(), batch.times.tolist(), batch.weights, strict=True):
            lines.append(f"{id},{time},{','.join(map(str, row))}\n")  # the shortest text that parses to this float
        self._file.writelines(lines)

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        self._file.close()


# --- in ---------------------------------------------------------------------------------------------------------------


def import_rows(
    paths: Sequence[str], out: str, name: str, *, shards: int | None = None, optimizer: str = "adagrad",
    id_column: str = "id", vector_column: str | None = None, time_column: str = "time", now: int = 0,
    seen: Seen | None = None,
) -> int:  # fmt: skip
    """Creates a checkpoint folder with one table from Parquet, CSV or npz files; returns the number of rows.

    Args:
        paths: the input files; the extension determines the format.
        out: a new folder, for `restore_incremental`.
        name: the table's name.
        shards: the number of files; by default one per million rows, at most four.
        optimizer: rows without state get this optimizer's fresh state: a name that `shoal.HashTable` accepts, or
            ``none``.
        id_column: the column of int64 ids.
        vector_column: a column of lists; by default ``embedding``, else all numbered columns (``e0``, ``e1``, ...).
        time_column: seconds since 1970; rows in files without it get ``now``.

    Raises:
        DataError: a file cannot be read, a column is missing, or an id occurs twice. Nothing was written.
    """
    for path in paths:
        if not os.path.isfile(path):
            raise DataError(f"{path} is not a file")
    fresh: dict[int, bytes] = {}
    rows = 0
    with folder_writer(out, lambda _: shards or naming.shard_count(-1, _guess(paths))) as writer_of:
        writer = writer_of(name)
        for path in paths:
            for ids, times, weights, states in _read(path, id_column, vector_column, time_column, now):
                if states is None and weights.shape[1] not in fresh:
                    fresh[weights.shape[1]] = initial_state(optimizer, weights.shape[1])
                with _in_file(path):
                    writer.rows(ids, times, weights, fresh[weights.shape[1]] if states is None else states)
                rows += len(ids)
                if seen is not None:
                    seen(len(ids))
    return rows


def initial_state(optimizer: str, dim: int) -> bytes:
    """The serialized optimizer state of a new row."""
    if optimizer == "none":
        return b""
    import torch

    from shoal import _core
    from shoal.table.config.messages import EntryDump
    from shoal.table.table import HashTable

    table = HashTable(dim, optimizer=optimizer).assign(
        torch.zeros(1, dtype=torch.int64, device="cpu"), torch.zeros(1, dim, device="cpu")
    )
    return EntryDump.FromString(_core.lookup_entry(table._native, [0])[0]).opt.SerializeToString()


def _guess(paths: Collection[str]) -> int:
    return sum(os.path.getsize(path) for path in paths) // 128


Rows = tuple[Ints, Ints, Floats, list[bytes] | None]


def _read(path: str, id_column: str, vector: str | None, time: str, now: int) -> Iterator[Rows]:
    ending = os.path.splitext(path)[1].lower()
    if ending == ".npz":
        yield from _read_npz(path, id_column, vector, time, now)
    elif ending in (".parquet", ".pq"):
        yield from _read_arrow(path, _parquet_batches(path), id_column, vector, time, now)
    elif ending in (".csv", ".tsv"):
        yield from _read_arrow(
            path, _csv_batches(path, "\t" if ending == ".tsv" else ","), id_column, vector, time, now
        )
    else:
        raise DataError(f"{path}: the name of an input file must end in .parquet, .csv, .tsv or .npz")


@contextmanager
def _in_file(path: str) -> Iterator[None]:
    """Converts errors of the readers to `DataError` with the file's name."""
    try:
        yield
    except DataError as error:
        text = str(error)
        raise DataError(text if text.startswith(path) else f"{path}: {text}") from None
    except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: {error}") from error


def _parquet_batches(path: str) -> Iterator[Any]:
    _arrow()
    import pyarrow.parquet as pq

    with _in_file(path):
        file = pq.ParquetFile(path)
        yield from file.iter_batches(batch_size=1 << 16)


def _csv_batches(path: str, delimiter: str) -> Iterator[Any]:
    _arrow()
    from pyarrow import csv

    with _in_file(path):
        yield from csv.open_csv(path, parse_options=csv.ParseOptions(delimiter=delimiter))


def _read_arrow(
    path: str, batches: Iterator[Any], id_column: str, vector: str | None, time: str, now: int
) -> Iterator[Rows]:
    for batch in batches:
        names = batch.schema.names
        with _in_file(path):
            ids = _ints(_column(batch, id_column, path), id_column)
            times = _ints(_column(batch, time, path), time) if time in names else np.full(len(ids), now, np.int64)
            column = vector or ("embedding" if "embedding" in names else None)
            if column is not None:
                weights = _vectors(_column(batch, column, path), column)
            else:
                weights = _numbered(batch, {id_column, time}, path)
            states = None
            if "state" in names and _arrow().types.is_binary(batch.schema.field("state").type):
                states = [value or b"" for value in batch.column("state").to_pylist()]
        if len(ids):
            yield ids, times, weights, states


def _column(batch: Any, name: str, path: str) -> Any:
    if name not in batch.schema.names:
        raise DataError(f"{path} has no column {name!r}; it has {', '.join(map(repr, batch.schema.names[:20]))}")
    column = batch.column(name)
    if column.null_count:
        raise DataError(f"column {name!r} has {column.null_count} empty values")
    return column


def _ints(column: Any, name: str) -> Ints:
    pa = _arrow()
    if not pa.types.is_integer(column.type):
        raise DataError(f"column {name!r}: ids and times must be integers, got {column.type}")
    if column.type == pa.uint64():
        return column.to_numpy(zero_copy_only=False).view(np.int64)  # reinterprets the 64 bits
    return column.to_numpy(zero_copy_only=False).astype(np.int64)


def _vectors(column: Any, name: str) -> Floats:
    pa = _arrow()
    kind = column.type
    if pa.types.is_fixed_size_list(kind):
        flat, dim = column.flatten(), kind.list_size
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        flat = column.flatten()
        lengths = np.diff(column.offsets.to_numpy())
        if len(lengths) and (lengths != lengths[0]).any():
            raise DataError(
                f"column {name!r}: all lists must have the same length, got {lengths.min()} to {lengths.max()} values"
            )
        dim = int(lengths[0]) if len(lengths) else 1
    else:
        raise DataError(f"column {name!r}: an embedding must be a list of numbers, got {kind}")
    if flat.null_count:
        raise DataError(f"column {name!r} has empty values inside its lists")
    return flat.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, dim)


def _numbered(batch: Any, others: set[str], path: str) -> Floats:
    found = {n: m for n in batch.schema.names if n not in others and (m := _NUMBERED.fullmatch(n))}
    if not found:
        raise DataError(
            f"{path} has neither a column 'embedding' nor numbered ones such as e0, e1; choose one with --vector-column"
        )
    names = sorted(found, key=lambda name: int(found[name][1]))
    columns = []
    for name in names:
        column = _column(batch, name, path)
        if not (_arrow().types.is_floating(column.type) or _arrow().types.is_integer(column.type)):
            raise DataError(f"column {name!r}: weights must be numbers, got {column.type}")
        columns.append(column.to_numpy(zero_copy_only=False).astype(np.float32))
    return np.stack(columns, axis=1) if len(batch) else np.empty((0, len(names)), np.float32)


def _read_npz(path: str, id_column: str, vector: str | None, time: str, now: int) -> Iterator[Rows]:
    with _in_file(path):
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            names = {"ids": (id_column, "ids", "id"), "weights": (vector, "weights", "embedding", "embeddings", "rows")}
            found = {}
            for key, options in names.items():
                have = [name for name in options if name is not None and name in file.files]
                if not have:
                    raise DataError(
                        f"there is no array {options[1]!r}; the arrays are {', '.join(map(repr, file.files[:20]))}"
                    )
                found[key] = file[have[0]]
            times = next((file[name] for name in (time, "times") if name in file.files), None)
        ids, weights = found["ids"], found["weights"]
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise DataError(f"ids must be a vector of integers, got {ids.dtype} of shape {ids.shape}")
        if weights.ndim != 2 or len(weights) != len(ids) or weights.dtype.kind not in "fiu" or not weights.shape[1]:
            raise DataError(f"weights must be [{len(ids)}, dim] numbers, got {weights.dtype} of shape {weights.shape}")
        if times is not None and (times.shape != ids.shape or times.dtype.kind not in "iu"):
            raise DataError(f"times must be {len(ids)} integers, got {times.dtype} of shape {times.shape}")
        ids = ids.view(np.int64) if ids.dtype == np.uint64 else ids.astype(np.int64)
        times = np.full(len(ids), now, np.int64) if times is None else times.astype(np.int64)
    for begin in range(0, len(ids), 1 << 16):
        part = slice(begin, begin + (1 << 16))
        yield ids[part], times[part], weights[part].astype(np.float32), None
