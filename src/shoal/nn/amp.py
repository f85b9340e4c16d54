"""Rows under a `torch.amp.GradScaler`: their gradients where the scaler looks for them, and which passes are scaled."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor

from shoal.nn.update.gradients import Pending


class RowParameter(Tensor):
    """Stands for the rows of a table in an optimizer: its ``grad`` are the gradients that wait, ``[rows, dim]``.

    So what looks at the gradients of an optimizer's parameters, or changes them in place, finds those of the rows: a
    `GradScaler`, or ``torch.nn.utils.clip_grad_norm_``.
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
        """One row per distinct id; never None, for a batch without ids has been looked at, too."""
        return self._pending.sums()[1]

    @grad.setter
    def grad(self, grad: None) -> None:
        if grad is not None:
            raise AttributeError("the gradients of rows come from backward; change them in place, or set None")
        self._pending.clear()


_scaled: weakref.WeakValueDictionary[int, _ScaledPass] = weakref.WeakValueDictionary()


class _ScaledPass:
    """A backward pass that began at a scaled loss."""

    def end(self) -> None:
        pass


def is_scaled(task: int) -> bool:
    """Whether a backward pass, by the number of its graph task, began at a loss that a `GradScaler` scaled."""
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
        current = _scaled[task] = _ScaledPass()
        # The engine holds the callback, and with it the pass, until backward has ended, or failed.
        torch.autograd.Variable._execution_engine.queue_callback(current.end)


@functools.cache
def watch_scalers() -> None:
    """Has every loss that a `GradScaler` scales marked. Torch tells nobody of it, so its ``scale`` is wrapped, once."""
    scale = torch.amp.GradScaler.scale

    @functools.wraps(scale)
    def marked(self: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if self.is_enabled():
            _mark(scaled)
        return scaled

    torch.amp.GradScaler.scale = marked  # pyrefly: ignore[bad-assignment]
