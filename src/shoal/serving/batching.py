"""Adaptive micro-batching: requests that arrive while a batch runs are run together as the next one.

Nobody waits for company: a request that finds the model idle runs at once, on its own thread. Whoever finishes hands
the model to one of those who came meanwhile, and that one runs all of them.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

Tensors = dict[str, Any]


_NEVER = threading.Lock()  # stands in for the lock of a request that does not wait


class _Waiting:
    __slots__ = ("error", "inputs", "leads", "outputs", "ready", "rows")

    def __init__(self, inputs: Tensors, rows: int) -> None:
        self.inputs, self.rows = inputs, rows
        self.ready = _NEVER
        self.leads = False
        self.outputs: Tensors | None = None
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
        rows = {len(value) for value in inputs.values()}
        if len(rows) != 1:  # nothing to join by
            return self._call(inputs)
        mine = _Waiting(inputs, rows.pop())
        with self._lock:
            if self._busy:
                mine.ready = threading.Lock()
                mine.ready.acquire()
                self._queue.append(mine)
                wait = True
            else:
                self._busy, wait = True, False
        if wait:
            mine.ready.acquire()
            if not mine.leads:
                return _result(mine)
        self._lead(mine)
        return _result(mine)

    def _lead(self, mine: _Waiting) -> None:
        group = [mine]
        with self._lock:
            rows, rest = mine.rows, []
            for other in self._queue:
                if rows + other.rows <= self._max_rows and _joinable(mine.inputs, other.inputs):
                    group.append(other)
                    rows += other.rows
                else:
                    rest.append(other)
            self._queue = rest
            self.batches += 1
            self.requests += len(group)
        try:
            self._run(group)
        except BaseException as error:
            for each in group:
                each.error = error
        finally:
            with self._lock:
                following = self._queue.pop(0) if self._queue else None
                self._busy = following is not None
            if following is not None:
                following.leads = True
                following.ready.release()
            for each in group[1:]:
                each.ready.release()

    def _run(self, group: list[_Waiting]) -> None:
        if len(group) == 1:
            group[0].outputs = self._call(group[0].inputs)
            return
        joined = {alias: torch.cat([each.inputs[alias] for each in group]) for alias in group[0].inputs}
        outputs = self._call(joined)
        begin = 0
        for each in group:
            each.outputs = {alias: value[begin : begin + each.rows] for alias, value in outputs.items()}
            begin += each.rows


def _joinable(one: Tensors, two: Tensors) -> bool:
    return all(
        isinstance(value, torch.Tensor) and value.shape[1:] == two[alias].shape[1:] and value.dtype == two[alias].dtype
        for alias, value in one.items()
    )


def _result(waiting: _Waiting) -> Tensors:
    if waiting.error is not None:
        raise waiting.error
    assert waiting.outputs is not None
    return waiting.outputs
