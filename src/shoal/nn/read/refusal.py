"""A rank that cannot read its batch tells the other ranks, which would wait for it in their reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

import torch

from shoal.errors import DeadlineError, PeerError
from shoal.table.protocol import Group

F = TypeVar("F", bound=Callable[..., Any])


def tell_ranks(groups: Iterable[Group], error: Exception) -> None:
    """Tells the ranks of the first of ``groups`` that spans several; they raise an error that names this rank."""
    refused: Any = next((getattr(group, "refused", None) for group in groups if group.traits.collective), None)
    if refused is None:
        return
    try:
        refused(error)
    except (PeerError, DeadlineError) as lost:
        error.add_note(f"The other ranks could not be told: {lost}")


def tells_ranks(forward: F) -> F:
    """For the ``forward`` of a module over tables: where it raises, the other ranks are told.

    In a compiled graph the op tells them, which has a try of its own: the compiler breaks graphs at ours.
    """

    @wraps(forward)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        try:
            return forward(self, *args, **kwargs)
        except Exception as error:
            tell_ranks(self.groups(), error)
            raise

    return told  # pyrefly: ignore[bad-return]
