"""Traces in OpenTelemetry's terms: W3C trace context comes in with requests and goes out with calls, spans between.

Without ``opentelemetry`` (the extra ``otel``), or where no SDK was set up, nothing is recorded, and the trace context
of a request is passed on as it came. With it each request, each batch and each call of another server is a span.
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
    """The trace context of a request; () where it has none, or a malformed one."""
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
    """What a call to another server carries: that of the span that is open here, or as the request brought it."""
    if trace is not None:
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            return _headers(context)
    return _current.get()


def trace_id(headers: Headers) -> str:
    """The id of a trace, for logs; "" without one."""
    return headers[0][1].split("-")[1] if headers else ""


class Span:
    """One piece of work; without an SDK it only passes the trace context on."""

    __slots__ = ("headers", "recorded")

    def __init__(self, recorded: Any, headers: Headers) -> None:
        self.recorded, self.headers = recorded, headers

    def finish(self, code: int = 0, why: str = "", at: float | None = None, **attributes: Any) -> None:
        """Ends it; once it has ended this has no effect.

        Args:
            code: the gRPC status of what it stands for.
            at: Unix seconds, now unless given.
            attributes: further ones; ``__`` in a name stands for a dot.
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
    """Of the traces that begin in this process."""
    return _share


def recording() -> bool:
    """Whether an SDK was set up, so that spans are more than names."""
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
    """Begins a span that :meth:`Span.end` ends.

    Args:
        kind: SERVER, CLIENT or INTERNAL.
        parent: the trace context that it belongs to; () begins a trace, if the sampler wants one.
        links: other traces that the work is for.
        at: Unix seconds at which it began, if not now.
        chosen: one of the traces that begin here, as `share` has it, already.
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
    """Calls of other servers, and spans that begin here, belong to a span for as long as the block lasts."""
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
    """Work for several requests at once, of the trace of the first; the traces of the others are linked to it."""
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
    """Sends spans to an OTLP receiver over HTTP, such as ``http://127.0.0.1:4318``, from now on.

    Args:
        service: the name that the process has in traces.
        share: of the traces that begin here; requests that are part of a trace follow its own decision.

    Returns:
        What ``shutdown()`` is called on at the end, so that the last spans are sent.

    Raises:
        ConfigError: a share that is not from 0 to 1, or an endpoint that is not a URL.
        MissingExtraError: the packages of the extra ``otel`` are not installed.
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
    _share = share  # a trace that is not wanted costs one random number
    url = endpoint.rstrip("/")
    exporter = OTLPSpanExporter(endpoint=url if url.endswith("/v1/traces") else f"{url}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    api.set_tracer_provider(provider)
    return provider
