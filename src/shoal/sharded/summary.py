"""Where the numbers of a training step go: a writer in the form of TensorBoard's, for the whole process."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Writer(Protocol):
    """``torch.utils.tensorboard.SummaryWriter`` is one."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> Any: ...

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> Any: ...


_writer: Writer | None = None


def set_summary_writer(writer: Writer | None) -> None:
    """Where the spread over ranks, the gradient norm and gradient summaries go; nowhere at first."""
    global _writer
    _writer = writer


def writing() -> bool:
    """Whether there is a writer; without one nothing needs to be computed for it."""
    return _writer is not None


def scalar(name: str, value: Any, step: int) -> None:
    if _writer is not None:
        _writer.add_scalar(name, value, step)


def histogram(name: str, values: Tensor, step: int) -> None:
    if _writer is not None:
        _writer.add_histogram(name, values, step)
