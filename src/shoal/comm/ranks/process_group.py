"""A transport over a torch process group."""

import contextlib
import json
import threading
import time
from collections import defaultdict
from typing import Any

import torch

from shoal.comm.ranks import collectives
from shoal.comm.ranks.mailboxes import Inbox, Outbox
from shoal.comm.ranks.transport import DEFAULT_TIMEOUT_S, MAX_MESSAGE_BYTES, BaseTransport, Deadline
from shoal.errors import ConfigError, TransportError

POLL_S = 0.1  # between checks of the store for closed peers
STORE_GRACE_S = 5.0  # wait for the last messages of the store's process after it exited
BARRIER_TAG = 0x5340

_transports_of_group: dict[str, int] = defaultdict(int)


class ProcessGroupTransport(BaseTransport):
    """Byte messages over a process group (``group=None``: the default one); aggregators use its collectives.

    A message is an int64 header ``[length, sequence]``, then the payload in pieces of at most 1 GiB, staged on
    ``device``: the CPU if the group has a CPU backend, else the current CUDA device. All ranks must make a group's
    transports in the same order, and must not use the group's point-to-point calls themselves.
    """

    collectives = True

    def __init__(
        self,
        group: Any = None,
        device: torch.device | str | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        default_timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if not collectives.is_started():
            raise ConfigError(
                "ProcessGroupTransport: no process group exists; call DistributedConfig.init() or init_process_group()"
            )
        members: Any = collectives.group_of(group)
        self.group: Any = members
        rank = collectives.rank_in(members)
        if rank < 0:
            raise ConfigError("ProcessGroupTransport: this process is not in the group; make it on the group's members")
        super().__init__(rank, collectives.size_of(self.group), default_timeout_s, max_message_bytes)
        if device is None:
            types = {t.type for t in members._device_types}
            device = "cpu" if "cpu" in types else torch.device("cuda", torch.cuda.current_device())
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self._outboxes: dict[tuple[int, int], Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        name = members.group_name
        self._store = self._open_store(f"shoal.transport/{name}/{_transports_of_group[name]}")
        _transports_of_group[name] += 1
        self._checked_at = 0.0
        self._gone: dict[int, dict[str, int]] = {}  # closed peers, and how many messages each had sent to which rank
        self._barriers = self._barriers_passed = 0
        self._barrier_changed = threading.Condition()
        self._barrier_inboxes = {
            peer: Inbox(self, peer, BARRIER_TAG, self._barrier_changed)
            for peer in (range(1, self.world_size) if rank == 0 else [0])
        }

    def _open_store(self, prefix: str) -> Any:
        try:
            return collectives.part_of(self.group.get_group_store(), prefix)
        except (RuntimeError, AttributeError):  # a backend without a store, such as MPI
            return None

    def _outbox(self, dest: int, tag: int = 0) -> Outbox:
        with self._lock:
            return self._outboxes.setdefault((dest, tag), Outbox(self, dest, tag))

    def _send(self, dest: int, view: memoryview) -> None:
        now = time.monotonic()
        if now - self._checked_at > POLL_S:  # a check of the store takes longer than a small send
            self._checked_at = now
            self._check_peer(dest)
        if dest in self._gone:
            raise self._lost(dest, "it closed its transport")
        self._outbox(dest).put(view, Deadline(self.default_timeout_s))

    def _recv(self, src: int, deadline: Deadline) -> bytes:
        with self._lock:
            inbox = self._inboxes.setdefault(src, Inbox(self, src, 0))
        inbox.ask()
        while True:
            over = deadline.over()
            data = inbox.take(min(deadline.left(), POLL_S))
            if data is not None:
                return data
            if self._closed:
                raise self._closed_error()
            if over:
                raise self._timed_out(src, deadline)
            try:
                sent = self._closed_peers().get(src)
            except TransportError:  # the last messages of the store's process may still arrive
                data = inbox.take(min(deadline.left(), STORE_GRACE_S))
                if data is None:
                    raise
                return data
            if sent is not None and inbox.received >= sent.get(str(self.rank), 0) and not inbox.ready:
                raise self._lost(src, "it closed its transport")

    def _check_peer(self, peer: int) -> None:
        """Raise if this transport is closed or, according to the store, the peer's."""
        if self._closed:
            raise self._closed_error()
        if peer in self._closed_peers():
            raise self._lost(peer, "it closed its transport")

    def _closed_peers(self) -> dict[int, dict[str, int]]:
        """Closed peers, each with the number of messages sent per rank and of ``barriers`` passed. Cached, because a
        closed peer never returns."""
        if self._store is None:
            return {}
        try:
            if not self._store.check(["any_closed"]):
                return {}
            for peer in range(self.world_size):
                if peer != self.rank and peer not in self._gone and self._store.check([f"closed/{peer}"]):
                    self._gone[peer] = json.loads(self._store.get(f"closed/{peer}"))
            return dict(self._gone)
        except RuntimeError as error:  # the store's process has exited
            raise self._lost(0, f"the rendezvous store does not answer: {error}") from error

    def _close(self) -> None:
        self._report_closed()
        with self._lock:  # boxes and their threads keep the transport, and so the group, alive
            boxes = [*self._outboxes.values(), *self._inboxes.values(), *self._barrier_inboxes.values()]
            self._outboxes, self._inboxes, self._barrier_inboxes = {}, {}, {}
        for box in boxes:
            box.close()

    def _report_closed(self) -> None:
        if self._store is None:
            return
        with self._lock:
            sent = {str(dest): box.sequence for (dest, tag), box in self._outboxes.items() if tag == 0}
        try:
            self._store.set(f"closed/{self.rank}", json.dumps({**sent, "barriers": self._barriers_passed}))
            self._store.set("any_closed", "1")
        except RuntimeError:  # the store has gone with its process
            pass

    # Every rank sends rank 0 a mark for this generation of the barrier; then rank 0 sends every rank a mark. The store
    # holds what messages cannot carry: which ranks have closed or given up and, for errors, which have entered.

    def _barrier(self, deadline: Deadline) -> None:
        generation, self._barriers = self._barriers, self._barriers + 1
        if self.world_size == 1:
            return
        if self._store is None or self.cuda:
            collectives.barrier(self.group)
            return
        mark = memoryview(generation.to_bytes(8, "little"))
        inboxes = self._barrier_inboxes
        try:
            if self.rank == 0:
                self._collect(inboxes, generation, deadline)
                for peer in inboxes:
                    self._outbox(peer, BARRIER_TAG).put(mark, deadline)
            else:
                self._outbox(0, BARRIER_TAG).put(mark, deadline)
                self._collect(inboxes, generation, deadline)
        except TransportError as error:
            self._break_barrier(generation, error)
            raise
        except RuntimeError as error:  # from the store
            raise self._lost(0, f"the rendezvous store does not answer: {error}") from error
        self._barriers_passed = generation + 1

    def _collect(self, inboxes: dict[int, Inbox], generation: int, deadline: Deadline) -> None:
        """Wait for every peer's mark of this generation; older marks belong to abandoned barriers."""
        waiting = dict(inboxes)
        announced = False
        while waiting:
            over = deadline.over()
            for inbox in waiting.values():
                inbox.ask()
            for peer in (ready := self._ready(waiting, min(POLL_S, deadline.left()))):
                if int.from_bytes(waiting[peer].take(0) or b"", "little") == generation:
                    del waiting[peer]
            if ready or not waiting:
                continue
            if self._closed:
                raise self._closed_error()
            try:
                closed = self._closed_peers()
            except TransportError:
                if self._ready(waiting, min(deadline.left(), STORE_GRACE_S)):
                    continue
                raise
            for peer, counts in closed.items():
                if counts["barriers"] <= generation:  # a peer may close after it has passed this barrier
                    raise self._lost(peer, "it closed its transport, so the barrier cannot complete")
            self._check_broken(generation)
            if over:
                raise self._missing(sorted(waiting), generation, deadline)
            if not announced:
                announced = True
                self._store.set(f"in/{generation}/{self.rank}", "1")
        if announced:
            with contextlib.suppress(RuntimeError):  # the store's process may have exited after this barrier
                self._store.delete_key(f"in/{generation}/{self.rank}")

    def _ready(self, waiting: dict[int, Inbox], seconds: float) -> list[int]:
        """Peers from which a message has arrived, waiting ``seconds`` for the first."""
        with self._barrier_changed:
            self._barrier_changed.wait_for(lambda: any(box.ready for box in waiting.values()), seconds)
            return [peer for peer, box in waiting.items() if box.ready]

    def _check_broken(self, generation: int) -> None:
        key = f"broken/{generation}"
        if self._store.check([key]):
            peer, why = json.loads(self._store.get(key))
            raise self._error(f"the barrier broke: {why}", "peer_lost", peer)

    def _missing(self, waiting: list[int], generation: int, deadline: Deadline) -> TransportError:
        others = (p for p in range(self.world_size) if p != self.rank)
        missing = [p for p in others if not self._store.check([f"in/{generation}/{p}"])] if self.rank else waiting
        missing = missing or waiting
        text = f"waited {deadline.seconds:g} s in the barrier for rank(s) {missing}; see their logs"
        return self._error(text, "timeout", missing[0])

    def _break_barrier(self, generation: int, error: TransportError) -> None:
        """Tell the other ranks that this generation cannot complete."""
        try:
            if not self._store.check([f"broken/{generation}"]):
                self._store.set(f"broken/{generation}", json.dumps([error.peer, str(error)]))
        except RuntimeError:  # the store is gone as well; the others notice that themselves
            pass
