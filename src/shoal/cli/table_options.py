"""The flags of `shoal table`, verb by verb; a class's docstring is the verb's help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Slots = Literal["v1", "v2"]


@dataclass(frozen=True, kw_only=True)
class Stat:
    """Rows, widths, optimizers, ages and norms of each table.

    Example: shoal table stat ckpt/item
    """

    path: Path
    """The checkpoint."""
    table: tuple[str, ...] = ()
    """Only these tables."""
    slots: Slots = "v2"
    """Where slots are in ids."""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class Ls:
    """Rows in the order of the files.

    Example: shoal table ls ckpt/item --slot 3 --limit 5
    """

    path: Path
    """The checkpoint."""
    table: tuple[str, ...] = ()
    """Only these tables."""
    slot: int | None = None
    """Only ids of this slot."""
    slots: Slots = "v2"
    """Where slots are in ids."""
    since: int | None = None
    """Only rows updated at this time (seconds since 1970) or later."""
    skip: int = 0
    limit: int = 20
    """Rows at most; 0 for all."""
    json: bool = False
    """One JSON object a line, with all weights."""


@dataclass(frozen=True, kw_only=True)
class Get:
    """One id's weights and optimizer state.

    Example: shoal table get ckpt/item 42

    In a checkpoint of `shoal train`, by the value of a feature: shoal table get run --text user=u17
    """

    path: Path
    """The checkpoint."""
    id: int | None = None
    """The id."""
    text: str | None = None
    """FEATURE=VALUE instead of an id, as the data has it; the checkpoint says how it becomes one."""
    table: tuple[str, ...] = ()
    """Only these tables."""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class Top:
    """The rows with the largest norms, or the newest.

    Example: shoal table top ckpt/item --by recent -n 3
    """

    path: Path
    """The checkpoint."""
    by: Literal["norm", "recent"] = "norm"
    n: int = 10
    """How many."""
    table: tuple[str, ...] = ()
    """Only these tables."""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Ids added and removed, rows changed, and how far they moved from A to B.

    Example: shoal table diff ckpt-monday/item ckpt-tuesday/item
    """

    a: Path
    """The older checkpoint."""
    b: Path
    """The newer one."""
    table: tuple[str, ...] = ()
    """Only these tables."""
    memory_mib: int = 1024
    """A's rows are held in memory; more than this are compared in several passes."""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class Export:
    """Tables to Parquet or CSV.

    Example: shoal table export ckpt --parquet item.parquet
    """

    path: Path
    """The checkpoint."""
    parquet: Path | None = None
    """The file to make; with several tables, the folder."""
    csv: Path | None = None
    """The same as text."""
    state: bool = False
    """Optimizer state, too, so that an import gives the same rows back (Parquet)."""
    table: tuple[str, ...] = ()
    """Only these tables."""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class Import:
    """A checkpoint from Parquet, CSV or npz files.

    Example: shoal table import item.parquet --name item --out ckpt

    Columns: id, time (optional), embedding (a list) or numbered ones (e0, e1, ...), state (optional).
    Arrays of npz files: ids, weights, times (optional).
    """

    files: tuple[Path, ...]
    """What to read."""
    out: Path
    """The folder to make."""
    name: str
    """The table's name."""
    shards: int | None = None
    """Files of the table; by default one per million rows, four at most."""
    optimizer: str = "adagrad"
    """Whose fresh state the rows get that bring none; 'none' for no state."""
    id_column: str = "id"
    vector_column: str | None = None
    time_column: str = "time"
    now: int = 0
    """The time of rows that bring none, in seconds since 1970."""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class Reshard:
    """The same rows in another number of files, row ID in file ID mod N.

    Example: shoal table reshard ckpt/item --shards 16 --out wide/item
    """

    path: Path
    """The checkpoint."""
    out: Path
    """The basename or folder to make."""
    shards: int
    """How many files a table will have."""
    kind: Literal["same", "folder", "basename"] = "same"
    """A folder for restore_incremental, files under a basename, or what the source is."""
    table: tuple[str, ...] = ()
    """Only these tables."""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Read every byte: manifests, sizes, checksums, records, counts, repeated ids.

    Example: shoal table verify ckpt
    """

    path: Path
    """The checkpoint."""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class FromMonolith:
    """The original system's checkpoint as one of ours, single and multi tables.

    Example: shoal table from-monolith /models/ctr --out ckpt-ctr
    """

    path: Path
    """A model directory, a <model>-<step>.assets folder, or a basename."""
    out: Path
    """The folder to make."""
    rename: tuple[str, ...] = ()
    """OLD=NEW names of tables."""
    shards: int | None = None
    """Files of each table; by default one per million rows, four at most."""
    json: bool = False
