"""One update of several tables in this process: gradients of rows and of bags, in one native call.

Gradients of bags are not expanded: the native code reads a bag's gradient for each of its ids, times the id's factor.
The result equals `shoal.table.pooling.row_gradients` followed by ``apply_gradients`` on every table.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import ConfigError
from shoal.table.arguments import as_int, as_time, check_rates
from shoal.table.checkpoint.copies import WAITING, about_to_change
from shoal.table.clock import Now
from shoal.table.protocol import Features, Part, Step, marks_shape

_EACH = ("sum", "occurrence")
_int64, _float32 = torch.int64, torch.float32
_NONE: list[int] = []


def update(group: Any, parts: Sequence[Part], step: Step, each: Literal["sum", "occurrence"] = "sum") -> None:
    """`Group.update` for a group of `HashTable`s on the CPU (its ``tables``, all with the same ``dim``).

    Everything is checked, for all tables, before anything changes. Safe to call from several threads.
    """
    if WAITING:
        about_to_change(*group.tables)
    updater = getattr(group, "updates", None)
    if updater is None:
        updater = group.updates = _Updater(group.tables)
    updater.update(parts, step, each)


class _Updater:
    """The updates of one group, with the data that does not change between them."""

    def __init__(self, tables: Sequence[Any]) -> None:
        self._tables = tuple(tables)
        for table in self._tables:
            table.check_trains("update")
        self._names = ", ".join(repr(table.name) for table in self._tables)
        self._own_policies = any(table.own_policy is not None for table in self._tables)
        self._native = _core.UpdateGroup(
            [table._native for table in self._tables], [repr(table.name) for table in self._tables]
        )
        self._dim = self._tables[0].dim_size
        self._last: tuple[Features | None, Any] = (None, None)

    def update(self, parts: Sequence[Part], step: Step, each: str) -> None:
        if each not in _EACH:
            raise ConfigError(f"each must be one of {list(_EACH)}, got {each!r}")
        tables = self._tables
        number, seconds, lr_scale = step
        number = as_int(number, tables[0].name, "Step.number")
        if number < 0:
            for table in tables:
                table._check_step(number)
        # A table's settings can have changed since the last update.
        clocked = [table.clocked for table in tables]
        given_time = seconds is not None
        if not isinstance(seconds, Now):
            by_clock = tables[clocked.index(True)] if True in clocked else None
            seconds = as_time(seconds, (by_clock or tables[0]).name, "Step.time_s", clocked=by_clock is not None)
        rates = self._rates(number, lr_scale)
        features: list[_core.FeatureMap] = []
        numbers: list[int] = []
        kept: list[Tensor] = []  # tensors that must stay alive until the call ends
        for part in parts:
            features.append(self._feature_map(part.features))
            numbers += self._numbers(part, kept)
        scores: list[int] = self._own_scores(parts, seconds, kept) if self._own_policies else _NONE
        try:
            skipped = self._native.apply(
                features,
                numbers,
                rates,
                number,
                seconds,
                isinstance(seconds, Now),
                given_time,
                each == "sum",
                [table._bad_gradient for table in tables],
                clocked,
                scores,
            )
        except ValueError as error:
            raise ConfigError(self._message(str(error))) from None
        for table, count in zip(tables, skipped, strict=False):
            table._count_skipped(count)

    def _own_scores(self, parts: Sequence[Part], seconds: int, kept: list[Tensor]) -> list[int]:
        """The arguments of `UpdateGroup.apply` for tables with a custom eviction policy.

        For each table, the address of its ids' scores, in the order of parts and features, and their number.
        """
        found: list[int] = []
        for table in self._tables:
            if table.own_policy is None:
                found += 0, 0
                continue
            ids = [torch.empty(0, dtype=_int64, device="cpu")]
            for part in parts:
                features, pieces = part.features, part.found.ids.split(part.found.counts.tolist())
                own = [one for of, one in zip(features.tables, pieces, strict=True) if self._tables[of] is table]
                ids += own if features.padding is None else [one[one != features.padding] for one in own]
            distinct, place = torch.unique(torch.cat(ids), return_inverse=True)
            kept.append(table._own_scores(distinct, seconds)[place])
            found += kept[-1].data_ptr(), kept[-1].numel()
        return found

    def _feature_map(self, features: Features) -> _core.FeatureMap:
        """The native form of ``features``; the most recent one is found by identity, without comparing contents."""
        last, native = self._last
        if last is not features:
            native = _feature_map(features)
            self._last = (features, native)
        return native

    def _message(self, error: str) -> str:
        return error if error.startswith("table ") else f"tables {self._names}: {error}; nothing was applied"

    def _rates(self, number: int, lr_scale: Sequence[float] | Tensor | None) -> list[float]:
        if lr_scale is None:
            return [rate for table in self._tables for rate in table.rates(number)]
        scales = lr_scale.tolist() if isinstance(lr_scale, Tensor) else list(lr_scale)
        if len(scales) != len(self._tables):
            raise ConfigError(
                f"tables {self._names}: lr_scale must have {len(self._tables)} factors, one per table, got "
                f"{len(scales)}"
            )
        rates = []
        for table, scale in zip(self._tables, scales, strict=True):
            rates += check_rates([rate * float(scale) for rate in table.rates(number)], table.name)
        return rates

    def _numbers(self, part: Part, kept: list[Tensor]) -> tuple[int, ...]:
        """The arguments of `UpdateGroup.apply` for a part: addresses and sizes of checked tensors."""
        (ids, counts, _, _), features, grad, offsets, weights, marks = part
        n, tables, bags = ids.numel(), len(features.tables), 0
        _check("ids", ids, _int64, n)
        _check("counts", counts, _int64, tables)
        if offsets is None:
            shape = (n, self._dim)
        else:
            bags = (offsets.numel() - 1) // max(1, tables)
            _check("offsets", offsets, _int64, tables * bags + 1)
            shape = (bags, features.width)
        if grad.shape != shape or grad.dtype is not _float32 or not grad.is_cpu:
            raise ConfigError(
                f"tables {self._names}: the gradient must be {list(shape)}, float32 on the CPU, "
                f"got {list(grad.shape)}, {grad.dtype} on {grad.device}"
            )
        if grad.stride(1) != 1 or grad.is_neg():
            grad = grad.resolve_neg().contiguous()
            kept.append(grad)
        if weights is not None:
            _check("weights", weights, _float32, n)
        if marks is not None:
            check_marks(marks, n, self._dim, f"tables {self._names}")
        return (
            ids.data_ptr(),
            counts.data_ptr(),
            grad.data_ptr(),
            0 if offsets is None else offsets.data_ptr(),
            0 if weights is None else weights.data_ptr(),
            n,
            bags,
            grad.stride(0),
            0 if marks is None else marks.data_ptr(),
        )


@functools.lru_cache(maxsize=1024)
def _feature_map(features: Features) -> _core.FeatureMap:
    return _core.FeatureMap(
        list(features.tables), list(features.combiners), list(features.columns), features.width, features.padding,
        list(features.lengths),
    )  # fmt: skip


def check_marks(marks: Tensor, n: int, dim: int, who: str) -> None:
    """Raises unless the marks have the shape for ``n`` ids."""
    if marks.dtype is not torch.uint8 or marks.shape != marks_shape(n, dim) or not marks.is_contiguous():
        raise ConfigError(
            f"{who}: marks must be contiguous uint8 {list(marks_shape(n, dim))}, got {marks.dtype} {list(marks.shape)}"
        )


def _check(what: str, tensor: Tensor, dtype: torch.dtype, n: int) -> None:
    if tensor.dtype is not dtype or tensor.numel() != n or not tensor.is_cpu or not tensor.is_contiguous():
        raise ConfigError(
            f"{what} must be {n} contiguous {dtype} elements on the CPU, got {tensor.numel()} of {tensor.dtype} "
            f"on {tensor.device}, {'contiguous' if tensor.is_contiguous() else 'not contiguous'}"
        )
