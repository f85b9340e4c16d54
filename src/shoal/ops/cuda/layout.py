"""The layout op and its gradient: one launch per request serves every slice of every layout.

Each lane computes one float of an output: it finds its sample's fids, reads one column of their vectors and pools it.
Every element of an output belongs to one slice, so outputs need no zeroing, except those into which slices are added.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from shoal.ops.cuda import launch
from shoal.ops.cuda.launch import ELEMENTS, CachedTensors, Fast, pointer, upload
from shoal.ops.layout.blocks import Request
from shoal.ops.layout.op import _check_grads, _layout_cpu, _requests
from shoal.ops.layout.plan import Plan, plan_of_key
from shoal.ops.layout.reference import output_shape
from shoal.proto.feature_configs import PoolingType

_BLOCK = 256
_FIELDS = 11  # fields of a task: those of `Task`, and the length of its sequence axis
_FIRSTN = int(PoolingType.FIRSTN)


@Fast
def _check_offsets(nfl, nfl_length, rows, row_count, fid_count, flag, BLOCK: tl.constexpr):
    """Set the flag unless both vectors are ascending and within bounds."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = tl.load(nfl + i, mask=i < nfl_length, other=0) & 0x7FFFFFFF
    before = tl.load(nfl + i - 1, mask=(i < nfl_length) & (i > 0), other=0) & 0x7FFFFFFF
    bad = (i < nfl_length) & ((here < before) | (here > row_count))
    here = tl.load(rows + i, mask=i < row_count, other=0)
    before = tl.load(rows + i - 1, mask=(i < row_count) & (i > 0), other=0)
    bad = bad | ((i < row_count) & ((here < before) | (here > fid_count)))
    tl.store(flag + i * 0, 1, mask=bad)


