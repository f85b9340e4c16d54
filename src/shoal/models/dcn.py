"""DCN-v2: explicit feature crosses in addition to a deep net."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.models.inputs import Inputs
from shoal.models.mlp import Mlp


class Cross(nn.Module):
    """``x0 * (W x + b) + x``; with a ``rank``, W is the product of two thin matrices."""

    def __init__(self, width: int, rank: int | None) -> None:
        super().__init__()
        self.down = None if rank is None else nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(width if rank is None else rank, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return torch.addcmul(x, x0, self.up(x if self.down is None else self.down(x)))


class DcnV2(nn.Module):
    """Cross layers and a deep net over all columns, in parallel (``stacked``: in sequence), then a linear layer.

    Args:
        crosses: number of cross layers; n of them multiply up to n + 1 features.
        rank: rank of their matrices; None for full ones, which take ``width²`` weights per layer.
        hidden: widths of the deep net.
    """

    def __init__(
        self,
        inputs: Inputs,
        *,
        crosses: int = 2,
        rank: int | None = 64,
        hidden: Sequence[int] = (256, 128),
        stacked: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if crosses < 1:
            raise ConfigError(f"model: crosses must be at least 1, got {crosses}")
        if rank is not None and rank < 1:
            raise ConfigError(f"model: rank must be at least 1, got {rank}")
        width = inputs.width
        self.crosses = nn.ModuleList(Cross(width, rank) for _ in range(crosses))
        self.deep = Mlp(width, hidden, dropout=dropout)
        self.stacked = stacked
        self.out = nn.Linear(self.deep.out_width if stacked else self.deep.out_width + width, 1)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """``[B]`` logits."""
        x0 = torch.cat([dense, rows.flatten(1)], 1)
        x = x0
        for cross in self.crosses:
            x = cross(x0, x)
        deep = self.deep(x if self.stacked else x0)
        return self.out(deep if self.stacked else torch.cat([x, deep], 1)).squeeze(1)
