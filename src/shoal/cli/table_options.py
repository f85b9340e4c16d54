"""Flags of `shoal table` by verb; a class's docstring is the verb's help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Slots = Literal["v1", "v2"]


@dataclass(frozen=True, kw_only=True)
class _Checkpoint:
    path: Path
    """The checkpoint."""


@dataclass(frozen=True, kw_only=True)
class _Tables(_Checkpoint):
    table: tuple[str, ...] = ()
    """Only these tables."""


@dataclass(frozen=True, kw_only=True)
class Stat(_Tables):
    """Show rows, widths, optimizers, ages and norms of each table.

    Example: shoal table stat ckpt/item
    """

    slots: Slots = "v2"
    """Format of the ids, which determines the bits that hold the slot."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class Ls(_Tables):
    """List rows in file order.

    Example: shoal table ls ckpt/item --slot 3 --limit 5
    """

    slot: int | None = None
    """Only ids of this slot."""
    slots: Slots = "v2"
    """Format of the ids, which determines the bits that hold the slot."""
    since: int | None = None
    """Only rows updated at this time (seconds since 1970) or later."""
    skip: int = 0
    """Number of rows to skip first."""
    limit: int = 20
    """Maximum number of rows; 0 for all."""
    json: bool = False
    """Print one JSON object per line, with all weights."""


@dataclass(frozen=True, kw_only=True)
class Get(_Tables):
    """Show an id's weights and optimizer state.

    Example: shoal table get ckpt/item 42

    In a checkpoint of `shoal train`, by the value of a feature: shoal table get run --text user=u17
    """

    id: int | None = None
    """The id."""
    text: str | None = None
    """FEATURE=VALUE as in the data, instead of an id; the checkpoint records how to turn it into an id."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class Top(_Tables):
    """Show the rows with the largest norms, or the newest.

    Example: shoal table top ckpt/item --by recent --n 3
    """

    by: Literal["norm", "recent"] = "norm"
    """Order: by norm, or by last update."""
    n: int = 10
    """Number of rows."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Show ids added and removed, rows changed, and how far they moved from A to B.

    Example: shoal table diff ckpt-monday/item ckpt-tuesday/item
    """

    a: Path
    """The older checkpoint."""
    b: Path
    """The newer one."""
    table: tuple[str, ...] = ()
    """Only these tables."""
    memory_mib: int = 1024
    """Memory for A's rows; if they need more, the comparison takes several passes."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class Export(_Tables):
    """Export tables to Parquet or CSV.

    Example: shoal table export ckpt --parquet item.parquet
    """

    parquet: Path | None = None
    """The Parquet file to write; a folder if there are several tables."""
    csv: Path | None = None
    """The CSV file to write; a folder if there are several tables."""
    state: bool = False
    """Include optimizer state, so that an import restores identical rows (Parquet only)."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class Import:
    """Make a checkpoint from Parquet, CSV or npz files.

    Example: shoal table import item.parquet --name item --out ckpt

    Columns: id, time (optional), embedding (a list) or numbered ones (e0, e1, ...), state (optional).

    Arrays of npz files: ids, weights, times (optional).
    """

    files: tuple[Path, ...]
    """Files to read."""
    out: Path
    """The folder to make."""
    name: str
    """The table's name."""
    shards: int | None = None
    """Files of the table; by default one per million rows, four at most."""
    optimizer: str = "adagrad"
    """Optimizer whose initial state rows without state get; 'none' for no state."""
    id_column: str = "id"
    """Column with the ids."""
    vector_column: str | None = None
    """Column with the vectors; by default embedding, or the numbered columns."""
    time_column: str = "time"
    """Column with the times of the last updates."""
    now: int = 0
    """Time of rows without one, in seconds since 1970."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class Reshard(_Tables):
    """Rewrite the same rows to another number of files; row ID goes to file ID mod N.

    Example: shoal table reshard ckpt/item --shards 16 --out wide/item
    """

    out: Path
    """The basename or folder to write."""
    shards: int
    """New number of files per table."""
    kind: Literal["same", "folder", "basename"] = "same"
    """A folder for restore_incremental, files under a basename, or the same as the source."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class Verify(_Checkpoint):
    """Read every byte: manifests, sizes, checksums, records, counts, repeated ids.

    Example: shoal table verify ckpt
    """

    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class FromMonolith:
    """Convert a checkpoint of the original Monolith system, with single and multi tables.

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
    """Print JSON."""
