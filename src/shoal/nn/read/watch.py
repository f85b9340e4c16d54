"""Check offsets in GPU memory without waiting for the result; a later call raises the error."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shoal.errors import ConfigError

_MAX_SHAPES = 4096  # the set of checked shapes is cleared when it reaches this size


def watch_offsets(offsets: Tensor, n: int, name: str) -> None:
    """Check that offsets of ``n`` ids rise from 0 to ``n``, once per shape.

    Raises:
        ConfigError: the offsets of an earlier batch did not.
    """
    if not torch.cuda.is_current_stream_capturing():
        _watch(offsets.device).look(offsets, n, name)


class _Watch:
    def __init__(self, device: torch.device) -> None:
        self._bad = torch.zeros(1, dtype=torch.bool, device=device)
        self._bad_on_host = torch.zeros(1, dtype=torch.bool, device="cpu", pin_memory=device.type == "cuda")
        self._seen: set[tuple[int, int]] = set()
        self._name = ""

    def look(self, offsets: Tensor, n: int, name: str) -> None:
        if self._bad_on_host.item():
            self._bad_on_host.zero_()
            self._bad.zero_()
            self._seen.clear()
            raise ConfigError(
                f"table {self._name!r}: offsets must rise from 0 to the number of ids, but those of an earlier batch "
                "did not; the rows that it read and updated are undefined"
            )
        shape = (offsets.shape[0], n)
        if shape in self._seen:
            return
        if len(self._seen) >= _MAX_SHAPES:
            self._seen.clear()
        self._seen.add(shape)
        self._name = name
        self._bad |= (offsets.diff() < 0).any() | (offsets[0] != 0) | (offsets[-1] != n)
        self._bad_on_host.copy_(self._bad, non_blocking=True)


@cache
def _watch(device: torch.device) -> _Watch:
    return _Watch(device)
