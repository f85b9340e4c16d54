"""The outer update: streams accepted payloads in a fixed order within a byte budget, one parameter at a time."""

import copy
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.gather.errors import GatherDivergence, RankFailure, UpdateInterrupted
from shoal.gather.payload.spec import GradientSpec
from shoal.gather.payload.validate import raw_bytes
from shoal.gather.protocol.control import Control
from shoal.gather.protocol.holding import hold
from shoal.gather.protocol.merge import APPLY, SKIP, Source
from shoal.gather.protocol.waves import Poisoned, Waves
from shoal.gather.update.accumulate import REDUCTIONS
from shoal.gather.update.param_sum import ParamSum, Summing
from shoal.gather.update.ready import Tiling, get_ready
from shoal.gather.update.regions import as_gradient
from shoal.gather.update.tiles import UpdateLedger, clip_factors


class Snapshot:
    """Copies of parameters and their optimizer state from before their steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.saved: list[tuple[Tensor, Tensor, Any]] = []

    def keep(self, p: Tensor) -> None:
        value = p.detach().clone() if hasattr(p, "placements") else p.detach().to("cpu", copy=True)
        self.saved.append((p, value, copy.deepcopy(self.optimizer.state.get(p))))

    @torch.no_grad()
    def restore(self) -> None:
        for p, value, state in self.saved:
            p.copy_(value)
            if state is None:
                self.optimizer.state.pop(p, None)
            else:
                self.optimizer.state[p] = state


log = logging.getLogger("shoal.gather")


@dataclass(kw_only=True)
class UpdateReport:
    """The results of an outer update. ``param_norms`` and ``param_means`` are of the update, before the optimizer."""

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
    """Peak host bytes of raw waves on this rank: up to ``prefetch * wave_peers`` slices of a tile's chunks."""
    min_median_norm: float = 0.0
    max_median_norm: float = 0.0
    param_norms: dict[str, float] = field(default_factory=dict)
    param_means: dict[str, float] = field(default_factory=dict)
    global_l2_norm: float = 0.0
    total_elements: int = 0
    update_hash: str = ""
    unready: dict[int, str] = field(default_factory=dict)
    """Ranks that made all ranks skip, with the reason."""
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
    """Sum the accepted payloads and step the optimizer, one parameter's gradient at a time.

    The sum at every position runs in canonical order in float32, whatever the budget, the waves and the world size, so
    replicas and reruns get the same bits. Device memory stays within ``budget_bytes`` for any number of peers.

    Args:
        source: aggregate, partial, sequence of partials, or artifact reader. With ``group``, each rank's own result of
            one gather; without, a source with all payloads. Empty or SKIP: nothing changes.
        clip: ``"median"`` scales a peer's parameter down to the lower median norm; ``"none"`` does not.
        reduction: ``"count_mean"`` (over the peers that sent a position), ``"peer_mean"`` or ``"sum"``.
        verify: compare the hash of the update between ranks; GatherDivergence if it differs.
        snapshot: ``"cpu"`` keeps copies of the parameters changed in this call and restores them if it fails.

    Raises:
        BudgetTooSmall, AlreadyApplied: before anything changes, on all ranks.
        UpdateInterrupted: a rank died or a payload became unreadable midway.
    """
    if clip not in ("median", "none"):
        raise ConfigError(f"outer_update: clip must be 'median' or 'none', got {clip!r}")
    if reduction not in REDUCTIONS:
        raise ConfigError(f"outer_update: reduction must be one of {REDUCTIONS}, got {reduction!r}")
    if snapshot not in (None, "cpu"):
        raise ConfigError(f"outer_update: snapshot must be None or 'cpu', got {snapshot!r}")
    control = Control(group, timeout_s=control_timeout_s)
    holding = hold(source, spec, control)
    report = UpdateReport(window=holding.manifest.window, duplicates_dropped=holding.manifest.duplicates_dropped)
    if holding.decision == SKIP:
        return report
    holding.require_complete("outer_update")
    tiling = Tiling(holding, control, budget_bytes, wave_peers, prefetch)
    report.unready = get_ready(tiling, model, ledger)
    if report.unready:
        log.warning("window %d: not applied, ranks are not ready: %s", report.window, report.unready)
        return report
    keeper = Snapshot(optimizer) if snapshot is not None else None
    update = _Update(model, optimizer, tiling, report, clip, reduction, keeper, verify)
    try:
        update.run()
        if verify and not control.agree(update.replica_hash()):
            raise GatherDivergence(f"window {report.window}: ranks applied different updates; restore a snapshot")
    except BaseException as error:
        if keeper is not None:
            keeper.restore()
        if isinstance(error, GatherDivergence) or not isinstance(error, Exception):
            raise
        if not isinstance(error, RankFailure | Poisoned):
            control.give_up()  # so that the others do not wait until their deadline
        raise UpdateInterrupted(report.applied_params, str(error)) from error
    report.decision = APPLY
    if ledger is not None:
        ledger.record(report.window, holding.manifest.hash)
    return report


