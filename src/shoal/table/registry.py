"""Tables by name: a name is taken once per process, and handles and checkpoints find their table by it."""

from __future__ import annotations

import threading
from typing import Any

from shoal.errors import ConfigError

_tables: dict[str, Any] = {}
_lock = threading.Lock()


def register(table: Any) -> None:
    """Keeps ``table`` under its name.

    Raises:
        ConfigError: the name is taken.
    """
    with _lock:
        if table.name in _tables:
            raise ConfigError(
                f"a table named {table.name!r} exists already; give another name_suffix or call reset_registry()"
            )
        _tables[table.name] = table


def find(name: str) -> Any:
    """The table of that name.

    Raises:
        ConfigError: there is none.
    """
    with _lock:
        if name not in _tables:
            raise ConfigError(f"there is no table named {name!r}; there are {sorted(_tables) or 'none'}")
        return _tables[name]


def registered(kind: type) -> list[Any]:
    """All registered tables of a class, in the order they were made."""
    with _lock:
        return [table for table in _tables.values() if isinstance(table, kind)]


def reset_registry() -> None:
    """Forgets every table, so that their names can be used again. The tables themselves live on with who holds them."""
    with _lock:
        tables = list(_tables.values())
        _tables.clear()
    for table in tables:
        table.close()
