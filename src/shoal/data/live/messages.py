"""Decodes messages to samples with the formats of files; unreadable messages go to a dead-letter file."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from shoal.data.json_lines import JsonFormat
from shoal.data.live.rows import Rows
from shoal.data.parquet import ParquetFormat, table_samples
from shoal.data.records import RecordFormat
from shoal.data.samples import Samples, from_block
from shoal.data.text import TextFormat
from shoal.errors import ConfigError

Decode = Callable[[Sequence[bytes]], tuple[Samples, list[tuple[int, str]]]]
"""Takes messages; returns their samples in order, and (number, reason) of those that cannot be read."""


def decoder(form: Any, name: str) -> Decode:
    """Return the decoder for messages of a format.

    Raises:
        ConfigError: messages cannot have this format, or the format needs ``columns``.
    """
    if isinstance(form, JsonFormat | RecordFormat):
        return form.decode
    if isinstance(form, ParquetFormat):
        return RowMessages(form)
    if not isinstance(form, TextFormat):
        raise ConfigError(f'[data] format of messages must be json, csv, tsv, criteo or tfrecord, got "{name}"')
    if form.columns is None:
        raise ConfigError(
            f'[data] format = "{name}": messages have no header, so set columns = ["…", …] in their order'
        )
    return TextMessages(form)


def framing_of(form: Any) -> tuple[str, Sequence[str]]:
    """Return the framing of a growing directory's files with messages of a format, and the columns to read."""
    if isinstance(form, ParquetFormat):
        return "parquet", list(dict.fromkeys(form.columns()))
    return "records" if isinstance(form, RecordFormat) else "lines", ()


class RowMessages:
    """Decodes rows of Parquet files."""

    def __init__(self, form: ParquetFormat) -> None:
        self._form = form

    def __call__(self, payloads: Sequence[bytes]) -> tuple[Samples, list[tuple[int, str]]]:
        schema = self._form.schema
        parts = [
            Samples.empty(
                len(schema.dense), len(schema.sparse), ragged=self._form.ragged, timed=schema.time is not None
            )
        ]
        bad: list[tuple[int, str]] = []
        at = 0
        for path, table in payloads.parts if isinstance(payloads, Rows) else ():
            try:
                samples, wrong = table_samples(self._form, table, path)
                parts.append(samples)
            except ConfigError as error:  # a column has the wrong type
                wrong = [(row, str(error)) for row in range(table.num_rows)]
            bad += [(at + row, why) for row, why in wrong]
            at += table.num_rows
        return Samples.join(parts), bad


class TextMessages:
    """Decodes messages of one line each."""

    def __init__(self, form: TextFormat) -> None:
        assert form.columns is not None
        self._form = form
        self._parser = form.parser(form.columns, "data")
        schema = form.schema
        self._shape = len(schema.dense), len(schema.sparse)
        self._options = {"ragged": form.ragged, "timed": schema.time is not None}

    def __call__(self, payloads: Sequence[bytes]) -> tuple[Samples, list[tuple[int, str]]]:
        text = b"\n".join(payloads)
        block = self._parse(text)
        # An empty message gives neither a row nor a bad row; a newline or an open quote shifts the messages after it.
        if block.lines == len(payloads) and block.rows + len(block.bad) == block.lines:
            return from_block(block, *self._shape, **self._options), [(line, why) for line, _, why in block.bad]
        parts, bad = [Samples.empty(*self._shape, **self._options)], []
        for number, payload in enumerate(payloads):
            block = self._parse(payload)
            if block.lines == 1 and block.rows == 1:
                parts.append(from_block(block, *self._shape, **self._options))
            elif block.bad:
                bad.append((number, block.bad[0][2]))
            else:
                bad.append((number, "it has several lines" if block.rows > 1 else "it is empty"))
        return Samples.join(parts), bad

    def _parse(self, text: bytes) -> Any:
        return self._parser.parse(text, 0, True, 1 << 62, 1 << 62, self._form.threads)


class DeadLetters:
    """A file of JSON lines with the messages that could not be read: ``source``, ``partition``, ``position``,
    ``why``, and the message as ``text`` or, if it is not UTF-8, as ``base64``. Without a path they are only counted."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._file: int | None = None

    def open(self, size: int) -> None:
        """Truncate the file to ``size`` bytes: later messages are read, and written, again."""
        if self._path is None:
            return
        self.close()
        self._file = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        if os.fstat(self._file).st_size > size:
            os.ftruncate(self._file, size)

    def write(self, **letter: Any) -> int:
        """Append a message; return the bytes written."""
        if self._file is None:
            return 0
        message = letter.pop("message")
        try:
            letter["text"] = message.decode()
        except UnicodeDecodeError:
            letter["base64"] = base64.b64encode(message).decode()
        return os.write(self._file, json.dumps(letter).encode() + b"\n")

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
