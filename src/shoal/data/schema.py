"""`Schema`: which columns of the data are the label, numbers and ids, and how a category's text becomes an id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal import _core
from shoal.errors import ConfigError, did_you_mean
from shoal.fid import MAX_SLOT_V2


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The columns of the data, by name.

    A category is told apart by its text: an id is the slot of its feature (bits 62..48) and 48 bits of a hash of the
    text. The integer 12 in a Parquet file and the text ``12`` in a CSV file are one id. Among n categories of one
    feature about n²/2^49 pairs share an id: none is to be expected below 10 million, 18 pairs in 100 million.
    """

    label: str
    dense: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    time: str | None = None
    """A column of seconds since 1970, which rows are stamped with and expire by."""
    slots: Mapping[str, int] = field(default_factory=dict)
    """Of features whose slot is not their place in ``sparse``, from 1; features with one slot share their rows."""
    raw: bool = False
    """Integers are 64-bit ids already and are not hashed."""
    positive_above: float | None = None
    """The label is 1 where the column is above this, else 0; without it the column holds 0 and 1."""
    log_dense: bool = False
    """Numbers x become sign(x) * log(1 + |x|), which suits counts."""

    def __post_init__(self) -> None:
        names = [self.label, *self.dense, *self.sparse, *([self.time] if self.time else [])]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"data: every column has one role, but {', '.join(map(repr, twice))} has several")
        if not self.label:
            raise ConfigError("data: label names the column to predict, got an empty name")
        if not self.dense and not self.sparse:
            raise ConfigError("data: there are neither dense nor sparse columns, so there is nothing to learn from")
        for name, slot in self.slots.items():
            if name not in self.sparse:
                raise ConfigError(f"data: slots names {name!r}, which is not one of the sparse columns")
            if not isinstance(slot, int) or isinstance(slot, bool) or not 0 <= slot <= MAX_SLOT_V2:
                raise ConfigError(f"data: the slot of {name!r} is 0..{MAX_SLOT_V2}, got {slot!r}")
        if len(self.sparse) > MAX_SLOT_V2:
            raise ConfigError(f"data: at most {MAX_SLOT_V2} sparse columns, got {len(self.sparse)}")

    def slot(self, name: str) -> int:
        """The slot of a sparse column."""
        return self.slots.get(name, self.sparse.index(name) + 1)

    def slot_numbers(self) -> list[int]:
        """Of all sparse columns in order."""
        return [self.slots.get(name, number) for number, name in enumerate(self.sparse, start=1)]

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps, to refuse data of another shape."""
        return {**asdict(self), "slots": dict(self.slots), "dense": list(self.dense), "sparse": list(self.sparse)}


def no_column(name: str, columns: Sequence[str]) -> str:
    """That a file has no such column, and which it has."""
    there = ", ".join(map(repr, columns[:50])) + (", …" if len(columns) > 50 else "")
    return f"there is no column {name!r}{did_you_mean(name, columns)}; the columns are {there}"


CRITEO = Schema(
    label="label",
    dense=tuple(f"I{i}" for i in range(1, 14)),
    sparse=tuple(f"C{i}" for i in range(1, 27)),
    log_dense=True,
)
"""The columns of the Criteo click logs, which have no header: the label, 13 counts, 26 categories."""


def text_fid(text: str | bytes, slot: int) -> int:
    """The id of a category's text in a slot, as all readers compute it.

    >>> text_fid("68fd1e64", 1) == text_fid(b"68fd1e64", 1) != text_fid("68fd1e64", 2)
    True
    """
    if not 0 <= slot <= MAX_SLOT_V2:
        raise ConfigError(f"text_fid: a slot is 0..{MAX_SLOT_V2}, got {slot}")
    return _core.text_fid(text.encode() if isinstance(text, str) else text, slot)
