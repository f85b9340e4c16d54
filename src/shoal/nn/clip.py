"""Clip the gradients of rows together with those of dense parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

if TYPE_CHECKING:
    from shoal.nn.optimizer import SparseOptimizer


@torch.no_grad()
def clip_grad_norm(
    optimizer: SparseOptimizer,
    max_norm: float,
    *,
    parameters: Iterable[Tensor] = (),
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all pending gradients so that their joint norm is at most ``max_norm``.

    The gradient of a row is the sum over all its occurrences, as it would be in a dense table. ``parameters`` are
    ordinary parameters whose ``.grad`` is included in the norm and scaled as well.

    Returns:
        The norm before clipping.

    Raises:
        RuntimeError: the norm is NaN or infinite and ``error_if_nonfinite`` is True; nothing was changed.
    """
    grads = _gradients(optimizer, parameters)
    norm = get_total_norm(grads, norm_type, error_if_nonfinite).cpu()
    factor = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    if factor != 1.0:
        for grad in grads:
            grad.mul_(factor)
    return norm


@torch.no_grad()
def clip_grad_value(optimizer: SparseOptimizer, clip_value: float, *, parameters: Iterable[Tensor] = ()) -> None:
    """Clamp every element of the pending gradients to ``[-clip_value, clip_value]``."""
    for grad in _gradients(optimizer, parameters):
        grad.clamp_(-clip_value, clip_value)


def _gradients(optimizer: SparseOptimizer, parameters: Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    dense = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [*dense, *(grads for _, grads in optimizer.gradients().values())]
