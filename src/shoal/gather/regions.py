"""Which part of a parameter lies on a rank, and which chunks reach into it: whole, or a DTensor's shard."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shoal.errors import UnsupportedError
from shoal.gather.spec import ParamSpec


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
        return self.row1 - self.row0, self.column1 - self.column0

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

    def cut(self, dense: Tensor) -> Tensor:
        """The laid-out rows and columns as the rank's local tensor."""
        if self.inner:
            rows, shape = dense.shape[0], self.param.shape
            dense = dense.reshape(rows, -1, *shape[2:])
            for dim, (start, length) in enumerate(self.inner, 2):
                dense = dense.narrow(dim, start, length)
        return dense.reshape(self.local_shape)


def chunks_of(param: ParamSpec, row0: int, row1: int, column0: int, column1: int) -> Tensor:
    _, across, height, width = param.blocks
    if row0 >= row1 or column0 >= column1:
        return torch.empty(0, dtype=torch.int64)
    ys = torch.arange(row0 // height, -(-row1 // height))
    xs = torch.arange(column0 // width, -(-column1 // width))
    return (ys[:, None] * across + xs[None, :]).reshape(-1)


def region_of(param: ParamSpec, tensor: Tensor) -> Region:
    """The part of ``tensor`` that this rank holds."""
    shape = param.shape
    placements = getattr(tensor, "placements", None)
    if placements is None:
        offset, local = (0,) * len(shape), shape
    else:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        for placement in placements:
            if not (placement.is_replicate() or type(placement).__name__ == "Shard"):
                raise UnsupportedError(f"parameter {param.name!r}: placement {placement} is not supported")
        local, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)  # pyrefly: ignore
    local, offset = tuple(local), tuple(offset)
    if math.prod(local) == 0:
        return Region(param, 0, 0, 0, 0, local)
    if len(shape) <= 1:
        start, length = (offset[0], local[0]) if shape else (0, 1)
        return Region(param, 0, 1, start, start + length, local)
    inner = shape[2:]
    if local[2:] == inner:
        block = math.prod(inner)
        return Region(param, offset[0], offset[0] + local[0], offset[1] * block, (offset[1] + local[1]) * block, local)
    block = math.prod(inner)
    cuts = tuple(zip(offset[2:], local[2:], strict=True))
    return Region(
        param, offset[0], offset[0] + local[0], offset[1] * block, (offset[1] + local[1]) * block, local, cuts
    )
