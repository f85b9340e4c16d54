"""Read the rows of a plan, with their gradient: as an autograd function, and as an op that compiles.

In plain eager mode a `torch.autograd.Function` runs, because the dispatch of a Python op costs more than a small
lookup. Under a compiler the same functions are `torch.library` ops: the plan is an integer handle, and the backward op
changes the ``tape`` that the forward op reads, so that the compiler neither drops an update nor moves a read past it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal import _core
from shoal.buffers import empty_rows
from shoal.errors import ConfigError, UnsupportedError
from shoal.nn.read.jagged import Jagged
from shoal.nn.read.plan import Call, Plan, find_plan
from shoal.nn.read.refusal import notify_ranks
from shoal.nn.read.watch import watch_offsets
from shoal.nn.update.passes import hand_over, numbers
from shoal.table.protocol import READS, Found, Missing, Part, marks_shape

NOTHING: list[Any] = []
_PLAIN: dict[str, Any] = {}


class Request(NamedTuple):
    """A batch in the form of a plan's calls; lists have one element per call, or are empty."""

    plan: Plan
    ids: list[Tensor]
    sizes: list[list[int]]
    """Number of ids of each feature of a call; empty if only the offsets give it."""
    offsets: list[Tensor]
    """int64 ``[F * B + 1]``; empty if rows are not pooled."""
    weights: list[Tensor]
    bags: int
    missing: Missing
    trusted: bool = False
    """Whether the offsets need no check."""
    ahead: Ahead | None = None
    """The work that was done in advance."""


class Ahead:
    """The work of a read that was done before its forward: the rows' locations, and perhaps the rows themselves."""

    __slots__ = ("_versions", "founds", "marks", "outputs")

    def __init__(self, founds: list[Found]) -> None:
        self.founds = founds
        self.outputs: list[Tensor] | None = None
        """The results of `read`."""
        self.marks: list[Tensor] = NOTHING
        """The marks of each call, if any call has them."""
        self._versions: list[int] = []

    def keep(self, outputs: list[Tensor], marks: list[Tensor]) -> None:
        """Keep these rows for the forward."""
        self.outputs, self.marks, self._versions = outputs, marks, [one._version for one in outputs]

    def kept(self) -> list[Tensor]:
        """Return the rows, which activation checkpointing takes several times."""
        assert self.outputs is not None
        if [one._version for one in self.outputs] != self._versions:
            raise UnsupportedError(
                "rows that were read ahead must not be changed in place, because another forward reads the same "
                "batch; remove in-place operations on the module's results, or the activation checkpointing"
            )
        return [one.detach() for one in self.outputs]


def read(request: Request) -> list[Tensor]:
    """Return the pooled rows ``[B, width]``, if a group pools any feature, then the rows of each other call."""
    if torch.compiler.is_compiling() or _dispatch_modes():
        return _read_by_op(request)
    if torch.is_grad_enabled():
        apply = _Read.apply if _transforms_active() else _apply
        out = apply(request.plan.anchor, request.plan.root, request)
        return [out] if isinstance(out, Tensor) else list(out)
    return _read(request)[0]


def _read(request: Request, keep: bool = False) -> tuple[list[Tensor], list[Found], list[Tensor]]:
    """Return the results of `read`, what was found and, with ``keep``, the marks of each call, if any call has them."""
    if request.ahead is not None and request.ahead.outputs is not None:
        return request.ahead.kept(), request.ahead.founds, request.ahead.marks
    lane = request.plan.lane()
    if lane is not None and not lane.here:
        return lane.run(lambda: _read(request, keep))
    plan, all_ids, all_offsets, all_weights = request.plan, request.ids, request.offsets, request.weights
    bags, missing = request.bags, request.missing
    outputs: list[Tensor] = []
    founds: list[Found] = [] if request.ahead is None else request.ahead.founds
    marks = _marks(request) if keep and plan.marked else NOTHING
    out: Any = None
    if request.ahead is None:
        _check(request)
    if plan.width:
        if plan.device.type == "cpu":
            out = empty_rows(bags, plan.width)
        else:
            out = torch.empty(bags, plan.width, dtype=torch.float32, device=plan.device)
        outputs.append(out)
    if READS:
        _notify_watchers(request)
    if plan.shared:
        return *_read_shared(request, outputs, marks), marks
    for i, call in enumerate(plan.calls):
        ids, features, group = all_ids[i], call.features, call.group
        if len(founds) == i:
            founds.append(group.find(ids, _counts_of(request, i), features, missing=missing))
        found = founds[i]
        if not call.fused:
            outputs.append(group.rows(found, features, missing=missing))
            continue
        offsets, weights = all_offsets[i], all_weights[i] if all_weights else None
        more = {"marks": marks[i]} if marks and call.marked else _PLAIN
        if ids.device == plan.device:
            group.pooled(found, features, offsets, weights, out, missing=missing, **more)
        else:  # a group on another device
            there = torch.empty(bags, plan.width, dtype=torch.float32, device=ids.device)
            group.pooled(found, features, offsets, weights, there, missing=missing, **more)
            for feature, column in enumerate(features.columns):
                own = slice(column, column + features.length(feature) * group.dim)
                out[:, own] = there[:, own].to(out.device)
    return outputs, founds, marks


