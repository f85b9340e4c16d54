"""Triton's interpreter with less Python around each operation, for processes that run kernels in nothing else.

It makes the same calls of numpy on the same data, but omits work that is repeated for every operation: the language is
patched once and not at every launch and call, shapes are made once, and scans with operators that the interpreter does
not know combine complete blocks, as a GPU does, and not one element after the other.
"""

import math
from functools import cache

import numpy as np
import triton
import triton.language as tl
from triton.language import semantic
from triton.runtime import interpreter

core = tl.core


def make_quick() -> None:
    """Call it before the first kernel runs. Other versions of Triton are left as they are."""
    if not triton.__version__.startswith("3.6."):
        return
    interpreter._patch_lang = _patch_lang(interpreter._patch_lang)
    interpreter._get_np_dtype = _np_dtype(interpreter._get_np_dtype)
    interpreter.ScanOps.generic_scan = _scan
    core.tuple.__init__ = _init_tuple
    core.tuple.type = property(_type_of_tuple, _set_type_of_tuple)
    core.block_type.__init__ = _init_block_type
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tensor.__init__ = _init_tensor
    semantic.TritonSemantic.broadcast_impl_value = _broadcast(semantic.TritonSemantic.broadcast_impl_value)


def _patch_lang(patch):
    class Stays:
        def restore(self):
            pass

    @cache
    def patched():
        patch(make_quick)  # any function from which the language is reachable
        return Stays()

    return lambda fn: patched()


def _np_dtype(dtype):
    known = cache(dtype)

    def find(ty):
        ty = ty.scalar
        return np.dtype(np.uint64) if isinstance(ty, tl.pointer_type) else known(ty)

    return find


def _init_tuple(self, args, type=None):
    self.values = list(args)
    self._type = core.tuple_type(type) if type is not None and not isinstance(type, core.tuple_type) else type


def _type_of_tuple(self):
    if self._type is None:
        self._type = core._type_for_tuple_values(self.values)
    return self._type


def _set_type_of_tuple(self, type):
    self._type = type


@cache
def _shape(sizes):
    numel = core.validate_block_shape(sizes)
    return core.tuple(sizes), numel


def _init_block_type(self, element_ty, shape):
    sizes = tuple(core._unwrap_if_constexpr(size) for size in shape)
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, self.numel = _shape(sizes)


@cache
def _shape_of_tensor(sizes):
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))


def _init_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_of_tensor(tuple(type.shape.values) if type.is_block() else ())


def _broadcast(broadcast):
    def quick(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return quick


def _scan(self, input):
    """Joins every element with the one ``step`` before it, for steps 1, 2, 4 ...: the operator is associative."""
    types, data = [one.dtype for one in input], [one.handle.data for one in input]
    size, step = data[0].shape[self.axis], 1
    place = np.arange(size).reshape([-1 if axis == self.axis else 1 for axis in range(data[0].ndim)])
    while step < size:
        both = [np.roll(one, step, self.axis) for one in data] + data
        with np.errstate(all="ignore"):  # for elements without a predecessor
            joined = self.combine_fn.fn(*map(self.to_tensor, both, types * 2))
        joined = joined if isinstance(joined, tuple) else (joined,)
        data = [np.where(place < step, one, new.handle.data) for one, new in zip(data, joined, strict=True)]
        step *= 2
    return list(map(self.to_tensor, data, types))
