"""Convert the counts of an admission filter to bytes for a ``state_dict``, and back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import DataError
from shoal.table.checkpoint.filters import FilterCopy
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


def restore_filter(share: Share, came: dict[int, Tensor]) -> None:
    """Restore the counts of this rank; if they were saved with another number of ranks, counting starts at 0."""
    counts = share.table.hash_filter
    if not isinstance(counts, SlidingHashFilter):
        return
    for at in sorted(came):
        raw = came[at].numpy().tobytes()
        length = int.from_bytes(raw[:8], "little")
        try:
            head = json.loads(raw[8 : 8 + length])
            if (head["rank"], head["ranks"]) != (share.rank, share.ranks):
                continue
            if head["split_num"] != counts.split_num:
                raise ValueError(f"it has {head['split_num']} blocks, but the table's filter has {counts.split_num}")
            begin, blocks = 8 + -(-length // _HEAD) * _HEAD, []
            for failures, total, elements, fill, cells in head["blocks"]:
                own = np.frombuffer(raw, "<u2", cells, begin).astype(np.uint16)
                blocks.append(FilterBlockState(failures, total, elements, fill, own))
                begin += 2 * cells
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"table {share.table.name!r}: the filter in the checkpoint cannot be used: {error}"
            ) from None
        for number, state in enumerate(blocks):
            counts.set_block(number, state)
        counts.set_head(*head["head"])
