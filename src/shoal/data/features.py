"""How raw values become ids and numbers: one definition, shared by readers, exports and servers.

A `Feature` gives ids, a `Number` one input of the net. A `Schema` holds them by name and compiles them for native
code. docs/features.md documents the hash of a text, with test vectors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from shoal import _core
from shoal.errors import ConfigError, did_you_mean
from shoal.fid import MAX_SLOT_V2

KINDS = ("text", "id", "bucket", "log", "vocabulary", "cross")  # as in csrc/data/feature.h
UNKNOWN = ("hash", "one", "drop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """The definition of a categorical feature: how its values become ids.

    A feature has one id in each sample, or any number if it is a ``list`` (or has a ``separator``). An empty or missing
    value counts as ``default``; without one it is the id of the empty text, or no id in a list.
    """

    kind: Literal["text", "id", "bucket", "log", "vocabulary", "cross"] = "text"
    """``text`` hashes texts and integers, ``id`` takes integers as they are, ``bucket`` numbers by ``boundaries``,
    ``log`` numbers by the logarithm, ``vocabulary`` gives each known word its own id, ``cross`` combines features."""
    column: str | None = None
    """The column with the values; by default the feature's own name. Several features can read the same column."""
    list: bool = False
    """A sample has any number of values."""
    separator: str = ""
    """Separates the values within a text. Setting it makes the feature a list."""
    max_length: int | None = None
    """Keep at most this many ids of a list, the first ones."""
    default: str | float | None = None
    """The value used for an empty or missing one."""
    boundaries: tuple[float, ...] = ()
    """For ``bucket``, in ascending order: a value's bucket is the number of boundaries <= the value."""
    steps: float = 1.0
    """For ``log``: the number of ids per doubling of ``1 + |x|``."""
    words: tuple[str, ...] = ()
    """The vocabulary. A configuration can name a ``file`` with one word per line instead, which is read once."""
    unknown: Literal["hash", "one", "drop"] = "one"
    """A word that is not in the vocabulary is hashed, shares one id with all such words, or gets no id."""
    of: tuple[str, ...] = ()
    """The features that a cross combines, each defined before it. Every combination of their values has an id."""
    slot: int | None = None
    """Upper bits of the ids; by default the feature's position, from 1. Features with the same slot share rows."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            hint = did_you_mean(self.kind, KINDS)
            raise ConfigError(f"feature: kind must be one of {', '.join(KINDS)}, got {self.kind!r}{hint}")
        if self.unknown not in UNKNOWN:
            raise ConfigError(f"feature: unknown must be one of {', '.join(UNKNOWN)}, got {self.unknown!r}")
        for name, kind in (("boundaries", "bucket"), ("words", "vocabulary"), ("of", "cross")):
            if bool(getattr(self, name)) != (self.kind == kind):
                raise ConfigError(f"feature: {name} must be given for kind = {kind!r} and no other kind, got {self}")
        if len(self.separator.encode()) > 1:
            raise ConfigError(f"feature: separator must be one ASCII character or empty, got {self.separator!r}")
        is_list = self.listed or self.kind == "cross"
        if self.max_length is not None and not (is_list and 1 <= self.max_length < 1 << 63):
            raise ConfigError(
                f"feature: max_length must be 1..2**63 - 1 and used only for lists, got {self.max_length}"
            )
        if list(self.boundaries) != sorted(set(self.boundaries)) or not all(map(math.isfinite, self.boundaries)):
            raise ConfigError(f"feature: boundaries must be finite numbers in ascending order, got {self.boundaries}")
        if not 0 < self.steps < math.inf:
            raise ConfigError(f"feature: steps must be above 0, got {self.steps}")
        if len(set(self.words)) < len(self.words):
            twice = next(word for word in self.words if self.words.count(word) > 1)
            raise ConfigError(f"feature: the words of a vocabulary must be distinct, got {twice!r} twice")
        if len(self.of) == 1:
            raise ConfigError(f"feature: a cross must combine at least two features, got only {self.of[0]!r}")
        if self.kind == "cross" and (self.column or self.separator or self.list or self.default is not None):
            raise ConfigError("feature: a cross must not have a column, list, separator or default")
        if self.slot is not None and not (type(self.slot) is int and 0 <= self.slot <= MAX_SLOT_V2):
            raise ConfigError(f"feature: slot must be 0..{MAX_SLOT_V2}, got {self.slot!r}")
        if self.kind == "vocabulary" and self.unknown == "drop" and not self.listed:
            raise ConfigError("feature: unknown = 'drop' needs a list; other features always have one id")
        if self.default is not None:
            self._check_default()

    def _check_default(self) -> None:
        number = isinstance(self.default, int | float) and not isinstance(self.default, bool)
        if self.kind in ("bucket", "log") and not (number and math.isfinite(self.default)):  # pyrefly: ignore
            raise ConfigError(f"feature: the default of kind = {self.kind!r} must be a number, got {self.default!r}")
        if self.kind == "id" and not (isinstance(self.default, int) and -(1 << 63) <= self.default < 1 << 64):
            raise ConfigError(f"feature: the default of kind = 'id' must be a 64-bit integer, got {self.default!r}")

    @property
    def listed(self) -> bool:
        """Whether this definition alone allows any number of ids per sample."""
        return self.list or bool(self.separator)

    @classmethod
    def from_toml(cls, name: str, values: Mapping[str, Any]) -> Self:
        """Build a feature from a ``[features.NAME]`` section."""
        values = dict(values)
        if "file" in values:
            values["words"] = read_words(values.pop("file"), name)
        return _from_toml(cls, f"[features.{name}]", values, "file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One number as the net gets it: clipped, then its logarithm, then ``(x - mean) / std``."""

    column: str | None = None
    """The column with the values; by default the number's own name."""
    default: float = 0.0
    """The value used for an empty or missing one, before clipping."""
    low: float | None = None
    high: float | None = None
    """Values outside this range are clipped to it."""
    log: bool = False
    """``x`` becomes ``sign(x) * log(1 + |x|)``, which suits counts."""
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ConfigError(f"number: low must be below high, got {self.low} and {self.high}")
        if not (math.isfinite(self.default) and math.isfinite(self.mean)) or not 0 < self.std < math.inf:
            raise ConfigError(
                f"number: default and mean must be finite and std above 0, got {self.default}, {self.mean}, {self.std}"
            )

    @classmethod
    def from_toml(cls, name: str, values: Mapping[str, Any]) -> Self:
        """Build a number from a ``[features.NAME]`` section with ``kind = "number"``."""
        return _from_toml(cls, f"[features.{name}]", values)


