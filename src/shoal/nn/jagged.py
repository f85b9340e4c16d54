"""What a user may call a batch of ids, turned into ``(values, offsets, weights)`` at the door.

Other libraries' types are known by their shape, never imported: whatever has ``values`` and ``offsets`` or ``lengths``
is jagged, and keyed if it has ``keys`` too.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.fid import as_int64
from shoal.host import as_tensor
from shoal.ragged import Ragged


class Jagged(NamedTuple):
    """Bag ``b`` is ``values[offsets[b]:offsets[b + 1]]``; without offsets the ids are not ragged, and any shape."""

    values: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None


def as_jagged(ids: Any, offsets: Any = None, weights: Any = None) -> Jagged:
    """One feature's ids in any of the forms that the modules take; offsets are checked where they are used."""
    if isinstance(ids, tuple) and ids and isinstance(ids[0], Tensor) and len(ids) in (2, 3) and ids[0].dim() == 1:
        if offsets is not None or (weights is not None and len(ids) == 3):
            raise ConfigError("ids came as a tuple (values, offsets[, weights]) and with separate ones, too")
        ids, offsets, *rest = ids
        weights = rest[0] if rest else weights
    if not isinstance(ids, Tensor):
        ids, offsets, weights = _from_object(ids, offsets, weights)
    elif ids.is_nested:
        if offsets is not None:
            raise ConfigError("a nested tensor has offsets of its own; leave the separate ones out")
        weights = weights.values() if isinstance(weights, Tensor) and weights.is_nested else weights
        if ids.layout != torch.jagged or ids.dim() != 2:
            raise ConfigError(f"nested ids are [B, j] in the jagged layout, got {ids.dim()} dimensions, {ids.layout}")
        ids, offsets = ids.values(), ids.offsets()  # pyrefly: ignore[missing-attribute]
    values = as_id_values(ids)
    return Jagged(values, _as_offsets(offsets, values), _as_weights(weights, values))


def is_keyed(ids: Any) -> bool:
    """Whether ids belong to several named features."""
    if isinstance(ids, Mapping):
        return True
    return not isinstance(ids, Tensor | Ragged | tuple | list) and hasattr(ids, "keys") and hasattr(ids, "values")


def as_keyed(ids: Any, weights: Any = None) -> tuple[list[str], Jagged]:
    """Keys, and the bags of the first key, then those of the second, and so on; each key has equally many."""
    if isinstance(ids, Mapping):
        if weights is not None and not isinstance(weights, Mapping):
            raise ConfigError(f"ids came by key, so weights do, too; got {type(weights).__name__}")
        weights = weights or {}
        if weights.keys() - ids.keys():
            raise ConfigError(f"weights came for {sorted(map(str, weights.keys() - ids.keys()))}, of which no ids came")
        parts = [_ragged(as_jagged(part, None, weights.get(key)), key) for key, part in ids.items()]
        return list(ids), _join(list(ids), parts)
    keys = list(_get(ids, "keys"))
    values, offsets, own = _from_object(ids, None, weights)
    values = as_id_values(values)
    offsets = _as_offsets(offsets, values)
    assert offsets is not None
    if keys and (offsets.shape[0] - 1) % len(keys):
        raise ConfigError(
            f"{len(keys)} keys have equally many bags, but there are {offsets.shape[0] - 1} bags; "
            "batches with a stride of their own for each key are not supported"
        )
    return keys, Jagged(values, offsets, _as_weights(own, values))


def split_keys(keys: list[str], joined: Jagged) -> dict[str, Jagged]:
    """Each key's own bags; the borders are read from the offsets."""
    values, offsets, weights = joined
    assert offsets is not None
    bags = (offsets.shape[0] - 1) // max(len(keys), 1)
    borders = offsets[:: max(bags, 1)].tolist() if bags else [0] * (len(keys) + 1)
    parts = {}
    for index, key in enumerate(keys):
        begin, end = borders[index], borders[index + 1]
        if not 0 <= begin <= end <= values.shape[0]:
            raise ConfigError(f"offsets rise from 0 to {values.shape[0]}, but key {key!r} is {begin}..{end}")
        own = offsets[index * bags : (index + 1) * bags + 1] - begin
        parts[key] = Jagged(values[begin:end], own, None if weights is None else weights[begin:end])
    return parts


