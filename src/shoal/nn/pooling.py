"""Pooling the rows of bags: what it means, in plain torch, and the native kernels that do it."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal import _core
from shoal.buffers import empty_rows
from shoal.errors import ConfigError
from shoal.nn.combiners import Combiner, FirstN, ReduceMean, ReduceSum
from shoal.table.clock import Now

SUM, MEAN, FIRSTN = 0, 1, 2  # as in csrc/nn/bag.h
CUSTOM = 3  # what the combiner itself does, in torch
_POOLS = {"sum": SUM, "mean": MEAN, "firstn": FIRSTN}
_COMBINERS = {ReduceSum: SUM, ReduceMean: MEAN, FirstN: FIRSTN}


def as_pool(combiner: object, max_length: int | None) -> tuple[int, int]:
    """The kind of pooling and, for firstn, the length, of a name or of a `Combiner`."""
    kind = _POOLS.get(combiner) if isinstance(combiner, str) else _kind_of(combiner)
    if kind is None:
        raise ConfigError(
            f"HashEmbeddingBag: combiner must be one of {', '.join(map(repr, _POOLS))}, or a Combiner, got {combiner!r}"
        )
    if kind == FIRSTN and max_length is None:
        max_length = getattr(combiner, "max_seq_length", None)
    if kind == FIRSTN and (max_length is None or max_length < 1):
        raise ConfigError(f"HashEmbeddingBag: firstn needs a max_length of at least 1, got {max_length}")
    if kind != FIRSTN and max_length is not None:
        raise ConfigError(f"HashEmbeddingBag: max_length goes with combiner='firstn', got it with {combiner!r}")
    return kind, max_length or 0


def _kind_of(combiner: object) -> int | None:
    """Of a combiner of the library, or one derived from it that combines in the same way, the pooling it means."""
    if not isinstance(combiner, Combiner):
        return None
    for known, kind in _COMBINERS.items():
        if isinstance(combiner, known) and type(combiner).combine is known.combine:
            return kind
    return CUSTOM


def pool_reference(rows: Tensor, offsets: Tensor, weights: Tensor | None, kind: int, length: int) -> Tensor:
    """``[B, D]``, or ``[B, length, D]`` for firstn; the gradient is autograd's.

    An empty bag is zeros. A weight multiplies its row; the mean is over the number of rows, whatever they weigh.
    """
    out = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        bag = rows[begin:end] if weights is None else rows[begin:end] * weights[begin:end, None]
        if kind == FIRSTN:
            bag = bag[:length]
            out.append(torch.cat([bag, bag.new_zeros(length - len(bag), rows.shape[1])]))
        else:
            out.append(bag.sum(0) / (max(end - begin, 1) if kind == MEAN else 1))
    return torch.stack(out) if out else rows.new_zeros(pooled_shape(0, rows.shape[1], kind, length))


def pooled_shape(bags: int, dim: int, kind: int, length: int) -> list[int]:
    return [bags, length, dim] if kind == FIRSTN else [bags, dim]


def pool(rows: Tensor, offsets: Tensor, weights: Tensor | None, kind: int, length: int) -> Tensor:
    """`pool_reference` without its gradient; all arguments are contiguous float32 and int64 CPU tensors."""
    bags = offsets.numel() - 1
    out = torch.empty(pooled_shape(bags, rows.shape[1], kind, length), dtype=torch.float32, device="cpu")
    weights_at = 0 if weights is None else weights.data_ptr()
    _core.pool(
        offsets.data_ptr(),
        bags,
        rows.data_ptr(),
        rows.shape[0],
        rows.shape[1],
        kind,
        length,
        weights_at,
        out.data_ptr(),
    )
    return out


def lookup_pool(
    native: _core.Table,
    dim: int,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    kind: int,
    length: int,
    create: bool,
    time_s: int,
) -> Tensor:
    """`pool` of the rows of ``ids``, which are never all in memory at once."""
    bags = offsets.numel() - 1
    out = torch.empty(pooled_shape(bags, dim, kind, length), dtype=torch.float32, device="cpu")
    _core.lookup_pool(
        native,
        ids.data_ptr(),
        ids.numel(),
        offsets.data_ptr(),
        bags,
        kind,
        length,
        0 if weights is None else weights.data_ptr(),
        create,
        time_s,
        out.data_ptr(),
        isinstance(time_s, Now),
    )
    return out


def pool_gradient(
    grad: Tensor, n: int, dim: int, offsets: Tensor, weights: Tensor | None, rows: Tensor | None, kind: int, length: int
) -> tuple[Tensor, Tensor]:
    """Gradients of the ``n`` rows and, if ``rows`` are given, of their weights (else an empty tensor)."""
    grad_rows = empty_rows(n, dim)
    grad_weights = torch.empty(0 if rows is None else n, dtype=torch.float32, device="cpu")
    _core.pool_gradient(
        offsets.data_ptr(),
        offsets.numel() - 1,
        grad.data_ptr(),
        n,
        dim,
        kind,
        length,
        0 if weights is None else weights.data_ptr(),
        0 if rows is None else rows.data_ptr(),
        grad_rows.data_ptr(),
        0 if rows is None else grad_weights.data_ptr(),
    )
    return grad_rows, grad_weights
