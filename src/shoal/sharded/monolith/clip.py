"""Clipping of dense and sparse gradients."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from shoal.sharded.summary import scalar, writing


class GradClipType(IntEnum):
    """The quantity that is limited to ``clip_norm``."""

    ClipByNorm = 1
    """The norm of each tensor."""
    ClipByGlobalNorm = 2
    """One norm over all dense and sparse gradients."""
    ClipByValue = 3
    """Every element."""
    ClipByDenseAndSparse = 4
    """The norm of all dense gradients, and that of all sparse ones."""
    NoClip = 5


def global_norm(grads: Sequence[Tensor]) -> Tensor:
    """The norm of all tensors as one vector."""
    if not grads:
        return torch.zeros((), device="cpu")
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))


def scaled(grads: Sequence[Tensor], limit: float | None, norm: Tensor) -> list[Tensor]:
    """Every gradient times ``limit / max(norm, limit)``."""
    if limit is None:
        return list(grads)
    bound = torch.clamp(norm, min=limit)
    scale = torch.where(bound == 0, torch.zeros_like(bound), limit / bound)
    return [g * scale.to(g.device) for g in grads]


def sparse_limit(
    clip_type: GradClipType | int, clip_norm: float | None, sparse_clip_norm: float | None, warmup_steps: int | None,
    step: int,
) -> float | None:  # fmt: skip
    """The largest norm of sparse gradients. With ClipByGlobalNorm it rises with the step up to ``warmup_steps``."""
    if clip_type != GradClipType.ClipByGlobalNorm:
        return sparse_clip_norm
    limit = clip_norm if sparse_clip_norm is None else sparse_clip_norm
    if limit is not None and warmup_steps and step < warmup_steps:
        limit = limit * step / warmup_steps
    return limit


def clip_gradients(
    dense: Sequence[Tensor], sparse: Sequence[Tensor], clip_type: GradClipType, clip_norm: float | None,
    sparse_norm: float | None, step: int = 0,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Clip both groups; ``sparse_norm`` is the result of `sparse_limit`.

    ClipByGlobalNorm writes the norm to the summary writer as ``global_gradient_norm``.
    """
    dense, sparse = list(dense), list(sparse)
    if clip_type == GradClipType.ClipByDenseAndSparse:
        return scaled(dense, clip_norm, global_norm(dense)), scaled(sparse, sparse_norm, global_norm(sparse))
    if clip_norm is None or clip_type == GradClipType.NoClip:
        return dense, sparse
    if clip_type == GradClipType.ClipByGlobalNorm:
        norm = global_norm([*dense, *sparse])
        if writing():
            scalar("global_gradient_norm", float(norm), step)
        return scaled(dense, clip_norm, norm), scaled(sparse, sparse_norm, norm)
    if clip_type == GradClipType.ClipByValue:
        return [g.clamp(-clip_norm, clip_norm) for g in dense], [g.clamp(-clip_norm, clip_norm) for g in sparse]
    dense = [scaled([g], clip_norm, torch.linalg.vector_norm(g))[0] for g in dense]
    return dense, [scaled([g], clip_norm, torch.linalg.vector_norm(g))[0] for g in sparse]
