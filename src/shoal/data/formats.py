"""The file formats by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.data.schema import Schema
from shoal.data.source import Format
from shoal.errors import ConfigError, did_you_mean


def _criteo(schema: Schema, **options: Any) -> Format:
    from shoal.data.schema import CRITEO
    from shoal.data.text import TextFormat

    options.setdefault("delimiter", "\t")
    return TextFormat(schema=schema, columns=[CRITEO.label, *CRITEO.dense, *CRITEO.sparse], **options)


def _csv(schema: Schema, **options: Any) -> Format:
    from shoal.data.text import TextFormat

    options.setdefault("quote", '"')
    return TextFormat(schema=schema, **options)


def _tsv(schema: Schema, **options: Any) -> Format:
    from shoal.data.text import TextFormat

    options.setdefault("delimiter", "\t")
    return TextFormat(schema=schema, **options)


def _json(schema: Schema, **options: Any) -> Format:
    from shoal.data.json_lines import JsonFormat

    return JsonFormat(schema=schema, **options)


def _parquet(schema: Schema, **options: Any) -> Format:
    from shoal.data.parquet import ParquetFormat

    return ParquetFormat(schema=schema, **options)


def _tfrecord(schema: Schema, **options: Any) -> Format:
    from shoal.data.tfrecord import TfExampleFormat

    return TfExampleFormat(schema=schema, **options)


def _example(schema: Schema, **options: Any) -> Format:
    from shoal.data.examples import ExampleFormat

    return ExampleFormat(schema=schema, **options)


def _example_batch(schema: Schema, **options: Any) -> Format:
    from shoal.data.examples import ExampleFormat

    return ExampleFormat(schema=schema, batches=True, **options)


_TEXT = frozenset({"columns", "delimiter", "quote", "separator", "max_line_bytes", "part_bytes", "threads"})
FORMATS: dict[str, tuple[Callable[..., Format], frozenset[str]]] = {
    "criteo": (_criteo, _TEXT - {"columns"}),
    "csv": (_csv, _TEXT),
    "tsv": (_tsv, _TEXT),
    "json": (_json, frozenset({"lists", "part_bytes", "threads"})),
    "parquet": (_parquet, frozenset({"lists"})),
    "tfrecord": (_tfrecord, frozenset()),
    "example": (_example, frozenset()),
    "example_batch": (_example_batch, frozenset()),
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
