"""The ids of a feature's value, by the definitions that a checkpoint of `shoal train` contains."""

from __future__ import annotations

from shoal.data.raw import make_inputs
from shoal.data.schema import Schema
from shoal.errors import ConfigError, did_you_mean
from shoal.table.checkpoint.manifest import Manifest
from shoal.table.offline.source import Source


def ids_of_text(source: Source, text: str) -> list[int]:
    """Return the ids of ``FEATURE=VALUE`` in a checkpoint's tables; for a cross ``CROSS=VALUE,VALUE``, in its order.

    Raises:
        ConfigError: the checkpoint does not say how values become ids, or has no such feature.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--text must be FEATURE=VALUE, such as user=u17, got {text!r}")
    schema = schema_of(source)
    if name not in schema.sparse:
        hint = did_you_mean(name, schema.sparse)
        raise ConfigError(f"there is no feature {name!r}{hint}; features are {', '.join(schema.sparse)}")
    if schema.raw:
        raise ConfigError("the data of this checkpoint has ids, not texts; give the ID instead of --text")
    made = make_inputs(schema, _columns(schema, name, value), lists=False)
    place = schema.sparse.index(name)
    if made.offsets is None:
        return [int(made.ids[0, place])]
    return made.ids[made.offsets[place] : made.offsets[place + 1]].tolist()


def _columns(schema: Schema, name: str, value: str) -> dict[str, list[str]]:
    """Return the values of the columns that a feature reads."""
    of = schema.feature(name).of
    if not of:
        return {schema.column(name): [value]}
    values = value.split(",", len(of) - 1)
    if len(values) != len(of):
        wanted = ",".join(one.upper() for one in of)
        raise ConfigError(f"{name!r} is a cross of {' and '.join(of)}; give --text {name}={wanted}, got {value!r}")
    found: dict[str, list[str]] = {}
    for one, part in zip(of, values, strict=True):
        found |= _columns(schema, one, part)
    return found


def schema_of(source: Source) -> Schema:
    """Return the schema of the run that wrote a checkpoint."""
    for saved in reversed(source.saves):
        identity = Manifest.of(saved).content.get("identity")
        if isinstance(identity, dict) and "schema" in identity:
            return Schema.from_json(identity["schema"])
    raise ConfigError(f"{source.path} was not written by `shoal train`, so it does not say how texts become ids")
