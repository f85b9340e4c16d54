"""`split_by_indices` and `ragged_split_by_indices`."""

from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import ConfigError
from shoal.ops import checks
from shoal.ops._op import Op, new_size
from shoal.ops.split import reference
from shoal.ragged import Ragged


def split_by_indices(indices: Any, tensor: Any, num_splits: int) -> list[Tensor]:
    """Split rows into ``num_splits`` tensors, in input order.

    Args:
        indices: int64 ``[n]``, each in ``[0, num_splits)``.
        tensor: ``[n, ...]`` of any dtype; a gradient flows to it.
        num_splits: how many parts, at least 1.

    Returns:
        Part ``s`` is ``[count_s, ...]``, the rows whose index is ``s``.

    >>> [part.tolist() for part in split_by_indices([1, 0, 1], [5, 6, 7], 2)]
    [[6], [5, 7]]
    """
    op = "split_by_indices"
    tensor = tensor if isinstance(tensor, Tensor) else torch.as_tensor(tensor, device="cpu")
    return _split(checks.int64(indices, op, "indices"), tensor, checks.number(num_splits, op, "num_splits"))


def ragged_split_by_indices(indices: Any, num: Any, num_splits: int) -> tuple[list[Ragged], list[Ragged]]:
    """Split the values of a ragged tensor into parts with the same rows.

    Args:
        indices: int64 ``[n]``, one per value, each in ``[0, num_splits)``.
        num: ragged int64 with ``n`` values.
        num_splits: how many parts, at least 1.

    Returns:
        ``splits`` and ``pos``: per part the values row by row, and their flat positions in ``num.values``.

    >>> splits, pos = ragged_split_by_indices([1, 0, 1], [[5, 6], [7]], 2)
    >>> splits[1].to_list(), pos[1].to_list()
    ([[5], [7]], [[0], [2]])
    """
    op = "ragged_split_by_indices"
    num = checks.ragged(num, op, "num")
    parts = checks.number(num_splits, op, "num_splits")
    values, pos, splits = _ragged_split(checks.int64(indices, op, "indices"), num.values, num.row_splits, parts)
    return (
        [Ragged.trusted(v, s) for v, s in zip(values, splits, strict=True)],
        [Ragged.trusted(p, s) for p, s in zip(pos, splits, strict=True)],
    )


def _check_indices(op: str, indices: Tensor, length: int, what: str, num_splits: int) -> None:
    if num_splits < 1:
        raise ConfigError(f"{op}: num_splits must be at least 1, got {num_splits}")
    if indices.dim() != 1:
        raise ConfigError(f"{op}: indices must be 1-D, got shape {list(indices.shape)}")
    checks.check_same(op, "the number of indices", indices.shape[0], f"the number of {what}", length)


def _check_split(indices: Tensor, tensor: Tensor, num_splits: int) -> None:
    if tensor.dim() < 1:
        raise ConfigError("split_by_indices: tensor must have at least one dimension, got a scalar")
    _check_indices("split_by_indices", indices, tensor.shape[0], "rows", num_splits)


def _count(indices: Tensor, parts: int) -> tuple[Tensor, list[int]]:
    n = indices.numel()
    histogram = indices.new_empty(_core.split_pieces(n, parts) * parts)
    counts = indices.new_empty(parts)
    _core.split_count(indices.data_ptr(), n, parts, histogram.data_ptr(), counts.data_ptr())
    return histogram, counts.tolist()


def _row_bytes(tensor: Tensor) -> int:
    size = tensor.element_size()
    for length in tensor.shape[1:]:
        size *= length
    return size


def plain_bytes(rows: Tensor) -> Tensor:
    """Contiguous rows, with a pending conjugation or negation applied."""
    return rows.detach().resolve_conj().resolve_neg().contiguous()


def _split_cpu(indices: Tensor, tensor: Tensor, num_splits: int) -> list[Tensor]:
    indices, tensor = indices.contiguous(), plain_bytes(tensor)
    histogram, counts = _count(indices, num_splits)
    outs = [tensor.new_empty((count, *tensor.shape[1:])) for count in counts]
    _core.split_rows(
        indices.data_ptr(), indices.numel(), num_splits, histogram.data_ptr(),
        tensor.data_ptr(), _row_bytes(tensor), [out.data_ptr() for out in outs],
    )  # fmt: skip
    return outs


