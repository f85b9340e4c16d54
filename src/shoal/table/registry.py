"""Tables by name: a name is taken once per process, and handles and checkpoints find their table by it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.errors import ConfigError

Table = TypeVar("Table")

_tables: dict[str, Any] = {}  # None: the name is taken by a table that is being made
_lock = threading.Lock()


def register(name: str, make: Callable[[], Table]) -> Table:
    """Makes a table and keeps it under ``name``.

    The name is taken first, so that a table that is refused was never made: it has attached itself to nothing.

    Raises:
        ConfigError: the name is taken.
    """
    with _lock:
        if name in _tables:
            raise ConfigError(
                f"a table named {name!r} exists already; give another name_suffix or call reset_registry()"
            )
        _tables[name] = None
    try:
        table = make()
    except BaseException:
        with _lock:
            _tables.pop(name, None)
        raise
    with _lock:
        _tables[name] = table
    return table


def find(name: str) -> Any:
    """The table of that name.

    Raises:
        ConfigError: there is none.
    """
    with _lock:
        found = _tables.get(name)
        if found is None:
            known = sorted(known for known, table in _tables.items() if table is not None)
            raise ConfigError(f"there is no table named {name!r}; there are {known or 'none'}")
        return found


def registered(kind: type) -> list[Any]:
    """All registered tables of a class, in the order they were made."""
    with _lock:
        return [table for table in _tables.values() if isinstance(table, kind)]


def reset_registry() -> None:
    """Forgets every table, so that their names can be used again. The tables themselves live on with who holds them."""
    with _lock:
        tables = [table for table in _tables.values() if table is not None]
        _tables.clear()
    for table in tables:
        table.close()