def as_id_values(ids: Any) -> Tensor:
    """int64, of the same shape; floats and booleans are no ids."""
    return as_int64(as_tensor(ids), "ids")


def _ragged(part: Jagged, key: str) -> Jagged:
    """2-D ids as bags of equal length."""
    if part.offsets is not None:
        return part
    if part.values.dim() != 2:
        raise ConfigError(
            f"the ids of {key!r} are ragged, or [B, L]; got shape {list(part.values.shape)} without offsets"
        )
    bags, length = part.values.shape
    steps = torch.arange(bags + 1, device=part.values.device) * length
    weights = None if part.weights is None else part.weights.reshape(-1)
    return Jagged(part.values.reshape(-1), steps, weights)


as_bags = _ragged


def _join(keys: list[str], parts: list[Jagged]) -> Jagged:
    if not parts:
        return Jagged(torch.empty(0, dtype=torch.int64, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu"))
    sizes = {key: part.offsets.shape[0] - 1 for key, part in zip(keys, parts, strict=True) if part.offsets is not None}
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"every key has equally many bags, got {sizes}")
    weighted = [part.weights is not None for part in parts]
    if any(weighted) and not all(weighted):
        raise ConfigError("either every key has weights or none has")
    offsets, start = [torch.zeros(1, dtype=torch.int64, device=parts[0].values.device)], 0
    for part in parts:
        assert part.offsets is not None
        offsets.append(part.offsets[1:] + start)
        start += part.values.shape[0]
    weights = torch.cat([part.weights for part in parts]) if all(weighted) else None  # pyrefly: ignore
    return Jagged(torch.cat([part.values for part in parts]), torch.cat(offsets), weights)


def _from_object(ids: Any, offsets: Any, weights: Any) -> tuple[Any, Any, Any]:
    """Values, offsets and weights of something that is no tensor."""
    if isinstance(ids, Ragged):
        if isinstance(ids.values, Ragged):
            raise ConfigError("ids are ragged in one dimension, got a doubly ragged tensor")
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
        "ids are an int64 tensor, (values, offsets), lists of lists, Ragged, a nested tensor, or an object with values "
        f"and offsets; got {type(ids).__name__}"
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
        if [len(row) for row in weights] != lengths[1:].tolist():
            raise ConfigError("weights came as lists whose lengths are not those of the ids")
        weights = torch.tensor([float(value) for row in weights for value in row], device="cpu")
    return torch.tensor(flat, dtype=torch.int64, device="cpu"), lengths.cumsum(0), weights


def _get(thing: Any, name: str) -> Any:
    """An attribute or the result of a method; None if there is neither, or it cannot tell."""
    value = getattr(thing, name, None)
    return value() if callable(value) else value


def _as_offsets(offsets: Any, values: Tensor) -> Tensor | None:
    if offsets is None:
        return None
    offsets = torch.as_tensor(offsets, device=values.device)
    if offsets.dim() != 1 or offsets.dtype not in (torch.int64, torch.int32) or offsets.shape[0] < 1:
        raise ConfigError(f"offsets are int64 [B + 1], got {offsets.dtype} {list(offsets.shape)}")
    if values.dim() != 1:
        raise ConfigError(f"with offsets the ids are 1-D, got shape {list(values.shape)}")
    return offsets.long()


def _as_weights(weights: Any, values: Tensor) -> Tensor | None:
    if weights is None:
        return None
    weights = torch.as_tensor(weights, device=values.device)
    if not weights.is_floating_point() or weights.shape != values.shape:
        raise ConfigError(
            f"weights are floats, one an id ({list(values.shape)}), got {weights.dtype} {list(weights.shape)}"
        )
    return weights.float()
