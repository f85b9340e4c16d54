"""Helpers for several serving tests."""

import time

import torch

from shoal.testing.zookeeper import free_port

__all__ = ["Net", "eventually", "free_port"]


def eventually(condition, timeout=60.0, what="the condition"):
    """Waits until ``condition()`` is true and returns it."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {timeout} s for {what}"
        time.sleep(0.02)
    return value


class Net(torch.nn.Module):
    """Scores from a pooled user row and two prices."""

    def __init__(self, dim=4):
        super().__init__()
        self.linear = torch.nn.Linear(dim + 2, 1)

    def forward(self, user, price):
        return {"score": torch.sigmoid(self.linear(torch.cat([user, price], -1)).squeeze(-1))}
