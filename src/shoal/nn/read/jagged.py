"""Conversion of every accepted form of ids to ``(values, offsets, weights)``.

Other libraries' types are recognised by their attributes, never imported: an object with ``values`` and ``offsets`` or
``lengths`` is jagged, and keyed if it also has ``keys``.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.fid import as_int64
from shoal.host import as_tensor
from shoal.nn.read.strides import has_own_strides, with_all_bags
from shoal.ragged import Ragged

_UNKEYED = (Tensor, Ragged, tuple, list)


class Jagged(NamedTuple):
    """Bag ``b`` is ``values[offsets[b]:offsets[b + 1]]``; without offsets the ids are not ragged and have any shape."""

    values: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None
    length: int = -1
    """The length of every bag if all are known to be equal, in which case the offsets need no check; else -1."""


def as_jagged(ids: Any, offsets: Any = None, weights: Any = None) -> Jagged:
    """Convert one feature's ids from any accepted form; offsets are checked where they are used."""
    if type(ids) is tuple and ids and isinstance(ids[0], Tensor) and len(ids) in (2, 3) and ids[0].dim() == 1:
        if offsets is not None or (weights is not None and len(ids) == 3):
            raise ConfigError(
                "offsets and weights must be given once, in the tuple (values, offsets[, weights]) or separately, "
                "got both"
            )
        ids, offsets, *rest = ids
        weights = rest[0] if rest else weights
    if type(ids) is Tensor and ids.dtype is torch.int64 and weights is None and not ids.is_nested:  # the usual cases
        if offsets is None:
            return Jagged(ids)
        if type(offsets) is Tensor and offsets.dtype is torch.int64 and offsets.dim() == 1 == ids.dim():  # noqa: SIM102
            if offsets.shape[0] and offsets.device == ids.device:
                return Jagged(ids, offsets)
    if not isinstance(ids, Tensor):
        ids, offsets, weights = _from_object(ids, offsets, weights)
    elif ids.is_nested:
        if offsets is not None:
            raise ConfigError("offsets must be left out for a nested tensor, which has its own")
        weights = weights.values() if isinstance(weights, Tensor) and weights.is_nested else weights
        if ids.layout != torch.jagged or ids.dim() != 2:
            raise ConfigError(
                f"nested ids must be [B, j] in the jagged layout, got {ids.dim()} dimensions, {ids.layout}"
            )
        ids, offsets = ids.values(), ids.offsets()  # pyrefly: ignore[missing-attribute]
    values = as_id_values(ids)
    return Jagged(values, _as_offsets(offsets, values), _as_weights(weights, values))


def is_keyed(ids: Any) -> bool:
    """Whether ids belong to several named features."""
    if isinstance(ids, Mapping):
        return True
    return not isinstance(ids, _UNKEYED) and hasattr(ids, "keys") and hasattr(ids, "values")


def as_parts(ids: Mapping[Any, Any], weights: Any = None) -> list[Jagged]:
    """Return the bags of each key of a mapping; all keys must have the same number of bags."""
    if weights is not None and not isinstance(weights, Mapping):
        raise ConfigError(f"weights must come by key, as the ids do, got {type(weights).__name__}")
    if weights and weights.keys() - ids.keys():
        raise ConfigError(
            f"the keys of weights must be keys of ids, got also {sorted(map(str, weights.keys() - ids.keys()))}"
        )
    weights = weights or {}
    parts = [as_bags(as_jagged(part, None, weights.get(key)), key) for key, part in ids.items()]
    sizes = [part.offsets.shape[0] - 1 for part in parts if part.offsets is not None]
    if any(size != sizes[0] for size in sizes):
        raise ConfigError(f"all keys must have the same number of bags, got {dict(zip(ids, sizes, strict=True))}")
    weighted = [part.weights is not None for part in parts]
    if any(weighted) and not all(weighted):
        without = [key for key, has in zip(ids, weighted, strict=True) if not has]
        raise ConfigError(f"either all keys or no key must have weights; {without} have none")
    return parts


