"""The process-wide writer of training summaries, with the methods of TensorBoard's."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Writer(Protocol):
    """The methods that are called; ``torch.utils.tensorboard.SummaryWriter`` has them."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> Any: ...

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> Any: ...


_writer: Writer | None = None


def set_summary_writer(writer: Writer | None) -> None:
    """Set the writer for the spread over ranks, the gradient norm and gradient summaries; None, the default: none."""
    global _writer
    _writer = writer


def writing() -> bool:
    """Whether a writer is set."""
    return _writer is not None


def scalar(name: str, value: Any, step: int) -> None:
    if _writer is not None:
        _writer.add_scalar(name, value, step)


def histogram(name: str, values: Tensor, step: int) -> None:
    if _writer is not None:
        _writer.add_histogram(name, values, step)
