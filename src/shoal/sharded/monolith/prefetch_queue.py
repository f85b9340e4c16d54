"""First-in-first-out queues of nested structures of tensors between the stages of a step."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from shoal.background.queue import BoundedQueue
from shoal.background.queue import EndOfInput as EndOfInput
from shoal.comm.horovod.hooks import SessionRunHook
from shoal.errors import ConfigError
from shoal.ragged import Ragged

DEADLINE_S = 3600.0  # the default of every wait; long, because a stage can wait for data


QUEUE_KEYS = (
    "embedding_prefetch_capacity",
    "enable_async_optimize",
    "enable_pipelined_bwda2a",
    "enable_pipelined_fwda2a",
)


def queue_capacities(queue_configs: Mapping[str, int] | None) -> dict[str, int]:
    """The capacity of every queue of a table; 0 where ``queue_configs`` does not name it."""
    given = dict(queue_configs or {})
    if unknown := sorted(set(given) - set(QUEUE_KEYS)):
        raise ConfigError(f"queue_configs has no setting {unknown[0]!r}; settings are {', '.join(QUEUE_KEYS)}")
    for key, capacity in sorted(given.items()):
        if not hasattr(capacity, "__index__"):
            raise ConfigError(f"queue_configs: {key} must be an integer, got {capacity!r}")
        if capacity < 0:
            raise ConfigError(f"queue_configs: {key} must be >= 0, got {capacity}")
    return {key: int(given.get(key, 0)) for key in QUEUE_KEYS}


def hooks_of(tables: Iterable[Any]) -> list[Any]:
    """The hooks of all tables that have some."""
    return [hook for table in tables if hasattr(table, "get_queue_hooks") for hook in table.get_queue_hooks()]


class StructureQueue(BoundedQueue):
    """A queue of at most ``capacity`` structures, safe to use from several threads.

    `enqueue` blocks while it is full, `dequeue` while it is empty. After `close` the remaining elements can still be
    taken, then `dequeue` raises `EndOfInput`, or the error that the producer ended with.
    """

    def __init__(self, capacity: int = 1, name: str = "prefetch_queue") -> None:
        super().__init__(capacity, name)

    def enqueue(self, struct: Any, timeout: float = DEADLINE_S) -> None:
        """Add a copy of a structure that shares its tensors."""
        self.put(_copy(struct, {}), timeout)

    def dequeue(self, timeout: float = DEADLINE_S) -> Any:
        """Take the oldest structure."""
        return self.get(timeout)


def enqueue_dicts_with_queue_return(
    tensors: Any, capacity: int = 1, queue_name: str = "prefetch_queue"
) -> tuple[Any, StructureQueue | None]:
    """Pass a structure through a new queue; returns the result and the queue, which is empty again.

    ``tensors`` are nested lists, tuples and dicts of tensors and ragged tensors; bool, int, str, None and parameters
    pass through unchanged. With capacity 0 it returns the structure itself and None.
    """
    if capacity == 0:
        return tensors, None
    queue = StructureQueue(capacity, queue_name)
    queue.enqueue(tensors)
    return queue.dequeue(), queue


def _copy(value: Any, seen: dict[int, Any]) -> Any:
    """Copy the containers of a structure, but not its tensors."""
    if isinstance(value, nn.Parameter | bool | int | str) or value is None:
        return value
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Ragged):
        if isinstance(value.values, Ragged):
            raise ConfigError("ragged tensors in a queue must have one ragged dimension, got a doubly ragged one")
        return seen.setdefault(id(value), value)
    if isinstance(value, Mapping):
        items = {key: _copy(item, seen) for key, item in value.items()}
        if not isinstance(value, dict):
            return type(value)(items)  # type: ignore[call-arg]
        result = copy.copy(value)  # keeps its type, and what the type holds besides items
        result.update(items)
        return result
    if isinstance(value, tuple):
        items = [_copy(item, seen) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_copy(item, seen) for item in value]
    raise ConfigError(
        "elements of a queue must be nested lists, tuples and dicts of tensors, bool, int, str or None, "
        f"got {type(value).__name__}"
    )


class Stage:
    """A producer that runs ahead in its own thread, by up to ``capacity + 1`` elements.

    ``producer_fn()`` makes the next element; ``StopIteration`` ends the input. An element made ahead does not reflect
    the updates that happen before it is taken, up to ``capacity + 1`` of them.
    """

    def __init__(self, producer_fn: Callable[[], Any], capacity: int = 1, name: str = "stage") -> None:
        self.queue = StructureQueue(max(1, capacity), name)
        self._hook = EnqueueHook(self.queue, producer_fn)
        self._hook.begin()

    def get(self, timeout: float = DEADLINE_S) -> Any:
        """The next element; `EndOfInput` (a ``StopIteration``) after the last, or the producer's own error."""
        return self.queue.dequeue(timeout)

    def close(self) -> None:
        """End the thread and drop its elements."""
        self._hook.end()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class EnqueueHook(SessionRunHook):
    """Fills a queue from ``producer_fn`` in a daemon thread, from `begin` until the input ends or the queue closes.

    Without a producer the loop itself enqueues, and the hook only closes the queue in `end`.
    """

    def __init__(self, queue: StructureQueue, producer_fn: Callable[[], Any] | None = None) -> None:
        self.queue, self._producer = queue, producer_fn
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        if self._thread is None and self._producer is not None:
            self._thread = threading.Thread(
                target=self._run, args=(self._producer,), name=f"{self.queue.name}-producer", daemon=True
            )
            self._thread.start()

    def _run(self, producer: Callable[[], Any]) -> None:
        error: BaseException | None = None
        try:
            while not self.queue.closed:
                self.queue.put(producer(), DEADLINE_S)
        except StopIteration:
            pass
        except BaseException as raised:
            error = raised
        self.queue.close(error)

    def end(self, ctx: Any = None) -> None:
        self.queue.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(10)


