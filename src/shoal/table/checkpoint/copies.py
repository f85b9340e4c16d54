"""Copies of rows that are made just before a table changes, for whoever asked for them and has not read them yet."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

WAITING: dict[int, list[weakref.ref[Any]]] = {}
"""By the ``id()`` of a table: who wants a copy before it changes. Mostly empty, which is what a write looks at."""


class Waiter(Protocol):
    """Reads a table later."""

    def copy_rows(self) -> None:
        """Reads it now: it is about to change."""


def wait_for_change(table: Any, waiter: Waiter) -> None:
    """Has ``waiter``, which keeps the table alive, copy its rows before the next change, if it is still there then."""
    key = id(table)
    WAITING.setdefault(key, []).append(weakref.ref(waiter, lambda ref: _forget(key, ref)))


def about_to_change(*tables: Any) -> None:
    """Called by whatever changes rows, before it does."""
    for table in tables:
        for ref in WAITING.pop(id(table), ()):
            waiter = ref()
            if waiter is not None:
                waiter.copy_rows()


def _forget(key: int, ref: weakref.ref[Any]) -> None:
    waiting = WAITING.get(key)
    if waiting is not None and ref in waiting:
        waiting.remove(ref)
        if not waiting:
            WAITING.pop(key, None)