class _Update:
    """Sums and steps one parameter after the other."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        tiling: Tiling,
        report: UpdateReport,
        clip: str,
        reduction: str,
        keeper: Snapshot | None,
        verify: bool,
    ) -> None:
        self.model, self.optimizer, self.tiling, self.report = model, optimizer, tiling, report
        self.clip, self.reduction, self.keeper, self.verify = clip, reduction, keeper, verify
        self.holding, self.control = tiling.holding, tiling.control
        self.hash = blake2b(digest_size=32)
        self.shared_hash = blake2b(digest_size=32)  # of unsharded parameters, if others are sharded
        self.step_s = 0.0

    def run(self) -> None:
        report, manifest = self.report, self.holding.manifest
        self._clear_gradients()
        medians = []
        waves = Waves(self.holding, self.control)
        with ThreadPoolExecutor(1, thread_name_prefix="shoal-hash") as hasher:
            work = Summing(self.tiling, waves, manifest.uids, self.reduction, hasher)
            for index in range(len(self.holding.spec.params)):
                median, factors = clip_factors(manifest.norms[:, index])
                medians.append(float(median))
                if self.clip == "none":
                    factors = torch.ones(len(manifest.uids), device="cpu")
                self._param(index, factors, work)
        report.min_median_norm, report.max_median_norm = min(medians, default=0.0), max(medians, default=0.0)
        report.global_l2_norm = math.sqrt(math.fsum(n * n for n in report.param_norms.values()))
        report.bytes_exchanged = waves.bytes_received
        report.staged_bytes = waves.peak_staged_bytes
        report.update_hash = self.hash.hexdigest()
        report.seconds = {"exchange_s": waves.seconds, "accumulate_s": work.accumulate_s, "step_s": self.step_s}

    def _clear_gradients(self) -> None:
        """Clear all gradients, because a step must see that of one parameter only."""
        for p in self.model.parameters():
            p.grad = None
        self.optimizer.zero_grad(set_to_none=True)

    def replica_hash(self) -> int:
        """63 bits over the data that ranks share: everything, or the parameters that are not sharded."""
        digest = self.hash if all(self.tiling.replicated) else self.shared_hash
        return int.from_bytes(digest.digest()[:8], "little") >> 1

    def _param(self, index: int, factors: Tensor, work: Summing) -> None:
        param, tensor, region = (
            self.holding.spec.params[index],
            self.tiling.parameters[index],
            self.tiling.regions[index],
        )
        tiles = self.tiling.tiles[index][self.control.rank]
        self.report.tiles += tiles.tiles
        self.report.waves += tiles.tiles * -(-len(work.uids) // self.tiling.wave_peers)
        self.report.peak_bytes = max(self.report.peak_bytes, tiles.peak_bytes)
        summed: ParamSum | None = None
        failure: Exception | None = None
        try:
            summed = ParamSum(work, index, factors, self.hash.copy())
            summed.run()
        except (RankFailure, Poisoned):
            raise
        except Exception as error:  # the next collective notifies the others
            failure = error
        agreed = self.control.minimum(0 if failure is not None or summed is None else 1 if not summed.finite else 2)
        if agreed == 0 or summed is None:
            raise Poisoned(f"a rank failed while it added up {param.name!r}: {failure}") from failure
        if agreed == 1:
            log.warning("window %d: the update of %r is not finite; it is skipped", self.report.window, param.name)
            self.report.skipped_params.append(param.name)
            return
        begin = time.perf_counter()
        self._account(index, summed)
        if self.keeper is not None:
            self.keeper.keep(tensor)
        tensor.grad = as_gradient(tensor, summed.gradient.reshape(region.local_shape))
        del summed
        self.optimizer.step()
        tensor.grad = None
        self.report.applied_params.append(param.name)
        self.step_s += time.perf_counter() - begin

    def _account(self, index: int, summed: ParamSum) -> None:
        param, report, replicated = self.holding.spec.params[index], self.report, self.tiling.replicated[index]
        self.hash = summed.digest
        if self.verify and replicated and not all(self.tiling.replicated):
            self.shared_hash.update(raw_bytes(summed.gradient.cpu()))
        squares, total = summed.squares, summed.total
        if not replicated:
            own = [squares, total] if self.tiling.counted[index] else [0.0, 0.0]
            sums = torch.tensor(own, dtype=torch.float64, device="cpu")
            squares, total = self.control.reduce_tensor(sums, "sum").tolist()
        numel = math.prod(param.shape)
        report.param_norms[param.name] = math.sqrt(squares)
        report.param_means[param.name] = total / numel
        report.total_elements += numel
