"""Launches of kernels that were compiled before, without the work that Triton does for each one.

Triton looks at every argument of every call to find the right compiled kernel, some 40 microseconds for ours. Here the
constants are all that tells kernels apart: numbers are not specialised, tensors begin at 16 bytes or take the long way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from shoal.table.cuda.backend import interpreted

_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
_WIDE = 1 << 31


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def launch(
    fn: Any, programs: int, *arguments: Any, num_warps: int = 4, enable_fp_fusion: bool = True, **constants: Any
) -> None:
    """Runs ``programs`` programs of a kernel: run-time arguments in order, then its constants by name."""
    options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
    if interpreted():
        fn[(programs,)](*arguments, **constants, **options)
        return
    addresses = 0
    wide = 0
    for i, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            addresses |= argument.data_ptr()
        elif type(argument) is int and not -_WIDE <= argument < _WIDE:
            wide |= 1 << i
    device = torch.cuda.current_device()
    key = (fn, device, wide, *constants.values(), num_warps, enable_fp_fusion)
    known = _compiled.get(key)
    if known is None or addresses & 15:
        kernel = fn[(programs,)](*arguments, **constants, **options)
        if not addresses & 15:
            _compiled[key] = kernel, tuple(constants[name] for name in fn.arg_names[len(arguments) :])
        return
    kernel, ordered = known
    stream = triton.runtime.driver.active.get_current_stream(device)  # type: ignore[missing-attribute]
    hooks = triton.knobs.runtime
    kernel.run(
        programs,
        1,
        1,
        stream,
        kernel.function,
        kernel.packed_metadata,
        kernel.launch_metadata((programs, 1, 1), stream, *arguments, *ordered),
        hooks.launch_enter_hook,
        hooks.launch_exit_hook,
        *arguments,
        *ordered,
    )
