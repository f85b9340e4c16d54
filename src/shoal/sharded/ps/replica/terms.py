"""The terms of a log: which leader wrote which records."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from shoal.durable import write_whole
from shoal.errors import DataError

FILE = "terms.json"


@dataclass(frozen=True)
class Terms:
    """``spans`` are (term, number of its first record), rising in both."""

    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, given: Any) -> Terms:
        """Build from JSON; raises `DataError` if it is not a list of terms."""
        try:
            spans = tuple((int(term), int(first)) for term, first in given)
        except (TypeError, ValueError, OverflowError):
            raise DataError(f"terms must be pairs of integers, got {given!r:.80}") from None
        if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(spans)):
            raise DataError(f"terms and their first records must rise, got {given!r:.80}")
        return cls(spans)

    @classmethod
    def read(cls, directory: Path) -> Terms:
        """Read from a server's directory; empty if it was never part of a group."""
        try:
            return cls.of(json.loads((directory / FILE).read_text()))
        except FileNotFoundError:
            return cls()
        except ValueError as error:
            raise DataError(f"{directory / FILE} is damaged: {error}") from None

    def write(self, directory: Path) -> None:
        write_whole(directory / FILE, json.dumps(self.spans))

    @property
    def newest(self) -> int:
        """The newest term; 0 if there is none."""
        return self.spans[-1][0] if self.spans else 0

    def begin(self, term: int, first: int) -> Terms:
        """Add a term whose leader writes records from ``first`` on. Terms without records are dropped."""
        kept = tuple(span for span in self.spans if span[1] < first)
        return Terms((*kept, (term, first)))

    def last_of(self, term: int) -> int | None:
        """The number of the last record of a term; None for the newest term."""
        for (number, _), (_, following) in pairwise(self.spans):
            if number == term:
                return following - 1
        return None

    def __contains__(self, term: object) -> bool:
        return any(number == term for number, _ in self.spans)


def differs(mine: Terms, my_last: int, leader: Terms, leader_last: int) -> str:
    """Why a log with terms ``mine`` that ends at record ``my_last`` is not a beginning of the leader's; "" if it is."""
    if not my_last:
        return ""
    begun = [span for span in mine.spans if span[1] <= my_last]
    if not begun:
        return f"records up to {my_last} were written before this server was part of a group"
    term = begun[-1][0]
    if term not in leader:
        return f"the leader's log has no term {term}, in which record {my_last} was written"
    end = leader.last_of(term)
    end = leader_last if end is None else min(end, leader_last)
    if my_last > end:
        return f"term {term} ended at record {end} of the leader's log, and this log has records up to {my_last}"
    return ""
