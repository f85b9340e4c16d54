"""Support for `torch.amp.GradScaler`: show it the gradients of rows, and detect backward passes of scaled losses."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor

from shoal.nn.update.gradients import Pending


class RowParameter(Tensor):
    """Represents the rows of a table in an optimizer: its ``grad`` holds the pending gradients, ``[rows, dim]``.

    Code that reads the gradients of an optimizer's parameters or changes them in place, such as a `GradScaler` or
    ``torch.nn.utils.clip_grad_norm_``, thereby sees those of the rows.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyrefly: ignore[bad-override]
    _pending: Pending

    @staticmethod
    def of(pending: Pending) -> RowParameter:
        parameter = torch.zeros(0, device="cpu").as_subclass(RowParameter)
        parameter._pending = pending
        return parameter

    @property
    def grad(self) -> Tensor:  # pyrefly: ignore[bad-override]
        """One row per distinct id; never None, because a `GradScaler` must also see a batch without ids."""
        return self._pending.sums()[1]

    @grad.setter
    def grad(self, grad: None) -> None:
        if grad is not None:
            raise AttributeError("grad of table rows must be changed in place or set to None; backward computes it")
        self._pending.clear()


_scaled: dict[int, weakref.ref[_ScaledPass]] = {}


class _ScaledPass:
    """A backward pass that began at a scaled loss."""

    def end(self) -> None:
        pass


def is_scaled(task: int) -> bool:
    """Whether the backward pass with this graph task number began at a loss that a `GradScaler` scaled."""
    return task in _scaled


def _mark(loss: Any) -> None:
    if isinstance(loss, list | tuple):
        for each in loss:
            _mark(each)
    elif isinstance(loss, Tensor) and loss.requires_grad and not torch.compiler.is_compiling():
        loss.register_hook(_enter)


def _enter(grad: Tensor) -> None:
    task = torch._C._current_graph_task_id()
    if task >= 0 and task not in _scaled:
        current = _ScaledPass()
        _scaled[task] = weakref.ref(current, lambda _: _scaled.pop(task, None))
        # The engine keeps the callback, and thereby the pass, alive until backward has ended or failed.
        torch.autograd.Variable._execution_engine.queue_callback(current.end)


@functools.cache
def watch_scalers() -> None:
    """Mark every loss that a `GradScaler` scales, by wrapping its ``scale`` once; torch has no hook for this."""
    scale = torch.amp.GradScaler.scale

    @functools.wraps(scale)
    def marked(self: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if self.is_enabled():
            _mark(scaled)
        return scaled

    torch.amp.GradScaler.scale = marked  # pyrefly: ignore[bad-assignment]
