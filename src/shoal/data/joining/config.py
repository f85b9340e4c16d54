"""The settings of a join: two inputs, a window, labels, and the output."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from shoal import _core
from shoal.data.live.address import Address, parse_address
from shoal.errors import ConfigError, did_you_mean

UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9, "iso": 0.0}
"""Unit of times in messages -> units per second; ``iso`` is text such as 2026-11-01T12:00:00Z."""
RULES = ("any", "count", "sum", "max", "first", "last")
_DELIMITERS = {"json": "", "csv": ",", "tsv": "\t"}
_MICROS = 1_000_000
_LONGEST_S = 3650 * 86400
Duration = str | float | timedelta
"""``"30m"``, seconds, or a ``timedelta``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinInput:
    """``[impressions]`` or ``[actions]``: a stream, and the fields of its messages with the key and the time."""

    source: str
    """``redis://host:6379/name``, ``kafka://host:9092/name``, ``dir:path`` or ``-``; in a file also called ``from``."""
    key: str | tuple[str, ...]
    """The field, or several, that identifies the impression; actions have the same one."""
    time: str = "time"
    """The field with the event's time."""
    time_unit: str = "s"
    """s, ms, us, ns, or iso for text such as 2026-11-01T12:00:00Z."""
    kind: str = ""
    """The field with the action's kind, such as click; empty if there is only one kind."""
    value: str = ""
    """The field with the action's value, such as dwell time in seconds."""
    format: str = "json"
    """json (one object per message), csv or tsv (without quotes; see ``columns``)."""
    columns: tuple[str, ...] = ()
    """The names of the columns of csv and tsv, in order."""
    lateness: Duration = 60.0
    """How far out of order the stream can be. Raise it when ``join_late_impressions_total`` or
    ``join_late_actions_total`` rises; samples are delayed by this much."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.key,) if isinstance(self.key, str) else tuple(self.key))
        object.__setattr__(self, "columns", tuple(self.columns))
        if not self.source:
            raise ConfigError("join: an input must have a source, such as redis://localhost/clicks; got none")
        _checked(self.source, "from")
        if not self.key or not all(self.key):
            raise ConfigError(f"join: key must name a field of {parse_address(self.source)}, got {self.key!r}")
        if self.time_unit not in UNITS:
            raise ConfigError(f"join: time_unit must be one of {', '.join(UNITS)}, got {self.time_unit!r}")
        if self.format not in _DELIMITERS:
            raise ConfigError(f"join: format must be one of {', '.join(_DELIMITERS)}, got {self.format!r}")
        if (self.format == "json") == bool(self.columns):
            raise ConfigError(
                f"join: columns must be given for csv and tsv, and not for json; got {self.format} and {self.columns!r}"
            )
        for name in [*self.key, self.time, *filter(None, (self.kind, self.value))] if self.columns else ():
            if name not in self.columns:
                hint = did_you_mean(name, self.columns)
                raise ConfigError(f"join: {name!r} must be one of the columns {', '.join(self.columns)}{hint}")
        micros(self.lateness, "lateness", zero=True)

    def native(self, labels: tuple[str, ...] = ()) -> _core.JoinFields:
        """The fields in the form that the native joiner takes; messages must not have fields named in ``labels``."""
        at = {name: number for number, name in enumerate(self.columns)}
        return _core.join_fields(
            list(self.key), self.time, self.kind, self.value, _DELIMITERS[self.format],
            [at.get(name, -1) for name in self.key], [at.get(name, -1) for name in (self.time, self.kind, self.value)],
            UNITS[self.time_unit], list(labels),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinLabel:
    """``[labels.NAME]``: how an impression's actions become a label."""

    rule: str = "any"
    """any (1 if there is an action), count, or the sum, max, first or last of the actions' values. 0 if none."""
    kinds: tuple[str, ...] = ()
    """The kinds of actions that count; empty for all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", (self.kinds,) if isinstance(self.kinds, str) else tuple(self.kinds))
        if self.rule not in RULES:
            raise ConfigError(f"join: the rule of a label must be one of {', '.join(RULES)}, got {self.rule!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig:
    """A join. Changing a setting that its state on disk depends on requires a new ``state`` folder."""

    impressions: JoinInput
    actions: JoinInput
    window: Duration
    """The longest time from an impression to an action that belongs to it."""
    state: str
    """The folder for open impressions and checkpoints; only one joiner can use it."""
    labels: Mapping[str, JoinLabel] = field(default_factory=lambda: {"label": JoinLabel()})
    """Field of the sample -> its rule. A sample without an action for the first label is a negative."""
    before: Duration = 0.0
    """How much earlier than its impression an action can be, to allow for clock skew."""
    close: str = "window"
    """``window``: samples are made when windows end, in that order. ``action``: a sample is made at the first action
    for the first label, with only that action; the other samples are made when their windows end."""
    keep_negatives: float = 1.0
    """The share of negatives to keep, chosen by key and ``seed``. Give `shoal train` the same number, so that served
    scores are corrected for it."""
    seed: int = 0
    max_actions: int = 1000
    """The limit of waiting actions per key; more are counted (``join_excess_actions_total``) and dropped."""
    memory_bytes: int = 1 << 30
    """Memory for keys and the newest records; older ones are on disk. 10 million open impressions need 0.4 GiB."""
    checkpoint_s: float = 10.0
    """Seconds between checkpoints. After a crash, later messages are read again from the state folder."""
    sync: bool = False
    """Flush every batch to disk before it is joined. Without it batches survive a crash of the process; after a crash
    of the machine, messages since the last checkpoint are read from the inputs again."""
    idle: Duration = 60.0
    """A stream without messages for this long is assumed to have nothing older than this, by this machine's clock, so
    that windows close. Older messages that arrive after that are late."""
    future: Duration = 3600.0
    """An event more than this far in the future counts as broken: one wrong clock would close all windows."""
    out: str = ""
    """The address to which `shoal join` writes samples, in the form of ``source``."""
    dead_letters: str = ""
    """A file for broken messages; by default ``dead_letters.jsonl`` in the state folder."""
    on_damage: str = "stop"
    """A damaged segment stops the joiner (``stop``), or its records are counted (``join_lost_records_total``) and
    skipped (``skip``)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", dict(self.labels))
        if micros(self.window, "window") + micros(self.before, "before", zero=True) > _LONGEST_S * _MICROS:
            raise ConfigError(f"join: window must be at most ten years, got {self.window!r}")
        micros(self.idle, "idle")
        micros(self.future, "future")
        for name, value, allowed in (
            ("close", self.close, ("window", "action")),
            ("on_damage", self.on_damage, ("stop", "skip")),
        ):
            if value not in allowed:
                raise ConfigError(f"join: {name} must be {' or '.join(allowed)}, got {value!r}")
        if not 0 < self.keep_negatives <= 1:
            raise ConfigError(f"join: keep_negatives must be above 0 and at most 1, got {self.keep_negatives}")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"join: seed must be 0..2^64-1, got {self.seed}")
        if self.memory_bytes < 1 << 20 or self.max_actions < 1 or not self.checkpoint_s > 0:
            raise ConfigError(
                "join: memory_bytes must be at least 1 MiB, max_actions 1 and checkpoint_s above 0, got "
                f"{self.memory_bytes}, {self.max_actions} and {self.checkpoint_s}"
            )
        inputs = [str(parse_address(one.source)) for one in (self.impressions, self.actions)]
        if self.out and str(_checked(self.out, "out")) in inputs:
            raise ConfigError(f"join: out must differ from the inputs, got {self.out!r}")
        if not self.state:
            raise ConfigError("join: state must name a folder, got none")
        if not 1 <= len(self.labels) <= 64:
            raise ConfigError(f"join: there must be 1 to 64 labels, got {len(self.labels)}")
        for name in self.labels:
            if not name or not re.fullmatch(r"[\w.-]+", name):
                raise ConfigError(f"join: the name of a label must be letters, digits, '_', '.' or '-', got {name!r}")
            if name in self.impressions.columns:
                raise ConfigError(f"join: the label {name!r} must not be a column of the impressions")
        if any(one.rule not in ("any", "count") for one in self.labels.values()) and not self.actions.value:
            raise ConfigError("join: a label with rule sum, max, first or last needs [actions] value to name a field")
        if any(one.kinds for one in self.labels.values()) and not self.actions.kind:
            raise ConfigError("join: a label with kinds needs [actions] kind to name a field")

    def native(self, folder: str, *, block_bytes: int = 0) -> _core.Joiner:
        """Make a native joiner; ``block_bytes`` is the size of records in memory before they go to a segment."""
        labels = [(name, RULES.index(one.rule), list(one.kinds)) for name, one in self.labels.items()]
        return _core.Joiner(
            folder, self.impressions.native(tuple(self.labels)), self.actions.native(), labels=labels,
            window=micros(self.window, "window"), before=micros(self.before, "before", zero=True),
            lateness=[micros(one.lateness, "lateness", zero=True) for one in (self.impressions, self.actions)],
            close_on_action=self.close == "action", max_actions=self.max_actions, keep_negatives=self.keep_negatives,
            seed=self.seed, budget=self.memory_bytes, block=block_bytes, salt=int.from_bytes(os.urandom(8), "little"),
        )  # fmt: skip

    def identity(self) -> dict[str, Any]:
        """The settings that must match when a state folder is used again."""
        return {
            "window_us": micros(self.window, "window"), "before_us": micros(self.before, "before", zero=True),
            "close": self.close, "keep_negatives": self.keep_negatives, "seed": self.seed,
            "max_actions": self.max_actions,
            "labels": [[name, one.rule, list(one.kinds)] for name, one in self.labels.items()],
            **{
                side: {
                    "key": list(one.key), "time": one.time, "time_unit": one.time_unit, "kind": one.kind,
                    "value": one.value, "format": one.format, "columns": list(one.columns),
                    "lateness_us": micros(one.lateness, "lateness", zero=True),
                }
                for side, one in (("impressions", self.impressions), ("actions", self.actions))
            },
        }  # fmt: skip


