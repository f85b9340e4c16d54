"""`Inputs`: the description of the data that a model's constructor gets."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs of a model's forward: ``dense`` ``[B, len(dense)]`` and ``rows`` ``[B, len(sparse), dim]``.

    If features have different widths, or several rows each, ``rows`` is ``[B, sum(widths)]``, the features
    concatenated, and ``dim`` is 0. ``rows.flatten(1)`` is the same in both cases.

    >>> inputs = Inputs(dense=("age",), sparse=("user", "tags"), dims=(8, 4), lengths=(1, 3))
    >>> inputs.widths, inputs.width, inputs.columns("tags"), inputs.dim
    ((8, 12), 21, slice(8, 20, None), 0)
    """

    dense: tuple[str, ...] = ()
    """Names of the dense features, in the order of the columns."""
    sparse: tuple[str, ...] = ()
    """Names of the sparse features, in the order of the rows."""
    dim: int = 16
    dims: tuple[int, ...] = ()
    """Width of each feature's row; ``dim`` for all unless given."""
    lengths: tuple[int, ...] = ()
    """Number of rows per feature, concatenated; more than 1 with the combiner firstn."""

    def __post_init__(self) -> None:
        dims = self.dims or (self.dim,) * len(self.sparse)
        lengths = self.lengths or (1,) * len(self.sparse)
        for name, values in (("dim", (self.dim,)), ("dims", dims), ("lengths", lengths)):
            if any(value < 1 for value in values) and not (name == "dim" and self.dims):
                raise ConfigError(f"model: {name} must be at least 1, got {min(values)}")
        if len(dims) != len(self.sparse) or len(lengths) != len(self.sparse):
            raise ConfigError(
                f"model: dims and lengths must have one number per feature ({len(self.sparse)}), got {len(dims)} and "
                f"{len(lengths)}"
            )
        equal = len(set(dims)) <= 1 and set(lengths) <= {1}
        object.__setattr__(self, "dim", (dims[0] if dims else self.dim) if equal else 0)
        object.__setattr__(self, "dims", tuple(dims))
        object.__setattr__(self, "lengths", tuple(lengths))

    @property
    def equal(self) -> bool:
        """Whether every feature has one row of the same width."""
        return self.dim > 0

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of columns per feature."""
        return tuple(dim * length for dim, length in zip(self.dims, self.lengths, strict=True))

    @property
    def width(self) -> int:
        """Number of columns of all inputs, dense and sparse, concatenated."""
        return len(self.dense) + sum(self.widths)

    def columns(self, name: str) -> slice:
        """The columns of a feature in ``rows.flatten(1)``."""
        place = self.sparse.index(name)
        end = list(accumulate(self.widths))[place]
        return slice(end - self.widths[place], end)

    def one_dim(self, model: str) -> int:
        """The width of every row, for a model that multiplies rows with each other.

        Raises:
            ConfigError: the widths differ, or a feature has several rows.
        """
        if self.equal:
            return self.dim
        if long := [name for name, length in zip(self.sparse, self.lengths, strict=True) if length > 1]:
            raise ConfigError(
                f"model: {model} must get one row per feature, but the combiner of {_listed(long)} is firstn, which "
                "gives several; use sum, mean, sqrtn or max, or a model that concatenates rows (dcn, two_tower)"
            )
        by_dim: dict[int, list[str]] = {}
        for name, dim in zip(self.sparse, self.dims, strict=True):
            by_dim.setdefault(dim, []).append(name)
        by_dim_text = "; ".join(f"dim {dim}: {_listed(names)}" for dim, names in sorted(by_dim.items()))
        raise ConfigError(
            f"model: {model} multiplies the rows of features, so all must have the same dim, got {by_dim_text}. Give "
            "them the same dim, or use a model that concatenates rows (dcn, two_tower)"
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
