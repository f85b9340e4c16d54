"""Convert the counts of an admission filter to bytes for a ``state_dict``, and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import DataError
from shoal.table.checkpoint.filters import SPARE, FilterCopy
from shoal.table.checkpoint.shares import Share
from shoal.table.filters.admission import FilterBlockState, SlidingHashFilter

_HEAD = 4096


def has_counts(table: Any) -> bool:
    """Whether a table's filter has counts to save."""
    return isinstance(table.hash_filter, SlidingHashFilter)


def filter_bytes(share: Share) -> Tensor:
    """Return all counts of this process: a JSON head, padded to a multiple of 4096 bytes, and each block's cells."""
    copied = FilterCopy.of(share.table.hash_filter)
    assert copied is not None
    blocks, meta = list(copied.blocks), copied.meta
    head = {
        "rank": share.rank, "ranks": share.ranks, "split_num": meta.split_num,
        "head": [meta.head, meta.head_increment, meta.failure_count],
        "blocks": [[b.failure_count, b.total_size, b.num_elements, b.fill_rate, len(b.cells)] for b in blocks],
    }  # fmt: skip
    raw = json.dumps(head).encode()
    size = -(-len(raw) // _HEAD) * _HEAD
    parts = [len(raw).to_bytes(8, "little"), raw.ljust(size), *(b.cells.astype("<u2").tobytes() for b in blocks)]
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def check_filter(share: Share, came: dict[int, Tensor]) -> Callable[[], None]:
    """Return a function that restores the counts of this rank, and does nothing if they were saved with another number
    of ranks.

    Raises:
        DataError: the counts are damaged, or from a filter with another number of blocks.
    """
    counts = share.table.hash_filter
    if not isinstance(counts, SlidingHashFilter):
        return lambda: None
    blocks: list[FilterBlockState] = []
    head = moves = failed = 0
    for at in sorted(came):
        raw = came[at].numpy().tobytes()
        length = int.from_bytes(raw[:8], "little")
        try:
            meta = json.loads(raw[8 : 8 + length])
            if (meta["rank"], meta["ranks"]) != (share.rank, share.ranks):
                continue
            if not meta["split_num"] == len(meta["blocks"]) == counts.split_num:
                raise ValueError(f"it has {meta['split_num']} blocks, but the table's filter has {counts.split_num}")
            head, moves, failed = map(index, meta["head"])
            if not 0 <= head < counts.split_num or moves < 0 or failed < 0:
                raise ValueError(f"its head must be one of the {counts.split_num} blocks, got {meta['head']}")
            begin, blocks = 8 + -(-length // _HEAD) * _HEAD, []
            for failures, total, elements, fill, cells in meta["blocks"]:
                sound = 0 <= index(elements) <= cells and 0 <= index(failures) < 1 << 63 and 1 <= fill <= 1e6
                if cells != total + SPARE or total < 1 or not sound:
                    raise ValueError(f"a block of {cells} cells cannot have {total} positions and {elements} elements")
                own = np.frombuffer(raw, "<u2", cells, begin).astype(np.uint16)
                blocks.append(FilterBlockState(failures, total, elements, fill, own))
                begin += 2 * cells
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"table {share.table.name!r}: the filter in the checkpoint cannot be used: {error}"
            ) from None

    def restore() -> None:
        for number, state in enumerate(blocks):
            counts.set_block(number, state)
        if blocks:
            counts.set_head(head, moves, failed)

    return restore