def _checked(text: str, name: str) -> Address:
    try:
        return parse_address(text)
    except ConfigError as error:
        raise ConfigError(f"join: {name}: {error}") from None


def micros(value: Duration, name: str, *, zero: bool = False) -> int:
    """Convert a duration to microseconds.

    >>> micros("1.5h", "window"), micros(2, "window")
    (5400000000, 2000000)
    """
    seconds = math.nan
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)\s*", value)
        units = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
        seconds = float(match[1]) * units[match[2]] if match else math.nan
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    least = "at least 0" if zero else "above 0"
    if not (seconds > 0 or (zero and seconds == 0)) or seconds > _LONGEST_S:
        raise ConfigError(f"join: {name} must be a time {least}, such as '30m' or a number of seconds, got {value!r}")
    return max(int(not zero), round(seconds * _MICROS))


def size_of(value: int | str) -> int:
    """Convert a size such as ``"1GiB"``, or a number of bytes, to bytes.

    >>> size_of("1.5GiB")
    1610612736
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(|KiB|MiB|GiB|TiB)\s*", value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"join: memory must be a size such as '1GiB', got {value!r}")
    return int(float(match[1]) * 1024 ** ("", "KiB", "MiB", "GiB", "TiB").index(match[2]))


def join_config(content: Mapping[str, Any], where: str = "join", folder: str = "") -> JoinConfig:
    """Read the settings from a TOML file's content, or a section of it; paths are relative to ``folder``.

    Raises:
        ConfigError: a setting is missing, unknown or wrong; the message names it and ``where``.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where} must be a section, got {content!r}")
    content = dict(content)
    try:
        for side in ("impressions", "actions"):
            content[side] = _input(content.get(side), side, folder)
        labels = content.get("labels", {"label": {}})
        if not isinstance(labels, Mapping) or not all(isinstance(one, Mapping) for one in labels.values()):
            raise ConfigError(f"labels must be sections [labels.NAME], got {labels!r}")
        content["labels"] = {name: _section(JoinLabel, one, f"labels.{name}") for name, one in labels.items()}
        if "memory" in content:
            content["memory_bytes"] = size_of(content.pop("memory"))
        for name in ("state", "dead_letters"):
            if isinstance(content.get(name), str) and content[name]:
                content[name] = os.path.join(folder, content[name])
        if isinstance(content.get("out"), str):
            content["out"] = relative_source(content["out"], folder)
        return _section(JoinConfig, content, "join")
    except (ConfigError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: {str(error).removeprefix('join: ')}") from None


def load_join(path: str | os.PathLike[str], state: str | None = None) -> JoinConfig:
    """Load the settings from ``join.toml``, from ``[data.join]`` in a training run's file, or from ``[join]`` in the
    file of a complete system. ``state`` overrides the folder in the file."""
    where = os.fspath(path)
    try:
        with open(where, "rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {where!r} ({error.strerror or error})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not a TOML file: {error}") from None
    data = content.get("data")
    if isinstance(data, dict) and "join" in data:  # the file of a training run
        return join_config(data["join"], f"{where}: [data.join]", os.path.dirname(where))
    own = content.pop("join", {})
    if not isinstance(own, dict):
        raise ConfigError(f"{where}: [join] must be a section, got {own!r}")
    if data is not None or "table" in content:  # the file of a complete system, with a section [join]
        content = {name: content[name] for name in ("impressions", "actions", "labels") if name in content}
    made = {**own, **content, **({} if state is None else {"state": os.path.abspath(state)})}
    return join_config(made, where, os.path.dirname(where))


def relative_source(source: str, folder: str) -> str:
    """Return an address; the path of a ``dir:`` address is relative to ``folder``."""
    if not source.startswith("dir:"):
        return source
    return f"dir:{os.path.join(folder, source.removeprefix('dir:').removeprefix('//'))}"


def _input(content: Any, side: str, folder: str) -> JoinInput:
    if not isinstance(content, Mapping):
        raise ConfigError(f'[{side}] with from = "redis://…" and key = "…" is missing')
    content = dict(content)
    if "from" in content:
        content["source"] = content.pop("from")
    if isinstance(content.get("source"), str):
        content["source"] = relative_source(content["source"], folder)
    try:
        return _section(JoinInput, content, side)
    except ConfigError as error:
        text = str(error).removeprefix("join: ")
        raise ConfigError(text if text.startswith("[") else f"[{side}] {text}") from None


def _section(kind: type, content: Mapping[str, Any], name: str) -> Any:
    known = {one.name: one for one in dataclasses.fields(kind)}
    for key in content:
        if key not in known:
            raise ConfigError(f"[{name}] has no setting {key!r}{did_you_mean(key, known)}; it has {', '.join(known)}")
    for key, one in known.items():
        if key not in content and one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
            raise ConfigError(f"[{name}] {'from' if key == 'source' else key} is missing")
    for key, value in content.items():
        default = known[key].default
        wrong = isinstance(default, str) and not isinstance(value, str)
        number = (
            isinstance(default, int | float) and not isinstance(default, bool) and "Duration" not in known[key].type
        )
        wrong = wrong or (number and (isinstance(value, bool) or not isinstance(value, int | float)))
        if wrong or (isinstance(default, bool) and not isinstance(value, bool)):
            wanted = (
                "a text" if isinstance(default, str) else "true or false" if isinstance(default, bool) else "a number"
            )
            raise ConfigError(f"[{name}] {key} must be {wanted}, got {value!r}")
    return kind(**content)
