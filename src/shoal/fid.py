"""Feature ids: a 64-bit id made of a slot number and a signature, in two layouts.

==  ========  ================  ===================  ==========
    reserved  slot bits         signature bits       slots
==  ========  ================  ===================  ==========
v1  none      63..54 (10 bits)  53..0 (54 bits)      0..1023
v2  bit 63    62..48 (15 bits)  47..0 (48 bits)      0..32767
==  ========  ================  ===================  ==========

Every function takes Python ints and, for a fid, int64 tensors. Results are in the int64 range, so a v1 fid whose slot
is 512 or more is negative.
"""

import operator
from typing import TypeVar

import numpy as np
import torch

from shoal.errors import ConfigError

MAX_SLOT_V1 = 1023
MAX_SLOT_V2 = 32767

_V2_SIGNATURE = (1 << 48) - 1
_NARROWER = (torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)

Fid = TypeVar("Fid", int, torch.Tensor)


def as_int64(ids: torch.Tensor, subject: str) -> torch.Tensor:
    """Convert ``ids`` to int64; the error for a dtype that is not allowed begins with ``subject``."""
    if ids.dtype == torch.int64:
        return ids
    if ids.dtype in _NARROWER:
        return ids.long()
    raise ConfigError(f"{subject} must be int64 or narrower integers, got {ids.dtype}{_hint(ids.dtype)}")


def distinct(ids: np.ndarray) -> np.ndarray:
    """The distinct ids in ascending order. ``np.unique`` in numpy 2.3 and later hashes integers, 40 times slower.

    >>> distinct(np.array([3, 1, 3]))
    array([1, 3])
    """
    rising = np.sort(ids)
    again = rising[1:] == rising[:-1]
    return rising[np.append(True, ~again)] if again.any() else rising


def _hint(dtype: torch.dtype) -> str:
    if dtype == torch.uint64:
        return "; .view(torch.int64) keeps their 64 bits"
    if dtype.is_floating_point:  # not ".long()": it accepts NaN, and maps different large ids to the same one
        return "; floats cannot hold large ids exactly, so read the ids as integers where they come from"
    return "; convert them with .long()" if dtype in _NARROWER else ""


def _shift_right(fid: Fid, bits: int) -> Fid:
    """``uint64(fid) >> bits``."""
    return (fid >> bits) & ((1 << (64 - bits)) - 1)


def _exact(value: Fid, what: str) -> Fid:
    """A value whose bits can be shifted without loss: an int64 tensor as it is, a numpy integer as a Python int."""
    if isinstance(value, torch.Tensor) and value.dtype != torch.int64:
        raise ConfigError(f"a {what} tensor must be int64, got {value.dtype}{_hint(value.dtype)}")
    return operator.index(value) if isinstance(value, np.integer) else value  # pyrefly: ignore


def _fid(value: Fid) -> Fid:
    value = _exact(value, "fid")
    if not isinstance(value, torch.Tensor) and not -(1 << 63) <= value < 1 << 64:
        raise ConfigError(f"a fid must fit into 64 bits, got {value}")
    return value


def slot_v1(f: Fid) -> Fid:
    """The slot of a v1 fid: its top 10 bits."""
    return _shift_right(_fid(f), 54)


def slot_v2(f: Fid) -> Fid:
    """The slot of a v2 fid: bits 62..48, so -1 is slot 32767."""
    return (_fid(f) >> 48) & MAX_SLOT_V2


def shard_of(ids: Fid, shards: int) -> Fid:
    """The shard of each id, by the rule used everywhere: floor modulo, ``id mod shards``, which is never negative."""
    return ids % shards


def _make(slot: int, sig: Fid, bits: int, max_slot: int, version: str) -> Fid:
    if not 0 <= slot <= max_slot:
        raise ConfigError(f"a {version} slot must be 0..{max_slot}, got {slot}")
    high = operator.index(slot) << bits
    if high >= 1 << 63:
        high -= 1 << 64
    return (_exact(sig, "signature") & ((1 << bits) - 1)) | high


def make_v1(slot: int, sig: Fid) -> Fid:
    """The v1 fid of a slot (0..1023) and the low 54 bits of a signature."""
    return _make(slot, sig, 54, MAX_SLOT_V1, "v1")


def make_v2(slot: int, sig: Fid) -> Fid:
    """The v2 fid of a slot (0..32767) and the low 48 bits of a signature."""
    return _make(slot, sig, 48, MAX_SLOT_V2, "v2")


def v1_to_v2(f: Fid) -> Fid:
    """The v2 form of a v1 fid; the top 6 bits of its signature are lost."""
    f = _fid(f)
    return (_shift_right(f, 54) << 48) | (f & _V2_SIGNATURE)
