"""The part of a parameter on a rank, complete or a DTensor's shard, and the chunks that intersect it."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UnsupportedError
from shoal.gather.payload.spec import ParamSpec


@dataclass(frozen=True)
class Region:
    """Rows and columns of a parameter seen as (rows, columns); a 1-d parameter is one row."""

    param: ParamSpec
    row0: int
    row1: int
    column0: int
    column1: int
    local_shape: tuple[int, ...]
    inner: tuple[tuple[int, int], ...] = ()
    """(start, length) in dimensions 2 and up, when those are sharded: cut out after the chunks are laid out."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns that this rank holds."""
        rows = self.row1 - self.row0
        return rows, self.numel // rows if rows else 0

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def key(self) -> tuple[int, ...]:
        """Equal keys hold the same elements."""
        return (self.row0, self.row1, self.column0, self.column1, *(n for pair in self.inner for n in pair))

    @cached_property
    def chunks(self) -> Tensor:
        """int64 numbers of the chunks that intersect the region, ascending."""
        return chunks_of(self.param, self.row0, self.row1, self.column0, self.column1)

    def cut(self, rows: Tensor) -> Tensor:
        """Remove the columns that other ranks hold from laid-out rows."""
        if not self.inner:
            return rows
        dense = rows.reshape(len(rows), -1, *self.param.shape[2:])
        for dim, (start, length) in enumerate(self.inner, 2):
            dense = dense.narrow(dim, start, length)
        return dense.reshape(len(rows), -1)


def chunks_of(param: ParamSpec, row0: int, row1: int, column0: int, column1: int) -> Tensor:
    _, across, height, width = param.blocks
    if row0 >= row1 or column0 >= column1:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    ys = torch.arange(row0 // height, -(-row1 // height), device="cpu")
    xs = torch.arange(column0 // width, -(-column1 // width), device="cpu")
    return (ys[:, None] * across + xs[None, :]).reshape(-1)


def _held(param: ParamSpec, tensor: Any, dim: int) -> tuple[int, int]:
    """(start, length) of this rank's part of one dimension, from the DTensor's placements."""
    index = torch.arange(tensor.shape[dim], device="cpu").reshape([-1 if d == dim else 1 for d in range(tensor.ndim)])
    for mesh_dim, placement in enumerate(tensor.placements):
        if not placement.is_replicate() and placement.dim == dim:
            parts, _ = placement._split_tensor(
                index, tensor.device_mesh.size(mesh_dim), with_padding=False, contiguous=True
            )
            index = parts[tensor.device_mesh.get_local_rank(mesh_dim)]
    index = index.reshape(-1)
    if len(index) == 0:
        return 0, 0
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 != len(index):
        raise UnsupportedError(
            f"parameter {param.name!r}: with placements {tuple(tensor.placements)} this rank's part of dimension {dim} "
            f"is in pieces ({index.tolist()[:4]} ...); redistribute it to Shard({dim}) or Replicate() before the update"
        )
    return first, len(index)


def _spans(param: ParamSpec, tensor: Any) -> list[tuple[int, int]]:
    """(start, length) of this rank's part of every dimension."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return [(0, n) for n in param.shape]
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    for placement in placements:
        if not (placement.is_replicate() or isinstance(placement, Shard | _StridedShard)):
            raise UnsupportedError(
                f"parameter {param.name!r}: placement {placement} is not supported; "
                "redistribute it to Shard or Replicate before the update"
            )
    return [_held(param, tensor, dim) for dim in range(len(param.shape))]


def region_of(param: ParamSpec, tensor: Tensor) -> Region:
    """Return the part of ``tensor`` on this rank, in rows and columns of the chunk grid."""
    shape = param.shape
    spans = _spans(param, tensor)
    offset, local = tuple(start for start, _ in spans), tuple(n for _, n in spans)
    down, across, height, width = param.blocks
    rows, columns = down * height, across * width
    if local == shape:
        return Region(param, 0, rows, 0, columns, local)
    if math.prod(local) == 0:
        return Region(param, 0, 0, 0, 0, local)
    if rows == 1 and (flat := _flat_range(shape, offset, local)) is not None:
        return Region(param, 0, 1, *flat, local)
    if rows != shape[0]:
        raise UnsupportedError(
            f"parameter {param.name!r}: its chunks of {height} x {width} over {rows} x {columns} do not follow the "
            f"dimensions {shape} that it is sharded in; redistribute it to Replicate() before the update"
        )
    block = math.prod(shape[2:])
    inner = () if local[2:] == shape[2:] else tuple(zip(offset[2:], local[2:], strict=True))
    return Region(
        param, offset[0], offset[0] + local[0], offset[1] * block, (offset[1] + local[1]) * block, local, inner
    )


def _flat_range(shape: tuple[int, ...], offset: tuple[int, ...], local: tuple[int, ...]) -> tuple[int, int] | None:
    """(first, last + 1) of the part's elements if they are contiguous in the parameter."""
    cut = next(dim for dim in range(len(shape)) if local[dim] != shape[dim])
    if math.prod(local[:cut]) != 1 or local[cut + 1 :] != shape[cut + 1 :]:
        return None
    start = 0
    for n, at in zip(shape, offset, strict=True):
        start = start * n + at
    return start, start + math.prod(local)


def as_gradient(p: Any, local: Tensor) -> Tensor:
    """Turn the gradient of this rank's part into one of parameter ``p``."""
    if not hasattr(p, "placements"):
        return local.reshape(p.shape)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        p.device_mesh,
        p.placements,
        run_check=False,
        shape=p.shape,
        stride=p.stride(),  # pyrefly: ignore
    )
