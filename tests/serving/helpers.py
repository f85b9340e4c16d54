"""Helpers for several serving tests."""

import re
import time

import pytest
import torch

from shoal.testing.zookeeper import free_port

__all__ = ["Net", "eventually", "flush_fails", "free_port"]


def eventually(condition, timeout=60.0, what="the condition"):
    """Waits until ``condition()`` is true and returns it."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {timeout} s for {what}"
        time.sleep(0.02)
    return value


def flush_fails(publisher, text, timeout_s=0.5, until=lambda: True):
    """Waits until a flush fails with this text, and something is true then; early ones may end before all was tried."""

    def failed():
        with pytest.raises(TimeoutError) as failure:
            publisher.flush(timeout_s)
        return re.search(text, str(failure.value)) and until()

    eventually(failed, what=f"a flush to say {text!r}")


class Net(torch.nn.Module):
    """Scores from a pooled user row and two prices."""

    def __init__(self, dim=4):
        super().__init__()
        self.linear = torch.nn.Linear(dim + 2, 1)

    def forward(self, user, price):
        return {"score": torch.sigmoid(self.linear(torch.cat([user, price], -1)).squeeze(-1))}
