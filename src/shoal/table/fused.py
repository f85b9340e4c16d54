"""Operations over several tables and several sources of ids in one call, and the gradient of a summed lookup."""

from __future__ import annotations

import array
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from shoal import _core
from shoal.buffers import empty_flat
from shoal.errors import ConfigError, DataError
from shoal.host import as_tensor
from shoal.table.arguments import as_flat, as_ids, as_int, as_time, check_rates
from shoal.table.checkpoint.copies import WAITING, about_to_change
from shoal.table.clock import Now
from shoal.table.config.messages import EntryDump
from shoal.table.table import HashTable

INT32_MAX = (1 << 31) - 1
_FEW = 128  # for at most this many blocks, Python is faster than torch


def fused_lookup(
    tables: Sequence[HashTable], ids: Tensor, fused_slot_size: Tensor, num_of_shards: int, req_time: Any = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Looks up ids from N shards in K tables.

    Args:
        tables: in the order of the blocks, sorted by name.
        ids: int64, block after block; block ``s * K + k`` holds the ids from shard s for table k.
        fused_slot_size: int32 ``[K * N]``, the number of ids in each block.
        num_of_shards: N.
        req_time: has no effect.

    Returns:
        ``(embeddings, embedding_splits, id_offsets, embedding_offsets, indices)``: the rows in the order of ``ids`` as
        one flat float32 vector; int32 ``[N]``, the number of floats for each shard; int32 ``[K * N + 1]``, where each
        block's ids start; the same for its floats; and ``ids`` unchanged.
    """
    name = table_names(tables)
    ids = as_ids(ids, name, device=_device(tables)).view(-1)
    blocks = _blocks(tables, ids, fused_slot_size, num_of_shards, name)
    splits, begins, ends = blocks.sizes_and_offsets(name)  # raises before memory is allocated for the rows
    out = lookup_blocks(tables, ids, blocks.sizes, num_of_shards, blocks.floats)
    return out, splits, begins, ends, ids


def lookup_blocks(tables: Sequence[HashTable], ids: Tensor, sizes: Tensor, sources: int, floats: int) -> Tensor:
    """The native part of `fused_lookup`; its arguments must have been checked."""
    if tables and tables[0].on_gpu:
        from shoal.table.cuda.multi import lookup_blocks as on_gpu

        return on_gpu(tables, ids, sizes, sources, floats)
    out = empty_flat(floats)
    _core.fused_lookup(
        [table._native for table in tables],
        sizes.data_ptr(),
        sources,
        ids.data_ptr(),
        ids.numel(),
        out.data_ptr(),
        floats,
    )
    return out


def fused_apply_gradient(
    tables: Sequence[HashTable],
    ids: Tensor,
    indices: Tensor | None,
    fused_slot_size: Tensor,
    id_grads: Tensor,
    id_offsets: Tensor | None,
    grad_offsets: Tensor | None,
    learning_rate_tensors: Tensor | Sequence[float],
    req_time: Any,
    global_step: Any,
    num_of_shards: int,
    enable_grad_accumulation: bool = False,
) -> list[HashTable]:
    """Runs ``apply_gradients`` on every block of `fused_lookup`, shard 0 first.

    An id that comes from two shards makes two optimizer steps. ``enable_grad_accumulation`` sums the gradients of equal
    ids within one block. ``learning_rate_tensors`` holds the rates of the tables' segments, table after table. The
    offsets are those that `fused_lookup` returned. Everything is checked before anything changes.
    """
    name = table_names(tables)
    device = _device(tables)
    ids = as_ids(ids, name, device=device).view(-1)
    blocks = _blocks(tables, ids, fused_slot_size, num_of_shards, name)
    _check_offsets("id_offsets", "ids", id_offsets, blocks.id_offsets, name)
    _check_offsets("grad_offsets", "floats", grad_offsets, blocks.offsets, name)
    if indices is not None and (given := as_tensor(indices).numel()) != ids.numel():
        raise ConfigError(f"table {name!r}: indices must have {ids.numel()} elements, one per id, got {given}")
    grads = as_flat(id_grads, blocks.floats, name, "id_grads", device)
    if isinstance(learning_rate_tensors, list) and all(type(rate) is float for rate in learning_rate_tensors):
        rates = array.array("f", learning_rate_tensors).tolist()  # rounded to float32, as in native code
    else:
        rates = torch.as_tensor(learning_rate_tensors, dtype=torch.float32, device="cpu").reshape(-1).tolist()
    needed = sum(len(table.table_config.entry_config.segments) for table in tables)
    if len(rates) != needed:
        raise ConfigError(
            f"table {name!r}: learning_rate_tensors must have {needed} rates, one per segment, got {len(rates)}"
        )
    check_rates(rates, name)
    step = as_int(global_step, name, "global_step")
    seconds = as_time(req_time, name, clocked=any(table.clocked for table in tables))
    apply_blocks(tables, ids, blocks.sizes, num_of_shards, grads, rates, step, seconds, bool(enable_grad_accumulation))
    return list(tables)


def apply_blocks(
    tables: Sequence[HashTable],
    ids: Tensor,
    sizes: Tensor,
    sources: int,
    grads: Tensor,
    rates: Sequence[float],
    step: int,
    seconds: int,
    dedup: bool,
) -> None:
    """The native part of `fused_apply_gradient`; the shapes of its arguments must have been checked."""
    for table in tables:
        table.check_trains("fused_apply_gradient")
        table._check_step(step)
    if WAITING:
        about_to_change(*tables)
    if tables and tables[0].on_gpu:
        from shoal.table.cuda.multi import apply_blocks as on_gpu

        return on_gpu(tables, ids, sizes, sources, grads, rates, step, seconds, dedup)
    try:
        skipped = _core.fused_apply_gradients(
            [table._native for table in tables],
            sizes.data_ptr(),
            sources,
            ids.data_ptr(),
            ids.numel(),
            grads.data_ptr(),
            grads.numel(),
            list(rates),
            step,
            seconds,
            dedup,
            [table._bad_gradient for table in tables],
            isinstance(seconds, Now),
        )
    except ValueError as error:
        raise ConfigError(f"table {table_names(tables)!r}: {error}; nothing was applied") from None
    for table, count in zip(tables, skipped, strict=True):
        table._count_skipped(count)
    return None


class _Blocks:
    """The blocks of a call: their sizes, and where their ids and their floats start; int64, never written to."""

    def __init__(self, shards: int, sizes: Tensor, id_offsets: Tensor, offsets: Tensor) -> None:
        self._shards, self.sizes, self.id_offsets, self.offsets = shards, sizes, id_offsets, offsets
        self.floats = int(offsets[-1])
        self._sizes_and_offsets: tuple[Tensor, ...] | None = None

    def sizes_and_offsets(self, name: str) -> tuple[Tensor, ...]:
        """The number of floats for each shard and both offsets: new int32 tensors, which belong to the caller."""
        if self._sizes_and_offsets is None:
            tables = self.sizes.numel() // self._shards
            splits = self.offsets[::tables].diff() if tables else self.offsets.new_zeros(self._shards)
            self._sizes_and_offsets = tuple(
                _int32(numbers, name) for numbers in (splits, self.id_offsets, self.offsets)
            )
        return tuple(numbers.clone() for numbers in self._sizes_and_offsets)


def _blocks(tables: Sequence[HashTable], ids: Tensor, fused_slot_size: Any, num_of_shards: int, name: str) -> _Blocks:
    """Checks ``fused_slot_size`` and returns the blocks that it divides ids into."""
    sizes = torch.as_tensor(fused_slot_size, device="cpu")
    if sizes.dtype not in (torch.int32, torch.int64):
        raise ConfigError(f"table {name!r}: fused_slot_size must be int32, got {sizes.dtype}")
    if num_of_shards < 1:
        raise ConfigError(f"table {name!r}: num_of_shards must be at least 1, got {num_of_shards}")
    if sizes.numel() != len(tables) * num_of_shards:
        raise ConfigError(
            f"table {name!r}: fused_slot_size must have {len(tables) * num_of_shards} elements ({len(tables)} tables x "
            f"{num_of_shards} shards), got {sizes.numel()}"
        )
    few = sizes.reshape(-1).tolist() if sizes.numel() <= _FEW else None
    least, total = (min(few, default=0), sum(few)) if few is not None else (int(sizes.min()), int(sizes.sum()))
    if least < 0:
        raise ConfigError(f"table {name!r}: fused_slot_size must be >= 0, got {least}")
    if total != ids.numel():
        raise ConfigError(
            f"table {name!r}: fused_slot_size must add up to the number of ids, {ids.numel()}, got {total}"
        )
    dims = [table.dim_size for table in tables]
    if few is not None:
        return _few_blocks(num_of_shards, tuple(few), tuple(dims))
    sizes = sizes.reshape(-1).long().contiguous()
    floats = sizes * torch.tensor(dims, dtype=torch.int64, device="cpu").repeat(num_of_shards)
    return _Blocks(num_of_shards, sizes, _offsets(sizes), _offsets(floats))


@functools.lru_cache(maxsize=64)
def _few_blocks(shards: int, sizes: tuple[int, ...], dims: tuple[int, ...]) -> _Blocks:
    """Blocks for sizes that often repeat from one call to the next, cached."""
    floats = [size * dim for size, dim in zip(sizes, itertools.cycle(dims), strict=False)]
    begins = [[0, *itertools.accumulate(counts)] for counts in (sizes, floats)]
    numbers = (torch.tensor(counts, dtype=torch.int64, device="cpu") for counts in (sizes, *begins))
    return _Blocks(shards, *numbers)


def _offsets(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def _int32(values: Tensor, name: str) -> Tensor:
    if values.numel() and int(values.max()) > INT32_MAX:
        raise ConfigError(f"table {name!r}: {int(values.max())} floats do not fit int32 offsets; use smaller batches")
    return values.to(torch.int32, copy=True)


def _check_offsets(what: str, of: str, given: Any, expected: Tensor, name: str) -> None:
    if given is None:
        return
    flat = torch.as_tensor(given, device="cpu").reshape(-1).long()
    short = expected[:-1]  # the last offset follows from the others
    if not (torch.equal(flat, expected) or torch.equal(flat, short)):
        raise ConfigError(
            f"table {name!r}: {what} must be the start of each block's {of}, {_shown(expected)}, got {_shown(flat)}"
        )


def _shown(offsets: Tensor) -> str:
    return f"{offsets[:8].tolist()}{'...' if offsets.numel() > 8 else ''}"


def _device(tables: Sequence[HashTable]) -> torch.device:
    """The device of the tables' tensors."""
    devices = {table.device for table in tables} or {torch.device("cpu")}
    if len(devices) > 1 or len({table.on_gpu for table in tables}) > 1:
        raise ConfigError(
            f"table {table_names(tables)!r}: tables must be on one device, got {sorted(map(str, devices))}"
        )
    return next(iter(devices))


def table_names(tables: Sequence[HashTable]) -> str:
    """The name of several tables in messages."""
    names = [table.name for table in itertools.islice(tables, 3)]
    return f"{', '.join(names)}{', ...' if len(tables) > 3 else ''}"


def hash_table_lookup_gradient(id_indices: Tensor, id_values: Tensor, input_grads: Tensor) -> tuple[Tensor, Tensor]:
    """Distributes the gradients of summed rows to the ids that were summed.

    ``id_indices`` is int64 ``[n, 2]`` with the row of each id first, ``id_values`` the ids ``[n]``, ``input_grads``
    ``[B, dim]``. Returns the ids, and for each the gradient of its row: ``[n, dim]``.
    """
    rows = as_tensor(id_indices)
    ids = as_tensor(id_values)
    if rows.dim() != 2 or rows.shape[1] != 2 or rows.shape[0] != ids.numel():
        raise ConfigError(f"id_indices must be [{ids.numel()}, 2] for {ids.numel()} ids, got {list(rows.shape)}")
    if input_grads.dim() != 2:
        raise ConfigError(f"input_grads must be [B, dim], got {list(input_grads.shape)}")
    first = rows[:, 0].long()
    if first.numel() and not 0 <= int(first.min()) <= int(first.max()) < input_grads.shape[0]:
        worst = int(first.min()) if int(first.min()) < 0 else int(first.max())
        raise ConfigError(f"the rows in id_indices must be in [0, {input_grads.shape[0]}), got {worst}")
    return ids, input_grads[first]


def extract_slot_from_entry(entries: Sequence[bytes], fid_v2: bool = True) -> Tensor:
    """int32 ``[n]``: the slot of the id in each serialized ``EntryDump``, by the v2 rule or the v1 rule."""
    from shoal.fid import slot_v1, slot_v2

    rule = slot_v2 if fid_v2 else slot_v1
    slots = []
    for index, entry in enumerate(entries):
        try:
            slots.append(rule(EntryDump.FromString(entry).id))
        except Exception as error:
            raise DataError(f"entry {index} is not a serialized EntryDump ({len(entry)} bytes)") from error
    return torch.tensor(slots, dtype=torch.int32, device="cpu")


def concatenated_rates(tables: list[HashTable], global_step: Any) -> list[float]:
    """The learning rates of the tables' segments, table after table."""
    step = as_int(global_step, table_names(tables), "global_step")
    return [rate for table in tables for rate in table.rates(step)]


class FusedCalls:
    """Mixin with the fused calls, for classes that hold tables by name."""

    _tables: dict[str, Any]

    def _fused_tables(self) -> list[HashTable]:
        for name, table in self._tables.items():
            if not isinstance(table, HashTable):
                raise ConfigError(
                    f"slot {name!r}: the table of a fused operation must be a local HashTable, got "
                    f"{type(table).__name__}"
                )
        return list(self._tables.values())

    def fused_lookup(
        self, ids: Tensor, fused_slot_size: Tensor, num_of_shards: int, req_time: Any = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """`shoal.table.fused_lookup` over all tables, by sorted name."""
        return fused_lookup(self._fused_tables(), ids, fused_slot_size, num_of_shards, req_time)

    def fused_apply_gradient(
        self,
        ids: Tensor,
        indices: Tensor | None,
        fused_slot_size: Tensor,
        id_grads: Tensor,
        id_offsets: Tensor | None,
        grad_offsets: Tensor | None,
        global_step: Any,
        req_time: Any,
        num_of_shards: int,
        enable_grad_accumulation: bool = False,
    ) -> Self:
        """`shoal.table.fused_apply_gradient` over all tables, with their learning rates at ``global_step``."""
        tables = self._fused_tables()
        fused_apply_gradient(
            tables,
            ids,
            indices,
            fused_slot_size,
            id_grads,
            id_offsets,
            grad_offsets,
            concatenated_rates(tables, global_step),
            req_time,
            global_step,
            num_of_shards,
            enable_grad_accumulation,
        )
        return self
