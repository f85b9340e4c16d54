"""`Inputs`: what a model is told about the data when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A model's forward gets ``dense`` ``[B, len(dense)]`` and ``rows`` ``[B, len(sparse), dim]``."""

    dense: tuple[str, ...] = ()
    """Names of the numbers, in the order of the columns."""
    sparse: tuple[str, ...] = ()
    """Names of the features, in the order of the rows."""
    dim: int = 16

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ConfigError(f"model: dim is at least 1, got {self.dim}")

    @property
    def width(self) -> int:
        """Columns of all of it side by side."""
        return len(self.dense) + len(self.sparse) * self.dim
