"""The flags of model servers for logs, traces and rates."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ObserveOptions:
    """What is told of requests, and how many callers may make."""

    access_log: Path | None = None
    """Append one JSON line per request to this file (- for standard error): a share of those that went well, and those
    that failed. It may be moved away at any time."""
    access_share: float = 0.01
    """The share of requests in the access log, from 0 to 1."""
    audit_log: Path | None = None
    """Append a JSON line for each push, reload and load of a version to this file; they are in the log in any case."""
    trace: str | None = None
    """Send traces to this OTLP receiver, such as http://127.0.0.1:4318; by default OTEL_EXPORTER_OTLP_ENDPOINT. Needs
    pip install 'shoal[otel]'."""
    trace_share: float = 0.01
    """Of requests that bring no trace context, the share that begins a trace; those with one follow its decision."""
    rate_limit: tuple[str, ...] = ()
    """N, or CALLER=N: requests per second that each caller, or this one, may make; 0 for as many as it likes. A caller
    is the name of a token or certificate, else an IP address."""

    def rates(self) -> tuple[float, dict[str, float]]:
        """(limit of each caller, caller -> limit)"""
        every, named = 0.0, {}
        for each in self.rate_limit:
            name, _, number = each.rpartition("=")
            try:
                value = float(number)
            except ValueError:
                value = -1.0
            if value < 0:
                raise UsageError(f"--rate-limit must be N or CALLER=N, such as 500 or trainer=0, got {each!r}")
            if name:
                named[name] = value
            else:
                every = value
        return every, named

    @contextmanager
    def opened(self, service: str) -> Iterator[dict[str, Any]]:
        """The arguments of a ``ModelServer`` for logs and rates; audit and traces are written while the block lasts."""
        from shoal.observe import audit
        from shoal.observe.lines import AccessLog
        from shoal.observe.tracing import start_exporting

        limit, limits = self.rates()
        access = AccessLog(self.access_log, self.access_share) if self.access_log is not None else None
        lines = audit.to_file(self.audit_log) if self.audit_log is not None else None
        endpoint = self.trace or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        traces = start_exporting(endpoint, service, self.trace_share) if endpoint else None
        try:
            yield {"access_log": access, "rate_limit": limit, "rate_limits": limits}
        finally:
            if traces is not None:
                traces.shutdown()  # the last spans are sent
            if lines is not None:
                audit.end_file(lines)
            if access is not None:
                access.close()
