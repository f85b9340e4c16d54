"""`TableState`: a table in a ``state_dict``: its columns as tensors, saved and loaded in pieces."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.errors import DataError, UnsupportedError
from shoal.nn.state.filters import check_filter, filter_bytes, has_counts
from shoal.nn.state.landing import Landing
from shoal.nn.state.saved import COLUMNS, CopiedRows, Piece, SavedRows, Spec, specs
from shoal.table.checkpoint.copies import wait_for_change
from shoal.table.checkpoint.shares import Share, Tile
from shoal.table.checkpoint.tensors import KEPT, RowLoad, table_state

OPTIONAL = ("filter", KEPT)
"""Tensors that only some tables have: the counts of an admission filter, and the eviction policy's data per row."""
_BYTES = Spec(None, torch.uint8)


class TableState:
    """One table's part of a ``state_dict``.

    Its tensors are a copy of the table, made when they are first read or just before the table changes; over ranks, of
    this rank's rows. A save before that reads the table piece by piece.
    """

    def __init__(self, share: Share) -> None:
        self.share, self.name = share, share.table.name
        self.local, self.whole = specs(share, whole=False), specs(share, whole=True)
        self.rows = share.table.size()
        self._thread = threading.get_ident()
        self._tensors: dict[str, Tensor] | None = None
        self._copying = threading.Lock()
        self._saved: SavedRows | None = None
        self._blobs: dict[str, tuple[int, int, Tensor]] = {}
        self._by_place: dict[str, dict[tuple[int, ...], Piece]] = {}
        self._expected: set[str] = set()
        self.landing: Landing | None = None
        wait_for_change(share.table, self)
        if share.table.replayed:  # it does not report changes
            self.copy_rows()

    @property
    def names(self) -> list[str]:
        """The names of its `TableTensor`s."""
        return [*self.local, "config", *(["filter"] if has_counts(self.share.table) else [])]

    # --- as tensors ---------------------------------------------------------------------------------------------------

    def spec(self, name: str) -> Spec:
        return self.local.get(name, _BYTES)

    def tensors(self) -> dict[str, Tensor]:
        """Return the columns received from a checkpoint, if any; else this process's rows as of the first call."""
        if self.landing is not None and self.landing.config is not None:
            came = self.landing.rows() | {"config": self.landing.config}
            joined = {name: torch.cat([own[at] for at in sorted(own)]) for name, own in self.landing.blobs.items()}
            return came | joined
        self.copy_rows()
        assert self._tensors is not None
        return self._tensors

    def copy_rows(self) -> None:
        """Copy the rows, unless that was done before."""
        with self._copying:
            if self._tensors is not None:
                return
            blobs = {name: _BLOBS[name](self.share) for name in self.names if name in _BLOBS}
            self._tensors = table_state(self.share.table) | {"config": self.config()} | blobs
            if self._saved is not None:
                self._saved.source = CopiedRows(self._tensors)

    @property
    def copied(self) -> bool:
        """Whether the rows have been copied."""
        return self._tensors is not None

    def config(self) -> Tensor:
        """The configuration of complete rows."""
        entry = self.share.shape.table_config.entry_config.SerializeToString(deterministic=True)
        return torch.frombuffer(bytearray(entry), dtype=torch.uint8)

    def _blob(self, name: str) -> Tensor:
        return _BLOBS[name](self.share) if self._tensors is None else self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of this process."""
        landing = self.landing
        if name in self.local:
            came = landing is not None and landing.config is not None
            return self.local[name].size(landing.count() if came and landing is not None else self.rows)
        if name == "config":
            return tuple((self.config() if landing is None or landing.config is None else landing.config).shape)
        return tuple((self.tensors()[name] if self._tensors is not None else self._blob(name)).shape)

    # --- saved --------------------------------------------------------------------------------------------------------

    def saved(self) -> SavedRows:
        """Return the rows in pieces. All ranks must call it together, in the thread that called ``state_dict``."""
        if self._saved is None:
            if self.share.ranks > 1 and threading.get_ident() != self._thread:
                raise UnsupportedError(
                    f"table {self.name!r} is spread over {self.share.ranks} ranks, which count its rows together: it "
                    "must be saved in the thread that calls state_dict; for async_save use use_async_staging=False"
                )
            source = self.share.table if self._tensors is None else CopiedRows(self._tensors)
            self._saved = SavedRows(self.share, source)
            self._blobs = {name: self._placed(name) for name in self.names if name in _BLOBS}
        return self._saved

    def _placed(self, name: str) -> tuple[int, int, Tensor]:
        """Return other bytes of this process: offset among those of all processes, total size, and the bytes."""
        blob = self._blob(name)
        sizes = self.share.gather(blob.numel())
        return sum(sizes[: self.share.rank]), sum(sizes), blob

    def pieces(self, name: str) -> Iterator[Piece]:
        """Yield the pieces of a column that this process writes."""
        saved = self.saved()
        if name in self.local:
            yield from saved.pieces(name)
        elif name == "config":
            size = self.config().numel()
            yield Piece(name, 0, size, Tile(0, size, 0), (0,), (size,))
        else:
            at, total, blob = self._blobs[name]
            if blob.numel() or (not total and not self.share.rank):
                yield Piece(name, 0, blob.numel(), Tile(0, 0, 0), (at,), (blob.numel(),))

    def size(self, name: str) -> tuple[int, ...]:
        """Return the size of a column of the complete table."""
        saved = self.saved()
        if name in self.local:
            return saved.specs[name].size(saved.total)
        return (self.config().numel(),) if name == "config" else (self._blobs[name][1],)

    def read(self, name: str, offsets: tuple[int, ...]) -> Tensor:
        """Read the piece of a column that begins at ``offsets``."""
        saved = self.saved()
        if name not in self.local:
            return self.config() if name == "config" else self._blobs[name][2]
        if name not in self._by_place:
            self._by_place[name] = {piece.offsets: piece for piece in saved.pieces(name)}
        return saved.read(self._by_place[name][offsets])

    def __deepcopy__(self, memo: dict[int, Any]) -> TableState:
        """Return a copy with the current rows."""
        if self.share.ranks > 1:
            self.saved()  # all ranks count now, not in a thread that saves
        self.copy_rows()
        twin = copy.copy(self)
        twin._copying = threading.Lock()
        memo[id(self)] = twin
        return twin

    # --- loaded -------------------------------------------------------------------------------------------------------

    def begin_landing(self, name: str) -> list[tuple[int, int]]:
        """Prepare to receive a column from a checkpoint; return the begin and number of the rows to request.

        Calling it again for a column starts another load.
        """
        if self.landing is None or name in self._expected:
            self.landing, self._expected = Landing(self.share), set()
        self._expected.add(name)
        return self.landing.wanted()


def load_state(share: Share, values: dict[str, Any]) -> None:
    """Replace a table's rows with those in a ``state_dict``: `TableTensor`s, or plain tensors of the complete table.

    Raises:
        DataError: they are incomplete, or from another rank or kind of table. The table is unchanged.
    """
    state: TableState | None = getattr(values["ids"], "table_state", None)
    theirs = Share(share.table, share.shape) if state is None else state.share
    landing = None if state is None else state.landing
    if theirs.ranks > 1 and theirs.compatible != share.compatible:
        raise DataError(
            f"table {share.table.name!r}: the state is from rank {theirs.rank} of {theirs.ranks}, which has other "
            "rows; use torch.distributed.checkpoint, or shoal.sharded.shard(model, plan)"
        )
    if landing is not None and landing.config is not None:
        landing.share = share
        restore_filter = check_filter(share, landing.blobs.get("filter", {}))
        landing.load(_plain(values["scales"]))
    else:
        whole = {name: _plain(value) for name, value in values.items()}
        restore_filter = check_filter(share, {0: whole["filter"]} if "filter" in whole else {})
        kept = [KEPT] if KEPT in whole and share.table.has_budget else []
        if theirs.ranks > 1 or (share.keeps == (0, 1) and not share.sliced):  # the rows have this process's format
            load = RowLoad(share.table, whole["config"], share.shape)
            load.add(*(whole[name] for name in (*COLUMNS, *kept)))
            load.commit(whole["scales"])
        else:
            landing = Landing(share)
            for name in ("config", *COLUMNS, *kept):
                landing.put(name, (0,) * whole[name].dim(), whole[name])
            landing.load(whole["scales"])
    restore_filter()


def _plain(value: Any) -> Tensor:
    value = value.tensor() if hasattr(value, "table_state") else value
    return value.detach().cpu().contiguous()


_BLOBS: dict[str, Any] = {"filter": filter_bytes}
