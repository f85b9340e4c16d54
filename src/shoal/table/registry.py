"""The registry of tables by name. Names are unique in a process; handles and checkpoints find tables by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.errors import ConfigError

Table = TypeVar("Table")

_tables: dict[str, Any] = {}  # None: the name is reserved for a table that is being created
_lock = threading.Lock()


def register(name: str, make: Callable[[], Table]) -> Table:
    """Creates a table and registers it as ``name``.

    The name is reserved first, so that a table with a duplicate name is never created or attached to anything.

    Raises:
        ConfigError: a table of that name exists.
    """
    with _lock:
        if name in _tables:
            raise ConfigError(
                f"a table named {name!r} exists already; choose another name_suffix or call reset_registry()"
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
        ConfigError: there is no such table.
    """
    with _lock:
        found = _tables.get(name)
        if found is None:
            known = sorted(known for known, table in _tables.items() if table is not None)
            raise ConfigError(f"there is no table named {name!r}; registered tables are {known or 'none'}")
        return found


def registered(kind: type) -> list[Any]:
    """All registered tables of a class, in order of creation."""
    with _lock:
        return [table for table in _tables.values() if isinstance(table, kind)]


def reset_registry() -> None:
    """Forgets every table, so that their names can be used again. Tables that are still referenced stay usable."""
    with _lock:
        tables = [table for table in _tables.values() if table is not None]
        _tables.clear()
    for table in tables:
        table.close()
