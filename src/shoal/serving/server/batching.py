"""Adaptive micro-batching: requests that come close together are read, run and answered as one.

All of it happens on the event loop's thread, which is why it is fast: nothing is handed from thread to thread, and
nobody else wants the interpreter. Only a model whose batches take long runs on a thread of the pool; what arrives
meanwhile is its next batch.

A lone request does not wait for company. When requests come fast, the first of a batch waits a millisecond, but only
as long as that gathers others.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import torch

from shoal.observe import tracing
from shoal.serving.export.manifest import TensorSpec
from shoal.serving.predict import PredictCall, join_calls, split_answers
from shoal.serving.status import Code, StatusError

log = logging.getLogger(__name__)

Tensors = dict[str, Any]

MAX_GROUP = 256
WINDOW = 0.00095  # seconds that the first of a batch waits at most; just under a tick of the loop's clock
PROBE = 200  # a batch in so many waits although waiting did not pay lately
SHORT = 0.002  # seconds of work that may hold up the loop


class Pace:
    """How long calls of one kind take, and so whether they may run on the event loop itself."""

    def __init__(self, may_inline: bool = True) -> None:
        self._may_inline = may_inline
        self._seconds: float | None = None

    @property
    def short(self) -> bool:
        return self._may_inline and self._seconds is not None and self._seconds < SHORT

    def timed(self, work: Callable[[], Any]) -> Any:
        begin = time.thread_time()  # the time of this thread: waiting for a processor says nothing about the work
        try:
            return work()
        finally:
            spent = time.thread_time() - begin
            before = spent if self._seconds is None else self._seconds
            self._seconds = max(spent, (before + spent) / 2)


class _Waiting:
    __slots__ = ("call", "error", "finish", "future", "inputs", "prepare", "resolved", "result", "rows", "trace")

    def __init__(
        self,
        prepare: Callable[[], Tensors],
        finish: Callable[[Tensors], Any],
        call: PredictCall | None,
        resolved: bytes,
    ) -> None:
        self.prepare, self.finish, self.call, self.resolved = prepare, finish, call, resolved
        self.future: asyncio.Future[Any] | None = None
        self.trace = tracing.current()
        self.inputs: Tensors = {}
        self.rows = -1
        self.result: Any = None
        self.error: BaseException | None = None


class Batcher:
    """Runs ``call`` on joined requests; their first dimension is the rows that are joined and cut apart again.

    Args:
        call: takes and gives ``{alias: tensor}``.
        join: what ``call`` takes of several requests, and the rows of each: -1 for one that is not part of it and is
            read alone. None, or any error: all are.
        max_rows: a batch has at most this many rows, unless one request alone has more.
        pool: runs batches that take long; None = they run on the loop, too.
        outputs: alias -> what it is, as far as that is known.
        ran: is told of each batch how many requests and rows it had.

    Whatever a joined run gives that is not one row per row of its inputs is thrown away: its requests run one by one,
    and so do all later ones.
    """

    def __init__(
        self,
        call: Callable[[Tensors], Tensors],
        join: Callable[[Sequence[PredictCall]], tuple[Tensors, list[int]] | None] = join_calls,
        max_rows: int = 1024,
        pool: Executor | None = None,
        outputs: Mapping[str, TensorSpec] | None = None,
        ran: Callable[[int, int], None] = lambda requests, rows: None,
    ) -> None:
        self._call, self._join, self._ran = call, join, ran
        self._outputs = dict(outputs or {})
        self._joins = True
        self._max_rows = max_rows
        self._pool = pool
        self._pace = Pace()
        self._queue: list[_Waiting] = []
        self._due = False  # a batch is running or about to
        self._gap = 1.0  # seconds between requests, lately
        self._arrived = 0.0
        self._company = 1.0  # requests that a batch which waited had, lately
        self._since_probe = 0
        self.batches = 0
        self.requests = 0

    @property
    def joins(self) -> bool:
        """Whether requests may still be joined."""
        return self._joins

    async def submit(
        self,
        prepare: Callable[[], Tensors],
        finish: Callable[[Tensors], Any],
        call: PredictCall | None = None,
        resolved: bytes = b"",
    ) -> Any:
        """``finish(outputs of prepare())``, run with other requests or alone.

        A request that came as bytes also gives its ``call``: those that ask alike are read and answered natively,
        without prepare and finish, under the model spec ``resolved``.
        """
        loop = asyncio.get_running_loop()
        mine = _Waiting(prepare, finish, call, resolved)
        mine.future = loop.create_future()
        now = loop.time()
        self._gap += 0.1 * (min(now - self._arrived, 1.0) - self._gap)
        self._arrived = now
        self._queue.append(mine)
        if not self._due:
            self._schedule(loop)
        return await mine.future

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = True
        waits = False
        if self._gap < 2 * WINDOW and len(self._queue) < MAX_GROUP:
            self._since_probe += 1
            waits = self._company > 1.2 or self._since_probe >= PROBE
        if waits:
            self._since_probe = 0
            loop.call_later(WINDOW, self._begin, loop, True)
        else:
            loop.call_soon(self._begin, loop, False)

    def _begin(self, loop: asyncio.AbstractEventLoop, waited: bool) -> None:
        group = self._queue[:MAX_GROUP]
        del self._queue[:MAX_GROUP]
        if waited:
            self._company += 0.5 * (len(group) - self._company)
        work = partial(self._pace.timed, partial(self.run, group))
        if self._pool is None or self._pace.short:
            try:
                work()
            except BaseException as error:
                self._end(loop, group, error)
                if not isinstance(error, Exception):
                    raise
            else:
                self._end(loop, group)
            return
        try:
            done = loop.run_in_executor(self._pool, work)
        except RuntimeError as error:  # the pool was shut down
            self._end(loop, group, error)
            return
        done.add_done_callback(lambda done: self._end(loop, group, _error_of(done)))

    def _end(
        self, loop: asyncio.AbstractEventLoop, group: list[_Waiting], escaped: BaseException | None = None
    ) -> None:
        """Answers the group; what escaped its run fails all of it, and the next batch runs."""
        self._due = False
        if escaped is not None:
            log.error("a batch of %d requests failed", len(group), exc_info=escaped)
        for each in group:
            future = each.future
            if future is None or future.done():  # its caller has gone
                continue
            if escaped is not None:
                future.set_exception(StatusError(Code.INTERNAL, f"the batch failed: {escaped!r}"))
            elif each.error is not None:
                future.set_exception(each.error)
            else:
                future.set_result(each.result)
        if self._queue:
            self._schedule(loop)

    # --- a batch ----------------------------------------------------------------------------------------------------

    def run(self, group: list[_Waiting]) -> None:
        """Gives each of the group its result or its error."""
        self.requests += len(group)
        read_alone: list[_Waiting] = []
        for alike in _asking_alike(group):
            read_alone += self._run_joined(alike)
        for each in read_alone:
            self._prepare(each)
        for batch in self._batches([each for each in read_alone if each.error is None]):
            self._run_tensors(batch)

    def _run_joined(self, group: list[_Waiting]) -> list[_Waiting]:
        """The way of requests that came as bytes and ask alike; gives back those that are to be read one by one."""
        if len(group) > 1 and not self._joins:
            return group
        calls = [each.call for each in group if each.call is not None]
        if len(calls) < len(group):
            return group
        try:
            joined = self._join(calls)
        except Exception:
            return group
        if joined is None:
            return group
        inputs, rows = joined
        left: list[_Waiting] = []
        if min(rows) < 0:
            left = [each for each, own in zip(group, rows, strict=True) if own < 0]
            group = [each for each, own in zip(group, rows, strict=True) if own >= 0]
            rows = [own for own in rows if own >= 0]
        at = begin = 0
        while at < len(group):
            if not self._joins:  # what ran before showed that these must not be joined
                self._alone(group[at:])
                return left
            end, count = at + 1, rows[at]
            while end < len(group) and count + rows[end] <= self._max_rows:
                count += rows[end]
                end += 1
            batch = inputs if end - at == len(group) else cut_rows(inputs, begin, count)
            self._run_native(group[at:end], batch, rows[at:end])
            at, begin = end, begin + count
        return left

    def _run_native(self, batch: list[_Waiting], inputs: Tensors, rows: list[int]) -> None:
        self.batches += 1
        self._ran(len(batch), sum(rows))
        try:
            with tracing.together("batch", [each.trace for each in batch]):
                outputs = self._call(inputs)
            if len(batch) > 1 and not self._row_wise(outputs, sum(rows)):
                self._alone(batch)
                return
            call = batch[0].call
            if call is not None and call.output_filter:
                outputs = {alias: outputs[alias] for alias in call.output_filter}
            answers = split_answers(batch[0].resolved, outputs, rows)
        except Exception as error:
            self._failed(batch, error)
            return
        if answers is None:
            self._cut(batch, outputs, rows)
            return
        for each, answer in zip(batch, answers, strict=True):
            each.result = answer

    def _prepare(self, each: _Waiting) -> None:
        try:
            each.inputs = each.prepare()
            rows = {len(value) if value.ndim else -1 for value in each.inputs.values()}
            each.rows = rows.pop() if len(rows) == 1 else -1
        except Exception as error:
            each.error = error

    def _batches(self, ready: list[_Waiting]) -> list[list[_Waiting]]:
        """Requests that can be joined, in order, within the limit of rows."""
        batches: list[list[_Waiting]] = []
        rows = 0
        for each in ready:
            last = batches[-1] if batches and self._joins else None
            if last and rows + each.rows <= self._max_rows and _joinable(last[0], each):
                last.append(each)
                rows += each.rows
            else:
                batches.append([each])
                rows = each.rows
        return batches

    def _run_tensors(self, batch: list[_Waiting]) -> None:
        if len(batch) > 1 and not self._joins:
            self._alone(batch)
            return
        self.batches += 1
        self._ran(len(batch), sum(max(1, each.rows) for each in batch))
        try:
            joined = batch[0].inputs
            if len(batch) > 1:
                joined = {a: _cat([each.inputs[a] for each in batch]) for a in batch[0].inputs}
            with tracing.together("batch", [each.trace for each in batch]):
                outputs = self._call(joined)
            if len(batch) > 1 and not self._row_wise(outputs, sum(each.rows for each in batch)):
                self._alone(batch)
                return
        except Exception as error:
            self._failed(batch, error)
            return
        self._cut(batch, outputs, [each.rows for each in batch])

    def _failed(self, batch: list[_Waiting], error: Exception) -> None:
        """What a model cannot run is that request's fault, not its neighbours': each is tried alone."""
        if len(batch) == 1:
            batch[0].error = error
        else:
            self._alone(batch)

    def _alone(self, batch: list[_Waiting]) -> None:
        for each in batch:
            self._prepare(each)
            if each.error is None:
                self._run_tensors([each])

    def _row_wise(self, outputs: Tensors, rows: int) -> bool:
        """Whether each output of a joined run can be cut by requests; once one is not, nothing is joined any more."""
        joins, sure = rows_match(outputs, self._outputs, rows)
        self._joins &= joins
        return joins and sure

    def _cut(self, batch: list[_Waiting], outputs: Tensors, rows: list[int]) -> None:
        begin = 0
        for each, count in zip(batch, rows, strict=True):
            try:
                own = outputs if len(batch) == 1 else cut_rows(outputs, begin, count)
                each.result = each.finish(own)
            except Exception as error:
                each.error = error
            begin += count


def cut_rows(tensors: Tensors, begin: int, count: int) -> Tensors:
    """Some rows of each tensor."""
    return {alias: value[begin : begin + count] for alias, value in tensors.items()}


def rows_match(outputs: Tensors, specs: Mapping[str, TensorSpec], rows: int) -> tuple[bool, bool]:
    """(whether each output of a joined run has one row per row of its inputs, whether that is sure)."""
    sure = True
    for alias, value in outputs.items():
        shape, spec = tuple(value.shape), specs.get(alias)
        tail = spec.shape[1:] if spec is not None and spec.shape is not None else [None] * len(shape[1:])
        known = len(shape) == 1 + len(tail) and shape[0] == rows
        if not known or any(want not in (None, have) for want, have in zip(tail, shape[1:], strict=True)):
            log.warning(
                "output %r has shape %s for %d joined rows, which is not one row per row of the inputs; "
                "requests of this signature run one by one from now on",
                alias, list(shape), rows,
            )  # fmt: skip
            return False, False
        # A size that the signature leaves open may be that of a row, or may follow the rows that were joined.
        sure &= not any(want is None and have == rows for want, have in zip(tail, shape[1:], strict=True))
    return True, sure


def _error_of(done: asyncio.Future[Any]) -> BaseException | None:
    return asyncio.CancelledError() if done.cancelled() else done.exception()


def _asking_alike(group: list[_Waiting]) -> Collection[list[_Waiting]]:
    """The requests by what they ask for; those that did not come as bytes are one list."""
    alike: dict[Any, list[_Waiting]] = {}
    for each in group:
        key = None if each.call is None else (each.resolved, *each.call.output_filter)
        alike.setdefault(key, []).append(each)
    return alike.values()


class Joinable:
    """Inputs that are not tensors, but can be joined and cut by rows as tensors can."""

    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @classmethod
    def cat(cls, parts: Sequence[Any]) -> Any:
        raise NotImplementedError


def _cat(parts: Sequence[Any]) -> Any:
    return parts[0].cat(parts) if isinstance(parts[0], Joinable) else torch.cat(parts)  # pyrefly: ignore


def _joinable(one: _Waiting, two: _Waiting) -> bool:
    if one.rows < 0 or two.rows < 0:
        return False
    return all(
        isinstance(value, torch.Tensor | Joinable)
        and value.shape[1:] == two.inputs[alias].shape[1:]
        and value.dtype == two.inputs[alias].dtype
        for alias, value in one.inputs.items()
    )
