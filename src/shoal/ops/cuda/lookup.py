"""`map_id_to_embedding` and `id_places`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.ops.cuda import launch
from shoal.ops.cuda.hashing import find
from shoal.ops.cuda.launch import ELEMENTS, Fast, blocks, part_of, pointer, steps, upload


@Fast
def _gather(
    places, starts, addresses, out, n, lists, d: tl.constexpr, ELEMENT: tl.constexpr, LISTS: tl.constexpr,
    STEPS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row ``places[i]`` of the concatenated lists of rows."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + o, mask=o < n, other=-1)
    found = place >= 0
    if LISTS:
        which = part_of(place, starts, lists, STEPS)
        place -= tl.load(starts + which, mask=found, other=0)
        rows = pointer(tl.load(addresses + which, mask=found, other=0), ELEMENT)
    else:
        rows = pointer(tl.load(addresses + o * 0, mask=found, other=0), ELEMENT)
    for begin in range(0, d, COLUMNS):
        c = begin + tl.arange(0, COLUMNS)
        both = found[:, None] & (c < d)[None, :]
        row = tl.load(rows[:, None] + place[:, None] * d + c[None, :], mask=both, other=0)
        tl.store(out + o[:, None] * d + c[None, :], row, mask=both)


def id_places(ids: list[Tensor], input: Tensor) -> Tensor:
    wanted = input.contiguous().view(-1)
    n = wanted.shape[0]
    if not n:
        return torch.empty_like(input)
    flag = launch.new_flag(wanted)
    keys = ids[0].contiguous() if len(ids) == 1 else torch.cat(ids)
    places = find(keys, wanted, flag)
    launch.raise_if(flag, lambda at: f"id {int(wanted[n - at])} of input is not among ids")
    return places.view(input.shape)


def map_id_to_embedding(
    ids: list[Tensor], embeddings: list[Tensor], input: Tensor, multi_threads: bool
) -> tuple[Tensor, Tensor]:
    places = id_places(ids, input)
    rows = [e.detach().contiguous() for e in embeddings]
    n, d, lists = places.numel(), rows[0].shape[1], len(rows)
    out = rows[0].new_empty((*input.shape, d))
    if n and d:
        starts = [0]
        for r in rows[:-1]:
            starts.append(starts[-1] + r.shape[0])
        numbers = upload([*starts, *(r.data_ptr() for r in rows)], out)
        columns = min(128, triton.next_power_of_2(d))
        block = max(8, min(256, 4096 // columns))
        _gather[blocks(n, block)](
            places, numbers[:lists], numbers[lists:], out, n, lists, d=d, ELEMENT=ELEMENTS[out.dtype], LISTS=lists > 1,
            STEPS=steps(lists), COLUMNS=columns, BLOCK=block,
        )  # fmt: skip
    return out, places