class AsyncPushHook(SessionRunHook):
    """Calls ``run``, which takes one element of ``queue`` and applies it, once per step, one step late.

    The first step only enqueues. `end` runs the remaining elements, so every element is applied exactly once, in order.
    """

    def __init__(self, queue: StructureQueue, run: Callable[[], Any]) -> None:
        self.queue, self.run = queue, run
        self._armed = False

    def before_run(self, ctx: Any = None) -> None:
        if self._armed and self.queue.size():
            self.run()

    def after_run(self, ctx: Any = None, values: Any = None) -> None:
        self._armed = self._armed or self.queue.size() > 0

    def end(self, ctx: Any = None) -> None:
        while self.queue.size():
            self.run()


class AsyncFunctionMgr:
    """Defers function calls by one step.

    A synchronous call runs at once. An asynchronous call is put into the queue ``queue_name``, of capacity 1, and that
    queue's `AsyncPushHook` runs it in the next step. A call that finds the queue full runs the waiting call first, so
    it also works in a loop that does not call hooks.
    """

    def __init__(self, is_async: bool = True) -> None:
        self._is_async = is_async
        self._queues: dict[str, StructureQueue] = {}
        self._hooks: dict[str, AsyncPushHook] = {}
        self._running = threading.local()

    @property
    def hooks(self) -> list[AsyncPushHook]:
        return list(self._hooks.values())

    def add_async_function(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        is_async: bool | None = None,
        queue_name: str = "async_queue",
    ) -> Any:
        """Call ``target(*args, **kwargs)`` now, and return its result, or one step later."""
        args, kwargs = tuple(() if args is None else args), dict(kwargs or {})
        if not (self._is_async if is_async is None else is_async):
            return target(*args, **kwargs)
        if queue_name in getattr(self._running, "names", ()):
            raise ConfigError(
                f"async function in queue {queue_name!r}: it was added by a call from the same queue, so it would wait "
                "for its own effect; use another queue_name"
            )
        if queue_name not in self._queues:
            queue = self._queues[queue_name] = StructureQueue(1, queue_name)
            self._hooks[queue_name] = AsyncPushHook(queue, lambda: self._run(queue_name))
        queue = self._queues[queue_name]
        if queue.size() >= queue.capacity:
            self._run(queue_name)
        queue.put((target, _shallow(args), _shallow(kwargs)))
        return None

    def _run(self, queue_name: str) -> None:
        target, args, kwargs = self._queues[queue_name].dequeue()
        names = self._running.names = [*getattr(self._running, "names", ()), queue_name]
        try:
            target(*args, **kwargs)
        finally:
            names.pop()
            self._running.names = names

    def flush(self) -> None:
        """Run all waiting calls."""
        for hook in self._hooks.values():
            hook.end()


def _shallow(value: Any) -> Any:
    """Copy the containers, so that the caller can change its own."""
    if isinstance(value, dict):
        return {key: _shallow(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shallow(item) for item in value]
    if type(value) is tuple:
        return tuple(_shallow(item) for item in value)
    return value
