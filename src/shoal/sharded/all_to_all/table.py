"""`AllToAllHashTable`: a table over all ranks with the methods of one local table."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.buffers import empty_flat
from shoal.durable import MANIFEST, Saved, digests_below, read_saved, replace_files
from shoal.errors import DataError, PeerError
from shoal.ops.reorder import fused_reorder_by_indices
from shoal.ops.reorder.op import FusedReorder
from shoal.sharded import environment as env
from shoal.sharded.all_to_all.backend import AllToAll, default_backend
from shoal.sharded.all_to_all.exchange import Exchange
from shoal.sharded.all_to_all.metrics import backward_metrics, flags, forward_metrics
from shoal.sharded.devices import home, ids_anywhere, rows_anywhere
from shoal.sharded.route import Seen, gather_rows, scatter_rows
from shoal.table.arguments import as_int, as_time
from shoal.table.checkpoint import restore_table
from shoal.table.fused import apply_blocks
from shoal.table.table import HashTable

AGAIN = -1  # in place of a count: this rank has the ids it had the last time


class AllToAllHashTable:
    """One table whose rows are spread over the ranks of a process group by ``id mod N``; on one rank a plain table.

    It stands where a `shoal.HashTable` stands, in `shoal.nn.HashEmbeddingBag` for one, but every rank must call it
    together with the others, also a rank that has no ids. Updates are summed over a rank's equal ids; an id that
    several ranks use makes one step per rank, rank 0's first.

    Ids on a GPU are de-duplicated and dealt out there, and their rows come back there; the table itself may be on
    either device (its ``device``).

    >>> import torch
    >>> from shoal.sharded import AllToAllHashTable
    >>> table = AllToAllHashTable(2, optimizer="sgd", initializer="zeros", lr=1.0)
    >>> _ = table.apply_gradients(torch.tensor([7, 7]), torch.ones(2, 2))
    >>> table.lookup(torch.tensor([7])).tolist()
    [[-2.0, -2.0]]

    Args:
        dim: width of an embedding; further keywords are those of `shoal.HashTable`.
        backend: the ranks; the default process group unless given.
        factory: builds this rank's shard from its rank in place of ``dim`` and the keywords.
    """

    saved_by = "table.save(folder), which all ranks call together, and load them with table.restore(folder)"
    """What keeps the rows, which are not in the ``state_dict`` of a module."""

    def __init__(
        self,
        dim: int | None = None,
        *,
        backend: AllToAll | None = None,
        factory: Callable[[int], HashTable] | None = None,
        name: str = "all_to_all",
        **table: Any,
    ) -> None:
        self._backend = backend or default_backend()
        self.world_size, self.rank = self._backend.world_size, self._backend.rank
        self.table = factory(self.rank) if factory is not None else HashTable(dim or 1, name=name, **table)
        self.name = self.table.name
        self.dim_size = self.table.dim_size
        self.config = self.table.config
        self._home = home(self.table)
        self._exchange = Exchange(self._backend, env.environment.backward_dtype, env.environment.fake_cast)
        self._last: tuple[Seen, tuple[Any, ...]] | None = None

    @property
    def hash_filter(self) -> Any:
        """The admission filter of this rank's rows; modules then leave it to updates to make rows."""
        return self.table.hash_filter

    def write_spread(self, global_step: int) -> None:
        """How the ids and rows of the last batch spread over the ranks, to the process's summary writer.

        All ranks call it together; `apply_gradients` does while ``FLAGS.enable_alltoall_metrics`` is on. Nothing is
        written before the first batch.
        """
        if self._last is None:
            return
        mine, theirs, _, fused = self._last[1]
        sizes = fused.sharded_slot_sizes.view(self.world_size, 1)
        forward_metrics([self.name], sizes, fused.shard_sizes, theirs, fused.output.numel(), global_step)
        if self.world_size > 1:
            backward_metrics(self._backend, fused.shard_sizes, mine, theirs, global_step)

    def _route(self, ids: Tensor) -> tuple[Any, ...]:
        """Where ids go, and which ids came: worked out in the forward pass, used again in the backward pass.

        It is used again where every rank has the ids it had. A rank cannot know that of the others, so they tell.
        """
        last = self._last if self._last is not None and self._last[0].are([ids]) else None
        fused = self._deal_out(ids) if last is None else None
        if self.world_size > 1:
            again = torch.full((self.world_size,), AGAIN, dtype=torch.int32, device=ids.device)
            counts = again if fused is None else fused.sharded_slot_sizes.to(ids.device)
            sizes = self._exchange.counts(counts, 1).cpu()  # from where the ids are, as the other ranks send theirs
            if last is not None and bool((sizes == AGAIN).all()):
                return last[1]
            fused = self._deal_out(ids) if fused is None else fused
            if bool((sizes == AGAIN).any()):  # other ranks have new ids
                sizes = self._exchange.counts(fused.sharded_slot_sizes.to(ids.device), 1).cpu()
            came = self._exchange.counted_ids(fused.output, fused.sharded_slot_sizes, sizes, 1)
        elif last is not None:
            return last[1]
        else:
            assert fused is not None
            came, sizes = fused.output, fused.sharded_slot_sizes.cpu()
        mine, theirs = fused.shard_sizes.cpu().long() * self.dim_size, sizes.long() * self.dim_size
        route = mine, theirs, came.to(self._home).contiguous(), fused
        self._last = Seen([ids]), route
        return route

    def _deal_out(self, ids: Tensor) -> FusedReorder:
        return fused_reorder_by_indices([ids.view(-1)], self.world_size, [self.dim_size], rank0_empty_shard=False)

    def lookup(
        self, ids: Tensor, use_multi_threads: bool = False, enable_dedup: bool = False, *,
        insert_missing: bool = False, req_time: Any = None,
    ) -> Tensor:  # fmt: skip
        """``[n, dim]``; unknown ids give zeros, or get a row with ``insert_missing``."""
        ids = ids_anywhere(ids, self.name)
        mine, theirs, came, fused = self._route(ids)
        if insert_missing:
            rows = self.table.lookup(came, insert_missing=True, req_time=req_time).view(-1)
        elif came.is_cpu:
            rows = empty_flat(came.numel() * self.dim_size)
            self.table._native.lookup(came.data_ptr(), came.numel(), rows.data_ptr(), 0)
        else:
            rows = self.table.lookup(came).view(-1)
        rows = self._exchange.rows(rows, theirs, mine).to(ids.device)
        return gather_rows(rows, fused.fused_embedding_offsets, self.dim_size)

    def apply_gradients(
        self, ids: Tensor, grads: Tensor, global_step: Any = 0, use_multi_threads: bool = False,
        enable_dedup: bool = True, req_time: Any = None,
    ) -> AllToAllHashTable:  # fmt: skip
        """One optimizer step per rank and distinct id with the sum of that rank's gradients."""
        ids = ids_anywhere(ids, self.name)
        grads = rows_anywhere(grads, ids.numel(), self.dim_size, self.name, "grads", ids.device)
        grads = grads.view(-1, self.dim_size)
        step = as_int(global_step, self.name, "global_step")
        seconds = as_time(req_time, self.name, clocked=self.table.clocked)
        mine, theirs, came, fused = self._route(ids)
        if flags.enable_alltoall_metrics:
            self.write_spread(step)
        size = int(mine.sum())
        flat = scatter_rows(size, [grads], [fused.fused_embedding_offsets], [self.dim_size])
        flat = self._exchange.gradients(self._exchange.cast(flat), mine, theirs).to(came.device)
        counts = (theirs // self.dim_size).contiguous()
        if not came.is_cpu:
            sizes = counts.tolist()
            for part, rows in zip(came.split(sizes), flat.view(-1, self.dim_size).split(sizes), strict=True):
                self.table.apply_gradients(part, rows, step, enable_dedup=False, req_time=seconds)
            return self
        rates = self.table._rates(step)
        apply_blocks([self.table], came, counts, self.world_size, flat, rates, step, seconds, False)
        return self

    def assign(self, ids: Tensor, values: Tensor, req_time: Any = None) -> AllToAllHashTable:
        """Every rank's rows, those of rank 0 first; the last of equal ids wins."""
        return self._write("assign", ids, values, req_time)

    def assign_add(self, ids: Tensor, values: Tensor, req_time: Any = None) -> AllToAllHashTable:
        return self._write("assign_add", ids, values, req_time)

    def _write(self, verb: str, ids: Tensor, values: Tensor, req_time: Any) -> AllToAllHashTable:
        ids = ids_anywhere(ids, self.name).view(-1).to(self._home)
        values = rows_anywhere(values, ids.numel(), self.dim_size, self.name, "values", self._home).view(
            -1, self.dim_size
        )
        shards = self.owner(ids)
        order = torch.argsort(shards, stable=True)
        counts = torch.bincount(shards, minlength=self.world_size)
        came = self._exchange.send("ids", ids[order], counts.tolist())
        rows = self._exchange.send("values", values[order].view(-1), (counts * self.dim_size).tolist())
        getattr(self.table, verb)(came, rows, req_time=req_time)
        return self

    def owner(self, ids: Tensor) -> Tensor:
        """The rank of each id: ``id mod N``, rounding down."""
        return torch.remainder(ids, self.world_size)

    def size(self) -> int:
        """Rows of all ranks; all of them call it together."""
        return sum(self._backend.gather_totals(self.table.size()))

    def save(self, folder: str | os.PathLike[str]) -> AllToAllHashTable:
        """Writes every rank's rows to a folder that all ranks reach; all of them call it together.

        A folder with an earlier save then has this one in its place, in one step: a crash leaves the one or the other.

        Raises:
            PeerError: another rank could not write. The earlier save is as it was, on every rank.
        """
        path = os.fspath(folder)
        token = self._backend.gather_totals(secrets.randbits(62) if self.rank == 0 else 0)[0]
        staging = f".staging-{token:016x}"
        draft = os.path.join(path, staging)

        def publish() -> None:
            files = digests_below(draft)
            about = {"world_size": self.world_size, "empty_rank0": False, "dim": self.dim_size}
            moves = {name: f"{staging}/{name}" for name in files}
            replace_files(os.path.join(path, MANIFEST), {"format": 2, **about}, files, moves)

        try:
            self._together("save", lambda: self.table.save(os.path.join(draft, f"rank-{self.rank:05d}", "rows")))
            self._together("save", publish if self.rank == 0 else lambda: None)
        finally:
            if self.rank == 0 and not _is_needed(path, staging):
                shutil.rmtree(draft, ignore_errors=True)
        return self

    def _together(self, what: str, do: Callable[[], Any]) -> None:
        """Does this rank's part and waits for the others; raises on every rank when one of them failed."""
        failed: Exception | None = None
        try:
            do()
        except Exception as error:  # told to the others first, which would wait otherwise
            failed = error
        ranks = [rank for rank, bad in enumerate(self._backend.gather_totals(int(failed is not None))) if bad]
        if failed is not None:
            raise failed
        if ranks:
            named = ", ".join(map(str, ranks))
            raise PeerError(f"table {self.name!r}: {what} failed on rank(s) {named}; see their logs")

    def restore(self, folder: str | os.PathLike[str]) -> AllToAllHashTable:
        """Replaces all rows with those of `save`, whatever number of ranks wrote them."""
        path = os.fspath(folder)
        try:
            read = read_saved(os.path.join(path, MANIFEST), unsealed=True)
            fields = read.fields
            ranks = int(fields["world_size"])
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"table {self.name!r}: {path} is not a checkpoint of ranks ({error})") from error
        saved: Saved | None = read if read.files else None  # version 0.1 named none
        bases = [os.path.join(path, f"rank-{rank:05d}", "rows") for rank in range(ranks)]
        same = ranks == self.world_size and not fields.get("empty_rank0")
        if same:
            restore_table(self.table, bases[self.rank], saved=saved)
        else:
            restore_table(self.table, bases, shard=(self.rank, self.world_size), saved=saved)
        return self

    def as_op(self, name: str | None = None) -> AllToAllHashTable:
        self.table.as_op()
        return self

    def __repr__(self) -> str:
        return f"AllToAllHashTable({self.name!r}, dim={self.dim_size}, rank {self.rank} of {self.world_size})"


def _is_needed(folder: str, staging: str) -> bool:
    """Whether the manifest of a folder names files that are still in ``staging``."""
    try:
        saved = read_saved(os.path.join(folder, MANIFEST), unsealed=True)
    except (DataError, OSError):
        return False
    return any(saved.path(name).startswith(os.path.join(folder, staging)) for name in saved.moves)
