"""`reorder_by_indices` and `fused_reorder_by_indices`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import ConfigError
from shoal.ops import checks
from shoal.ops._op import Op, new_size
from shoal.ops.reorder import reference
from shoal.switches import switch

EMPTY_RANK0_VARIABLE = "MONOLITH_SYNC_EMPTY_RANK0_PS_SHARD"


def empty_shards(num_of_shards: int, rank0_empty_shard: bool | None = None) -> int:
    """The number of leading shards to keep empty: 1 if requested, or by default with more than four shards.

    ``MONOLITH_SYNC_EMPTY_RANK0_PS_SHARD`` in the environment (1 unless set) can turn the default off.
    """
    if rank0_empty_shard is None:
        return int(num_of_shards > 4 and switch(EMPTY_RANK0_VARIABLE, 1) == 1)
    if rank0_empty_shard and num_of_shards < 2:
        raise ConfigError(f"num_of_shards must be at least 2 with rank0_empty_shard, got {num_of_shards}")
    return int(rank0_empty_shard)


def reorder_by_indices(input: Any, shard_ids: Any, num_of_shards: int) -> tuple[Tensor, Tensor]:
    """Remove repeated elements and group the rest by shard.

    Args:
        input: int64 ``[n]``, or float32 ``[n, d]``, compared by column 0 only.
        shard_ids: int32 ``[n]``; an element's shard is that of its first occurrence.
        num_of_shards: number of shards, at least 1.

    Returns:
        ``output``: the elements of shard 0, then of shard 1 ..., in a shard in reverse order of first occurrence.
        ``shard_sizes``: int32 ``[num_of_shards]``.

    >>> [out.tolist() for out in reorder_by_indices([10, 11, 12, 10], [0, 1, 0, 0], 2)]
    [[12, 10, 11], [2, 1]]
    """
    op = "reorder_by_indices"
    if not isinstance(input, Tensor):
        input = torch.as_tensor(input, device="cpu")
        input = input.float() if input.dim() == 2 else input.long() if input.numel() == 0 else input
    input = checks.constant(input)
    if input.dim() not in (1, 2):
        raise ConfigError(f"{op}: input must be 1-D or 2-D, got shape {list(input.shape)}")
    if input.dim() == 2 and input.shape[1] == 0:
        raise ConfigError(f"{op}: a 2-D input must have at least one column, got shape {list(input.shape)}")
    keys = _keys(input if input.dim() == 1 else input[:, 0])
    shards = checks.number(num_of_shards, op, "num_of_shards")
    order, sizes = _reorder(keys, checks.vector(shard_ids, op, "shard_ids"), shards)
    return input.to(order.device).index_select(0, order), sizes


def _keys(column: Tensor) -> Tensor:
    """int64 keys that are equal exactly when the elements are: -0.0 is 0.0, and no NaN equals another."""
    if not column.is_floating_point():
        return checks.int64(column, "reorder_by_indices", "input")
    column = column.double()
    keys = torch.where(column == 0, 0.0, column).view(torch.int64)
    nans = torch.arange(column.shape[0], device=column.device) + (0x7FF8 << 48) + 1
    return torch.where(column.isnan(), nans, keys)


def _check_reorder(keys: Tensor, shard_ids: Tensor, num_of_shards: int) -> None:
    if num_of_shards < 1:
        raise ConfigError(f"reorder_by_indices: num_of_shards must be at least 1, got {num_of_shards}")
    checks.check_same(
        "reorder_by_indices", "the number of shard ids", shard_ids.shape[0], "the number of elements", keys.shape[0]
    )


def _reorder_cpu(keys: Tensor, shard_ids: Tensor, num_of_shards: int) -> tuple[Tensor, Tensor]:
    keys, shard_ids = keys.contiguous(), shard_ids.contiguous()
    order = torch.empty_like(keys)
    sizes = keys.new_empty(num_of_shards, dtype=torch.int32)
    kept = _core.reorder_by_indices(
        keys.data_ptr(), keys.numel(), shard_ids.data_ptr(), num_of_shards, order.data_ptr(), sizes.data_ptr()
    )
    return order[:kept], sizes


_reorder = Op(
    "reorder_by_indices(Tensor keys, Tensor shard_ids, int num_of_shards) -> (Tensor, Tensor)",
    check=_check_reorder,
    cpu=_reorder_cpu,
    reference=reference.reorder_by_indices,
    cuda="reorder:reorder_by_indices",
    fake=lambda keys, shard_ids, num_of_shards: (
        keys.new_empty(new_size()),
        keys.new_empty(num_of_shards, dtype=torch.int32),
    ),
)


class FusedReorder(NamedTuple):
    """The result of `fused_reorder_by_indices`."""

    output: Tensor
    """int64: the distinct ids, shard by shard and, in a shard, table by table."""
    shard_sizes: Tensor
    """int32 ``[S]``: ids per shard."""
    sharded_slot_sizes: Tensor
    """int32 ``[S * M]``: ids per shard and table."""
    emb_offset_sz: Tensor
    """int32 ``[M]``: input ids per table; splits ``fused_embedding_offsets``."""
    fused_embedding_offsets: Tensor
    """int32: per input id, the start of its vector in the flat buffer of all vectors of ``output``."""


def fused_reorder_by_indices(
    inputs: Any, num_of_shards: int, dim_sizes: Any, rank0_empty_shard: bool | None = None
) -> FusedReorder:
    """Remove duplicate ids in several tables and distribute them to shards, in one pass.

    Args:
        inputs: M int64 vectors, one per table, possibly empty. Equal ids in different tables stay separate.
        num_of_shards: S. An id's shard is its floor modulo; see ``rank0_empty_shard``.
        dim_sizes: M ints, the width of each table's embeddings.
        rank0_empty_shard: keep shard 0 empty (True) or use it (False). None: empty when S > 4, unless the environment
            variable ``MONOLITH_SYNC_EMPTY_RANK0_PS_SHARD``, read at every call, is set to something other than ``1``.

    Inside a shard and table the ids stay in order of first occurrence.

    >>> fused_reorder_by_indices([[9, 4, 9, 7], [4, 5]], 2, [2, 3]).output.tolist()
    [4, 4, 9, 7, 5]
    """
    op = "fused_reorder_by_indices"
    ids = checks.vector_list(inputs, op, "inputs")
    rank0_empty = -1 if rank0_empty_shard is None else int(rank0_empty_shard)
    shards = checks.number(num_of_shards, op, "num_of_shards")
    return FusedReorder(*_fused_reorder(ids, shards, checks.int_list(dim_sizes, op, "dim_sizes"), rank0_empty))


def _check_fused(inputs: list[Tensor], num_of_shards: int, dim_sizes: list[int], rank0_empty: int) -> None:
    op = "fused_reorder_by_indices"
    if not inputs:
        raise ConfigError(f"{op}: inputs must hold at least one table, got none")
    if num_of_shards < 1:
        raise ConfigError(f"{op}: num_of_shards must be at least 1, got {num_of_shards}")
    checks.check_same(op, "the number of dim_sizes", len(dim_sizes), "the number of inputs", len(inputs))
    if rank0_empty == 1 and num_of_shards < 2:
        raise ConfigError(f"{op}: num_of_shards must be at least 2 with rank0_empty_shard, got {num_of_shards}")


def _empty(num_of_shards: int, rank0_empty: int) -> int:
    # Called by the op's kernels, so that a compiled program also reads the environment at every call.
    return empty_shards(num_of_shards, None if rank0_empty < 0 else bool(rank0_empty))


def _fused_cpu(
    inputs: list[Tensor], num_of_shards: int, dim_sizes: list[int], rank0_empty: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = [ids.contiguous() for ids in inputs]
    lengths = [ids.numel() for ids in inputs]
    work = _core.FusedReorder(
        [ids.data_ptr() for ids in inputs], lengths, num_of_shards, _empty(num_of_shards, rank0_empty), list(dim_sizes)
    )
    output = inputs[0].new_empty(work.size)
    shard_sizes = output.new_empty(num_of_shards, dtype=torch.int32)
    slot_sizes = output.new_empty(num_of_shards * len(inputs), dtype=torch.int32)
    offsets = output.new_empty(sum(lengths), dtype=torch.int32)
    work.finish(output.data_ptr(), shard_sizes.data_ptr(), slot_sizes.data_ptr(), offsets.data_ptr())
    return output, shard_sizes, slot_sizes, torch.tensor(lengths, dtype=torch.int32, device="cpu"), offsets


def _fused_reference(inputs: list[Tensor], num_of_shards: int, dim_sizes: list[int], rank0_empty: int) -> Any:
    return reference.fused_reorder_by_indices(inputs, num_of_shards, dim_sizes, _empty(num_of_shards, rank0_empty))


def _fused_fake(inputs: list[Tensor], num_of_shards: int, dim_sizes: list[int], rank0_empty: int) -> Any:
    like = inputs[0]
    return (
        like.new_empty(new_size()),
        like.new_empty(num_of_shards, dtype=torch.int32),
        like.new_empty(num_of_shards * len(inputs), dtype=torch.int32),
        like.new_empty(len(inputs), dtype=torch.int32),
        like.new_empty(sum(ids.shape[0] for ids in inputs), dtype=torch.int32),
    )


_fused_reorder = Op(
    "fused_reorder_by_indices(Tensor[] inputs, int num_of_shards, int[] dim_sizes, int rank0_empty_shard)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check_fused,
    cpu=_fused_cpu,
    reference=_fused_reference,
    cuda="reorder:fused_reorder_by_indices",
    fake=_fused_fake,
)
