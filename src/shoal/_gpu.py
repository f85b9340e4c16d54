"""Launch compiled Triton kernels without Triton's work per launch; used by tables and ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton


class Compiled:
    """A kernel that Triton has compiled, with its constants in the order of its parameters."""

    __slots__ = ("_constants", "_direct", "_function", "_kernel", "_metadata", "_run")

    def __init__(self, kernel: Any, constants: tuple[Any, ...]) -> None:
        self._kernel, self._constants = kernel, constants
        self._run, self._function, self._metadata = kernel.run, kernel.function, kernel.packed_metadata
        self._direct = c_launcher(kernel.run)

    def __call__(self, device: int, x: int, y: int, plain: Sequence[Any], arguments: Sequence[Any]) -> None:
        """Run ``x`` by ``y`` programs. ``plain`` is ``arguments`` with addresses instead of tensors."""
        stream = torch._C._cuda_getCurrentRawStream(device)
        hooks, constants = triton.knobs.runtime, self._constants
        enter, leave = _unless_empty(hooks.launch_enter_hook), _unless_empty(hooks.launch_exit_hook)
        if self._direct is not None and enter is None and leave is None:
            call, between = self._direct
            call(x, y, 1, stream, self._function, *between, self._metadata, None, None, None, *plain, *constants)
            return
        watched = None
        if enter is not None:
            watched = self._kernel.launch_metadata((x, y, 1), stream, *arguments, *constants)
        self._run(x, y, 1, stream, self._function, self._metadata, watched, enter, leave, *arguments, *constants)


def _unless_empty(hook: Any) -> Any:
    """The hook, such as a profiler's; None if it is an empty chain, which Triton would still call."""
    return hook if getattr(hook, "calls", True) else None


def c_launcher(run: Any) -> Any:
    """The C function that a launcher of Triton calls, ``(x, y, z, stream, function, *rest)``; None if it does more.

    A call with addresses instead of tensors takes a quarter of the time. Only for Triton 3.6: other versions may take
    the arguments in another order.
    """
    scratch = [getattr(run, name, 1) for name in ("global_scratch_size", "profile_scratch_size")]
    if not triton.__version__.startswith("3.6.") or any(scratch) or not hasattr(run, "launch"):
        return None
    return run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)
