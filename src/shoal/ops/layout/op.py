"""`fused_embedding_to_layout` and `fused_embedding_to_layout_grad`."""

import math
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.buffers import empty_flat
from shoal.errors import ConfigError
from shoal.lazy import constant_result
from shoal.ops import checks
from shoal.ops._op import Op
from shoal.ops.layout import reference
from shoal.ops.layout.blocks import Request, requests_of
from shoal.ops.layout.plan import Plan, plan_of, plan_of_key

_OP = "fused_embedding_to_layout"
_VARIANTS = ("example", "example_batch", "examplebatch", "instance")
_SIZES = ("nfl_size", "feature_size", "fid_size", "emb_size")


def fused_embedding_to_layout(
    embeddings_list: Any,
    fid_list_row_split: Any,
    fid_offset: Any,
    feature_offset: Any,
    nfl_offset: Any,
    batch_size: Any,
    variant_type: str,
    feature_cfgs: Any,
    ps_num: int,
    fid_list_emb_row_lenth: Any = None,
    nfl_size: Any = None,
    feature_size: Any = None,
    fid_size: Any = None,
    emb_size: Any = None,
    parallel_flag: int = 0,
    version: int = 3,
) -> list[Tensor]:
    """Pool the embeddings of each sample's fids and place the slices in the layouts' tensors.

    Args:
        embeddings_list: float tensors. Version 1: any number of ``[rows, width]``; 2, 3 and 5: a flat one per table
            and shard, table-major; 4: exactly one. Gradients flow to them.
        fid_list_row_split: version 2 only: per tensor, the row splits of its features.
        fid_offset: int64 or uint64; the upper 32 bits are the number of a block, the lower ones the place in it.
        feature_offset: int32; the start of each row in ``fid_offset``.
        nfl_offset: uint32 per feature in sorted order: bit 31 says that it is shared, the rest is its first row.
        batch_size: one number; version 5: one per request.
        variant_type: ``example``, ``example_batch``, ``examplebatch`` or ``instance``; the result is the same.
        feature_cfgs: `FeatureConfigs`, or its proto bytes.
        ps_num: shards per table; 0 means 1.
        fid_list_emb_row_lenth: version 4 only: floats per (shard, table) piece.
        nfl_size, feature_size, fid_size, emb_size: version 5 only: how the inputs are cut into requests.
        parallel_flag: the result is the same for any value.
        version: 2, 3, 4 or 5; any other number is 1.

    Returns:
        The tensors of all layouts in sorted order of their names; `nest_layout` turns them into a dict.
    """
    arguments = _arguments(
        _OP, embeddings_list, fid_list_row_split, fid_offset, feature_offset, nfl_offset, batch_size, variant_type,
        feature_cfgs, ps_num, fid_list_emb_row_lenth, (nfl_size, feature_size, fid_size, emb_size), version,
    )  # fmt: skip
    return _layout(*arguments)


def fused_embedding_to_layout_grad(
    nfl_offset: Any,
    feature_offset: Any,
    fid_offset: Any,
    batch_size: Any,
    embeddings_list: Any,
    fid_list_row_split: Any,
    layout_tensors_grad: Any,
    variant_type: str,
    feature_cfgs: Any,
    ps_num: int,
    fid_list_emb_row_lenth: Any = None,
    layout_tensors_grad_scale: Any = None,
    parallel_flag: int = 0,
    version: int = 3,
    *,
    nfl_size: Any = None,
    feature_size: Any = None,
    fid_size: Any = None,
    emb_size: Any = None,
) -> list[Tensor]:
    """The gradient of `fused_embedding_to_layout` with respect to its embeddings.

    ``layout_tensors_grad`` holds the upstream gradient of every output, each multiplied by
    ``layout_tensors_grad_scale`` if given. Of ``embeddings_list`` only the shapes matter. Version 5 without sizes is a
    single request, the same as version 3.
    """
    op = "fused_embedding_to_layout_grad"
    sizes = (nfl_size, feature_size, fid_size, emb_size)
    if version == 5 and all(size is None for size in sizes):
        version = 3
    embeddings, *arguments = _arguments(
        op, embeddings_list, fid_list_row_split, fid_offset, feature_offset, nfl_offset, batch_size, variant_type,
        feature_cfgs, ps_num, fid_list_emb_row_lenth, sizes, version,
    )  # fmt: skip
    embeddings = [checks.constant(e) for e in embeddings]
    grads = [checks.constant(g) for g in checks.float_list(layout_tensors_grad, op, "layout_tensors_grad")]
    scale = 1.0
    if layout_tensors_grad_scale is not None:
        grads, scale = checks.scaled(grads, layout_tensors_grad_scale, op, "layout_tensors_grad_scale")
    return _layout_grad(grads, scale, embeddings, *arguments)


