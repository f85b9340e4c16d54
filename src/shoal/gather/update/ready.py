"""The last step before a parameter changes: check that all ranks can make the update, and exchange their parts."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError, UnsupportedError
from shoal.gather.errors import AlreadyApplied, BudgetTooSmall
from shoal.gather.payload.spec import canonical_json
from shoal.gather.protocol.control import Control
from shoal.gather.protocol.holding import Holding
from shoal.gather.update.regions import Region, chunks_of, region_of
from shoal.gather.update.tiles import TilePlan, UpdateLedger, tile_plan


@dataclass
class Tiling:
    """The parts and tiles of every parameter on every rank; lists are by parameter, inner ones by rank."""

    holding: Holding
    control: Control
    budget_bytes: int
    wave_peers: int
    prefetch: int
    parameters: list[Tensor] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    """This rank's part."""
    chunks: list[list[Tensor]] = field(default_factory=list)
    tiles: list[list[TilePlan]] = field(default_factory=list)
    replicated: list[bool] = field(default_factory=list)
    """Whether every rank holds the complete parameter."""
    counted: list[bool] = field(default_factory=list)
    """Whether this rank's rows count in global sums, because no lower rank holds the same ones."""

    def find(self, model: torch.nn.Module) -> None:
        """Find this rank's parameters and its parts of them."""
        named = dict(model.named_parameters())
        for param in self.holding.spec.params:
            if param.name not in named:
                raise ConfigError(f"outer_update: the model has no parameter {param.name!r} of the gradient spec")
            tensor = named[param.name]
            if tuple(tensor.shape) != param.shape:
                raise ConfigError(
                    f"outer_update: {param.name!r} has shape {tuple(tensor.shape)}, but the spec has {param.shape}"
                )
            self.parameters.append(tensor)
            self.regions.append(region_of(param, tensor))

    def own_parts(self) -> list[list[int]]:
        """This rank's parts for the other ranks; empty for a complete parameter."""
        shapes = [param.shape for param in self.holding.spec.params]
        return [
            [] if region.numel == math.prod(shape) else [*region.key, region.numel]
            for region, shape in zip(self.regions, shapes, strict=True)
        ]

    def _tile_plan(self, index: int, numel: int, chunks: int) -> TilePlan:
        param = self.holding.spec.params[index]
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

    def needed(self) -> int:
        """0, or the smallest budget for all parameters."""
        needed, short = 0, False
        for index, region in enumerate(self.regions):
            try:
                plan = self._tile_plan(index, region.numel, len(region.chunks))
                needed = max(needed, plan.grad_bytes + (plan.chunk_bytes if plan.tiles else 0))
            except BudgetTooSmall as error:
                needed, short = max(needed, error.needed), True
        return needed if short else 0

    def plan(self, parts_of_ranks: list[list[list[int]]]) -> None:
        """Compute every rank's chunks and tiles from their parts, so that slices can be sent without a request."""
        for index, param in enumerate(self.holding.spec.params):
            keys = [tuple(parts[index]) for parts in parts_of_ranks]
            mine = keys[self.control.rank]
            self.replicated.append(not any(keys))
            self.counted.append(keys.index(mine) == self.control.rank)
            chunks, tiles = [], []
            for key in keys:
                if key == mine:
                    ids = self.regions[index].chunks
                else:
                    ids = chunks_of(param, *key[:4]) if key else torch.arange(param.chunks, device="cpu")
                chunks.append(ids)
                tiles.append(self._tile_plan(index, key[-1] if key else math.prod(param.shape), len(ids)))
            self.chunks.append(chunks)
            self.tiles.append(tiles)


def get_ready(tiling: Tiling, model: torch.nn.Module, ledger: UpdateLedger | None) -> dict[int, str]:
    """Complete the tiling if all ranks are ready; otherwise return the ranks that are not, with the reason.

    Raises the same error on all ranks: AlreadyApplied, BudgetTooSmall, or ConfigError for a mistake on any rank.
    """
    control, window = tiling.control, tiling.holding.manifest.window
    status: dict[str, Any] = {"reason": "", "wrong": False, "needed": 0, "applied": False, "parts": []}
    error: Exception | None = None
    try:
        status["applied"] = ledger is not None and ledger.applied(window)
        tiling.find(model)
        status["parts"] = tiling.own_parts()
        status["needed"] = tiling.needed()
        status["reason"] = _unreadable(tiling.holding)
    except Exception as caught:  # the others are notified first
        error, status["reason"] = caught, f"{type(caught).__name__}: {caught}"
        status["wrong"] = isinstance(caught, ConfigError | UnsupportedError)
    answers = [json.loads(blob) for blob in control.all_gather_bytes(canonical_json(status).encode())]
    if error is not None and (status["wrong"] or control.world == 1):
        raise error
    for rank, answer in enumerate(answers):
        if answer["wrong"]:  # a user's mistake must not be skipped like a bad window
            raise ConfigError(f"outer_update: rank {rank} cannot make the update: {answer['reason']}")
    if any(answer["applied"] for answer in answers):
        if ledger is not None:
            ledger.check(window)
        raise AlreadyApplied(f"window {window} was applied on another rank")
    if needed := max(answer["needed"] for answer in answers):
        raise BudgetTooSmall(needed, f"{tiling.budget_bytes} bytes do not hold one chunk of a parameter")
    unready = {rank: answer["reason"] for rank, answer in enumerate(answers) if answer["reason"]}
    if not unready:
        tiling.plan([answer["parts"] for answer in answers])
    return unready


def _unreadable(holding: Holding) -> str:
    """The error of a spilled payload on this rank that is no longer the accepted one; empty if there is none."""
    for uid, ref in holding.refs.items():
        if ref.path is not None:
            try:
                ref.verify()
            except Exception as error:
                return f"peer {uid}: {error}"
    return ""
