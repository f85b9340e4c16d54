"""Load the configuration of a training run from a TOML file and changes to it."""

from __future__ import annotations

import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from shoal.data.features import Feature, Number, definition
from shoal.data.formats import FORMAT_OPTIONS
from shoal.data.joining.config import load_join
from shoal.data.live.address import is_live, parse_address
from shoal.errors import ConfigError, did_you_mean
from shoal.train.loop.config import Config, DataConfig, EvalConfig, ModelConfig, OutConfig, TrainConfig
from shoal.train.loop.serve_config import ServeConfig
from shoal.train.loop.table_config import TableConfig

T = TypeVar("T")

ONLINE_SECTIONS = ("servers", "replicas", "registry", "join", "trainers", "up")
"""Sections for `shoal up` that a training run ignores, so that one file can describe all processes."""

_SECTIONS: dict[str, type] = {
    "data": DataConfig, "table": TableConfig, "model": ModelConfig, "train": TrainConfig, "eval": EvalConfig,
    "out": OutConfig, "serve": ServeConfig,
}  # fmt: skip


def load_config(path: str | Path | None, changes: Mapping[str, Any] | None = None) -> Config:
    """Load a TOML file and apply ``changes`` such as ``{"train.epochs": 2}``.

    Paths in the file are relative to its folder, paths in ``changes`` to the working directory.
    """
    content: dict[str, Any] = {}
    if path is not None:
        try:
            with open(path, "rb") as file:
                content = tomllib.load(file)
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {str(path)!r} ({error.strerror or error})") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not a TOML file: {error}") from None
        _resolve_paths(content, Path(path).parent)
        _joined(content.get("data"), os.path.abspath(path))
        if "join" in content:
            _written_by_joiner(content, str(path))
        serve = content.get("serve")
        if isinstance(serve, dict) and not {"model", "dir"} & set(serve):
            serve["model"] = Path(path).stem
    for key, value in (changes or {}).items():
        section, _, name = key.partition(".")
        if not name:
            raise ConfigError(f"settings must be section.name, such as train.epochs, got {key!r}")
        inner = content.setdefault(section, {})
        *outer, last = name.split(".")
        for part in outer:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else inner
        if not isinstance(inner, dict):
            raise ConfigError(f"{key!r}: the part before the last dot must name a section, got the value {inner!r}")
        inner[last] = value
    return _config(content, str(path) if path is not None else "the configuration")


def _config(content: Mapping[str, Any], where: str) -> Config:
    content = {name: value for name, value in content.items() if name not in ONLINE_SECTIONS}
    defined = _definitions(content.pop("features", {}), where)
    unknown = sorted(set(content) - set(_SECTIONS))
    if unknown:
        known = [*_SECTIONS, "features"]
        hint = did_you_mean(unknown[0], (*known, *ONLINE_SECTIONS))
        raise ConfigError(f"{where}: there is no section [{unknown[0]}]{hint}; sections are {', '.join(known)}")
    if "data" not in content:
        raise ConfigError(f'{where}: section [data] is missing; add it, with train = ["FILE", …]')
    if defined and isinstance(content["data"], Mapping):
        content["data"] = {**content["data"], "features": defined}
    made = {name: _section(_SECTIONS[name], value, name, where) for name, value in content.items()}
    return Config(**made)


def _definitions(content: Any, where: str) -> dict[str, Feature | Number]:
    """The sections ``[features.NAME]``."""
    if not isinstance(content, Mapping) or not all(isinstance(one, Mapping) for one in content.values()):
        raise ConfigError(f"{where}: features must be sections [features.NAME], got {content!r}")
    try:
        return {name: definition(name, values) for name, values in content.items()}
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _section(kind: type[T], content: Any, name: str, where: str) -> T:
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where}: [{name}] must be a section, got {content!r}")
    hints = typing.get_type_hints(kind)
    names = [f.name for f in fields(kind)]  # pyrefly: ignore[bad-argument-type]
    # Unknown settings become options of the model or the format, in sections that have options.
    given, extra = {}, {}
    for key, value in content.items():
        (given if key in names else extra)[key] = value
    if extra:
        first = next(iter(extra))
        hint = "" if first in FORMAT_OPTIONS else did_you_mean(first, names)
        if "options" not in names or (name == "data" and hint):  # options of models can have any name
            raise ConfigError(f"{where}: [{name}] has no setting {first!r}{hint}; it has {', '.join(names)}")
        given["options"] = {**given.get("options", {}), **extra}
    for one in fields(kind):  # pyrefly: ignore[bad-argument-type]
        if one.default is MISSING and one.default_factory is MISSING and one.name not in given:
            raise ConfigError(f"{where}: [{name}] {one.name} is missing")
    return kind(**{key: _field(value, hints[key], name, key, where) for key, value in given.items()})


