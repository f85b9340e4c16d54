"""The report of `shoal table stat` on a table's budget: its use, its evictions and the miss ratio of other sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shoal.table.budget.evicted import MissRatioCurve

_SHARES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
_ENOUGH = 1000  # the fewest sampled writes for a meaningful curve


def show_age(seconds: float) -> str:
    """A duration as text, with two significant digits.

    >>> show_age(90), show_age(7200), show_age(200000)
    ('90 s', '2.0 h', '2.3 d')
    """
    for size, unit in ((86400, "d"), (3600, "h")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def budget_lines(budget: Mapping[str, Any], rows: int) -> Iterator[str]:
    """Lines of text; none for a table without a budget."""
    if not budget:
        return
    limits = [
        f"{budget[name]:,} {unit}" for name, unit in (("max_rows", "rows"), ("max_bytes", "bytes")) if budget[name]
    ]
    yield f"budget {' and '.join(limits)}; {rows:,} rows are held"
    yield (
        f"{budget['hit_rate']:.2%} of writes found their row; {budget['evicted']:,} rows evicted, "
        f"{show_age(budget['age_mean_s'])} old on average; {budget['refused']:,} ids refused"
    )
    curve = budget.get("curve")
    if not curve or curve["sampled"] < _ENOUGH:
        return
    misses = MissRatioCurve(curve["rows"], curve["misses"], curve["sampled"])
    points = (f"{share:g}x {misses.at(int(share * rows)):.1%}" for share in _SHARES)
    yield f"writes that a table of other sizes would miss (Lru, from {curve['sampled']:,} samples): {', '.join(points)}"
