"""A transport between threads of one process, for tests and for trying out algorithms on a laptop."""

import threading
from collections import deque

from shoal.comm.ranks.transport import DEFAULT_TIMEOUT_S, MAX_MESSAGE_BYTES, BaseTransport, Deadline
from shoal.errors import ConfigError


class _Mailbox:
    """The FIFO queue from one rank to another."""

    __slots__ = ("messages", "ready")

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self.ready = threading.Condition()


class _Generation:
    """One use of the barrier: the ranks that entered it, and its outcome."""

    __slots__ = ("broken_by", "done", "entered")

    def __init__(self) -> None:
        self.entered: set[int] = set()
        self.done = False
        self.broken_by: int | None = None


class _Group:
    """State that a group's transports share: queues, closed ranks, and the barrier's generation."""

    def __init__(self, n: int) -> None:
        self.boxes = [[_Mailbox() for _ in range(n)] for _ in range(n)]  # boxes[src][dest]
        self.closed: set[int] = set()
        self.turn = threading.Condition()
        self.generation = _Generation()


class InProcessTransport(BaseTransport):
    """One transport of a group that ``create_group`` makes. ``send`` copies and never waits."""

    def __init__(
        self, group: _Group, rank: int, world_size: int, default_timeout_s: float, max_message_bytes: int
    ) -> None:
        super().__init__(rank, world_size, default_timeout_s, max_message_bytes)
        self._group = group

    @classmethod
    def create_group(
        cls, n: int, *, default_timeout_s: float = DEFAULT_TIMEOUT_S, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> list["InProcessTransport"]:
        """Make transports for ``n`` ranks; the index is the rank.

        Example:
            >>> a, b = InProcessTransport.create_group(2)
            >>> a.send(1, b"hello")
            >>> b.recv(0)
            b'hello'
        """
        if n < 1:
            raise ConfigError(f"InProcessTransport.create_group: n must be at least 1, got {n}")
        group = _Group(n)
        return [cls(group, rank, n, default_timeout_s, max_message_bytes) for rank in range(n)]

    def reset(self) -> None:
        """Repair a barrier that a timeout broke: the next generation starts empty. Call it once, on any transport."""
        group = self._group
        with group.turn:
            if not group.generation.done and group.generation.broken_by is None:
                group.generation.broken_by = self.rank
            group.generation = _Generation()
            group.turn.notify_all()

    def _send(self, dest: int, view: memoryview) -> None:
        if dest in self._group.closed:
            raise self._lost(dest, "it closed its transport")
        box = self._group.boxes[self.rank][dest]
        data = bytes(view)
        with box.ready:
            box.messages.append(data)
            box.ready.notify()

    def _recv(self, src: int, deadline: Deadline) -> bytes:
        box = self._group.boxes[src][self.rank]
        with box.ready:
            while not box.messages:
                if self._closed:
                    raise self._closed_error()
                if src in self._group.closed:
                    raise self._lost(src, "it closed its transport")
                if not box.ready.wait(deadline.left()) and deadline.over() and not box.messages:
                    raise self._timed_out(src, deadline)
            data = box.messages.popleft()
        self._check_size(len(data), src)
        return data

    def _barrier(self, deadline: Deadline) -> None:
        group = self._group
        with group.turn:
            generation = group.generation
            self._check_barrier(generation)
            generation.entered.add(self.rank)
            if len(generation.entered) == self.world_size:
                generation.done = True
                group.generation = _Generation()
                group.turn.notify_all()
            while not generation.done:
                self._check_barrier(generation)
                if not group.turn.wait(deadline.left()) and deadline.over() and not generation.done:
                    self._check_barrier(generation)
                    generation.broken_by = self.rank
                    group.turn.notify_all()
                    missing = sorted(set(range(self.world_size)) - generation.entered)
                    raise self._error(
                        f"waited {deadline.seconds:g} s in the barrier for rank(s) {missing}; see their logs, "
                        "then reset() the group",
                        "timeout",
                        missing[0],
                    )

    def _check_barrier(self, generation: _Generation) -> None:
        if self._closed:
            raise self._closed_error()
        if self._group.closed:
            raise self._lost(min(self._group.closed), "it closed its transport, so the barrier cannot complete")
        if generation.broken_by is not None:
            raise self._error(
                f"rank {generation.broken_by} timed out in the barrier or reset it; call reset() on one transport",
                "peer_lost",
                generation.broken_by,
            )

    def _close(self) -> None:
        group = self._group
        with group.turn:
            group.closed.add(self.rank)
            group.turn.notify_all()
        for peer in range(self.world_size):
            for box in (group.boxes[self.rank][peer], group.boxes[peer][self.rank]):
                with box.ready:
                    box.ready.notify_all()
