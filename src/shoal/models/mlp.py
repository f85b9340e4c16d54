"""`Mlp`: linear layers with ReLU between them, over one or several concatenated inputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError


class Mlp(nn.Module):
    """Layers of the widths in ``hidden``, then, with ``out``, a layer of that many columns without a ReLU.

    Several inputs, of the widths in ``widths``, are treated as one concatenated input, without copying them together.
    """

    def __init__(
        self, widths: int | Sequence[int], hidden: Sequence[int], out: int | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        parts = [widths] if isinstance(widths, int) else list(widths)
        hidden = list(hidden)
        if any(not isinstance(width, int) or width < 1 for width in hidden):
            raise ConfigError(f"model: hidden widths must be integers of at least 1, got {hidden}")
        if not 0 <= dropout < 1:
            raise ConfigError(f"model: dropout must be in [0, 1), got {dropout}")
        sizes = [sum(parts), *hidden, *([out] if out is not None else [])]
        self.parts = parts
        self.dropout = dropout
        self.linear_out = out is not None
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.out_width = sizes[-1]

    def forward(self, *inputs: Tensor) -> Tensor:
        if not self.layers:
            return torch.cat(inputs, 1) if len(inputs) > 1 else inputs[0]
        x: Tensor | None = None
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            if x is None:
                x = self._first(layer, inputs)
            else:
                x = layer(x)
            if number < len(self.layers) - 1 or not self.linear_out:
                x = torch.relu(x)
                if self.dropout:
                    x = nn.functional.dropout(x, self.dropout, self.training)
        assert x is not None
        return x

    def _first(self, layer: nn.Linear, inputs: Sequence[Tensor]) -> Tensor:
        x: Tensor = layer.bias.expand(inputs[0].shape[0], -1)
        for part, weight in zip(inputs, layer.weight.split(self.parts, 1), strict=True):
            if part.shape[1]:
                x = torch.addmm(x, part, weight.t())
        return x
