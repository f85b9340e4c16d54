"""Routes ids to shards, de-duplicated, and puts the rows that come back at every occurrence of their id."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.buffers import empty_flat, empty_of, empty_rows
from shoal.errors import ConfigError
from shoal.fid import shard_of
from shoal.ops.fused_gather import fused_gather_embeddings_by_input, fused_gather_embeddings_by_input_gradient
from shoal.ops.reorder import fused_reorder_by_indices
from shoal.ops.split import split_by_indices


class Route:
    """One batch of K id lists over S shards.

    ``ids[s]`` holds the distinct ids of shard ``s``, list after list in first-seen order; ``counts[s][k]`` of them
    belong to list ``k``. Their rows, shard after shard, form one flat buffer; shard ``s`` fills ``floats[s]`` of it.
    """

    def __init__(self, id_lists: Sequence[Tensor], num_shards: int, dims: Sequence[int]) -> None:
        fused = fused_reorder_by_indices(list(id_lists), num_shards, list(dims), rank0_empty_shard=False)
        k = len(dims)
        sizes = fused.sharded_slot_sizes.tolist()
        self.dims = list(dims)
        self.counts = [sizes[s * k : (s + 1) * k] for s in range(num_shards)]
        self.ids = list(torch.split(fused.output, [sum(counts) for counts in self.counts]))
        floats = [sum(n * d for n, d in zip(counts, dims, strict=True)) for counts in self.counts]
        edges = [0, *itertools.accumulate(floats)]
        self.floats = [slice(a, b) for a, b in itertools.pairwise(edges)]
        self.size = edges[-1]
        self._edges = edges
        self._offsets = [
            o.contiguous() for o in torch.split(fused.fused_embedding_offsets, fused.emb_offset_sz.tolist())
        ]

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Per list ``[n, dim]``, repeated ids included; ``parts[s]`` are the flat rows of shard ``s``."""
        for s, part in enumerate(parts):
            if part.numel() != self._edges[s + 1] - self._edges[s]:
                raise ConfigError(
                    f"shard {s} must return {self._edges[s + 1] - self._edges[s]} floats, got {part.numel()}"
                )
        addresses = [part.data_ptr() for part in parts]
        result = []
        for offsets, dim in zip(self._offsets, self.dims, strict=True):
            n = offsets.numel()
            rows = empty_rows(n, dim)
            if n:
                _core.gather_from_parts(addresses, self._edges, offsets.data_ptr(), n, dim, rows.data_ptr())
            result.append(rows)
        return result

    def scatter(self, grads: Sequence[Tensor]) -> Tensor:
        """The flat buffer of gradients, shard after shard; gradients of equal ids are summed."""
        return scatter_rows(self.size, grads, self._offsets, self.dims)


class RowRoute:
    """One batch of ids of K tables of one dim over S shards, as one int64 tensor that autograd can keep (``packed``).

    ``ids[s]`` holds the distinct ids of shard ``s``, table after table in first-seen order; ``counts[s][k]`` of them
    belong to table ``k``. Their rows, shard after shard, form one flat buffer; shard ``s`` fills the floats
    ``edges[s]`` to ``edges[s + 1]``. ``offsets``, int32, has the place of each id's row in the buffer, -1 for an id
    without a row.
    """

    def __init__(self, packed: Tensor, n: int, num_shards: int, num_tables: int, dim: int) -> None:
        head = _head(num_shards, num_tables)
        distinct = packed.numel() - head - _words(n)
        sizes = packed[:head].view(torch.int32).tolist()
        k = num_tables
        self.packed = packed
        self.counts = [sizes[s * k : (s + 1) * k] for s in range(num_shards)]
        of_shards = [sum(counts) for counts in self.counts]
        self.ids = list(packed[head : head + distinct].split(of_shards))
        self.edges = [0, *itertools.accumulate(size * dim for size in of_shards)]
        self.offsets = packed[head + distinct :].view(torch.int32)[:n]

    @classmethod
    def of(
        cls, id_lists: Sequence[Tensor], num_shards: int, dim: int, n: int, positions: Tensor | None = None
    ) -> RowRoute:
        """Route the ids of each table: a batch of ``n`` ids in order, or those at ``positions`` of it."""
        lengths, k = [ids.numel() for ids in id_lists], len(id_lists)
        work = _core.FusedReorder([ids.data_ptr() for ids in id_lists], lengths, num_shards, 0, [dim] * k)
        head = _head(num_shards, k)
        packed = empty_of(head + work.size + _words(n), torch.int64)
        sizes = packed.data_ptr()
        route = packed[head + work.size :].view(torch.int32)[:n]
        offsets = route if positions is None else torch.empty(sum(lengths), dtype=torch.int32, device="cpu")
        work.finish(sizes + 8 * head, sizes + 4 * num_shards * k, sizes, offsets.data_ptr())
        if positions is not None:
            route.fill_(-1).index_copy_(0, positions, offsets)
        return cls(packed, n, num_shards, k, dim)


