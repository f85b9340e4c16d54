"""`StepBoundaries`: tracks optimizer steps, so that weights can be copied between steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import optimizer as optimizers

T = TypeVar("T")

WAIT_S = 1.0
RECENT_S = 5.0
TRIES = 20


class StepBoundaries:
    """Tracks the torch optimizers that change a net, through hooks around their steps, until `close`.

    If several optimizers step one after another, the last of them ends the step.

    Args:
        net: the module whose weights are copied.
        at_end: called on the training thread after each step; it must return soon.
    """

    def __init__(self, net: nn.Module, at_end: Callable[[], None]) -> None:
        self._net, self._at_end = net, at_end
        self._begun = self._ended = 0
        self._ours: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self._cycle: list[int] = []  # the optimizers that have stepped since one of them last repeated
        self._last: int | None = None
        self._ended_at = float("-inf")
        self._hooks = [
            optimizers.register_optimizer_step_pre_hook(self._begin),
            optimizers.register_optimizer_step_post_hook(self._end),
        ]

    def _changes_net(self, optimizer: Any) -> bool:
        if optimizer not in self._ours:
            own = {id(parameter) for parameter in self._net.parameters()}
            self._ours[optimizer] = any(id(each) in own for group in optimizer.param_groups for each in group["params"])
        return self._ours[optimizer]

    def _begin(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._changes_net(optimizer):
            self._begun = self._ended + 1  # a step that raised has ended, too

    def _end(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._changes_net(optimizer):
            return
        self._ended, self._ended_at = self._begun, time.monotonic()
        this = id(optimizer)
        if this in self._cycle:
            self._last, self._cycle = self._cycle[-1], [this]
        else:
            self._cycle.append(this)
        if this == self._last:
            self._at_end()

    def stepping(self) -> bool:
        """Whether an optimizer has stepped recently, so the next step should end soon."""
        return time.monotonic() - self._ended_at < RECENT_S

    def between_steps(self, copy: Callable[[], T]) -> T:
        """Return the result of ``copy``, run between two optimizer steps. Any thread may call it.

        If a step of the training thread begins meanwhile, it copies again. If that happens for several seconds, or if a
        step does not end, it returns its last copy.
        """
        for _ in range(TRIES):
            end = time.monotonic() + WAIT_S
            while self._begun != self._ended and time.monotonic() < end:
                time.sleep(0.0005)
            begun = self._begun
            copied = copy()
            if self._begun == begun:
                break
        return copied

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


class Due:
    """A round that a timer requests and the training thread runs at the end of a step."""

    def __init__(self) -> None:
        self.wanted = False
        self.made = threading.Event()

    def ask(self, timeout_s: float) -> bool:
        """Request a round and wait for it; returns whether it ran in time. If not, the request is withdrawn."""
        self.made.clear()
        self.wanted = True
        made = self.made.wait(timeout_s)
        self.wanted = False
        return made
