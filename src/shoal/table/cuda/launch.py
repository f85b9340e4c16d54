"""Launches of compiled kernels without Triton's work per call.

Triton inspects every argument of every call to find the compiled kernel, which takes about 40 microseconds for ours.
Here only the constants select a kernel: numbers are not specialized, and a call with a tensor that is not aligned to 16
bytes goes through Triton.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch
from torch import Tensor

from shoal._gpu import Compiled
from shoal.table.cuda.backend import interpreted

_WIDE = 1 << 31
_INTERPRETER = threading.RLock()  # Triton's interpreter patches functions of the language while a kernel runs


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def signed(number: int) -> int:
    """A 64-bit number as a signed one, which kernels take."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >= 1 << 63 else number


class Bound:
    """A kernel with its constants, for repeated launches."""

    __slots__ = ("_constants", "_fn", "_made", "_options", "_places")
    _all: ClassVar[dict[Any, Bound]] = {}

    def __init__(
        self, fn: Any, num_warps: int = 4, enable_fp_fusion: bool = True, maxnreg: int | None = None, **constants: Any
    ) -> None:
        self._fn, self._constants = fn, constants
        self._options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion, "maxnreg": maxnreg}
        self._places: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._made: dict[int, Compiled] = {}  # device, and which numbers are wide -> compiled kernel

    @classmethod
    def of(cls, fn: Any, **constants: Any) -> Bound:
        """The cached instance for these constants; callers must give them in the same order."""
        key = (fn, *constants.values())
        found = cls._all.get(key)
        if found is None:
            found = cls._all[key] = cls(fn, **constants)
        return found

    def __call__(self, programs: int, *arguments: Any) -> None:
        """Runs ``programs`` programs of the kernel with its run-time arguments in order."""
        if interpreted():
            with _INTERPRETER:
                self._fn[(programs,)](*arguments, **self._constants, **self._options)
            return
        key = torch._C._cuda_getDevice()
        tensors, numbers = self._places or self._look(arguments)
        addresses = 0
        plain = [*arguments]
        for place in tensors:
            address = plain[place].data_ptr()
            plain[place] = address
            addresses |= address
        if numbers:
            some = [plain[place] for place in numbers]
            if max(some) >= _WIDE or min(some) < -_WIDE:
                for place in numbers:
                    if not -_WIDE <= plain[place] < _WIDE:
                        key |= 1 << 16 + place
        made = self._made.get(key)
        if made is None or addresses & 15:
            self._slowly(programs, arguments, None if addresses & 15 else key)
            return
        made(key & 0xFFFF, programs, 1, plain, arguments)

    def _look(self, arguments: tuple[Any, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which arguments are tensors and which are integers; the same in every call."""
        tensors = tuple(place for place, argument in enumerate(arguments) if isinstance(argument, Tensor))
        numbers = tuple(place for place, argument in enumerate(arguments) if type(argument) is int)
        self._places = tensors, numbers
        return self._places

    def _slowly(self, programs: int, arguments: tuple[Any, ...], key: int | None) -> None:
        """Launches through Triton, which compiles if needed; with a key, the compiled kernel is kept."""
        kernel = self._fn[(programs,)](*arguments, **self._constants, **self._options)
        if key is not None:
            names = self._fn.arg_names[len(arguments) :]
            self._made[key] = Compiled(kernel, tuple(self._constants[name] for name in names))


def launch(fn: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Runs ``programs`` programs of a kernel: run-time arguments in order, then its constants and options by name."""
    Bound.of(fn, **constants)(programs, *arguments)
