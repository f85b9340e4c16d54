"""Flags of model servers for logs, traces and rate limits."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ObserveOptions:
    """Logs and traces of requests, and rate limits."""

    access_log: Path | None = None
    """Append one JSON line per request to this file (- for standard error): failures, up to a limit, and a share of the
    successes. The file can be rotated at any time."""
    access_share: float = 0.01
    """The share of successful requests in the access log, from 0 to 1."""
    audit_log: Path | None = None
    """Append a JSON line for each push, reload and version load to this file, in addition to the log."""
    trace: str | None = None
    """Send traces to this OTLP receiver, such as http://127.0.0.1:4318; default: OTEL_EXPORTER_OTLP_ENDPOINT. Needs
    pip install 'shoal[otel]'."""
    trace_share: float = 0.01
    """The share of requests without a trace context that start a trace; a request with one follows its decision."""
    rate_limit: tuple[str, ...] = ()
    """N or CALLER=N: requests per second allowed for each caller, or for this one; 0 for no limit. A caller is the name
    of a token or certificate, or else an IP address."""

    def rates(self) -> tuple[float, dict[str, float]]:
        """Return (limit of callers that are not named, caller -> limit)."""
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
        """Yield ``ModelServer`` arguments for logs and rates; audit log and traces are written until the block ends."""
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
                traces.shutdown()  # sends the last spans
            if lines is not None:
                audit.end_file(lines)
            if access is not None:
                access.close()
