"""`ProcessGroup`: `Ranks` over a torch process group."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from shoal.buffers import empty_of
from shoal.comm.ranks import collectives
from shoal.comm.ranks.backend import Backend
from shoal.comm.ranks.ranks import HEAD_WORDS, Heads, Ranks, SingleRank, one_call, padded
from shoal.comm.ranks.restarts.pulse import Pulse, pulse_wanted, restarts_allowed
from shoal.comm.ranks.same_host import Rings, open_rings
from shoal.errors import DeadlineError, PeerError, ShoalError

TAG = 0x5344
START_TIMEOUT_S = 600.0
FRONT_WORDS = 64  # a message's length and head, and all of its data if it is short
INLINE_BYTES = 8 * (FRONT_WORDS - 1 - HEAD_WORDS)

_rings: weakref.WeakKeyDictionary[Any, Rings | None] = weakref.WeakKeyDictionary()
_ranks: weakref.WeakValueDictionary[int, ProcessGroup] = weakref.WeakValueDictionary()  # by the id of the group


class ProcessGroup(Backend):
    """`Ranks` over a torch process group (the default one unless given), on gloo or NCCL.

    With gloo, CPU tensors go through shared memory on one machine (`shoal.comm.ranks.same_host`) and as messages
    between machines. Tensors may be on any device: they are copied to a device from which the group can send (NCCL: the
    current GPU, gloo: the host), and the results are copied back to the device of the input.
    """

    def __init__(self, group: collectives.Group = None) -> None:
        super().__init__(group)
        self._messages = "gloo" in collectives.backends(group)
        self.owns_group = False
        """Whether `close` ends the process group."""
        self._pulse: Pulse | None = None

    def _make_aside(self) -> ProcessGroup:
        made = ProcessGroup(collectives.group_like(self.group, timedelta(seconds=self.timeout_s)))
        made.watch.pulse = self.watch.pulse
        return made

    def notice_lost(self, after_s: float) -> None:
        """Fail waits for a rank that is frozen or unreachable for ``after_s`` seconds; 0: never. All ranks must call it
        together."""
        store = collectives.another_connection(self.key)
        if after_s and self.world_size > 1 and store is not None and self.watch.pulse is None:
            pulse = Pulse(store, self.rank, self.world_size, lost_after_s=after_s, leaves=restarts_allowed())
            self.barrier()  # every rank's count is now in the store
            self._pulse = self.watch.pulse = pulse.start()

    def close(self) -> None:
        if self._pulse is not None:
            self._pulse.close()
        if self.owns_group and collectives.is_started():
            self.owns_group = False
            collectives.stop()

    def exchange(
        self,
        flat: Tensor,
        send: Sequence[int],
        recv: Sequence[int],
        head: Sequence[int] | None,
        out: Tensor | None = None,
    ) -> tuple[Tensor | None, Heads]:
        self._check_counts(flat, send, recv)
        self.called("exchange")
        sent = self.on_wire(flat).contiguous()
        to = out
        if to is None or to.device != sent.device:
            to = empty_of(sum(recv), sent.dtype) if sent.is_cpu else sent.new_empty(sum(recv))
        with self.turn:
            self.watch.check()
            try:
                with self.watch.naming("an exchange"):
                    same, heads = self._carry(to, sent, recv, send, None if head is None else padded(head))
            except BaseException as error:
                self.failed(error)
                raise
        if not same or (head is not None and not one_call(heads)):
            return None, heads
        if out is not None and to is not out:
            return out.copy_(to), heads
        return to.to(flat.device), heads

    def _carry(
        self, out: Tensor, flat: Tensor, recv: Sequence[int], send: Sequence[int], head: list[int] | None
    ) -> tuple[bool, Heads]:
        """Fill ``out``; returns whether all lengths were as expected, and the heads."""
        if self.world_size == 1:
            if list(send) == list(recv):
                out.copy_(flat)
            return list(send) == list(recv), [head or []]
        if flat.is_cpu and self._messages:
            rings = self._rings_of()
            if rings is not None:
                return rings.exchange(out, flat, recv, send, head or [], self.timeout_s, self.watch.another_gave_up)
            if head is not None:
                return self._by_messages(out, flat, recv, send, head)
        if head is None:
            collectives.all_to_all(out, flat, recv, send, self.group)
            return True, []
        fronts = torch.tensor([[n, *head] for n in send], device=flat.device)
        received = torch.empty_like(fronts)
        collectives.all_to_all(received, fronts, group=self.group)
        words = received.tolist()
        lengths, heads = [n for n, *_ in words], [head for _, *head in words]
        same = lengths == list(recv)
        if one_call(heads):  # also if this rank expects other lengths: the others need its data
            collectives.all_to_all(out if same else flat.new_empty(sum(lengths)), flat, lengths, send, self.group)
        return same, heads

    def _rings_of(self) -> Rings | None:
        """This group's rings, which all ranks open in the first exchange; None if they cannot."""
        if self.key not in _rings:
            _rings[self.key] = open_rings(self.rank, self.world_size, self._all_gather)
        return _rings[self.key]

    def _all_gather(self, numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, device="cpu")
        found = mine.new_empty(self.world_size * len(mine))
        self.start_gather(found, mine).wait()
        return found.view(self.world_size, -1).tolist()

    def _by_messages(
        self, out: Tensor, flat: Tensor, recv: Sequence[int], send: Sequence[int], head: list[int]
    ) -> tuple[bool, Heads]:
        """Exchange by gloo's point-to-point calls: first lengths, heads and short data, then longer data."""
        size = flat.element_size()
        given, taken = (raw.view(torch.uint8).split([n * size for n in counts]) for raw, counts in
                        ((flat, send), (out, recv)))  # fmt: skip
        peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        fronts = torch.zeros(2, self.world_size, FRONT_WORDS, dtype=torch.int64, device="cpu")
        works: list[Any] = []
        for peer in peers:
            front = fronts[0, peer]
            front[: 1 + HEAD_WORDS] = torch.tensor([given[peer].numel(), *head], device="cpu")
            short = given[peer].numel() <= INLINE_BYTES
            if short:
                front[1 + HEAD_WORDS :].view(torch.uint8)[: given[peer].numel()] = given[peer]
            works.append(self.key.send([front], peer, TAG))
            if not short:
                works.append(self.key.send([given[peer]], peer, TAG))
        if send[self.rank] == recv[self.rank]:
            taken[self.rank].copy_(given[self.rank])
        until = time.monotonic() + self.timeout_s
        asked = {peer: self.key.recv([fronts[1, peer]], peer, TAG) for peer in peers}
        self._finish(asked, until)
        fronts[1, self.rank, : 1 + HEAD_WORDS] = torch.tensor([given[self.rank].numel(), *head], device="cpu")
        received = fronts[1, :, : 1 + HEAD_WORDS].tolist()
        asked = {}
        kept = []
        for peer in peers:
            length, awaited = received[peer][0], taken[peer].numel()
            to = taken[peer] if length == awaited else torch.empty(length, dtype=torch.uint8, device="cpu")
            kept.append(to)
            if length <= INLINE_BYTES:
                to.copy_(fronts[1, peer, 1 + HEAD_WORDS :].view(torch.uint8)[:length])
            else:
                asked[peer] = self.key.recv([to], peer, TAG)
        self._finish(asked, until)
        self._finish(dict(enumerate(works)), until, sending=True)
        same = all(received[rank][0] == taken[rank].numel() for rank in range(self.world_size))
        return same, [words for _, *words in received]

    def _finish(self, works: dict[int, Any], until: float, *, sending: bool = False) -> None:
        for peer, work in works.items():
            try:
                work.wait(timedelta(seconds=max(0.001, until - time.monotonic())))
            except RuntimeError as error:
                if time.monotonic() < until and "timed out" not in str(error).lower():  # gloo rounds down to ms
                    raise PeerError(f"rank {self.rank}: the connection to another rank failed ({error})") from error
                missing = [] if sending else sorted(p for p, w in works.items() if p == peer or not w.is_completed())
                what = "the other ranks to receive its data" if sending else f"data from rank(s) {missing}"
                raise DeadlineError(
                    f"rank {self.rank} waited {self.timeout_s:g} s for {what} in an exchange; see the other ranks' "
                    "logs, or raise the process group's timeout",
                    ranks=missing,
                ) from error


