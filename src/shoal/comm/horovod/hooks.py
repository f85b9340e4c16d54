"""Hooks around training steps, and the two that every synchronous rank runs."""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.horovod import hvd_lib

logger = logging.getLogger(__name__)


class SessionRunHook:
    """Methods that the training loop calls around every step; by default each does nothing."""

    def begin(self) -> None: ...

    def after_create_session(self, ctx: Any) -> None: ...

    def before_run(self, ctx: Any) -> None: ...

    def after_run(self, ctx: Any, values: Any) -> None: ...

    def before_save(self, ctx: Any, global_step: int) -> None: ...

    def after_save(self, ctx: Any, global_step: int) -> None: ...

    def end(self, ctx: Any) -> None: ...


class RunContext:
    """The part of the training loop that hooks see: ``model``, ``global_step`` and ``request_stop()``."""

    def __init__(self, model: nn.Module | None = None, global_step: int = 0) -> None:
        self.model = model
        self.global_step = global_step
        self.stop_requested = False

    def request_stop(self) -> None:
        """Stop training after this step."""
        self.stop_requested = True


class BroadcastGlobalVariablesHook(SessionRunHook):
    """At the start, broadcast ``root_rank``'s parameters and buffers of ``ctx.model``, by sorted name, and its step."""

    def __init__(self, root_rank: int = 0, device: str = "", backend: str | None = None) -> None:
        hvd_lib.require()
        self.root_rank = root_rank
        self.device = device
        self.backend = backend

    def after_create_session(self, ctx: Any) -> None:
        if hvd_lib.size() == 1:
            return
        with torch.no_grad():
            for _, tensor in sorted(_named_tensors(ctx)):
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                local.copy_(hvd_lib.broadcast(local, self.root_rank))
            step = getattr(ctx, "global_step", None)
            if isinstance(step, Tensor):
                step.copy_(hvd_lib.broadcast(step, self.root_rank))
            elif step is not None:
                ctx.global_step = int(hvd_lib.broadcast(torch.tensor(int(step), device="cpu"), self.root_rank))


def _named_tensors(ctx: Any) -> list[tuple[str, Tensor]]:
    model = getattr(ctx, "model", None)
    if model is None:
        model = getattr(ctx, "module", None)
    if model is None:
        return []
    return [*model.named_parameters(), *model.named_buffers()]


class ByteCCLTelemetryHook(SessionRunHook):
    """Log the duration of collectives on rank 0, more than ``interval`` steps apart."""

    MAX_PUSH_PULL = 3

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._last = 0

    def after_create_session(self, ctx: Any) -> None:
        if getattr(ctx, "global_step", None) is None:
            raise RuntimeError("ByteCCLTelemetryHook: the session has no global step; give the context one")

    def after_run(self, ctx: Any, values: Any) -> None:
        step = int(ctx.global_step)
        if step <= self._last + self.interval:
            return
        self._last = step
        if hvd_lib.rank() != 0:
            return
        push_pulls = 0
        for name, mean, stdev, count in hvd_lib.get_telemetry():
            if "alltoall" not in name.lower():
                if "PushPull" not in name or push_pulls == self.MAX_PUSH_PULL:
                    continue
                push_pulls += 1
            logger.info("name: %s mean(ms): %.2f stdev(ms): %.2f count: %d", name, mean, stdev, count)
