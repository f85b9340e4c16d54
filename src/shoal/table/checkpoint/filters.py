"""Saving and restoring of admission filters, one file per block of a sliding filter."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from shoal import _core
from shoal.durable import BasenameSave, StrPath, read_newest, temporary_path
from shoal.errors import DataError
from shoal.table.checkpoint import naming
from shoal.table.checkpoint.assets import find_assets, save_assets, settle
from shoal.table.config.messages import HashFilterSplitMetaDump, SlidingHashFilterMetaDump
from shoal.table.filters.admission import FilterBlockState, SlidingHashFilter

SPARE = 64


def save_hash_filter(hash_filter: Any, basename: StrPath, enable_hash_filter: bool = False) -> None:
    """Writes the counts of a sliding filter to ``<basename>-%05d-of-%05d``, one file per block.

    Does nothing if ``enable_hash_filter`` is off; filters without counts (dummy, probabilistic) write no files.
    """
    if not enable_hash_filter or not isinstance(hash_filter, SlidingHashFilter):
        return
    blocks = (hash_filter.get_block(block) for block in range(hash_filter.split_num))
    FilterCopy(_sliding_meta(hash_filter), blocks).save(basename)


@dataclass(frozen=True)
class FilterCopy:
    """A copy of a sliding filter's counts, to be saved."""

    meta: SlidingHashFilterMetaDump
    blocks: Iterable[FilterBlockState]

    @classmethod
    def of(cls, hash_filter: Any) -> FilterCopy | None:
        """A copy of the current counts; None for a filter without counts."""
        if not isinstance(hash_filter, SlidingHashFilter):
            return None
        blocks = [hash_filter.get_block(block) for block in range(hash_filter.split_num)]
        return cls(_sliding_meta(hash_filter), blocks)

    def save(self, basename: StrPath) -> None:
        count = self.meta.split_num
        with BasenameSave(basename) as save:
            for block, state in enumerate(self.blocks):
                meta = HashFilterSplitMetaDump(
                    failure_count=state.failure_count,
                    total_size=state.total_size,
                    num_elements=state.num_elements,
                    fill_rate=state.fill_rate,
                    sliding_hash_filter_meta=self.meta,
                ).SerializeToString()
                path = naming.shard_path(basename, block, count)
                target = save.temporary(path)
                cells = state.cells
                digest = _core.write_filter_block(temporary_path(target), target, meta, cells.ctypes.data, len(cells))
                save.add(path, digest)
            save.commit()
        naming.remove_other_counts(basename, count)


def restore_hash_filter(hash_filter: Any, basename: StrPath, enable_hash_filter: bool = False) -> None:
    """Restores the counts that `save_hash_filter` wrote; if any file is damaged, the filter is unchanged.

    Raises:
        CheckpointNotFoundError: there are no files.
        DataError: a file is damaged, or its filter has a different number of blocks or different step limits.
    """
    if not enable_hash_filter or not isinstance(hash_filter, SlidingHashFilter):
        return
    _set_counts(hash_filter, *_read_counts(hash_filter, basename))


def _set_counts(
    hash_filter: SlidingHashFilter, blocks: list[FilterBlockState], meta: SlidingHashFilterMetaDump
) -> None:
    for block, state in enumerate(blocks):
        hash_filter.set_block(block, state)
    hash_filter.set_head(meta.head, meta.head_increment, meta.failure_count)


def _read_counts(
    hash_filter: SlidingHashFilter, basename: StrPath
) -> tuple[list[FilterBlockState], SlidingHashFilterMetaDump]:
    """The counts of every block, and the metadata of the filter."""
    return read_newest([basename], lambda: _read_blocks(hash_filter, basename))


def _read_blocks(
    hash_filter: SlidingHashFilter, basename: StrPath
) -> tuple[list[FilterBlockState], SlidingHashFilterMetaDump]:
    files = naming.open_shards(basename)
    paths = files.paths
    read = [_read_block(path, hash_filter) for path in paths]
    files.check([digest for _, _, digest in read])
    blocks = [(state, meta) for state, meta, _ in read]
    if len(blocks) != hash_filter.split_num:
        raise DataError(
            f"filter {hash_filter.name!r} has {hash_filter.split_num} blocks, the checkpoint {os.fspath(basename)!r} "
            f"has {len(blocks)} files; nothing was restored"
        )
    meta = blocks[0][1]
    for path, (_, other) in zip(paths, blocks, strict=True):
        if (other.head, other.head_increment) != (meta.head, meta.head_increment):
            raise DataError(f"{path}: its head differs from that of the first file; the files are from different saves")
    return [state for state, _ in blocks], meta