def as_joined(ids: Any, weights: Any = None) -> tuple[list[str], Jagged]:
    """Return the keys of an object like a KeyedJaggedTensor, and the bags of all keys, one key after the other."""
    keys = list(_get(ids, "keys"))
    values, offsets, own = _from_object(ids, None, weights)
    if not (_is_plain(values) and _is_plain(offsets) and offsets.shape[0] and values.device == offsets.device):
        values = as_id_values(values)
        offsets = _as_offsets(offsets, values)
        assert offsets is not None
    if has_own_strides(ids):
        values, offsets, own = with_all_bags(ids, values, offsets, own)
    if keys and (offsets.shape[0] - 1) % len(keys):
        raise ConfigError(f"{len(keys)} keys must have the same number of bags, got {offsets.shape[0] - 1} in total")
    return keys, Jagged(values, offsets, _as_weights(own, values))


def _is_plain(tensor: Any) -> bool:
    """Whether ids or offsets need no conversion."""
    return type(tensor) is Tensor and tensor.dtype is torch.int64 and tensor.dim() == 1


def split_keys(ids: Any, keys: list[str], joined: Jagged) -> list[Jagged]:
    """Split the joined bags by key. The borders come from ``ids.offset_per_key``, or else from the offsets, for which
    the host waits if they are on a GPU."""
    values, offsets, weights = joined[:3]
    assert offsets is not None
    bags = (offsets.shape[0] - 1) // max(len(keys), 1)
    borders = _get(ids, "offset_per_key") if offsets.is_cuda and not has_own_strides(ids) else None
    if borders is None:
        borders = offsets[:: max(bags, 1)].tolist() if bags else [0] * (len(keys) + 1)
    parts = []
    for index, key in enumerate(keys):
        begin, end = borders[index], borders[index + 1]
        if not 0 <= begin <= end <= values.shape[0]:
            raise ConfigError(f"offsets must rise from 0 to {values.shape[0]}, but key {key!r} is {begin}..{end}")
        own = offsets[index * bags : (index + 1) * bags + 1] - begin
        parts.append(Jagged(values[begin:end], own, None if weights is None else weights[begin:end]))
    return parts


def join(parts: Sequence[Jagged], device: torch.device) -> Jagged:
    """Concatenate the bags of parts, which have the same number of bags, on a device."""
    if len(parts) == 1:
        values, offsets, weights, length = parts[0]
        offsets, weights = (None if one is None else on(one, device) for one in (offsets, weights))
        return Jagged(on(values, device), offsets, weights, length)
    values = torch.cat([on(part.values, device) for part in parts])
    weights = None
    if parts[0].weights is not None:
        weights = torch.cat([on(part.weights, device) for part in parts if part.weights is not None])
    length = parts[0].length
    each = [part.offsets for part in parts if part.offsets is not None]
    if length >= 0 and all(part.length == length for part in parts):
        return Jagged(values, steps(len(parts) * (each[0].shape[0] - 1), length, device), weights, length)
    stacked = torch.stack([on(one, device) for one in each])
    ends = stacked[:, -1:]
    begins = stacked[:, :-1] + (ends.cumsum(0) - ends)
    if begins.shape[1] and any(one.is_cuda for one in each) and not _recorded(device):
        # A check of the joined offsets would not notice an id that is in another part than its bag.
        sizes = torch.tensor([part.values.shape[0] for part in parts], device="cpu", pin_memory=device.type == "cuda")
        wrong = (stacked[:, 0] != 0) | (stacked[:, -1] != sizes.to(device, non_blocking=True))
        begins[:, 0].masked_fill_(wrong, -1)
    return Jagged(values, torch.cat([begins.reshape(-1), ends.sum().view(1)]), weights)


