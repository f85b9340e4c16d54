"""`StepBoundaries`: when no optimizer is in the middle of a step, so that weights are copied as one step left them."""

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
LATELY_S = 5.0
TRIES = 20


class StepBoundaries:
    """Follows the torch optimizers that change a net, by hooks around their steps, until `close`.

    Where several optimizers step one after another, the last of them ends the step.

    Args:
        net: whose weights are copied.
        at_end: called on the training thread after each step; it must return soon.
    """

    def __init__(self, net: nn.Module, at_end: Callable[[], None]) -> None:
        self._net, self._at_end = net, at_end
        self._begun = self._ended = 0
        self._ours: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self._cycle: list[int] = []  # the optimizers that have stepped, until one of them does so again
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
            self._begun = self._ended + 1  # one that raised before has ended, too

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
        """Whether an optimizer has stepped lately, so that the next step will end soon."""
        return time.monotonic() - self._ended_at < LATELY_S

    def whole(self, copy: Callable[[], T]) -> T:
        """What ``copy`` returns, copied while no optimizer steps. Any thread may call it.

        On a thread of its own it copies again if a step began meanwhile. It gives up after some seconds of steps that
        leave no room, or of a step that does not end, and returns what it has.
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
        """Follows them no longer."""
        for hook in self._hooks:
            hook.remove()


class Due:
    """Whether a round is wanted: a clock says so, and the training thread makes it at the end of a step."""

    def __init__(self) -> None:
        self.wanted = False
        self.made = threading.Event()

    def ask(self, timeout_s: float) -> bool:
        """Wants a round, and waits for it; whether it was made in time. Else it is not wanted any more."""
        self.made.clear()
        self.wanted = True
        made = self.made.wait(timeout_s)
        self.wanted = False
        return made
