"""`AllToAllHashTable`: a table spread over all ranks, in any way, with the methods of a local table."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.comm.ranks.ranks import AllToAll
from shoal.durable import MANIFEST, Saved, digests_below, read_saved, replace_files
from shoal.errors import ConfigError, DataError, PeerError
from shoal.fid import shard_of
from shoal.sharded import environment as env
from shoal.sharded.all_to_all.backend import default_backend
from shoal.sharded.all_to_all.exchange import WRITE, Call, Exchange
from shoal.sharded.all_to_all.group import AllToAllGroup, OneRankGroup
from shoal.sharded.all_to_all.metrics import backward_metrics, flags, forward_metrics
from shoal.sharded.all_to_all.moving import fill, like, rows_by_id
from shoal.sharded.all_to_all.owned import OwnedGroup
from shoal.sharded.all_to_all.replicated import ReplicatedGroup
from shoal.sharded.all_to_all.ways import Way
from shoal.sharded.devices import home, ids_anywhere, rows_anywhere
from shoal.table.arguments import as_int, as_time
from shoal.table.checkpoint import restore_table
from shoal.table.checkpoint.shares import Share
from shoal.table.checkpoint.tensors import table_state
from shoal.table.protocol import Features, Found, Group, Missing, Part, Step, group_of
from shoal.table.table import HashTable

_ONE = Features()
_ASIDE = 1 << 40  # the first number of finds through the second channel
_GROUPS = {"row": AllToAllGroup, "table": OwnedGroup, "column": OwnedGroup, "data": ReplicatedGroup}


class AllToAllHashTable:
    """One table whose rows are spread over the ranks of a process group; on one rank a plain table.

    Its ``way`` determines how they are spread: by row (``id mod W``), all on one rank, by column, or as copies on all
    ranks. Results do not depend on it. Neither do checkpoints: a table of any way, on any number of ranks, can restore
    them. Tables of different ways in one model share their exchanges.

    It is used like a `shoal.HashTable`, in `shoal.nn.HashEmbeddingBag` for example, but all ranks must call it
    together, even those without ids. Gradients are summed over a rank's equal ids; an id that several ranks use gets
    one step per rank, in the order of the ranks.

    Ids on a GPU are de-duplicated there, and their rows are returned there; the table itself can be on either device
    (its ``device``).

    >>> import torch
    >>> from shoal.sharded import AllToAllHashTable
    >>> table = AllToAllHashTable(2, optimizer="sgd", initializer="zeros", lr=1.0)
    >>> _ = table.apply_gradients(torch.tensor([7, 7]), torch.ones(2, 2))
    >>> table.lookup(torch.tensor([7])).tolist()
    [[-2.0, -2.0]]

    Args:
        dim: width of an embedding; further keyword arguments are those of `shoal.HashTable`.
        backend: the ranks; the default process group unless given.
        factory: builds this rank's shard, given the rank; it replaces ``dim`` and the keyword arguments.
        way: ``"row"``, ``"table:3"`` (on rank 3), ``"column:0,2"`` (slices on ranks 0 and 2; ``"column"``: on all),
            ``"data"``, or a `Way`. `shoal.sharded.plan` chooses ways.
    """

    def __init__(
        self,
        dim: int | None = None,
        *,
        backend: AllToAll | None = None,
        factory: Callable[[int], HashTable] | None = None,
        name: str = "all_to_all",
        way: str | Way = "row",
        **table: Any,
    ) -> None:
        self.exchange = Exchange(
            backend or default_backend(), env.environment.backward_dtype, env.environment.fake_cast
        )
        ranks = self.exchange.main
        self.world_size, self.rank = ranks.world_size, ranks.rank
        self.shape = factory(self.rank) if factory is not None else HashTable(dim or 1, name=name, **table)
        """A table with rows of full width. It holds this rank's rows; it is empty if the table is spread by column."""
        self.name = self.shape.name
        self.dim_size = self.shape.dim_size
        self.config = self.shape.config
        self.way = Way.parse(way)
        if self.way.kind in ("column", "data") and getattr(self.shape, "has_budget", False):
            raise ConfigError(
                f"table {self.name!r}: a table with max_rows or max_bytes must be spread by row or be on one rank, got "
                f"way={str(way)!r}: ranks with slices or copies of the same rows would evict different ones"
            )
        if self.world_size > 1:
            self.way.check(self.name, self.dim_size, self.world_size, self.shape)
        self.table = self._own()
        """This rank's rows."""
        self.last_spread: tuple[list[int], list[int]] | None = None
        """The numbers of distinct ids that the last find requested from each rank, and each rank from this one."""
        self._home = home(self.shape)
        self._finds = itertools.count(1)
        self._finds_aside = itertools.count(_ASIDE)
        self._writes = itertools.count(1)

    def _own(self) -> Any:
        if self.way.kind != "column" or self.world_size == 1:
            return self.shape
        for rank, begin, end in self.way.slices(self.dim_size, self.world_size):
            if rank == self.rank:
                return like(self.shape, begin, end)
        return self.shape

    @staticmethod
    def make_group(tables: tuple[AllToAllHashTable, ...]) -> Group:
        """A group of tables, with one exchange per direction for all of them."""
        return OneRankGroup(tables) if tables[0].world_size == 1 else _GROUPS[tables[0].way.kind](tables)

    def group_key(self) -> Hashable:
        """Equal for tables that form one group: over the same ranks, of one row width, spread alike."""
        if self.world_size > 1:
            return _GROUPS[self.way.kind], self.exchange.main.key, self.dim_size, self._home
        local = self.table
        return "one rank", local.group_key() if hasattr(local, "group_key") else ("adapter", id(local))

    def next_find(self) -> int:
        """The number of the next find of a group whose first table this is; the same on every rank.

        Finds through the second channel (see `shoal.comm.ranks.aside`) are numbered separately.
        """
        return next(self._finds if self.exchange.ranks is self.exchange.main else self._finds_aside)

    @property
    def device(self) -> torch.device:
        """Where this rank's rows are."""
        return self._home

    @property
    def hash_filter(self) -> Any:
        """The admission filter of this rank's rows."""
        return self.table.hash_filter

    @property
    def clocked(self) -> bool:
        """Whether a write without ``req_time`` uses the current time; otherwise it uses 0."""
        return self.table.clocked

    def write_spread(self, global_step: int) -> None:
        """Write how the last batch's ids and rows are spread over the ranks to the process's summary writer.

        All ranks must call it together; `apply_gradients` does so while ``FLAGS.enable_alltoall_metrics`` is on.
        Nothing is written before the first batch, or if there is only one rank.
        """
        if self.last_spread is None:
            return
        asked, served = (torch.tensor(counts, device="cpu") for counts in self.last_spread)
        served, mine = served * self.dim_size, asked * self.dim_size
        forward_metrics([self.name], asked.view(-1, 1), asked, served, int(asked.sum()), global_step)
        backward_metrics(self.exchange.ranks, asked, mine, served, global_step)

    def lookup(
        self, ids: Tensor, use_multi_threads: bool = False, enable_dedup: bool = False, *,
        insert_missing: bool = False, req_time: Any = None,
    ) -> Tensor:  # fmt: skip
        """The rows of ids, ``[n, dim]``. Unknown ids give zeros; with ``insert_missing`` they get a row."""
        try:
            ids = ids_anywhere(ids, self.name).view(-1)
            seconds = as_time(req_time, self.name, clocked=self.clocked) if insert_missing else 0
        except Exception as error:
            raise self._group.refused(error)  # noqa: B904, it is the same error
        if not insert_missing:
            found = self._find(ids, "zeros")
            return self._group.rows(found, _ONE, missing="zeros").to(ids.device)

        def create(asked: Tensor) -> Tensor:
            return self.table.lookup(asked, insert_missing=True, req_time=seconds)

        if self.world_size == 1:
            return create(ids.to(self._home)).to(ids.device)
        return self._group.inserted(self._find(ids, "initial"), create).to(ids.device)

    def apply_gradients(
        self, ids: Tensor, grads: Tensor, global_step: Any = 0, use_multi_threads: bool = False,
        enable_dedup: bool = True, req_time: Any = None,
    ) -> AllToAllHashTable:  # fmt: skip
        """Make one optimizer step per rank and distinct id, with the sum of that rank's gradients."""
        try:
            ids = ids_anywhere(ids, self.name).view(-1)
            grads = rows_anywhere(grads, ids.numel(), self.dim_size, self.name, "grads", ids.device)
            step = as_int(global_step, self.name, "global_step")
            seconds = as_time(req_time, self.name, clocked=self.clocked)
        except Exception as error:
            raise self._group.refused(error)  # noqa: B904, it is the same error
        found = self._find(ids, "initial")
        if flags.enable_alltoall_metrics:
            self.write_spread(step)
        grads = grads.view(-1, self.dim_size).to(found.ids.device)
        self._group.update([Part(found, _ONE, grads)], step=Step(step, seconds))
        return self

    def _find(self, ids: Tensor, missing: Missing) -> Found:
        if self.world_size == 1:
            ids = ids.to(self._home)
        return self._group.find(ids, torch.tensor([ids.numel()], device="cpu"), _ONE, missing=missing)

    @property
    def _group(self) -> Any:
        return group_of((self,))

    def assign(self, ids: Tensor, values: Tensor, req_time: Any = None) -> AllToAllHashTable:
        """Write every rank's rows, in the order of the ranks; the last of equal ids wins."""
        return self._write("assign", ids, values, req_time)

    def assign_add(self, ids: Tensor, values: Tensor, req_time: Any = None) -> AllToAllHashTable:
        return self._write("assign_add", ids, values, req_time)

    def _write(self, verb: str, ids: Tensor, values: Tensor, req_time: Any) -> AllToAllHashTable:
        refused: Exception | None = None
        try:
            ids = ids_anywhere(ids, self.name).view(-1).to(self._home)
            values = rows_anywhere(values, ids.numel(), self.dim_size, self.name, "values", self._home)
            seconds = as_time(req_time, self.name, clocked=self.clocked)
        except Exception as error:  # the other ranks must learn of it first, or they would wait
            refused, seconds = error, 0
            ids = torch.empty(0, dtype=torch.int64, device=self._home)
            values = torch.empty(0, device=self._home)
        values = values.view(-1, self.dim_size)
        places, columns = self._dealt(ids)
        counts = torch.tensor([at.numel() for at in places], device="cpu")
        widths = [end - begin for begin, end in columns]
        mine = widths[self.rank]
        call = Call(WRITE, next(self._writes), (self.name,), failed=refused is not None)
        each, send = [1] * self.world_size, counts.tolist()
        with self.exchange.ranks.turn:
            recv = self.exchange.send("id_sizes", call, counts, each, each).tolist()
            if refused is not None:
                raise refused
            came = self.exchange.send("ids", None, torch.cat([ids[at] for at in places]), send, recv)
            flat = torch.cat([values[at, a:b].reshape(-1) for at, (a, b) in zip(places, columns, strict=True)])
            send = [n * width for n, width in zip(send, widths, strict=True)]
            rows = self.exchange.send("values", None, flat, send, [n * mine for n in recv])
        if came.numel():
            getattr(self.table, verb)(came, rows.view(-1, mine), req_time=seconds)
        return self

    def _dealt(self, ids: Tensor) -> tuple[list[Tensor], list[tuple[int, int]]]:
        """For each rank the positions of the ``ids`` that it holds, and the columns that it holds of them."""
        every = torch.arange(ids.numel(), device=ids.device)
        whole, world = (0, self.dim_size), self.world_size
        if self.way.kind == "row" or world == 1:
            shards = self.owner(ids)
            return [every[shards == rank] for rank in range(world)], [whole] * world
        if self.way.kind == "data":
            return [every] * world, [whole] * world
        places, columns = [every[:0]] * world, [whole] * world
        for rank, begin, end in self.way.slices(self.dim_size, world):
            places[rank], columns[rank] = every, (begin, end)
        return places, columns

    def owner(self, ids: Tensor) -> Tensor:
        """The rank that holds each id, in a table spread by row. For other ways, see ``way``."""
        return shard_of(ids, self.world_size)

    def size(self) -> int:
        """The number of rows of the whole table. All ranks must call it together."""
        sizes = self.exchange.ranks.gather_totals(self.table.size())
        return sum(sizes) if self.way.kind == "row" else sizes[self.way.holders(self.world_size)[0]]

    def share(self) -> Share:
        """The share of the table's rows that this rank holds, saves and loads."""
        world, rank, whole = self.world_size, self.rank, (0, 1)
        share = Share(self.table, self.shape, rank, world, gather=self.exchange.ranks.gather_totals)
        if world == 1:
            return replace(share, gather=lambda number: [number])
        if self.way.kind in ("row", "data"):
            own = rank, world
            return replace(share, saves=own, keeps=own if self.way.kind == "row" else whole)
        slices = self.way.slices(self.dim_size, world)
        mine = next((own for own in slices if own.rank == rank), None)
        share = replace(share, sliced=len(slices) > 1)
        if mine is None:
            return replace(share, saves=None, keeps=None, leads=False)
        return replace(share, first_column=mine.begin, leads=mine is slices[0])

    def own_rows(self) -> HashTable:
        """The rows that this rank saves, with full width. Every row of the table is saved by exactly one rank.

        All ranks must call it together. If the table is spread by column, this needs memory for 1/W of it.
        """
        if self.way.kind == "column" and self.world_size > 1:
            return rows_by_id(self)
        if self.way.kind == "data" and self.rank:
            return like(self.shape, device="cpu")
        return self.table

    def load_rows(self, load: Callable[[Any, tuple[int, int] | None], Any]) -> None:
        """Replace all rows with those that ``load(table, shard)`` loads into a table of full width.

        All ranks must call it together. ``shard`` is ``(rank, W)`` if only ids with ``id mod W == rank`` are needed,
        and None if all are.
        """
        share = (self.rank, self.world_size)
        if self.way.kind == "row" or self.world_size == 1:
            self._together("restore", lambda: load(self.table, share))
        elif self.way.kind == "column":
            part = like(self.shape, device="cpu")
            self._together("restore", lambda: load(part, share))
            fill(self, table_state(part))
        elif self.rank in self.way.holders(self.world_size):
            self._together("restore", lambda: load(self.table, None))
        else:
            self._together("restore", self.table.clear)

    def save(self, folder: str | os.PathLike[str]) -> AllToAllHashTable:
        """Write every rank's rows to a folder that all ranks can access. All ranks must call it together.

        An earlier save in the folder is replaced atomically: a crash leaves either the old or the new one.

        Raises:
            PeerError: another rank could not write. The earlier save is unchanged.
        """
        path = os.fspath(folder)
        token = self.exchange.ranks.gather_totals(secrets.randbits(62) if self.rank == 0 else 0)[0]
        staging = f".staging-{token:016x}"
        draft = os.path.join(path, staging)

        def publish() -> None:
            files = digests_below(draft)
            about = {"world_size": self.world_size, "empty_rank0": False, "dim": self.dim_size, "way": str(self.way)}
            moves = {name: f"{staging}/{name}" for name in files}
            replace_files(os.path.join(path, MANIFEST), {"format": 2, **about}, files, moves)

        try:
            self._together("save", lambda: self.own_rows().save(os.path.join(draft, f"rank-{self.rank:05d}", "rows")))
            self._together("save", publish if self.rank == 0 else lambda: None)
        finally:
            if self.rank == 0 and not _is_needed(path, staging):
                shutil.rmtree(draft, ignore_errors=True)
        return self

    def _together(self, what: str, do: Callable[[], Any]) -> None:
        """Do this rank's part and wait for the others; raises on every rank if one of them failed."""
        failed: Exception | None = None
        try:
            do()
        except Exception as error:  # the other ranks must learn of it first, or they would wait
            failed = error
        ranks = [rank for rank, bad in enumerate(self.exchange.ranks.gather_totals(int(failed is not None))) if bad]
        if failed is not None:
            raise failed
        if ranks:
            named = ", ".join(map(str, ranks))
            raise PeerError(f"table {self.name!r}: {what} failed on rank(s) {named}; see their logs")

    def restore(self, folder: str | os.PathLike[str]) -> AllToAllHashTable:
        """Replace all rows with those of a `save` by any number of ranks, in any way.

        All ranks must call it together.
        """
        path = os.fspath(folder)
        try:
            read = read_saved(os.path.join(path, MANIFEST), unsealed=True)
            fields = read.fields
            ranks = int(fields["world_size"])
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"table {self.name!r}: {path} is not a checkpoint of a table over ranks ({error})"
            ) from error
        saved: Saved | None = read if read.files else None  # version 0.1 listed no files
        bases = [os.path.join(path, f"rank-{rank:05d}", "rows") for rank in range(ranks)]
        same = ranks == self.world_size and not fields.get("empty_rank0") and fields.get("way", "row") == "row"

        def load(table: Any, shard: tuple[int, int] | None) -> None:
            if same and shard is not None:
                restore_table(table, bases[self.rank], saved=saved)
            else:
                restore_table(table, bases, shard=shard, saved=saved)

        self.load_rows(load)
        return self

    def as_op(self, name: str | None = None) -> AllToAllHashTable:
        self.table.as_op()
        return self

    def __repr__(self) -> str:
        return (
            f"AllToAllHashTable({self.name!r}, dim={self.dim_size}, {self.way}, rank {self.rank} of {self.world_size})"
        )


def _is_needed(folder: str, staging: str) -> bool:
    """Whether a folder's manifest names files that are still in ``staging``."""
    try:
        saved = read_saved(os.path.join(folder, MANIFEST), unsealed=True)
    except (DataError, OSError):
        return False
    return any(saved.path(name).startswith(os.path.join(folder, staging)) for name in saved.moves)
