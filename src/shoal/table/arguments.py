"""Checks of the arguments of table calls, before native code sees them. Errors name the table and the value."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.fid import as_int64
from shoal.table.clock import DAY_S, Now, now

MAX_TIME = (1 << 32) - 1
CPU = torch.device("cpu")


def device_of(table: Any) -> torch.device:
    """The device of a table's tensors; the CPU for a table in another process."""
    return getattr(table, "device", CPU)


def as_ids(ids: Any, name: str, device: torch.device = CPU) -> Tensor:
    """Contiguous int64 on ``device``, from a list, or from a tensor there of int64 or narrower integers."""
    if not isinstance(ids, Tensor):
        try:
            ids = torch.as_tensor(ids, dtype=None if len(ids) else torch.int64, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"table {name!r}: ids must be an int64 tensor, got {type(ids).__name__} ({error})"
            ) from None
    _check_place(ids, name, "ids", device)
    return as_int64(ids, f"table {name!r}: ids").contiguous()


def _check_place(tensor: Tensor, name: str, what: str, device: torch.device) -> None:
    kind = type(tensor)
    if kind is not Tensor and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:  # FakeTensor, DTensor, ...
        raise ConfigError(
            f"table {name!r}: {what} must be an ordinary tensor, got a {kind.__name__}; inside compiled code use a "
            "module of shoal.nn, and convert a DTensor with .to_local()"
        )
    if tensor.device != device or tensor.layout != torch.strided:
        place, move = ("CPU tensor", ".cpu()") if device == CPU else (f"tensor on {device}", f".to({str(device)!r})")
        raise ConfigError(
            f"table {name!r}: {what} must be a dense {place}, got {tensor.device}, {tensor.layout}; move them with "
            f"{move}"
        )


def as_rows(values: Any, n: int, dim: int, name: str, what: str = "values", device: torch.device = CPU) -> Tensor:
    """Contiguous float32 ``[n, dim]`` on ``device``, from values of shape ``[..., dim]`` or flat."""
    values = _as_floats(values, name, what, device)
    if values.numel() != n * dim or (n and values.dim() > 1 and values.shape[-1] != dim):
        raise ConfigError(
            f"table {name!r}: {what} of {n} ids must be [{n}, {dim}], got shape {list(values.shape)}; "
            f"{n * dim} elements are needed"
        )
    return values


def as_flat(values: Any, n: int, name: str, what: str = "values", device: torch.device = CPU) -> Tensor:
    """Contiguous float32 ``[n]`` on ``device``, from a tensor of any shape."""
    values = _as_floats(values, name, what, device).view(-1)
    if values.numel() != n:
        raise ConfigError(f"table {name!r}: {what} must have {n} elements for these ids, got {values.numel()}")
    return values


def _as_floats(values: Any, name: str, what: str, device: torch.device) -> Tensor:
    if not isinstance(values, Tensor):
        try:
            values = torch.as_tensor(values, dtype=torch.float32, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"table {name!r}: {what} must be a float32 tensor, got {type(values).__name__} ({error})"
            ) from None
    if values.dtype != torch.float32:
        raise ConfigError(f"table {name!r}: {what} must be float32, got {values.dtype}; convert them with .float()")
    _check_place(values, name, what, device)
    return values.detach().contiguous().resolve_neg()


def as_time(time: Any, name: str, what: str = "req_time", *, clocked: bool = False) -> int:
    """A time in seconds. None means 0, or for a table that uses the clock (``clocked``) the current time, as a `Now`.

    A ``clocked`` table rejects a time more than a day ahead of its clock, because its other rows would then expire.
    """
    if time is None:
        return now() if clocked else 0
    if isinstance(time, Now):
        return time
    seconds = as_int(time, name, what)
    if not 0 <= seconds <= MAX_TIME:
        raise ConfigError(f"table {name!r}: {what} must be 0..{MAX_TIME} seconds, got {seconds}")
    if clocked and seconds > (latest := now() + DAY_S):
        raise ConfigError(
            f"table {name!r}: {what} must be at most a day ahead of the clock, {latest} seconds, got {seconds}; "
            "rows written before such a time would count as expired"
        )
    return seconds


def as_int(value: Any, name: str, what: str) -> int:
    """A Python int from an int, a whole float or a tensor with one element."""
    if type(value) is int and -(1 << 63) <= value < 1 << 63:
        return value
    try:
        number = value.item() if isinstance(value, Tensor) else value
        whole = int(number)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"table {name!r}: {what} must be an integer, got {value!r}") from error
    if whole != number:
        raise ConfigError(f"table {name!r}: {what} must be an integer, got {value!r}")
    if not -(1 << 63) <= whole < 1 << 63:
        raise ConfigError(f"table {name!r}: {what} must fit into 64 bits, got {whole}")
    return whole


def check_rates(rates: list[float], name: str) -> list[float]:
    for index, rate in enumerate(rates):
        if not math.isfinite(rate):
            raise ConfigError(f"table {name!r}: the learning rate of segment {index} must be finite, got {rate}")
    return rates


def as_part(name: str, shard_idx: int, num_shards: int, limit: int, offset: int) -> tuple[int, int, int, int]:
    """The arguments of ``save_as_tensor`` as ints.

    Raises:
        ConfigError: one of them is out of range.
    """
    shard_idx, num_shards, limit, offset = map(int, (shard_idx, num_shards, limit, offset))
    if not 0 <= shard_idx < num_shards:
        raise ConfigError(f"table {name!r}: shard_idx must be 0..num_shards - 1, got {shard_idx} of {num_shards}")
    if limit < 1:
        raise ConfigError(f"table {name!r}: limit must be at least 1, got {limit}")
    if offset < 0:
        raise ConfigError(f"table {name!r}: offset must be 0 or the one that the previous call returned, got {offset}")
    return shard_idx, num_shards, limit, offset
