"""The outer update: accepted payloads, streamed in one fixed order inside a byte budget, one parameter at a time."""

import copy
import json
import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal import _core
from shoal.buffers import empty_rows
from shoal.errors import ConfigError, UnsupportedError
from shoal.gather.accumulate import REDUCTIONS, BandWriter, TileSum
from shoal.gather.control import Control
from shoal.gather.errors import AlreadyApplied, BudgetTooSmall, GatherDivergence, RankFailure, UpdateInterrupted
from shoal.gather.exchange import Exchange, Pending, Poisoned
from shoal.gather.holding import Holding, hold, run_of
from shoal.gather.merge import APPLY, SKIP, Source
from shoal.gather.regions import Region, chunks_of, region_of
from shoal.gather.spec import GradientSpec, canonical_json
from shoal.gather.tiles import TilePlan, UpdateLedger, clip_factors, tile_plan
from shoal.gather.validate import raw_bytes

log = logging.getLogger("shoal.gather")

_HASH_ROWS_BYTES = 4 << 20  # finished rows go to the hash in pieces of about this size


@dataclass(kw_only=True)
class UpdateReport:
    """What an outer update did. ``param_norms`` and ``param_means`` are of the update, before the optimizer."""

    window: int = 0
    decision: str = SKIP
    duplicates_dropped: int = 0
    applied_params: list[str] = field(default_factory=list)
    skipped_params: list[str] = field(default_factory=list)
    tiles: int = 0
    waves: int = 0
    peak_bytes: int = 0
    bytes_exchanged: int = 0
    staged_bytes: int = 0
    """Most host bytes of raw waves at a time on this rank: up to ``prefetch * wave_peers`` slots of a tile's chunks."""
    min_median_norm: float = 0.0
    max_median_norm: float = 0.0
    param_norms: dict[str, float] = field(default_factory=dict)
    param_means: dict[str, float] = field(default_factory=dict)
    global_l2_norm: float = 0.0
    total_elements: int = 0
    update_hash: str = ""
    unready: dict[int, str] = field(default_factory=dict)
    """Ranks that made all ranks skip, and why."""
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    """``exchange_s``, ``accumulate_s`` and ``step_s`` of this rank."""


def outer_update(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    source: Source,
    *,
    spec: GradientSpec,
    group: Any = None,
    budget_bytes: int = 1 << 30,
    wave_peers: int = 4,
    prefetch: int = 2,
    clip: str = "median",
    reduction: str = "count_mean",
    ledger: UpdateLedger | None = None,
    verify: bool = False,
    snapshot: str | None = None,
    control_timeout_s: float = 240.0,
) -> UpdateReport:
    """Adds up the accepted payloads and steps the optimizer, one parameter's gradient at a time.

    The sum at every position runs in canonical order in float32, whatever the budget, the waves and the world size, so
    replicas and reruns get the same bits. Device memory stays within ``budget_bytes``, however many peers there are.

    Args:
        source: aggregate, partial, sequence of partials, or artifact reader. With ``group``, each rank's own result of
            one gather; without, a source that holds everything. Empty or SKIP: nothing changes.
        clip: ``"median"`` scales a peer's parameter down to the lower median norm; ``"none"`` does not.
        reduction: ``"count_mean"`` (over the peers that sent a position), ``"peer_mean"`` or ``"sum"``.
        verify: compares the hash of the update over the ranks; GatherDivergence when it differs.
        snapshot: ``"cpu"`` keeps copies of the parameters touched in this call and puts them back when it fails.

    Raises:
        BudgetTooSmall, AlreadyApplied: before anything is touched, on all ranks.
        UpdateInterrupted: a rank died or a payload could not be read any more half way.
    """
    if clip not in ("median", "none"):
        raise ConfigError(f"outer_update: clip is 'median' or 'none', got {clip!r}")
    if reduction not in REDUCTIONS:
        raise ConfigError(f"outer_update: reduction is one of {REDUCTIONS}, got {reduction!r}")
    if snapshot not in (None, "cpu"):
        raise ConfigError(f"outer_update: snapshot is None or 'cpu', got {snapshot!r}")
    control = Control(group, timeout_s=control_timeout_s)
    holding = hold(source, spec, control)
    report = UpdateReport(window=holding.manifest.window, duplicates_dropped=holding.manifest.duplicates_dropped)
    if holding.decision == SKIP:
        return report
    update = _Update(
        model, optimizer, holding, control, report, budget_bytes, wave_peers, prefetch, clip, reduction, verify
    )
    report.unready = update.ready(ledger)
    if report.unready:
        log.warning("window %d: not applied, ranks are not ready: %s", report.window, report.unready)
        return report
    keeper = _Snapshot(optimizer) if snapshot is not None else None
    try:
        update.run(keeper)
    except RankFailure as error:
        _roll_back(keeper)
        raise UpdateInterrupted(report.applied_params, str(error)) from error
    except Poisoned as error:
        _roll_back(keeper)
        raise UpdateInterrupted(report.applied_params, str(error)) from error
    report.decision = APPLY
    if verify and not control.agree(update.replica_hash()):
        _roll_back(keeper)
        raise GatherDivergence(f"window {report.window}: ranks applied different updates; restore a snapshot")
    if ledger is not None:
        ledger.record(report.window, holding.manifest.hash)
    return report


