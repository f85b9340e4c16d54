"""One parameter of the outer update: tiles, waves, and the resulting local gradient."""

import math
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.buffers import empty_rows
from shoal.gather.payload.validate import raw_bytes
from shoal.gather.protocol.holding import run_of
from shoal.gather.protocol.waves import Pending, Poisoned, Waves
from shoal.gather.update.accumulate import BandWriter, TileSum
from shoal.gather.update.ready import Tiling
from shoal.gather.update.tiles import TilePlan

_HASH_ROWS_BYTES = 4 << 20  # finished rows go to the hash in pieces of about this size


@dataclass
class Summing:
    """The data that all parameters of one update share."""

    tiling: Tiling
    waves: Waves
    uids: list[int]
    reduction: str
    hasher: ThreadPoolExecutor
    accumulate_s: float = 0.0


class ParamSum:
    """The local part of one parameter's update: ``run`` computes ``gradient``, in the parameter's dtype, and its sums.

    ``digest`` continues that of earlier parameters: name, 0, float32 bytes of this rank's rows before the cast.
    """

    def __init__(self, work: Summing, index: int, factors: Tensor, digest: Any) -> None:
        self.work, self.index, self.factors, self.digest = work, index, factors, digest
        self.tiling = work.tiling
        self.param, self.region = self.tiling.holding.spec.params[index], self.tiling.regions[index]
        self.digest.update(self.param.name.encode() + b"\0")
        tensor: Any = self.tiling.parameters[index]
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        rows, columns = self.region.shape
        self.direct = local.dtype == torch.float32 and local.device.type == "cpu" and not self.region.inner
        self.gradient = (
            empty_rows(rows, columns)  # memory that the last gradient touched
            if self.direct
            else torch.empty(rows, columns, dtype=local.dtype, device=local.device)
        )
        self.squares = self.total = 0.0
        self.finite = False
        self._writer = BandWriter(self.region, self.gradient, digest)
        self._jobs: list[Future[None]] = []
        self._hashed = 0  # rows

    def run(self) -> None:
        if self.work.waves.local:
            self._run_local(self.tiling.tiles[self.index][self.tiling.control.rank])
        else:
            self._run_waves(self.tiling.tiles[self.index])
        if self.direct:
            sums = _core.gather_block_sums(self.gradient.data_ptr(), self.gradient.numel())
            self.squares, self.total = sums.squares, sums.values
            for job in self._jobs:  # the hash is the slowest part; the sums were computed meanwhile
                job.result()
        else:
            self.squares, self.total = self._writer.squares, self._writer.total
        self.finite = math.isfinite(self.squares) and self._writer.finite

    def _tile_sum(self, ids: Tensor, one_call: bool) -> TileSum:
        return TileSum(
            self.param,
            ids,
            self.region,
            dense=self.gradient if self.direct else None,
            one_call=one_call,
            device=self.gradient.device,
            reduction=self.work.reduction,
            peers=len(self.work.uids),
        )

    def _run_local(self, plan: TilePlan) -> None:
        """Sum payloads that are all on this rank: one call over all peers per tile, in pieces whose rows are hashed
        meanwhile. Chunks that are not adjacent are copied, for one wave at a time."""
        waves, uids = self.work.waves, self.work.uids
        for ids in self.region.chunks.split(max(plan.tile_chunks, 1)):
            for piece in self._pieces(ids):
                begin = time.perf_counter()
                g = len(uids) if run_of(piece) is not None else self.tiling.wave_peers
                tile = self._tile_sum(piece, one_call=g >= len(uids))
                for j in range(0, len(uids), g):
                    pending = waves.start(
                        self.index, [piece] * self.tiling.control.world, uids[j : j + g], replicated=True
                    )
                    slices = waves.finish(pending)
                    tile.add(slices, self.factors[j : j + g], first=j == 0, last=j + g >= len(uids))
                    del slices
                    waves.release(pending)
                self.work.accumulate_s += time.perf_counter() - begin
                if self.direct:
                    self._hash_rows(int(piece[-1]))
                else:
                    self._writer.write(piece, tile.values)  # pyrefly: ignore

    def _pieces(self, ids: Tensor) -> Iterator[Tensor]:
        h = self.param.blocks[2]
        grid_rows = -(-self.region.row1 // h) - self.region.row0 // h
        across = len(self.region.chunks) // max(1, grid_rows)
        rows = max(1, _HASH_ROWS_BYTES // max(1, across * self.param.totalk * 4))
        size = across * rows if self.direct else len(ids)
        yield from (piece for piece in ids.split(max(size, 1)) if len(piece))

    def _hash_rows(self, last_chunk: int) -> None:
        """Queue the rows that ``last_chunk`` completes."""
        _, across, h, w = self.param.blocks
        y, x = divmod(last_chunk, across)
        complete = y + 1 if x + 1 == -(-self.region.column1 // w) else y
        stop = min(complete * h, self.region.row1) - self.region.row0
        if stop > self._hashed:
            rows = raw_bytes(self.gradient[self._hashed : stop])
            self._jobs.append(self.work.hasher.submit(self.digest.update, rows))
            self._hashed = stop

    def _run_waves(self, tiles: list[TilePlan]) -> None:
        """Process the ranks' tiles in lockstep; up to ``prefetch`` waves are in flight while one is added."""
        waves, uids, g = self.work.waves, self.work.uids, self.tiling.wave_peers
        rounds = max(t.tiles for t in tiles)
        by_rank = self.tiling.chunks[self.index]
        all_waves = [(r, uids[j : j + g], j) for r in range(rounds) for j in range(0, len(uids), g)]
        under_way: deque[Pending] = deque()
        upcoming = iter(all_waves)
        failure: Exception | None = None

        def launch() -> None:
            if (wave := next(upcoming, None)) is not None:
                r, members, _ = wave
                ids = [
                    chunks[r * t.tile_chunks : (r + 1) * t.tile_chunks]
                    for chunks, t in zip(by_rank, tiles, strict=True)
                ]
                replicated = self.tiling.replicated[self.index]
                under_way.append(waves.start(self.index, ids, members, replicated=replicated))

        for _ in range(self.tiling.prefetch):
            launch()
        tile: TileSum | None = None
        for _, members, j in all_waves:
            pending = under_way.popleft()
            try:
                slices = waves.finish(pending)
            except Poisoned:
                waves.drain(under_way)
                raise
            try:
                if failure is None and len(pending.ids):
                    begin = time.perf_counter()
                    first, last = j == 0, j + g >= len(uids)
                    if first:
                        tile = self._tile_sum(pending.ids, one_call=False)
                    assert tile is not None
                    tile.add(slices, self.factors[j : j + len(members)], first=first, last=last)
                    self.work.accumulate_s += time.perf_counter() - begin
                    if last and not self.direct:
                        self._writer.write(pending.ids, tile.values)  # pyrefly: ignore
            except Exception as error:
                failure = error
            del slices
            waves.release(pending)  # before the next wave takes its place
            launch()
        if failure is not None:
            raise failure
        if self.direct and len(by_rank[self.tiling.control.rank]):
            self.digest.update(raw_bytes(self.gradient))
