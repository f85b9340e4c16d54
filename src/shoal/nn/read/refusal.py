"""Notify the other ranks of a rank's failure to read its batch, so that they do not wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

import torch

from shoal.errors import DeadlineError, PeerError
from shoal.table.protocol import Group

F = TypeVar("F", bound=Callable[..., Any])


def notify_ranks(groups: Iterable[Group], error: Exception) -> None:
    """Notify the ranks of the first of ``groups`` that spans several; they raise an error that names this rank."""
    refused: Any = next((getattr(group, "refused", None) for group in groups if group.traits.collective), None)
    if refused is None:
        return
    try:
        refused(error)
    except (PeerError, DeadlineError) as lost:
        error.add_note(f"The other ranks could not be notified: {lost}")


def notifies_ranks(forward: F) -> F:
    """Decorate the ``forward`` of a module over tables to notify the other ranks when it raises.

    In a compiled graph the op notifies them instead, because the compiler breaks graphs at a ``try``.
    """

    @wraps(forward)
    def notifying(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        try:
            return forward(self, *args, **kwargs)
        except Exception as error:
            notify_ranks(self.groups(), error)
            raise

    return notifying  # pyrefly: ignore[bad-return]
