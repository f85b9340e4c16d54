"""Shard dense tensors over ranks in two layouts, and modules by FSDP2."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, ShapeError

LAYOUTS = ("balanced", "dtensor")


def shard_sizes(n: int, parts: int, layout: str = "balanced") -> list[int]:
    """Sizes of ``parts`` shards of ``n`` rows.

    ``balanced``: sizes differ by at most one, larger first. ``dtensor``: ceil-chunks, as DTensor and FSDP2 place them;
    trailing parts can be empty. The layouts differ, so record with saved shards which one was used.

    Example:
        >>> shard_sizes(10, 4), shard_sizes(10, 4, "dtensor")
        ([3, 3, 2, 2], [3, 3, 3, 1])
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"shard_sizes: layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if n < 0 or parts < 1:
        raise ConfigError(f"shard_sizes: n must be >= 0 and parts >= 1, got n={n}, parts={parts}")
    if layout == "balanced":
        return [n // parts + (i < n % parts) for i in range(parts)]
    chunk = -(-n // parts)
    return [max(0, min(chunk, n - i * chunk)) for i in range(parts)]


def shard_tensor(tensor: Tensor, num_shards: int, dim: int = 0, layout: str = "balanced") -> list[Tensor]:
    """Contiguous copies of ``tensor``'s shards along ``dim``."""
    if num_shards < 1:
        raise ConfigError(f"shard_tensor: num_shards must be at least 1, got {num_shards}")
    if layout not in LAYOUTS:
        raise ConfigError(f"shard_tensor: layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if tensor.ndim == 0:
        if num_shards > 1:
            raise ShapeError(f"shard_tensor: num_shards must be 1 for a 0-d tensor, got {num_shards}")
        return [tensor.clone()]
    dim = _dim(dim, tensor.ndim, "shard_tensor")
    size = tensor.shape[dim]
    if layout == "balanced" and num_shards > size:
        raise ShapeError(f"shard_tensor: num_shards must be at most {size}, the size of dim {dim}, got {num_shards}")
    starts = itertools.accumulate(shard_sizes(size, num_shards, layout), initial=0)
    return [
        tensor.narrow(dim, a, b - a).clone(memory_format=torch.contiguous_format) for a, b in itertools.pairwise(starts)
    ]


def gather_shards(shards: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The tensor that ``shards`` were cut from along ``dim``."""
    if not shards:
        raise ShapeError("gather_shards: shards must not be empty")
    first = shards[0]
    if first.ndim == 0:
        raise ShapeError("gather_shards: 0-d shards cannot be joined along a dimension")
    dim = _dim(dim, first.ndim, "gather_shards")
    for i, shard in enumerate(shards):
        others = [n for d, n in enumerate(shard.shape) if d != dim]
        if shard.ndim != first.ndim or others != [n for d, n in enumerate(first.shape) if d != dim]:
            raise ShapeError(
                f"gather_shards: shards must have the same shape except in dim {dim}, but shard {i} has "
                f"{tuple(shard.shape)} and shard 0 has {tuple(first.shape)}"
            )
        if (shard.dtype, shard.device) != (first.dtype, first.device):
            raise ShapeError(
                f"gather_shards: shards must have one dtype and device, but shard {i} is {shard.dtype} on "
                f"{shard.device} and shard 0 is {first.dtype} on {first.device}"
            )
    return torch.cat(list(shards), dim)


def _dim(dim: int, ndim: int, who: str) -> int:
    if not -ndim <= dim < ndim:
        raise ShapeError(f"{who}: dim must be {-ndim}..{ndim - 1} for a tensor of {ndim} dimensions, got {dim}")
    return dim % ndim


def shard_module(
    module: nn.Module,
    mesh: Any,
    *,
    policy: Callable[[str, nn.Module], bool] | None = None,
    reshard_after_forward: bool = True,
    mixed_precision: Any = None,
) -> nn.Module:
    """Shard ``module`` over ``mesh`` by FSDP2: parameters are gathered before use, gradients reduce-scattered.

    Args:
        policy: ``policy(name, submodule)`` returns True for submodules that are gathered as one unit; by default each
            child of an ``nn.ModuleList`` or ``nn.Sequential``. All other parameters form one more unit, the root.
        mixed_precision: torch's ``MixedPrecisionPolicy``, or None.

    Returns:
        ``module`` itself.
    """
    from torch.distributed.fsdp import fully_shard

    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
    if mixed_precision is not None:
        options["mp_policy"] = mixed_precision
    if policy is None:
        chosen = {
            f"{name}.{child}" if name else child
            for name, parent in module.named_modules()
            if isinstance(parent, nn.ModuleList | nn.Sequential)
            for child, _ in parent.named_children()
        }
        policy = lambda name, _: name in chosen  # noqa: E731
    units = [(name, sub) for name, sub in module.named_modules() if name and policy(name, sub)]
    for _, sub in sorted(units, key=lambda unit: -unit[0].count(".")):
        if not isinstance(sub, nn.ModuleList | nn.ModuleDict) and any(True for _ in sub.parameters()):
            fully_shard(sub, **options)
    fully_shard(module, **options)
    return module


def local_shard(param: Tensor) -> Tensor:
    """This rank's part of a sharded parameter; a plain tensor is returned unchanged."""
    to_local = getattr(param, "to_local", None)
    return to_local() if to_local is not None else param


def full_tensor(param: Tensor) -> Tensor:
    """The complete tensor of a sharded parameter, gathered on every rank (a collective), or a plain tensor."""
    gather = getattr(param, "full_tensor", None)
    return gather() if gather is not None else param
