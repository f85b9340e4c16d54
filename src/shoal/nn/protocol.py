"""`EmbeddingTable`: the methods that modules call on a table, so that you can write your own."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from shoal.errors import ConfigError


@runtime_checkable
class EmbeddingTable(Protocol):
    """A table of rows keyed by int64 ids, with an optimizer.

    An attribute ``accepts`` can name further keywords of `apply_gradients`: ``req_time``, the time of the update in
    seconds, and ``enable_dedup``; a table without the latter gets distinct ids. Both methods may be called from several
    threads at once. The library's own tables implement `shoal.table.protocol` instead.
    """

    name: str
    dim_size: int

    def lookup(self, ids: Tensor) -> Tensor:
        """Return float32 ``[n, dim_size]``, zeros for unknown ids."""
        ...

    def apply_gradients(self, ids: Tensor, grads: Tensor, global_step: int = 0) -> Any:
        """Make one optimizer step on the row of each id; return once a later `lookup` will see it."""
        ...


def check_table(table: Any) -> None:
    """Refuse an object that is not an `EmbeddingTable`."""
    if not isinstance(table, EmbeddingTable):
        missing = [name for name in ("name", "dim_size", "lookup", "apply_gradients") if not hasattr(table, name)]
        raise ConfigError(
            f"a table must have name, dim_size, lookup and apply_gradients, but {type(table).__name__} "
            f"{table!r} has no {', '.join(missing)}; create one with shoal.HashTable(dim=16)"
        )
