"""Joins small requests into one call and splits large ones into parts; each caller gets its own answer."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from shoal.errors import DataError
from shoal.observe import tracing
from shoal.serving.client.caller import is_too_large
from shoal.serving.client.columns import Column, cut, joined, kind_of, row_bytes, rows_of
from shoal.serving.status import Code, StatusError

Columns = dict[str, Column]
Send = Callable[[Any, Columns, float], Awaitable[Columns]]
"""``await send(target, columns, end)`` makes one call to ``target``."""


@dataclass(slots=True, eq=False)
class _Waiting:
    columns: Columns
    rows: int
    end: float
    answer: "asyncio.Future[Columns]"
    trace: tracing.Headers = ()


class Joiner:
    """Queues requests while enough calls are in progress, and joins the queued ones. Used on one event loop.

    A request that arrives while there is room is sent at once; it never waits for others to join.

    Args:
        send: makes one call.
        room: the number of calls that may be in progress now.
        max_rows: maximum rows per call; larger requests are split. 1 or less disables joining and splitting.
        max_bytes: approximate maximum size of one call.
    """

    def __init__(self, send: Send, room: Callable[[], int], max_rows: int, max_bytes: int) -> None:
        self._send, self._room, self._max_rows, self._max_bytes = send, room, max_rows, max_bytes
        self._queues: dict[Any, deque[_Waiting]] = {}
        self._under_way = 0
        self._pumping = False
        self._tasks: set[asyncio.Task] = set()

    async def ask(self, target: Any, columns: Columns, end: float, *, by_row: bool = True) -> Columns:
        """Return the outputs for these inputs; ``by_row``: whether requests may be joined and split."""
        rows = rows_of(columns) if by_row and self._max_rows > 1 else None
        if rows is None:
            return await self._send(target, columns, end)
        most = max(1, min(self._max_rows, int(self._max_bytes // max(1.0, row_bytes(columns, rows)))))
        if rows <= most:
            return await self._queue(target, columns, rows, end)
        counts = [most] * (rows // most) + ([rows % most] if rows % most else [])
        return await self._in_parts(target, columns, counts, end)

    async def _in_parts(self, target: Any, columns: Columns, counts: list[int], end: float) -> Columns:
        parts = cut(columns, counts)
        assert parts is not None
        tasks = [
            asyncio.ensure_future(self._queue(target, part, n, end)) for part, n in zip(parts, counts, strict=True)
        ]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        if len({kind_of(answer) for answer in answers}) > 1:  # the model has changed meanwhile
            return await self._send(target, columns, end)
        return joined(answers)

    def _queue(self, target: Any, columns: Columns, rows: int, end: float) -> Awaitable[Columns]:
        waiting = _Waiting(columns, rows, end, asyncio.get_running_loop().create_future(), tracing.current())
        self._queues.setdefault((target, kind_of(columns)), deque()).append(waiting)
        self._pump_soon()
        return waiting.answer

    def _pump_soon(self) -> None:
        """Schedule `_pump`, so that it runs after all requests that have arrived by now are queued."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        while self._queues and self._under_way < max(1, self._room()):
            key = next(iter(self._queues))
            queue = self._queues.pop(key)
            batch = self._take(queue)
            if queue:
                self._queues[key] = queue  # behind the other queues
            if batch:
                self._under_way += 1
                task = asyncio.get_running_loop().create_task(self._run(key[0], batch))
                self._tasks.add(task)
                task.add_done_callback(self._ended)

    def _take(self, queue: deque[_Waiting]) -> list[_Waiting]:
        batch: list[_Waiting] = []
        rows, now = 0, time.monotonic()
        while queue and (not batch or rows + queue[0].rows <= self._max_rows):
            one = queue.popleft()
            if one.answer.done():  # the caller has given up
                continue
            if one.end <= now:
                late = "no call could be sent before the deadline; the replicas are overloaded"
                one.answer.set_exception(StatusError(Code.DEADLINE_EXCEEDED, late))
                continue
            batch.append(one)
            rows += one.rows
        return batch

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        self._under_way -= 1
        if self._queues:
            self._pump_soon()

    async def _run(self, target: Any, batch: list[_Waiting]) -> None:
        try:
            columns = joined([one.columns for one in batch])
            with tracing.together("call", [one.trace for one in batch]):
                outputs = await self._send(target, columns, max(one.end for one in batch))
            parts = cut(outputs, [one.rows for one in batch]) if len(batch) > 1 else [outputs]
            if parts is None:
                raise StatusError(Code.INTERNAL, "the response does not have one row per input row")
            for one, part in zip(batch, parts, strict=True):
                if not one.answer.done():
                    one.answer.set_result(part)
        except StatusError as error:
            if len(batch) > 1 and (error.code == Code.INVALID_ARGUMENT or is_too_large(error)):
                await self._each(target, batch)  # only the invalid ones should fail
            elif is_too_large(error) and batch[0].rows > 1 and not batch[0].answer.done():
                await self._halves(target, batch[0])
            else:
                _fail(batch, error)
        except asyncio.CancelledError:
            _fail(batch, StatusError(Code.CANCELLED, "the client was closed"))
            raise
        except DataError as error:
            _fail(batch, StatusError(Code.INTERNAL, str(error)))
        except Exception as error:
            _fail(batch, error)

    async def _each(self, target: Any, batch: list[_Waiting]) -> None:
        await asyncio.gather(*(self._run(target, [one]) for one in batch))

    async def _halves(self, target: Any, one: _Waiting) -> None:
        counts = [one.rows // 2, one.rows - one.rows // 2]
        parts = cut(one.columns, counts)
        assert parts is not None
        loop = asyncio.get_running_loop()
        halves = [
            _Waiting(part, n, one.end, loop.create_future(), one.trace) for part, n in zip(parts, counts, strict=True)
        ]
        await asyncio.gather(*(self._run(target, [half]) for half in halves))
        try:
            one.answer.set_result(joined([half.answer.result() for half in halves]))
        except Exception as error:
            _fail([one], error)
        for half in halves:
            half.answer.exception()  # retrieved, so that asyncio does not warn

    def close(self) -> None:
        """Cancel calls in progress and queued requests."""
        for queue in self._queues.values():
            _fail(list(queue), StatusError(Code.CANCELLED, "the client was closed"))
        self._queues.clear()
        for task in list(self._tasks):
            task.cancel()


def _fail(batch: list[_Waiting], error: Exception) -> None:
    for one in batch:
        if not one.answer.done():
            one.answer.set_exception(error)