def on(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a contiguous tensor on a device."""
    if tensor.device != device:
        tensor = tensor.to(device, non_blocking=device.type == "cuda")
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def steps(bags: int, length: int, device: torch.device) -> Tensor:
    """Return the offsets of bags of equal length; the tensor is shared and must not be changed."""
    return torch.arange(bags + 1, device=device) * length if _recorded(device) else _steps(bags, length, device)


def _recorded(device: torch.device) -> bool:
    """Whether this run is recorded, by the compiler or in a CUDA graph, to be repeated with other data."""
    return torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


@lru_cache(maxsize=16)
def _steps(bags: int, length: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(bags + 1, device=device) * length


def as_id_values(ids: Any) -> Tensor:
    """Convert ids to int64; floats and booleans are refused."""
    return as_int64(as_tensor(ids), "ids")


def as_bags(part: Jagged, key: str) -> Jagged:
    """Turn 2-D ids into bags of equal length."""
    values, offsets, weights, _ = part
    if offsets is not None:
        return part
    if values.dim() != 2:
        raise ConfigError(
            f"the ids of {key!r} must be ragged or [B, L], got shape {list(values.shape)} without offsets"
        )
    bags, length = values.shape
    weights = None if weights is None else weights.reshape(-1)
    return Jagged(values.reshape(-1), steps(bags, length, values.device), weights, length)


def _from_object(ids: Any, offsets: Any, weights: Any) -> tuple[Any, Any, Any]:
    """Return the values, offsets and weights of an object that is not a tensor."""
    if isinstance(ids, Ragged):
        if isinstance(ids.values, Ragged):
            raise ConfigError("ids must be ragged in one dimension, got a doubly ragged tensor")
        return ids.values, ids.row_splits, weights.values if isinstance(weights, Ragged) else weights
    if isinstance(ids, list | tuple):
        return _from_lists(ids, offsets, weights)
    if hasattr(ids, "values") and (hasattr(ids, "offsets") or hasattr(ids, "lengths")):
        found = _get(ids, "offsets")
        if found is None:
            lengths = _get(ids, "lengths")
            found = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        own = _get(ids, "weights_or_none") if hasattr(ids, "weights_or_none") else getattr(ids, "weights", None)
        return _get(ids, "values"), found, weights if weights is not None or callable(own) else own
    if hasattr(ids, "__array__"):
        return as_tensor(ids), offsets, weights
    raise ConfigError(
        "ids must be an int64 tensor, (values, offsets), lists of lists, Ragged, a nested tensor, or an object with "
        f"values and offsets; got {type(ids).__name__}"
    )


def _from_lists(ids: Any, offsets: Any, weights: Any) -> tuple[Any, Any, Any]:
    if not ids or not isinstance(ids[0], list | tuple | Tensor) or (isinstance(ids[0], Tensor) and not ids[0].dim()):
        if offsets is None and not ids:  # no bags at all
            offsets = [0]
        return torch.as_tensor(ids, dtype=None if len(ids) else torch.int64, device="cpu"), offsets, weights
    try:
        flat = [operator.index(value) for row in ids for value in row]
    except TypeError as error:
        raise ConfigError(f"ids must be integers: {error}") from None
    lengths = torch.tensor([0, *(len(row) for row in ids)], device="cpu")
    if weights is not None and not isinstance(weights, Tensor):
        if (given := [len(row) for row in weights]) != lengths[1:].tolist():
            raise ConfigError(f"lists of weights must be as long as those of ids {lengths[1:].tolist()}, got {given}")
        weights = torch.tensor([float(value) for row in weights for value in row], device="cpu")
    return torch.tensor(flat, dtype=torch.int64, device="cpu"), lengths.cumsum(0), weights


def _get(thing: Any, name: str) -> Any:
    """Return an attribute, or the result of a method; None if there is neither."""
    value = getattr(thing, name, None)
    return value() if callable(value) else value


def _as_offsets(offsets: Any, values: Tensor) -> Tensor | None:
    if offsets is None:
        return None
    offsets = torch.as_tensor(offsets, device=values.device)
    if offsets.dim() != 1 or offsets.dtype not in (torch.int64, torch.int32) or offsets.shape[0] < 1:
        raise ConfigError(f"offsets must be int64 [B + 1], got {offsets.dtype} {list(offsets.shape)}")
    if values.dim() != 1:
        raise ConfigError(f"with offsets the ids must be 1-D, got shape {list(values.shape)}")
    return offsets.long()


def _as_weights(weights: Any, values: Tensor) -> Tensor | None:
    if weights is None:
        return None
    weights = torch.as_tensor(weights, device=values.device)
    if not weights.is_floating_point() or weights.shape != values.shape:
        raise ConfigError(
            f"weights must be floats, one per id ({list(values.shape)}), got {weights.dtype} {list(weights.shape)}"
        )
    return weights.float()
