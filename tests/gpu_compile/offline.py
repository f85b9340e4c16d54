"""Triton without a GPU: kernels are compiled for a Hopper GPU, down to its machine code, instead of being launched."""

import re

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

COMPILED = set()
"""Names of the kernels so far."""


class Hopper(DriverBase):
    """What Triton asks of a card that it compiles for."""

    def __init__(self):
        pass

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        return None


def compile_only(fn, arguments, **constants):
    """Compiles a kernel for arguments of these types."""
    kinds = [a.dtype if isinstance(a, torch.Tensor) else a for a in arguments]
    made = fn.warmup(*kinds, grid=(1,), **constants)
    assert made.asm["cubin"], fn.fn.__name__
    COMPILED.add(fn.fn.__name__)
    return made


def one_thread_each(ttgir):
    """Whether the inline assembly of a compiled kernel runs once for each element.

    Triton may hold an element in several threads, which is no matter to its own operations.
    """
    layouts = dict(re.findall(r"^#(\w+) = #ttg\.blocked<\{(.*)\}>", ttgir, re.MULTILINE))
    lines = [line for line in ttgir.splitlines() if "elementwise_inline_asm" in line]
    for line in lines:
        count, layout = re.search(r"-> tensor<(\d+)x\w+, #(\w+)>", line).groups()
        held = 1
        for name in ("sizePerThread", "threadsPerWarp", "warpsPerCTA"):
            held *= int(re.search(rf"{name} = \[(\d+)\]", layouts[layout])[1])
        if held > int(count):
            return False
    return bool(lines)


triton.runtime.driver.set_active(Hopper())
