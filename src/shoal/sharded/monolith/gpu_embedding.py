"""A partitioned table whose shards are owned by ranks: lists of ids, rows and gradients go all-to-all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.ranks.aside import is_aside
from shoal.comm.ranks.ranks import Ranks
from shoal.host import as_tensor
from shoal.sharded import environment as env
from shoal.sharded.all_to_all.backend import default_backend
from shoal.sharded.all_to_all.exchange import FIND, ROWS, UPDATE, Call, Exchange
from shoal.sharded.all_to_all.metrics import backward_metrics, flags, forward_metrics
from shoal.sharded.devices import home
from shoal.sharded.monolith.prefetch_queue import AsyncPushHook, StructureQueue, queue_capacities


class AllToAllLists:
    """The exchange of `PartitionedHashTable` with ``enable_gpu_emb``; its tables are the slots of the exchange."""

    def __init__(
        self, table_factory: Callable[[int, Mapping[str, Any]], Any], subs: Mapping[str, Any], shards: int,
        queue_configs: Mapping[str, int], prefix: str,
    ) -> None:  # fmt: skip
        backend = default_backend()
        if shards != backend.world_size:
            raise AssertionError(f"num_ps must be the number of ranks, {backend.world_size}, got {shards}")
        self.table = table_factory(backend.rank, subs)
        self.shards = shards
        self._home = home(self.table)
        self._dims = torch.tensor(self.table.get_table_dim_sizes(), device="cpu")
        self._names = sorted(subs)
        self._next_step = 0
        self._calls = {False: (itertools.count(1), itertools.count(1)), True: (itertools.count(1), itertools.count(1))}
        """Numbers of lookups and updates, by whether they are made aside."""
        self._exchange = Exchange(backend, env.environment.backward_dtype, env.environment.fake_cast)
        self._capacity = queue_capacities(queue_configs)
        self._prefix = prefix
        self._async: StructureQueue | None = None
        self.hooks: list[Any] = []
        if self._capacity["enable_async_optimize"]:
            self._async = StructureQueue(
                self._capacity["enable_async_optimize"], "queue_fusedGatherGrad_to_fusedEmbGradA2A"
            )
            self.hooks.append(AsyncPushHook(self._async, lambda: self._push(self._async.dequeue())))

    def begin(self, sharded: dict[str, Any], bundle: dict[str, Any], tables: Sequence[str], req_time: Any) -> None:
        """Ids of the batch, shard after shard and table after table, into the bundle."""
        lists = [sharded["shards"][f"{table}:{ps}"] for ps in range(self.shards) for table in tables]
        sizes = torch.tensor([ids.numel() for ids in lists], dtype=torch.int32, device="cpu")
        by_shard = sizes.view(self.shards, len(tables))
        time = 0 if req_time is None else int(as_tensor(req_time).max())
        self._put(
            bundle,
            shards_value=torch.cat(lists),
            shards_row_lengths=by_shard.sum(1, dtype=torch.int32),
            shards_table_row_lengths=sizes,
            fid_list_emb_row_lenth=(by_shard * self._dims).reshape(-1).int(),
            req_time=time,
        )

    def read(self, bundle: dict[str, Any]) -> None:
        p, k = self._prefix, self._dims.numel()
        sizes = bundle[p + "shards_table_row_lengths"]
        number, names = next(self._calls[is_aside()][0]), tuple(self._names)
        ids, came = self._exchange.ids(Call(FIND, number, names), bundle.pop(p + "shards_value"), sizes, k)
        ids = ids.to(self._home)
        rows, splits, id_offsets, emb_offsets, indices = self.table.fused_lookup(
            ids, came, self.shards, bundle[p + "req_time"]
        )
        recv = bundle[p + "fid_list_emb_row_lenth"].view(self.shards, k).sum(1, dtype=torch.int32)
        if flags.enable_alltoall_metrics:
            step, by_shard = self._next_step, sizes.view(self.shards, k)
            forward_metrics(self._names, by_shard, by_shard.sum(1), splits, int(sizes.sum()), step)
        self._put(
            bundle, id_flat_t=ids, id_size_flat_t=came, embedding_splits=splits, id_offsets=id_offsets,
            emb_offsets=emb_offsets, indices=indices, recv_emb_splits=recv,
        )  # fmt: skip
        call = Call(ROWS, number, names)
        self._put(bundle, recv_embeddings=self._exchange.rows(call, rows, splits.tolist(), recv.tolist()))

    def rows(self, bundle: Mapping[str, Any]) -> tuple[list[Tensor], Tensor]:
        """The flat rows that came, and the floats of each list in them."""
        return [bundle[self._prefix + "recv_embeddings"]], bundle[self._prefix + "fid_list_emb_row_lenth"]

    @property
    def ranks(self) -> Ranks:
        """Who owns the shards."""
        return self._exchange.main

    def take_gradients(self, flat: Tensor, bundle: dict[str, Any], step: int, seconds: int) -> dict[str, Any]:
        """What an update needs."""
        names = (
            "id_flat_t", "id_size_flat_t", "embedding_splits", "id_offsets", "emb_offsets", "indices",
            "recv_emb_splits",
        )  # fmt: skip
        work = {name: bundle[self._prefix + name] for name in names}
        work.update(grad_flat=self._exchange.cast(flat), global_step=step)
        work["req_time"] = seconds or bundle[self._prefix + "req_time"]
        self._next_step = step + 1
        if flags.enable_alltoall_metrics and self.shards > 1:
            asked = bundle[self._prefix + "shards_row_lengths"]
            backward_metrics(self._exchange.ranks, asked, work["recv_emb_splits"], work["embedding_splits"], step)
        return work

    def put_off(self, work: dict[str, Any]) -> None:
        """Makes an update: now, or with ``enable_async_optimize`` one call later."""
        if self._async is None:
            self._push(work)
            return
        if self._async.size() >= self._async.capacity:
            self._push(self._async.dequeue())
        self._async.enqueue(work)

    def _push(self, work: dict[str, Any]) -> None:
        self.apply(self.exchange_gradients(work))

    def exchange_gradients(self, work: dict[str, Any]) -> dict[str, Any]:
        """Sends gradients to the ranks that own the rows."""
        call = Call(UPDATE, next(self._calls[is_aside()][1]), tuple(self._names))
        send, recv = work["recv_emb_splits"].tolist(), work["embedding_splits"].tolist()
        return work | {"came": self._exchange.gradients(call, work["grad_flat"], send, recv).to(self._home)}

    def apply(self, work: dict[str, Any]) -> None:
        """Updates this rank's rows."""
        grads = work["came"]
        self.table.fused_apply_gradient(
            work["id_flat_t"], work["indices"], work["id_size_flat_t"], grads, work["id_offsets"], work["emb_offsets"],
            work["global_step"], work["req_time"], self.shards,
        )  # fmt: skip

    def _put(self, bundle: dict[str, Any], **values: Any) -> None:
        bundle.update({self._prefix + name: value for name, value in values.items()})
