"""`Schema`: which columns are the label, the numbers and the features, and how raw values become numbers and ids."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal import _core
from shoal.data.features import Feature, Number, definition, native_set, to_json
from shoal.errors import ConfigError
from shoal.fid import MAX_SLOT_V2
from shoal.table.arguments import MAX_TIME


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The numbers and features of the data, by name; each reads the column of its name unless its definition differs.

    A category is identified by its text: an id is the slot of its feature (bits 62..48) and 48 bits of a hash of the
    text. The integer 12 in a Parquet file and the text ``12`` in a CSV file have the same id. Among n categories of one
    feature, about n²/2^49 pairs share an id: none is expected below 10 million categories, 18 pairs in 100 million.

    >>> age = Feature(kind="bucket", boundaries=(18, 65), column="years")
    >>> Schema(label="click", sparse=("user", "age"), definitions={"age": age}).raw_columns()
    ['click', 'user', 'years']
    """

    label: str
    dense: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    time: str | None = None
    """A column of seconds since 1970, used to stamp and to expire rows."""
    slots: Mapping[str, int] = field(default_factory=dict)
    """Slots that are not the feature's position in ``sparse``, from 1. Features with the same slot share rows."""
    raw: bool = False
    """Integers are 64-bit ids already and are not hashed."""
    positive_above: float | None = None
    """The label is 1 where the column is above this, else 0. Without it the column must hold 0 and 1."""
    log_dense: bool = False
    """Numbers ``x`` become ``sign(x) * log(1 + |x|)``, as suits counts; a `Number` in ``definitions`` sets its own."""
    definitions: Mapping[str, Feature | Number] = field(default_factory=dict)
    """Definitions of the features and numbers that differ from the default."""
    keep_negatives: float = 1.0
    """The share of negatives that was kept in the data. Served scores are corrected for it; see `log_odds`."""

    def __post_init__(self) -> None:
        names = [self.label, *self.dense, *self.sparse, *([self.time] if self.time else [])]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"data: every column must have one role, but {', '.join(map(repr, twice))} has several")
        if not all((*self.dense, *self.sparse)):
            raise ConfigError("data: dense and sparse must name columns, got an empty name")
        if not self.label:
            raise ConfigError("data: label must name the column to predict, got an empty name")
        if not self.dense and not self.sparse:
            raise ConfigError("data: dense and sparse must not both be empty; name the columns to learn from")
        for name, slot in self.slots.items():
            if name not in self.sparse:
                raise ConfigError(f"data: slots must name sparse columns, got {name!r}")
            if not isinstance(slot, int) or isinstance(slot, bool) or not 0 <= slot <= MAX_SLOT_V2:
                raise ConfigError(f"data: the slot of {name!r} must be 0..{MAX_SLOT_V2}, got {slot!r}")
        if len(self.sparse) > MAX_SLOT_V2:
            raise ConfigError(f"data: there must be at most {MAX_SLOT_V2} sparse columns, got {len(self.sparse)}")

        if not 0 < self.keep_negatives <= 1:
            raise ConfigError(f"data: keep_negatives must be above 0 and at most 1, got {self.keep_negatives}")
        for name, given in self.definitions.items():
            role, names = ("dense", self.dense) if isinstance(given, Number) else ("sparse", self.sparse)
            if name not in names:
                kind = "a number" if role == "dense" else "a feature"
                raise ConfigError(f"data: {name!r} is defined as {kind}, so {role} must name it, got {list(names)}")
        self.native()  # checks references between definitions

    @property
    def log_odds(self) -> float:
        """The term to add to a logit learnt from this data to get that of the full data: log(``keep_negatives``).

        Dropping negatives divides their number by a known factor, and so multiplies the odds by that factor.
        """
        return math.log(self.keep_negatives)

    def feature(self, name: str) -> Feature:
        """The definition of a feature."""
        given = self.definitions.get(name)
        return given if isinstance(given, Feature) else Feature(kind="id" if self.raw else "text")

    def number(self, name: str) -> Number:
        """The definition of a number."""
        given = self.definitions.get(name)
        return given if isinstance(given, Number) else Number(log=self.log_dense)

    def slot(self, name: str) -> int:
        """The slot of a feature."""
        own = self.feature(name).slot
        return self.slots.get(name, self.sparse.index(name) + 1) if own is None else own

    def column(self, name: str) -> str:
        """The column that a number or a feature reads; empty for a cross."""
        given = self.definitions.get(name)
        if isinstance(given, Feature) and given.kind == "cross":
            return ""
        return (given.column if given is not None else None) or name

    def raw_columns(self) -> list[str]:
        """The columns that the data must contain, each once."""
        made = [self.column(name) for name in (*self.dense, *self.sparse)]
        return list(dict.fromkeys([self.label, *filter(None, made), *([self.time] if self.time else [])]))

    def native(self, *, lists: bool = False, separator: str = "") -> _core.FeatureSet:
        """The definitions compiled for readers and servers.

        With ``lists`` or a ``separator``, every feature without a definition is a list, too.
        """
        features = {name: self.feature(name) for name in self.sparse}
        plain = frozenset(name for name in self.sparse if name not in self.definitions)
        listed = plain if lists or separator else frozenset[str]()
        if separator:
            features |= {name: replace(features[name], separator=separator) for name in plain}
        slots = {name: self.slot(name) for name in self.sparse}
        return native_set(features, {name: self.number(name) for name in self.dense}, slots, listed)

    def to_json(self) -> dict[str, Any]:
        """JSON values for checkpoints, which refuse data of another shape, and exports, which convert raw values."""
        made = {
            **{name: getattr(self, name) for name in ("label", "time", "raw", "positive_above", "log_dense")},
            "dense": list(self.dense), "sparse": list(self.sparse), "slots": dict(self.slots),
        }  # fmt: skip
        if self.keep_negatives != 1:
            made["keep_negatives"] = self.keep_negatives
        if self.definitions:
            made["definitions"] = {name: to_json(given) for name, given in self.definitions.items()}
        return made

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Schema:
        """Build a schema from the values of `to_json`."""
        defined = {name: definition(name, given) for name, given in values.get("definitions", {}).items()}
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        plain["definitions"] = defined
        return cls(**plain)


def wrong_time(name: str) -> str:
    """The reason for a row whose time cannot be the stamp of a table's row."""
    return f"its time {name!r} must be in seconds since 1970, 0..{MAX_TIME}"


CRITEO = Schema(
    label="label",
    dense=tuple(f"I{i}" for i in range(1, 14)),
    sparse=tuple(f"C{i}" for i in range(1, 27)),
    log_dense=True,
)
"""The columns of the Criteo click logs, which have no header: the label, 13 counts, 26 categories."""


def text_fid(text: str | bytes, slot: int) -> int:
    """The id of a category's text in a slot, computed as in all readers.

    >>> text_fid("68fd1e64", 1) == text_fid(b"68fd1e64", 1) != text_fid("68fd1e64", 2)
    True
    """
    if not 0 <= slot <= MAX_SLOT_V2:
        raise ConfigError(f"text_fid: a slot must be 0..{MAX_SLOT_V2}, got {slot}")
    return _core.text_fid(text.encode() if isinstance(text, str) else text, slot)
