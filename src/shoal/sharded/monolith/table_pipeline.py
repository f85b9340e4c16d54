"""`TablePipeline`: looks up the next batches and applies the last updates while the caller computes.

One thread makes all calls on the table; the keys of ``queue_configs`` set how many batches ahead it looks up and how
many steps late it updates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from shoal.background.ahead import ReadAhead
from shoal.background.lane import Lane
from shoal.comm.horovod.hooks import SessionRunHook
from shoal.comm.ranks.aside import aside
from shoal.comm.ranks.ranks import Ranks
from shoal.errors import ConfigError, PeerError

_CLOSE_S = 10.0  # how long `close` waits for the threads
_HAS, _ENDED, _FAILED = range(3)


class Looked(NamedTuple):
    """A batch with its embeddings."""

    batch: Any
    embeddings: Any
    """As ``lookup`` of the table returns them."""
    auxiliary_bundle: dict[str, Any]


class Stages(Protocol):
    """The stages of a table's step. A pipeline calls them in its thread, except `take_gradients`."""

    def prepare(self, batch: Any) -> Any:
        """Do the part of a lookup that needs no other rank."""

    def look_up(self, batch: Any, prepared: Any) -> Looked: ...

    def take_gradients(self, looked: Looked, *args: Any, **kwargs: Any) -> Any:
        """The input of `exchange_gradients`, from the gradients of a batch."""

    def exchange_gradients(self, work: Any) -> Any: ...

    def apply(self, work: Any) -> None: ...


