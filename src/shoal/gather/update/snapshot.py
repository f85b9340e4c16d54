"""Copies of what an outer update touched, to put back when it cannot be finished."""

import copy
from typing import Any

import torch
from torch import Tensor


class Snapshot:
    """Parameters and their optimizer state as they were before each was stepped."""

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
