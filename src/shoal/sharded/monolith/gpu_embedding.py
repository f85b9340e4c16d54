"""A partitioned table whose shards are owned by ranks, which exchange lists of ids, rows and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.ranks.ranks import Ranks
from shoal.host import as_tensor
from shoal.sharded.all_to_all.backend import default_backend
from shoal.sharded.all_to_all.metrics import backward_metrics, flags, forward_metrics
from shoal.sharded.monolith.owned_shard import UPDATE_KEYS, OwnedShard


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
        self.shard = OwnedShard(self.table, sorted(subs), backend, queue_configs["enable_async_optimize"])
        self._dims = torch.tensor(self.table.get_table_dim_sizes(), device="cpu")
        self._names = sorted(subs)
        self._next_step = 0
        self._prefix = prefix

    def begin(self, sharded: dict[str, Any], bundle: dict[str, Any], tables: Sequence[str], req_time: Any) -> None:
        """Put the ids of the batch into the bundle, shard after shard and table after table."""
        lists = [sharded["shards"][f"{table}:{ps}"] for ps in range(self.shards) for table in tables]
        sizes = torch.tensor([ids.numel() for ids in lists], dtype=torch.int32, device="cpu")
        by_shard = sizes.view(self.shards, len(tables))
        times = as_tensor([] if req_time is None else req_time)
        self._put(
            bundle,
            shards_value=torch.cat(lists),
            shards_row_lengths=by_shard.sum(1, dtype=torch.int32),
            shards_table_row_lengths=sizes,
            fid_list_emb_row_lenth=(by_shard * self._dims).reshape(-1).int(),
            req_time=int(times.max()) if times.numel() else 0,
        )

    def read(self, bundle: dict[str, Any]) -> None:
        """Read the rows of the ids in the bundle into the bundle."""
        p, k = self._prefix, self._dims.numel()
        sizes = bundle[p + "shards_table_row_lengths"]
        recv = bundle[p + "fid_list_emb_row_lenth"].view(self.shards, k).sum(1, dtype=torch.int32)
        rows, found = self.shard.look_up(bundle.pop(p + "shards_value"), sizes, recv, bundle[p + "req_time"])
        if flags.enable_alltoall_metrics:
            step, by_shard = self._next_step, sizes.view(self.shards, k)
            splits = found["embedding_splits"]
            forward_metrics(self._names, by_shard, by_shard.sum(1), splits, int(sizes.sum()), step)
        self._put(bundle, recv_embeddings=rows, **found)

    def rows(self, bundle: Mapping[str, Any]) -> tuple[list[Tensor], Tensor]:
        """The flat rows that were received, and the number of floats of each list in them."""
        return [bundle[self._prefix + "recv_embeddings"]], bundle[self._prefix + "fid_list_emb_row_lenth"]

    @property
    def ranks(self) -> Ranks:
        """The ranks that own the shards."""
        return self.shard.exchange.main

    def take_gradients(self, flat: Tensor, bundle: dict[str, Any], step: int, seconds: int) -> dict[str, Any]:
        """The inputs of an update."""
        work = {name: bundle[self._prefix + name] for name in UPDATE_KEYS}
        work.update(grad_flat=self.shard.exchange.cast(flat), global_step=step)
        work["req_time"] = seconds or bundle[self._prefix + "req_time"]
        self._next_step = step + 1
        if flags.enable_alltoall_metrics and self.shards > 1:
            asked = bundle[self._prefix + "shards_row_lengths"]
            backward_metrics(self.shard.exchange.ranks, asked, work["recv_emb_splits"], work["embedding_splits"], step)
        return work

    def _put(self, bundle: dict[str, Any], **values: Any) -> None:
        bundle.update({self._prefix + name: value for name, value in values.items()})