def _field(value: Any, hint: Any, section: str, key: str, where: str) -> Any:
    """The value of a section's field; a field that maps names to sections is read from [section.key.NAME]."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is dict and is_dataclass(inner[1]):
        given = _convert(value, hint, f"{where}: [{section}.{key}]")
        return {name: _section(inner[1], one, f"{section}.{key}.{name}", where) for name, one in given.items()}
    if is_dataclass(hint) and isinstance(hint, type):
        return _section(hint, value, f"{section}.{key}", where)
    return _convert(value, hint, f"{where}: [{section}] {key}")


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Convert a TOML value to the type of a field."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _convert(value, next(kind for kind in inner if kind is not type(None)), where)
    if origin is Literal:
        if value not in inner:
            raise ConfigError(f"{where} must be one of {', '.join(map(repr, inner))}, got {value!r}")
        return value
    if origin is tuple and inner[0] is float:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} must be a list of numbers, got {value!r}")
        return tuple(_convert(one, float, where) for one in value)
    if origin is tuple:
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            raise ConfigError(f"{where} must be a list of texts, got {value!r}")
        return tuple(value)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} must be a table, got {value!r}")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
        raise ConfigError(f"{where} must be {names.get(hint, hint)}, got {value!r}")
    return value


def _resolved(base: Path, text: str) -> str:
    """Make a path relative to the configuration's folder; addresses of sources are unchanged."""
    for scheme in ("dir:", "join:"):
        if text.startswith(scheme):
            return f"{scheme}{base / text.removeprefix(scheme).removeprefix('//')}"
    return text if is_live(text) else str(base / text)


def _joined(data: Any, path: str) -> None:
    """Add ``[data.join]`` to the training sources, and take settings of the data from the joins in them."""
    if not isinstance(data, dict):
        return
    given = data.get("train", [])
    sources = [given] if isinstance(given, str) else list(given) if isinstance(given, list) else []
    if "join" in data:
        sources.append(f"join:{path}")
        data.setdefault("format", "json")
    for source in sources:
        if isinstance(source, str) and source.startswith("join:"):
            joined = load_join(source.removeprefix("join:"))
            data.setdefault("label", next(iter(joined.labels)))
            if data.setdefault("keep_negatives", joined.keep_negatives) != joined.keep_negatives:
                raise ConfigError(
                    f"[data] keep_negatives must be that of {source}, {joined.keep_negatives}, got "
                    f"{data['keep_negatives']}; leave it out"
                )
    if data.pop("join", None) is not None:
        data["train"] = sources


def _written_by_joiner(content: dict[str, Any], path: str) -> None:
    """Train by default on the output of the `shoal join` process that ``[join]`` of the same file describes."""
    joined, data = load_join(path, state=""), content.setdefault("data", {})
    if not isinstance(data, dict) or not joined.out:
        return
    given = data.setdefault("train", [joined.out])
    sources = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    written = str(parse_address(joined.out))  # without options, which can differ between writer and reader
    if any(isinstance(one, str) and is_live(one) and str(parse_address(one)) == written for one in sources):
        data.setdefault("format", joined.impressions.format)
        data.setdefault("label", next(iter(joined.labels)))
        if data.setdefault("keep_negatives", joined.keep_negatives) != joined.keep_negatives:
            raise ConfigError(
                f"{path}: [data] keep_negatives must be that of [join], {joined.keep_negatives}, got "
                f"{data['keep_negatives']}; leave it out"
            )


def _resolve_paths(content: dict[str, Any], base: Path) -> None:
    features: Any = content.get("features")
    for feature in features.values() if isinstance(features, dict) else ():
        if isinstance(feature, dict) and isinstance(feature.get("file"), str):
            feature["file"] = str(base / feature["file"])
    for section, names in (
        ("data", ("train", "eval", "dead_letters")),
        (
            "out",
            ("dir", "tensorboard", "metrics_tls_cert", "metrics_tls_key", "metrics_tls_client_ca", "metrics_tokens"),
        ),
        ("serve", ("dir",)),
    ):
        inner: Any = content.get(section)
        for name in names if isinstance(inner, dict) else ():
            value = inner.get(name)
            if isinstance(value, str):
                inner[name] = _resolved(base, value)
            elif isinstance(value, list):
                inner[name] = [_resolved(base, one) if isinstance(one, str) else one for one in value]
    serve: Any = content.get("serve")
    registry = serve.get("registry") if isinstance(serve, dict) else None
    if isinstance(registry, str) and (registry.startswith("dir:") or (base / registry).is_dir()):
        serve["registry"] = f"dir:{base / registry.removeprefix('dir:').removeprefix('//')}"
