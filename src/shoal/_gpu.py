"""What launches of compiled Triton kernels share, of tables and of ops."""

from __future__ import annotations

from typing import Any


def c_launcher(run: Any) -> Any:
    """What a launcher of Triton's calls in the end, ``(x, y, z, stream, function, *rest)``; None if it does more.

    Called with addresses instead of tensors it takes a quarter of the time. Of the Triton that was looked at: others
    may take their arguments in another order.
    """
    import triton

    none: list[Any] = [1]
    scratch = [getattr(run, name, none) for name in ("global_scratch_size", "profile_scratch_size")]
    if not triton.__version__.startswith("3.6.") or any(scratch) or not hasattr(run, "launch"):
        return None
    return run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)
