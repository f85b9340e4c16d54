"""`LocalGroup`: CPU tables with the same dim as a group. One native call reads the rows of all features of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from shoal import _core
from shoal.buffers import empty_rows
from shoal.errors import ConfigError
from shoal.table.local_update import check_marks, update
from shoal.table.protocol import EVERY, Features, Found, Missing, Part, Step, Traits

if TYPE_CHECKING:
    from shoal.table.table import HashTable

_NOTHING = torch.empty(0, dtype=torch.int64, device="cpu")
_int64, _float32 = torch.int64, torch.float32
_KEPT = 1024  # the most cached wirings
_Wiring = _core.Wiring  # methods that take addresses are called on the class; see table.py


class LocalGroup:
    """Tables in this process's memory, with any optimizers, seeds and filters.

    `find` does not locate rows: reads have to check the index anyway, because rows can move, and updates, because they
    stamp rows there.
    """

    def __init__(self, tables: tuple[HashTable, ...]) -> None:
        self.tables = tables
        self.dim = tables[0].dim_size
        trains = not any(table.serving for table in tables)
        self.traits = Traits(trains=trains, local_state=True, checks_bags=True, pools=EVERY)
        self._wirings: dict[Features, Any] = {}
        self._last: tuple[Features | None, Any] = (None, None)

    def find(self, ids: Tensor, counts: Tensor, features: Features, *, missing: Missing) -> Found:
        if ids.dtype is not _int64 or ids.dim() != 1 or not ids.is_contiguous() or not ids.is_cpu:
            raise ConfigError(
                f"{self._name()}: ids must be a contiguous int64 CPU tensor [n], got {ids.dtype} {list(ids.shape)} "
                f"on {ids.device}"
            )
        if counts.dtype is not _int64 or counts.numel() != len(features.tables) or not counts.is_cpu:
            raise ConfigError(
                f"{self._name()}: counts must be an int64 CPU tensor [{len(features.tables)}], one count per feature, "
                f"got {counts.dtype} {list(counts.shape)} on {counts.device}"
            )
        return Found(ids, counts, _NOTHING, _NOTHING)

    def rows(self, found: Found, features: Features, *, missing: Missing) -> Tensor:
        ids = found.ids
        n = ids.numel()
        out = empty_rows(n, self.dim)
        counts = found.counts.contiguous()
        try:
            _Wiring.rows(
                self._wiring(features), ids.data_ptr(), n, counts.data_ptr(), missing == "initial", out.data_ptr()
            )
        except ValueError as error:
            raise ConfigError(f"{self._name()}: {error}") from None
        return out

    def pooled(
        self,
        found: Found,
        features: Features,
        offsets: Tensor,
        weights: Tensor | None,
        out: Tensor,
        *,
        missing: Missing,
        marks: Tensor | None = None,
    ) -> None:
        ids = found.ids
        n = ids.numel()
        bags, rest = divmod(offsets.numel() - 1, len(features.tables))
        if offsets.dtype is not _int64 or rest or bags < 0 or not offsets.is_contiguous() or not offsets.is_cpu:
            raise ConfigError(
                f"{self._name()}: offsets must be a contiguous int64 CPU tensor of features * bags + 1 elements, for "
                f"{len(features.tables)} features, got {offsets.dtype} {list(offsets.shape)} on {offsets.device}"
            )
        if out.dtype is not _float32 or out.shape != (bags, features.width) or not out.is_contiguous():
            raise ConfigError(
                f"{self._name()}: out must be a contiguous float32 tensor [{bags}, {features.width}], got "
                f"{out.dtype} {list(out.shape)}"
            )
        if weights is not None and (
            weights.dtype is not _float32 or weights.numel() != n or not weights.is_contiguous()
        ):
            raise ConfigError(
                f"{self._name()}: weights must be a contiguous float32 tensor [{n}], got {weights.dtype} "
                f"{list(weights.shape)}"
            )
        if marks is not None:
            check_marks(marks, n, self.dim, self._name())
        try:
            _Wiring.pooled(
                self._wiring(features),
                ids.data_ptr(),
                n,
                offsets.data_ptr(),
                bags,
                0 if weights is None else weights.data_ptr(),
                missing == "initial",
                out.data_ptr(),
                0 if marks is None else marks.data_ptr(),
            )
        except ValueError as error:
            raise ConfigError(f"{self._name()}: {error}") from None

    def update(self, parts: Sequence[Part], *, step: Step, each: Literal["sum", "occurrence"] = "sum") -> None:
        update(self, parts, step, each)

    def _wiring(self, features: Features) -> Any:
        """The native form of ``features``, cached."""
        last, wiring = self._last
        if last is features:
            return wiring
        wiring = self._wirings.get(features)
        if wiring is None:
            if len(self._wirings) >= _KEPT:
                self._wirings.pop(next(iter(self._wirings)), None)
            wiring = self._wirings[features] = self._wire(features)
        self._last = (features, wiring)
        return wiring

    def _wire(self, features: Features) -> Any:
        tables = [self.tables[place]._native for place in features.tables]
        try:
            return _core.Wiring(
                tables, list(features.combiners), list(features.columns), features.width, features.padding,
                list(features.lengths),
            )  # fmt: skip
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{self._name()}: {error}") from None

    def _name(self) -> str:
        names = [repr(table.name) for table in self.tables[:3]]
        return f"table{'s' * (len(self.tables) > 1)} {', '.join(names)}{', …' * (len(self.tables) > 3)}"
