"""Synchronous tables: every rank owns a shard, and ids, rows and gradients are exchanged in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.horovod.hooks import SessionRunHook
from shoal.comm.ranks.ranks import AllToAll
from shoal.errors import ConfigError
from shoal.host import as_tensor
from shoal.ops.reorder import fused_reorder_by_indices
from shoal.ops.reorder.op import empty_shards
from shoal.sharded.all_to_all.backend import default_backend
from shoal.sharded.all_to_all.metrics import backward_metrics, flags, forward_metrics
from shoal.sharded.export import check_writable
from shoal.sharded.monolith.owned_shard import UPDATE_KEYS, OwnedShard
from shoal.sharded.monolith.prefetch_queue import hooks_of, queue_capacities
from shoal.sharded.monolith.table_pipeline import Looked, TablePipeline
from shoal.sharded.route import gather_rows, scatter_rows
from shoal.table.arguments import as_int, as_time


def early_reorder_pack(
    slot_to_id: Mapping[str, Tensor], shard_num: int, dims: Sequence[int], req_time: Any = None
) -> tuple[Any, ...]:
    """The pack for `DistributedMultiTypeHashTableMpi.lookup`: ids de-duplicated and routed, in the data pipeline.

    ``dims`` are the tables' dimensions by sorted slot name; ``req_time`` is an int64 scalar or None.
    """
    ids = [as_tensor(slot_to_id[slot]).reshape(-1) for slot in sorted(slot_to_id)]
    return (*fused_reorder_by_indices(ids, shard_num, list(dims)), req_time)


class DistributedMultiTypeHashTableMpi:
    """K tables over N = ``shard_num`` ranks; ``table_factory(rank)`` builds this rank's shard of all of them.

    If the pack's ids are on a GPU, rows are returned on it; the tables can be on the CPU or on that GPU.
    All ranks must call `lookup` and `apply_gradients` together. Gradients are not averaged over ranks: an id that
    several ranks use gets one optimizer step per rank, rank 0's first; with SGD that is the sum.

    ``queue_configs`` can set ``embedding_prefetch_capacity``, ``enable_async_optimize``, ``enable_pipelined_fwda2a``
    and ``enable_pipelined_bwda2a``, which configure `pipeline`. `lookup` and `apply_gradients` themselves work step by
    step, except that with ``enable_async_optimize`` an update is exchanged and applied one call later, or by the hook
    of `get_queue_hooks`.
    """

    def __init__(
        self,
        shard_num: int,
        table_factory: Callable[[int], Any],
        queue_configs: Mapping[str, int] | None = None,
        *,
        backend: AllToAll | None = None,
    ) -> None:
        self._backend = backend or default_backend()
        if shard_num != self._backend.world_size:
            raise AssertionError(f"shard_num must be the number of ranks, {self._backend.world_size}, got {shard_num}")
        self.shard_num = shard_num
        self._table = table_factory(self._backend.rank)
        self._dims = list(self._table.get_table_dim_sizes())
        self._capacity = queue_capacities(queue_configs)
        self._next_step = 0
        self._slots = sorted(getattr(self._table, "tables", ()))
        """The tables' names; empty if the user's own table does not tell them."""
        late, empty = self._capacity["enable_async_optimize"], empty_shards(shard_num)
        self._shard = OwnedShard(self._table, self._slots, self._backend, late, empty)
        self._hooks: list[SessionRunHook] = [*self._shard.hooks]

    @property
    def table(self) -> Any:
        """This rank's shard."""
        return self._table

    @property
    def rank(self) -> int:
        return self._backend.rank

    def get_table_dim_sizes(self) -> list[int]:
        """The tables' dimensions, by sorted slot name."""
        return list(self._dims)

    def reorder(self, slot_to_id: Mapping[str, Tensor], req_time: Any = None) -> tuple[Any, ...]:
        """The pack for `lookup`, for loops without a data pipeline."""
        return early_reorder_pack(slot_to_id, self.shard_num, self._dims, req_time)

    def lookup(
        self,
        slot_to_id: Mapping[str, Any],
        auxiliary_bundle: dict[str, Any] | None = None,
        early_reorder_indicies_res_pack: tuple[Any, ...] | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """``({slot: [n, dim]}, bundle)``; only the keys of ``slot_to_id`` are used, the ids are in the pack.

        The bundle is the input of `apply_gradients` for the same batch. Metrics of the lookup carry the
        ``global_step`` that the caller put into the bundle, or else the step after the last update's.
        """
        if early_reorder_indicies_res_pack is None:
            raise AssertionError(
                "support for reordering outside the data pipeline is dropped: "
                "early_reorder_indicies_res_pack must be given"
            )
        slots = sorted(slot_to_id)
        if self._slots and slots != self._slots:
            raise AssertionError(f"slot_to_id must have the slots of the tables, {self._slots}, got {slots}")
        bundle: dict[str, Any] = {} if auxiliary_bundle is None else auxiliary_bundle
        all_fids, shard_sizes, sizes, emb_offset_sz, offsets, req_time = early_reorder_indicies_res_pack
        k, n = len(slots), self.shard_num
        recv = (sizes.view(n, k).cpu().long() * torch.tensor(self._dims, device="cpu")).sum(1).int()
        rows, update = self._shard.look_up(all_fids, sizes, recv, req_time)
        if flags.enable_alltoall_metrics:
            step = as_int(bundle.get("global_step", self._next_step), "synchronous table", "global_step")
            forward_metrics(slots, sizes.view(n, k), shard_sizes, update["embedding_splits"], all_fids.numel(), step)
        bundle.update(
            shard_sizes=shard_sizes,
            fused_embedding_offsets=list(torch.split(offsets, emb_offset_sz.tolist())),
            emb_offset_sz=emb_offset_sz,
            recv_embeddings_size=recv.sum(dtype=torch.int64),
            **update,
        )
        offsets = bundle["fused_embedding_offsets"]
        rows = rows.to(offsets[0].device) if offsets else rows
        found = [gather_rows(rows, o, dim) for o, dim in zip(offsets, self._dims, strict=True)]
        return dict(zip(slots, found, strict=True)), bundle

    def apply_gradients(
        self,
        slot_to_grad: Mapping[str, Tensor],
        auxiliary_bundle: dict[str, Any],
        global_step: Any = 0,
        req_time: Any = None,
        scale: float = 1,
    ) -> DistributedMultiTypeHashTableMpi:
        """Apply ``{slot: grads}`` of the bundle's batch; gradients of equal ids of this rank are summed."""
        self._shard.update(self._take_gradients(slot_to_grad, auxiliary_bundle, global_step, req_time, scale))
        return self

    def _take_gradients(
        self, slot_to_grad: Mapping[str, Tensor], bundle: dict[str, Any], global_step: Any, req_time: Any, scale: float
    ) -> dict[str, Any]:
        """Take the inputs of an update out of the bundle."""
        check_writable("apply_gradients")
        step, seconds = as_int(global_step, "synchronous table", "global_step"), as_time(req_time, "synchronous table")
        if "recv_embeddings_size" not in bundle:
            raise ConfigError("apply_gradients must get a bundle from lookup, each only once; this one has no lookup")
        slots = sorted(slot for slot, grad in slot_to_grad.items() if grad is not None)
        if len(slots) != len(self._dims) or (self._slots and slots != self._slots):
            known = self._slots or f"all {len(self._dims)}"
            raise ConfigError(f"apply_gradients must get gradients for the slots of the tables, {known}, got {slots}")
        size, offsets = int(bundle["recv_embeddings_size"]), bundle["fused_embedding_offsets"]
        grads = [slot_to_grad[slot].detach().reshape(-1, d) for slot, d in zip(slots, self._dims, strict=True)]
        flat = scatter_rows(size, grads, offsets, self._dims, float(scale))
        del bundle["recv_embeddings_size"], bundle["fused_embedding_offsets"]
        bundle["global_step"], bundle["req_time"] = step, seconds
        self._next_step = step + 1
        if flags.enable_alltoall_metrics and self.shard_num > 1:
            sent, received = bundle["recv_emb_splits"], bundle["embedding_splits"]
            backward_metrics(self._shard.exchange.ranks, bundle["shard_sizes"], sent, received, step)
        bundle.pop("shard_sizes")
        work = {key: bundle.pop(key) for key in ("global_step", "req_time", *UPDATE_KEYS)}
        work["grad_flat"] = self._shard.exchange.cast(flat)
        return work

    def pipeline(
        self,
        batches: Iterable[Any],
        *,
        ids: Callable[[Any], Mapping[str, Any]] = lambda batch: batch,
        req_time: Callable[[Any], Any] = lambda batch: None,
        found: Callable[[Any, dict[str, Tensor]], Any] = lambda batch, embeddings: embeddings,
        gradients: Callable[[Any], Mapping[str, Tensor]] = lambda slot_to_grad: slot_to_grad,
    ) -> TablePipeline:
        """Look batches up and apply their gradients in a background thread, as set by ``queue_configs``.

        All ranks must create and use it together. Yields ``(batch, {slot: [n, dim]}, bundle)``; ``update(slot_to_grad,
        global_step, req_time=None, scale=1)`` takes the gradients of the last batch.

        Args:
            batches: an iterable of batches of any type.
            ids: returns ``{slot: ids}`` of a batch, by default the batch itself; or ``(slot_to_id, pack)`` with a pack
                from `early_reorder_pack`.
            req_time: returns the time of a batch, an int64 scalar or None.
            found: converts a batch and its embeddings to the yielded value.
            gradients: converts the argument of ``update`` to ``{slot: grads}``.
        """
        stages = _Stages(self, ids, req_time, found, gradients)
        pipeline = TablePipeline(stages, batches, self._capacity, self._shard.exchange.main)
        self._hooks += pipeline.hooks
        return pipeline

    def flush(self) -> None:
        """Apply the updates that `enable_async_optimize` has deferred. All ranks must call it together."""
        self._shard.flush()

    def assign(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("synchronous tables have no assign; use the local shard (`table`)")

    def assign_add(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("synchronous tables have no assign_add; use the local shard (`table`)")

    def reinitialize(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("synchronous tables have no reinitialize; use the local shard (`table`)")

    def add_queue_hook(self, hook: SessionRunHook) -> None:
        """Add a hook to those of `get_queue_hooks`."""
        self._hooks.append(hook)

    def get_queue_hooks(self) -> list[SessionRunHook]:
        """The hooks for the training loop, including those of the local tables."""
        return [*self._hooks, *hooks_of([self._table])]

    def as_op(self, name: str | None = None) -> DistributedMultiTypeHashTableMpi:
        """Wait for the local tables."""
        self._table.as_op()
        return self

    def __repr__(self) -> str:
        return f"DistributedMultiTypeHashTableMpi(rank={self.rank} of {self.shard_num}, {self._table!r})"


class _Stages:
    """The stages of a synchronous table's step."""

    def __init__(
        self,
        table: DistributedMultiTypeHashTableMpi,
        ids: Callable[[Any], Mapping[str, Any]],
        req_time: Callable[[Any], Any],
        found: Callable[[Any, dict[str, Tensor]], Any],
        gradients: Callable[[Any], Mapping[str, Tensor]],
    ) -> None:
        self._table, self._ids, self._req_time = table, ids, req_time
        self._found, self._gradients = found, gradients
        self.exchange_gradients, self.apply = table._shard.exchange_gradients, table._shard.apply

    def prepare(self, batch: Any) -> Any:
        found = self._ids(batch)
        return found if isinstance(found, tuple) else (found, self._table.reorder(found, self._req_time(batch)))

    def look_up(self, batch: Any, prepared: Any) -> Looked:
        slot_to_id, pack = prepared
        embeddings, bundle = self._table.lookup(slot_to_id, {}, pack)
        return Looked(batch, self._found(batch, embeddings), bundle)

    def take_gradients(
        self,
        looked: Looked,
        slot_to_grad: Mapping[str, Tensor],
        global_step: Any = 0,
        req_time: Any = None,
        scale: float = 1,
    ) -> dict[str, Any]:
        slot_to_grad = self._gradients(slot_to_grad)
        return self._table._take_gradients(slot_to_grad, looked.auxiliary_bundle, global_step, req_time, scale)