def _words(numbers: int) -> int:
    """The number of int64s that hold ``numbers`` int32s."""
    return (numbers + 1) // 2


def _head(num_shards: int, num_tables: int) -> int:
    """The number of int64s before the ids: a count per shard and table, then one per shard, all int32."""
    return _words(num_shards * num_tables + num_shards)


def gather_rows(flat: Tensor, offsets: Tensor, dim: int) -> Tensor:
    """``[n, dim]``: the rows that start at int32 ``offsets`` of a flat float32 buffer, on the buffer's device."""
    if flat.is_cuda:
        return fused_gather_embeddings_by_input(flat, [offsets], [dim])[0]
    n = offsets.numel()
    rows = empty_rows(n, dim)
    if n:
        offsets = offsets.contiguous()
        _core.gather_from_parts([flat.data_ptr()], [0, flat.numel()], offsets.data_ptr(), n, dim, rows.data_ptr())
    return rows


def scatter_rows(
    size: int, grads: Sequence[Tensor], offsets: Sequence[Tensor], dims: Sequence[int], scale: float = 1.0
) -> Tensor:
    """A flat buffer with the sum of ``scale * grads[k]`` at the int32 ``offsets[k]``, on the gradients' device."""
    if any(grad.is_cuda for grad in grads):
        return fused_gather_embeddings_by_input_gradient(size, list(grads), list(offsets), dims, scale)
    flat = empty_flat(size)
    grads, offsets = [g.contiguous() for g in grads], [o.contiguous() for o in offsets]
    for grad, offset, dim in zip(grads, offsets, dims, strict=True):
        if grad.shape != (offset.numel(), dim) or grad.dtype != torch.float32:
            raise ConfigError(
                f"gradients must be float32 [{offset.numel()}, {dim}], got {grad.dtype} {list(grad.shape)}"
            )
    _core.fused_gather_gradient(
        flat.data_ptr(), size, 4, scale, [o.data_ptr() for o in offsets], [False] * len(grads),
        [g.data_ptr() for g in grads], [o.numel() for o in offsets], list(dims),
    )  # fmt: skip
    return flat


def split_rows(ids: Tensor, values: Tensor | None, num_shards: int) -> tuple[list[Tensor], list[Tensor]]:
    """Ids and their rows by shard, in input order, duplicates included."""
    if num_shards == 1:
        return [ids], [values] if values is not None else []
    shards = shard_of(ids, num_shards)
    parts = split_by_indices(shards, ids, num_shards)
    return parts, split_by_indices(shards, values, num_shards) if values is not None else []


def positions_of_shards(ids: Tensor, num_shards: int) -> list[Tensor]:
    """The positions of each shard's ids."""
    shards = shard_of(ids, num_shards)
    return [(shards == s).nonzero().view(-1) for s in range(num_shards)]


def check_slots(slots: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for slot in slots:
        if slot not in known:
            raise KeyError(f"there is no slot {slot!r}; slots are {', '.join(sorted(known)) or 'none'}")


def part_count(num_ps: int) -> int:
    """The number of parts of tables on ``num_ps`` servers; 0 means one part, in this process."""
    if num_ps < 0:
        raise ConfigError(f"the number of servers must be >= 0, got {num_ps}")
    return max(1, num_ps)


def one_dim(parts: Sequence[Any], what: str) -> int:
    dims = {part.dim_size for part in parts}
    if len(dims) != 1:
        raise ConfigError(
            f"{what}: all parts must have the same dimension, got {sorted(dims)}; build them from one config"
        )
    return dims.pop()
