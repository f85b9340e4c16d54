"""Reductions by index and by row splits, and their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.ops.cuda import launch
from shoal.ops.cuda.launch import ELEMENTS, Fast, blocks, part_of, pointer, steps, tiles, upload
from shoal.ops.reduce.reference import MEAN, SQRTN

_BLOCK = 1024


@Fast
def _sum_by_index(
    index, stride, values, out, counts, flag, n, d, rows, SQUARE: tl.constexpr, COUNT: tl.constexpr, RUN: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each lane sums a run of consecutive rows and writes only where the index changes."""
    first = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)) * RUN
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = c < d
    target = tl.zeros((BLOCK,), dtype=tl.int64) - 1
    total = tl.zeros((BLOCK, COLUMNS), dtype=out.dtype.element_ty)
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    for r in range(RUN + 1):
        i = first + r
        inside = (i < n) & (r < RUN)
        at = tl.load(index + i * stride, mask=inside, other=-1)
        bad = inside & ((at < 0) | (at >= rows))
        tl.atomic_max(flag + i * 0, n - i, mask=bad, sem="relaxed")
        at = tl.where(inside & (bad == 0), at, -1)
        row = tl.load(values + i[:, None] * d + c[None, :], mask=(at >= 0)[:, None] & real[None, :], other=0)
        if SQUARE:
            row = row * row
        leaves = (at != target) & (target >= 0)
        tl.atomic_add(
            out + target[:, None] * d + c[None, :], total, mask=leaves[:, None] & real[None, :], sem="relaxed"
        )
        stays = (at == target)[:, None]
        if COUNT:
            tl.atomic_add(counts + target, count, mask=leaves & (tl.program_id(1) == 0), sem="relaxed")
            count = tl.where(at == target, count + 1, 1)
        total = tl.where(stays, total + row, row)
        target = at


