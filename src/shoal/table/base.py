"""`TableBase`: what a table is besides its reads and writes: configuration, filter, eviction, sync client, handle."""

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
    """Builds a table from its configuration and keeps what belongs to it; `HashTable` reads and writes its rows."""

    on_gpu = False
    local_state = True
    """All rows are in this process, so that the ``state_dict`` of a module holds them."""
    replayed = False
    """Whether a CUDA graph changes rows, unseen by the host."""

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
                f"table {name!r}: a slice of columns must be of a table with one segment, got "
                f"{len(message.entry_config.segments)} segments"
            )
        self.name = name
        self.first_column = first_column
        """Of rows that are slices of wider ones: where they begin there, which initial rows depend on."""
        self.config = config
        self.table_config = message
        self.saver_parallel = saver_parallel
        self.extra_restore_names = list(config.extra_restore_names)
        self.hash_filter = hash_filter
        self.sync_client = sync_client
        self.on_bad_gradient = on_bad_gradient
        self.clocked = clocked
        """Whether a write without ``req_time`` takes the current time; False: 0, and every time is believed."""
        self.skipped_gradients = 0
        """Occurrences passed over for a NaN or infinite gradient, with ``on_bad_gradient="skip"``."""
        self._counting = threading.Lock()
        self._bad_gradient = _BAD_GRADIENT[on_bad_gradient]
        self._expiry = native_expiry(message.slot_expire_time_config)
        try:
            layout = native_layout(message, first_column)
        except ValueError as error:  # a row beyond what the core can address
            raise ConfigError(f"table {name!r}: {error}") from None
        self.serving = layout.serving
        kinds = {segment.comp_config.WhichOneof("type") for segment in message.entry_config.segments}
        self.finite_values = not layout.serving and on_bad_gradient != "ignore" and kinds <= {None, "fp32", "fp16"}
        """Whether `assign` and `assign_add` refuse NaN and infinity; quantised rows have a meaning for them."""
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
        """Makes what holds the rows; the native table that the filter belongs to."""
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
        """The native table, for native code that reads rows while this one lives; None where rows are on a GPU."""
        return None if self.on_gpu else self._native

    def staged(self) -> Any:
        """What has all rows in host memory, as ``_native``: this table, or a copy of one on a GPU."""
        return self

    def staging(self) -> Any:
        """What has the layout of this table's rows in host memory, as ``_native``."""
        return self

    def source(self, since: int = 0, *, stale: bool = False) -> Any:
        """What a save takes (`shoal.table.checkpoint.single.Source`): rows written since an epoch, or all of them.

        With ``stale`` also those that have expired.
        """
        return self._native, None if stale else self._expiry, since

    @property
    def changes(self) -> Any:
        """What is known of changes, for incremental checkpoints: epochs, and the ids removed since one."""
        return self._native

    def adopt(self, native: _core.Table) -> None:
        """Takes all rows of a native table of the same layout, its clock and its scales, in one step for readers."""
        about_to_change(self)
        self._native.swap_contents(native)
        _core.adopt_eviction(self._native, native)
        self._native.raise_max_update_time(native.max_update_time())
        self._native.set_scales(native.scales())

    def attach(self, sync_client: Any) -> None:
        """Has a sync client, or its handle, take the rows that change from now on, as ``sync_client=`` does."""
        attached = sync_handle(sync_client, self.name).attach_table(self.name, self.dim_size, self._client_lookup)
        if attached is not None:
            self._set_touched(*attached)

    def _set_touched(self, touched: Any, number: int) -> None:
        self._native.set_touched(touched, number)

    # --- changes, for copies elsewhere (shoal.table.tracking) ---------------------------------------------------------

    def track(self, tracker: _core.Tracker) -> None:
        """Tells a tracker of every row that is written or removed from now on."""
        self._native.track(tracker)

    def untrack(self, tracker: _core.Tracker) -> None:
        """Tells a tracker nothing more."""
        self._native.untrack(tracker)

    def settle(self) -> None:
        """Waits until trackers have been told of all writes so far, which is at once."""

    def all_ids(self) -> Iterator[Tensor]:
        """The ids that have a row, some at a time, int64 on the CPU. Writes may come in between."""
        for stripe in range(_core.Table.num_stripes):
            yield torch.from_numpy(np.frombuffer(self._native.ids(stripe), np.int64).copy())

    def fetch_bytes(self, ids: Tensor, begin: int, end: int) -> tuple[Tensor, int]:
        """Bytes ``begin`` to ``end`` of the rows of ``ids``: uint8 ``[n, end - begin]`` on the CPU, as checkpoints have
        them (weights, then the optimizer's state), zeros for an id without a row; and how many have one."""
        ids, out = ids.contiguous(), torch.empty(ids.numel(), end - begin, dtype=torch.uint8, device="cpu")
        args = ids.data_ptr(), ids.numel(), begin, end - begin, out.data_ptr(), 0
        return out, _core.fetch_bytes(self._native, *args)

    def fetch_times(self, ids: Tensor) -> Tensor:
        """The times of the rows of ``ids``: int64 ``[n]`` on the CPU, 0 for an id without a row."""
        ids, times = ids.contiguous(), torch.empty(ids.numel(), dtype=torch.int64, device="cpu")
        _core.fetch_bytes(self._native, ids.data_ptr(), ids.numel(), 0, 0, 0, times.data_ptr())
        return times

    def fetch_kept(self, ids: Tensor) -> Tensor:
        """What the policy of a budget keeps of ``ids``, as checkpoints have it: int64 ``[n]`` on the CPU."""
        ids, kept = ids.contiguous(), torch.empty(ids.numel(), dtype=torch.int64, device="cpu")
        _core.policy_keys(self._native, ids.data_ptr(), ids.numel(), kept.data_ptr(), lasting=True)
        return kept

    @abstractmethod
    def _client_lookup(self, ids: Tensor) -> Tensor:
        """The rows of ``ids`` for a sync client, on CPU tensors."""

    def scales(self) -> list[float]:
        """What the optimizer of each segment keeps for the segment as a whole."""
        return self._host.scales()

    def training_state(self) -> dict[str, Any]:
        """What a table has besides its rows that its next updates depend on, as JSON: its clock, counts and scales."""
        host = self._host
        state = {"max_update_time": host.max_update_time(), "calls": host.calls(), "scales": host.scales()}
        return {**state, "eviction": self._eviction_state()} if self.has_budget else state

    def set_training_state(self, state: dict[str, Any]) -> None:
        """Takes what `training_state` gave; what is not in ``state`` stays."""
        host = self._host
        if "calls" in state:
            host.set_calls(state["calls"])
        if "max_update_time" in state:
            host.raise_max_update_time(state["max_update_time"])
        if "scales" in state:
            host.set_scales(state["scales"])
        if "eviction" in state and self.has_budget:
            self._set_eviction_state(state["eviction"])

    # --- what every update asks ---------------------------------------------------------------------------------------

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
        """Refuses an operation that serving entries do not have."""
        if self.serving:
            raise UnsupportedError(f"table {self.name!r}: {operation} is not supported by serving entries")

    # --- the rest -----------------------------------------------------------------------------------------------------

    def to_proto(self) -> HashTableProto:
        """A handle that `from_proto` finds this table by, in this process."""
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
        """The registered table that a handle names."""
        return registry.find(proto.shared_name or proto.table_tensor)

    def close(self) -> None:
        """Stops background eviction. The table itself stays usable."""
        if self._eviction is not None:
            self._eviction.stop()
            self._eviction = None


def sync_handle(sync_client: Any, name: str) -> Any:
    """What a table attaches itself to: the handle of a sync client, or None."""
    handle = getattr(sync_client, "handle", sync_client)
    if handle is not None and not hasattr(handle, "attach_table"):
        raise ConfigError(
            f"table {name!r}: sync_client must be one of create_parameter_sync_clients(), got "
            f"{type(sync_client).__name__}"
        )
    return handle
