"""Shared helpers of kernel launches: uploads of numbers, checks on the device, block sizes."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal import _core
from shoal._gpu import Compiled
from shoal.errors import ConfigError
from shoal.switches import other_program_switch

INTERPRETED = other_program_switch("TRITON_INTERPRET")
"""Whether the kernels run in Triton's interpreter, on CPU tensors."""

ELEMENTS = {torch.float32: tl.float32, torch.float64: tl.float64, torch.int64: tl.int64, torch.int32: tl.int32}
"""Triton's type for each torch dtype."""


class Kernel:
    """A Triton kernel that launches in a third of the usual time: all its arguments are int64, addresses included.

    The usual launch inspects every argument, which on a slow host takes longer than a small kernel. The kernel turns
    its addresses into pointers with `pointer`; the caller must keep their tensors alive until the launch.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.jit = triton.jit(function)
        self._made: dict[tuple[Any, ...], Compiled] = {}

    def __call__(self, grid: int, *args: int, warps: int = 4, **constants: Any) -> None:
        """``constants`` are the kernel's constexprs, in the order of its parameters."""
        if INTERPRETED:
            self.jit[(grid,)](*args, **constants)
            return
        device = torch._C._cuda_getDevice()
        values = constants.values()
        key = (device, warps, *values)
        made = self._made.get(key)
        if made is None:
            # A wide odd number, so that the kernel assumes nothing about its arguments.
            kernel = self.jit.warmup(*[(1 << 40) + 7] * len(args), grid=(1,), num_warps=warps, **constants)
            made = self._made[key] = Compiled(kernel, tuple(values))
        made(device, grid, 1, args, args)


class Fast:
    """A Triton kernel of tensors and numbers, launched as usual, ``kernel[grid](...)``, but in a third of the time.

    Triton compiles a kernel for properties of the arguments: their types, whether a tensor is aligned to 16 bytes,
    whether a number is 1, a multiple of 16, or wide. This class checks the same, faster. Run-time arguments are
    positional, constexprs by name. With arguments of other types, Triton's launch is used.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.jit = triton.jit(function)
        self._made: dict[tuple[Any, ...], Compiled] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if INTERPRETED:
            self.jit[grid](*args, **constants)
            return
        device = torch._C._cuda_getDevice()
        key: list[Any] = [device, *constants.values()]
        plain = []
        for arg in args:
            kind = type(arg)
            if kind is int:
                key.append(_kind_of(arg))
            elif kind is float:
                key.append(float)
            elif isinstance(arg, Tensor):
                key.append(arg.dtype)
                arg = arg.data_ptr()
                key.append(arg & 15 == 0)
            else:
                self.jit[grid](*args, **constants)
                return
            plain.append(arg)
        known = tuple(key)
        made = self._made.get(known)
        if made is None:
            kernel = self.jit[grid](*args, **constants)
            names = self.jit.arg_names[len(args) :]
            self._made[known] = Compiled(kernel, tuple(constants[name] for name in names))
            return
        x, y = grid if len(grid) == 2 else (grid[0], 1)
        made(device, x, y, plain, args)


def _kind_of(number: int) -> int:
    """The properties of a number for which Triton compiles different kernels."""
    if number == 1:
        return 1
    kind = 2 if number % 16 == 0 else 0
    if -(1 << 31) <= number < 1 << 31:
        return kind
    return kind + (4 if number < 1 << 63 else 8)


def aligned(count: int) -> int:
    """Room for ``count`` int32 in a workspace whose parts begin at multiples of 256 bytes."""
    return (count + 63) & ~63


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.checks = True
        self.flags: dict[tuple[int, int], Tensor] = {}  # device and stream -> flag


_thread = _ThreadState()


@contextmanager
def unchecked() -> Iterator[None]:
    """In this context, ops of this thread do not wait for the device's check of indices; bad ones are skipped.

    For CUDA graphs, and for loops whose indices come from an earlier op. Sizes are still checked.
    """
    before, _thread.checks = _thread.checks, False
    try:
        yield
    finally:
        _thread.checks = before


def checks() -> bool:
    """Whether ops wait for the device's check of indices."""
    return _thread.checks


def new_flag(like: Tensor) -> Tensor:
    """int64 zero on the device; a kernel raises it to ``n - i`` for a bad element ``i``, so that the first one wins.

    There is one flag per thread and stream: call `read_flag` before the next `new_flag`.
    """
    if not _thread.checks or not like.is_cuda:
        return torch.zeros(1, dtype=torch.int64, device=like.device)
    device = like.get_device()
    key = device, torch._C._cuda_getCurrentRawStream(device)
    flag = _thread.flags.get(key)
    if flag is None:
        flag = _thread.flags[key] = torch.zeros(1, dtype=torch.int64, device=like.device)
    return flag


def read_flag(flag: Tensor) -> int:
    """Wait for the device and return the flag; 0 if there is no bad index, or inside `unchecked`."""
    if not _thread.checks:
        return 0
    value = int(flag)
    if value:
        flag.zero_()
    return value


