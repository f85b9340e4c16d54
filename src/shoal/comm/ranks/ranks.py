"""`Ranks`: the interface for exchanges between ranks, over any network; every call uses `Ranks.exchange`."""

from __future__ import annotations

import json
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.comm.ranks.aside import is_aside
from shoal.comm.ranks.started import Starting
from shoal.errors import ConfigError, DataError, PeerError

HEAD_WORDS = 8
"""The number of int64 words in the head of every exchange."""
CALL_WORDS = 4
"""The number of head words that identify the call; if they differ between ranks, nothing is exchanged."""
DEFAULT_TIMEOUT_S = 1800.0
_PLAIN, _GATHER, _BROADCAST, _BARRIER, _SUM, _VALUES = range(-1, -7, -1)  # first head words of the calls below
_CALLS = {
    _PLAIN: "all_to_all", _GATHER: "gather_ints", _BROADCAST: "broadcast", _BARRIER: "barrier", _SUM: "sum",
    _VALUES: "gather",
}  # fmt: skip
_KINDS: dict[str, type[Exception]] = {"config": ConfigError, "data": DataError}  # others are a `PeerError`
Heads = list[list[int]]


class AllToAll(Protocol):
    """The minimum for tables over ranks: all-to-all of flat tensors, called in the same order on every rank."""

    rank: int
    world_size: int

    def all_to_all(self, flat: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int] | None = None) -> Tensor:
        """Send ``send_splits[r]`` elements to rank ``r``; returns the received ones, rank 0's part first."""
        ...

    def gather_totals(self, value: int) -> list[int]:
        """Every rank's value, by rank."""
        ...


