"""Overload: how many requests of a model may wait, and whether the server can take more."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from shoal.errors import ConfigError
from shoal.metrics import emit_counter
from shoal.serving.status import Code, StatusError

MAX_WAITING = 1024
BUSY_SECS = 2.0
"""How long requests must have been refused, again and again, until the server says that it is not ready."""
REST_SECS = 3.0
"""How long none must have been refused until it is ready again."""


class Overloaded(StatusError):
    """RESOURCE_EXHAUSTED since too many requests wait; over REST it is 429."""

    def __new__(cls, code: int, message: str = "") -> "Overloaded":
        return Exception.__new__(cls, code, message)


class Admission:
    """Counts requests of each model, and refuses those that are too many. For any thread.

    Args:
        max_waiting: requests of one model that may wait or run.
        limits: model -> the same for that model.
        front: the native front end, whose refusals count too; it has the same limits for what waits there.
    """

    def __init__(self, max_waiting: int = MAX_WAITING, limits: Mapping[str, int] | None = None) -> None:
        for name, limit in {"max_waiting": max_waiting, **(limits or {})}.items():
            if limit < 1:
                raise ConfigError(f"the limit of waiting requests, {name}, must be at least 1, got {limit}")
        self.max_waiting, self.limits = max_waiting, dict(limits or {})
        self._lock = threading.Lock()
        self._inside: dict[str, int] = {}
        self._refused = 0
        self._front: Any = None
        self._seen: deque[float] = deque(maxlen=1024)  # when refusals were seen, in monotonic seconds
        self._counted = 0
        self._overloaded = False

    def watch(self, front: Any) -> None:
        """Gives a native front end the limits of models, and counts what it refuses."""
        self._front = front
        for model, limit in self.limits.items():
            front.set_limit(model, limit)

    @property
    def refused(self) -> int:
        """Requests that were refused because too many waited, or because they would have come too late."""
        return self._refused + (self._front.refused if self._front is not None else 0)

    def enter(self, model: str) -> None:
        """Raises Overloaded where a model has too many requests; else :meth:`leave` must follow."""
        limit = self.limits.get(model, self.max_waiting)
        with self._lock:
            inside = self._inside.get(model, 0)
            if inside < limit:
                self._inside[model] = inside + 1
                return
            self._refused += 1
        emit_counter("shoal_serving_refused", 1, f"model_name={model}")
        raise Overloaded(
            Code.RESOURCE_EXHAUSTED,
            f"model {model!r} has {inside} requests, at most {limit} may wait or run; try again later or elsewhere",
        )

    def leave(self, model: str) -> None:
        with self._lock:
            left = self._inside[model] - 1
            if left:
                self._inside[model] = left
            else:
                del self._inside[model]

    def overloaded(self) -> bool:
        """Whether requests have been refused for some time; call it now and then, at least once a second."""
        now, refused = time.monotonic(), self.refused
        with self._lock:
            if refused != self._counted:
                self._counted = refused
                self._seen.append(now)
            if not self._seen or now - self._seen[-1] > REST_SECS:
                self._seen.clear()
                self._overloaded = False
            elif now - self._seen[0] >= BUSY_SECS:
                self._overloaded = True
            return self._overloaded
