"""The file formats by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from shoal.data.schema import CRITEO, Schema
from shoal.data.source import Format
from shoal.errors import ConfigError, did_you_mean


def _made_by(module: str, kind: str, **fixed: Any) -> Callable[..., Format]:
    """A function that makes a format of `shoal.data`, whose module is imported on the first call."""

    def make(schema: Schema, **options: Any) -> Format:
        return getattr(import_module(f"shoal.data.{module}"), kind)(schema=schema, **(fixed | options))

    return make


_CRITEO_COLUMNS = [CRITEO.label, *CRITEO.dense, *CRITEO.sparse]
_TEXT = frozenset({"columns", "delimiter", "quote", "separator", "max_line_bytes", "part_bytes", "threads"})
FORMATS: dict[str, tuple[Callable[..., Format], frozenset[str]]] = {
    "criteo": (_made_by("text", "TextFormat", delimiter="\t", columns=_CRITEO_COLUMNS), _TEXT - {"columns"}),
    "csv": (_made_by("text", "TextFormat", quote='"'), _TEXT),
    "tsv": (_made_by("text", "TextFormat", delimiter="\t"), _TEXT),
    "json": (_made_by("json_lines", "JsonFormat"), frozenset({"lists", "part_bytes", "threads"})),
    "parquet": (_made_by("parquet", "ParquetFormat"), frozenset({"lists"})),
    "tfrecord": (_made_by("tfrecord", "TfExampleFormat"), frozenset()),
    "example": (_made_by("examples", "ExampleFormat"), frozenset()),
    "example_batch": (_made_by("examples", "ExampleFormat", batches=True), frozenset()),
}
"""Name -> the function that makes the format, and the options that it takes."""
FORMAT_OPTIONS = frozenset[str]().union(*(options for _, options in FORMATS.values()))
"""The options of all formats together."""


def make_format(name: str, schema: Schema, **options: Any) -> Format:
    """Make the format with this name.

    >>> make_format("csv", Schema(label="click", sparse=("user",)), separator="|").ragged
    True
    """
    if name not in FORMATS:
        raise ConfigError(f"data: format must be one of {', '.join(FORMATS)}, got {name!r}")
    make, known = FORMATS[name]
    wrong = sorted(set(options) - known)
    if wrong:
        takes, hint = ", ".join(sorted(known)) or "none", did_you_mean(wrong[0], known)
        raise ConfigError(f"data: format {name!r} does not take {', '.join(wrong)}{hint}; its options are: {takes}")
    return make(schema, **options)
