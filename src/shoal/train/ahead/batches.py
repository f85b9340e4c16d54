"""Helpers for batches of any structure: move them to a device, empty them, list their tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shoal.ragged import Ragged


def rebuilt(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Copy a batch, with ``change`` applied to everything that is neither a container nor a dataclass."""
    if isinstance(batch, Mapping):
        made = {key: rebuilt(value, change) for key, value in batch.items()}
        return made if type(batch) is dict else type(batch)(made)  # pyrefly: ignore
    if isinstance(batch, tuple):
        parts = [rebuilt(value, change) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)  # pyrefly: ignore
    if isinstance(batch, list):
        return batch if is_data(batch) else [rebuilt(value, change) for value in batch]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: rebuilt(getattr(batch, name), change) for name in names})
    return change(batch)


def is_data(batch: Any) -> bool:
    """Whether a list contains numbers or strings, possibly nested, rather than tensors."""
    while isinstance(batch, list | tuple) and batch:
        batch = batch[0]
    return isinstance(batch, int | float | str | bytes)


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """The tensors in a batch's containers, dataclasses and attributes."""
    found: list[Tensor] = []
    waiting, seen = [batch], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += () if is_data(one) else one
        elif dataclasses.is_dataclass(one) and not isinstance(one, type):
            waiting += [getattr(one, field.name) for field in dataclasses.fields(one)]
        elif hasattr(one, "__dict__") and not callable(one):
            waiting += vars(one).values()
    return iter(found)


class Mover:
    """Moves batches to a device; to a GPU on a separate stream, so that no step waits for the copy.

    Args:
        device: the target; None leaves batches where they are.
        works_on: a GPU on which other data is prepared for steps.
    """

    def __init__(self, device: torch.device | None, works_on: torch.device | None) -> None:
        self.device = device
        gpu = next((one for one in (device, works_on) if one is not None and one.type == "cuda"), None)
        self.stream = None if gpu is None else torch.cuda.Stream(gpu)

    def inside(self) -> AbstractContextManager[Any]:
        """The context in which a thread prepares batches."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def moved(self, batch: Any) -> Any:
        """The batch on the device. Other objects than tensors move if they have ``to(device, non_blocking=True)``."""
        return batch if self.device is None else rebuilt(batch, self._to)

    def _to(self, one: Any) -> Any:
        device = self.device
        if isinstance(one, Tensor):
            if one.device == device:
                return one
            if device is not None and device.type == "cuda" and one.device.type == "cpu":
                one = one.pin_memory()  # a copy from pageable memory would block the step
            return one.to(device, non_blocking=True)
        if isinstance(one, Ragged) or not hasattr(one, "to"):
            return one
        return one.to(device, non_blocking=True)

    def mark(self) -> Any:
        """An event for `arrived` that completes after all work on the stream so far; None without a stream."""
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def arrived(self, event: Any, tensors: Iterator[Tensor]) -> None:
        """Make the current stream wait for ``event``, and keep the tensors' memory until it has used them."""
        if self.stream is None or event is None:
            return
        current = torch.cuda.current_stream(self.stream.device)
        current.wait_event(event)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(current)
