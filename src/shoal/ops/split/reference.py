"""The split ops in plain torch."""

import torch
from torch import Tensor

from shoal.errors import ConfigError


def _check(indices: Tensor, parts: int) -> None:
    bad = (indices < 0) | (indices >= parts)
    if bool(bad.any()):
        raise ConfigError(f"split_by_indices: an index must be in [0, {parts}), got {int(indices[bad][0])}")


def split_by_indices(indices: Tensor, tensor: Tensor, num_splits: int) -> list[Tensor]:
    _check(indices, num_splits)
    return [tensor[indices == s] for s in range(num_splits)]


def split_by_indices_backward(indices: Tensor, grads: list[Tensor]) -> Tensor:
    out = grads[0].new_zeros((indices.shape[0], *grads[0].shape[1:]))
    for s, grad in enumerate(grads):
        out[indices == s] = grad
    return out


def ragged_split_by_indices(
    indices: Tensor, values: Tensor, row_splits: Tensor, num_splits: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    _check(indices, num_splits)
    out_values, out_pos, out_splits = [], [], []
    for s in range(num_splits):
        mine = indices == s
        before = torch.cat([row_splits.new_zeros(1), mine.long().cumsum(0)])
        out_values.append(values[mine])
        out_pos.append(mine.nonzero().flatten())
        out_splits.append(before[row_splits])
    return out_values, out_pos, out_splits
