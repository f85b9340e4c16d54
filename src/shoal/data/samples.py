"""`Samples`: the labels, numbers and ids of a group of samples, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from shoal import _core
from shoal.data.features import Number
from shoal.data.schema import Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """n samples with D numbers and F features.

    ``ids`` are int64 ``[n, F]``, one id per feature; or ``[m]`` with ``offsets`` ``[n * F + 1]``: feature f of sample i
    has ``ids[offsets[i * F + f]:offsets[i * F + f + 1]]``.
    """

    label: Tensor
    dense: Tensor
    ids: Tensor
    offsets: Tensor | None = None
    time: Tensor | None = None

    def __len__(self) -> int:
        return self.label.shape[0]

    @property
    def features(self) -> int:
        if self.offsets is None:
            return self.ids.shape[1]
        return (self.offsets.shape[0] - 1) // max(len(self), 1)

    def pin_memory(self) -> Samples:
        """A copy in pinned memory, from which a GPU copies asynchronously."""
        pinned = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) is not None}
        return replace(self, **{name: one.pin_memory() for name, one in pinned.items()})

    def take(self, index: Tensor) -> Samples:
        """The samples at these indices, in the order of ``index``."""
        time = None if self.time is None else _rows(self.time, index)
        if self.offsets is None:
            ids, offsets = _rows(self.ids, index), None
        else:
            ids, offsets = self._take_bags(index)
        return Samples(
            label=_rows(self.label, index), dense=_rows(self.dense, index), ids=ids, offsets=offsets, time=time
        )

    def _take_bags(self, index: Tensor) -> tuple[Tensor, Tensor]:
        assert self.offsets is not None
        features = self.features
        lengths = self.offsets.diff().view(len(self), features)[index].reshape(-1)
        offsets = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(lengths, 0, out=offsets[1:])
        starts = self.offsets[:-1].view(len(self), features)[index].reshape(-1)
        shift = torch.repeat_interleave(starts - offsets[:-1], lengths)
        return self.ids[torch.arange(shift.shape[0], device="cpu") + shift], offsets

    def part(self, begin: int, end: int) -> Samples:
        """Samples ``begin`` to ``end``; only offsets are copied."""
        time = None if self.time is None else self.time[begin:end]
        if self.offsets is None:
            ids, offsets = self.ids[begin:end], None
        else:
            features = self.features
            offsets = self.offsets[begin * features : end * features + 1]
            ids, offsets = self.ids[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0]
        return Samples(label=self.label[begin:end], dense=self.dense[begin:end], ids=ids, offsets=offsets, time=time)

    @staticmethod
    def join(parts: Sequence[Samples], room: dict[str, np.ndarray] | None = None) -> Samples:
        """Concatenate ``parts``. With ``room``, overwrite an earlier result in the same memory."""
        if len(parts) == 1:
            return parts[0]
        ragged = parts[0].offsets is not None
        offsets: list[Tensor] = [torch.zeros(1, dtype=torch.int64, device="cpu")]
        for part in parts if ragged else ():
            assert part.offsets is not None
            offsets.append(part.offsets[1:] + int(offsets[-1][-1]))
        times = [part.time for part in parts if part.time is not None]
        return Samples(
            label=_join([part.label for part in parts], room, "label"),
            dense=_join([part.dense for part in parts], room, "dense"),
            ids=_join([part.ids for part in parts], room, "ids"),
            offsets=_join(offsets) if ragged else None,
            time=_join(times) if times else None,
        )

    @staticmethod
    def empty(dense: int, features: int, *, ragged: bool = False, timed: bool = False) -> Samples:
        """Zero samples, with the right shapes."""
        return Samples(
            label=torch.empty(0, dtype=torch.float32, device="cpu"),
            dense=torch.empty(0, dense, dtype=torch.float32, device="cpu"),
            ids=torch.empty((0,) if ragged else (0, features), dtype=torch.int64, device="cpu"),
            offsets=torch.zeros(1, dtype=torch.int64, device="cpu") if ragged else None,
            time=torch.empty(0, dtype=torch.int64, device="cpu") if timed else None,
        )


class Finish:
    """Converts labels and numbers from the readers' raw values to those that a schema defines."""

    def __init__(self, schema: Schema) -> None:
        self._schema, self._native = schema, schema.native()
        self._changes_numbers = any(schema.number(name) != Number() for name in schema.dense)

    def __reduce__(self) -> tuple[type[Finish], tuple[Schema]]:
        return Finish, (self._schema,)

    def __call__(self, samples: Samples) -> Samples:
        label, dense = samples.label, samples.dense
        if self._schema.positive_above is not None:
            label = (label > self._schema.positive_above).float()
        if self._changes_numbers:
            dense = dense.clone()
            self._native.apply_numbers(dense.data_ptr(), len(dense))
        return replace(samples, label=label, dense=dense)


# In numpy, on one thread: this runs during training, which uses torch's threads.
def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    return torch.from_numpy(np.take(tensor.numpy(), index.numpy(), axis=0))


def _join(tensors: Sequence[Tensor], room: dict[str, np.ndarray] | None = None, name: str = "") -> Tensor:
    arrays = [tensor.numpy() for tensor in tensors]
    if room is None:
        return torch.from_numpy(np.concatenate(arrays))
    rows = sum(map(len, arrays))  # allocating new pages would cost more than the copy
    kept = room.get(name)
    if kept is None or len(kept) < rows:
        kept = room[name] = np.empty((rows, *arrays[0].shape[1:]), arrays[0].dtype)
    return torch.from_numpy(np.concatenate(arrays, out=kept[:rows]))


def from_block(block: _core.Block, dense: int, features: int, *, ragged: bool, timed: bool) -> Samples:
    """The samples of a native block."""
    n = block.rows
    label = torch.empty(n, dtype=torch.float32, device="cpu")
    numbers = torch.empty(n, dense, dtype=torch.float32, device="cpu")
    ids = torch.empty(block.ids, dtype=torch.int64, device="cpu")
    offsets = torch.zeros(n * features + 1 if ragged else 1, dtype=torch.int64, device="cpu")
    time = torch.empty(n if timed else 0, dtype=torch.int64, device="cpu")
    lengths = offsets[1:]
    block.copy(
        label.data_ptr(),
        numbers.data_ptr(),
        numbers.numel(),
        ids.data_ptr(),
        ids.numel(),
        lengths.data_ptr(),
        lengths.numel(),
        time.data_ptr(),
        time.numel(),
    )
    if ragged:
        torch.cumsum(lengths, 0, out=lengths)
    return Samples(
        label=label,
        dense=numbers,
        ids=ids if ragged else ids.view(n, features),
        offsets=offsets if ragged else None,
        time=time if timed else None,
    )