class TablePipeline:
    """Batches in, batches with embeddings out, gradients back.

    ::

        pipeline = table.pipeline(batches)
        for looked in pipeline:
            grads = compute(looked.embeddings)
            pipeline.update(grads, global_step=step)

    The order of the background work is the same on every rank and in every run: the lookup of batch ``j`` comes after
    the update of batch ``j - 1 - staleness``. On every rank iteration ends with the last batch that all ranks have, and
    after all updates. `hooks` are for loops that call hooks.

    Args:
        stages: the stages of the table's step.
        batches: the input, read ahead by a thread.
        capacities: the values of ``queue_configs``. ``enable_pipelined_fwda2a`` plus ``embedding_prefetch_capacity``
            is the number of batches that are looked up ahead, ``enable_async_optimize`` plus
            ``enable_pipelined_bwda2a`` the number of steps by which updates are late. If all are 0, only batches are
            read ahead, and results are those of ``lookup`` and ``apply_gradients``.
        ranks: the ranks that use the pipeline together; None for a single process.
    """

    def __init__(
        self, stages: Stages, batches: Iterable[Any], capacities: Mapping[str, int], ranks: Ranks | None = None
    ) -> None:
        self._stages, self._source = stages, batches
        late, exchanged_late = (capacities[key] for key in ("enable_async_optimize", "enable_pipelined_bwda2a"))
        self.lookups_ahead = capacities["enable_pipelined_fwda2a"] + capacities["embedding_prefetch_capacity"]
        """The number of batches that are looked up before their step."""
        self.updates_late = late + exchanged_late
        """The number of steps from a batch's own step to its update."""
        self._exchanges_late = max(1, late) if self.updates_late else 0
        self._ranks = None if ranks is None or ranks.world_size == 1 else ranks
        if self._ranks is not None:
            self._ranks.open_aside()
        self._read: ReadAhead[Any] | None = None
        self._lane: Lane | None = None
        self._looked: deque[Future[Looked | None]] = deque()
        self._step = -1
        self._current: Looked | None = None
        self._to_exchange: deque[tuple[int, Any]] = deque()
        self._to_apply: deque[tuple[int, Future[Any]]] = deque()
        self._over = False
        self.hooks: list[SessionRunHook] = [_PipelineHook(self)]

    @property
    def staleness(self) -> int:
        """The number of earlier updates that the lookup of a batch does not reflect."""
        return self.lookups_ahead + self.updates_late

    # --- batches out --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the threads; `next` calls it as well."""
        if self._lane is None and not self._over:
            self._read = ReadAhead(self._source, max(1, self.lookups_ahead), name="shoal-table-read")
            self._lane = Lane("shoal-table", inside=aside)
            for _ in range(self.lookups_ahead):
                self._looked.append(self._lane.submit(self._next))

    def __iter__(self) -> Iterator[Looked]:
        try:
            while (looked := self.next()) is not None:
                yield looked
        finally:
            self.close()

    def next(self) -> Looked | None:
        """The next batch with its embeddings; None after the last batch and all updates."""
        self.begin()
        lane = self._lane
        if lane is None or self._over:
            return None
        self._step += 1
        self._looked.append(lane.submit(self._next))
        self._push(lane, self._step)
        self._current = self._looked.popleft().result()
        if self._current is None:
            self.close()
        return self._current

    def _next(self) -> Looked | None:
        """The next batch that every rank has; runs in the thread."""
        assert self._read is not None
        batch = prepared = failed = None
        state = _HAS
        try:
            batch = next(self._read)
            prepared = self._stages.prepare(batch)
        except StopIteration:
            state = _ENDED
        except BaseException as error:
            state, failed = _FAILED, error
        states = [state] if self._ranks is None else self._ranks.current.gather_totals(state)
        if failed is not None:
            raise failed
        others = [rank for rank, other in enumerate(states) if other == _FAILED]
        if others:
            raise PeerError(f"rank(s) {others} could not prepare their batch; see their logs", ranks=others)
        return None if _ENDED in states else self._stages.look_up(batch, prepared)

    # --- gradients back -----------------------------------------------------------------------------------------------

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take the gradients of the last batch, with the arguments of the table's ``apply_gradients``.

        If updates are not late, it returns after the rows are updated.
        """
        if self._current is None or self._lane is None:
            raise ConfigError(
                "update must be called once per batch, after the batch was returned; no batch waits for gradients"
            )
        work = self._stages.take_gradients(self._current, *args, **kwargs)
        self._current = None
        if self.updates_late:
            self._to_exchange.append((self._step, work))
        else:
            self._lane.run(lambda: self._stages.apply(self._stages.exchange_gradients(work)))

    def _push(self, lane: Lane, step: float) -> None:
        """Submit the exchanges and updates that are due at a step."""
        stages = self._stages
        while self._to_exchange and self._to_exchange[0][0] + self._exchanges_late <= step:
            batch_step, work = self._to_exchange.popleft()
            self._to_apply.append((batch_step, lane.submit(lambda work=work: stages.exchange_gradients(work))))
        while self._to_apply and self._to_apply[0][0] + self.updates_late <= step:
            _, exchanged = self._to_apply.popleft()
            lane.submit(lambda exchanged=exchanged: stages.apply(exchanged.result()))

    def flush(self) -> None:
        """Apply all pending updates now. All ranks must call it together."""
        if self._lane is not None:
            self._push(self._lane, float("inf"))
            self._lane.settle()

    def close(self) -> None:
        """End the threads after all pending updates; drops pending lookups. All ranks must call it together."""
        if self._over or self._lane is None:
            return
        self._over, self._current = True, None
        assert self._read is not None
        self._read.close(wait_s=0.0)
        try:
            if self._lane.error is None:
                self.flush()
        finally:
            self._read.close(wait_s=_CLOSE_S)
            self._lane.close(wait_s=_CLOSE_S)

    def __enter__(self) -> TablePipeline:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _PipelineHook(SessionRunHook):
    """Starts and ends a pipeline with the training loop."""

    def __init__(self, pipeline: TablePipeline) -> None:
        self._pipeline = pipeline

    def begin(self) -> None:
        self._pipeline.begin()

    def before_run(self, ctx: Any = None) -> None: ...

    def after_run(self, ctx: Any = None, values: Any = None) -> None: ...

    def end(self, ctx: Any = None) -> None:
        self._pipeline.close()