def _arguments(
    op: str, embeddings: Any, row_splits: Any, fid_offset: Any, feature_offset: Any, nfl_offset: Any, batch_size: Any,
    variant_type: str, feature_cfgs: Any, ps_num: int, row_lengths: Any, sizes: tuple[Any, ...], version: int,
) -> tuple[Any, ...]:  # fmt: skip
    """The op's arguments in the order of its schema."""
    if variant_type not in _VARIANTS:
        raise ConfigError(f"{op}: variant_type must be one of {', '.join(_VARIANTS)}, got {variant_type!r}")
    version = int(version) if version in (2, 3, 4, 5) else 1
    if version == 4:
        row_lengths = _required(op, row_lengths, "fid_list_emb_row_lenth", version)
    elif row_lengths is not None:
        raise ConfigError(
            f"{op}: fid_list_emb_row_lenth must be None except in version 4, got a value in version {version}"
        )
    if version != 1 and ps_num < 0:
        raise ConfigError(f"{op}: ps_num must be >= 0, got {ps_num}")
    embeddings = checks.float_list(embeddings, op, "embeddings_list")
    if version == 2:
        row_splits = _required(op, row_splits, "fid_list_row_split", version)
        row_splits = [checks.int64(s, op, f"fid_list_row_split[{i}]") for i, s in enumerate(row_splits)]
    else:
        row_splits = []
    if version == 4:
        tensors = [checks.int64(row_lengths, op, "fid_list_emb_row_lenth")]
    elif version == 5:
        tensors = [
            checks.int64(_required(op, s, name, version), op, name).reshape(-1)
            for s, name in zip(sizes, _SIZES, strict=True)
        ]
    else:
        tensors = []
    fid_offset = _required(op, fid_offset, "fid_offset", version)
    if isinstance(fid_offset, Tensor) and fid_offset.dtype is torch.uint64:
        fid_offset = fid_offset.view(torch.int64)
    return (
        embeddings,
        _vector(op, fid_offset, "fid_offset", version),
        _vector(op, feature_offset, "feature_offset", version),
        _vector(op, nfl_offset, "nfl_offset", version),
        _batch_sizes(op, _required(op, batch_size, "batch_size", version)),
        plan_key(feature_cfgs),
        max(1, int(ps_num)),
        version,
        row_splits,
        tensors,
    )


@constant_result
def plan_key(feature_cfgs: Any) -> str:
    """The string that represents a configuration in a traced program."""
    return plan_of(feature_cfgs).key


def _required(op: str, value: Any, name: str, version: int) -> Any:
    if value is None:
        raise ConfigError(f"{op}: version {version} needs {name}, got None")
    return value


def _vector(op: str, value: Any, name: str, version: int) -> Tensor:
    return checks.vector(_required(op, value, name, version), op, name)


def _batch_sizes(op: str, batch_size: Any) -> list[int]:
    if isinstance(batch_size, int | torch.SymInt):
        return [batch_size]  # type: ignore[list-item]
    return checks.int64(batch_size, op, "batch_size").reshape(-1).tolist()


def _requests(plan: Plan, args: tuple[Any, ...]) -> list[Request]:
    embeddings, fid_offset, feature_offset, nfl_offset, batch_size, _, ps_num, version, row_splits, sizes = args
    if any(e.dtype != embeddings[0].dtype for e in embeddings):
        raise ConfigError(
            f"{_OP}: all embeddings must have one dtype, got {sorted({str(e.dtype) for e in embeddings})}"
        )
    return requests_of(
        plan, embeddings, fid_offset, feature_offset, nfl_offset, batch_size, ps_num, version, row_splits, sizes
    )


def _zeros(shape: list[int], like: list[Tensor]) -> Tensor:
    if like and like[0].dtype is not torch.float32:
        return like[0].new_zeros(shape)
    return empty_flat(math.prod(shape)).zero_().view(shape)


def _native(
    kernel: Any, plan: Plan, requests: list[Request], blocks: list[Tensor], args: tuple[Any, ...], *rest: Any
) -> None:
    fids, rows, nfl = (t.contiguous() for t in args[1:4])
    tasks = plan.native
    for q in requests:
        kernel(
            tasks.data_ptr(), tasks.shape[0], len(plan.feature_names),
            nfl.data_ptr() + 8 * q.nfl[0], q.nfl[1], rows.data_ptr() + 8 * q.rows[0], q.rows[1],
            fids.data_ptr() + 8 * q.fids[0], q.fids[1], q.batch, q.first_row,
            [blocks[b.source].data_ptr() + b.start * blocks[b.source].element_size() for b in q.blocks],
            [b.size for b in q.blocks], [b.stride for b in q.blocks], args[7] > 2, *rest,
        )  # fmt: skip