def _sliding_meta(hash_filter: SlidingHashFilter) -> SlidingHashFilterMetaDump:
    head, head_increment, failures = hash_filter._meta()
    return SlidingHashFilterMetaDump(
        split_num=hash_filter.split_num,
        max_forward_step=hash_filter.max_forward_step,
        max_backward_step=hash_filter.max_backward_step,
        max_step=hash_filter.max_step,
        head=head,
        head_increment=head_increment,
        failure_count=failures,
    )


def _read_block(
    path: str, hash_filter: SlidingHashFilter
) -> tuple[FilterBlockState, SlidingHashFilterMetaDump, tuple[int, int]]:
    """The counts in one file, the metadata of the filter in it, and the file's digest."""
    try:
        meta = HashFilterSplitMetaDump.FromString(_core.read_filter_meta(path))
    except DecodeError as error:
        raise DataError(f"{path}: the first record is not a HashFilterSplitMetaDump message") from error
    sliding = meta.sliding_hash_filter_meta
    for name in ("split_num", "max_forward_step", "max_backward_step", "max_step"):
        if getattr(sliding, name) != getattr(hash_filter, name):
            raise DataError(
                f"{path}: {name} is {getattr(sliding, name)}, that of filter {hash_filter.name!r} is "
                f"{getattr(hash_filter, name)}; nothing was restored"
            )
    if sliding.head >= sliding.split_num:
        raise DataError(f"{path}: the head must be one of the {sliding.split_num} blocks, got {sliding.head}")
    # Every cell takes at least one byte of the file, so a larger size is damage.
    if not 1 <= meta.total_size <= os.path.getsize(path) or not 1 <= meta.fill_rate <= 1e6:
        raise DataError(f"{path}: {meta.total_size} positions with fill rate {meta.fill_rate} cannot be in this file")
    if meta.num_elements > meta.total_size + SPARE or meta.failure_count >= 1 << 63:
        raise DataError(f"{path}: {meta.num_elements} elements cannot be in {meta.total_size} positions")
    cells = np.empty(meta.total_size + SPARE, np.uint16)
    digest = _core.read_filter_cells(path, cells.ctypes.data, len(cells))
    state = FilterBlockState(meta.failure_count, meta.total_size, meta.num_elements, meta.fill_rate, cells)
    return state, sliding, digest


class _HashFilterListener:
    def __init__(
        self,
        basename: StrPath,
        hash_filters: Sequence[Any],
        enable_hash_filter: bool = False,
        enable_save_restore: bool = True,
    ) -> None:
        self.basename = os.fspath(basename)
        self.hash_filters = list(hash_filters)
        self.enable_hash_filter = enable_hash_filter
        self.enable_save_restore = enable_save_restore

    def _kept(self) -> list[tuple[str, Any]]:
        if not (self.enable_hash_filter and self.enable_save_restore):
            return []
        named = [(f"hash_filter_{index}", f) for index, f in enumerate(self.hash_filters)]
        return [(name, f) for name, f in named if isinstance(f, SlidingHashFilter)]


class HashFilterCheckpointSaverListener(_HashFilterListener):
    """Saves the filters to ``hash_filter_<ps index>`` in the step's assets before the step's model is saved."""

    def before_save(self, step: int) -> None:
        kept = self._kept()
        if kept:
            save_assets(self.basename, step, "filters", {name: name for name, _ in kept}, lambda f: _fill(f, kept))


class HashFilterCheckpointRestorerListener(_HashFilterListener):
    """Restores the filters from the newest checkpoint, if there is one, before a model is restored."""

    def before_restore(self) -> bool:
        """Restores the filters, all of them or none; returns whether there was a checkpoint."""
        kept = self._kept()
        if not kept:
            return False
        folder = find_assets(self.basename, "filters", lambda f: all(_has(f, name) for name, _ in kept))
        if folder is None:
            return False
        settle(folder, [name for name, _ in kept])
        read = [(hash_filter, *_read_counts(hash_filter, os.path.join(folder, name))) for name, hash_filter in kept]
        for hash_filter, blocks, meta in read:
            _set_counts(hash_filter, blocks, meta)
        return True


def _fill(folder: str, kept: Sequence[tuple[str, Any]]) -> None:
    with ThreadPoolExecutor(min(4, len(kept)), "shoal-save") as pool:
        list(pool.map(lambda pair: save_hash_filter(pair[1], os.path.join(folder, pair[0]), True), kept))


def _has(folder: str, name: str) -> bool:
    return naming.has_shards(os.path.join(folder, name))
