"""Reduce gradients during the backward pass, for modules that DDP cannot wrap."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.ranks.torch_ranks import default_ranks
from shoal.errors import ConfigError, DistributedError
from shoal.train.aggregation.aggregate import new_stats
from shoal.train.aggregation.buckets import BUCKET_BYTES, gradient_of, make_buckets
from shoal.train.aggregation.exchange import divide_, named_errors

Hook = Callable[[int, Tensor], "torch.futures.Future[Tensor]"]


class OverlappedReducer:
    """Averages a module's gradients over ``group``, bucket by bucket as backward fills them.

    The constructor assigns trainable parameters to buckets in the reverse order of registration; ``buckets`` lists, in
    launch order, the positions of each bucket's parameters. Call ``finish()`` after every backward, before the
    optimizer's step.

    Args:
        group: None is the default group, or a single rank when no group was initialised.
        hook: ``hook(bucket_index, flat)`` replaces the all-reduce; its result is written back unchanged.

    Example:
        >>> reducer = OverlappedReducer(model)
        >>> loss.backward(); reducer.finish(); optimizer.step()  # doctest: +SKIP
    """

    def __init__(
        self,
        module: nn.Module,
        group: Any = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        hook: Hook | None = None,
        average: bool = True,
    ) -> None:
        if bucket_bytes < 1:
            raise ConfigError(f"OverlappedReducer: bucket_bytes must be at least 1, got {bucket_bytes}")
        self.ranks = default_ranks(group)
        self.world_size, self.rank = self.ranks.world_size, self.ranks.rank
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.average = average
        self.hook = hook
        last = len(self.parameters) - 1
        self.buckets = [[last - i for i in b] for b in make_buckets(self.parameters[::-1], bucket_bytes)]
        self.last_stats: dict[str, Any] = {**new_stats("overlapped"), "exposed_s": 0.0}
        self._bucket_of = {i: b for b, bucket in enumerate(self.buckets) for i in bucket}
        self._suspended = False
        self._handles = [
            p.register_post_accumulate_grad_hook(lambda _, i=i: self._ready(i)) for i, p in enumerate(self.parameters)
        ]
        self._start()

    def _start(self) -> None:
        self._pending = [set(bucket) for bucket in self.buckets]
        self._launched = 0
        self._running: list[tuple[Tensor, Any]] = []

    def _ready(self, i: int) -> None:
        if self._suspended:
            return
        if self._bucket_of[i] < self._launched:
            raise DistributedError(
                "OverlappedReducer: backward reached a parameter whose bucket is already being reduced; call finish() "
                "after every backward, and run all but the last backward of an accumulation inside no_sync()"
            )
        self._pending[self._bucket_of[i]].discard(i)
        # Buckets are launched in the same order on all ranks; collectives in different orders would hang.
        while self._launched < len(self.buckets) and not self._pending[self._launched]:
            self._launch()

    def _launch(self) -> None:
        b = self._launched
        self._launched += 1
        flat = torch.cat([gradient_of(self.parameters[i]).detach().reshape(-1) for i in self.buckets[b]])
        if self.hook is not None:
            work: Any = self.hook(b, flat)
        elif self.world_size > 1:
            with named_errors(f"all_reduce of bucket {b}", self.rank):
                flat = self.ranks.on_wire(flat)
                work = self.ranks.start_reduce(flat)
        else:
            work = None
        self._running.append((flat, work))

    def finish(self) -> None:
        """Reduce the remaining buckets, wait, and write the means into ``grad``.

        A parameter without a gradient counts as zeros, and keeps ``grad=None`` when no rank had one. Sparse gradients
        become dense.
        """
        try:
            self._finish()
        finally:
            self._start()

    def _finish(self) -> None:
        began = time.perf_counter()
        had = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.uint8, device="cpu")
        while self._launched < len(self.buckets):
            self._launch()
        if self.world_size > 1 and len(had):
            had = self.ranks.on_wire(had.to(self.parameters[0].device))
            with named_errors("all_reduce of the bitmap of gradients", self.rank):
                self.ranks.start_reduce(had, "max").wait()
        present = had.tolist()
        moved = 0
        for bucket, (flat, work) in zip(self.buckets, self._running, strict=True):
            flat = self._wait(flat, work)
            moved += 2 * (self.world_size - 1) * flat.nbytes // self.world_size
            sizes = [self.parameters[i].numel() for i in bucket]
            for i, part in zip(bucket, flat.split(sizes), strict=True):
                self._write(self.parameters[i], part, bool(present[i]))
        exposed = time.perf_counter() - began
        self.last_stats = {
            **new_stats("overlapped"),
            "bytes_sent": moved,
            "bytes_received": moved,
            "messages": len(self.buckets),
            "buckets": len(self.buckets),
            "wait_s": exposed,
            "exposed_s": exposed,
        }

    def _wait(self, flat: Tensor, work: Any) -> Tensor:
        if self.hook is not None:
            return work.wait()
        if work is not None:
            with named_errors("all_reduce of a bucket", self.rank):
                work.wait()
        return divide_(flat, self.world_size) if self.average and self.world_size > 1 else flat

    @staticmethod
    def _write(parameter: Tensor, part: Tensor, present: bool) -> None:
        if not present:
            return
        if parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = part.view(parameter.shape).to(parameter.device, copy=True)
        else:
            parameter.grad.copy_(part.view(parameter.shape))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are only accumulated; the next backward outside and ``finish()`` reduce the sum."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def close(self) -> None:
        """Remove the hooks from the module."""
        for handle in self._handles:
            handle.remove()
