"""GPU tables in `torch.compile`: their calls as operators that identify a table by a number.

Every operator takes the table's token, which writes change, so that the compiler keeps reads and writes in order.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

_tables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
NO_TIME = -1
"""Represents ``req_time=None``: the table reads the clock when the operator runs, not when it is compiled."""


def register(table: Any) -> int:
    """A number that identifies a table for its lifetime."""
    number = next(_numbers)
    _tables[number] = table
    return number


@torch.library.custom_op("shoal::gpu_table_lookup", mutates_args=("token",))
def gpu_table_lookup(ids: Tensor, token: Tensor, table: int, insert_missing: bool, req_time: int) -> Tensor:
    """`HashTable.lookup`."""
    found = _tables[table]
    return found.lookup(ids, insert_missing=insert_missing, req_time=None if req_time == NO_TIME else req_time)


@gpu_table_lookup.register_fake
def _(ids: Tensor, token: Tensor, table: int, insert_missing: bool, req_time: int) -> Tensor:
    return token.new_empty(ids.numel(), _tables[table].dim_size)


@torch.library.custom_op("shoal::gpu_table_apply", mutates_args=("token",))
def gpu_table_apply(
    ids: Tensor,
    grads: Tensor,
    scores: Tensor | None,
    token: Tensor,
    table: int,
    step: int,
    dedup: bool,
    req_time: int,
    distinct: bool,
) -> None:
    """`HashTable.apply_gradients`."""
    seconds = None if req_time == NO_TIME else req_time
    _tables[table].apply_gradients(
        ids, grads, step, enable_dedup=dedup, req_time=seconds, scores=scores, distinct=distinct
    )


@gpu_table_apply.register_fake
def _(
    ids: Tensor,
    grads: Tensor,
    scores: Tensor | None,
    token: Tensor,
    table: int,
    step: int,
    dedup: bool,
    req_time: int,
    distinct: bool,
) -> None:
    return None
