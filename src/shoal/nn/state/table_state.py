"""`TableState`: a table in a ``state_dict``: its columns as tensors, in pieces when saved, landing when loaded."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.errors import DataError, UnsupportedError
from shoal.nn.state.filters import filter_bytes, has_counts, restore_filter
from shoal.nn.state.landing import Landing
from shoal.nn.state.saved import COLUMNS, CopiedRows, Piece, SavedRows, Spec, specs
from shoal.table.checkpoint.copies import wait_for_change
from shoal.table.checkpoint.shares import Share, Tile
from shoal.table.checkpoint.tensors import KEPT, RowLoad, table_state

OPTIONAL = ("filter", KEPT)
"""What only some tables have: the counts of an admission filter, and what the policy of a budget keeps of rows."""
_BYTES = Spec(None, torch.uint8)


class TableState:
    """One table's part of a ``state_dict``.

    Its tensors are a copy of the table, which is made when somebody looks at them, or just before the table changes.
    Over ranks they are those of this rank's rows. What is saved before that is read piece by piece.
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
        if share.table.replayed:  # its changes are not told
            self.copy_rows()

    @property
    def names(self) -> list[str]:
        """Of its tensors, without the plain ones."""
        return [*self.local, "config", *(["filter"] if has_counts(self.share.table) else [])]

    # --- as tensors ---------------------------------------------------------------------------------------------------

    def spec(self, name: str) -> Spec:
        return self.local.get(name, _BYTES)

    def tensors(self) -> dict[str, Tensor]:
        """What came from a checkpoint, if something did; else the rows of this process as they are when first asked."""
        if self.landing is not None and self.landing.config is not None:
            came = self.landing.rows() | {"config": self.landing.config}
            joined = {name: torch.cat([own[at] for at in sorted(own)]) for name, own in self.landing.blobs.items()}
            return came | joined
        self.copy_rows()
        assert self._tensors is not None
        return self._tensors

    def copy_rows(self) -> None:
        """Reads the table, if that was not done yet."""
        with self._copying:
            if self._tensors is not None:
                return
            blobs = {name: _BLOBS[name](self.share) for name in self.names if name in _BLOBS}
            self._tensors = table_state(self.share.table) | {"config": self.config()} | blobs
            if self._saved is not None:
                self._saved.source = CopiedRows(self._tensors)

    @property
    def copied(self) -> bool:
        """Whether the rows have been read."""
        return self._tensors is not None

    def config(self) -> Tensor:
        """The configuration of whole rows."""
        entry = self.share.shape.table_config.entry_config.SerializeToString(deterministic=True)
        return torch.frombuffer(bytearray(entry), dtype=torch.uint8)

    def _blob(self, name: str) -> Tensor:
        return _BLOBS[name](self.share) if self._tensors is None else self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor of this process."""
        landing = self.landing
        if name in self.local:
            came = landing is not None and landing.config is not None
            return self.local[name].size(landing.count() if came and landing is not None else self.rows)
        if name == "config":
            return tuple((self.config() if landing is None or landing.config is None else landing.config).shape)
        return tuple((self.tensors()[name] if self._tensors is not None else self._blob(name)).shape)

    # --- saved --------------------------------------------------------------------------------------------------------

    def saved(self) -> SavedRows:
        """The rows in pieces. All ranks of a table ask for it together, in the thread that called ``state_dict``."""
        if self._saved is None:
            if self.share.ranks > 1 and threading.get_ident() != self._thread:
                raise UnsupportedError(
                    f"table {self.name!r} is spread over {self.share.ranks} ranks, which count its rows together: save "
                    "in the thread that calls state_dict, or have async_save copy at once (use_async_staging=False)"
                )
            source = self.share.table if self._tensors is None else CopiedRows(self._tensors)
            self._saved = SavedRows(self.share, source)
            self._blobs = {name: self._placed(name) for name in self.names if name in _BLOBS}
        return self._saved

    def _placed(self, name: str) -> tuple[int, int, Tensor]:
        """Other bytes of this process: where they begin among those of all, how many these are, and they."""
        blob = self._blob(name)
        sizes = self.share.gather(blob.numel())
        return sum(sizes[: self.share.rank]), sum(sizes), blob

    def pieces(self, name: str) -> Iterator[Piece]:
        """What this process writes of a column."""
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
        """Of a column of the whole table."""
        saved = self.saved()
        if name in self.local:
            return saved.specs[name].size(saved.total)
        return (self.config().numel(),) if name == "config" else (self._blobs[name][1],)

    def read(self, name: str, offsets: tuple[int, ...]) -> Tensor:
        """The piece of a column that begins there."""
        saved = self.saved()
        if name not in self.local:
            return self.config() if name == "config" else self._blobs[name][2]
        if name not in self._by_place:
            self._by_place[name] = {piece.offsets: piece for piece in saved.pieces(name)}
        return saved.read(self._by_place[name][offsets])

    def __deepcopy__(self, memo: dict[int, Any]) -> TableState:
        """The same with a copy of the rows, which is made now."""
        if self.share.ranks > 1:
            self.saved()  # counted by all ranks now, not by a thread that saves
        self.copy_rows()
        twin = copy.copy(self)
        twin._copying = threading.Lock()
        memo[id(self)] = twin
        return twin

    # --- loaded -------------------------------------------------------------------------------------------------------

    def begin_landing(self, name: str) -> list[tuple[int, int]]:
        """Expects a column from a checkpoint: where its rows begin, and how many are wanted.

        A column that was expected before begins another load.
        """
        if self.landing is None or name in self._expected:
            self.landing, self._expected = Landing(self.share), set()
        self._expected.add(name)
        return self.landing.wanted()


def load_state(share: Share, values: dict[str, Any]) -> None:
    """Replaces the rows of a table by those of a ``state_dict``: `TableTensor`s, or plain tensors of the whole table.

    Raises:
        DataError: they are of another rank, incomplete, or of another kind of table. The table is as it was.
    """
    state: TableState | None = getattr(values["ids"], "table_state", None)
    theirs = Share(share.table, share.shape) if state is None else state.share
    landing = None if state is None else state.landing
    if theirs.ranks > 1 and theirs.compatible != share.compatible:
        raise DataError(
            f"table {share.table.name!r}: the state is of rank {theirs.rank} of {theirs.ranks}, which has other rows; "
            "use torch.distributed.checkpoint, or shoal.sharded.shard(model, plan)"
        )
    blobs: dict[str, dict[int, Tensor]]
    if landing is not None and landing.config is not None:
        landing.share, blobs = share, dict(landing.blobs)
        landing.load(_plain(values["scales"]))
    else:
        whole = {name: _plain(value) for name, value in values.items()}
        blobs = {name: {0: whole[name]} for name in _BLOBS if name in whole}
        kept = [KEPT] if KEPT in whole and share.table.has_budget else []
        if theirs.ranks > 1 or (share.keeps == (0, 1) and not share.sliced):  # rows as this process has them
            load = RowLoad(share.table, whole["config"], share.shape)
            load.add(*(whole[name] for name in (*COLUMNS, *kept)))
            load.commit(whole["scales"])
        else:
            landing = Landing(share)
            for name in ("config", *COLUMNS, *kept):
                landing.put(name, (0,) * whole[name].dim(), whole[name])
            landing.load(whole["scales"])
    if "filter" in blobs:
        restore_filter(share, blobs["filter"])


def _plain(value: Any) -> Tensor:
    value = value.tensor() if hasattr(value, "table_state") else value
    return value.detach().cpu().contiguous()


_BLOBS: dict[str, Any] = {"filter": filter_bytes}
