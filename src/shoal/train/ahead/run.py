"""`Run`: one pass of a pipeline over batches, with its threads and the order of their work."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from shoal.background.ahead import ReadAhead
from shoal.background.lane import Lane
from shoal.comm.ranks.aside import aside
from shoal.comm.ranks.ranks import Ranks
from shoal.errors import ConfigError
from shoal.table.protocol import Group
from shoal.train.ahead.batches import Mover
from shoal.train.ahead.locator import Locator
from shoal.train.ahead.rounds import Held, Round, Rounds
from shoal.train.ahead.uneven import Agreement, OnUneven

_CLOSE_S = 10.0  # the longest wait for the threads of a stopped run


class Settings(NamedTuple):
    """The arguments of `Pipeline` that a run needs."""

    staleness: int
    ahead: int
    device: torch.device | None
    transform: Callable[[Any], Any] | None
    on_uneven: OnUneven
    empty_batch: Callable[[Any], Any] | None
    section: Callable[[Any], int]


class Run:
    """One pass over batches, with up to two background threads.

    | staleness | the thread of the step | the background threads |
    |---|---|---|
    | 0 | reads rows in forward, updates them in backward | read, move and locate the next batches |
    | k | computes | read and move the next batches; locate, read and update rows, always in the same order |

    If all rows are in this process's GPU memory, they are read ahead on a separate stream instead of a thread.
    """

    def __init__(self, settings: Settings, batches: Iterable[Any], locator: Locator) -> None:
        self._settings, self._locator = settings, locator
        self.wait_s = 0.0
        """Seconds that steps waited for their batches."""
        groups = locator.groups()
        devices = {group.traits.device for group in groups}
        gpu = next((device for device in devices if device.type == "cuda"), None)
        self._mover = Mover(settings.device, gpu)
        remote = any(group.traits.remote for group in groups)
        by_stream = gpu is not None and devices == {gpu} and not remote
        ranks = _ranks_of(groups)
        locator.enabled = settings.staleness > 0 or ranks is None or ranks.aside is not None
        locator.attach()
        self.lane: Lane | None = None
        self._closed = False
        self._threads: list[ReadAhead[Any]] = []
        reading = _Reading(batches, settings.transform, self._mover)
        # If locating or looking up can wait for messages or updates, reading gets its own thread.
        waits = remote or (settings.staleness > 0 and not by_stream)
        read = self._thread(reading, settings.ahead if waits else 0, "read", self._mover.inside)
        self._rounds = Rounds(
            read, locator, Agreement(None if ranks is None else ranks.aside, settings.on_uneven), self._mover,
            section=settings.section, empty_batch=settings.empty_batch,
            in_step=ranks is not None or settings.staleness > 0,
        )  # fmt: skip
        self._made: Iterator[Round]
        if settings.staleness and not by_stream:
            self._made = iter(self._rounds)
            self.lane = Lane("shoal-pipeline-tables", inside=self._inside)
        else:
            self._made = self._thread(self._rounds, 1 if waits else settings.ahead, "find", self._inside)

    def _thread(self, source: Iterable[Any], depth: int, name: str, inside: Callable[[], Any]) -> ReadAhead[Any]:
        thread = ReadAhead(source, depth, name=f"shoal-pipeline-{name}", inside=inside)
        self._threads.append(thread)
        return thread

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with aside(), self._mover.inside():
            yield

    def rounds(self) -> Iterator[Round]:
        """Yield the rounds in order; the step of one must end before the next is requested."""
        ready = self._fetched() if self._settings.staleness else self._made
        while True:
            begin = time.perf_counter()
            made = next(ready, None)
            self.wait_s += time.perf_counter() - begin
            if made is None:
                break
            made.arrive(self._mover)
            self._locator.begin(made.batch, made.entries)
            yield made
            self._locator.end()
            self._rounds.first_done()
        self.settle()

    def _fetched(self) -> Iterator[Round]:
        """Yield rounds whose rows were read after the update of the batch ``staleness + 1`` batches earlier."""
        for module in self._locator.tables:
            for keeper in module.keepers():
                keeper.lane = self.lane
        window: deque[Callable[[], Round | _Failed | None]] = deque()
        while True:
            # Only the first batch's forward shows which ids the modules look up.
            while len(window) < (self._settings.staleness + 1 if self._locator.learned else 1):
                window.append(self._fetch())
            made = window.popleft()()
            if made is None:
                return
            if isinstance(made, _Failed):
                self.settle()
                raise made.error
            yield made

    def _fetch(self) -> Callable[[], Round | _Failed | None]:
        """Start to locate the next batch and read its rows, after all updates so far."""
        if self.lane is not None:
            return self.lane.submit(self._next_with_rows).result
        with self._mover.inside():
            made = self._next_with_rows()
            if isinstance(made, Round):
                made.ready = self._mover.mark()
        return lambda: made

    def _next_with_rows(self) -> Round | _Failed | None:
        try:
            made = next(self._made, None)
            return None if made is None else made.read()
        except BaseException as error:
            return _Failed(error)  # raised when it is this batch's turn

    def settle(self) -> None:
        """Wait until all updates so far are applied to the rows."""
        if self.lane is not None:
            self.lane.settle()

    def close(self) -> None:
        """Apply pending updates and end the threads."""
        if self._closed:
            return
        self._closed = True
        self._rounds.close()
        until = time.monotonic() + _CLOSE_S
        for wait in (False, True):
            for thread in self._threads:
                thread.close(wait_s=max(0.0, until - time.monotonic()) if wait else 0.0)
        lane = self.lane
        if lane is not None:
            if lane.error is None:
                lane.submit(self._made.close)  # pyrefly: ignore[missing-attribute]
            lane.close(wait_s=max(0.0, until - time.monotonic()))
        for module in self._locator.tables:
            for keeper in module.keepers():
                if keeper.lane is lane:
                    keeper.lane = None
        self._locator.detach()


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Reading:
    """Reads batches, transforms them and starts to move them to the device."""

    def __init__(self, batches: Iterable[Any], transform: Callable[[Any], Any] | None, mover: Mover) -> None:
        self._batches: Iterator[Any] = iter(batches)  # in the caller's thread: a sampler can draw its random numbers
        self._owned = self._batches is not batches
        self._transform, self._mover = transform, mover

    def __iter__(self) -> Iterator[Held]:
        number = 0
        try:
            for batch in self._batches:
                yield Held(self._mover.moved(batch if self._transform is None else self._transform(batch)))
                number += 1
        except Exception as error:
            where = threading.current_thread().name
            error.add_note(f"Raised while reading batch {number} ahead of its step, in thread {where!r}")
            raise
        finally:
            close = getattr(self._batches, "close", None)
            if self._owned and callable(close):
                close()


def _ranks_of(groups: Iterable[Group]) -> Ranks | None:
    """Return the ranks that share the tables, or None; open a second channel between them."""
    over: list[Any] = [group for group in groups if group.traits.shares is not None]
    found: list[Ranks] = list({id(group.exchange.main): group.exchange.main for group in over}.values())
    if len({ranks.key for ranks in found}) > 1:
        raise ConfigError("Pipeline: all tables of a model must span the same ranks, got several groups of ranks")
    for ranks in found:
        ranks.aside = found[0].open_aside()
    return found[0] if found else None
