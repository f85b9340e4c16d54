"""DeepFM: a factorisation machine and a deep net over the same rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from shoal.models.inputs import Inputs
from shoal.models.interactions import fm
from shoal.models.mlp import Mlp


class DeepFm(nn.Module):
    """The first column of a row is its feature's linear weight, the others its factors; the deep net sees all of them.

    Args:
        hidden: widths of the deep net.
        dropout: dropout of its hidden layers.
    """

    def __init__(self, inputs: Inputs, *, hidden: Sequence[int] = (256, 128), dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(len(inputs.dense), 1) if inputs.dense else None
        self.deep = Mlp([len(inputs.dense), len(inputs.sparse) * inputs.one_dim("deepfm")], hidden, 1, dropout)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """``[B]`` logits."""
        flat, logits = fm(rows)
        logits = logits + self.deep(dense, flat).squeeze(1)
        return logits if self.linear is None else logits + self.linear(dense).squeeze(1)
