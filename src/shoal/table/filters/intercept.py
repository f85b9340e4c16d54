"""`intercept_gradient`: an admission filter applied to the gradients of rows."""

from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import ConfigError
from shoal.fid import as_int64
from shoal.host import as_tensor
from shoal.table.filters.admission import ProbabilisticFilter


class _InterceptGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, filter: Any, ids: Tensor, embeddings: Tensor) -> Tensor:
        ctx.filter = filter
        ctx.save_for_backward(ids)
        return embeddings.view_as(embeddings)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        (ids,) = ctx.saved_tensors
        drop = _filtered_rows(ctx.filter, ids)
        return None, None, grads[0].masked_fill(drop.to(grads[0].device)[:, None], 0.0)


def intercept_gradient(filter: Any, ids: Tensor, embeddings: Tensor) -> Tensor:
    """Returns ``embeddings`` unchanged; in backward the gradients of ids that the filter drops become zero.

    ``ids`` is int64 ``[n]``, ``embeddings`` ``[n, dim]``. Backward counts one occurrence per row. A probabilistic
    filter drops nothing here, because it would need the table.
    """
    ids = as_int64(as_tensor(ids), "intercept_gradient: ids")
    if embeddings.dim() != 2 or embeddings.shape[0] != ids.numel():
        got = list(embeddings.shape)
        raise ConfigError(
            f"intercept_gradient: embeddings of {ids.numel()} ids must be [{ids.numel()}, dim], got {got}"
        )
    return _InterceptGradient.apply(filter, ids, embeddings)


def _filtered_rows(filter: Any, ids: Tensor) -> Tensor:
    ids = ids.detach().cpu().contiguous().view(-1)
    drop = torch.zeros(ids.numel(), dtype=torch.bool, device="cpu")
    if not isinstance(filter, _core.Filter):  # a custom filter
        for i, id in enumerate(ids.tolist()):
            drop[i] = filter.should_be_filtered(id, 1)
    elif filter._active() and not isinstance(filter, ProbabilisticFilter):
        filter._should_be_filtered_batch(ids.data_ptr(), ids.numel(), drop.data_ptr())
    return drop
