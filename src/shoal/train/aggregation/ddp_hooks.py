"""Communication hooks for DistributedDataParallel: top-k with error feedback, and torch's own hooks by name."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shoal.comm.ranks import collectives
from shoal.comm.ranks.torch_ranks import default_ranks
from shoal.errors import CompressionError, ConfigError, ShapeError
from shoal.train.aggregation.compressed import pack, unpack
from shoal.train.aggregation.compression import CompressedGradient, clamped, compress_gradients, compress_with_feedback
from shoal.train.aggregation.exchange import divide_


class TopKState:
    """The state of ``topk_hook`` between steps.

    Args:
        start_step: the number of initial steps with a plain all-reduce, because early gradients are large and dense.
        min_numel: parameters with fewer elements always use a plain all-reduce.

    Unsent values are kept by parameter, because DDP rebuilds its buckets after the first backward. NaN and infinity are
    sent like any value, so that all ranks see them (a ``GradScaler`` then skips the step on all ranks); the memory of
    that parameter does not change.
    """

    def __init__(
        self,
        ratio: float,
        error_feedback: bool = True,
        decay: float = 1.0,
        group: collectives.Group = None,
        start_step: int = 2,
        min_numel: int = 1024,
    ) -> None:
        if start_step < 0 or min_numel < 0:
            raise ConfigError(f"TopKState: start_step and min_numel must be >= 0, got {start_step} and {min_numel}")
        self.ratio = clamped(ratio)
        self.error_feedback = error_feedback
        self.decay = decay
        self.group = group
        self.start_step = start_step
        self.min_numel = min_numel
        self.step = 0
        self.memory: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def reset(self) -> None:
        """Forget the values that were not sent; call it after skipped steps."""
        self.memory.clear()

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """This rank's step and memory, by the names of ``module``'s parameters; every rank saves its own."""
        memory = {name: self.memory[p].clone() for name, p in module.named_parameters() if p in self.memory}
        return {"step": self.step, "memory": memory}

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module) -> None:
        """Restore this rank's ``state_dict``; raises ``ShapeError`` and changes nothing if ``module`` does not fit."""
        parameters = dict(module.named_parameters())
        for name, kept in state["memory"].items():
            if name not in parameters or parameters[name].shape != kept.shape:
                raise ShapeError(
                    f"TopKState: the memory of {name!r} has shape {tuple(kept.shape)}; the module has "
                    f"{tuple(parameters[name].shape) if name in parameters else 'no such parameter'}"
                )
        self.reset()
        self.step = int(state["step"])
        for name, kept in state["memory"].items():
            self.memory[parameters[name]] = kept.detach().to(parameters[name].device, torch.float32, copy=True)

    def compress(self, parameter: Tensor, gradient: Tensor) -> CompressedGradient:
        kept = self.memory.get(parameter) if self.error_feedback else None
        try:
            sent, rest = compress_with_feedback(gradient, kept, self.ratio, self.decay)
        except CompressionError:
            return compress_gradients([gradient], self.ratio, nonfinite="keep")[0]
        if self.error_feedback:
            self.memory[parameter] = rest
        return sent


def topk_hook(state: TopKState, bucket: collectives.GradBucket) -> torch.futures.Future[Tensor]:
    """Average each gradient's largest values over ranks; for ``DistributedDataParallel.register_comm_hook``."""
    ranks = default_ranks(state.group)
    world = ranks.world_size
    flat = bucket.buffer()
    step = state.step
    if bucket.is_last():
        state.step += 1
    parameters, gradients = bucket.parameters(), bucket.gradients()
    large = [
        (p, g)
        for p, g in zip(parameters, gradients, strict=True)
        if step >= state.start_step and p.numel() >= state.min_numel
    ]
    if not large:
        return ranks.start_reduce(divide_(flat, world)).get_future().then(lambda done: done.value()[0])
    chosen = {id(p) for p, _ in large}
    small = [g for p, g in zip(parameters, gradients, strict=True) if id(p) not in chosen]
    compressed = [state.compress(p, g) for p, g in large]
    mine = pack(compressed)
    everyone = torch.empty(world * len(mine), dtype=torch.uint8, device=mine.device)
    running = [ranks.start_gather(everyone, mine).get_future()]
    if small:
        dense = torch.cat([g.reshape(-1) for g in small])
        running.append(ranks.start_reduce(dense).get_future())

    def write_back(done: Any) -> Tensor:
        for future in done.value():
            future.value()  # raises the backend's error, if any
        by_rank = [unpack(part, compressed) for part in everyone.reshape(world, -1)]
        for i, (_, gradient) in enumerate(large):
            gradient.zero_()
            target = gradient.view(-1)
            for parts in by_rank:
                target.index_add_(0, parts[i].indices, parts[i].values)
            divide_(target, world)
        if small:
            divide_(dense, world)
            for gradient, part in zip(small, dense.split([g.numel() for g in small]), strict=True):
                gradient.copy_(part.view(gradient.shape))
        return flat

    return torch.futures.collect_all(running).then(write_back)


def make_hook(
    name: str, **kw: Any
) -> tuple[Any, Callable[[Any, collectives.GradBucket], "torch.futures.Future[Tensor]"]]:
    """``(state, hook)`` for ``register_comm_hook``; ``kw`` are the state's arguments.

    ``name`` is one of ``topk``, ``powersgd``, ``fp16``, ``bf16``, ``allreduce``.

    Example:
        >>> state, hook = make_hook("topk", ratio=0.01)
        >>> ddp.register_comm_hook(state, hook)  # doctest: +SKIP
    """
    default_hooks, powerSGD_hook = collectives.torch_hooks()

    if name == "topk":
        return TopKState(**kw), topk_hook
    if name == "powersgd":
        return powerSGD_hook.PowerSGDState(
            kw.pop("process_group", kw.pop("group", None)), **kw
        ), powerSGD_hook.powerSGD_hook
    plain = {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "allreduce": default_hooks.allreduce_hook,
    }
    if name not in plain:
        raise ConfigError(f"make_hook: name must be one of topk, powersgd, {', '.join(plain)}, got {name!r}")
    group = kw.pop("process_group", kw.pop("group", None))
    if kw:
        raise ConfigError(f"make_hook: {name!r} takes no argument except a process group (group=), got {sorted(kw)}")
    return group, plain[name]
