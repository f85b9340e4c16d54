"""Copies of rows made just before a table changes, for readers that have not read them yet."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Protocol

WAITING: dict[int, list[weakref.ref[Any]]] = {}
"""``id()`` of a table -> waiters that need a copy before it changes. Usually empty, so writes check it cheaply."""


class Waiter(Protocol):
    """A reader that will read a table later."""

    def copy_rows(self) -> None:
        """Copies the rows now, because the table is about to change."""


def wait_for_change(table: Any, waiter: Waiter) -> None:
    """Makes ``waiter`` copy the table's rows before they next change, unless it is garbage-collected first. It must
    keep the table alive."""
    key = id(table)
    WAITING.setdefault(key, []).append(weakref.ref(waiter, partial(_forget, WAITING, key)))


def about_to_change(*tables: Any) -> None:
    """Must be called before rows change."""
    for table in tables:
        for ref in WAITING.pop(id(table), ()):
            waiter = ref()
            if waiter is not None:
                waiter.copy_rows()


def _forget(tables: dict[int, list[weakref.ref[Any]]], key: int, ref: weakref.ref[Any]) -> None:
    """Uses no globals: it also runs while the interpreter exits, after they were cleared."""
    waiting = tables.get(key)
    if waiting is not None and ref in waiting:
        waiting.remove(ref)
        if not waiting:
            tables.pop(key, None)