def raise_if(flag: Tensor, message: Callable[[int], str]) -> None:
    """Wait for the device; if the flag is set, raise with the text of ``message(flag)``."""
    value = read_flag(flag)
    if value:
        raise ConfigError(message(value))


_captured: list[Any] = []
"""Buffers that captured graphs read at every replay, kept alive here."""


def float64_bits(value: float) -> int:
    """A float64 as the int64 of the same bits, for `upload`."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def upload(values: Sequence[int], like: Tensor) -> Tensor:
    """Copy int64 numbers to the device of ``like``, without waiting for it."""
    if like.is_cuda:
        pinned = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=True)
        if torch.cuda.is_current_stream_capturing():  # every replay copies them again
            _captured.append(pinned)
        return pinned.to(like.device, non_blocking=True)
    return torch.tensor(values, dtype=torch.int64, device=like.device)


class CachedTensors:
    """Tensors on a device that are made once and used by many calls, on any stream."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors, self._event, self._stream = tensors, None, 0
        if tensors[0].is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()
            self._stream = torch.cuda.current_stream().cuda_stream

    def use(self) -> tuple[Tensor, ...]:
        """The tensors, for the current stream."""
        if self._event is not None:
            if torch.cuda.is_current_stream_capturing():
                _captured.append(self._tensors)
            elif torch._C._cuda_getCurrentRawStream(self._tensors[0].get_device()) != self._stream:
                stream = torch.cuda.current_stream()
                stream.wait_event(self._event)
                for tensor in self._tensors:
                    tensor.record_stream(stream)
        return self._tensors


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function to run with its first argument's device as the current one."""

    @wraps(function)
    def call(first: Tensor, *args: Any, **options: Any) -> Any:
        if not first.is_cuda or first.get_device() == torch._C._cuda_getDevice():
            return function(first, *args, **options)
        with torch.cuda.device(first.device):
            return function(first, *args, **options)

    return call


def blocks(count: int, size: int) -> tuple[int]:
    """A grid that covers ``count`` elements by blocks of ``size``."""
    return (max(1, -(-count // size)),)


def tiles(counts: Sequence[int], size: int) -> list[int]:
    """The first block of each part, ``[parts + 1]``, if no block spans two parts."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + -(-count // size))
    return starts


def steps(parts: int) -> int:
    """The number of bisection steps that `part_of` needs."""
    return max(0, (parts - 1).bit_length())


@triton.jit
def part_of(position, starts, parts, STEPS: tl.constexpr):
    """The last part that starts at or before the position; ``starts`` must be ascending."""
    part = position * 0
    for i in tl.static_range(STEPS):
        further = part + (1 << (STEPS - 1 - i))
        inside = further < parts
        start = tl.load(starts + further, mask=inside, other=0)
        part = tl.where(inside & (start <= position), further, part)
    return part


@triton.jit
def pointer(address, ELEMENT: tl.constexpr):
    """An int64 address as a pointer to elements."""
    return address.to(tl.int64).to(tl.pointer_type(ELEMENT))


@Fast
def _check_splits(splits, rows, length, flag, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = r <= rows
    here = tl.load(splits + r, mask=inside, other=0)
    before = tl.load(splits + r - 1, mask=inside & (r > 0), other=0)
    bad = (here < before) | ((r == 0) & (here != 0)) | ((r == rows) & (here != length))
    tl.atomic_max(flag + r * 0, rows + 1 - r, mask=inside & bad, sem="relaxed")


def refuse_row_splits(splits: Tensor, length: int) -> None:
    """Raise an error that describes splits that the device found to be bad."""
    splits = splits.cpu().contiguous()
    try:
        _core.check_row_splits(splits.data_ptr(), splits.numel() - 1, length)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_row_splits(splits: Tensor, length: int, flag: Tensor | None = None) -> None:
    """Set the flag unless the splits rise from 0 to ``length``; without a flag, wait and raise an error."""
    if flag is None:
        flag = new_flag(splits)
        check_row_splits(splits, length, flag)
        if read_flag(flag):
            refuse_row_splits(splits, length)
        return
    rows = splits.shape[0] - 1
    _check_splits[blocks(rows + 1, 1024)](splits, rows, length, flag, BLOCK=1024)


def vector_width(row_bytes: int) -> tuple[torch.dtype, int]:
    """The widest integer type that divides a row evenly, and the number of such integers per row."""
    for dtype, size in ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2)):
        if row_bytes % size == 0:
            return dtype, row_bytes // size
    return torch.uint8, row_bytes


def as_words(rows: Tensor) -> Tensor:
    """View contiguous rows as ``[n, words]`` of an integer type."""
    n = rows.shape[0]
    row_bytes = rows.element_size()
    for length in rows.shape[1:]:
        row_bytes *= length
    dtype, words = vector_width(row_bytes)
    if rows.dtype is torch.bool:
        rows = rows.view(torch.uint8)
    return rows.reshape(n, -1).view(dtype) if row_bytes and n else rows.new_empty((n, words), dtype=dtype)


WORDS = {torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16, torch.uint8: tl.uint8}
