"""The unique-key ops in plain torch."""

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.ops.reorder.reference import first_occurrences


def unique_key_with_value_and_offset(
    values: Tensor, row_splits: Tensor, dims: list[int], generate_buffer: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    keys, counts, offsets, lengths = [], [0], [], []
    base = 0
    for row, dim in zip(values.tensor_split(row_splits[1:-1].cpu()), dims, strict=True):
        first, rank = first_occurrences(row)
        keys.append(row[first])
        counts.append(counts[-1] + first.shape[0])
        offsets.append(base + rank.argsort(stable=True) * dim)
        lengths.append(torch.bincount(rank, minlength=first.shape[0]))
        base += row.shape[0] * dim
    return (
        torch.cat(keys),
        row_splits.new_tensor(counts),
        torch.cat([row_splits.new_zeros(1), torch.cat(lengths).cumsum(0)]),
        torch.cat(offsets),
        torch.zeros(base if generate_buffer else 0, dtype=torch.float32, device=values.device),
    )


def _places(
    pos: Tensor, pos_splits: Tensor, offset_splits: Tensor, offsets: Tensor, dims: list[int], floats: int
) -> tuple[Tensor, Tensor]:
    """For each offset of each element, and each float of its vector: the float's index, and its place in the buffer."""
    if pos.numel() and (int(pos.min()) < 0 or int(pos.max()) >= offset_splits.shape[0] - 1):
        raise ConfigError(f"an element of pos must be in [0, {offset_splits.shape[0] - 1}), got {pos.tolist()}")
    width = torch.tensor(dims, dtype=torch.int64, device=pos.device).repeat_interleave(pos_splits.diff())
    start = width.cumsum(0) - width
    repeats = offset_splits.diff()[pos]
    element = torch.arange(pos.shape[0], device=pos.device).repeat_interleave(repeats)
    nth = torch.arange(element.shape[0], device=pos.device) - (repeats.cumsum(0) - repeats)[element]
    place = offsets[offset_splits[pos[element]] + nth]
    width = width[element]
    if place.numel() and (int(place.min()) < 0 or int((place + width).max()) > floats):
        raise ConfigError(f"an offset + width is outside the buffer of {floats} floats")
    pair = torch.arange(element.shape[0], device=pos.device).repeat_interleave(width)
    column = torch.arange(pair.shape[0], device=pos.device) - (width.cumsum(0) - width)[pair]
    return start[element[pair]] + column, place[pair] + column


def fill_with_offset_map(
    pos: Tensor,
    pos_splits: Tensor,
    value: Tensor,
    offset_splits: Tensor,
    offsets: Tensor,
    buffer: Tensor,
    dims: list[int],
) -> Tensor:
    source, target = _places(pos, pos_splits, offset_splits, offsets, dims, buffer.shape[0])
    return buffer.index_put((target,), value[source])


def fill_with_offset_map_gradient(
    pos: Tensor, pos_splits: Tensor, grad: Tensor, offset_splits: Tensor, offsets: Tensor, dims: list[int]
) -> Tensor:
    source, target = _places(pos, pos_splits, offset_splits, offsets, dims, grad.shape[0])
    size = int((torch.tensor(dims, dtype=torch.int64, device=pos.device) * pos_splits.diff()).sum())
    return grad.new_zeros(size).index_add(0, source, grad[target])
