"""`HashTable`: a row of weights and optimizer state for every distinct id."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from shoal import _core
from shoal.buffers import empty_rows
from shoal.errors import ConfigError, UnsupportedError
from shoal.table import registry
from shoal.table.arguments import as_ids, as_int, as_rows, as_time
from shoal.table.base import TableBase
from shoal.table.budget.limits import MemoryBudget
from shoal.table.budget.policies import Evict, EvictionPolicy
from shoal.table.checkpoint.copies import about_to_change
from shoal.table.clock import Now, now
from shoal.table.config.entry import HashTableConfigInstance
from shoal.table.config.learning_rate import LearningRate
from shoal.table.config.options import config_of_options
from shoal.table.local import LocalGroup
from shoal.table.protocol import Group

# Methods that take addresses are called on the class: torch.compile leaves them to the interpreter and loses the object
# of a bound method.
_Native = _core.Table
_anonymous = itertools.count()


class HashTable(TableBase):
    """A table of rows keyed by int64 ids.

    >>> import shoal, torch
    >>> table = shoal.HashTable(dim=2, optimizer=shoal.Sgd(lr=0.5), initializer="zeros")
    >>> _ = table.assign(torch.tensor([7, 8]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> table.lookup(torch.tensor([8, 9]))
    tensor([[3., 4.],
            [0., 0.]])

    Every id has its own row, created by the first write; the table grows without a pause. All methods are thread-safe,
    release the GIL during native work, and read or write each row atomically. Writes return ``self``. A call that fails
    changes nothing.

    A write stamps its rows with ``req_time``, in seconds; expiry counts from that stamp. Without ``req_time``, the
    stamp is the current time, unless the row's stamp is later. A time more than a day ahead of the clock is rejected.
    (Tables made from a configuration, with `from_config` or `hash_table_from_config`, use 0 if no time is given, and
    accept every time.)

    Args:
        dim: width of an embedding.
        optimizer: updates a row that receives a gradient: ``shoal.Adagrad(lr=0.05)``, a name such as ``"adam"``, or a
            configuration of `shoal.table`.
        initializer: the weights of a new row: ``"uniform"`` (within 0.05 of zero), ``"zeros"``, or a configuration of
            `shoal.table`. The numbers depend only on ``seed`` and the id, not on threads or order.
        expire_after: rows not written for this long are removed by `evict` and left out of checkpoints: a
            ``timedelta`` or text such as ``"30d"`` or ``"12h"``, in whole hours; None: never.
        max_rows: the most rows the table can have. At the limit, ``evict`` chooses which rows leave. None: unlimited.
        max_bytes: the most bytes of index and rows: a number, text such as ``"8GiB"``, or a `MemoryBudget` that
            several tables share. Lower it when the machine swaps; raise it when ``eviction_stats().age_mean_s`` is
            shorter than the time between two visits of the same id.
        evict: which rows leave a full table: `Lru` (the default), `Slru`, `Lfu`, `EpochLru`, `EpochLfu`, `Score`, or a
            custom `EvictionPolicy`. See docs/budgets.md.
        lr: overrides the optimizer's learning rate.
        hash_filter: decides whether a new id gets a row (`create_hash_filter`).
        on_bad_gradient: on a NaN or infinite gradient: ``"raise"`` before anything has changed, ``"skip"`` that
            row and count it in ``skipped_gradients``, or ``"ignore"`` (no check).
        seed: for initializers and stochastic rounding; by default that of ``torch.manual_seed``.
        name: used in messages, checkpoints and metrics.
        device: ``"cuda"`` keeps index and rows in GPU memory; ids, values and results are then tensors of that device.
            See docs/gpu.md.
        deterministic: on CUDA, makes the sums of equal ids' gradients bitwise equal in every run. CPU tables are
            always deterministic.
    """

    def __init__(
        self,
        dim: int,
        *,
        optimizer: Any = "adagrad",
        initializer: Any = "uniform",
        expire_after: timedelta | str | None = None,
        lr: LearningRate | None = None,
        hash_filter: Any = None,
        on_bad_gradient: Literal["raise", "skip", "ignore"] = "raise",
        seed: int | None = None,
        name: str | None = None,
        device: Any = "cpu",
        deterministic: bool = False,
        max_rows: int | None = None,
        max_bytes: int | str | MemoryBudget | None = None,
        evict: Evict | EvictionPolicy | str | None = None,
    ) -> None:
        name = f"HashTable_{next(_anonymous)}" if name is None else name
        self._build(
            config_of_options(
                name, dim, optimizer=optimizer, initializer=initializer, expire_after=expire_after, lr=lr,
                max_rows=max_rows, max_bytes=max_bytes, evict=evict,
            ),
            name,
            hash_filter=hash_filter,
            on_bad_gradient=on_bad_gradient,
            seed=seed,
            device=device,
            deterministic=deterministic,
            clocked=True,
            evict=evict,
            budget=max_bytes if isinstance(max_bytes, MemoryBudget) else None,
        )  # fmt: skip

    if not TYPE_CHECKING:  # editors and type checkers see the arguments of __init__

        def __new__(cls, *args: Any, device: Any = "cpu", **kwargs: Any) -> HashTable:
            if cls is HashTable and _is_cuda(device):
                try:
                    from shoal.table.cuda.table import CudaHashTable
                except ModuleNotFoundError as error:
                    if error.name != "triton":
                        raise
                    raise UnsupportedError(f"device={device!r} needs triton; torch's CUDA wheels include it") from None
                cls = CudaHashTable
            return object.__new__(cls)

    @classmethod
    def from_config(
        cls,
        config: HashTableConfigInstance,
        *,
        name: str,
        hash_filter: Any = None,
        sync_client: Any = None,
        saver_parallel: int = -1,
        on_bad_gradient: Literal["raise", "skip", "ignore"] = "raise",
        seed: int | None = None,
        device: Any = "cpu",
        deterministic: bool = False,
        clocked: bool = False,
        first_column: int = 0,
        evict: EvictionPolicy | None = None,
        budget: MemoryBudget | None = None,
    ) -> HashTable:
        """A table from a full configuration: several segments, serving entries, quantized lookups.

        With ``clocked``, as with ``HashTable(dim)``, a write without a time uses the current time, and a time more than
        a day ahead is rejected. If rows are slices of wider rows, ``first_column`` is the column of the wider row where
        they start; initial values depend on it. Limits are part of the configuration (``eviction``); ``evict`` is a
        custom policy, ``budget`` a budget that several tables share.
        """
        table = cls.__new__(cls, device=device)  # pyrefly: ignore[unexpected-keyword]
        table._build(
            config,
            name,
            hash_filter=hash_filter,
            sync_client=sync_client,
            saver_parallel=saver_parallel,
            on_bad_gradient=on_bad_gradient,
            seed=seed,
            device=device,
            deterministic=deterministic,
            clocked=clocked,
            first_column=first_column,
            evict=evict,
            budget=budget,
        )
        return table

    # --- as a group (shoal.table.protocol) ----------------------------------------------------------------------------

    def group_key(self) -> Hashable:
        """Tables with equal keys can be read and updated in one call."""
        return "local", self.dim_size, self.serving

    @staticmethod
    def make_group(tables: tuple[Any, ...]) -> Group:
        """The group of tables with equal keys."""
        return LocalGroup(tables)

    # --- reading ------------------------------------------------------------------------------------------------------

    def lookup(
        self,
        ids: Tensor,
        use_multi_threads: bool = False,
        enable_dedup: bool = False,
        *,
        insert_missing: bool = False,
        req_time: Any = None,
    ) -> Tensor:
        """The embeddings of ``ids`` (any shape, flattened): float32 ``[n, dim]``.

        An unknown id gives zeros and gets no row. With ``insert_missing``, it gets a row from its initializer instead
        (unless the filter rejects it), stamped ``req_time``. ``use_multi_threads`` and ``enable_dedup`` have no effect:
        batches are always spread over `shoal.num_threads` threads.
        """
        ids = as_ids(ids, self.name)
        n = ids.numel()
        out = empty_rows(n, self.dim_size)
        if insert_missing:
            self.check_trains("lookup with insert_missing")
            about_to_change(self)
            seconds = self._time(req_time)
            at_least = isinstance(seconds, Now)
            _Native.lookup_or_insert(self._native, ids.data_ptr(), n, seconds, out.data_ptr(), at_least)
        else:
            _Native.lookup(self._native, ids.data_ptr(), n, out.data_ptr(), 0)
        return out

    def initial_rows(self, ids: Tensor) -> Tensor:
        """The initial embeddings of ``ids``: float32 ``[n, dim]``, a function of seed and id. Changes nothing."""
        ids = as_ids(ids, self.name, device=self.device).cpu()
        out = empty_rows(ids.numel(), self.dim_size)
        fresh = _core.Table(self.staging()._native.layout, self.seed)
        _Native.lookup_or_insert(fresh, ids.data_ptr(), ids.numel(), 0, out.data_ptr(), False)
        return out.to(self.device)

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The embeddings of ``ids`` (zeros if missing) and bool ``[n]``: which ids have a row. On the CPU."""
        ids = as_ids(ids, self.name)
        n = ids.numel()
        out, found = empty_rows(n, self.dim_size), torch.empty(n, dtype=torch.bool, device="cpu")
        _Native.lookup(self._native, ids.data_ptr(), n, out.data_ptr(), found.data_ptr())
        return out, found

    def contains(self, ids: Tensor) -> Tensor:
        """bool ``[n]``: which ids have a row."""
        ids = as_ids(ids, self.name)
        out = torch.empty(ids.numel(), dtype=torch.bool, device="cpu")
        _Native.contains(self._native, ids.data_ptr(), ids.numel(), out.data_ptr())
        return out

    def lookup_entry(self, ids: Tensor) -> list[bytes]:
        """Each id's row as a serialized ``EntryDump`` without its id; empty bytes for an unknown id."""
        self.check_trains("lookup_entry")
        return _core.lookup_entry(self._native, as_ids(ids, self.name).view(-1).tolist())

    def size(self) -> int:
        """The number of rows."""
        return self._native.size()

    def __len__(self) -> int:
        return self.size()

    def memory_bytes(self) -> int:
        """Bytes of index and rows; never more than ``max_bytes``, even while the table grows."""
        return self._native.bytes()

    @property
    def max_update_time(self) -> int:
        """The largest ``req_time`` of any write so far."""
        return self._native.max_update_time()

    # --- writing ------------------------------------------------------------------------------------------------------

    def assign(
        self, ids: Tensor, values: Tensor, req_time: Any = None, *, scores: Any = None, distinct: bool = False
    ) -> HashTable:
        """Sets the weights of ``ids`` (of equal ids, the last one counts); keeps optimizer state (fresh for a new row).

        ``scores``: for ``evict=Score()``, one number per id, or one for all. ``distinct`` promises that no id occurs
        twice, which saves a sort on a GPU.
        """
        return self._write(_Native.assign, ids, values, req_time, scores)

    def assign_add(self, ids: Tensor, values: Tensor, req_time: Any = None, *, scores: Any = None) -> HashTable:
        """Adds to the weights of ``ids``, every occurrence in order; a new id starts from its initializer."""
        return self._write(_Native.assign_add, ids, values, req_time, scores)

    def _write(self, write: Callable[..., None], ids: Any, values: Any, req_time: Any, scores: Any) -> HashTable:
        ids, values, seconds = self._write_arguments(ids, values, req_time)
        at_least = isinstance(seconds, Now)
        numbers = self._scores(ids, scores, seconds)
        about_to_change(self)
        try:
            write(
                self._native, ids.data_ptr(), ids.numel(), values.data_ptr(), seconds, at_least, self.finite_values,
                0 if numbers is None else numbers.data_ptr(),
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(f"table {self.name!r}: {error}; nothing was written") from None
        return self

    def apply_gradients(
        self,
        ids: Tensor,
        grads: Tensor,
        global_step: Any = 0,
        use_multi_threads: bool = False,
        enable_dedup: bool = False,
        req_time: Any = None,
        *,
        scores: Any = None,
    ) -> HashTable:
        """One optimizer step per occurrence of an id, in input order.

        With ``enable_dedup``, the gradients of equal ids are summed first and each distinct id makes one step. Learning
        rates are those at ``global_step``. New ids that pass the filter get a row from their initializer.
        """
        self.check_trains("apply_gradients")
        ids, grads, seconds = self._write_arguments(ids, grads, req_time, "grads")
        step = as_int(global_step, self.name, "global_step")
        numbers = self._scores(ids, scores, seconds)
        self._apply(ids, grads, self.rates(step), step, enable_dedup, seconds, numbers)
        return self

    def _apply(
        self,
        ids: Tensor,
        grads: Tensor,
        rates: Sequence[float],
        step: int,
        dedup: bool,
        seconds: int,
        scores: Tensor | None = None,
    ) -> None:
        """`apply_gradients` with checked arguments and given rates."""
        self._check_step(step)
        about_to_change(self)
        try:
            skipped = _Native.apply_gradients(
                self._native,
                ids.data_ptr(),
                ids.numel(),
                grads.data_ptr(),
                rates,
                step,
                seconds,
                dedup,
                self._bad_gradient,
                isinstance(seconds, Now),
                0 if scores is None else scores.data_ptr(),
            )
        except ValueError as error:
            raise ConfigError(
                f"table {self.name!r}: {error}; nothing was applied. Clip it, or set on_bad_gradient='skip'"
            ) from None
        self._count_skipped(skipped)

    def reinitialize(self, ids: Tensor) -> tuple[HashTable, Tensor]:
        """Resets weights and optimizer state; returns int32 ``[n]``, 1 if an id existed and 0 if it was inserted."""
        ids = as_ids(ids, self.name)
        existed = torch.empty(ids.numel(), dtype=torch.int32, device="cpu")
        about_to_change(self)
        _Native.reinitialize(self._native, ids.data_ptr(), ids.numel(), now(), existed.data_ptr(), self.clocked)
        return self, existed

    def erase(self, ids: Tensor) -> int:
        """Removes ids; returns how many of them had a row."""
        ids = as_ids(ids, self.name)
        about_to_change(self)
        return _Native.erase(self._native, ids.data_ptr(), ids.numel())

    def evict(self, max_update_time: Any = None) -> int:
        """Removes rows that have expired at ``max_update_time`` (default: the table's); returns their number."""
        now = self.max_update_time if max_update_time is None else as_int(max_update_time, self.name, "max_update_time")
        about_to_change(self)
        return self._native.evict(self._expiry, now)

    def clear(self) -> HashTable:
        """Removes all rows and frees their memory."""
        about_to_change(self)
        self._native.clear()
        return self

    def as_op(self, name: str | None = None) -> HashTable:
        """Waits until all calls on this table have been applied; a CPU table never waits."""
        return self

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, basename: str, random_sleep_ms: int = 0) -> HashTable:
        """Writes all rows that have not expired to ``<basename>-00000-of-0000N``; training may continue meanwhile."""
        from shoal.table.checkpoint import save_table

        self.check_trains("save")
        save_table(self, basename, random_sleep_ms=random_sleep_ms)
        return self

    def restore(self, basename: str, *, strict: bool = True) -> HashTable:
        """Replaces all rows with those of a checkpoint; if any of its files is damaged, the table is unchanged."""
        from shoal.table.checkpoint import restore_table

        restore_table(self, basename, strict=strict)
        return self

    def save_as_tensor(self, shard_idx: int, num_shards: int, limit: int, offset: int) -> tuple[int, list[bytes]]:
        """At most ``limit`` serialized entries of part ``shard_idx`` of ``num_shards``, from ``offset`` (first 0) on.

        Returns the next offset and the entries; fewer than ``limit`` means that the part is finished.
        """
        from shoal.table.checkpoint import save_as_tensor

        self.check_trains("save_as_tensor")
        return save_as_tensor(self, shard_idx, num_shards, limit, offset)

    def __deepcopy__(self, memo: dict[int, Any]) -> HashTable:
        """An independent table with the same rows and clock; it shares the filter, and has no sync client.

        A `MemoryBudget` becomes a limit of its own, of the same size.
        """
        from shoal.table.checkpoint.tensors import copy_table

        memo[id(self)] = other = copy_table(self)
        return other

    def __repr__(self) -> str:
        return f"HashTable({self.name!r}, dim={self.dim_size}, rows={self.size()})"

    def _write_arguments(
        self, ids: Any, values: Any, req_time: Any, what: str = "values"
    ) -> tuple[Tensor, Tensor, int]:
        ids = as_ids(ids, self.name)
        return ids, as_rows(values, ids.numel(), self.dim_size, self.name, what), self._time(req_time)

    def _time(self, req_time: Any) -> int:
        return as_time(req_time, self.name, clocked=self.clocked)

    def _client_lookup(self, ids: Tensor) -> Tensor:
        return self.lookup(ids)


def check_values(table: HashTable, values: Tensor) -> None:
    """Raises the error that ``table.assign`` would raise for these values, before anything is written."""
    if table.finite_values and not bool(torch.isfinite(values).all()):
        raise ConfigError(f"table {table.name!r}: a value holds NaN or infinity; nothing was written")


def _is_cuda(device: Any) -> bool:
    """Whether rows belong on a GPU. Any other device is rejected by the GPU table itself."""
    return device is not None and str(device).split(":")[0] != "cpu"


def hash_table_from_config(
    config: HashTableConfigInstance,
    hash_filter: Any = None,
    name_suffix: str = "",
    sync_client: Any = None,
    saver_parallel: int = -1,
    *,
    device: Any = "cpu",
) -> HashTable:
    """A registered table named ``MonolithHashTable_<name_suffix>``; see `HashTable.from_config`.

    ``device="cuda"`` keeps its rows in GPU memory.

    Raises:
        ConfigError: a table of that name exists.
    """
    name = f"MonolithHashTable_{name_suffix}"
    return registry.register(
        name,
        lambda: HashTable.from_config(
            config, name=name, hash_filter=hash_filter, sync_client=sync_client, saver_parallel=saver_parallel,
            device=device,
        ),
    )  # fmt: skip
