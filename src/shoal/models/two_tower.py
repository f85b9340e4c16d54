"""Two towers: a net for the user's features, one for the item's, and the dot product of their outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.models.inputs import Inputs
from shoal.models.mlp import Mlp


class TwoTower(nn.Module):
    """Scores a user and an item by the dot product of their vectors, so that items can be found by nearest neighbours.

    Args:
        user: names of the features, dense or sparse, of the user's tower.
        item: names of the features of the item's tower. A feature must not be in both; one in neither is not used.
        hidden: widths of both towers; the last is the width of the vectors.
        temperature: divides the dot product of normalized vectors; None does not normalize.
    """

    def __init__(
        self,
        inputs: Inputs,
        *,
        user: Sequence[str],
        item: Sequence[str],
        hidden: Sequence[int] = (128, 64),
        temperature: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if temperature is not None and not temperature > 0:
            raise ConfigError(f"model: temperature must be above 0, got {temperature}")
        if both := sorted(set(user) & set(item)):
            raise ConfigError(f"model: a feature must be in one tower, but {both[0]!r} is in both")
        self.temperature = temperature
        self.user, self.item = (_Tower(inputs, which, names, hidden, dropout) for which, names in
                                (("user", user), ("item", item)))  # fmt: skip
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """``[B]`` logits."""
        user, item = self.user(dense, rows), self.item(dense, rows)
        if self.temperature is not None:
            user, item = nn.functional.normalize(user, dim=1), nn.functional.normalize(item, dim=1)
        return (user * item).sum(1) / (self.temperature or 1.0) + self.bias


class _Tower(nn.Module):
    def __init__(self, inputs: Inputs, which: str, names: Sequence[str], hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        unknown = [name for name in names if name not in inputs.dense and name not in inputs.sparse]
        if unknown or not names:
            what = f"{unknown[0]!r}, which is not a feature" if unknown else "no features"
            raise ConfigError(f"model: the {which} tower has {what}; features are {[*inputs.dense, *inputs.sparse]}")
        self.dense = [inputs.dense.index(name) for name in names if name in inputs.dense]
        self.columns = [inputs.columns(name) for name in names if name in inputs.sparse]
        width = sum(one.stop - one.start for one in self.columns)
        hidden = list(hidden)
        if not hidden:
            raise ConfigError("model: hidden must have at least one width, that of the towers' vectors")
        self.net = Mlp([len(self.dense), width], hidden[:-1], hidden[-1], dropout)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        flat = rows.flatten(1)
        return self.net(dense[:, self.dense], torch.cat([flat[:, :0], *(flat[:, one] for one in self.columns)], 1))
