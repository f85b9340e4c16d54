"""Adaptive micro-batching: requests that arrive close together are read, run and answered as one.

Batches run on the event loop's thread, so nothing is passed between threads or competes for the interpreter. Only a
model whose batches take long runs on a pool thread; requests that arrive meanwhile form its next batch.

A single request does not wait for others. When requests arrive fast, the first of a batch waits a millisecond, but only
if recent waits have gathered others.
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
WINDOW = 0.00095  # longest wait of a batch's first request, in seconds; just under a tick of the loop's clock
PROBE = 200  # one batch in this many waits even if waiting gathered nothing lately
SHORT = 0.002  # seconds of work that may block the loop


class Pace:
    """Measures how long calls of one kind take, to decide whether they may run on the event loop."""

    def __init__(self, may_inline: bool = True) -> None:
        self._may_inline = may_inline
        self._seconds: float | None = None

    @property
    def short(self) -> bool:
        return self._may_inline and self._seconds is not None and self._seconds < SHORT

    def timed(self, work: Callable[[], Any]) -> Any:
        begin = time.thread_time()  # this thread's CPU time: waiting for a processor is not part of the work
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
    """Runs ``call`` on joined requests: rows are concatenated along the first dimension and split again afterwards.

    Args:
        call: takes and returns ``{alias: tensor}``.
        join: returns the joined inputs for ``call`` and the number of rows of each request; -1 for a request that is
            not included and is read separately. If it returns None or raises, all are read separately.
        max_rows: a batch has at most this many rows, unless one request alone has more.
        pool: runs batches that take long; None = they run on the loop.
        outputs: alias -> its spec, if known.
        ran: called after each batch with its number of requests and rows.

    If a joined run does not return one output row per input row, its result is discarded; its requests run one by one,
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
        self._due = False  # a batch is running or scheduled
        self._gap = 1.0  # recent seconds between requests
        self._arrived = 0.0
        self._mean_waited = 1.0  # recent number of requests in a batch that waited
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
        """Return ``finish(outputs of prepare())``, run together with other requests or alone.

        A request that came as bytes also passes its ``call``: requests of the same form are read and answered natively,
        without prepare and finish, with the model spec ``resolved``.
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
            waits = self._mean_waited > 1.2 or self._since_probe >= PROBE
        if waits:
            self._since_probe = 0
            loop.call_later(WINDOW, self._begin, loop, True)
        else:
            loop.call_soon(self._begin, loop, False)

    def _begin(self, loop: asyncio.AbstractEventLoop, waited: bool) -> None:
        group = self._queue[:MAX_GROUP]
        del self._queue[:MAX_GROUP]
        if waited:
            self._mean_waited += 0.5 * (len(group) - self._mean_waited)
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
        """Answer the requests of a group, all with an error if its run raised, and start the next batch."""
        self._due = False
        if escaped is not None:
            log.error("a batch of %d requests failed", len(group), exc_info=escaped)
        for each in group:
            future = each.future
            if future is None or future.done():  # the caller has given up
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
        """Give each request in the group its result or its error."""
        self.requests += len(group)
        separate: list[_Waiting] = []
        for alike in _same_form(group):
            separate += self._run_joined(alike)
        for each in separate:
            self._prepare(each)
        for batch in self._batches([each for each in separate if each.error is None]):
            self._run_tensors(batch)

    def _run_joined(self, group: list[_Waiting]) -> list[_Waiting]:
        """Run requests of the same form that came as bytes; returns those that must be read one by one."""
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
            if not self._joins:  # an earlier run showed that these must not be joined
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
        """Groups of requests that can be joined, in order, within the row limit."""
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
        """Handle a failed batch: run each request alone, so that only the invalid ones fail."""
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
        """Whether each output of a joined run can be split by request; if not, nothing is joined from then on."""
        joins, certain = rows_match(outputs, self._outputs, rows)
        self._joins &= joins
        return joins and certain

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
    """(whether each output of a joined run has one row per input row, whether that is certain)."""
    certain = True
    for alias, value in outputs.items():
        shape, spec = tuple(value.shape), specs.get(alias)
        tail = spec.shape[1:] if spec is not None and spec.shape is not None else [None] * len(shape[1:])
        known = len(shape) == 1 + len(tail) and shape[0] == rows
        if not known or any(want not in (None, have) for want, have in zip(tail, shape[1:], strict=True)):
            log.warning(
                "output %r has shape %s for %d joined rows, not one row per input row; "
                "from now on, requests of this signature run one at a time",
                alias, list(shape), rows,
            )  # fmt: skip
            return False, False
        # A size that the signature leaves open may belong to a row or depend on the number of joined rows.
        certain &= not any(want is None and have == rows for want, have in zip(tail, shape[1:], strict=True))
    return True, certain


def _error_of(done: asyncio.Future[Any]) -> BaseException | None:
    return asyncio.CancelledError() if done.cancelled() else done.exception()


def _same_form(group: list[_Waiting]) -> Collection[list[_Waiting]]:
    """Group requests of the same form; those that did not come as bytes are one list."""
    alike: dict[Any, list[_Waiting]] = {}
    for each in group:
        key = None if each.call is None else (each.resolved, *each.call.output_filter)
        alike.setdefault(key, []).append(each)
    return alike.values()


class Joinable:
    """Inputs that are not tensors but can be joined and split by rows."""

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
