"""The reductions in plain torch."""

import torch
from torch import Tensor

from shoal.errors import ConfigError

SUM, MEAN, SQRTN = 0, 1, 2


def _check(index: Tensor, rows: int) -> None:
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= rows):
        raise ConfigError(f"a segment index must be in [0, {rows}), got {int(index.min())}..{int(index.max())}")


def _scale(index: Tensor, rows: int, like: Tensor) -> Tensor:
    """One over each group's size, as a column."""
    return torch.bincount(index, minlength=rows).clamp(min=1).to(like.dtype).reciprocal()[:, None]


def reduce_by_index(index: Tensor, values: Tensor, rows: int, how: int) -> Tensor:
    _check(index, rows)
    terms = values * values if how == SQRTN else values
    out = values.new_zeros(rows, values.shape[1]).index_add(0, index, terms)
    if how == MEAN:
        return out * _scale(index, rows, out)
    return out.sqrt() if how == SQRTN else out


def reduce_by_index_backward(
    grad: Tensor, index: Tensor, how: int, values: Tensor | None, norm: Tensor | None
) -> Tensor:
    _check(index, grad.shape[0])
    if how == MEAN:
        grad = grad * _scale(index, grad.shape[0], grad)
    out = grad.index_select(0, index)
    if how == SQRTN:
        assert values is not None
        assert norm is not None
        norm = norm.index_select(0, index)
        out = torch.where(norm == 0, 0.0, out * values / norm)
    return out


def reduce_and_split(
    splits: list[Tensor], embeddings: list[Tensor], slices: list[int], counts: list[int]
) -> list[Tensor]:
    outs, cut = [], iter(slices)
    for row_splits, rows, count in zip(splits, embeddings, counts, strict=True):
        ids = torch.arange(row_splits.shape[0] - 1, device=rows.device).repeat_interleave(row_splits.diff())
        total = rows.new_zeros(row_splits.shape[0] - 1, rows.shape[1]).index_add(0, ids, rows)
        outs.extend(part.contiguous() for part in total.split([next(cut) for _ in range(count)], 1))
    return outs


def reduce_and_split_backward(splits: list[Tensor], grads: list[Tensor], counts: list[int]) -> list[Tensor]:
    outs, given = [], iter(grads)
    for row_splits, count in zip(splits, counts, strict=True):
        outs.append(torch.cat([next(given) for _ in range(count)], 1).repeat_interleave(row_splits.diff(), 0))
    return outs


def first_n(values: Tensor, row_splits: Tensor, limit: int) -> Tensor:
    rows = row_splits.shape[0] - 1
    at = row_splits[:-1, None] + torch.arange(limit, device=values.device)
    kept = at < row_splits[1:, None]
    out = values.new_zeros(rows, limit, values.shape[1])
    out[kept] = values[at[kept]]
    return out


def first_n_backward(grad: Tensor, row_splits: Tensor, n: int) -> Tensor:
    at = row_splits[:-1, None] + torch.arange(grad.shape[1], device=grad.device)
    kept = at < row_splits[1:, None]
    out = grad.new_zeros(n, grad.shape[2])
    out[at[kept]] = grad[kept]
    return out
