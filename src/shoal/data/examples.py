"""``Example`` and ``ExampleBatch`` records (`shoal/proto/example.proto`), whose ids need no hashing."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal import _core
from shoal.data.columns import from_address, interleave
from shoal.data.records import RecordFormat
from shoal.data.samples import Samples
from shoal.data.schema import Schema, wrong_time
from shoal.errors import ConfigError
from shoal.table.arguments import MAX_TIME

_EXAMPLE, _BATCH = 0, 2  # as in csrc/ops/example_wire.h
_SIGNATURE = (1 << 48) - 1


@dataclass(frozen=True, kw_only=True)
class ExampleFormat(RecordFormat):
    """One sample per record, or with ``batches`` one batch of samples per record.

    These messages hold only ids. The label is the signature (low 48 bits) of the first id of the feature that the
    schema names as label; the time is read in the same way.
    """

    schema: Schema
    batches: bool = False

    def __post_init__(self) -> None:
        if self.schema.dense:
            raise ConfigError(
                f"data: example records hold ids and no numbers, but dense names {', '.join(self.schema.dense)}"
            )
        if self.schema.definitions:
            raise ConfigError(
                "data: example records hold ids, which are used as they are, so features must have no definitions, got "
                f"{', '.join(self.schema.definitions)}"
            )

    @property
    def rows_per_record(self) -> bool:  # pyrefly: ignore[bad-override]
        return self.batches

    def decode(self, payloads: Sequence[bytes]) -> tuple[Samples, list[tuple[int, str]]]:
        if not self.batches:
            with contextlib.suppress(ValueError):  # if this fails, decode one by one to find the bad record
                return self._samples(_EXAMPLE, list(payloads))
        parts, bad = [], []
        for number, payload in enumerate(payloads):
            try:
                samples, wrong = self._samples(_BATCH if self.batches else _EXAMPLE, [payload])
                parts.append(samples)
                bad += [(number, why) for _, why in wrong]
            except ValueError as error:
                bad.append((number, str(error).removeprefix("sharding_sparse_fids: ")))
        timed = self.schema.time is not None
        empty = Samples.empty(0, len(self.schema.sparse), ragged=True, timed=timed)
        return Samples.join(parts) if parts else empty, bad

    def _samples(self, kind: int, payloads: list[bytes]) -> tuple[Samples, list[tuple[int, str]]]:
        schema = self.schema
        names = [schema.label, *schema.sparse, *([schema.time] if schema.time else [])]
        wire = _core.WireBatch(kind, payloads, names)
        n = wire.batch
        columns = [_column(n, *column) for column in wire.columns()]
        values, label_offsets = columns[0]
        wrong = [(label_offsets.diff() == 0, f"it has no label {schema.label!r}")]
        time = None
        if schema.time:
            time = _first(*columns[-1])
            wrong.append((columns[-1][1].diff() == 0, f"it has no time {schema.time!r}"))
            wrong.append((time > MAX_TIME, wrong_time(schema.time)))
        bad: dict[int, str] = {}
        for rows, why in wrong:
            for i in rows.nonzero().view(-1).tolist():
                bad.setdefault(i, why)
        ids, offsets = interleave(columns[1 : 1 + len(schema.sparse)])
        samples = Samples(
            label=_first(values, label_offsets).float(),
            dense=torch.empty(n, 0, device="cpu"),
            ids=ids,
            offsets=offsets,
            time=time,
        )
        if not bad:
            return samples, []
        good = torch.tensor([i for i in range(n) if i not in bad], dtype=torch.int64, device="cpu")
        return samples.take(good), sorted(bad.items())


def _first(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the signature of the first id of each bag, 0 for an empty one."""
    if not values.numel():
        return torch.zeros(offsets.shape[0] - 1, dtype=torch.int64, device="cpu")
    first = values[offsets[:-1].clamp_max(values.shape[0] - 1)] & _SIGNATURE
    return torch.where(offsets.diff() > 0, first, 0)


def _column(n: int, ids: int, splits: int, rows: int, shared: bool) -> tuple[Tensor, Tensor]:
    """Return a feature's values and offsets ``[n + 1]``; a shared feature is repeated for every sample."""
    offsets = from_address(splits, rows + 1)
    values = from_address(ids, int(offsets[-1]))
    if shared:
        one = values[: int(offsets[1])] if rows else values[:0]
        return one.repeat(n), torch.arange(n + 1, device="cpu") * one.shape[0]
    return values, offsets
