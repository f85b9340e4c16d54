"""`Backend`: the native collectives of a torch process group, each started under a watch."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.ranks import collectives
from shoal.comm.ranks.ranks import DEFAULT_TIMEOUT_S, Ranks
from shoal.comm.ranks.started import Op
from shoal.comm.ranks.watch import Watch
from shoal.errors import ConfigError

_watches: weakref.WeakKeyDictionary[Any, Watch] = weakref.WeakKeyDictionary()


class Running:
    """A running collective of a process group."""

    __slots__ = ("_ranks", "_sliced", "_what", "_work")

    def __init__(self, ranks: Backend, what: str, work: Any, sliced: bool | None) -> None:
        self._ranks, self._what, self._work, self._sliced = ranks, what, work, sliced

    def wait(self, timeout_s: float | None = None) -> None:
        if self._sliced is None:  # on a GPU the stream waits, not this thread
            with self._ranks.watch.naming(self._what):
                self._work.wait()
        else:
            limit = self._ranks.timeout_s if timeout_s is None else timeout_s
            self._ranks.watch.wait(self._what, self._work, limit, sliced=self._sliced)

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future().then(self._named)

    def _named(self, done: Any) -> Any:
        with self._ranks.watch.naming(self._what):
            return done.value()


class Backend(Ranks):
    """`Ranks` over a process group (the default one unless given), without `exchange`."""

    def __init__(self, group: collectives.Group = None) -> None:
        if not collectives.is_started():
            raise ConfigError(
                "a synchronous table needs a process group; start the ranks with torchrun and call "
                "shoal.comm.DistributedConfig.from_env().init(), or torch's init_process_group()"
            )
        members: Any = collectives.group_of(group)
        super().__init__(collectives.rank_in(group), collectives.size_of(group), _timeout_s(members))
        self.group = group
        self.key = members
        backends = collectives.backends(group)
        self._gpu = "nccl" in backends
        self._host = "gloo" in backends or "mpi" in backends
        store = collectives.watch_store(members)
        self.watch = _watches.get(members) or Watch(members, store, self.rank, self.world_size)
        _watches[members] = self.watch

    def wire(self, device: torch.device) -> torch.device:
        """The device from which tensors on ``device`` are sent."""
        if device.type == "cuda":
            return device if self._gpu else torch.device("cpu")
        return device if self._host or not self._gpu else torch.device("cuda", torch.cuda.current_device())

    def on_wire(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.wire(tensor.device))

    def start_reduce(self, tensor: Tensor, op: Op = "sum") -> Running:
        return self._start("all_reduce", tensor, lambda: collectives.all_reduce(tensor, op, self.key, later=True))

    def start_gather(self, everyone: Tensor, mine: Tensor) -> Running:
        begin = partial(collectives.all_gather_single, everyone, mine, group=self.key, async_op=True)
        return self._start("all_gather", mine, begin)

    def start_scatter(self, share: Tensor, flat: Tensor) -> Running:
        begin = partial(collectives.reduce_scatter_single, share, flat, group=self.key, async_op=True)
        return self._start("reduce_scatter", flat, begin)

    def start_broadcast(self, tensor: Tensor, root: int) -> Running:
        return self._start("broadcast", tensor, lambda: collectives.broadcast(tensor, root, self.key, later=True))

    def gather_to(self, root: int, mine: Tensor, parts: list[Tensor] | None) -> None:
        self._start("gather", mine, lambda: collectives.gather(parts, mine, root, self.key, later=True)).wait()

    def start_send(self, tensor: Tensor, to: int) -> Running:
        return self._start("send", tensor, lambda: collectives.send(tensor, to, self.key), sliced=False)

    def start_recv(self, tensor: Tensor, source: int) -> Running:
        return self._start("recv", tensor, lambda: collectives.recv(tensor, source, self.key), sliced=False)

    def _start(self, what: str, tensor: Tensor, begin: Callable[[], Any], *, sliced: bool | None = True) -> Running:
        self.called(what)
        return Running(self, what, self.watch.start(what, begin), sliced if tensor.is_cpu else None)

    def failed(self, error: BaseException) -> None:
        """Mark the group as unusable after a failed exchange."""
        if not self.watch.broken:
            self.watch.roll_call(time.monotonic())
            self.watch.broken = f"{type(error).__name__}: {error}"
            self.watch.missing = list(getattr(error, "ranks", ()))


def _timeout_s(group: Any) -> float:
    try:
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return DEFAULT_TIMEOUT_S
