"""The content of a status page as plain values that `page.html` draws: tiles, charts, tables."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

Unit = Literal["", "n", "per_s", "s", "ago", "bytes", "share", "digits"]
"""Formats of values: unchanged, number, rate, duration, time since, size, percentage, four digits."""
Tone = Literal["", "good", "bad", "warn"]

Part = dict[str, Any]


def tile(label: str, value: Any, unit: Unit = "n", tone: Tone = "", hint: str = "") -> Part:
    """A figure at the top of the page; None is shown as unknown."""
    return {"label": label, "value": value, "unit": unit, "tone": tone, "hint": hint}


def chart(title: str, figures: Mapping[str, str], unit: Unit = "n") -> Part:
    """A chart over time; ``figures``: legend text -> name of a figure in the history."""
    return {"title": title, "unit": unit, "lines": [{"name": name, "figure": each} for name, each in figures.items()]}


def table(
    title: str, columns: Sequence[str | tuple[str, Unit]], rows: Sequence[Sequence[Any]], empty: str = "none yet"
) -> Part:
    """A table; a column is its name, or name and unit. Cells are values, `pill`s or `link`s."""
    heads = [
        {"name": each, "unit": ""} if isinstance(each, str) else {"name": each[0], "unit": each[1]} for each in columns
    ]
    return {"title": title, "columns": heads, "rows": [list(row) for row in rows], "empty": empty}


def pill(text: str, tone: Tone = "", title: str = "") -> Part:
    """A coloured label for a state."""
    return {"pill": text, "tone": tone, "title": title}


def link(text: str, href: str) -> Part:
    return {"link": text, "href": href}


def page(
    title: str,
    *,
    about: str = "",
    state: Part | None = None,
    tiles: Sequence[Part] = (),
    charts: Sequence[Part] = (),
    tables: Sequence[Part] = (),
) -> Part:
    """The complete page."""
    return {
        "title": title, "about": about, "state": state, "tiles": list(tiles), "charts": list(charts),
        "tables": list(tables),
    }  # fmt: skip
