"""Packs dicts of tensors into one flat tensor and its sizes, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.host import as_tensor


def pack_tensors(keyed_tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Concatenate the flattened tensors, all of one dtype, by sorted key; returns the result and the int64 sizes.

    >>> flat, sizes = pack_tensors({"b": torch.tensor([3]), "a": torch.tensor([[1, 2]])})
    >>> flat.tolist(), sizes.tolist()
    ([1, 2, 3], [2, 1])
    """
    flat = [as_tensor(keyed_tensors[key]).reshape(-1) for key in sorted(keyed_tensors)]
    if len(dtypes := {str(t.dtype) for t in flat}) > 1:
        raise ConfigError(f"pack_tensors: the tensors must have one dtype, got {', '.join(sorted(dtypes))}")
    sizes = torch.tensor([t.numel() for t in flat], dtype=torch.int64, device="cpu")
    return torch.cat(flat) if flat else torch.empty(0, device="cpu"), sizes


def unpack_tensors(keyed_shape: Mapping[str, Sequence[int]], packed: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Undoes `pack_tensors`; ``keyed_shape`` has a shape per key, in which one size may be -1."""
    flat, sizes = packed
    lengths = as_tensor(sizes).tolist()
    if len(lengths) != len(keyed_shape) or sum(lengths) != flat.numel() or min(lengths, default=0) < 0:
        raise ConfigError(
            f"unpack_tensors: sizes must be {len(keyed_shape)} numbers >= 0 that add up to the {flat.numel()} "
            f"elements, got {lengths}"
        )
    parts = torch.split(flat, lengths)
    return {key: part.reshape(tuple(keyed_shape[key])) for key, part in zip(sorted(keyed_shape), parts, strict=True)}


def pack_typed_keyed_tensors(typed_keyed_tensors: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """One flat tensor per dict, then an int64 vector: the number of keys of each dict, then all sizes."""
    packed = [pack_tensors(tensors) for tensors in typed_keyed_tensors]
    counts = torch.tensor([len(tensors) for tensors in typed_keyed_tensors], dtype=torch.int64, device="cpu")
    return [*(flat for flat, _ in packed), torch.cat([counts, *(sizes for _, sizes in packed)])]


def unpack_packed_tensors(
    typed_keyed_shape: Sequence[Mapping[str, Sequence[int]]], packed_list: Sequence[Tensor]
) -> list[dict[str, Tensor]]:
    """Undoes `pack_typed_keyed_tensors`."""
    if len(packed_list) < 2:
        raise ConfigError(f"unpack_packed_tensors: a packed list must have at least 2 parts, got {len(packed_list)}")
    flats, sizes = packed_list[:-1], as_tensor(packed_list[-1])
    if len(flats) != len(typed_keyed_shape):
        raise ConfigError(
            f"unpack_packed_tensors: there must be one dict of shapes per flat tensor, {len(flats)}, got "
            f"{len(typed_keyed_shape)}"
        )
    at = len(flats)
    result: list[dict[str, Any]] = []
    for flat, shapes, count in zip(flats, typed_keyed_shape, sizes[:at].tolist(), strict=True):
        result.append(unpack_tensors(shapes, (flat, sizes[at : at + count])))
        at += count
    return result