def _split_fake(indices: Tensor, tensor: Tensor, num_splits: int) -> list[Tensor]:
    return [tensor.new_empty((new_size(), *tensor.shape[1:])) for _ in range(num_splits)]


def _check_unsplit(indices: Tensor, grads: list[Tensor]) -> None:
    _check_indices("split_by_indices", indices, sum(g.shape[0] for g in grads), "gradient rows", len(grads))
    if any(g.shape[1:] != grads[0].shape[1:] or g.dtype != grads[0].dtype for g in grads):
        got = ", ".join(f"{g.dtype} {list(g.shape)}" for g in grads)
        raise ConfigError(f"split_by_indices: the parts' gradients must have one row shape and dtype, got {got}")


def _unsplit_cpu(indices: Tensor, grads: list[Tensor]) -> Tensor:
    indices, grads = indices.contiguous(), [plain_bytes(g) for g in grads]
    histogram, counts = _count(indices, len(grads))
    for s, grad in enumerate(grads):
        checks.check_same("split_by_indices", f"the gradient of part {s}", grad.shape[0], "its row count", counts[s])
    out = grads[0].new_empty((indices.numel(), *grads[0].shape[1:]))
    _core.unsplit_rows(
        indices.data_ptr(), indices.numel(), len(grads), histogram.data_ptr(),
        [grad.data_ptr() for grad in grads], _row_bytes(out), out.data_ptr(),
    )  # fmt: skip
    return out


_unsplit = Op(
    "split_by_indices_backward(Tensor indices, Tensor[] grads) -> Tensor",
    check=_check_unsplit,
    cpu=_unsplit_cpu,
    reference=reference.split_by_indices_backward,
    backward=True,
    cuda="split:split_by_indices_backward",
    fake=lambda indices, grads: grads[0].new_empty((indices.shape[0], *grads[0].shape[1:])),
)
_split = Op(
    "split_by_indices(Tensor indices, Tensor tensor, int num_splits) -> Tensor[]",
    check=_check_split,
    cpu=_split_cpu,
    reference=reference.split_by_indices,
    cuda="split:split_by_indices",
    fake=_split_fake,
)
_split.register_gradient(
    lambda ctx, grads: (None, _unsplit(ctx.saved_tensors[0], list(grads)), None),
    lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def _check_ragged(indices: Tensor, values: Tensor, row_splits: Tensor, num_splits: int) -> None:
    _check_indices("ragged_split_by_indices", indices, values.shape[0], "values", num_splits)


def _ragged_cpu(
    indices: Tensor, values: Tensor, row_splits: Tensor, num_splits: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    indices, values, row_splits = indices.contiguous(), values.contiguous(), row_splits.contiguous()
    n, rows = indices.numel(), row_splits.numel() - 1
    _core.check_row_splits(row_splits.data_ptr(), rows, n)
    histogram, counts = _count(indices, num_splits)
    out_values = [values.new_empty(count) for count in counts]
    out_pos = [values.new_empty(count) for count in counts]
    out_splits = [values.new_empty(rows + 1) for _ in counts]
    _core.split_ragged(
        indices.data_ptr(), n, num_splits, histogram.data_ptr(), values.data_ptr(), row_splits.data_ptr(), rows,
        [t.data_ptr() for t in out_values], [t.data_ptr() for t in out_pos], [t.data_ptr() for t in out_splits],
    )  # fmt: skip
    return out_values, out_pos, out_splits


def _ragged_fake(
    indices: Tensor, values: Tensor, row_splits: Tensor, num_splits: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    sizes = [new_size() for _ in range(num_splits)]
    return (
        [values.new_empty(size) for size in sizes],
        [values.new_empty(size) for size in sizes],
        [torch.empty_like(row_splits) for _ in sizes],
    )


_ragged_split = Op(
    "ragged_split_by_indices(Tensor indices, Tensor values, Tensor row_splits, int num_splits)"
    " -> (Tensor[], Tensor[], Tensor[])",
    check=_check_ragged,
    cpu=_ragged_cpu,
    reference=reference.ragged_split_by_indices,
    cuda="split:ragged_split_by_indices",
    fake=_ragged_fake,
)