@Fast
def _embedding_to_layout(
    tile_tasks, tile_starts, tasks, outputs, nfl, nfl_length, rows, row_count, fids, fid_count, batch, first_sample,
    block_at, block_sizes, block_strides, block_count, flag, scale,
    BACK: tl.constexpr, FLAT: tl.constexpr, ELEMENT: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    task = tasks + tl.load(tile_tasks + tile) * FIELDS
    output, place = tl.load(task), tl.load(task + 1)
    sample_stride, sequence_stride = tl.load(task + 2), tl.load(task + 3)
    feature, start, width = tl.load(task + 4), tl.load(task + 5), tl.load(task + 6).to(tl.int32)
    pooling, longest, adds = tl.load(task + 7), tl.load(task + 8), tl.load(task + 9)
    floats = tl.load(task + 10).to(tl.int32) * width
    f = tl.load(tile_starts + tile) + tl.arange(0, BLOCK)
    sample = f // floats
    rest = (f - sample * floats).to(tl.int32)
    t = (rest // width).to(tl.int64)
    column = rest % width
    inside = sample < batch
    # the feature's rows
    entry = tl.load(nfl + feature)
    first = entry & 0x7FFFFFFF
    shared = (entry >> 31) & 1
    more = feature + 1 < nfl_length
    after = tl.load(nfl + feature + 1, mask=more, other=0) & 0x7FFFFFFF
    have = tl.where(more, after, row_count) - first
    need = tl.where(shared != 0, 1, batch)
    tl.store(flag, 1, mask=(have != 0) & (have < need))
    present = inside & (have > 0) & (have >= need)
    row = first + tl.where(shared != 0, 0, sample)
    exists = present & (row < row_count)
    begin = tl.load(rows + row, mask=exists, other=0)
    end = tl.load(rows + row + 1, mask=exists & (row + 1 < row_count), other=fid_count)
    ordered = (begin >= 0) & (end >= begin) & (end <= fid_count)
    tl.store(flag + f * 0, 1, mask=present & ((exists & ordered) == 0))
    count = tl.where(exists & ordered, end - begin, 0)
    # which of them this lane pools
    low = tl.where(pooling == 3, t, 0)
    high = tl.where(pooling == 3, tl.minimum(tl.minimum(count, longest), t + 1), count)
    share = tl.where(pooling == 1, tl.maximum(count, 1), 1).to(ELEMENT)
    there = pointer(tl.load(outputs + output), ELEMENT)
    there += (first_sample + sample) * sample_stride + place + t * sequence_stride + column
    total = tl.zeros((BLOCK,), dtype=ELEMENT)
    if BACK:
        total = (tl.load(there, mask=inside, other=0) * scale / share).to(ELEMENT)
    most = tl.max(high - low, axis=0)
    i = most * 0
    while i < most:
        k = low + i
        active = inside & (k < high)
        fid = tl.load(fids + begin + k, mask=active, other=0)
        block = (fid >> 32) & 0xFFFFFFFF
        known = active & (block < block_count)
        block = tl.where(known, block, 0)
        stride = tl.load(block_strides + block, mask=known, other=0)
        address = (fid & 0xFFFFFFFF) * stride + start
        fits = known & (address + width <= tl.load(block_sizes + block, mask=known, other=0))
        if not FLAT:
            fits = fits & (start + width <= stride)
        tl.store(flag + f * 0, 1, mask=active & (fits == 0))
        vector = pointer(tl.load(block_at + block, mask=known, other=0), ELEMENT) + address + column
        if BACK:
            tl.atomic_add(vector, total, mask=fits, sem="relaxed")
        else:
            total += tl.load(vector, mask=fits, other=0) / share
        i += 1
    if not BACK:
        if adds != 0:
            tl.atomic_add(there, total, mask=inside & (count > 0), sem="relaxed")
        else:
            tl.store(there, total, mask=inside)


def _tasks(plan: Plan) -> Tensor:
    """int64 ``[tasks, fields]``; the last field is the length of the sequence axis, 1 if there is none."""
    lengths = [plan.shapes[t.output][-2] if t.pooling == _FIRSTN else 1 for t in plan.tasks]
    return torch.cat([plan.native, torch.tensor(lengths, dtype=torch.int64, device="cpu").view(-1, 1)], 1)


@lru_cache(maxsize=64)
def _tiles(key: str, batch: int, device: torch.device) -> CachedTensors:
    """The tasks on the device and, per tile of a request, its task and its first float within that task."""
    tasks = _tasks(plan_of_key(key)).to(device)
    counts = (batch * tasks[:, 6] * tasks[:, 10] + _BLOCK - 1) // _BLOCK
    task = torch.arange(tasks.shape[0], device=device).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts)[task]
    return CachedTensors((tasks, task, (torch.arange(task.shape[0], device=device) - first) * _BLOCK))


@lru_cache(maxsize=64)
def _added(key: str) -> frozenset[int]:
    """The outputs into which slices are added."""
    return frozenset(task.output for task in plan_of_key(key).tasks if task.adds)


def _raise_cpu_error(args: tuple[Any, ...]) -> None:
    """Raise the error of the CPU op, which names the bad position."""
    host = [e.detach().cpu() for e in args[0]], *(t.cpu() for t in args[1:4])
    _layout_cpu(*host, *args[4:8], [t.cpu() for t in args[8]], [t.cpu() for t in args[9]])
    raise launch.ConfigError("fused_embedding_to_layout: the offsets must not change while the op uses them")


def _run(
    plan: Plan, requests: list[Request], sources: list[Tensor], outputs: list[Tensor], args: tuple[Any, ...],
    scale: float, back: bool,
) -> None:  # fmt: skip
    fids, rows, nfl = (t.contiguous() for t in args[1:4])
    if not outputs:
        return
    like, size = outputs[0], outputs[0].element_size()
    ends = [o.data_ptr() for o in outputs]
    for q in requests:  # before any launch: an error after one could leave the flag set
        if q.nfl[1] < len(plan.feature_names):
            raise launch.ConfigError(
                f"fused_embedding_to_layout: nfl_offset must have an entry per feature, {len(plan.feature_names)}, "
                f"got {q.nfl[1]}"
            )
    flag = launch.new_flag(like)
    for q in requests:
        _check_offsets[launch.blocks(max(q.nfl[1], q.rows[1]), 1024)](
            nfl[q.nfl[0] :], q.nfl[1], rows[q.rows[0] :], q.rows[1], q.fids[1], flag, BLOCK=1024
        )
        tasks, tile_tasks, tile_starts = _tiles(plan.key, q.batch, like.device).use()
        if not tile_tasks.shape[0]:
            continue
        blocks = len(q.blocks)
        numbers = upload(
            [
                *ends, *(sources[b.source].data_ptr() + b.start * size for b in q.blocks), *(b.size for b in q.blocks),
                *(b.stride for b in q.blocks),
            ],
            like,
        )  # fmt: skip
        out_at, block_at, sizes, strides = numbers.split([len(ends), blocks, blocks, blocks])
        _embedding_to_layout[(tile_tasks.shape[0],)](
            tile_tasks, tile_starts, tasks, out_at, nfl[q.nfl[0] :], q.nfl[1], rows[q.rows[0] :], q.rows[1],
            fids[q.fids[0] :], q.fids[1], q.batch, q.first_row, block_at, sizes, strides, blocks, flag, scale,
            BACK=back, FLAT=args[7] > 2, ELEMENT=ELEMENTS[like.dtype], FIELDS=_FIELDS, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    if launch.read_flag(flag):
        _raise_cpu_error(args)


def embedding_to_layout(*args: Any) -> list[Tensor]:
    """`reference.embedding_to_layout` with the arguments of the op."""
    plan = plan_of_key(args[5])
    requests, total = _requests(plan, args), sum(args[4])
    embeddings = [e.detach().contiguous() for e in args[0]]
    like: Any = embeddings[0] if embeddings else torch.zeros(0, dtype=torch.float32, device=args[1].device)
    added = _added(plan.key)
    outputs = []
    for i, shape in enumerate(plan.shapes):
        sizes = output_shape(shape, total)
        overwritten = sizes[0] == total and i not in added
        outputs.append(like.new_empty(sizes) if overwritten else like.new_zeros(sizes))
    _run(plan, requests, embeddings, outputs, args, 1.0, False)
    return outputs


def embedding_to_layout_grad(grads: list[Tensor], scale: float, *args: Any) -> list[Tensor]:
    plan = plan_of_key(args[5])
    requests = _requests(plan, args)
    _check_grads(plan, grads, args[0], sum(args[4]))
    if grads and grads[0].dtype is torch.float64:  # Triton passes float arguments as float32
        grads, scale = [g * scale for g in grads], 1.0
    outs = [torch.zeros_like(e, memory_format=torch.contiguous_format) for e in args[0]]
    _run(plan, requests, outs, [g.contiguous() for g in grads], args, scale, True)
    return outs
