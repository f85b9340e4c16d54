"""Admission control: who may call and how often, how many requests may wait, and whether the server is overloaded."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from shoal import _core
from shoal.errors import ConfigError
from shoal.metrics import emit_counter
from shoal.serving.security import ServerSecurity, caller
from shoal.serving.status import Code, StatusError

MAX_WAITING = 1024
BUSY_SECS = 2.0
"""How long requests must be refused before the server reports that it is not ready."""
REST_SECS = 3.0
"""How long no request may be refused before the server is ready again."""


class Overloaded(StatusError):
    """RESOURCE_EXHAUSTED because too many requests are waiting; 429 over REST."""

    def __new__(cls, code: int, message: str = "") -> "Overloaded":
        return Exception.__new__(cls, code, message)


class Admission:
    """Counts the requests of each model and refuses those over the limit. Thread-safe.

    Args:
        max_waiting: maximum requests per model that wait or run.
        limits: model -> its own ``max_waiting``.
    """

    def __init__(self, max_waiting: int = MAX_WAITING, limits: Mapping[str, int] | None = None) -> None:
        for name, limit in {"max_waiting": max_waiting, **(limits or {})}.items():
            if limit < 1:
                raise ConfigError(f"the limit on waiting requests, {name}, must be at least 1, got {limit}")
        self.max_waiting, self.limits = max_waiting, dict(limits or {})
        self._lock = threading.Lock()
        self._inside: dict[str, int] = {}
        self._refused = 0
        self._front: Any = None
        self._seen: deque[float] = deque(maxlen=1024)  # when refusals were seen, in monotonic seconds
        self._counted = 0
        self._overloaded = False

    def watch(self, front: Any) -> None:
        """Give the native front end the models' limits for its own queue, and count its refusals."""
        self._front = front
        for model, limit in self.limits.items():
            front.set_limit(model, limit)

    @property
    def refused(self) -> int:
        """The number of requests refused because too many waited or because their answer would have been late."""
        return self._refused + (self._front.refused if self._front is not None else 0)

    def enter(self, model: str) -> None:
        """Admit a request, for which :meth:`leave` must follow; raises Overloaded if the model has too many."""
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
            f"model {model!r} has {inside} requests waiting or running, the limit is {limit}; try again later or "
            "on another replica",
        )

    def leave(self, model: str) -> None:
        with self._lock:
            left = self._inside[model] - 1
            if left:
                self._inside[model] = left
            else:
                del self._inside[model]

    def overloaded(self) -> bool:
        """Whether requests have been refused for some time. Call it at least once a second."""
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


class Callers:
    """Identifies callers and limits how often each of them calls.

    Args:
        security: the credentials that callers must present.
        rate_limit: requests per second of each caller; 0: no limit.
        rate_limits: caller -> its own ``rate_limit``.
        counted: whether the front end counts requests before they arrive here.
    """

    def __init__(
        self, security: ServerSecurity, rate_limit: float, rate_limits: Mapping[str, float] | None, counted: bool
    ) -> None:
        limits = rate_limits or {}
        for name, limit in {"rate_limit": rate_limit, **limits}.items():
            if limit < 0:
                raise ConfigError(f"the limit of requests per second, {name}, must be at least 0, got {limit:g}")
        self._security, self._counted = security, counted
        self._authenticates = security.authenticates
        rates = _core.Rates(rate_limit)
        for name, limit in limits.items():
            rates.set(name, limit)
        self.rates = rates if rate_limit or limits else None
        """The counter of requests; None without limits."""

    def identify(self, context: Any) -> str:
        """The caller's name, "" without authentication; raises UNAUTHENTICATED or Overloaded."""
        identity = caller(context, self._security) if self._authenticates else ""
        if not self._counted:
            self.admit(identity, context.peer())
        if identity is None:
            emit_counter("shoal_serving_unauthenticated", 1)
            raise StatusError(
                Code.UNAUTHENTICATED, "the token or certificate is missing or unknown; send authorization: Bearer …"
            )
        return identity

    def admit(self, identity: str | None, peer: str) -> None:
        """Count a request; raises Overloaded if the caller is over its rate limit."""
        if self.rates is not None and not self.rates.admit(identity or peer.rpartition(":")[0]):
            raise Overloaded(
                Code.RESOURCE_EXHAUSTED,
                f"{identity or 'this caller'} makes more requests per second than it may; try again later",
            )