class _Snapshot:
    """Copies of what a call touched: parameters and their optimizer state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.saved: list[tuple[Tensor, Tensor, Any]] = []

    def keep(self, p: Tensor) -> None:
        local = p.detach()
        state = self.optimizer.state.get(p)
        self.saved.append(
            (p, local.clone().cpu() if not hasattr(p, "placements") else local.clone(), copy.deepcopy(state))
        )

    @torch.no_grad()
    def restore(self) -> None:
        for p, value, state in self.saved:
            p.copy_(value)
            if state is None:
                self.optimizer.state.pop(p, None)
            else:
                self.optimizer.state[p] = state


def _roll_back(keeper: _Snapshot | None) -> None:
    if keeper is not None:
        keeper.restore()


class _Update:
    """One call's plan and progress."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        holding: Holding,
        control: Control,
        report: UpdateReport,
        budget_bytes: int,
        wave_peers: int,
        prefetch: int,
        clip: str,
        reduction: str,
        verify: bool,
    ) -> None:
        self.verify = verify
        self.model, self.optimizer, self.holding, self.control, self.report = model, optimizer, holding, control, report
        self.budget_bytes, self.wave_peers, self.prefetch = budget_bytes, wave_peers, prefetch
        self.clip, self.reduction = clip, reduction
        self.spec = holding.spec
        self.uids = holding.manifest.uids
        self.exchange = Exchange(holding, control)
        self.hash = blake2b(digest_size=32)
        self.shared_hash = blake2b(digest_size=32)  # of the whole parameters, when others are sharded
        self.accumulate_s = self.step_s = 0.0

    # ---- S7: ready, or not at all

    def ready(self, ledger: UpdateLedger | None) -> dict[int, str]:
        """Agrees that every rank can go through with it; plans tiles for all ranks. Returns who cannot, and why."""
        said: dict[str, Any] = {"reason": "", "wrong": False, "needed": 0, "applied": False, "regions": []}
        error: Exception | None = None
        try:
            said["applied"] = ledger is not None and ledger.applied(self.report.window)
            self.parameters = self._parameters()
            self.regions = [region_of(p, t) for p, t in zip(self.spec.params, self.parameters, strict=True)]
            said["regions"] = [[*r.key, r.numel] if not self._whole(i) else [] for i, r in enumerate(self.regions)]
            said["needed"] = self._needed()
        except Exception as caught:
            error, said["reason"] = caught, f"{type(caught).__name__}: {caught}"
            said["wrong"] = isinstance(caught, ConfigError | UnsupportedError)
        if error is None:
            said["reason"] = self._unreadable()
        blobs = self.control.all_gather_bytes(canonical_json(said).encode())
        answers = [json.loads(blob) for blob in blobs]
        if error is not None and (said["wrong"] or self.control.world == 1):
            raise error
        for rank, answer in enumerate(answers):
            if answer["wrong"]:  # the caller's mistake is no reason to go on with the next window
                raise ConfigError(f"outer_update: rank {rank} cannot take part: {answer['reason']}")
        if any(answer["applied"] for answer in answers):
            if ledger is not None:
                ledger.check(self.report.window)
            raise AlreadyApplied(f"window {self.report.window} was applied on another rank")
        if needed := max(answer["needed"] for answer in answers):
            raise BudgetTooSmall(needed, f"{self.budget_bytes} bytes do not hold one chunk of a parameter")
        unready = {rank: answer["reason"] for rank, answer in enumerate(answers) if answer["reason"]}
        if not unready:
            self._plan([answer["regions"] for answer in answers])
        return unready

    def _parameters(self) -> list[Tensor]:
        named = dict(self.model.named_parameters())
        found: list[Tensor] = []
        for param in self.spec.params:
            if param.name not in named:
                raise ConfigError(f"outer_update: the model has no parameter {param.name!r} of the gradient spec")
            if tuple(named[param.name].shape) != param.shape:
                raise ConfigError(
                    f"outer_update: {param.name!r} has shape {tuple(named[param.name].shape)}, the spec {param.shape}"
                )
            found.append(named[param.name])
        return found

    def _whole(self, index: int) -> bool:
        return self.regions[index].numel == math.prod(self.spec.params[index].shape)

    def _tiles(self, index: int, numel: int, chunks: int) -> TilePlan:
        param = self.spec.params[index]
        return tile_plan(
            numel=numel,
            itemsize=self.parameters[index].element_size(),
            chunks=chunks,
            totalk=param.totalk,
            k=param.k,
            raw_per_chunk=self.holding.raw_per_chunk(index),
            budget_bytes=self.budget_bytes,
            wave_peers=self.wave_peers,
            prefetch=self.prefetch,
        )

    def _needed(self) -> int:
        """0, or the budget that would do for every parameter."""
        needed, short = 0, False
        for index, region in enumerate(self.regions):
            plan = None
            try:
                plan = self._tiles(index, region.numel, len(region.chunks))
                needed = max(needed, plan.grad_bytes + (plan.chunk_bytes if plan.tiles else 0))
            except BudgetTooSmall as error:
                needed, short = max(needed, error.needed), True
        return needed if short else 0

    def _unreadable(self) -> str:
        for uid, ref in self.holding.refs.items():
            if ref.path is not None and uid in self.holding.owners:
                try:
                    ref.verify()
                except Exception as error:
                    return f"peer {uid}: {error}"
        return ""

    def _plan(self, regions: list[list[list[int]]]) -> None:
        """Every rank's chunks and tiles of every parameter: slices can be sent without asking for them."""
        self.rank_ids: list[list[Tensor]] = []
        self.rank_tiles: list[list[TilePlan]] = []
        self.replicated: list[bool] = []
        self.counted: list[bool] = []  # whether this rank's rows count in global sums
        for index, param in enumerate(self.spec.params):
            keys = [tuple(said[index]) for said in regions]
            self.replicated.append(all(not key for key in keys))
            mine = keys[self.control.rank]
            self.counted.append(keys.index(mine) == self.control.rank)
            own = self.regions[index]
            ids, tiles = [], []
            for key in keys:
                if not key or key == mine:
                    chunks = own.chunks if key == mine else torch.arange(param.chunks)
                    numel = key[-1] if key else math.prod(param.shape)
                else:
                    chunks, numel = chunks_of(param, *key[:4]), key[-1]
                ids.append(chunks)
                tiles.append(self._tiles(index, numel, len(chunks)))
            self.rank_ids.append(ids)
            self.rank_tiles.append(tiles)

    # ---- S8

    def run(self, keeper: _Snapshot | None) -> None:
        report, norms = self.report, self.holding.manifest.norms
        for p in self.model.parameters():
            p.grad = None
        medians = []
        with ThreadPoolExecutor(1, thread_name_prefix="shoal-hash") as hasher:
            for index in range(len(self.spec.params)):
                median, factors = clip_factors(norms[:, index])
                medians.append(float(median))
                if self.clip == "none":
                    factors = torch.ones(len(self.uids))
                self._param(index, factors, hasher, keeper)
        report.min_median_norm, report.max_median_norm = min(medians, default=0.0), max(medians, default=0.0)
        report.global_l2_norm = math.sqrt(math.fsum(n * n for n in report.param_norms.values()))
        report.bytes_exchanged = self.exchange.bytes_received
        report.staged_bytes = self.exchange.peak_staged_bytes
        report.update_hash = self.hash.hexdigest()
        report.seconds = {
            "exchange_s": self.exchange.seconds, "accumulate_s": self.accumulate_s, "step_s": self.step_s
        }  # fmt: skip

    def replica_hash(self) -> int:
        """63 bits over what ranks have in common: everything, or the parameters that are not sharded."""
        digest = self.hash if all(self.replicated) else self.shared_hash
        return int.from_bytes(digest.digest()[:8], "little") >> 1

    def _param(self, index: int, factors: Tensor, hasher: ThreadPoolExecutor, keeper: _Snapshot | None) -> None:
        param, tensor, region = self.spec.params[index], self.parameters[index], self.regions[index]
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyrefly: ignore
        work = _Work(self, index, local, region, factors, hasher)
        failure: Exception | None = None
        try:
            work.run()
        except (RankFailure, Poisoned):
            raise
        except Exception as error:  # the others must not wait for this rank: told with the next collective
            failure = error
        state = 0 if failure is not None else 1 if not work.finite() else 2
        agreed = self.control.minimum(state)
        if agreed == 0:
            raise Poisoned(f"a rank failed while it added up {param.name!r}: {failure}") from failure
        begin = time.perf_counter()
        if agreed == 1:
            log.warning("window %d: the update of %r is not finite; it is skipped", self.report.window, param.name)
            self.report.skipped_params.append(param.name)
            return
        self._account(index, work)
        if keeper is not None:
            keeper.keep(tensor)
        tensor.grad = _as_gradient(
            tensor, region.cut(work.gradient) if region.numel else work.gradient.reshape(region.local_shape)
        )
        work.gradient = None  # type: ignore[assignment]  # pyrefly: ignore
        self.optimizer.step()
        tensor.grad = None
        self.report.applied_params.append(param.name)
        self.step_s += time.perf_counter() - begin

    def _account(self, index: int, work: "_Work") -> None:
        param, report = self.spec.params[index], self.report
        self.hash = work.digest
        if self.verify and self.replicated[index] and not all(self.replicated):
            self.shared_hash.update(raw_bytes(work.gradient.cpu()))
        sums = torch.tensor([work.squares, work.total] if self.counted[index] else [0.0, 0.0], dtype=torch.float64)
        if not self.replicated[index]:
            self.control.reduce_tensor(sums, dist.ReduceOp.SUM)
        numel = math.prod(param.shape)
        report.param_norms[param.name] = (
            math.sqrt(float(sums[0])) if not self.replicated[index] else math.sqrt(work.squares)
        )
        total = float(sums[1]) if not self.replicated[index] else work.total
        report.param_means[param.name] = total / numel
        report.total_elements += numel


