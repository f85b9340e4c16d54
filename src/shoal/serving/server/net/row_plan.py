"""Plans of native nets: steps over the values of one row, and the constants that they use.

A value is a view: a buffer with a number of floats per row (or a constant, shared by all rows), an offset, and the
sizes and strides of one row. Operations that are views in torch cost nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import accumulate
from typing import Any

import torch

from shoal import _core


class NotNative(Exception):
    """Part of a net can only be run by torch; the message says which."""


Op = IntEnum(
    "Op",
    "copy negate absolute relu sigmoid tanh exp log sqrt square reciprocal gelu gelu_tanh silu softplus leaky_relu elu "
    "clamp power add subtract multiply divide maximum minimum sum largest",
    start=0,
)
"""The element-wise operations. Their order is shared with csrc/nn/net/loops.h."""
_MAP, _MATRIX, _PRODUCT, _SELECT = range(4)
_REDUCES = {Op.sum: 0.0, Op.largest: -math.inf}


@dataclass(frozen=True, slots=True)
class Value:
    """The location of a row's values; ``buffer`` < 0 is the constant ``~buffer``."""

    buffer: int
    at: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dense(self) -> bool:
        """Whether the values of a row are contiguous."""
        packed = contiguous_strides(self.sizes)
        return all(size == 1 or have == want for size, have, want in zip(self.sizes, self.strides, packed, strict=True))

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    def broadcast(self, sizes: Sequence[int]) -> Value:
        """The same values broadcast to larger sizes, as in torch."""
        extra = len(sizes) - len(self.sizes)
        if extra < 0:
            raise NotNative(f"values of sizes {list(self.sizes)} do not fit {list(sizes)}")
        strides = [0] * extra
        for have, want, stride in zip(self.sizes, sizes[extra:], self.strides, strict=True):
            if have not in (1, want):
                raise NotNative(f"values of sizes {list(self.sizes)} do not fit {list(sizes)}")
            strides.append(stride if have == want else 0)
        return Value(self.buffer, self.at, tuple(sizes), tuple(strides))

    def native(self) -> tuple[int, int, list[int], list[int]]:
        return self.buffer, self.at, list(self.sizes), list(self.strides)


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of contiguous values."""
    return tuple(accumulate(reversed(sizes[1:]), lambda a, b: a * b, initial=1))[::-1] if sizes else ()


@dataclass(slots=True)
class _Step:
    kind: int
    op: int
    out: Value
    a: Value
    b: Value | None = None
    numbers: tuple[float, float] = (1.0, 0.0)
    matrix: tuple[int, int, int, int, int] = (-1, 0, 0, 0, 0)
    chosen: tuple[list[int], int, int, int] = field(default_factory=lambda: ([], 1, 1, 1))

    def views(self) -> list[Value]:
        return [self.out, self.a] if self.b is None else [self.out, self.a, self.b]


class PlanBuilder:
    """Collects the steps of a plan; every method returns the location of its result.

    ``constants`` are functions: they are called again when the weights change.
    """

    def __init__(self, inputs: Sequence[tuple[int, ...]]) -> None:
        self._floats = [math.prod(sizes) for sizes in inputs]
        self.inputs = [Value(i, 0, tuple(sizes), contiguous_strides(sizes)) for i, sizes in enumerate(inputs)]
        self.constants: list[Callable[[], torch.Tensor]] = []
        self._sizes: list[int] = []
        self._steps: list[_Step] = []

    def new(self, sizes: Sequence[int]) -> Value:
        """Allocate a buffer for a result."""
        self._floats.append(math.prod(sizes))
        return Value(len(self._floats) - 1, 0, tuple(sizes), contiguous_strides(sizes))

    def constant(self, make: Callable[[], torch.Tensor]) -> Value:
        """The tensor that ``make`` returns, the same for all rows; its dimensions are those of one row."""
        made = make()
        if made.dtype != torch.float32:
            raise NotNative(f"a constant is {made.dtype}")
        self.constants.append(lambda: make().detach().to("cpu").contiguous())
        self._sizes.append(made.numel())
        return Value(~(len(self.constants) - 1), 0, tuple(made.shape), contiguous_strides(made.shape))

    def number(self, value: float) -> Value:
        return self.constant(lambda: torch.tensor(float(value), device="cpu"))

    def map(self, op: Op, a: Value, b: Value | None = None, number: float = 1.0, other: float = 0.0) -> Value:
        """``op`` of each value, broadcast."""
        sizes = a.sizes if b is None else torch.broadcast_shapes(a.sizes, b.sizes)
        out = self.new(sizes)
        self._steps.append(
            _Step(_MAP, op, out, a.broadcast(sizes), None if b is None else b.broadcast(sizes), (number, other))
        )
        return out

    def copied(self, a: Value, into: Value | None = None) -> Value:
        into = self.new(a.sizes) if into is None else into
        self._steps.append(_Step(_MAP, Op.copy, into, a.broadcast(into.sizes)))
        return into

    def dense(self, a: Value) -> Value:
        """The same values, contiguous."""
        return a if a.dense and a.buffer >= 0 else self.copied(a)

    def reduce(self, op: Op, a: Value, dims: Sequence[int], keep: bool) -> Value:
        """``sum`` or ``largest`` over some dimensions of a row."""
        out = self.new([1 if i in dims else size for i, size in enumerate(a.sizes)])
        self.copied(self.number(_REDUCES[op]), out)
        self._steps.append(_Step(_MAP, op, out.broadcast(a.sizes), a))
        return out if keep else squeezed(out, dims)

    def matrix(self, a: Value, weight: Value, transposed: bool, plus: Value | None = None) -> Value:
        """``a [..., k]`` times a constant ``[k, n]``, or ``[n, k]`` if it is ``transposed``; plus ``plus``."""
        if len(weight.sizes) != 2 or not a.sizes:
            raise NotNative(f"a product of sizes {list(a.sizes)} and {list(weight.sizes)}")
        k, n = reversed(weight.sizes) if transposed else weight.sizes
        if a.sizes[-1] != k or 0 in (k, n, a.count):
            raise NotNative(f"a product of sizes {list(a.sizes)} and {list(weight.sizes)}")
        row, column = (1, k) if transposed else (n, 1)
        if len(a.sizes) > 1 or a.strides[-1] != 1:
            a = self.dense(a)
        a = self.copied(a) if len(a.sizes) > 1 and self._floats[a.buffer] != a.count else a
        out = self.new([*a.sizes[:-1], n])
        if plus is not None:
            plus = plus.broadcast(out.sizes)
            is_bias = plus.buffer < 0 and not any(plus.strides[:-1]) and (n == 1 or plus.strides[-1] == 1)
            if not is_bias and (len(out.sizes) > 1 or not plus.dense):
                plus = self.copied(plus)
        self._steps.append(_Step(_MATRIX, 0, out, a, plus, matrix=(~weight.buffer, k, n, row, column)))
        return out

    def product(self, a: Value, b: Value) -> Value:
        """``[n, k]`` times ``[k, m]`` of each row."""
        a = a if a.strides[-1] == 1 or a.sizes[-1] == 1 else self.dense(a)
        out = self.new([a.sizes[0], b.sizes[1]])
        if a.sizes[-1] == 1:
            a = replace(a, strides=(a.strides[0], 1))
        if out.sizes[-1] == 1:
            out = replace(out, strides=(out.strides[0], 1))
        self._steps.append(_Step(_PRODUCT, 0, out, a, b))
        return out

    def selected(self, a: Value, dim: int, chosen: list[int]) -> Value:
        """The entries ``chosen`` of ``a`` along a dimension."""
        a = self.dense(a)
        sizes = [*a.sizes[:dim], len(chosen), *a.sizes[dim + 1 :]]
        out = self.new(sizes)
        before, after = math.prod(a.sizes[:dim]), math.prod(a.sizes[dim + 1 :])
        self._steps.append(_Step(_SELECT, 0, out, a, chosen=(chosen, before, a.sizes[dim], after)))
        return out

    def joined(self, parts: Sequence[Value], dim: int) -> Value:
        """The parts concatenated along a dimension."""
        sizes = list(parts[0].sizes)
        sizes[dim] = sum(part.sizes[dim] for part in parts)
        out = self.new(sizes)
        begin = 0
        for part in parts:
            own = [*sizes[:dim], part.sizes[dim], *sizes[dim + 1 :]]
            self.copied(part, Value(out.buffer, begin * out.strides[dim], tuple(own), out.strides))
            begin += part.sizes[dim]
        return out

    def reshaped(self, a: Value, sizes: Sequence[int]) -> Value:
        a = self.dense(a)
        return Value(a.buffer, a.at, tuple(sizes), contiguous_strides(sizes))

    def build(self, outputs: Sequence[Value]) -> Any:
        """The native plan, whose results are ``outputs``."""
        for out in outputs:
            self.copied(out)
        results = range(len(self._floats) - len(outputs), len(self._floats))
        places, floats = self._places(results)
        steps = [
            (
                step.kind, int(step.op), *(self._native(view, places) for view in (step.out, step.a, step.b)),
                step.numbers, step.matrix, step.chosen,
            )
            for step in self._steps
        ]  # fmt: skip
        try:
            return _core.RowPlan(floats, len(self.inputs), len(outputs), self._sizes, steps)
        except ValueError as error:
            raise NotNative(str(error)) from None

    @staticmethod
    def _native(view: Value | None, places: dict[int, int]) -> Any:
        if view is None:
            return None
        return replace(view, buffer=places.get(view.buffer, view.buffer)).native()

    def _places(self, results: range) -> tuple[dict[int, int], list[int]]:
        """A location for each buffer: inputs, outputs, then intermediate ones, which reuse free locations."""
        inputs = len(self.inputs)
        places = {i: i for i in range(inputs)} | {buffer: inputs + i for i, buffer in enumerate(results)}
        floats = self._floats[:inputs] + [self._floats[buffer] for buffer in results]
        last = {view.buffer: number for number, step in enumerate(self._steps) for view in step.views()}
        free: dict[int, list[int]] = {}
        for number, step in enumerate(self._steps):
            buffer = step.out.buffer
            if buffer not in places:
                size = self._floats[buffer]
                if not free.get(size):
                    floats.append(size)
                    free[size] = [len(floats) - 1]
                places[buffer] = free[size].pop()
            for buffer in {view.buffer for view in step.views()}:
                if buffer >= inputs and buffer not in results and last[buffer] == number:
                    free.setdefault(self._floats[buffer], []).append(places[buffer])
        return places, floats


def squeezed(a: Value, dims: Sequence[int]) -> Value:
    """``a`` without the dimensions of size 1 among ``dims``."""
    kept = [i for i, size in enumerate(a.sizes) if i not in dims or size != 1]
    return Value(a.buffer, a.at, tuple(a.sizes[i] for i in kept), tuple(a.strides[i] for i in kept))
