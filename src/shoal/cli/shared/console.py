"""Output of commands: tables, JSON, and progress that only a terminal shows."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shoal.errors import missing_extra
from shoal.observe.finite import finite

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def make_console(*, stderr: bool = False) -> Console:
    """Make a console with the terminal's colours and width, or plain text of 120 columns without a terminal."""
    try:
        from rich.console import Console
    except ImportError:
        raise missing_extra("rich", "cli") from None
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 120, highlight=False)


def print_json(value: Any) -> None:
    """Print one JSON document; NaN and infinity become null."""
    print(json.dumps(finite(value), indent=1, default=str))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str | Text]], left: int = 1) -> None:
    """Print a table with the first ``left`` columns aligned left and the others right. Text is shown literally."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    make_console().print(table)


@contextmanager
def counting(what: str) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with increments; the sum is shown on stderr if it is a terminal."""
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
    """Format as in ``1.5 GB``."""
    power = min(len(_UNITS) - 1, max(0, int(math.log10(max(1.0, abs(n))) // 3)))
    return f"{n:.0f} B" if power == 0 else f"{n / 1000**power:.3g} {_UNITS[power]}"


def show_time(seconds: int | None) -> str:
    """Format a time in UTC to the second; ``-`` if it is unknown (0 or None)."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)) if seconds else "-"