def definition(name: str, values: Mapping[str, Any]) -> Feature | Number:
    """Build the feature or number that a ``[features.NAME]`` section, or its JSON in a checkpoint, defines."""
    values = dict(values)
    kind, kinds = values.get("kind"), (*KINDS, "number")
    if kind == "number":
        del values["kind"]
        return Number.from_toml(name, values)
    if isinstance(kind, str) and kind not in kinds:
        hint = did_you_mean(kind, kinds)
        raise ConfigError(f"[features.{name}]: kind must be one of {', '.join(kinds)}, got {kind!r}{hint}")
    return Feature.from_toml(name, values)


def to_json(value: Feature | Number) -> dict[str, Any]:
    """Return the JSON that `definition` reads: the fields that differ from their defaults."""
    plain = {field.name: field.default for field in fields(value) if field.default is not MISSING}
    given = {name: field for name, field in asdict(value).items() if field != plain.get(name)}
    given = {name: [*field] if isinstance(field, tuple) else field for name, field in given.items()}
    return {"kind": "number", **given} if isinstance(value, Number) else given


def _from_toml(cls: Any, where: str, values: Mapping[str, Any], *more: str) -> Any:
    known = {*more, *(field.name for field in fields(cls))}
    for name in values:
        if name not in known:
            raise ConfigError(
                f"{where} has no setting {name!r}{did_you_mean(name, known)}; it takes {', '.join(sorted(known))}"
            )
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    hints = get_type_hints(cls)
    for name, value in values.items():
        if not _is(value, hints[name]):
            raise ConfigError(f"{where}: {name} must be {_words_of(hints[name])}, got {value!r}")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).partition(': ')[2]}") from None
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from None


def _is(value: Any, hint: Any) -> bool:
    """Whether a TOML or JSON value has a field's type; integers count as numbers, booleans do not."""
    kinds = get_args(hint)
    if get_origin(hint) is Literal:
        return isinstance(value, str)  # the class checks the value itself, with a hint
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_is(one, kinds[0]) for one in value)
    if kinds:
        return any(_is(value, kind) for kind in kinds)
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _words_of(hint: Any) -> str:
    names = {str: "a text", int: "an integer", float: "a number", bool: "true or false"}
    if get_origin(hint) is tuple:
        return f"a list of {names[get_args(hint)[0]].split()[-1]}s"
    return " or ".join(names[kind] for kind in get_args(hint) or (hint,) if kind in names) or "a text"


def read_words(path: str, name: str) -> tuple[str, ...]:
    """Read the words of a vocabulary file, one per line."""
    if not isinstance(path, str):
        raise ConfigError(f"[features.{name}] file must be the path of a vocabulary, got {path!r}")
    try:
        with open(path, encoding="utf-8") as file:
            words = tuple(line.rstrip("\r\n") for line in file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"[features.{name}] file: {path} cannot be read as a vocabulary ({error})") from None
    if not words:
        raise ConfigError(f"[features.{name}] file: {path} is empty; it must have one word per line")
    return words


def native_set(
    features: Mapping[str, Feature],
    numbers: Mapping[str, Number],
    slots: Mapping[str, int],
    listed: frozenset[str] = frozenset(),
) -> _core.FeatureSet:
    """Compile definitions for native code; features in ``listed`` are lists in addition to those defined as lists."""
    out, place, lists = _core.FeatureSet(), {}, set()
    for name, feature in features.items():
        unknown = [part for part in feature.of if part not in place]
        if unknown:
            raise ConfigError(
                f"feature {name!r}: a cross must combine features that are defined before it, got {unknown[0]!r}"
                f"{did_you_mean(unknown[0], place)}"
            )
        if feature.listed or name in listed or any(part in lists for part in feature.of):
            lists.add(name)
        default = None if feature.default is None else str(feature.default).encode()
        out.add_feature(
            KINDS.index(feature.kind), slots[name], name in lists, ord(feature.separator) if feature.separator else 0,
            feature.max_length or 0, default, list(feature.boundaries), feature.steps, list(feature.words),
            UNKNOWN.index(feature.unknown), [place[part] for part in feature.of],
        )  # fmt: skip
        place[name] = len(place)
    for number in numbers.values():
        clip = (-math.inf if number.low is None else number.low, math.inf if number.high is None else number.high)
        out.add_number(number.default, *clip, number.log, number.mean, 1 / number.std)
    return out