class Ranks(Starting):
    """Ranks that make the same calls in the same order. A subclass implements `exchange`; all other calls use it.

    Every wait ends within ``timeout_s``, with an error that names the missing ranks. Several threads may make calls,
    but in the same order on every rank: hold ``turn`` over calls that belong together.
    """

    rank: int
    world_size: int
    key: Any = None
    """Equal for objects with the same ranks and connections."""

    def __init__(self, rank: int, world_size: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.turn = threading.RLock()
        self.aside: Ranks | None = None
        """The second channel between the same ranks, once `open_aside` has opened it."""

    def open_aside(self) -> Ranks | None:
        """Open a second channel between the same ranks, whose calls need not be ordered with those of this one.

        All ranks must call it together. Returns the same channel every time, or None if these ranks cannot have one.
        """
        if self.aside is None:
            self.aside = self._make_aside()
        return self.aside

    def _make_aside(self) -> Ranks | None:
        return None

    @property
    def current(self) -> Ranks:
        """The calling thread's channel: this one, or the second within `shoal.comm.ranks.aside.aside`."""
        return self.aside if self.aside is not None and is_aside() else self

    @abstractmethod
    def exchange(
        self,
        flat: Tensor,
        send: Sequence[int],
        recv: Sequence[int],
        head: Sequence[int] | None,
        out: Tensor | None = None,
    ) -> tuple[Tensor | None, Heads]:
        """Send ``send[r]`` elements of ``flat`` to rank ``r``, and receive ``recv[r]`` elements from it.

        Args:
            flat: one tensor for all ranks, rank 0's part first.
            send: the number of elements for each rank.
            recv: the number of elements expected from each rank.
            head: at most `HEAD_WORDS` ints, which every rank receives. None: the ranks have just agreed on call and
                lengths in another exchange, in the same ``turn``; nothing is checked, and no heads are returned.
            out: the tensor to receive into; a new one unless given.

        Returns:
            The received elements, by rank, on the device of ``flat``, and the heads of all ranks, padded with zeros.
            The elements are None if the ranks make different calls (see `CALL_WORDS`) or one sent a different number
            of elements; they are then discarded, and further exchanges are possible.
        """

    def all_to_all(self, flat: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int] | None = None) -> Tensor:
        """Send ``send_splits[r]`` elements to rank ``r``; returns the received ones, rank 0's part first.

        Without ``recv_splits`` an additional exchange tells every rank how much it will receive.
        """
        with self.turn:
            if recv_splits is None:
                sizes = torch.tensor(send_splits, dtype=torch.int64, device=flat.device)
                recv_splits = self._agreed_exchange(sizes, [1] * self.world_size, _PLAIN).tolist()
            out, heads = self.exchange(flat, send_splits, recv_splits, [_PLAIN])
        self._check(heads, _PLAIN)
        if out is None:
            raise PeerError(f"rank {self.rank} expects {recv_splits} elements by rank, but one rank sent more or fewer")
        return out

    def gather_ints(self, values: Sequence[int]) -> Heads:
        """Every rank's values, by rank; all must pass the same number of values."""
        mine = torch.tensor(list(values) * self.world_size, dtype=torch.int64, device="cpu")
        found = self._agreed_exchange(mine, [len(values)] * self.world_size, _GATHER)
        return found.view(self.world_size, len(values)).tolist()

    def gather_totals(self, value: int) -> list[int]:
        """Every rank's value, by rank."""
        return [each for (each,) in self.gather_ints([value])]

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Rank ``root``'s tensor; the others must pass one of the same shape and dtype."""
        n, here = tensor.numel(), self.rank == root
        flat = tensor.reshape(-1).repeat(self.world_size) if here else tensor.new_empty(0)
        send = [n if here else 0] * self.world_size
        recv = [n if rank == root else 0 for rank in range(self.world_size)]
        return self._agreed_exchange(flat, send, _BROADCAST, recv).view(tensor.shape)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self._agreed_exchange(torch.empty(0, dtype=torch.uint8, device="cpu"), [0] * self.world_size, _BARRIER)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum every rank's contiguous tensor, in place, in rank order; all must pass the same shape and dtype.

        Each rank sums one share of the elements and sends the sums to all: two exchanges, each of as many elements as
        the tensor has.
        """
        if self.world_size == 1:
            return tensor
        flat, w = tensor.view(-1), self.world_size
        shares = [flat.numel() * (r + 1) // w - flat.numel() * r // w for r in range(w)]
        own = shares[self.rank]
        with self.turn:
            parts = self._agreed_exchange(flat, shares, _SUM, [own] * w, flat.numel()).view(w, own)
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            flat.copy_(self._agreed_exchange(total.repeat(w), [own] * w, _SUM, shares, flat.numel()))
        return tensor

    # --- JSON values ------------------------------------------------------------------------------------------------

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; a tuple arrives as a list."""
        raw = json.dumps(value).encode()
        if self.world_size == 1:
            return [value]
        with self.turn:
            sizes = self.gather_totals(len(raw))
            flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).repeat(self.world_size)
            came = self._agreed_exchange(flat, [len(raw)] * self.world_size, _VALUES, sizes)
        return [json.loads(part.numpy().tobytes()) for part in came.split(sizes)]

    def from_first(self, value: Any) -> Any:
        """Rank 0's value; the values of other ranks are ignored."""
        if self.world_size == 1:
            return value
        raw = bytearray(json.dumps(value if self.first else None).encode())
        with self.turn:
            size = self.gather_totals(len(raw))[0]
            box = torch.frombuffer(raw, dtype=torch.uint8) if self.first else torch.empty(
                size, dtype=torch.uint8, device="cpu")  # fmt: skip
            came = self.broadcast(box)
        return json.loads(came.numpy().tobytes())

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Run ``work``, which must not talk to other ranks, on every rank; returns all results, by rank.

        If it fails on one rank, all ranks raise: that rank its own error, the others an error of the same kind that
        names the rank.
        """
        error: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        kind = next((name for name, one in _KINDS.items() if isinstance(error, one)), "other")
        ended = self.gather([result, None if error is None else kind, str(error)])
        if error is not None:
            raise error
        for rank, (_, kind, text) in enumerate(ended):
            if kind is not None:
                raise _KINDS.get(kind, PeerError)(f"rank {rank}: {text}")
        return [result for result, _, _ in ended]

    def called(self, what: str) -> None:
        """Run ``before_call``, at the start of a call."""
        if self.before_call is not None:
            self.before_call(what)

    def close(self) -> None:
        """Release the resources that this object opened; it must not be used afterwards."""

    def _agreed_exchange(
        self, flat: Tensor, send: Sequence[int], call: int, recv: Sequence[int] | None = None, same: int = 0
    ) -> Tensor:
        """Exchange, and raise if the ranks disagree. ``same`` is a number that must be equal on all ranks."""
        out, heads = self.exchange(flat, send, send if recv is None else recv, [call, same])
        self._check(heads, call)
        if out is None:
            raise PeerError(f"rank {self.rank}: another rank calls {_CALLS[call]} with more or fewer elements")
        return out

    def _check_counts(self, flat: Tensor, send: Sequence[int], recv: Sequence[int]) -> None:
        """Raise before anything is sent, so that further exchanges are possible."""
        for name, counts in (("send", send), ("recv", recv)):
            if len(counts) != self.world_size or min(counts) < 0:
                raise ConfigError(f"{name} must be one number >= 0 for each of {self.world_size} ranks, got {counts}")
        if sum(send) != flat.numel():
            raise ConfigError(f"send must add up to the {flat.numel()} elements of the tensor, got {sum(send)}")

    def _check(self, heads: Heads, call: int) -> None:
        others = [rank for rank, head in enumerate(heads) if head[0] != call]
        if others:
            raise PeerError(
                f"rank {self.rank} calls {_CALLS[call]} while rank(s) {others} make another call; all ranks must make "
                "the same calls in the same order"
            )


class SingleRank(Ranks):
    """A single rank that owns everything, without a network."""

    key = "alone"

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _make_aside(self) -> Ranks:
        return self

    def exchange(
        self,
        flat: Tensor,
        send: Sequence[int],
        recv: Sequence[int],
        head: Sequence[int] | None,
        out: Tensor | None = None,
    ) -> tuple[Tensor | None, Heads]:
        heads = [] if head is None else [padded(head)]
        if list(send) != list(recv):
            return None, heads
        return flat if out is None else out.copy_(flat), heads


class Carried(Ranks):
    """`Ranks` over any object with ``all_to_all``, such as a user's own network. Heads are exchanged first."""

    def __init__(self, backend: AllToAll) -> None:
        super().__init__(backend.rank, backend.world_size)
        self._backend = backend
        self.key = ("carried", id(backend))

    def exchange(
        self,
        flat: Tensor,
        send: Sequence[int],
        recv: Sequence[int],
        head: Sequence[int] | None,
        out: Tensor | None = None,
    ) -> tuple[Tensor | None, Heads]:
        heads: Heads = []
        with self.turn:
            if head is not None:
                fronts = torch.tensor([[n, *padded(head)] for n in send], device="cpu")
                each = [HEAD_WORDS + 1] * self.world_size
                received = self._backend.all_to_all(fronts.view(-1), each, each).view(self.world_size, -1).tolist()
                heads, lengths = [words for _, *words in received], [n for n, *_ in received]
                if not one_call(heads):
                    return None, heads
                if lengths != list(recv):  # only this rank may know: the others need its data
                    self._backend.all_to_all(flat, send, lengths)
                    return None, heads
            came = self._backend.all_to_all(flat, send, recv)
        return came if out is None else out.copy_(came), heads


def one_call(heads: Heads) -> bool:
    """Whether all ranks make the same call."""
    return all(head[:CALL_WORDS] == heads[0][:CALL_WORDS] for head in heads)


def as_ranks(backend: AllToAll) -> Ranks:
    """``backend`` itself if it is a `Ranks`, else wrapped in `Carried`."""
    return backend if isinstance(backend, Ranks) else Carried(backend)


def padded(head: Sequence[int]) -> list[int]:
    """``head`` padded with zeros to `HEAD_WORDS` words."""
    if len(head) > HEAD_WORDS:
        raise ValueError(f"a head must have at most {HEAD_WORDS} words, got {len(head)}")
    return [*head, *[0] * (HEAD_WORDS - len(head))]
