"""The native steps for each torch operation."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.serving.server.net.row_plan import NotNative, Op, Value, squeezed

if TYPE_CHECKING:
    from shoal.serving.server.net.lowering import Lowering

aten = torch.ops.aten

Operation = Callable[..., Any]
OPERATIONS: dict[Any, Operation] = {}


def operation(*targets: Any) -> Callable[[Operation], Operation]:
    def add(function: Operation) -> Operation:
        OPERATIONS.update(dict.fromkeys(targets, function))
        return function

    return add


def _maps() -> None:
    """Add the element-wise operations."""
    for target, op in {
        aten.relu.default: Op.relu, aten.sigmoid.default: Op.sigmoid, aten.tanh.default: Op.tanh,
        aten.exp.default: Op.exp, aten.log.default: Op.log, aten.sqrt.default: Op.sqrt,
        aten.square.default: Op.square, aten.reciprocal.default: Op.reciprocal, aten.silu.default: Op.silu,
        aten.neg.default: Op.negate, aten.abs.default: Op.absolute,
    }.items():  # fmt: skip
        OPERATIONS[target] = lambda low, node, a, op=op: low.plan.map(op, low.value(a))
    for target, op in {
        aten.mul.Tensor: Op.multiply, aten.div.Tensor: Op.divide, aten.maximum.default: Op.maximum,
        aten.minimum.default: Op.minimum, aten.mul.Scalar: Op.multiply, aten.div.Scalar: Op.divide,
    }.items():  # fmt: skip
        OPERATIONS[target] = lambda low, node, a, b, op=op: low.plan.map(op, *low.both(a, b))
    for target, op in {
        aten.add.Tensor: Op.add, aten.sub.Tensor: Op.subtract, aten.add.Scalar: Op.add, aten.sub.Scalar: Op.subtract,
    }.items():  # fmt: skip
        OPERATIONS[target] = lambda low, node, a, b, alpha=1, op=op: low.plan.map(op, *low.both(a, b), number=alpha)


_maps()


@operation(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(low: Lowering, node: Any, a: Any, b: Any, alpha: float = 1) -> Value:
    a, b = low.both(a, b)
    return low.plan.map(Op.subtract, b, a, number=alpha)


@operation(aten.rsqrt.default)
def _rsqrt(low: Lowering, node: Any, a: Any) -> Value:
    return low.plan.map(Op.reciprocal, low.plan.map(Op.sqrt, low.value(a)))


@operation(aten.pow.Tensor_Scalar)
def _pow(low: Lowering, node: Any, a: Any, exponent: float) -> Value:
    return (
        low.plan.map(Op.square, low.value(a)) if exponent == 2 else low.plan.map(Op.power, low.value(a), None, exponent)
    )


@operation(aten.clamp.default, aten.hardtanh.default)
def _clamp(low: Lowering, node: Any, a: Any, min: float | None = None, max: float | None = None) -> Value:
    if node.target is aten.hardtanh.default:
        min, max = -1.0 if min is None else min, 1.0 if max is None else max
    infinity = float("inf")
    return low.plan.map(
        Op.clamp, low.value(a), None, -infinity if min is None else min, infinity if max is None else max
    )


@operation(aten.clamp_min.default)
def _clamp_min(low: Lowering, node: Any, a: Any, min: float) -> Value:
    return _clamp(low, node, a, min)


@operation(aten.clamp_max.default)
def _clamp_max(low: Lowering, node: Any, a: Any, max: float) -> Value:
    return _clamp(low, node, a, None, max)


@operation(aten.relu6.default)
def _relu6(low: Lowering, node: Any, a: Any) -> Value:
    return low.plan.map(Op.clamp, low.value(a), None, 0.0, 6.0)


@operation(aten.gelu.default)
def _gelu(low: Lowering, node: Any, a: Any, *, approximate: str = "none") -> Value:
    return low.plan.map(Op.gelu_tanh if approximate == "tanh" else Op.gelu, low.value(a))


@operation(aten.softplus.default)
def _softplus(low: Lowering, node: Any, a: Any, beta: float = 1, threshold: float = 20) -> Value:
    return low.plan.map(Op.softplus, low.value(a), None, beta, threshold)


@operation(aten.leaky_relu.default)
def _leaky_relu(low: Lowering, node: Any, a: Any, slope: float = 0.01) -> Value:
    return low.plan.map(Op.leaky_relu, low.value(a), None, slope)


@operation(aten.elu.default)
def _elu(low: Lowering, node: Any, a: Any, alpha: float = 1) -> Value:
    return low.plan.map(Op.elu, low.value(a), None, alpha)


@operation(aten.addcmul.default)
def _addcmul(low: Lowering, node: Any, a: Any, b: Any, c: Any, *, value: float = 1) -> Value:
    return low.plan.map(Op.add, *low.both(a, low.plan.map(Op.multiply, *low.both(b, c))), number=value)


@operation(
    aten.clone.default, aten.contiguous.default, aten.detach.default, aten.alias.default, aten.dropout.default,
    aten.lift_fresh_copy.default, aten.detach_.default,
)  # fmt: skip
def _same(low: Lowering, node: Any, a: Any, *others: Any, **options: Any) -> Value:
    if node.target is aten.dropout.default and others[1:] != (False,):
        raise NotNative("dropout in training mode")
    return low.value(a)


@operation(aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default)
def _to(low: Lowering, node: Any, a: Any, *others: Any, **options: Any) -> Value:
    return low.value(a)  # values are float32, and so is the result: `lower` has checked it


# --- matrices -------------------------------------------------------------------------------------------------------


@operation(aten.linear.default)
def _linear(low: Lowering, node: Any, a: Any, weight: Any, bias: Any = None) -> Value:
    return low.plan.matrix(_computed(a), low.value(weight), True, None if bias is None else low.value(bias))


@operation(aten.addmm.default)
def _addmm(low: Lowering, node: Any, plus: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Value:
    if beta != 1 or alpha != 1:
        raise NotNative("addmm with factors")
    return low.plan.matrix(_computed(a), low.value(b), False, low.broadcastable(plus, 1))


@operation(aten.mm.default, aten.bmm.default, aten.matmul.default)
def _matmul(low: Lowering, node: Any, a: Any, b: Any) -> Value:
    a = _computed(a)
    if not isinstance(b, Value):
        return low.plan.matrix(a, low.value(b), False)
    if len(a.sizes) != 2 or len(b.sizes) != 2:
        raise NotNative(f"a product of rows of sizes {list(a.sizes)} and {list(b.sizes)}")
    return low.plan.product(a, b)


def _computed(a: Any) -> Value:
    if not isinstance(a, Value) or a.buffer < 0:
        raise NotNative("the first factor of a product is a constant")
    return a


# --- over dimensions of a row -----------------------------------------------------------------------------------------


@operation(aten.sum.dim_IntList)
def _sum(low: Lowering, node: Any, a: Value, dims: Any, keep: bool = False, *, dtype: Any = None) -> Value:
    return low.plan.reduce(Op.sum, a, low.dims_of(a, dims), keep)


@operation(aten.mean.dim)
def _mean(low: Lowering, node: Any, a: Value, dims: Any, keep: bool = False, *, dtype: Any = None) -> Value:
    found = low.dims_of(a, dims)
    count = math.prod(a.sizes[each] for each in found)
    if not count:
        raise NotNative("a mean of no values")
    return low.plan.map(Op.divide, low.plan.reduce(Op.sum, a, found, keep), low.plan.number(count))


@operation(aten.amax.default)
def _amax(low: Lowering, node: Any, a: Value, dims: Any = (), keep: bool = False) -> Value:
    return low.plan.reduce(Op.largest, a, low.dims_of(a, dims), keep)


@operation(aten.linalg_vector_norm.default)
def _norm(
    low: Lowering, node: Any, a: Value, order: float = 2, dims: Any = None, keep: bool = False, *, dtype: Any = None
) -> Value:
    if order != 2:
        raise NotNative(f"a norm of order {order}")
    return low.plan.map(Op.sqrt, low.plan.reduce(Op.sum, low.plan.map(Op.square, a), low.dims_of(a, dims), keep))


@operation(aten.softmax.int, aten._softmax.default)
def _softmax(low: Lowering, node: Any, a: Value, dim: int, *others: Any) -> Value:
    exp = low.plan.map(Op.exp, _minus_max(low, a, dim))
    return low.plan.map(Op.divide, exp, low.plan.reduce(Op.sum, exp, low.dims_of(a, dim), True))


@operation(aten.log_softmax.int, aten._log_softmax.default)
def _log_softmax(low: Lowering, node: Any, a: Value, dim: int, *others: Any) -> Value:
    shifted = _minus_max(low, a, dim)
    total = low.plan.reduce(Op.sum, low.plan.map(Op.exp, shifted), low.dims_of(a, dim), True)
    return low.plan.map(Op.subtract, shifted, low.plan.map(Op.log, total))


def _minus_max(low: Lowering, a: Value, dim: int) -> Value:
    return low.plan.map(Op.subtract, a, low.plan.reduce(Op.largest, a, low.dims_of(a, dim), True))


@operation(aten.layer_norm.default)
def _layer_norm(
    low: Lowering, node: Any, a: Value, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5,
    *others: Any,
) -> Value:  # fmt: skip
    plan = low.plan
    dims = list(range(len(a.sizes) - len(shape), len(a.sizes)))
    if min(dims) < 0:
        raise NotNative("a layer norm includes the row dimension")
    count = plan.number(math.prod(shape))
    centred = plan.map(Op.subtract, a, plan.map(Op.divide, plan.reduce(Op.sum, a, dims, True), count))
    variance = plan.map(Op.divide, plan.reduce(Op.sum, plan.map(Op.square, centred), dims, True), count)
    made = plan.map(Op.divide, centred, plan.map(Op.sqrt, plan.map(Op.add, variance, plan.number(eps))))
    made = made if weight is None else plan.map(Op.multiply, made, low.value(weight))
    return made if bias is None else plan.map(Op.add, made, low.value(bias))


@operation(aten.batch_norm.default)
def _batch_norm(
    low: Lowering, node: Any, a: Value, weight: Any, bias: Any, mean: Any, variance: Any, training: bool,
    momentum: float, eps: float, *others: Any,
) -> Value:  # fmt: skip
    if training or mean is None or variance is None:
        raise NotNative("batch norm in training mode")
    fixed = low.fixed
    tail = [1] * (len(a.sizes) - 1)

    def factor() -> torch.Tensor:
        root = (fixed[variance] + eps).rsqrt()
        return (root if weight is None else root * fixed[weight]).reshape(-1, *tail)

    def shift() -> torch.Tensor:
        own = -fixed[mean].reshape(-1, *tail) * factor()
        return own if bias is None else own + fixed[bias].reshape(-1, *tail)

    return low.plan.map(Op.add, low.plan.map(Op.multiply, a, low.plan.constant(factor)), low.plan.constant(shift))


# --- views ------------------------------------------------------------------------------------------------------------


@operation(aten.cat.default)
def _cat(low: Lowering, node: Any, parts: Sequence[Any], dim: int = 0) -> Value:
    for part in parts:
        if not isinstance(part, Value):
            raise NotNative(f"a constant, {part!r}, is joined with rows")
    values = [part for part in parts if part.sizes != (0,)] or parts[:1]  # torch ignores empty arguments
    (found,) = low.dims_of(values[0], dim)
    return low.plan.joined(values, found)


@operation(aten.stack.default)
def _stack(low: Lowering, node: Any, parts: Sequence[Value], dim: int = 0) -> Value:
    found = dim % (len(parts[0].sizes) + 2) - 1
    if found < 0:
        raise NotNative("rows are stacked")
    return low.plan.joined([_unsqueezed(part, found) for part in parts], found)


def _unsqueezed(a: Value, dim: int) -> Value:
    sizes, strides = list(a.sizes), list(a.strides)
    sizes.insert(dim, 1)
    strides.insert(dim, 0)
    return Value(a.buffer, a.at, tuple(sizes), tuple(strides))


@operation(aten.unsqueeze.default)
def _unsqueeze(low: Lowering, node: Any, a: Value, dim: int) -> Value:
    found = dim % (len(a.sizes) + 2) - 1
    if found < 0:
        raise NotNative("an operation adds a dimension before the rows")
    return _unsqueezed(a, found)


@operation(aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(low: Lowering, node: Any, a: Value, dims: Any) -> Value:
    return squeezed(a, low.dims_of(a, dims))


@operation(
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int
)
def _reshape(low: Lowering, node: Any, a: Value, *others: Any) -> Value:
    return low.plan.reshaped(a, low.sizes_of(node))


@operation(aten.select.int)
def _select(low: Lowering, node: Any, a: Value, dim: int, index: int) -> Value:
    (found,) = low.dims_of(a, dim)
    index = index % a.sizes[found]
    sizes, strides = a.sizes[:found] + a.sizes[found + 1 :], a.strides[:found] + a.strides[found + 1 :]
    return Value(a.buffer, a.at + index * a.strides[found], sizes, strides)


@operation(aten.slice.Tensor)
def _slice(
    low: Lowering, node: Any, a: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    if dim % (len(a.sizes) + 1) == 0 and not start and (end is None or end >= 1 << 62) and step == 1:
        return a
    (found,) = low.dims_of(a, dim)
    first, _, _ = slice(start, end, step).indices(a.sizes[found])
    strides = [stride * (step if i == found else 1) for i, stride in enumerate(a.strides)]
    sizes = low.sizes_of(node)
    at = a.at + first * a.strides[found] if sizes[found] else a.at
    return Value(a.buffer, at, sizes, tuple(strides))


@operation(aten.narrow.default)
def _narrow(low: Lowering, node: Any, a: Value, dim: int, start: int, length: int) -> Value:
    return _slice(low, node, a, dim, start, start + length)


@operation(aten.transpose.int)
def _transpose(low: Lowering, node: Any, a: Value, first: int, second: int) -> Value:
    one, two = low.dims_of(a, [first, second])
    order = list(range(len(a.sizes)))
    order[one], order[two] = order[two], order[one]
    return _ordered(a, order)


@operation(aten.permute.default)
def _permute(low: Lowering, node: Any, a: Value, dims: Sequence[int]) -> Value:
    if dims[0] % len(dims) != 0:
        raise NotNative("an operation moves the rows")
    return _ordered(a, low.dims_of(a, list(dims[1:])) if len(dims) > 1 else [])


def _ordered(a: Value, order: Sequence[int]) -> Value:
    return Value(a.buffer, a.at, tuple(a.sizes[i] for i in order), tuple(a.strides[i] for i in order))


@operation(aten.expand.default, aten.expand_as.default)
def _expand(low: Lowering, node: Any, a: Any, *others: Any, **options: Any) -> Value:
    sizes = low.sizes_of(node)
    return (a if isinstance(a, Value) else low.broadcastable(a, len(sizes))).broadcast(sizes)


@operation(
    aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default, aten.new_empty.default,
    aten.empty_like.default, aten.ones.default,
    aten.new_ones.default, aten.ones_like.default, aten.full.default, aten.full_like.default,
)  # fmt: skip
def _filled(low: Lowering, node: Any, *others: Any, **options: Any) -> Value:
    name = str(node.target)
    value = float(others[1]) if "full" in name else float("ones" in name)
    return low.plan.number(value).broadcast(low.sizes_of(node))


@operation(aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default, aten.unbind.int)
def _split(low: Lowering, node: Any, a: Value, *others: Any, **options: Any) -> list[Value]:
    has_dim = 0 if node.target is aten.unbind.int else 1
    dim = others[has_dim] if len(others) > has_dim else options.get("dim", 0)
    (found,) = low.dims_of(a, dim)
    if node.target is aten.unbind.int:
        return [_select(low, node, a, dim, i) for i in range(a.sizes[found])]
    parts, begin = [], 0
    for each in node.meta["val"]:
        length = int(each.shape[found + 1])
        sizes = (*a.sizes[:found], length, *a.sizes[found + 1 :])
        parts.append(Value(a.buffer, a.at + begin * a.strides[found] if length else a.at, sizes, a.strides))
        begin += length
    return parts


@operation(operator.getitem)
def _getitem(low: Lowering, node: Any, parts: Sequence[Value], index: int) -> Value:
    return parts[index]


@operation(aten.index_select.default)
def _index_select(low: Lowering, node: Any, a: Value, dim: int, index: Any) -> Value:
    (found,) = low.dims_of(a, dim)
    return low.plan.selected(a, found, low.numbers(index))


@operation(aten.index.Tensor)
def _index(low: Lowering, node: Any, a: Value, indices: Sequence[Any]) -> Value:
    given = [i for i, each in enumerate(indices) if each is not None]
    if len(given) != 1:
        raise NotNative("an operation has several indices")
    (found,) = low.dims_of(a, given[0])
    return low.plan.selected(a, found, [each % a.sizes[found] for each in low.numbers(indices[given[0]])])
