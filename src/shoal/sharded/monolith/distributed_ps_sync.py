"""Synchronous tables: every rank owns a shard, and ids, rows and gradients go all-to-all in every step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.horovod.hooks import SessionRunHook
from shoal.comm.ranks.aside import is_aside
from shoal.comm.ranks.ranks import AllToAll
from shoal.errors import ConfigError
from shoal.host import as_tensor
from shoal.ops.reorder import fused_reorder_by_indices
from shoal.sharded import environment as env
from shoal.sharded.all_to_all.backend import default_backend
from shoal.sharded.all_to_all.exchange import FIND, ROWS, UPDATE, Call, Exchange
from shoal.sharded.all_to_all.metrics import backward_metrics, flags, forward_metrics
from shoal.sharded.devices import home
from shoal.sharded.monolith.prefetch_queue import AsyncPushHook, StructureQueue, queue_capacities
from shoal.sharded.monolith.table_pipeline import Looked, TablePipeline
from shoal.sharded.route import gather_rows, scatter_rows
from shoal.table.arguments import as_int, as_time

CONSUMED = (
    "global_step", "req_time", "id_flat_t", "id_size_flat_t", "embedding_splits", "id_offsets", "emb_offsets",
    "indices", "recv_emb_splits",
)  # fmt: skip


def early_reorder_pack(
    slot_to_id: Mapping[str, Tensor], shard_num: int, dims: Sequence[int], req_time: Any = None
) -> tuple[Any, ...]:
    """What `DistributedMultiTypeHashTableMpi.lookup` takes: ids de-duplicated and dealt out, in the data pipeline.

    ``dims`` are the tables' dimensions by sorted slot name; ``req_time`` is an int64 scalar or None.
    """
    ids = [as_tensor(slot_to_id[slot]).reshape(-1) for slot in sorted(slot_to_id)]
    return (*fused_reorder_by_indices(ids, shard_num, list(dims)), req_time)


class DistributedMultiTypeHashTableMpi:
    """K tables over N = ``shard_num`` ranks; ``table_factory(rank)`` builds this rank's shard of all of them.

    Where the pack's ids are on a GPU, so are the rows that come back; the tables may be on the CPU or on it.
    All ranks call `lookup` and `apply_gradients` together. Gradients are not averaged over ranks: an id that several
    ranks use makes one optimizer step per rank, rank 0's first; with SGD that is the sum.

    ``queue_configs`` may hold ``embedding_prefetch_capacity``, ``enable_async_optimize``, ``enable_pipelined_fwda2a``
    and ``enable_pipelined_bwda2a``: what `pipeline` does beside the loop. `lookup` and `apply_gradients` work step by
    step; with ``enable_async_optimize`` an update is exchanged and applied one call later, or by the hook of
    `get_queue_hooks`.
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
        self._home = home(self._table)
        self._dims = list(self._table.get_table_dim_sizes())
        self._capacity = queue_capacities(queue_configs)
        self._exchange = Exchange(self._backend, env.environment.backward_dtype, env.environment.fake_cast)
        self._next_step = 0
        self._calls = {False: (itertools.count(1), itertools.count(1)), True: (itertools.count(1), itertools.count(1))}
        """Numbers of lookups and updates, by whether they are made aside."""
        self._hooks: list[SessionRunHook] = []
        self._async: StructureQueue | None = None
        if self._capacity["enable_async_optimize"]:
            self._async = StructureQueue(
                self._capacity["enable_async_optimize"], "queue_fusedGatherGrad_to_fusedEmbGradA2A"
            )
            self._hooks.append(AsyncPushHook(self._async, self._run_async))

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
        """The pack that `lookup` takes, for loops without a data pipeline."""
        return early_reorder_pack(slot_to_id, self.shard_num, self._dims, req_time)

    def lookup(
        self,
        slot_to_id: Mapping[str, Any],
        auxiliary_bundle: dict[str, Any] | None = None,
        early_reorder_indicies_res_pack: tuple[Any, ...] | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """``({slot: [n, dim]}, bundle)``; of ``slot_to_id`` only the keys count, the ids are in the pack.

        The bundle then holds what `apply_gradients` of the same batch needs. Metrics of the lookup carry the
        ``global_step`` that the caller put into the bundle, or else the step after that of the last update.
        """
        if early_reorder_indicies_res_pack is None:
            raise AssertionError(
                "support for reordering outside the data pipeline is dropped; give early_reorder_indicies_res_pack"
            )
        slots = sorted(slot_to_id)
        known = sorted(getattr(self._table, "tables", slots))
        if slots != known:
            raise AssertionError(f"slot_to_id must have the slots of the tables, {known}, got {slots}")
        bundle: dict[str, Any] = {} if auxiliary_bundle is None else auxiliary_bundle
        all_fids, shard_sizes, sizes, emb_offset_sz, offsets, req_time = early_reorder_indicies_res_pack
        k, n = len(slots), self.shard_num
        number, names = next(self._calls[is_aside()][0]), tuple(slots)
        id_flat_t, id_size_flat_t = self._exchange.ids(Call(FIND, number, names), all_fids, sizes, k)
        id_flat_t, id_size_flat_t = id_flat_t.to(self._home), id_size_flat_t.cpu()
        rows, splits, id_offsets, emb_offsets, indices = self._table.fused_lookup(
            id_flat_t, id_size_flat_t, n, req_time
        )
        recv = (sizes.view(n, k).cpu().long() * torch.tensor(self._dims, device="cpu")).sum(1).int()
        if flags.enable_alltoall_metrics:
            step = as_int(bundle.get("global_step", self._next_step), "synchronous table", "global_step")
            forward_metrics(slots, sizes.view(n, k), shard_sizes, splits, all_fids.numel(), step)
        bundle.update(
            shard_sizes=shard_sizes,
            fused_embedding_offsets=list(torch.split(offsets, emb_offset_sz.tolist())),
            emb_offset_sz=emb_offset_sz,
            id_flat_t=id_flat_t,
            id_size_flat_t=id_size_flat_t,
            embedding_splits=splits,
            id_offsets=id_offsets,
            emb_offsets=emb_offsets,
            indices=indices,
            recv_emb_splits=recv,
            recv_embeddings_size=recv.sum(dtype=torch.int64),
        )
        rows = self._exchange.rows(Call(ROWS, number, names), rows, splits.tolist(), recv.tolist())
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
        """``{slot: grads}`` of the batch that the bundle came from; gradients of this rank's equal ids are summed."""
        work = self._take_gradients(slot_to_grad, auxiliary_bundle, global_step, req_time, scale)
        if self._async is None:
            self._push(work)
            return self
        if self._async.size() >= self._async.capacity:
            self._run_async()
        self._async.enqueue(work)
        return self

    def _take_gradients(
        self, slot_to_grad: Mapping[str, Tensor], bundle: dict[str, Any], global_step: Any, req_time: Any, scale: float
    ) -> dict[str, Any]:
        """What an update needs, out of the bundle."""
        step, seconds = as_int(global_step, "synchronous table", "global_step"), as_time(req_time, "synchronous table")
        if "recv_embeddings_size" not in bundle:
            raise ConfigError("apply_gradients needs the bundle that lookup filled, once; this one holds no lookup")
        if len(slot_to_grad) != len(self._dims):
            raise ConfigError(
                f"apply_gradients must get a gradient for each of {len(self._dims)} slots, got {sorted(slot_to_grad)}"
            )
        size, offsets = int(bundle["recv_embeddings_size"]), bundle["fused_embedding_offsets"]
        grads = [slot_to_grad[slot] for slot in sorted(slot_to_grad)]
        grads = [g.detach().reshape(-1, d) for g, d in zip(grads, self._dims, strict=True)]
        flat = scatter_rows(size, grads, offsets, self._dims, float(scale))
        del bundle["recv_embeddings_size"], bundle["fused_embedding_offsets"]
        bundle["global_step"], bundle["req_time"] = step, seconds
        self._next_step = step + 1
        if flags.enable_alltoall_metrics and self.shard_num > 1:
            backward_metrics(
                self._exchange.ranks, bundle["shard_sizes"], bundle["recv_emb_splits"], bundle["embedding_splits"], step
            )
        bundle.pop("shard_sizes")
        work = {key: bundle.pop(key) for key in CONSUMED}
        work["grad_flat"] = self._exchange.cast(flat)
        return work

    def _run_async(self) -> None:
        assert self._async is not None
        self._push(self._async.dequeue())

    def _push(self, work: dict[str, Any]) -> None:
        self._apply(self._exchange_gradients(work))

    def _exchange_gradients(self, work: dict[str, Any]) -> dict[str, Any]:
        send, recv = work["recv_emb_splits"].tolist(), work["embedding_splits"].tolist()
        call = Call(UPDATE, next(self._calls[is_aside()][1]), tuple(sorted(getattr(self._table, "tables", ()))))
        work["grad_flat_t"] = self._exchange.gradients(call, work.pop("grad_flat"), send, recv).to(self._home)
        return work

    def _apply(self, work: dict[str, Any]) -> None:
        self._table.fused_apply_gradient(
            work["id_flat_t"], work["indices"], work["id_size_flat_t"], work["grad_flat_t"], work["id_offsets"],
            work["emb_offsets"], work["global_step"], work["req_time"], self.shard_num,
        )  # fmt: skip

    def pipeline(
        self,
        batches: Iterable[Any],
        *,
        ids: Callable[[Any], Mapping[str, Any]] = lambda batch: batch,
        req_time: Callable[[Any], Any] = lambda batch: None,
        found: Callable[[Any, dict[str, Tensor]], Any] = lambda batch, embeddings: embeddings,
        gradients: Callable[[Any], Mapping[str, Tensor]] = lambda slot_to_grad: slot_to_grad,
    ) -> TablePipeline:
        """Looks batches up and takes their gradients beside the loop, as far as ``queue_configs`` says.

        All ranks make and use one together. Yields ``(batch, {slot: [n, dim]}, bundle)``; ``update(slot_to_grad,
        global_step, req_time=None, scale=1)`` takes the gradients of the batch that came last.

        Args:
            batches: anything.
            ids: ``{slot: ids}`` of a batch, by default the batch itself; or ``(slot_to_id, pack)`` with a pack of
                `early_reorder_pack`.
            req_time: the time of a batch, as the pack has it.
            found: makes of a batch and its embeddings what comes out; ``gradients`` what comes back of that.
        """
        stages = _Stages(self, ids, req_time, found, gradients)
        pipeline = TablePipeline(stages, batches, self._capacity, self._exchange.main)
        self._hooks += pipeline.hooks
        return pipeline

    def flush(self) -> None:
        """Applies what `enable_async_optimize` has put off. All ranks call it together."""
        while self._async is not None and self._async.size():
            self._run_async()

    def assign(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("synchronous tables have no assign; assign on the local shard (`table`)")

    def assign_add(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("synchronous tables have no assign_add; use the local shard (`table`)")

    def reinitialize(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("synchronous tables have no reinitialize; use the local shard (`table`)")

    def add_queue_hook(self, hook: SessionRunHook) -> None:
        """Adds a hook to those that `get_queue_hooks` gives to the loop."""
        self._hooks.append(hook)

    def get_queue_hooks(self) -> list[SessionRunHook]:
        """The hooks that a loop calls, those of the local tables included."""
        inner = self._table.get_queue_hooks() if hasattr(self._table, "get_queue_hooks") else []
        return [*self._hooks, *inner]

    def as_op(self, name: str | None = None) -> DistributedMultiTypeHashTableMpi:
        """Waits for pending enqueues and for the local tables."""
        self._table.as_op()
        return self

    def __repr__(self) -> str:
        return f"DistributedMultiTypeHashTableMpi(rank={self.rank} of {self.shard_num}, {self._table!r})"


class _Stages:
    """The parts of a synchronous table's step."""

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

    def exchange_gradients(self, work: dict[str, Any]) -> dict[str, Any]:
        return self._table._exchange_gradients(work)

    def apply(self, work: dict[str, Any]) -> None:
        self._table._apply(work)
