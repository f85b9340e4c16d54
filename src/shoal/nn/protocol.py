"""`EmbeddingTable`: the methods that the modules need of a table, so that a table of your own can take part."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from shoal.errors import ConfigError


@runtime_checkable
class EmbeddingTable(Protocol):
    """Rows keyed by int64 ids, with an optimizer of their own.

    An attribute ``accepts`` names further keywords of `apply_gradients`: ``req_time``, the seconds of the update, and
    ``enable_dedup``, without which a table gets distinct ids. Both methods may be called from several threads at once.
    Tables of the library take part through `shoal.table.protocol` instead.
    """

    name: str
    dim_size: int

    def lookup(self, ids: Tensor) -> Tensor:
        """float32 ``[n, dim_size]``, zeros for unknown ids."""
        ...

    def apply_gradients(self, ids: Tensor, grads: Tensor, global_step: int = 0) -> Any:
        """One optimizer step on the row of each id; returns when a later `lookup` will see it."""
        ...


def check_table(table: Any) -> None:
    """Refuses what is not an `EmbeddingTable`."""
    if not isinstance(table, EmbeddingTable):
        missing = [name for name in ("name", "dim_size", "lookup", "apply_gradients") if not hasattr(table, name)]
        raise ConfigError(
            f"a table has name, dim_size, lookup and apply_gradients, but {type(table).__name__} "
            f"{table!r} lacks {', '.join(missing)}; shoal.HashTable(dim=16) makes one"
        )
