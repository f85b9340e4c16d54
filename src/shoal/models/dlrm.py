"""DLRM: dot products between all features and the dense part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.models.inputs import Inputs
from shoal.models.interactions import pair_dots
from shoal.models.mlp import Mlp


class Dlrm(nn.Module):
    """A bottom net turns the dense features into another row; a top net gets the dot products of all pairs of rows.

    Args:
        bottom: hidden widths of the bottom net, whose last layer has the table's width.
        top: hidden widths of the top net.
    """

    def __init__(
        self, inputs: Inputs, *, bottom: Sequence[int] = (64,), top: Sequence[int] = (256, 128), dropout: float = 0.0
    ) -> None:
        super().__init__()
        dim = inputs.one_dim("dlrm")
        self.bottom = Mlp(len(inputs.dense), [*bottom, dim], dropout=dropout) if inputs.dense else None
        rows = len(inputs.sparse) + bool(inputs.dense)
        self.top = Mlp([dim if inputs.dense else 0, rows * (rows - 1) // 2], top, 1, dropout)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """``[B]`` logits."""
        if self.bottom is None:
            return self.top(rows.new_empty(rows.shape[0], 0), pair_dots(rows)).squeeze(1)
        numbers = self.bottom(dense)
        return self.top(numbers, pair_dots(torch.cat([numbers.unsqueeze(1), rows], 1))).squeeze(1)
