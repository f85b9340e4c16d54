"""The shard of some tables that this rank owns, and the exchanges by which all ranks read and update it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shoal.comm.horovod.hooks import SessionRunHook
from shoal.comm.ranks.aside import is_aside
from shoal.comm.ranks.ranks import AllToAll
from shoal.sharded import environment as env
from shoal.sharded.all_to_all.exchange import FIND, ROWS, UPDATE, Call, Exchange
from shoal.sharded.devices import home
from shoal.sharded.monolith.prefetch_queue import AsyncPushHook, StructureQueue

UPDATE_KEYS = (
    "id_flat_t", "id_size_flat_t", "embedding_splits", "id_offsets", "emb_offsets", "indices", "recv_emb_splits",
)  # fmt: skip
"""The values that `OwnedShard.look_up` returns for the update of the same batch."""


class OwnedShard:
    """A table with ``fused_lookup`` and ``fused_apply_gradient`` that holds this rank's rows of the tables ``names``.

    ``late`` > 0 is the number of updates that `update` defers; ``hooks`` then apply them. ``empty`` is 1 if rank 0 has
    no rows.
    """

    def __init__(self, table: Any, names: Sequence[str], backend: AllToAll, late: int, empty: int = 0) -> None:
        self.table, self._names, self._shards = table, tuple(names), backend.world_size
        self.home = home(table)
        tables = getattr(table, "tables", None)
        for part in tables.values() if isinstance(tables, Mapping) else ():
            part.rank_share = (backend.rank, self._shards, bool(empty))
        self.exchange = Exchange(backend, env.environment.backward_dtype, env.environment.fake_cast)
        self._numbers = {aside: (itertools.count(1), itertools.count(1)) for aside in (False, True)}
        """The numbers of the next lookup and update, by channel (see `is_aside`)."""
        self.hooks: list[SessionRunHook] = []
        self._late: StructureQueue | None = None
        if late:
            self._late = StructureQueue(late, "queue_fusedGatherGrad_to_fusedEmbGradA2A")
            self.hooks.append(AsyncPushHook(self._late, self._run_late))

    def look_up(self, ids: Tensor, sizes: Tensor, recv: Tensor, req_time: Any) -> tuple[Tensor, dict[str, Any]]:
        """The flat rows of ``ids``, rank after rank, and the values of `UPDATE_KEYS`.

        Args:
            ids: ordered by owner, then by table.
            sizes: the number of ids of each owner and table.
            recv: the number of floats that each owner returns.
            req_time: the time of the lookup.
        """
        number = next(self._numbers[is_aside()][0])
        ids, came = self.exchange.ids(Call(FIND, number, self._names), ids, sizes, sizes.numel() // self._shards)
        ids, came = ids.to(self.home), came.cpu()
        rows, splits, *places = self.table.fused_lookup(ids, came, self._shards, req_time)
        rows = self.exchange.rows(Call(ROWS, number, self._names), rows, splits.tolist(), recv.tolist())
        return rows, dict(zip(UPDATE_KEYS, (ids, came, splits, *places, recv), strict=True))

    def update(self, work: dict[str, Any]) -> None:
        """Update rows with ``work``: the values of `UPDATE_KEYS`, and ``grad_flat``, ``global_step``, ``req_time``."""
        if self._late is None:
            self.apply(self.exchange_gradients(work))
            return
        if self._late.size() >= self._late.capacity:
            self._run_late()
        self._late.enqueue(work)

    def flush(self) -> None:
        """Apply the deferred updates. All ranks must call it together."""
        while self._late is not None and self._late.size():
            self._run_late()

    def _run_late(self) -> None:
        assert self._late is not None
        self.apply(self.exchange_gradients(self._late.dequeue()))

    def exchange_gradients(self, work: dict[str, Any]) -> dict[str, Any]:
        """Send the gradients to the ranks that own the rows."""
        call = Call(UPDATE, next(self._numbers[is_aside()][1]), self._names)
        send, recv = work["recv_emb_splits"].tolist(), work["embedding_splits"].tolist()
        work["grad_flat_t"] = self.exchange.gradients(call, work.pop("grad_flat"), send, recv).to(self.home)
        return work

    def apply(self, work: dict[str, Any]) -> None:
        """Update this rank's rows with the exchanged gradients."""
        self.table.fused_apply_gradient(
            work["id_flat_t"], work["indices"], work["id_size_flat_t"], work["grad_flat_t"], work["id_offsets"],
            work["emb_offsets"], work["global_step"], work["req_time"], self._shards,
        )  # fmt: skip
