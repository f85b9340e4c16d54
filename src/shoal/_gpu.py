"""How GPU kernels do what can be done in several ways. The defaults are those that a card has shown to be best so far.

``SHOAL_GPU="insert=listed direct=1"`` in the environment, or `choose` before the first call, takes others: for
measurements, and for tests that both ways give the same.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from shoal.errors import ConfigError


@dataclass
class Choices:
    """One for the process."""

    insert: str = "joint"
    """``joint``: one kernel finds ids and claims slots; ``listed``: one finds ids and lists those that are missing, a
    second claims slots for the list, a third starts its rows."""
    insert_ids: int = 128
    """Ids of a program of the joint kernel."""
    insert_warps: int = 4
    claim_ids: int = 128
    """Ids of a program that claims slots for a list."""
    claim_warps: int = 4
    inline: int = 1
    """Whether that one swaps with PTX of its own, which passes idle lanes over; else with Triton's."""
    find_ids: int = 64
    """Ids of a program that finds ids, when rows are narrow."""
    find_warps: int = 2
    summed_rows: int = 2048
    """Floats of a program that sums gradients of equal ids."""
    summed_warps: int = 4
    direct: int = 0
    """Whether compiled kernels are launched by Triton's C function, with addresses instead of tensors."""
    scan: int = 0
    """Whether the counts of a reorder are added up by a kernel of ours, which also tells the host the total."""
    concat: str = "torch"
    """``torch`` or ``kernel``: what joins tensors in `aligned_flat_concat`."""


_WORDS = {"insert": ("joint", "listed"), "concat": ("torch", "kernel")}
_SWITCHES = ("inline", "direct", "scan")


def _read(text: str) -> Choices:
    made = Choices()
    parts = [item.partition("=") for item in text.split()]
    _set(made, {name: value for name, _, value in parts})
    return made


def _set(of: Choices, given: dict[str, Any]) -> None:
    read = {name: _value(name, value) for name, value in given.items()}  # all of them before any is taken
    for name, value in read.items():
        setattr(of, name, value)


def _value(name: str, value: Any) -> Any:
    names = [field.name for field in fields(Choices)]
    if name not in names:
        raise ConfigError(f"SHOAL_GPU: choices are {', '.join(names)}, got {name!r}")
    if name in _WORDS:
        if value not in _WORDS[name]:
            raise ConfigError(f"SHOAL_GPU: {name} is {' or '.join(_WORDS[name])}, got {value!r}")
        return value
    number = int(value) if str(value).isdecimal() else -1
    if name in _SWITCHES:
        if number not in (0, 1):
            raise ConfigError(f"SHOAL_GPU: {name} is 0 or 1, got {value!r}")
    elif number < 1 or number & (number - 1):
        raise ConfigError(f"SHOAL_GPU: {name} is a power of two, got {value!r}")
    return number


def c_launcher(run: Any) -> Any:
    """What a launcher of Triton's calls in the end, ``(x, y, z, stream, function, *rest)``; None if it does more.

    Of the Triton that was looked at: others may take their arguments in another order.
    """
    import triton

    none: list[Any] = [1]
    scratch = [getattr(run, name, none) for name in ("global_scratch_size", "profile_scratch_size")]
    if not triton.__version__.startswith("3.6.") or any(scratch) or not hasattr(run, "launch"):
        return None
    return run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)


chosen = _read(os.environ.get("SHOAL_GPU", ""))


@contextlib.contextmanager
def choose(**given: Any) -> Iterator[None]:
    """Other choices inside it, in all threads."""
    before = {name: getattr(chosen, name) for name in given if hasattr(chosen, name)}
    _set(chosen, given)
    try:
        yield
    finally:
        _set(chosen, before)
