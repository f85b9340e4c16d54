"""Launches of compiled Triton kernels, of tables and of ops, without the work that Triton does for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton


class Compiled:
    """A kernel that Triton has compiled for the arguments of a launch, and its constants in its own order."""

    __slots__ = ("_constants", "_direct", "_function", "_kernel", "_metadata", "_run")

    def __init__(self, kernel: Any, constants: tuple[Any, ...]) -> None:
        self._kernel, self._constants = kernel, constants
        self._run, self._function, self._metadata = kernel.run, kernel.function, kernel.packed_metadata
        self._direct = c_launcher(kernel.run)

    def __call__(self, device: int, x: int, y: int, plain: Sequence[Any], arguments: Sequence[Any]) -> None:
        """Runs ``x`` by ``y`` programs. ``plain`` are the arguments with addresses in place of tensors."""
        stream = torch._C._cuda_getCurrentRawStream(device)
        hooks, constants = triton.knobs.runtime, self._constants
        enter, leave = _listened(hooks.launch_enter_hook), _listened(hooks.launch_exit_hook)
        if self._direct is not None and enter is None and leave is None:
            call, between = self._direct
            call(x, y, 1, stream, self._function, *between, self._metadata, None, None, None, *plain, *constants)
            return
        watched = None
        if enter is not None:
            watched = self._kernel.launch_metadata((x, y, 1), stream, *arguments, *constants)
        self._run(x, y, 1, stream, self._function, self._metadata, watched, enter, leave, *arguments, *constants)


def _listened(hook: Any) -> Any:
    """A hook, such as a profiler's; None when it is a chain of none, which would be called all the same."""
    return hook if getattr(hook, "calls", True) else None


def c_launcher(run: Any) -> Any:
    """What a launcher of Triton's calls in the end, ``(x, y, z, stream, function, *rest)``; None if it does more.

    Called with addresses instead of tensors it takes a quarter of the time. Of the Triton that was looked at: others
    may take their arguments in another order.
    """
    none: list[Any] = [1]
    scratch = [getattr(run, name, none) for name in ("global_scratch_size", "profile_scratch_size")]
    if not triton.__version__.startswith("3.6.") or any(scratch) or not hasattr(run, "launch"):
        return None
    return run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)