def _layout_cpu(*args: Any) -> list[Tensor]:
    plan = plan_of_key(args[5])
    requests = _requests(plan, args)
    embeddings = [e.detach().contiguous() for e in args[0]]
    outs = [_zeros(reference.output_shape(shape, sum(args[4])), embeddings) for shape in plan.shapes]
    wide = bool(embeddings) and embeddings[0].dtype is torch.float64
    _native(_core.embedding_to_layout, plan, requests, embeddings, args, [o.data_ptr() for o in outs], wide)
    return outs


def _layout_reference(*args: Any) -> list[Tensor]:
    plan = plan_of_key(args[5])
    return reference.embedding_to_layout(plan, _requests(plan, args), args[0], args[1], args[2], args[3])


def _layout_fake(*args: Any) -> list[Tensor]:
    plan = plan_of_key(args[5])
    batch = sum(args[4])
    like = args[0][0] if args[0] else args[1].new_empty(0, dtype=torch.float32)
    return [like.new_empty([batch if s[0] == -1 else s[0], *s[1:]]) for s in plan.shapes]


def _check_grads(plan: Plan, grads: list[Tensor], embeddings: list[Tensor], batch: int) -> None:
    if len(grads) != len(plan.shapes):
        raise ConfigError(f"{_OP}_grad: there must be {len(plan.shapes)} gradients, one per output, got {len(grads)}")
    for i, (grad, shape) in enumerate(zip(grads, plan.shapes, strict=True)):
        wanted = reference.output_shape(shape, batch)
        if list(grad.shape) != wanted or (embeddings and grad.dtype != embeddings[0].dtype):
            raise ConfigError(
                f"{_OP}_grad: gradient {i} must be {embeddings[0].dtype if embeddings else ''} {wanted},"
                f" got {grad.dtype} {list(grad.shape)}"
            )


def _layout_grad_cpu(grads: list[Tensor], scale: float, *args: Any) -> list[Tensor]:
    plan = plan_of_key(args[5])
    requests = _requests(plan, args)
    _check_grads(plan, grads, args[0], sum(args[4]))
    grads = [g.contiguous() for g in grads]
    outs = [_zeros(list(e.shape), args[0]) for e in args[0]]
    wide = bool(outs) and outs[0].dtype is torch.float64
    _native(_core.embedding_to_layout_gradient, plan, requests, outs, args, [g.data_ptr() for g in grads], wide, scale)
    return outs


def _layout_grad_reference(grads: list[Tensor], scale: float, *args: Any) -> list[Tensor]:
    plan = plan_of_key(args[5])
    requests = _requests(plan, args)
    _check_grads(plan, grads, args[0], sum(args[4]))
    with torch.enable_grad():
        leaves = [e.detach().requires_grad_() for e in args[0]]
        outs = reference.embedding_to_layout(plan, requests, leaves, args[1], args[2], args[3])
        pairs = [(o, g * scale) for o, g in zip(outs, grads, strict=True) if o.requires_grad]
        if not pairs:
            return [torch.zeros_like(e) for e in args[0]]
        return list(torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs], materialize_grads=True))


_SCHEMA = (
    "Tensor[] embeddings, Tensor fid_offset, Tensor feature_offset, Tensor nfl_offset, SymInt[] batch_size,"
    " str feature_cfgs, int ps_num, int version, Tensor[] row_splits, Tensor[] sizes"
)
_layout = Op(
    f"embedding_to_layout({_SCHEMA}) -> Tensor[]",
    cpu=_layout_cpu,
    reference=_layout_reference,
    cuda="layout:embedding_to_layout",
    host=(8, 9),
    sums=True,
    fake=_layout_fake,
)
_layout_grad = Op(
    f"embedding_to_layout_grad(Tensor[] grads, float scale, {_SCHEMA}) -> Tensor[]",
    cpu=_layout_grad_cpu,
    reference=_layout_grad_reference,
    backward=True,
    cuda="layout:embedding_to_layout_grad",
    host=(10, 11),
    sums=True,
    fake=lambda grads, scale, *args: [torch.empty_like(e, memory_format=torch.contiguous_format) for e in args[0]],
)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    embeddings, fid_offset, feature_offset, nfl_offset, *ctx.rest, row_splits, sizes = inputs
    ctx.counts = (len(embeddings), len(row_splits), len(sizes))
    ctx.save_for_backward(fid_offset, feature_offset, nfl_offset, *embeddings, *row_splits, *sizes)


def _backward(ctx: Any, grads: list[Tensor]) -> Any:
    fid_offset, feature_offset, nfl_offset, *lists = ctx.saved_tensors
    n, splits, sizes = ctx.counts
    embeddings, row_splits, sizes_ = lists[:n], lists[n : n + splits], lists[n + splits :]
    out = _layout_grad(
        list(grads), 1.0, embeddings, fid_offset, feature_offset, nfl_offset, *ctx.rest, row_splits, sizes_
    )
    return out, None, None, None, None, None, None, None, [None] * splits, [None] * sizes


_layout.register_gradient(_backward, _setup)
