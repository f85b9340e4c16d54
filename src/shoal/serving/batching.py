"""Adaptive micro-batching: requests that arrive while a batch runs are run together as the next one.

Nobody waits for company: a request that finds the model idle runs at once, on its own thread. Whoever finishes hands
the model to one of those who came meanwhile, and that one does all the work of all of them, decoding and encoding
included, while the others sleep: threads that all want the interpreter at once would slow each other down.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

Tensors = dict[str, Any]

MAX_GROUP = 256

_NEVER = threading.Lock()  # stands in for the lock of a request that does not wait


class _Waiting:
    __slots__ = ("error", "finish", "inputs", "leads", "prepare", "ready", "result", "rows")

    def __init__(self, prepare: Callable[[], Tensors], finish: Callable[[Tensors], Any]) -> None:
        self.prepare, self.finish = prepare, finish
        self.ready = _NEVER
        self.leads = False
        self.inputs: Tensors = {}
        self.rows = -1
        self.result: Any = None
        self.error: BaseException | None = None


class Batcher:
    """Runs ``call`` on joined requests; their first dimension is the rows that are joined and cut apart again.

    Args:
        call: takes and gives ``{alias: tensor}``.
        max_rows: a batch has at most this many rows, unless one request alone has more.
    """

    def __init__(self, call: Callable[[Tensors], Tensors], max_rows: int = 1024) -> None:
        self._call = call
        self._max_rows = max_rows
        self._lock = threading.Lock()
        self._queue: list[_Waiting] = []
        self._busy = False
        self.batches = 0
        self.requests = 0

    def __call__(self, inputs: Tensors) -> Tensors:
        return self.submit(lambda: inputs, lambda outputs: outputs)

    def submit(self, prepare: Callable[[], Tensors], finish: Callable[[Tensors], Any]) -> Any:
        """``finish(outputs of prepare())``; either may run on another request's thread; errors are raised here."""
        mine = _Waiting(prepare, finish)
        with self._lock:
            wait = self._busy
            if wait:
                mine.ready = threading.Lock()
                mine.ready.acquire()
                self._queue.append(mine)
            else:
                self._busy = True
        if wait:
            mine.ready.acquire()
        if not wait or mine.leads:
            self._lead(mine)
        if mine.error is not None:
            raise mine.error
        return mine.result

    def _lead(self, mine: _Waiting) -> None:
        with self._lock:
            group = [mine, *self._queue[: MAX_GROUP - 1]]
            del self._queue[: MAX_GROUP - 1]
            self.requests += len(group)
        try:
            for each in group:
                self._prepare(each)
            for batch in self._batches([each for each in group if each.error is None]):
                self._run(batch)
        finally:
            with self._lock:
                following = self._queue.pop(0) if self._queue else None
                self._busy = following is not None
            if following is not None:
                following.leads = True
                following.ready.release()
            for each in group[1:]:
                each.ready.release()

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
            last = batches[-1] if batches else None
            if last and rows + each.rows <= self._max_rows and _joinable(last[0], each):
                last.append(each)
                rows += each.rows
            else:
                batches.append([each])
                rows = each.rows
        return batches

    def _run(self, batch: list[_Waiting]) -> None:
        self.batches += 1
        try:
            if len(batch) == 1:
                outputs = self._call(batch[0].inputs)
            else:
                outputs = self._call({a: torch.cat([each.inputs[a] for each in batch]) for a in batch[0].inputs})
        except Exception as error:
            for each in batch:
                each.error = error
            return
        begin = 0
        for each in batch:
            try:
                own = outputs if len(batch) == 1 else {a: v[begin : begin + each.rows] for a, v in outputs.items()}
                each.result = each.finish(own)
            except Exception as error:
                each.error = error
            begin += each.rows


def _joinable(one: _Waiting, two: _Waiting) -> bool:
    if one.rows < 0 or two.rows < 0:
        return False
    return all(
        isinstance(value, torch.Tensor)
        and value.shape[1:] == two.inputs[alias].shape[1:]
        and value.dtype == two.inputs[alias].dtype
        for alias, value in one.inputs.items()
    )