def _marks(request: Request) -> list[Tensor]:
    """Allocate the marks of each call; empty for a call without max."""
    return [
        torch.empty(
            marks_shape(ids.shape[0] if call.marked else 0, call.group.dim), dtype=torch.uint8, device=ids.device
        )
        for call, ids in zip(request.plan.calls, request.ids, strict=True)
    ]


def find_ahead(request: Request) -> Ahead:
    """Do the part of a read that does not need current rows, in any thread.

    Rows in other processes are located, which saves the forward these messages. Rows in this process are not, because
    reading them directly is as fast; caches start to prefetch theirs.
    """
    plan = request.plan
    _check(request)
    for i, call in enumerate(plan.calls):
        if call.group.traits.prefetches:
            group: Any = call.group
            group.prefetch(request.ids[i], _counts_of(request, i), call.features)
    if not any(call.group.traits.remote for call in plan.calls):
        return Ahead([])
    if plan.shared:
        first: Any = plan.calls[0].group
        return Ahead(first.together([_find_steps(request, i) for i in range(len(plan.calls))]))
    return Ahead(
        [
            call.group.find(request.ids[i], _counts_of(request, i), call.features, missing=request.missing)
            for i, call in enumerate(plan.calls)
        ]
    )


def read_ahead(request: Request) -> None:
    """Read the rows that were found ahead, for the next `read`."""
    assert request.ahead is not None
    outputs, _, marks = _read(request, True)
    request.ahead.keep(outputs, marks)


def _check(request: Request) -> None:
    if request.offsets and not request.trusted:
        for call, ids, offsets in zip(request.plan.calls, request.ids, request.offsets, strict=True):
            if not call.checked:
                check_bags(Jagged(ids, offsets), call.touched[0].name)


def _find_steps(request: Request, i: int) -> Any:
    call = request.plan.calls[i]
    group: Any = call.group
    return group.find_steps(request.ids[i], _counts_of(request, i), call.features, missing=request.missing)


def _notify_watchers(request: Request) -> None:
    for i, call in enumerate(request.plan.calls):
        sizes = request.sizes[i] or request.offsets[i][:: max(1, request.bags)].diff().tolist()
        for watch in READS:
            watch(call.group, request.ids[i], sizes, call.features, request.bags if request.offsets else 0)


def _read_shared(request: Request, outputs: list[Tensor], marks: list[Tensor]) -> tuple[list[Tensor], list[Found]]:
    """Do the work of `_read` for groups over the same ranks, whose calls share exchanges: of finds, then of rows."""
    plan, all_offsets, all_weights, missing = request.plan, request.offsets, request.weights, request.missing

    def steps(i: int, call: Call) -> Generator[Any, Any, tuple[Found, Tensor | None]]:
        group: Any = call.group
        offsets = all_offsets[i] if all_offsets else None
        found = (yield from _find_steps(request, i)) if request.ahead is None else request.ahead.founds[i]
        if not call.fused:
            return found, (yield from group.rows_steps(found, call.features, missing=missing))
        weights = all_weights[i] if all_weights else None
        more = {"marks": marks[i]} if marks and call.marked else _PLAIN
        yield from group.pooled_steps(found, call.features, offsets, weights, outputs[0], missing=missing, **more)
        return found, None

    first: Any = plan.calls[0].group
    results = first.together([steps(i, call) for i, call in enumerate(plan.calls)])
    return [*outputs, *(rows for _, rows in results if rows is not None)], [found for found, _ in results]


def _counts_of(request: Request, i: int) -> Tensor:
    offsets = request.offsets[i] if request.offsets else None
    return _counts(request.plan.calls[i], request.sizes[i], offsets, request.bags, bool(request.weights))


