"""`PartitionedHashTable`: one lookup turns a batch of features into layout tensors, one update takes them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.horovod.hooks import SessionRunHook
from shoal.errors import ConfigError
from shoal.fid import shard_of
from shoal.ops.layout import flatten_layout, nest_layout
from shoal.sharded.devices import home, ids_anywhere, rows_anywhere
from shoal.sharded.export import check_writable, export_parts
from shoal.sharded.monolith import list_parts
from shoal.sharded.monolith.batch_bundle import (
    OFFSETS,
    SIZES,
    keep_rows,
    keep_shards,
    pop_shards,
    rows_of,
    take_shards,
    work_of,
)
from shoal.sharded.monolith.gpu_embedding import AllToAllLists
from shoal.sharded.monolith.layout_config import PREFIX, ParserCtx, get_default_parser_ctx, params_of
from shoal.sharded.monolith.pooling import Pooling
from shoal.sharded.monolith.prefetch_queue import AsyncFunctionMgr, hooks_of, queue_capacities
from shoal.sharded.monolith.table_pipeline import Looked, TablePipeline
from shoal.sharded.parts import parts_of
from shoal.table.arguments import as_int, as_time
from shoal.table.config.entry import infer_dim_size
from shoal.table.export_mode import is_exporting, is_exporting_distributed


class PartitionedHashTable:
    """The tables of all features in ``num_ps`` parts, read and updated batch by batch.

    ``table_factory(i, sub_table_name_to_config)`` builds part ``i``: a `MultiHashTable` with native tables, a
    `MultiTypeHashTable` otherwise, or a remote form of them. Settings come from the parser context. Ids must be >= 0.
    """

    def __init__(
        self,
        num_ps: int,
        table_factory: Callable[[int, Mapping[str, Any]], Any],
        use_native_multi_hash_table: bool,
        max_rpc_deadline_millis: int = 30,
        queue_configs: Mapping[str, int] | None = None,
        parser_ctx: ParserCtx | None = None,
    ) -> None:
        self._ctx = get_default_parser_ctx() if parser_ctx is None else parser_ctx
        self._params = params_of(self._ctx)
        self.num_ps = num_ps
        self.max_rpc_deadline_millis = max_rpc_deadline_millis
        self._shards = max(1, num_ps)
        if self._shards != self._params.num_ps:
            raise ConfigError(f"num_ps must be {self._params.num_ps}, as in the parser context, got {num_ps}")
        self._native = use_native_multi_hash_table and self._params.use_native_multi_hash_table
        if self._native != self._params.use_native_multi_hash_table:
            raise ConfigError(
                f"use_native_multi_hash_table must be {self._params.use_native_multi_hash_table}, as in the parser "
                f"context, got {use_native_multi_hash_table}"
            )
        self._queue_configs = queue_capacities(queue_configs)
        self._hooks: list[SessionRunHook] = []
        self._pooling = Pooling(self._ctx, self._shards)
        configs = self._params.feature_configs.feature_configs
        self._features = sorted(configs)
        subs = self._params.sub_table_name_to_config
        self._dims = {name: infer_dim_size(config.table_config) for name, config in subs.items()}
        self._tables_of_lists = sorted({f.table for f in configs.values()})
        self.slot_mapping: dict[str, str] = {
            name: name if self._native else configs[name].table for name in self._features
        }
        """Feature -> its sub-table."""
        self._exchange: AllToAllLists | None = None
        if self._params.enable_gpu_emb:
            self._exchange = AllToAllLists(table_factory, subs, self._shards, self._queue_configs, PREFIX)
            self._tables = [self._exchange.table]
        else:
            self._tables = [table_factory(i, subs) for i in range(self._shards)]
            self._parts = parts_of(self._tables, self._dims, raw=self._native)
        self._home = home(self._tables[0])
        if is_exporting_distributed():
            export_parts(self._tables, self._dims, native=self._native)

    @property
    def tables(self) -> list[Any]:
        """The parts, by shard."""
        return list(self._tables)

    # --- lookup ---------------------------------------------------------------------------------------------------

    def lookup(
        self,
        features: dict[str, Any],
        auxiliary_bundle: dict[str, Any] | None = None,
        ret_fused_layout_callable_fn: bool = False,
        ret_lookup_callable_fn: bool = False,
        embedding_prefetch_capacity: int = 0,
    ) -> Any:
        """``{layout: tensor}``, a list of tensors for layouts of type NONE.

        ``features`` must hold the result of `sharding_sparse_fids_with_context`, which is taken out, or the raw batch
        under ``__sharding_sparse_fids__sparse_features``. The bundle becomes the input of `apply_gradients`. With
        ``ret_fused_layout_callable_fn`` the rows are read, and the returned ``f(auxiliary_bundle, features)`` pools
        them; with ``ret_lookup_callable_fn`` the batch is only sharded, and ``f`` does the rest.
        ``embedding_prefetch_capacity`` has no effect here; use `pipeline` to look batches up ahead.
        """
        bundle = {} if auxiliary_bundle is None else auxiliary_bundle
        sharded = take_shards(features, self._ctx)
        for name in (*OFFSETS, *(("batch_size",) if self._exchange is not None else SIZES)):
            bundle[PREFIX + name] = sharded[name]
        if self._exchange is not None:
            self._exchange.begin(sharded, bundle, self._tables_of_lists, features.get("req_time"))
        else:
            keep_shards(sharded, bundle)

        def pool(auxiliary_bundle: dict[str, Any], features: dict[str, Any]) -> dict[str, Any]:
            return self._pool(auxiliary_bundle)

        def finish(auxiliary_bundle: dict[str, Any], features: dict[str, Any]) -> dict[str, Any]:
            self._read(auxiliary_bundle)
            return pool(auxiliary_bundle, features)

        if ret_lookup_callable_fn:
            return finish
        if ret_fused_layout_callable_fn:
            self._read(bundle)
            return pool
        return finish(bundle, features)

    def _read(self, bundle: dict[str, Any]) -> None:
        """Read the rows of the ids in the bundle into the bundle."""
        if self._exchange is not None:
            self._exchange.read(bundle)
            return
        lists = pop_shards(bundle, self._tables_of_lists, self._shards)
        if is_exporting_distributed():
            deadline = self.max_rpc_deadline_millis
            rows = list_parts.exported_lookup(lists, self._native, self._features, self._dims, deadline)
        else:
            float16 = self._params.transfer_float16
            rows = list_parts.lookup(self._parts, lists, self._native, self._features, self._dims, float16)
        keep_rows(bundle, lists, rows, fids=not is_exporting(), native=self._native)

    def _rows(self, bundle: Mapping[str, Any]) -> tuple[list[Tensor], Tensor | None]:
        try:
            if self._exchange is not None:
                return self._exchange.rows(bundle)
            return rows_of(bundle, self._tables_of_lists, self._shards), None
        except KeyError as error:
            raise ConfigError(f"auxiliary_bundle must be one that a lookup has filled; it has no {error}") from None

    def _pool(self, bundle: dict[str, Any]) -> dict[str, Any]:
        return self._pooling.forward(bundle, *self._rows(bundle))

    def nest_layout(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """``{layout: tensor or list}`` from tensors in flattened order."""
        return nest_layout(self._params.feature_configs, list(tensors))

    def flatten_layout(self, nested: Mapping[str, Any]) -> list[Any]:
        """Tensors by sorted layout name, those of a list in slice order."""
        return flatten_layout(self._params.feature_configs, dict(nested))

    # --- update ---------------------------------------------------------------------------------------------------

    def apply_gradients(
        self,
        layout_grads_and_vars: Sequence[tuple[Tensor | None, Tensor]],
        global_step: Any = 0,
        req_time: Any = None,
        auxiliary_bundle: dict[str, Any] | None = None,
        async_function_mgr: AsyncFunctionMgr | None = None,
        async_push: bool = False,
        grad_scale: Any = None,
    ) -> PartitionedHashTable:
        """Apply ``(gradient, layout)`` pairs in flattened order, of the bundle's batch.

        The gradient None means zeros. Every id of a list gets its own optimizer step, even if no layout uses its
        slices.
        """
        check_writable("apply_gradients")
        if auxiliary_bundle is None:
            raise ConfigError("apply_gradients must get the auxiliary_bundle that lookup filled, got None")
        work = self._take_gradients(layout_grads_and_vars, auxiliary_bundle, global_step, req_time, grad_scale)
        if self._exchange is not None:
            self._exchange.shard.update(work)
        elif async_push and async_function_mgr is not None:
            async_function_mgr.add_async_function(self._push, work, is_async=True, queue_name="postpush_queue")
        else:
            self._push(*work)
        return self

    def _take_gradients(
        self,
        layout_grads_and_vars: Sequence[tuple[Tensor | None, Tensor]],
        bundle: dict[str, Any],
        global_step: Any,
        req_time: Any,
        grad_scale: Any,
    ) -> Any:
        """The inputs of an update."""
        step = as_int(global_step, "partitioned table", "global_step")
        if isinstance(req_time, Tensor):
            req_time = int(req_time.max()) if req_time.numel() else 0
        seconds = as_time(req_time, "partitioned table")
        grads = [torch.zeros_like(var) if grad is None else grad.detach() for grad, var in layout_grads_and_vars]
        flat = [f.to(self._home) for f in self._pooling.backward(bundle, grads, *self._rows(bundle), grad_scale)]
        if self._exchange is not None:
            return self._exchange.take_gradients(flat[0], bundle, step, seconds)
        return work_of(bundle, self._tables_of_lists, self._shards, flat), step, seconds

    def pipeline(
        self,
        batches: Iterable[Any],
        *,
        features: Callable[[Any], dict[str, Any]] = dict,
        embedding_prefetch_capacity: int | None = None,
    ) -> TablePipeline:
        """Look batches up and apply their gradients in a background thread, as set by ``queue_configs``.

        Yields ``(batch, {layout: tensor}, bundle)``; ``update(layout_grads_and_vars, global_step, req_time=None,
        grad_scale=None)`` takes the gradients of the last batch. With ``enable_gpu_emb`` all ranks must create and use
        it together, and ``embedding_prefetch_capacity`` has no effect.

        Args:
            batches: an iterable of batches of any type.
            features: returns the ``features`` of `lookup` for a batch; by default a copy of the batch.
            embedding_prefetch_capacity: replaces the one in ``queue_configs``.
        """
        capacities = dict(self._queue_configs)
        if embedding_prefetch_capacity is not None:
            capacities["embedding_prefetch_capacity"] = embedding_prefetch_capacity
        if self._exchange is not None:
            capacities["embedding_prefetch_capacity"] = 0
        ranks = None if self._exchange is None else self._exchange.ranks
        pipeline = TablePipeline(_Stages(self, features), batches, capacities, ranks)
        self._hooks += pipeline.hooks
        return pipeline

    def _push(self, lists: list[dict[str, Any]], step: int, seconds: int) -> None:
        float16 = self._params.transfer_float16
        list_parts.apply(self._parts, lists, self._native, self._features, step, seconds, float16)

    # --- direct access --------------------------------------------------------------------------------------------

    def assign(self, data: Mapping[int, Mapping[str, tuple[Tensor, Tensor]]], req_time: Any = None) -> Any:
        """Set rows from ``{ps: {sub_table: (ids, values)}}``, sharded by the caller: ``id mod num_ps == ps``."""
        return self._direct("assign", data, req_time)

    def assign_add(self, data: Mapping[int, Mapping[str, tuple[Tensor, Tensor]]], req_time: Any = None) -> Any:
        """Like `assign`, but adds to rows."""
        return self._direct("assign_add", data, req_time)

    def _direct(self, verb: str, data: Mapping[int, Mapping[str, tuple[Tensor, Tensor]]], req_time: Any) -> Any:
        if self._params.enable_gpu_emb:
            raise NotImplementedError(f"{verb} is not supported with enable_gpu_emb")
        check_writable(verb)
        seconds = as_time(req_time, "partitioned table")
        checked: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        for ps, writes in data.items():
            self._check_part(ps)
            checked[ps] = {name: self._checked_rows(ps, name, *rows) for name, rows in writes.items()}
        for ps, rows in checked.items():
            getattr(self._tables[ps], verb)(rows, req_time=seconds)
        return self

    def _check_part(self, ps: int) -> None:
        if not 0 <= ps < self._shards:
            raise ConfigError(f"parts must be 0..{self._shards - 1}, got {ps}")

    def _checked_rows(self, ps: int, name: str, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Check rows for part ``ps`` and move them to its device."""
        if name not in self._dims:
            raise KeyError(f"there is no sub-table {name!r}; sub-tables are {', '.join(self._dims)}")
        ids = ids_anywhere(ids, name).view(-1).to(self._home)
        values = rows_anywhere(values, ids.numel(), self._dims[name], name, "values", self._home)
        if ids.numel() and (int(ids.min()) < 0 or bool((shard_of(ids, self._shards) != ps).any())):
            bad = ids[(ids < 0) | (shard_of(ids, self._shards) != ps)][0]
            raise ConfigError(
                f"sub-table {name!r}: ids of part {ps} of {self._shards} must be >= 0 with id mod {self._shards} == "
                f"{ps}, got {int(bad)}"
            )
        return ids, values.view(-1, self._dims[name])

    def _lookup_raw(self, data: Mapping[int, Mapping[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
        """``{ps: {sub_table: ids}}`` to ``{ps: {sub_table: [n, dim]}}``."""
        for ps in data:
            self._check_part(ps)
        return {ps: self._tables[ps if self._exchange is None else 0].lookup(ids) for ps, ids in data.items()}

    def add_queue_hook(self, hook: SessionRunHook) -> None:
        self._hooks.append(hook)

    def get_queue_hooks(self) -> list[SessionRunHook]:
        """The hooks for the training loop, including those of the parts."""
        exchange = self._exchange.shard.hooks if self._exchange is not None else []
        return [*self._hooks, *exchange, *hooks_of(self._tables)]

    def get_table_dim_sizes(self) -> list[int]:
        return [self._dims[name] for name in sorted(self._dims)]

    def as_op(self, name: str | None = None) -> PartitionedHashTable:
        """Wait until all writes to these tables have been applied."""
        for table in self._tables:
            table.as_op()
        return self

    def __repr__(self) -> str:
        return f"PartitionedHashTable({len(self._features)} features, {len(self._dims)} tables, {self._shards} parts)"


class _Stages:
    """The stages of a partitioned table's step."""

    def __init__(self, table: PartitionedHashTable, features: Callable[[Any], dict[str, Any]]) -> None:
        self._table, self._features = table, features

    def prepare(self, batch: Any) -> Any:
        bundle: dict[str, Any] = {}
        features = self._features(batch)
        return features, bundle, self._table.lookup(features, bundle, ret_lookup_callable_fn=True)

    def look_up(self, batch: Any, prepared: Any) -> Looked:
        features, bundle, finish = prepared
        return Looked(batch, finish(bundle, features), bundle)

    def take_gradients(
        self,
        looked: Looked,
        layout_grads_and_vars: Sequence[tuple[Tensor | None, Tensor]],
        global_step: Any = 0,
        req_time: Any = None,
        grad_scale: Any = None,
    ) -> Any:
        check_writable("update")
        bundle = looked.auxiliary_bundle
        return self._table._take_gradients(layout_grads_and_vars, bundle, global_step, req_time, grad_scale)

    def exchange_gradients(self, work: Any) -> Any:
        exchange = self._table._exchange
        return work if exchange is None else exchange.shard.exchange_gradients(work)

    def apply(self, work: Any) -> None:
        exchange = self._table._exchange
        self._table._push(*work) if exchange is None else exchange.shard.apply(work)
