"""What commands print with: tables for people, JSON for machines, progress on a terminal alone."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shoal.errors import missing_extra

if TYPE_CHECKING:
    from rich.console import Console

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def make_console(*, stderr: bool = False) -> Console:
    """Colours and the terminal's width where there is one; plain text of 120 columns elsewhere."""
    try:
        from rich.console import Console
    except ImportError:
        raise missing_extra("rich", "cli") from None
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 120, highlight=False)


def print_json(value: Any) -> None:
    """One JSON document; NaN and infinity, which JSON does not have, become null."""
    print(json.dumps(_finite(value), indent=1, default=str))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """The first ``left`` columns are words, the others numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # names are text, whatever brackets they hold
    make_console().print(table)


@contextmanager
def counting(what: str) -> Iterator[Callable[[int], None]]:
    """A function that takes how many more there are; shows the sum on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda n: None
        return
    total, shown = 0, 0.0

    def add(n: int) -> None:
        nonlocal total, shown
        total += n
        if time.monotonic() - shown > 0.2:
            shown = time.monotonic()
            print(f"\r{total:,} {what}", end="", file=sys.stderr, flush=True)

    try:
        yield add
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def show_bytes(n: float) -> str:
    """``1.5 GB``."""
    power = min(len(_UNITS) - 1, max(0, int(math.log10(max(1.0, abs(n))) // 3)))
    return f"{n:.0f} B" if power == 0 else f"{n / 1000**power:.3g} {_UNITS[power]}"


def show_time(seconds: int | None) -> str:
    """UTC, to the second; 0 means that the time is unknown."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)) if seconds else "-"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
