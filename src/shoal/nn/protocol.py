"""`EmbeddingTable`: all that the modules ask of a table, so that one that spans processes can stand in its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from shoal.errors import ConfigError


@runtime_checkable
class EmbeddingTable(Protocol):
    """Rows keyed by int64 ids, with an optimizer of their own.

    Further keywords are used where a table takes them: ``insert_missing`` and ``req_time`` of `lookup`,
    ``enable_dedup`` and ``req_time`` of `apply_gradients`. A table whose ``apply_gradients`` takes no
    ``enable_dedup`` gets distinct ids. Both methods may be called from several threads at once.
    """

    name: str
    dim_size: int

    def lookup(self, ids: Tensor) -> Tensor:
        """float32 ``[n, dim_size]``, zeros for unknown ids; with ``insert_missing=True`` those are created."""
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


def keywords(function: Callable[..., Any], *names: str) -> frozenset[str]:
    """Which of ``names`` a function can be given by keyword."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return frozenset(names)
    return frozenset(name for name in names if name in parameters)
