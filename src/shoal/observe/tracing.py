"""OpenTelemetry traces: reads W3C trace context from requests, records spans, and sends the context with calls.

Without ``opentelemetry`` (the extra ``otel``) or a configured SDK, nothing is recorded, and a request's trace context
is passed on unchanged. With them, each request, each batch and each call to another server is a span.
"""

import contextlib
import contextvars
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from shoal.errors import ConfigError, missing_extra

try:
    from opentelemetry import trace
except ImportError:
    trace = None

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
Headers = tuple[tuple[str, str], ...]
"""The trace context as it is sent: ``traceparent`` and, if there is one, ``tracestate``."""

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_STATE = 512
_share = 1.0
_current: contextvars.ContextVar[Headers] = contextvars.ContextVar("shoal_trace", default=())


def received(metadata: Iterable[tuple[str, Any]]) -> Headers:
    """The trace context of a request; () if it has none or a malformed one."""
    parent = state = ""
    for key, value in metadata:
        if key == TRACEPARENT:
            parent = value
        elif key == TRACESTATE:
            state = value
    found = _FORM.fullmatch(parent) if isinstance(parent, str) and parent else None
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return ()
    if not int(found[2], 16) or not int(found[3], 16):
        return ()
    keep = isinstance(state, str) and 0 < len(state) <= _MAX_STATE
    return ((TRACEPARENT, parent), (TRACESTATE, state)) if keep else ((TRACEPARENT, parent),)


def current() -> Headers:
    """The trace context to send with a call to another server: that of the open span, or of the request."""
    if trace is not None:
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            return _headers(context)
    return _current.get()


def trace_id(headers: Headers) -> str:
    """The id of a trace, for logs; "" if there is none."""
    return headers[0][1].split("-")[1] if headers else ""


class Span:
    """A unit of work; without an SDK it only passes the trace context on."""

    __slots__ = ("headers", "recorded")

    def __init__(self, recorded: Any, headers: Headers) -> None:
        self.recorded, self.headers = recorded, headers

    def finish(self, code: int = 0, why: str = "", at: float | None = None, **attributes: Any) -> None:
        """End the span; has no effect if it has already ended.

        Args:
            code: the gRPC status of the work.
            at: Unix seconds; by default now.
            attributes: further attributes; ``__`` in a name stands for a dot.
        """
        recorded, self.recorded = self.recorded, None
        if recorded is None:
            return
        recorded.set_attribute("rpc.grpc.status_code", int(code))
        recorded.set_attributes({key.replace("__", "."): value for key, value in attributes.items()})
        if code:
            assert trace is not None
            recorded.set_status(trace.Status(trace.StatusCode.ERROR, why[:300]))
        recorded.end(end_time=None if at is None else int(at * 1e9))


def share() -> float:
    """The sampled share of the traces that begin in this process."""
    return _share


def recording() -> bool:
    """Whether an SDK is configured, so that spans are recorded."""
    return trace is not None and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def begin(
    name: str,
    kind: str = "INTERNAL",
    parent: Headers = (),
    *,
    links: Sequence[Headers] = (),
    at: float | None = None,
    chosen: bool = False,
    attributes: Mapping[str, Any] | None = None,
) -> Span:
    """Begin a span; end it with :meth:`Span.finish`.

    Args:
        kind: SERVER, CLIENT or INTERNAL.
        parent: the trace context that it belongs to; () begins a new trace, if the sampler selects it.
        links: other traces that this work belongs to.
        at: Unix seconds at which it began, if not now.
        chosen: whether a trace that begins here was already selected by `share`.
    """
    if not recording() or (not parent and not chosen and random.random() >= _share):
        return Span(None, parent)
    assert trace is not None
    linked = [trace.Link(context) for context in map(_context, links) if context is not None]
    above = None
    if parent and (context := _context(parent)) is not None:
        above = trace.set_span_in_context(trace.NonRecordingSpan(context))
    span = trace.get_tracer("shoal").start_span(
        name, context=above, kind=trace.SpanKind[kind], attributes=dict(attributes or {}), links=linked,
        start_time=None if at is None else int(at * 1e9),
    )  # fmt: skip
    return Span(span, _headers(span.get_span_context()))


@contextlib.contextmanager
def inside(span: Span) -> Iterator[Span]:
    """Context in which calls to other servers, and new spans, belong to a span."""
    if span.recorded is None:
        token = _current.set(span.headers)
        try:
            yield span
        finally:
            _current.reset(token)
        return
    assert trace is not None
    with trace.use_span(span.recorded, end_on_exit=False, record_exception=False, set_status_on_exception=False):
        yield span


@contextlib.contextmanager
def together(name: str, of: Sequence[Headers], **attributes: Any) -> Iterator[None]:
    """A span for work on several requests, in the trace of the first request; links to the others' traces."""
    traced = [each for each in of if each]
    if not traced:
        yield
        return
    span = begin(name, parent=traced[0], links=traced[1:], attributes=attributes)
    try:
        with inside(span):
            yield
    finally:
        span.finish()


def _headers(context: Any) -> Headers:
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    state = context.trace_state.to_header() if context.trace_state else ""
    return ((TRACEPARENT, parent), (TRACESTATE, state)) if state else ((TRACEPARENT, parent),)


def _context(headers: Headers) -> Any:
    if not headers:
        return None
    assert trace is not None
    _, trace_number, span_number, flags, *_ = headers[0][1].split("-")
    return trace.SpanContext(
        int(trace_number, 16), int(span_number, 16), is_remote=True, trace_flags=trace.TraceFlags(int(flags, 16) & 1),
        trace_state=trace.TraceState.from_header([headers[1][1]]) if len(headers) > 1 else None,
    )  # fmt: skip


def start_exporting(endpoint: str, service: str, share: float = 1.0, **resource: str) -> Any:
    """Start to send spans to an OTLP receiver over HTTP, such as ``http://127.0.0.1:4318``.

    Args:
        service: the process's name in traces.
        share: the share of traces beginning here to record; requests in an existing trace follow its decision.

    Returns:
        The provider; call its ``shutdown()`` at the end to send the last spans.

    Raises:
        ConfigError: ``share`` is not between 0 and 1, or the endpoint is not a URL.
        MissingExtraError: the extra ``otel`` is not installed.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"the share of traces must be from 0 to 1, got {share:g}")
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"an OTLP endpoint must be a URL such as http://127.0.0.1:4318, got {endpoint!r}")
    try:
        from opentelemetry import trace as api
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
    except ImportError as error:
        raise missing_extra(error.name or "opentelemetry", "otel") from None
    named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": service}
    provider = TracerProvider(resource=Resource.create(named | resource), sampler=ParentBased(ALWAYS_ON))
    global _share
    _share = share  # sampled here: an unsampled trace then costs one random number
    url = endpoint.rstrip("/")
    exporter = OTLPSpanExporter(endpoint=url if url.endswith("/v1/traces") else f"{url}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    api.set_tracer_provider(provider)
    return provider
