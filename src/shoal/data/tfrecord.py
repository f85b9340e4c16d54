"""``tf.Example`` records, read without TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal import _core
from shoal.data.records import RecordFormat
from shoal.data.samples import Samples, from_block
from shoal.data.schema import Schema


@dataclass(frozen=True, kw_only=True)
class TfExampleFormat(RecordFormat):
    """Features by name: bytes and int64 lists are categories, float and int64 lists numbers (their first value)."""

    schema: Schema

    def decode(self, payloads: Sequence[bytes]) -> tuple[Samples, list[tuple[int, str]]]:
        schema = self.schema
        block = _core.parse_tf_examples(
            list(payloads),
            schema.label,
            schema.time or "",
            [schema.column(name) for name in schema.dense],
            [schema.column(name) for name in schema.sparse],
            schema.native(lists=True),
        )
        timed = schema.time is not None
        samples = from_block(block, len(schema.dense), len(schema.sparse), ragged=True, timed=timed)
        return samples, [(line, why) for line, _, why in block.bad]