def default_ranks(group: Any = None) -> Ranks:
    """The process group if there is one, else a single rank; the same object for the same group."""
    key = collectives.group_of(group)
    if key is None:
        return SingleRank()
    found = _ranks.get(id(key))  # it keeps its group alive, so this id cannot belong to another group
    if found is None:
        found = _ranks[id(key)] = ProcessGroup(group)
    return found


def start_ranks(timeout_s: float = START_TIMEOUT_S) -> Ranks:
    """Join the ranks that ``torchrun`` or ``shoal launch`` started, on gloo unless a process group exists already.

    A process without a launcher is a single rank. ``close()`` ends the process group that this call started.
    """
    if collectives.is_started():
        return default_ranks()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return SingleRank()
    with naming_lost_ranks(int(os.environ.get("RANK", "0"))):
        collectives.start("gloo", timeout=timedelta(seconds=timeout_s))
    ranks = ProcessGroup()
    ranks.owns_group = True
    ranks.notice_lost(pulse_wanted())
    _ranks[id(ranks.key)] = ranks
    return ranks


@contextmanager
def naming_lost_ranks(rank: int) -> Iterator[None]:
    """Turn a process group error caused by a lost rank into a `PeerError` that says so."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, ShoalError) or not collectives.is_lost_connection(error):
            raise
        why = str(error).strip().splitlines()[0].partition("] ")[2].partition(". ")[0]
        raise PeerError(
            f"rank {rank}: the connection to another rank is lost ({why or error}); see the log of the rank that "
            "exited first"
        ) from error
