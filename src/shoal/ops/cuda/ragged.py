"""`fused_value_rowids` and `normalize_merged_split`."""

import torch
import triton.language as tl
from torch import Tensor

from shoal.ops.cuda import launch
from shoal.ops.cuda.launch import Fast, blocks, part_of, steps


@Fast
def _row_ids(row_splits, out, rows, length, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, part_of(o, row_splits, rows, STEPS), mask=o < length)


def row_ids(row_splits: Tensor, length: int) -> Tensor:
    row_splits = row_splits.contiguous()
    rows = row_splits.shape[0] - 1
    out = torch.empty(length, dtype=torch.int64, device=row_splits.device)
    launch.check_row_splits(row_splits, length)
    if length:
        _row_ids[blocks(length, 1024)](row_splits, out, rows, length, STEPS=steps(rows), BLOCK=1024)
    return out


@Fast
def _normalize(row_split, starts, bases, out, n, parts, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    part = part_of(o, starts, parts, STEPS)
    kept = inside & ((part == 0) | (o != tl.load(starts + part, mask=inside, other=0)))
    value = tl.load(row_split + o, mask=kept, other=0) + tl.load(bases + part, mask=kept, other=0)
    tl.store(out + o - part, value, mask=kept)


def normalize_merged_split(row_split: Tensor, row_split_size: Tensor) -> Tensor:
    row_split, sizes = row_split.contiguous(), row_split_size.contiguous()
    n, parts = row_split.shape[0], sizes.shape[0]
    ends = sizes.cumsum(0)
    wrong = ((sizes < 1) | (sizes > n)).any()  # so the sum cannot wrap around
    if not parts or bool(wrong | (ends[-1] != n)):  # waits for the device: the sizes are indices below
        raise launch.ConfigError(
            f"normalize_merged_split: row_split_size must be positive numbers that add up to {n}, got {sizes.tolist()}"
        )
    last = row_split[ends - 1]
    out = row_split.new_empty(n + 1 - parts)
    _normalize[blocks(n, 1024)](
        row_split, ends - sizes, last.cumsum(0) - last, out, n, parts, STEPS=steps(parts), BLOCK=1024
    )
    return out
