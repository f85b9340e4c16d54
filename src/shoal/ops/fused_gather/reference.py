"""The fused gather and its gradient in plain torch."""

import torch
from torch import Tensor

from shoal.errors import ConfigError


def _places(offsets: Tensor, dim: int, size: int) -> Tensor:
    """Flat positions ``[n, dim]`` of the vectors that start at ``offsets``."""
    if offsets.numel() and (int(offsets.min()) < 0 or int(offsets.max()) + dim > size):
        raise ConfigError(f"an offset + width {dim} is outside the buffer of {size} floats: {offsets.tolist()}")
    return offsets.long()[:, None] + torch.arange(dim, device=offsets.device)


def fused_gather_embeddings_by_input(fused: Tensor, offsets: list[Tensor], dims: list[int]) -> list[Tensor]:
    flat = fused.reshape(-1)
    return [flat[_places(o, dim, flat.shape[0])] for o, dim in zip(offsets, dims, strict=True)]


def fused_gather_embeddings_by_input_gradient(
    size: int, grads: list[Tensor], offsets: list[Tensor], dims: list[int], scale: float
) -> Tensor:
    out = grads[0].new_zeros(size) if grads else torch.zeros(size, dtype=torch.float32, device=None)
    for grad, o, dim in zip(grads, offsets, dims, strict=True):
        out.index_add_(0, _places(o, dim, size).reshape(-1), grad.reshape(-1) * scale)
    return out
