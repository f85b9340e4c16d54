"""The gradient driver: from a loss to dense and sparse updates, with clipping and averaging in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.ranks.torch_ranks import default_ranks
from shoal.errors import ConfigError
from shoal.sharded.environment import SyncEnvironment
from shoal.sharded.monolith.clip import GradClipType, clip_gradients, sparse_limit
from shoal.sharded.summary import histogram

__all__ = ["GradClipType", "apply_gradients", "apply_gradients_with_var_optimizer", "control_ops", "dense_opt_ops"]

control_ops: list[Any] = []
"""The reduced dense gradients of the current step; sparse exchanges start after them."""
dense_opt_ops: list[Any] = []
"""The dense updates of the current step; sparse updates start after them."""


def apply_gradients_with_var_optimizer(
    ctx: Any,
    feature_columns: Sequence[Any],
    var_opt: torch.optim.Optimizer,
    loss: Tensor,
    clip_type: GradClipType | int = GradClipType.ClipByGlobalNorm,
    clip_norm: float | None = None,
    global_step: Tensor | None = None,
    grads_and_vars_summary: bool = False,
    use_allreduce: bool = False,
    ue_gradient_check: bool = False,
    ue_fc_names: Sequence[str] = (),
    ue_euclidean_norm_threshold: float = 0.0,
    dense_weight_decay: float = 0.0,
    features: Mapping[str, Any] | None = None,
    sparse_clip_norm: float | None = None,
    sparse_norm_warmup_steps: int | None = None,
    dense_reduce_mean: bool = False,
    batch_size: int | Tensor = 1,
    is_fused_layout: bool = False,
) -> None:
    """Run one training step from a loss: gradients, clipping, averaging of dense gradients, dense and sparse updates.

    Args:
        ctx: has ``apply_embedding_gradients([(gradient, tensor)], scale=1)`` and, for layouts,
            ``layout_factory.flattened_layout()``.
        feature_columns: objects with ``feature_name`` and ``get_all_embeddings_concat()``.
        var_opt: the optimizer of the dense parameters; a parameter's own ``optimizer`` attribute takes precedence.
        global_step: an int64 tensor, incremented by the call.
        use_allreduce: averages dense gradients over the ranks; sparse gradients are never averaged. All ranks must
            call it together; a gradient that only some of them have counts as zeros on the others.
        grads_and_vars_summary: histograms ``<name>/gradient`` (clipped) and ``<name>/value`` of every parameter and
            embedding go to the writer of `set_summary_writer`. A parameter's name is its ``name`` attribute, or
            ``parameter_<i>``.
        ue_gradient_check: gradients of the features ``ue_fc_names`` (and of names with ``uue``) are used only while the
            norm of the feature is above ``ue_euclidean_norm_threshold``.
        dense_reduce_mean: dense gradients are divided by ``batch_size`` before any norm is taken.
    """
    trainable = [p for group in var_opt.param_groups for p in group["params"] if p.requires_grad]
    embeddings, names = _embeddings(ctx, feature_columns, is_fused_layout)
    dense, sparse = _gradients(loss, trainable, embeddings, zeros=is_fused_layout)
    if is_fused_layout:
        kept = list(range(len(embeddings)))
    else:
        kept = [i for i, grad in enumerate(sparse) if grad is not None]
    sparse = [sparse[i] for i in kept]
    embeddings, names = [embeddings[i] for i in kept], [names[i] for i in kept]
    params, dense = _present(trainable, dense)
    env = SyncEnvironment.read()
    reduces = use_allreduce and not env.skip_allreduce
    if not dense and not sparse and not (reduces and default_ranks().world_size > 1):
        return
    if ue_gradient_check:
        norms = _feature_norms(feature_columns, features or {}, is_fused_layout)
        args = (ue_fc_names, norms, ue_euclidean_norm_threshold)
        sparse = [_checked(g, n, e, *args) for g, n, e in zip(sparse, names, embeddings, strict=True)]
        dense = [_checked(g, getattr(p, "name", "") or "", p, *args) for g, p in zip(dense, params, strict=True)]
    if dense_reduce_mean:
        dense = [g / batch_size for g in dense]
    step = int(global_step) if global_step is not None else 0
    limit = sparse_limit(clip_type, clip_norm, sparse_clip_norm, sparse_norm_warmup_steps, step)
    dense, sparse = clip_gradients(dense, sparse, GradClipType(clip_type), clip_norm, limit, step)
    if grads_and_vars_summary:
        _summarise([getattr(p, "name", "") or f"parameter_{i}" for i, p in enumerate(params)], dense, params, step)
        _summarise([n or f"layout_{i}" for i, n in enumerate(names)], sparse, embeddings, step)
    if reduces:
        own = {id(p): g for p, g in zip(params, dense, strict=True)}
        averages = _average_all(trainable, [own.get(id(p)) for p in trainable], bool(dense or sparse), env)
        if averages is None:
            return
        params, dense = _present(trainable, averages)
    control_ops[:] = dense
    if dense_weight_decay:
        dense = [g + dense_weight_decay * p.detach() for g, p in zip(dense, params, strict=True)]
    _update_dense(var_opt, params, dense)
    if sparse:
        ctx.apply_embedding_gradients(list(zip(sparse, embeddings, strict=True)))
    if global_step is not None:
        global_step.add_(1)


def apply_gradients(
    ctx: Any,
    var_opt: torch.optim.Optimizer,
    loss: Tensor,
    clip_type: GradClipType | int = GradClipType.ClipByGlobalNorm,
    clip_norm: float | None = None,
    dense_weight_decay: float = 0.0,
    global_step: Tensor | None = None,
    use_allreduce: bool = False,
) -> None:
    """`apply_gradients_with_var_optimizer` for fused layouts; clips by global norm or by norm if ``clip_norm`` > 0."""
    if GradClipType(clip_type) not in (GradClipType.ClipByGlobalNorm, GradClipType.ClipByNorm):
        raise ConfigError(
            "clip_type of apply_gradients must be ClipByGlobalNorm or ClipByNorm, got "
            f"{GradClipType(clip_type).name}; use apply_gradients_with_var_optimizer"
        )
    apply_gradients_with_var_optimizer(
        ctx, [], var_opt, loss, clip_type, clip_norm if clip_norm and clip_norm > 0 else None, global_step,
        use_allreduce=use_allreduce, dense_weight_decay=dense_weight_decay, is_fused_layout=True,
    )  # fmt: skip


def _embeddings(ctx: Any, columns: Sequence[Any], fused: bool) -> tuple[list[Tensor], list[str]]:
    if fused:
        tensors = list(ctx.layout_factory.flattened_layout())
        return tensors, [getattr(t, "name", "") or "" for t in tensors]
    return [c.get_all_embeddings_concat() for c in columns], [c.feature_name for c in columns]


def _gradients(
    loss: Tensor, params: list[Any], embeddings: list[Tensor], *, zeros: bool
) -> tuple[list[Any], list[Any]]:
    wanted = [*params, *embeddings]
    asked = [t for t in wanted if t.requires_grad]
    found = torch.autograd.grad(loss, asked, allow_unused=True) if asked and loss.requires_grad else [None] * len(asked)
    grads = {id(t): g for t, g in zip(asked, found, strict=True)}
    dense = [grads.get(id(p)) for p in params]
    sparse = [grads.get(id(e)) for e in embeddings]
    if zeros:
        sparse = [torch.zeros_like(e) if g is None else g for g, e in zip(sparse, embeddings, strict=True)]
    return dense, sparse


def _feature_norms(columns: Sequence[Any], features: Mapping[str, Any], fused: bool) -> dict[str, Tensor]:
    norms = {} if fused else {c.feature_name: c.get_all_embeddings_concat().detach().norm() for c in columns}
    norms.update({n: t.detach().float().norm() for n, t in features.items() if isinstance(t, Tensor)})
    return norms


def _checked(
    grad: Tensor, name: str, tensor: Tensor, listed: Sequence[str], norms: Mapping[str, Tensor], threshold: float
) -> Tensor:
    for feature in (*listed, "uue"):
        if feature in name:
            norm = norms.get(feature, norms.get(name))
            norm = tensor.detach().norm() if norm is None else norm
            return grad if float(norm) > threshold else torch.zeros_like(grad)
    return grad


def _summarise(names: Sequence[str], grads: Sequence[Tensor], tensors: Sequence[Tensor], step: int) -> None:
    for name, grad, tensor in zip(names, grads, tensors, strict=True):
        histogram(f"{name}/gradient", grad.detach(), step)
        histogram(f"{name}/value", tensor.detach(), step)


def _present(params: Sequence[Any], grads: Sequence[Tensor | None]) -> tuple[list[Any], list[Tensor]]:
    """The parameters that have a gradient, and their gradients."""
    pairs = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
    return [p for p, _ in pairs], [g for _, g in pairs]


def _average_all(
    params: Sequence[Any], grads: Sequence[Tensor | None], used: bool, env: SyncEnvironment
) -> Sequence[Tensor | None] | None:
    """Average the gradients of all parameters over ranks; a parameter without one on every rank stays without.

    ``used``: whether this rank has any gradient, also a sparse one. Returns None if no rank has.
    """
    ranks = default_ranks()
    if ranks.world_size == 1:
        average([], env)  # refuses a wrong setting
        return grads
    has = torch.tensor([used, *(g is not None for g in grads)], device=params[0].device if params else "cpu")
    has = ranks.on_wire(has.float())
    running = ranks.start_reduce(has)
    averages = average([torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)], env)
    running.wait()
    if all(g is not None for g in grads) and used:
        return averages  # without waiting for a GPU
    somewhere, *kept = (has > 0).tolist()
    return [g if keep else None for g, keep in zip(averages, kept, strict=True)] if somewhere else None


def average(grads: list[Tensor], env: SyncEnvironment | None = None) -> list[Tensor]:
    """Average dense gradients over all ranks: tensor by tensor, as one buffer, or as one group, as configured."""
    env = env or SyncEnvironment.read()
    if env.allreduce_fusion == "multi":
        raise ConfigError("MONOLITH_WITH_ALLREDUCE_FUSION must be 'one', 'grouped' or empty, got 'multi'")
    ranks = default_ranks()
    if not grads or ranks.world_size == 1:
        return grads
    dtype = torch.float16 if env.allreduce_fp16 else None
    sent = [g.to(dtype) if dtype else g.clone() for g in grads]
    if env.allreduce_fusion == "one":
        flat = torch.cat([g.reshape(-1) for g in sent])
        flat = ranks.on_wire(flat)
        ranks.start_reduce(flat).wait()
        parts = torch.split(flat, [g.numel() for g in sent])
        sent = [part.view(g.shape) for part, g in zip(parts, sent, strict=True)]
    else:
        sent = [ranks.on_wire(g) for g in sent]
        for work in [ranks.start_reduce(g) for g in sent]:
            work.wait()
    return [s.to(g) / ranks.world_size for s, g in zip(sent, grads, strict=True)]


def _update_dense(var_opt: torch.optim.Optimizer, params: list[Any], grads: list[Tensor]) -> None:
    """Set the gradients and step every optimizer on its own parameters."""
    dense_opt_ops.clear()
    own: dict[int, tuple[Any, list[Any]]] = {}
    everything = [p for group in var_opt.param_groups for p in group["params"]]
    for p in everything:
        p.grad = None
    for p, grad in zip(params, grads, strict=True):
        optimizer = getattr(p, "optimizer", None)
        if optimizer is not None and optimizer is not var_opt:
            own.setdefault(id(optimizer), (optimizer, []))[1].append((p, grad))
        else:
            p.grad = grad
    if any(p.grad is not None for p in everything):
        var_opt.step()
        dense_opt_ops.append(var_opt)
    for optimizer, pairs in own.values():
        for p, grad in pairs:
            p.grad = grad
        optimizer.step()
        dense_opt_ops.append(optimizer)
    for p in everything:
        p.grad = None
