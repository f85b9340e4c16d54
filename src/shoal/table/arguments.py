"""Checks of what users hand to a table, before native code sees it. Every refusal names the table and the value."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError

MAX_TIME = (1 << 32) - 1
CPU = torch.device("cpu")


def device_of(table: Any) -> torch.device:
    """Where the tensors of a table live; the CPU for one that is elsewhere altogether."""
    return getattr(table, "device", CPU)


def as_ids(ids: Any, name: str, what: str = "ids", device: torch.device = CPU) -> Tensor:
    """Contiguous int64 on ``device``; a list is moved there, a tensor that is elsewhere is refused."""
    if not isinstance(ids, Tensor):
        try:
            ids = torch.as_tensor(ids, dtype=None if len(ids) else torch.int64, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"table {name!r}: {what} are an int64 tensor, got {type(ids).__name__} ({error})"
            ) from None
    if ids.dtype != torch.int64:
        raise ConfigError(f"table {name!r}: {what} are int64, got {ids.dtype}; convert them with .long()")
    _check_place(ids, name, what, device)
    return ids.contiguous()


def _check_place(tensor: Tensor, name: str, what: str, device: torch.device) -> None:
    kind = type(tensor)
    if kind is not Tensor and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:  # FakeTensor, DTensor, ...
        raise ConfigError(
            f"table {name!r}: {what} are an ordinary tensor, got a {kind.__name__}, whose numbers are elsewhere; "
            "inside compiled code use a module of shoal.nn, of a DTensor give to_local()"
        )
    if tensor.device != device or tensor.layout != torch.strided:
        place, move = ("CPU tensor", ".cpu()") if device == CPU else (f"tensor on {device}", f".to({str(device)!r})")
        raise ConfigError(
            f"table {name!r}: {what} are a dense {place}, got {tensor.device}, {tensor.layout}; move them with {move}"
        )


def as_rows(values: Any, n: int, dim: int, name: str, what: str = "values", device: torch.device = CPU) -> Tensor:
    """Contiguous float32 on ``device`` with exactly ``n * dim`` elements."""
    if not isinstance(values, Tensor):
        try:
            values = torch.as_tensor(values, dtype=torch.float32, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"table {name!r}: {what} are a float32 tensor, got {type(values).__name__} ({error})"
            ) from None
    if values.dtype != torch.float32:
        raise ConfigError(f"table {name!r}: {what} are float32, got {values.dtype}; convert them with .float()")
    _check_place(values, name, what, device)
    if values.numel() != n * dim:
        raise ConfigError(
            f"table {name!r}: {what} of shape {list(values.shape)} do not fit {n} ids of dim {dim}; "
            f"{n * dim} elements are needed"
        )
    return values.detach().contiguous().resolve_neg()


def as_time(time: Any, name: str, what: str = "req_time") -> int:
    """Seconds, 0 for None."""
    if time is None:
        return 0
    seconds = as_int(time, name, what)
    if not 0 <= seconds <= MAX_TIME:
        raise ConfigError(f"table {name!r}: {what} is 0..{MAX_TIME} seconds, got {seconds}")
    return seconds


def as_int(value: Any, name: str, what: str) -> int:
    """A Python int from an int, a whole float or a tensor with one element."""
    if type(value) is int and -(1 << 63) <= value < 1 << 63:
        return value
    try:
        number = value.item() if isinstance(value, Tensor) else value
        whole = int(number)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"table {name!r}: {what} is an integer, got {value!r}") from error
    if whole != number:
        raise ConfigError(f"table {name!r}: {what} is an integer, got {value!r}")
    if not -(1 << 63) <= whole < 1 << 63:
        raise ConfigError(f"table {name!r}: {what} has 64 bits, got {whole}")
    return whole


def check_rates(rates: list[float], name: str) -> list[float]:
    for index, rate in enumerate(rates):
        if not math.isfinite(rate):
            raise ConfigError(f"table {name!r}: the learning rate of segment {index} is finite, got {rate}")
    return rates