def _counts(call: Call, sizes: list[int], offsets: Tensor | None, bags: int, weighted: bool) -> Tensor:
    """Return `Found.counts`: on the host if sizes are known, else on the offsets' device; or the offsets themselves."""
    traits = call.group.traits
    if offsets is not None and call.fused and traits.takes_bags and not weighted:
        return offsets
    if sizes or offsets is None:
        return _known_counts(*sizes)
    if not bags:
        raise ConfigError("ids by key without bags must come with sizes, the number of ids of each key")
    return offsets if traits.counts_bags else offsets[::bags].diff()


@lru_cache(maxsize=512)
def _known_counts(*sizes: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(sizes, dtype=torch.int64, device="cpu")


def check_bags(bags: Jagged, name: str) -> None:
    """Refuse offsets that do not rise from 0 to the number of ids; for those on a GPU a later call may raise."""
    values, offsets, _, length = bags
    if length >= 0 or offsets is None:
        return
    if offsets.is_cuda:
        watch_offsets(offsets, values.shape[0], name)
        return
    try:
        _core.check_offsets(offsets.data_ptr(), offsets.shape[0] - 1, values.shape[0])
    except ValueError as error:
        raise ConfigError(f"table {name!r}: {error}") from None


def _parts(
    plan: Plan, grads: Sequence[Tensor], founds: Sequence[Found], offsets: Sequence[Any], weights: Sequence[Any],
    marks: Sequence[Tensor],
) -> list[Any]:  # fmt: skip
    """Return the gradients of a read by call."""
    parts = []
    for i, call in enumerate(plan.calls):
        found, grad = founds[i], grads[call.output]
        if grad.dtype is not torch.float32 or grad.requires_grad or not grad.is_contiguous():
            grad = grad.detach().float().contiguous()
        if grad.device != found.ids.device:
            grad = grad.to(found.ids.device)
        if call.fused:
            own, marked = weights[i] if weights else None, marks[i] if call.marked else None
            parts.append((call, Part(found, call.features, grad, offsets[i], own, marked)))
        else:
            parts.append((call, Part(found, call.features, grad)))
    return parts


class _Read(torch.autograd.Function):
    """Reads rows. Its inputs that require gradients are empty: the anchor, so that autograd calls us on the right
    stream, and the root, so that backward ends in the thread that began it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, root: Tensor | None, request: Request) -> Any:  # pyrefly: ignore[bad-override]
        outputs, founds, marks = _read(request, True)
        ctx.plan, ctx.number = request.plan, next(numbers)
        ctx.pooled, ctx.weighted = bool(request.offsets), bool(request.weights)
        # Found is among the saved tensors: recomputation under activation checkpointing replaces only those.
        kept: list[Tensor] = []
        for found in founds:
            kept += found
        ctx.save_for_backward(*kept, *marks, *request.offsets, *request.weights)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:  # pyrefly: ignore[bad-override]
        saved, plan = ctx.saved_tensors, ctx.plan
        n = len(plan.calls)
        founds = [Found(*saved[4 * i : 4 * i + 4]) for i in range(n)]
        marks, at = (saved[4 * n : 5 * n], 5 * n) if plan.marked else (NOTHING, 4 * n)
        offsets = saved[at : at + n] if ctx.pooled else NOTHING
        weights = saved[at + n :] if ctx.weighted else NOTHING
        hand_over(ctx.number, _parts(plan, grads, founds, offsets, weights, marks))
        return None, None, None


_transforms_active = torch._C._are_functorch_transforms_active
# Skips torch's search for functorch wrappers among the arguments.
_apply: Any = super(torch.autograd.Function, _Read).apply  # pyrefly: ignore


# --- under a compiler -------------------------------------------------------------------------------------------------

_dispatch_modes = torch._C._len_torch_dispatch_stack


def _read_by_op(request: Request) -> list[Tensor]:
    plan, ids, sizes, offsets, weights, bags, missing, *_ = request
    flat = [size for own in sizes for size in own]
    outputs = _read_op(ids, offsets, weights, plan.anchor, plan.tape, plan.handle, flat, bags, missing == "initial")
    return outputs[: len(outputs) - 3 * len(plan.calls)]


def _request(
    plan: Plan, ids: list[Tensor], offsets: list[Tensor], weights: list[Tensor], sizes: Sequence[int], bags: int,
    missing: Missing,
) -> Request:  # fmt: skip
    own, rest = [], list(sizes)
    for call in plan.calls:
        n = len(call.features.tables) if rest else 0
        own.append(rest[:n])
        rest = rest[n:]
    return Request(plan, ids, own, offsets, weights, bags, missing)


@torch.library.custom_op("shoal::read_plan", mutates_args=())
def _read_op(
    ids: list[Tensor],
    offsets: list[Tensor],
    weights: list[Tensor],
    anchor: Tensor,
    tape: Tensor,
    handle: int,
    sizes: Sequence[int],
    bags: int,
    initial: bool,
) -> list[Tensor]:
    """Return the results of `_read`, then for each call the bytes of `Found.where`, `Found.came` and the marks."""
    plan = find_plan(handle)
    missing: Missing = "initial" if initial else "zeros"
    try:
        outputs, founds, marks = _read(_request(plan, ids, offsets, weights, sizes, bags, missing), True)
    except Exception as error:
        notify_ranks((call.group for call in plan.calls), error)
        raise
    for i, found in enumerate(founds):
        opaque = (found.where, found.came, marks[i] if marks else found.came.new_empty(0, dtype=torch.uint8))
        plan.opaque[i] = tuple([(one.dtype, one.shape[1:], one.device) for one in opaque])
        outputs += [one.contiguous().view(torch.uint8).view(-1).to(ids[i].device).clone() for one in opaque]
    return outputs


@_read_op.register_fake
def _(ids: list[Tensor], _o: Any, _w: Any, anchor: Tensor, _t: Any, handle: int, _s: Any, bags: int, _i: bool) -> Any:
    plan = find_plan(handle)
    outputs = [anchor.new_empty(bags, plan.width)] if plan.width else []
    outputs += [
        own.new_empty(own.shape[0], call.group.dim, dtype=torch.float32)
        for own, call in zip(ids, plan.calls, strict=True)
        if not call.fused
    ]
    for own in ids:
        outputs += [own.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.uint8) for _ in range(3)]
    return outputs


@torch.library.custom_op("shoal::read_plan_gradient", mutates_args=("tape",))
def _gradient_op(
    grads: list[Tensor],
    ids: list[Tensor],
    opaque: list[Tensor],
    offsets: list[Tensor],
    weights: list[Tensor],
    tape: Tensor,
    handle: int,
    sizes: Sequence[int],
    bags: int,
) -> Tensor:
    """Hand over the gradients of a read; return the (empty) gradient of the anchor."""
    plan = find_plan(handle)
    own = _request(plan, ids, offsets, weights, sizes, bags, "zeros").sizes
    founds, marks = [], []
    for i in range(len(plan.calls)):
        there = zip(opaque[3 * i : 3 * i + 3], plan.opaque[i], strict=True)
        where, came, own_marks = [raw.to(device).view(dtype).view(-1, *tail) for raw, (dtype, tail, device) in there]
        counts = _counts(plan.calls[i], own[i], offsets[i] if offsets else None, bags, bool(weights))
        founds.append(Found(ids[i], counts, where, came))
        marks.append(own_marks)
    hand_over(next(numbers), _parts(plan, grads, founds, offsets, weights, marks))
    tape.add_(1)
    return torch.zeros(0, device=tape.device)


@_gradient_op.register_fake
def _(_grads: Any, _ids: Any, _opaque: Any, _offsets: Any, _weights: Any, tape: Tensor, *_: Any) -> Tensor:
    return tape.new_empty(0, dtype=torch.float32)


def _op_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ids, offsets, weights, _, ctx.tape, ctx.handle, ctx.sizes, ctx.bags, _ = inputs
    plan = ctx.plan = find_plan(ctx.handle)  # a graph keeps its tables alive
    ctx.n, ctx.given = len(ids), len(output) - 3 * len(plan.calls)
    ctx.pooled, ctx.weighted = len(offsets), len(weights)
    ctx.save_for_backward(*ids, *output[ctx.given :], *offsets, *weights)


def _op_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    saved, n = list(ctx.saved_tensors), ctx.n
    ids, opaque, rest = saved[:n], saved[n : 4 * n], saved[4 * n :]
    offsets, weights = rest[: ctx.pooled], rest[ctx.pooled :]
    anchor = _gradient_op(grads[: ctx.given], ids, opaque, offsets, weights, ctx.tape, ctx.handle, ctx.sizes, ctx.bags)
    none = [[None] * n, [None] * ctx.pooled, [None] * ctx.weighted]
    return *none, anchor, None, None, None, None, None


_read_op.register_autograd(_op_backward, setup_context=_op_context)
