"""Small messages between ranks: a gloo group of our own, deadlines on every wait, and the names of who is missing."""

import logging
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shoal.comm.ranks import collectives
from shoal.gather.errors import RankFailure

log = logging.getLogger("shoal.gather")

_SLICE_S = 0.2
ROLL_CALL_S = 3.0  # the most that a failed collective waits to hear who else is alive
_FAILED = "shoal/failed"
_groups: "WeakKeyDictionary[Any, _Shared]" = WeakKeyDictionary()
# Groups that failed. Ending one waits for its operations, with the interpreter locked; they end by their own timeout.
_abandoned: list[Any] = []


class _Shared:
    """A gloo group made once for a user's group."""

    def __init__(self, pg: Any, store: Any) -> None:
        self.pg = pg
        self.store = store
        self.broken = False


def _control_group(group: Any, timeout_s: float) -> _Shared:
    shared, timeout = _groups.get(group), timedelta(seconds=timeout_s)
    if shared is None or shared.broken:  # on every rank alike: ranks must make groups in the same order
        ranks = collectives.members(group)
        pg = collectives.gloo_group(ranks, timeout)
        store = collectives.store_of(pg)
        shared = _groups[group] = _Shared(pg, store)
    else:
        shared.pg._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
    return shared


class Control:
    """The collectives of a gather over one group; ``group=None`` is this process alone and every call is local.

    All methods block and belong on a worker thread. A failure becomes RankFailure with the ranks that do not answer a
    roll call, after this rank said in the group's store that it gave up: who waits for a survivor looks there.
    """

    def __init__(self, group: Any = None, *, timeout_s: float = 240.0) -> None:
        self.timeout_s = timeout_s
        self.rank, self.world = 0, 1
        self._shared: _Shared | None = None
        if group is not None:
            self.rank, self.world = collectives.rank_in(group), collectives.size_of(group)
            if self.world > 1:
                try:
                    self._shared = _control_group(group, max(timeout_s, 1.0))
                except Exception as error:
                    raise RankFailure((), f"the control group could not be made ({error})") from error

    @property
    def pg(self) -> Any:
        return self._shared.pg if self._shared is not None else None

    def _run(self, what: str, start: Callable[[], Any], *, sliced: bool = True) -> None:
        """One collective; its wait ends in time for the roll call to fit into ``timeout_s``.

        Waits in slices, between which it looks whether another rank has given up: that one may be the only rank that
        can tell. A point-to-point wait cannot be sliced, since its timeout breaks the connection.
        """
        assert self._shared is not None
        begin = time.monotonic()
        grace = min(2.0, self.timeout_s / 4)
        end = begin + max(self.timeout_s - grace, 0.05)
        try:
            if self._shared.broken:
                raise RuntimeError("the group failed before")
            work = start()
            while True:
                left = max(end - time.monotonic(), 0.001)
                try:
                    work.wait(timedelta(seconds=min(left, _SLICE_S) if sliced else left))
                    return
                except RuntimeError:
                    if not sliced or work.is_completed() or time.monotonic() >= end:
                        raise
                    if self._shared.store.check([_FAILED]):
                        raise RuntimeError("another rank gave up") from None
        except RuntimeError as error:
            now = time.monotonic()
            self._fail(what, error, min(now + min(ROLL_CALL_S, self.timeout_s / 2), begin + self.timeout_s))

    def _fail(self, what: str, error: Exception, deadline: float) -> None:
        assert self._shared is not None
        missing = self._roll_call(deadline)
        text = re.sub(r"\s+", " ", str(error))[:200]
        raise RankFailure(missing, f"rank {self.rank} waited in {what} ({text})") from error

    def _roll_call(self, deadline: float) -> list[int]:
        """Says that this rank lives, wakes those who wait for it, and lists who did not say so by the deadline."""
        shared = self._shared
        assert shared is not None
        key = "shoal/alive/{}".format
        others = [r for r in range(self.world) if r != self.rank]
        try:
            shared.store.set(key(self.rank), b"1")
            shared.store.set(_FAILED, b"1")
            self.close()
            while others := [r for r in others if not shared.store.check([key(r)])]:
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.02)
            return others
        except RuntimeError:  # the store went down with the rank that served it
            self.close()
            return [0] if self.rank != 0 else others

    def answer(self) -> bool:
        """Whether another rank gave up. This one, busy with other things, then says in the roll call that it lives."""
        if self._shared is None or self._shared.broken:
            return False
        try:
            if not self._shared.store.check([_FAILED]):
                return False
            self._shared.store.set(f"shoal/alive/{self.rank}", b"1")
        except RuntimeError:  # the store went down: the next collective will tell
            return False
        return True

    def give_up(self) -> None:
        """Tells the others, who may wait for this rank in a collective, that it left."""
        if self._shared is not None and not self._shared.broken:
            self._roll_call(time.monotonic())

    def close(self) -> None:
        """Gives the group up; the next gather makes a new one."""
        if self._shared is not None and not self._shared.broken:
            self._shared.broken = True
            _abandoned.append(self._shared.pg)
            self._shared.pg = None

    # ---- collectives

    def broadcast_bytes(self, data: bytes | None, src: int = 0) -> bytes:
        """Rank ``src``'s bytes on every rank."""
        if self.world == 1:
            return data or b""
        size = torch.tensor([len(data) if data is not None else 0], device="cpu")
        self._run("broadcast", lambda: collectives.broadcast(size, src, self.pg, later=True))
        buffer = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
        if self.rank == src and data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if len(buffer):
            self._run("broadcast", lambda: collectives.broadcast(buffer, src, self.pg, later=True))
        return buffer.numpy().tobytes()

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank."""
        if self.world == 1:
            return [data]
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.world)]
        own = torch.tensor([len(data)], device="cpu")
        self._run("all_gather", lambda: collectives.all_gather(sizes, own, self.pg, later=True))
        longest = max(int(s) for s in sizes)
        if longest == 0:
            return [b""] * self.world
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(self.world)]
        self._run("all_gather", lambda: collectives.all_gather(parts, padded, self.pg, later=True))
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def reduce_ints(self, values: list[int], op: collectives.Op) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        self.reduce_tensor(tensor, op)
        return tensor.tolist()

    def reduce_tensor(self, tensor: Tensor, op: collectives.Op) -> Tensor:
        """all_reduce in place."""
        if self.world > 1:
            self._run("all_reduce", lambda: collectives.all_reduce(tensor, op, self.pg, later=True))
        return tensor

    def minimum(self, value: int) -> int:
        return self.reduce_ints([value], "min")[0]

    def agree(self, value: int) -> bool:
        """Whether all ranks hold the same 63-bit value."""
        low = self.reduce_ints([value], "min")[0]
        high = self.reduce_ints([value], "max")[0]
        return low == high

    def all_to_all(self, out: Tensor, inp: Tensor, out_splits: list[int], in_splits: list[int]) -> None:
        if self.world == 1:
            out.copy_(inp)
            return
        self._run(
            "all_to_all",
            lambda: collectives.all_to_all(out, inp, out_splits, in_splits, self.pg, later=True),
        )

    # ---- pieces of larger exchanges: the caller waits, with the same deadline

    def start_broadcast(self, tensor: Tensor, src: int) -> Any:
        return collectives.broadcast(tensor, src, self.pg, later=True)

    def start_send(self, tensor: Tensor, dst: int) -> Any:
        return collectives.send(tensor, dst, self.pg)

    def start_recv(self, tensor: Tensor, src: int) -> Any:
        return collectives.recv(tensor, src, self.pg)

    def wait(self, works: list[Any], what: str, *, sliced: bool = False) -> None:
        """Waits for started pieces; ``sliced`` for broadcasts, not for sends and receives."""
        for work in works:
            self._run(what, lambda work=work: work, sliced=sliced)
