"""Records of individual requests: access log lines and trace spans."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shoal.metrics import emit_counter
from shoal.observe import tracing
from shoal.observe.lines import AccessLog
from shoal.observe.security import ServerSecurity

_SAMPLED, _TRACED = 1, 2  # why the front end recorded a call


class Request:
    """The recorded facts about one request that Python answers."""

    __slots__ = ("bytes", "code", "identity", "method", "model", "peer", "rows", "sampled", "signature", "why")

    def __init__(self, method: str, peer: str, sampled: bool | None) -> None:
        self.method, self.peer, self.sampled = method, peer, sampled
        self.model = self.signature = self.identity = self.why = ""
        self.code = 0
        self.bytes: int | None = None
        self.rows: int | None = None

    def failed(self, code: int, why: str) -> None:
        self.code, self.why = int(code), why


class Noting:
    """Writes a server's spans and access log lines.

    Args:
        access: the access log; None: no access log.
    """

    def __init__(self, security: ServerSecurity, access: AccessLog | None = None) -> None:
        self._security, self._access = security, access
        self._count = 0
        self._front: Any = None
        self._lanes: Any = None

    @contextmanager
    def request(
        self, method: str, metadata: Any, peer: str, sampled: bool | None = None, *, system: str = "grpc"
    ) -> Iterator[Request]:
        """Context in which a request is answered. ``sampled``: whether to log it; None: decided here."""
        seen = Request(method, peer, sampled)
        begun, start = time.time(), time.perf_counter()
        span = tracing.begin(method, "SERVER", tracing.received(metadata))
        try:
            with tracing.inside(span):
                yield seen
        finally:
            span.finish(seen.code, seen.why, **_attributes(seen, system))
            if self._access is not None and self._is_logged(seen):
                self._log(seen, begun, time.perf_counter() - start, span.headers)

    def _is_logged(self, seen: Request) -> bool:
        assert self._access is not None
        if seen.sampled is None:
            self._count += 1
            seen.sampled = bool(self._access.every) and self._count % self._access.every == 0
        return self._access.may_log_failure() if seen.code else seen.sampled

    def _log(self, seen: Request, begun: float, seconds: float, trace: tracing.Headers) -> None:
        assert self._access is not None
        self._access.write(
            begun, seconds, method=seen.method, peer=seen.peer, who=seen.identity, model=seen.model,
            signature=seen.signature, rows=seen.rows, bytes=seen.bytes, code=seen.code, error=seen.why[:500],
            trace=tracing.trace_id(trace),
        )  # fmt: skip

    # --- requests that the native front end answered ------------------------------------------------------------------

    def watch(self, front: Any, lanes: Any) -> None:
        """Also record requests that a native front end answers itself; :meth:`collect` must be called regularly."""
        self._front, self._lanes = front, lanes
        self.collect()

    def collect(self) -> None:
        """Record the requests that the front end has answered since the last call."""
        if self._front is None:
            return
        share = tracing.share()
        roots = (round(1 / share) if share else -1) if tracing.recording() else 0
        self._front.note_calls(self._access.every if self._access is not None else 0, roots)
        notes, dropped = self._front.take_notes()
        if dropped:
            emit_counter("shoal_serving_untold_requests", dropped)
        now = time.time()
        for lane, why, rows, size, age, seconds, peer, common_name, metadata in notes:
            spec = self._lanes.spec_of(lane)
            seen = Request("Predict", peer, bool(why & _SAMPLED))
            seen.rows, seen.bytes = rows, size
            if spec is not None:
                seen.model, seen.signature = spec.name, spec.signature_name or "serving_default"
            headers = tracing.received(metadata)
            if why & _TRACED:
                span = tracing.begin("Predict", "SERVER", headers, at=now - age, chosen=True)
                headers = span.headers
                span.finish(at=now - age + seconds, **_attributes(seen, "grpc"))
            if seen.sampled and self._access is not None:
                bearer = next((value.removeprefix("Bearer ") for key, value in metadata if key == "authorization"), "")
                seen.identity = self._security.identify(bearer, common_name) or ""
                self._log(seen, now - age, seconds, headers)


def _attributes(seen: Request, system: str) -> dict[str, Any]:
    found = {
        "rpc__system": system, "rpc__method": seen.method, "net__peer__name": seen.peer, "shoal__model": seen.model,
        "shoal__signature": seen.signature, "shoal__rows": seen.rows,
    }  # fmt: skip
    return {key: value for key, value in found.items() if value not in ("", None)}