def _as_gradient(p: Any, local: Tensor) -> Tensor:
    if not hasattr(p, "placements"):
        return local.reshape(p.shape)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        p.device_mesh,
        p.placements,
        run_check=False,
        shape=p.shape,
        stride=p.stride(),  # pyrefly: ignore
    )


class _Work:
    """One parameter: tiles, waves, and the local gradient that comes of them."""

    def __init__(
        self, update: _Update, index: int, local: Tensor, region: Region, factors: Tensor, hasher: ThreadPoolExecutor
    ) -> None:
        self.update, self.index, self.region, self.factors, self.hasher = update, index, region, factors, hasher
        self.param = update.spec.params[index]
        self.digest = update.hash.copy()
        self.digest.update(self.param.name.encode() + b"\0")
        rows, columns = region.shape
        self.direct = local.dtype == torch.float32 and local.device.type == "cpu"
        self.gradient = (
            empty_rows(rows, columns)  # memory that the last gradient touched
            if self.direct
            else torch.empty(rows, columns, dtype=local.dtype, device=local.device)
        )
        self.writer = BandWriter(region, self.gradient, self.digest)
        self.squares = self.total = 0.0
        self.jobs: list[Future[None]] = []

    def run(self) -> None:
        update = self.update
        tiles = update.rank_tiles[self.index]
        mine = tiles[update.control.rank]
        update.report.tiles += mine.tiles
        update.report.peak_bytes = max(update.report.peak_bytes, mine.peak_bytes)
        update.report.waves += mine.tiles * -(-len(update.uids) // update.wave_peers)
        if update.exchange.local:
            self._run_local(mine)
        else:
            self._run_waves(tiles)
        if self.direct:
            sums = _core.gather_block_sums(self.gradient.data_ptr(), self.gradient.numel())
            self.squares, self.total = sums.squares, sums.values
            for job in self.jobs:  # the hash is the slowest part; the sums were taken meanwhile
                job.result()
        else:
            self.squares, self.total = self.writer.squares, self.writer.total

    def finite(self) -> bool:
        return math.isfinite(self.squares)

    def _tile_sum(self, ids: Tensor, one_call: bool) -> TileSum:
        return TileSum(
            self.param,
            ids,
            self.region,
            dense=self.gradient if self.direct else None,
            one_call=one_call,
            device=self.gradient.device,
            reduction=self.update.reduction,
            peers=len(self.update.uids),
        )

    def _run_local(self, plan: TilePlan) -> None:
        """All payloads are here: a tile is one call over all peers, in pieces whose rows are hashed meanwhile. Chunks
        that do not follow each other have to be copied, which is done for one wave at a time."""
        update = self.update
        exchange, uids = update.exchange, update.uids
        for ids in self.region.chunks.split(max(plan.tile_chunks, 1)):
            for piece in self._pieces(ids):
                begin = time.perf_counter()
                g = len(uids) if run_of(self.param, piece) is not None else update.wave_peers
                tile = self._tile_sum(piece, one_call=g >= len(uids))
                for j in range(0, len(uids), g):
                    pending = exchange.start(
                        self.index, [piece] * update.control.world, uids[j : j + g], replicated=True
                    )
                    slots = exchange.finish(pending)
                    tile.add(slots, self.factors[j : j + g], first=j == 0, last=j + g >= len(uids))
                    del slots
                    exchange.release(pending)
                update.accumulate_s += time.perf_counter() - begin
                if self.direct:
                    self.jobs += self._hash_rows(int(piece[-1]))
                else:
                    self.writer.write(piece, tile.values)  # pyrefly: ignore

    def _pieces(self, ids: Tensor) -> Iterator[Tensor]:
        across = len(self.region.chunks) // max(1, self._grid_rows())
        rows = max(1, _HASH_ROWS_BYTES // max(1, across * self.param.totalk * 4))
        size = across * rows if self.direct else len(ids)
        yield from (piece for piece in ids.split(max(size, 1)) if len(piece))

    def _grid_rows(self) -> int:
        h = self.param.blocks[2]
        return -(-self.region.row1 // h) - self.region.row0 // h

    def _hash_rows(self, last_chunk: int) -> list[Any]:
        """Queues the rows that are complete once ``last_chunk`` is."""
        _, across, h, w = self.param.blocks
        y, x = divmod(last_chunk, across)
        complete = y + 1 if x + 1 == -(-self.region.column1 // w) else y
        stop = min(complete * h, self.region.row1) - self.region.row0
        start, self._hashed = getattr(self, "_hashed", 0), max(stop, getattr(self, "_hashed", 0))
        if stop <= start:
            return []
        return [self.hasher.submit(self.digest.update, raw_bytes(self.gradient[start:stop]))]

    def _run_waves(self, tiles: list[TilePlan]) -> None:
        """Lockstep over the ranks' tiles; up to ``prefetch`` waves are under way while one is added."""
        update = self.update
        exchange, uids, g = update.exchange, update.uids, update.wave_peers
        rounds = max(t.tiles for t in tiles)
        replicated = update.replicated[self.index]
        by_rank = update.rank_ids[self.index]
        waves = [(r, uids[j : j + g], j) for r in range(rounds) for j in range(0, len(uids), g)]
        under_way: deque[Pending] = deque()
        upcoming = iter(waves)
        failure: Exception | None = None

        def launch() -> None:
            if (wave := next(upcoming, None)) is not None:
                r, members, _ = wave
                ids = [
                    chunks[r * t.tile_chunks : (r + 1) * t.tile_chunks]
                    for chunks, t in zip(by_rank, tiles, strict=True)
                ]
                under_way.append(exchange.start(self.index, ids, members, replicated=replicated))

        for _ in range(update.prefetch):
            launch()
        tile: TileSum | None = None
        for _, members, j in waves:
            pending = under_way.popleft()
            try:
                slots = exchange.finish(pending)
            except Poisoned:
                exchange.drain(under_way)
                raise
            try:
                if failure is None and len(pending.ids):
                    begin = time.perf_counter()
                    first, last = j == 0, j + g >= len(uids)
                    if first:
                        tile = self._tile_sum(pending.ids, one_call=False)
                    assert tile is not None
                    tile.add(slots, self.factors[j : j + len(members)], first=first, last=last)
                    update.accumulate_s += time.perf_counter() - begin
                    if last and not self.direct:
                        self.writer.write(pending.ids, tile.values)  # pyrefly: ignore
            except Exception as error:
                failure = error
            del slots
            exchange.release(pending)  # before the next wave takes its place
            launch()
        if failure is not None:
            raise failure
        if self.direct and len(by_rank[update.control.rank]):
            self.digest.update(raw_bytes(self.gradient))
