"""How each version of the layout op addresses memory: embedding tensors cut into blocks, per request."""

import itertools
from dataclasses import dataclass

from torch import Tensor

from shoal.errors import ConfigError
from shoal.ops.layout.plan import Plan

_OP = "fused_embedding_to_layout"


@dataclass(frozen=True)
class Block:
    """``size`` elements of tensor ``source`` from element ``start``; a fid's low 32 bits count ``stride`` elements."""

    source: int
    start: int
    size: int
    stride: int


@dataclass(frozen=True)
class Request:
    """One request: its blocks, and its parts of the three offset vectors as (start, length)."""

    blocks: list[Block]
    nfl: tuple[int, int]
    rows: tuple[int, int]
    fids: tuple[int, int]
    batch: int
    first_row: int


def requests_of(
    plan: Plan,
    embeddings: list[Tensor],
    fid_offset: Tensor,
    feature_offset: Tensor,
    nfl_offset: Tensor,
    batch_size: list[int],
    ps_num: int,
    version: int,
    row_splits: list[Tensor],
    sizes: list[Tensor],
) -> list[Request]:
    """Check the sizes of all inputs against each other, and cut them into requests."""
    for b in batch_size:
        if b < 0:
            raise ConfigError(f"{_OP}: batch_size must be >= 0, got {b}")
    whole = ((0, nfl_offset.shape[0]), (0, feature_offset.shape[0]), (0, fid_offset.shape[0]))
    if version != 5:
        if len(batch_size) != 1:
            raise ConfigError(f"{_OP}: batch_size must be one number in version {version}, got {len(batch_size)}")
        return [Request(_BLOCKS[version](plan, embeddings, ps_num, row_splits, sizes), *whole, batch_size[0], 0)]
    count = len(plan.tables) * ps_num
    _check_count(embeddings, count)
    names = ("nfl_size", "feature_size", "fid_size")
    totals = [part[1] for part in whole]
    cuts = [_cut(name, s, len(batch_size), total) for name, s, total in zip(names, sizes, totals, strict=False)]
    emb_size = _counts("emb_size", sizes[3], len(batch_size) * count)
    requests, row = [], 0
    starts = [0] * count
    for r, batch in enumerate(batch_size):
        here = emb_size[r * count : (r + 1) * count]
        blocks = [Block(i, starts[i], size, 1) for i, size in enumerate(here)]
        starts = [start + size for start, size in zip(starts, here, strict=True)]
        requests.append(Request(blocks, cuts[0][r], cuts[1][r], cuts[2][r], batch, row))
        row += batch
    for i, tensor in enumerate(embeddings):
        if starts[i] != tensor.numel():
            raise ConfigError(
                f"{_OP}: emb_size of tensor {i} adds up to {starts[i]}, but the tensor has {tensor.numel()} floats"
            )
    return requests


def _check_count(embeddings: list[Tensor], count: int) -> None:
    if len(embeddings) != count:
        raise ConfigError(f"{_OP}: embeddings_list must hold {count} tensors (tables x shards), got {len(embeddings)}")


def _counts(name: str, sizes: Tensor, length: int) -> list[int]:
    if sizes.dim() != 1 or sizes.shape[0] != length:
        raise ConfigError(f"{_OP}: {name} must have {length} entries, got shape {list(sizes.shape)}")
    counts = sizes.tolist()
    if counts and min(counts) < 0:
        raise ConfigError(f"{_OP}: {name} must be >= 0, got {min(counts)}")
    return counts


def _cut(name: str, sizes: Tensor, requests: int, total: int) -> list[tuple[int, int]]:
    counts = _counts(name, sizes, requests)
    if sum(counts) != total:
        raise ConfigError(f"{_OP}: {name} adds up to {sum(counts)}, but there are {total} entries")
    starts, at = [], 0
    for count in counts:
        starts.append((at, count))
        at += count
    return starts


def _version_1(
    plan: Plan, embeddings: list[Tensor], ps_num: int, row_splits: list[Tensor], sizes: list[Tensor]
) -> list[Block]:
    for i, tensor in enumerate(embeddings):
        if tensor.dim() != 2:
            raise ConfigError(
                f"{_OP}: embeddings_list[{i}] must be [rows, width] in version 1, got {list(tensor.shape)}"
            )
    return [Block(i, 0, tensor.numel(), tensor.shape[1]) for i, tensor in enumerate(embeddings)]


def _version_2(
    plan: Plan, embeddings: list[Tensor], ps_num: int, row_splits: list[Tensor], sizes: list[Tensor]
) -> list[Block]:
    _check_count(embeddings, len(plan.tables) * ps_num)
    if len(row_splits) != len(embeddings):
        raise ConfigError(f"{_OP}: fid_list_row_split must hold {len(embeddings)} vectors, got {len(row_splits)}")
    blocks = []
    for i, (tensor, splits) in enumerate(zip(embeddings, row_splits, strict=True)):
        features = plan.tables[i // ps_num]
        if splits.dim() != 1 or splits.shape[0] != len(features) + 1:
            raise ConfigError(
                f"{_OP}: fid_list_row_split[{i}] must have {len(features) + 1} entries, got shape {list(splits.shape)}"
            )
        rows = splits.tolist()
        if rows[0] != 0 or any(b < a for a, b in itertools.pairwise(rows)):
            raise ConfigError(f"{_OP}: fid_list_row_split[{i}] must start at 0 and never fall, got {rows}")
        start = 0
        for j, f in enumerate(features):
            size = (rows[j + 1] - rows[j]) * plan.widths[f]
            blocks.append(Block(i, start, size, plan.widths[f]))
            start += size
        if start > tensor.numel():
            raise ConfigError(
                f"{_OP}: fid_list_row_split[{i}] needs {start} floats, but tensor {i} has {tensor.numel()}"
            )
    return blocks


def _version_3(
    plan: Plan, embeddings: list[Tensor], ps_num: int, row_splits: list[Tensor], sizes: list[Tensor]
) -> list[Block]:
    _check_count(embeddings, len(plan.tables) * ps_num)
    return [Block(i, 0, tensor.numel(), 1) for i, tensor in enumerate(embeddings)]


def _version_4(
    plan: Plan, embeddings: list[Tensor], ps_num: int, row_splits: list[Tensor], sizes: list[Tensor]
) -> list[Block]:
    if len(embeddings) != 1:
        raise ConfigError(f"{_OP}: embeddings_list must hold one flat tensor in version 4, got {len(embeddings)}")
    tables = len(plan.tables)
    lengths = _counts("fid_list_emb_row_lenth", sizes[0], ps_num * tables)
    if sum(lengths) != embeddings[0].numel():
        raise ConfigError(
            f"{_OP}: fid_list_emb_row_lenth adds up to {sum(lengths)},"
            f" but the tensor has {embeddings[0].numel()} floats"
        )
    blocks: list[Block | None] = [None] * (ps_num * tables)
    start = 0
    for piece, length in enumerate(lengths):
        p, t = divmod(piece, tables)
        blocks[t * ps_num + p] = Block(0, start, length, 1)
        start += length
    return blocks  # type: ignore[return-value]


_BLOCKS = {1: _version_1, 2: _version_2, 3: _version_3, 4: _version_4}