@Fast
def _finish(out, counts, d, total, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    f = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = f < total
    value = tl.load(out + f, mask=inside, other=0)
    if MEAN:
        count = tl.maximum(tl.load(counts + f // d, mask=inside, other=1), 1)
        value = value * (1.0 / count.to(value.dtype))
    else:
        value = tl.sqrt(value)
    tl.store(out + f, value, mask=inside)


@Fast
def _count(index, stride, counts, n, rows, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(index + i * stride, mask=i < n, other=-1)
    tl.atomic_add(counts + at, 1, mask=(at >= 0) & (at < rows), sem="relaxed")


@Fast
def _gather_back(
    grad, index, stride, counts, values, norms, out, flag, n, d, rows, HOW: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = i < n
    at = tl.load(index + i * stride, mask=inside, other=0)
    bad = inside & ((at < 0) | (at >= rows))
    tl.atomic_max(flag + i * 0, n - i, mask=bad, sem="relaxed")
    good = (inside & (bad == 0))[:, None] & (c < d)[None, :]
    there = at[:, None] * d + c[None, :]
    here = i[:, None] * d + c[None, :]
    row = tl.load(grad + there, mask=good, other=0)
    if HOW == 1:
        count = tl.maximum(tl.load(counts + at, mask=inside & (bad == 0), other=1), 1)
        row = row * (1.0 / count.to(row.dtype))[:, None]
    if HOW == 2:
        norm = tl.load(norms + there, mask=good, other=0)
        zero = norm == 0
        value = row * tl.load(values + here, mask=good, other=0) / tl.where(zero, 1.0, norm)
        row = tl.where(zero, 0.0, value)
    tl.store(out + here, row, mask=good)


def _shape(d: int, lanes: int) -> tuple[int, int]:
    columns = min(128, triton.next_power_of_2(max(1, d)))
    return columns, max(4, min(256, lanes // columns))


def _message(index: Tensor, rows: int) -> Callable[[int], str]:
    n = index.shape[0]
    return lambda at: f"a segment index must be in [0, {rows}), got {int(index[n - at])}"


def reduce_by_index(index: Tensor, values: Tensor, rows: int, how: int) -> Tensor:
    values = values.detach().contiguous()
    n, d = values.shape
    out = values.new_zeros((rows, d))
    if not n:
        return out
    counts = torch.zeros(rows if how == MEAN else 0, dtype=torch.int32, device=values.device)
    flag = launch.new_flag(values)
    columns, block = _shape(d, 1024)
    grid = (*blocks(n, block * 8), max(1, -(-d // columns)))
    _sum_by_index[grid](
        index, index.stride(0), values, out, counts, flag, n, d, rows, SQUARE=how == SQRTN, COUNT=how == MEAN, RUN=8,
        COLUMNS=columns, BLOCK=block,
    )  # fmt: skip
    launch.raise_if(flag, _message(index, rows))
    if how in (MEAN, SQRTN) and out.numel():
        _finish[blocks(out.numel(), 1024)](out, counts, d, out.numel(), MEAN=how == MEAN, BLOCK=1024)
    return out


def reduce_by_index_backward(
    grad: Tensor, index: Tensor, how: int, values: Tensor | None, norm: Tensor | None
) -> Tensor:
    grad = grad.contiguous()
    n, (rows, d) = index.shape[0], grad.shape
    out = grad.new_empty((n, d))
    if not n:
        return out
    flag = launch.new_flag(grad)
    counts = torch.zeros(rows if how == MEAN else 0, dtype=torch.int32, device=grad.device)
    if how == MEAN:
        _count[blocks(n, 1024)](index, index.stride(0), counts, n, rows, BLOCK=1024)
    values = values.contiguous() if values is not None else grad
    norm = norm.contiguous() if norm is not None else grad
    columns, block = _shape(d, 2048)
    _gather_back[(*blocks(n, block), max(1, -(-d // columns)))](
        grad, index, index.stride(0), counts, values, norm, out, flag, n, d, rows, HOW=how, COLUMNS=columns, BLOCK=block
    )
    launch.raise_if(flag, _message(index, rows))
    return out


# --- by row splits ----------------------------------------------------------------------------------------------------


@Fast
def _slice(
    tile_starts, tasks, task_count, segments, BACK: tl.constexpr, ELEMENT: tl.constexpr, TASKS: tl.constexpr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One slice of one table: sums of its columns per segment, or (``BACK``) its columns of every row's gradient."""
    tile = tl.program_id(0).to(tl.int64)
    task = part_of(tile, tile_starts, task_count, TASKS)
    base = tasks + task * 7
    rows = pointer(tl.load(base), ELEMENT)
    splits = pointer(tl.load(base + 1), tl.int64)
    count, d = tl.load(base + 2), tl.load(base + 3)
    start, width = tl.load(base + 4), tl.load(base + 5)
    out = pointer(tl.load(base + 6), ELEMENT)
    f = (tile - tl.load(tile_starts + task)) * BLOCK + tl.arange(0, BLOCK)
    which = f // width
    column = f - which * width
    if BACK:
        inside = which < count
        segment = part_of(which, splits, segments, STEPS)
        value = tl.load(out + segment * width + column, mask=inside, other=0)
        tl.store(rows + which * d + start + column, value, mask=inside)
    else:
        inside = which < segments
        begin = tl.load(splits + which, mask=inside, other=0)
        length = tl.load(splits + which + 1, mask=inside, other=0) - begin
        total = tl.zeros((BLOCK,), dtype=ELEMENT)
        longest = tl.max(length, axis=0)
        i = longest * 0
        while i < longest:
            row = begin + i
            good = inside & (i < length) & (row >= 0) & (row < count)
            total += tl.load(rows + row * d + start + column, mask=good, other=0)
            i += 1
        tl.store(out + f, total, mask=inside)


def _run_slices(splits: list[Tensor], rows: list[Tensor], outs: list[Tensor], counts: list[int], back: bool) -> None:
    segments = splits[0].shape[0] - 1
    tasks: list[int] = []
    work: list[int] = []
    given = iter(outs)
    for row_splits, table, count in zip(splits, rows, counts, strict=True):
        start = 0
        for out in itertools.islice(given, count):
            width = out.shape[1]
            tasks += [
                table.data_ptr(), row_splits.data_ptr(), table.shape[0], table.shape[1], start, max(1, width),
                out.data_ptr(),
            ]  # fmt: skip
            work.append((table.shape[0] if back else segments) * width)
            start += width
    edges = tiles(work, _BLOCK)
    if not edges[-1]:
        return
    numbers = upload([*edges, *tasks], rows[0])
    _slice[(edges[-1],)](
        numbers[: len(edges)], numbers[len(edges) :], len(work), segments, BACK=back, ELEMENT=ELEMENTS[rows[0].dtype],
        TASKS=steps(len(work)), STEPS=steps(max(1, segments)), BLOCK=_BLOCK,
    )  # fmt: skip


def _check_splits(splits: list[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    splits = [s.contiguous() for s in splits]
    if len(splits) == 1:
        launch.check_row_splits(splits[0], lengths[0])
        return splits
    every = torch.stack(splits)
    wrong = (every[:, 0] != 0) | (every[:, -1] != upload(lengths, every)) | (every.diff(dim=1) < 0).any(1)
    if launch.checks() and bool(wrong.any()):
        table = int(wrong.nonzero()[0])
        launch.refuse_row_splits(splits[table], lengths[table])
    return splits


def reduce_and_split(
    splits: list[Tensor], embeddings: list[Tensor], slices: list[int], counts: list[int]
) -> list[Tensor]:
    splits = _check_splits(splits, [e.shape[0] for e in embeddings])
    embeddings = [e.detach().contiguous() for e in embeddings]
    outs = [embeddings[0].new_empty((splits[0].shape[0] - 1, width)) for width in slices]
    _run_slices(splits, embeddings, outs, counts, False)
    return outs


def reduce_and_split_backward(
    splits: list[Tensor], grads: list[Tensor], rows: list[int], counts: list[int]
) -> list[Tensor]:
    splits = _check_splits(splits, rows)
    grads = [g.contiguous() for g in grads]
    given = iter(grads)
    widths = [sum(g.shape[1] for g in itertools.islice(given, count)) for count in counts]
    outs = [grads[0].new_empty((n, width)) for n, width in zip(rows, widths, strict=True)]
    _run_slices(splits, outs, grads, counts, True)
    return outs


@Fast
def _first_n(
    values, row_splits, out, n, d, limit, rows, total, BACK: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    f = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = f < total
    which = f // d
    column = f - which * d
    if BACK:
        row = part_of(which, row_splits, rows, STEPS)
        place = which - tl.load(row_splits + row, mask=inside, other=0)
        kept = inside & (place < limit)
        tl.store(values + f, tl.load(out + (row * limit + place) * d + column, mask=kept, other=0), mask=inside)
    else:
        row = which // limit
        at = tl.load(row_splits + row, mask=inside, other=0) + which - row * limit
        kept = inside & (at < tl.load(row_splits + row + 1, mask=inside, other=0)) & (at >= 0) & (at < n)
        tl.store(out + f, tl.load(values + at * d + column, mask=kept, other=0), mask=inside)


def first_n(values: Tensor, row_splits: Tensor, limit: int) -> Tensor:
    values = values.detach().contiguous()
    (row_splits,) = _check_splits([row_splits], [values.shape[0]])
    (n, d), rows = values.shape, row_splits.shape[0] - 1
    out = values.new_empty((rows, limit, d))
    if out.numel():
        _first_n[blocks(out.numel(), 1024)](
            values, row_splits, out, n, d, limit, rows, out.numel(), BACK=False, STEPS=steps(rows), BLOCK=1024
        )
    return out


def first_n_backward(grad: Tensor, row_splits: Tensor, n: int) -> Tensor:
    grad = grad.contiguous()
    (row_splits,) = _check_splits([row_splits], [n])
    rows, limit, d = grad.shape
    out = grad.new_empty((n, d))
    if out.numel():
        _first_n[blocks(out.numel(), 1024)](
            out, row_splits, grad, n, d, limit, rows, out.numel(), BACK=True, STEPS=steps(rows), BLOCK=1024
        )
    return out
