"""Small pure pieces of the outer update: memory arithmetic, clipping, and the ledger."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.gather.errors import AlreadyApplied, BudgetTooSmall
from shoal.host import as_tensor


@dataclass(frozen=True, slots=True)
class TilePlan:
    """One parameter under a budget: ``grad_bytes + tile_chunks * chunk_bytes`` is its accounted peak."""

    grad_bytes: int
    chunk_bytes: int
    tile_chunks: int
    tiles: int

    @property
    def peak_bytes(self) -> int:
        return self.grad_bytes + self.tile_chunks * self.chunk_bytes


def tile_plan(
    *,
    numel: int,
    itemsize: int,
    chunks: int,
    totalk: int,
    k: int,
    raw_per_chunk: float,
    budget_bytes: int,
    wave_peers: int = 4,
    prefetch: int = 2,
) -> TilePlan:
    """Compute how many chunks of a parameter fit the budget with its gradient, for any number of peers.

    Example:
        >>> tile_plan(numel=256, itemsize=4, chunks=16, totalk=16, k=4, raw_per_chunk=10, budget_bytes=4096)
        TilePlan(grad_bytes=1024, chunk_bytes=256, tile_chunks=12, tiles=2)
    """
    if wave_peers < 1 or prefetch < 1:
        raise ConfigError(f"wave_peers and prefetch must be at least 1, got {wave_peers} and {prefetch}")
    grad_bytes = numel * itemsize
    chunk_bytes = math.ceil(8 * totalk + 12 * k + prefetch * wave_peers * raw_per_chunk)
    if chunks == 0:  # a rank without rows of this parameter
        return TilePlan(grad_bytes, chunk_bytes, 0, 0)
    tile_chunks = min(chunks, (budget_bytes - grad_bytes) // chunk_bytes)
    if tile_chunks < 1:
        raise BudgetTooSmall(grad_bytes + chunk_bytes, f"{budget_bytes} bytes do not hold one chunk of a parameter")
    return TilePlan(grad_bytes, chunk_bytes, tile_chunks, -(-chunks // tile_chunks))


def clip_factors(norms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower median ``m`` of the peers' norms and each peer's factor ``min(1, m / (norm + 1e-8))``, float32.

    Example:
        >>> m, f = clip_factors(torch.tensor([5.0, 3.0, 10.0]))
        >>> float(m), f.tolist()
        (5.0, [1.0, 1.0, 0.5])
    """
    norms = as_tensor(norms).to(torch.float32)
    if norms.numel() == 0:
        return torch.zeros((), device="cpu"), norms.reshape(-1)
    median = norms.sort().values[(norms.numel() - 1) // 2]
    return median, torch.clamp(median / (norms + 1e-8), max=1.0)


class UpdateLedger:
    """Records the last applied window and refuses to apply one twice; save it with the optimizer.

    ``last`` is ``(window, manifest hash)`` or None; ``step`` counts applied windows.
    """

    def __init__(self, *, allow_replay: bool = False) -> None:
        self.allow_replay = allow_replay
        self.last: tuple[int, str] | None = None
        self.step = 0

    def applied(self, window: int) -> bool:
        """Whether this window or a later one was applied, so that it must not be applied again."""
        return not self.allow_replay and self.last is not None and window <= self.last[0]

    def check(self, window: int) -> None:
        if self.applied(window):
            assert self.last is not None
            raise AlreadyApplied(
                f"window {window} must come after window {self.last[0]}, which was applied last; "
                "use UpdateLedger(allow_replay=True) to apply it again"
            )

    def record(self, window: int, manifest_hash: str) -> None:
        self.last = (window, manifest_hash)
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        return {"last": None if self.last is None else list(self.last), "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        last = state["last"]
        self.last = None if last is None else (int(last[0]), str(last[1]))
        self.step = int(state["step"])
