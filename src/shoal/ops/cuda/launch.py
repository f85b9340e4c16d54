"""What every kernel launch shares: numbers for the device, checks that the device makes, block sizes."""

from __future__ import annotations

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
"""The kernels run in Triton's interpreter, on CPU tensors."""

ELEMENTS = {torch.float32: tl.float32, torch.float64: tl.float64, torch.int64: tl.int64, torch.int32: tl.int32}
"""Triton's name of a tensor's elements."""


class Kernel:
    """A Triton kernel that is launched in a third of the usual time: all its arguments are int64, addresses included.

    The usual launch looks at every argument anew, which on a slow host costs more than a small kernel runs. The kernel
    makes pointers of its addresses with `pointer`; the caller keeps the tensors behind them until it has launched.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.jit = triton.jit(function)
        self._made: dict[tuple[Any, ...], Compiled] = {}

    def __call__(self, grid: int, *args: int, warps: int = 4, **constants: Any) -> None:
        """``constants`` are the kernel's constexprs, in its order."""
        if INTERPRETED:
            self.jit[(grid,)](*args, **constants)
            return
        device = torch._C._cuda_getDevice()
        values = constants.values()
        key = (device, warps, *values)
        made = self._made.get(key)
        if made is None:
            # A number that is neither narrow nor a multiple of anything: nothing is assumed of the real ones.
            kernel = self.jit.warmup(*[(1 << 40) + 7] * len(args), grid=(1,), num_warps=warps, **constants)
            made = self._made[key] = Compiled(kernel, tuple(values))
        made(device, grid, 1, args, args)


class Fast:
    """A Triton kernel of tensors and numbers, launched as usual, ``kernel[grid](...)``, but in a third of the time.

    Triton compiles a kernel for what it sees of the arguments: their types, whether a tensor begins at 16 bytes,
    whether a number is 1, a multiple of 16, or wide. The same is looked at here, with less ado. Run-time arguments come
    in order, then constexprs by name. An argument of another kind takes Triton's own way.
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
    """What Triton makes a difference of."""
    if number == 1:
        return 1
    kind = 2 if number % 16 == 0 else 0
    if -(1 << 31) <= number < 1 << 31:
        return kind
    return kind + (4 if number < 1 << 63 else 8)


def aligned(count: int) -> int:
    """Room for ``count`` int32 in a workspace whose parts begin at multiples of 256 bytes."""
    return (count + 63) & ~63


class _Mine(threading.local):
    """What a thread has of its own."""

    def __init__(self) -> None:
        self.checks = True
        self.flags: dict[tuple[int, int], Tensor] = {}  # device and stream -> flag


_mine = _Mine()


@contextmanager
def unchecked() -> Iterator[None]:
    """Inside it no op of this thread waits for the device to hear of bad indices: they are skipped instead of raised.

    For CUDA graphs and for loops whose indices an earlier op has made. Sizes are checked all the same.
    """
    before, _mine.checks = _mine.checks, False
    try:
        yield
    finally:
        _mine.checks = before


def checks() -> bool:
    """Whether ops wait to hear of bad indices."""
    return _mine.checks


def new_flag(like: Tensor) -> Tensor:
    """int64 zero on the device; a kernel raises it to ``n - i`` where element ``i`` is bad, so the first one stays.

    One at a time: it is the thread's own on a stream, and `read_flag` must be the next thing done with it.
    """
    if not _mine.checks or not like.is_cuda:
        return torch.zeros(1, dtype=torch.int64, device=like.device)
    device = like.get_device()
    key = device, torch._C._cuda_getCurrentRawStream(device)
    flag = _mine.flags.get(key)
    if flag is None:
        flag = _mine.flags[key] = torch.zeros(1, dtype=torch.int64, device=like.device)
    return flag


def read_flag(flag: Tensor) -> int:
    """Waits for the device; 0 if all is well, or if nobody wants to know."""
    if not _mine.checks:
        return 0
    value = int(flag)
    if value:
        flag.zero_()
    return value


def raise_if(flag: Tensor, message: Callable[[int], str]) -> None:
    """Waits for the device and raises with what ``message`` makes of the flag, if it was raised."""
    value = read_flag(flag)
    if value:
        raise ConfigError(message(value))


_captured: list[Any] = []
"""What captured graphs read at every replay, and nobody else keeps."""


def upload(values: Sequence[int], like: Tensor) -> Tensor:
    """int64 numbers on the device of a tensor, without waiting for it."""
    if like.is_cuda:
        home = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=True)
        if torch.cuda.is_current_stream_capturing():  # every replay copies them anew
            _captured.append(home)
        return home.to(like.device, non_blocking=True)
    return torch.tensor(values, dtype=torch.int64, device=like.device)


class Made:
    """Tensors on a device that were made once and serve many calls, on any stream."""

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
    """For functions that are called with tensors of any device: the first argument's is the current one inside."""

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
    """Where each part's blocks start when every part has its own: ``[parts + 1]``."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + -(-count // size))
    return starts


def steps(parts: int) -> int:
    """How many halvings `part_of` needs."""
    return max(0, (parts - 1).bit_length())


@triton.jit
def part_of(position, starts, parts, STEPS: tl.constexpr):
    """The last part whose start is not after the position; ``starts`` rises."""
    part = position * 0
    for i in tl.static_range(STEPS):
        further = part + (1 << (STEPS - 1 - i))
        inside = further < parts
        start = tl.load(starts + further, mask=inside, other=0)
        part = tl.where(inside & (start <= position), further, part)
    return part


@triton.jit
def pointer(address, ELEMENT: tl.constexpr):
    """The address of elements that an int64 holds."""
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
    """Raises with what is wrong with the splits, once the device has found that something is."""
    splits = splits.cpu().contiguous()
    try:
        _core.check_row_splits(splits.data_ptr(), splits.numel() - 1, length)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_row_splits(splits: Tensor, length: int, flag: Tensor | None = None) -> None:
    """Raises the flag unless the splits rise from 0 to ``length``; without a flag, waits and raises an error."""
    if flag is None:
        flag = new_flag(splits)
        check_row_splits(splits, length, flag)
        if read_flag(flag):
            refuse_row_splits(splits, length)
        return
    rows = splits.shape[0] - 1
    _check_splits[blocks(rows + 1, 1024)](splits, rows, length, flag, BLOCK=1024)


def vector_width(row_bytes: int) -> tuple[torch.dtype, int]:
    """The widest integer that cuts a row of bytes evenly, and how many of them it has."""
    for dtype, size in ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2)):
        if row_bytes % size == 0:
            return dtype, row_bytes // size
    return torch.uint8, row_bytes


def as_words(rows: Tensor) -> Tensor:
    """The same bytes of contiguous rows as ``[n, words]`` of a plain integer type."""
    n = rows.shape[0]
    row_bytes = rows.element_size()
    for length in rows.shape[1:]:
        row_bytes *= length
    dtype, words = vector_width(row_bytes)
    if rows.dtype is torch.bool:
        rows = rows.view(torch.uint8)
    return rows.reshape(n, -1).view(dtype) if row_bytes and n else rows.new_empty((n, words), dtype=dtype)


WORDS = {torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16, torch.uint8: tl.uint8}
