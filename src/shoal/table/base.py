"""`TableBase`: the configuration, filter, eviction, sync client and handle of a table, without reads and writes."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal import _core
from shoal.errors import ConfigError, UnsupportedError
from shoal.table import registry
from shoal.table.arguments import check_rates
from shoal.table.budget.calls import BudgetCalls, own_policy
from shoal.table.budget.limits import LEAST_BYTES, MemoryBudget, native_options
from shoal.table.checkpoint.copies import about_to_change
from shoal.table.config.entry import HashTableConfigInstance
from shoal.table.config.messages import EmbeddingHashTableConfig, EntryConfig, HashTableProto
from shoal.table.config.native import native_expiry, native_layout
from shoal.table.config.validate import validate_table_config
from shoal.table.eviction import BackgroundEviction
from shoal.table.export_mode import is_exporting

_BAD_GRADIENT = {"raise": 0, "skip": 1, "ignore": 2}


class TableBase(BudgetCalls, ABC):
    """Builds a table from its configuration and holds its parts; `HashTable` reads and writes its rows."""

    on_gpu = False
    local_state = True
    """Whether all rows are in this process, so that a module's ``state_dict`` contains them."""
    replayed = False
    """Whether a CUDA graph changes rows without the host seeing it."""
    rank_share: tuple[int, int, bool] | None = None
    """Of a rank's shard: the rank, the number of ranks, and whether rank 0 stays empty. Saves record it, and restores
    compare it. None for other tables."""

    def _build(
        self,
        config: HashTableConfigInstance,
        name: str,
        *,
        hash_filter: Any = None,
        sync_client: Any = None,
        saver_parallel: int = -1,
        on_bad_gradient: str = "raise",
        seed: int | None = None,
        device: Any = "cpu",
        deterministic: bool = False,
        clocked: bool = False,
        first_column: int = 0,
        evict: Any = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        if on_bad_gradient not in _BAD_GRADIENT:
            raise ConfigError(
                f"table {name!r}: on_bad_gradient must be one of {list(_BAD_GRADIENT)}, got {on_bad_gradient!r}"
            )
        native_filter = getattr(hash_filter, "native", None)
        if hash_filter is not None and not isinstance(native_filter, _core.Filter):
            raise ConfigError(f"table {name!r}: hash_filter must be one of create_hash_filters(), got {hash_filter!r}")
        client = sync_handle(sync_client, name)
        message = EmbeddingHashTableConfig()
        message.CopyFrom(config.table_config)
        if is_exporting():
            message.entry_config.entry_type = EntryConfig.SERVING
        validate_table_config(message, config.learning_rate_fns, name)
        if first_column and len(message.entry_config.segments) > 1:
            raise ConfigError(
                f"table {name!r}: a table that is split by columns must have one segment, got "
                f"{len(message.entry_config.segments)}"
            )
        self.name = name
        self.first_column = first_column
        """If rows are slices of wider rows: the column of the wider row where they start. Initial rows depend on it."""
        self.config = config
        self.table_config = message
        self.saver_parallel = saver_parallel
        self.extra_restore_names = list(config.extra_restore_names)
        self.hash_filter = hash_filter
        self.sync_client = sync_client
        self.on_bad_gradient = on_bad_gradient
        self.clocked = clocked
        """Whether a write without ``req_time`` uses the current time. False: it uses 0, and every time is accepted."""
        self.skipped_gradients = 0
        """Occurrences skipped because of a NaN or infinite gradient, with ``on_bad_gradient="skip"``."""
        self._counting = threading.Lock()
        self._bad_gradient = _BAD_GRADIENT[on_bad_gradient]
        self._expiry = native_expiry(message.slot_expire_time_config)
        try:
            layout = native_layout(message, first_column)
        except ValueError as error:  # a row too large for the core to address
            raise ConfigError(f"table {name!r}: {error}") from None
        self.serving = layout.serving
        kinds = {segment.comp_config.WhichOneof("type") for segment in message.entry_config.segments}
        self.finite_values = not layout.serving and on_bad_gradient != "ignore" and kinds <= {None, "fp32", "fp16"}
        """Whether `assign` and `assign_add` reject NaN and infinity; quantized rows can represent them."""
        self._has_batch_softmax = any(
            s.opt_config.WhichOneof("type") == "batch_softmax" for s in message.entry_config.segments
        )
        self.seed = (torch.initial_seed() if seed is None else seed) & ((1 << 64) - 1)
        self.dim_size: int = layout.dim
        self.own_policy = own_policy(evict)
        self._memory_budget = budget
        self._evict_options = native_options(message, budget)
        host = self._host = self._start(layout, device, deterministic)
        if native_filter is not None:
            host.set_filter(native_filter)
        if client is not None:
            self.attach(client)
        self._eviction: BackgroundEviction | None = None
        if message.enable_feature_eviction:
            self._eviction = BackgroundEviction(self, timedelta(hours=message.feature_evict_every_n_hours))

    # --- where the rows are -------------------------------------------------------------------------------------------

    def _start(self, layout: _core.Layout, device: Any, deterministic: bool) -> _core.Table:
        """Creates the storage of the rows; returns the native table that holds the filter."""
        self.device = torch.device("cpu")
        expected = min(self.table_config.initial_capacity, (1 << 63) - 1)
        if self._memory_budget is not None:
            self._memory_budget.use_on(self.device, self.name)
        try:
            self._native = _core.Table(layout, self.seed, expected, self._evict_options)
        except MemoryError:
            least = f"{LEAST_BYTES >> 10} KiB"
            raise ConfigError(
                f"table {self.name!r}: max_bytes must be at least {least} and leave room for rows, got {self.max_bytes}"
            ) from None
        return self._native

    @property
    def native(self) -> _core.Table | None:
        """The native table, for native code that reads rows while this object lives; None if rows are on a GPU."""
        return None if self.on_gpu else self._native

    def staged(self) -> Any:
        """An object whose ``_native`` has all rows in host memory: this table, or a copy of a table on a GPU."""
        return self

    def staging(self) -> Any:
        """An object whose ``_native`` has the layout of this table's rows in host memory."""
        return self

    def source(self, since: int = 0, *, stale: bool = False) -> Any:
        """The rows for a save (`shoal.table.checkpoint.single.Source`): those written since an epoch, or all of them.

        With ``stale``, expired rows are included.
        """
        return self._native, None if stale else self._expiry, since

    @property
    def changes(self) -> Any:
        """The record of changes for incremental checkpoints: epochs, and the ids removed since an epoch."""
        return self._native

    def adopt(self, native: _core.Table) -> None:
        """Takes over the rows, clock and scales of a native table with the same layout, atomically for readers."""
        about_to_change(self)
        self._native.swap_contents(native)
        _core.adopt_eviction(self._native, native)
        self._native.raise_max_update_time(native.max_update_time())
        self._native.set_scales(native.scales())

    def attach(self, sync_client: Any) -> None:
        """Sends rows that change from now on to a sync client, or to its handle, as ``sync_client=`` does."""
        attached = sync_handle(sync_client, self.name).attach_table(self.name, self.dim_size, self._client_lookup)
        if attached is not None:
            self._set_touched(*attached)

    def _set_touched(self, touched: Any, number: int) -> None:
        self._native.set_touched(touched, number)

    # --- changes, for copies elsewhere (shoal.table.tracking) ---------------------------------------------------------

    def track(self, tracker: _core.Tracker) -> None:
        """Reports every row that is written or removed from now on to a tracker."""
        self._native.track(tracker)

    def untrack(self, tracker: _core.Tracker) -> None:
        """Stops reporting to a tracker."""
        self._native.untrack(tracker)

    def settle(self) -> None:
        """Waits until all writes so far have been reported to the trackers; a CPU table never waits."""

    def all_ids(self) -> Iterator[Tensor]:
        """The ids that have a row, in batches of int64 on the CPU. Writes can happen between batches."""
        for stripe in range(_core.Table.num_stripes):
            yield torch.from_numpy(np.frombuffer(self._native.ids(stripe), np.int64).copy())

    def fetch_bytes(self, ids: Tensor, begin: int, end: int) -> tuple[Tensor, int]:
        """Bytes ``begin`` to ``end`` of the rows of ``ids``, and how many of the ids have a row.

        The bytes are uint8 ``[n, end - begin]`` on the CPU in the order of checkpoints (weights, then the optimizer's
        state), with zeros for an id without a row.
        """
        ids, out = ids.contiguous(), torch.empty(ids.numel(), end - begin, dtype=torch.uint8, device="cpu")
        args = ids.data_ptr(), ids.numel(), begin, end - begin, out.data_ptr(), 0
        return out, _core.fetch_bytes(self._native, *args)

    def fetch_times(self, ids: Tensor) -> Tensor:
        """The times of the rows of ``ids``: int64 ``[n]`` on the CPU, 0 for an id without a row."""
        ids, times = ids.contiguous(), torch.empty(ids.numel(), dtype=torch.int64, device="cpu")
        _core.fetch_bytes(self._native, ids.data_ptr(), ids.numel(), 0, 0, 0, times.data_ptr())
        return times

    def fetch_kept(self, ids: Tensor) -> Tensor:
        """The eviction policy's state for ``ids``, as in checkpoints: int64 ``[n]`` on the CPU."""
        ids, kept = ids.contiguous(), torch.empty(ids.numel(), dtype=torch.int64, device="cpu")
        _core.policy_keys(self._native, ids.data_ptr(), ids.numel(), kept.data_ptr(), lasting=True)
        return kept

    @abstractmethod
    def _client_lookup(self, ids: Tensor) -> Tensor:
        """The rows of ``ids`` for a sync client, on CPU tensors."""

    def scales(self) -> list[float]:
        """For each segment, the scale that its optimizer keeps for all rows."""
        return self._host.scales()

    def training_state(self) -> dict[str, Any]:
        """The state that updates depend on besides rows: clock, counts and scales, as JSON values."""
        host = self._host
        state = {"max_update_time": host.max_update_time(), "calls": host.calls(), "scales": host.scales()}
        return {**state, "eviction": self._eviction_state()} if self.has_budget else state

    def set_training_state(self, state: dict[str, Any]) -> None:
        """Sets the state from `training_state`; fields missing in ``state`` are unchanged."""
        host = self._host
        if "calls" in state:
            host.set_calls(state["calls"])
        if "max_update_time" in state:
            host.raise_max_update_time(state["max_update_time"])
        if "scales" in state:
            host.set_scales(state["scales"])
        if "eviction" in state and self.has_budget:
            self._set_eviction_state(state["eviction"])

    # --- checks of updates --------------------------------------------------------------------------------------------

    def rates(self, step: int) -> list[float]:
        """The learning rate of each segment at a global step."""
        return check_rates(self.config.call_learning_rate_fns_fewer_ops(step), self.name)

    def _count_skipped(self, occurrences: int) -> None:
        if occurrences:
            with self._counting:
                self.skipped_gradients += occurrences

    def _check_step(self, step: int) -> None:
        if step < 0 and self._has_batch_softmax:
            raise ConfigError(f"table {self.name!r}: global_step of batch_softmax must be >= 0, got {step}")

    def check_trains(self, operation: str) -> None:
        """Raises for an operation that serving entries do not support."""
        if self.serving:
            raise UnsupportedError(f"table {self.name!r}: {operation} is not supported by serving entries")

    # --- the rest -----------------------------------------------------------------------------------------------------

    def to_proto(self) -> HashTableProto:
        """A handle with which `from_proto` finds this table in this process."""
        return HashTableProto(
            table_tensor=self.name,
            dim_size=self.dim_size,
            shared_name=self.name,
            slot_expire_time_config=self.table_config.slot_expire_time_config.SerializeToString(),
            learning_rate_tensor=self.name,
            saver_parallel=self.saver_parallel,
            extra_restore_names=self.extra_restore_names,
        )

    @staticmethod
    def from_proto(proto: HashTableProto) -> Any:
        """The registered table of a handle."""
        return registry.find(proto.shared_name or proto.table_tensor)

    def close(self) -> None:
        """Stops background eviction. The table itself stays usable."""
        if self._eviction is not None:
            self._eviction.stop()
            self._eviction = None


def sync_handle(sync_client: Any, name: str) -> Any:
    """The handle of a sync client, to which a table attaches itself, or None."""
    handle = getattr(sync_client, "handle", sync_client)
    if handle is not None and not hasattr(handle, "attach_table"):
        raise ConfigError(
            f"table {name!r}: sync_client must be one of create_parameter_sync_clients(), got "
            f"{type(sync_client).__name__}"
        )
    return handle
