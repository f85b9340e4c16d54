"""Summarises the Prometheus metrics of one process, as pure functions of two readings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import DataError

_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPES = {"n": "\n", '"': '"', "\\": "\\"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the exposition format."""

    name: str
    labels: dict[str, str]
    value: float


def parse_metrics(text: str) -> list[Sample]:
    """The samples of a text in Prometheus' exposition format.

    Raises:
        DataError: the text has no valid lines, for example because it is a web page.
    """
    samples, malformed = [], 0
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        value = _float(match[3]) if match else None
        if match is None or value is None:
            malformed += 1
            continue
        labels = {
            key: re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[0]), quoted)
            for key, quoted in _LABEL.findall(match[2] or "")
        }
        samples.append(Sample(match[1], labels, value))
    if malformed and not samples:
        raise DataError("the response is not Prometheus metrics")
    return samples


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The metrics of one endpoint at one moment."""

    at: float
    """Seconds on a monotonic clock."""
    samples: list[Sample]

    def total(self, name: str | re.Pattern[str], keep: Callable[[dict[str, str]], bool] | None = None) -> float | None:
        """The sum over all labels; None if there is no such metric."""
        found = [s.value for s in self._named(name) if keep is None or keep(s.labels)]
        return sum(found) if found or any(True for _ in self._named(name)) else None

    def largest(self, name: str) -> float | None:
        return max((s.value for s in self._named(name)), default=None)

    def _named(self, name: str | re.Pattern[str]) -> Iterable[Sample]:
        if isinstance(name, str):
            return (s for s in self.samples if s.name == name)
        return (s for s in self.samples if name.fullmatch(s.name))

    def buckets(self, name: str) -> dict[float, float]:
        """Upper bound -> count, of a histogram summed over its labels."""
        found: dict[float, float] = {}
        for s in self._named(f"{name}_bucket"):
            if "le" in s.labels:
                bound = float(s.labels["le"])
                found[bound] = found.get(bound, 0.0) + s.value
        return found


def rate(now: float | None, before: float | None, seconds: float) -> float | None:
    """A counter's increase per second; a counter that decreased was restarted from 0."""
    if now is None or before is None or seconds <= 0:
        return None
    return max(0.0, now - before if now >= before else now) / seconds


def quantile(now: dict[float, float], before: dict[float, float], q: float) -> float | None:
    """The upper bound of quantile ``q`` of the values added between two readings, or of all values if none were."""
    gained = {bound: count - before.get(bound, 0.0) for bound, count in now.items()}
    if max(gained.values(), default=0.0) <= 0:
        gained = now
    total = max(gained.values(), default=0.0)
    if total <= 0:
        return None
    return next((bound for bound, count in sorted(gained.items()) if count >= q * total), None)


@dataclass(kw_only=True)
class Status:
    """The summary of one process. Rates are None until there are two readings."""

    address: str
    kind: str = "?"
    up: bool = False
    why: str = ""
    rows: float | None = None
    bytes: float | None = None
    per_second: float | None = None
    p99_s: float | None = None
    lag_s: float | None = None
    """Seconds from a gradient until its row was served here."""
    staleness: str = ""
    """How far updates are behind; for a replica, the time since its last push."""
    errors: float | None = None
    errors_per_second: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def summarise(address: str, now: Reading, before: Reading | None) -> Status:
    """Summarise a process's metrics; their names tell the kind of process."""
    names = {sample.name for sample in now.samples}
    for prefix, kind, read in _KINDS:
        if any(name.startswith(prefix) for name in names):
            status = Status(address=address, kind=kind, up=True)
            read(status, now, before)
            return status
    status = Status(address=address, kind="other", up=True)
    _any(status, now, before)
    return status


def _rates(status: Status, now: Reading, before: Reading | None, work: Any, wrong: Any, keep: Any = None) -> None:
    status.errors = now.total(wrong, keep)
    if before is not None:
        seconds = now.at - before.at
        status.per_second = rate(now.total(work), before.total(work), seconds)
        status.errors_per_second = rate(status.errors, before.total(wrong, keep), seconds)


def _ps(status: Status, now: Reading, before: Reading | None) -> None:
    def failed(labels: dict[str, str]) -> bool:
        return labels.get("status") != "OK"

    status.rows, status.bytes = now.total("shoal_ps_table_rows"), now.total("shoal_ps_table_bytes")
    _rates(status, now, before, "shoal_ps_requests_total", "shoal_ps_requests_total", failed)
    name = "shoal_ps_request_seconds"
    status.p99_s = quantile(now.buckets(name), before.buckets(name) if before else {}, 0.99)
    name = "shoal_ps_staleness_updates"
    behind = quantile(now.buckets(name), before.buckets(name) if before else {}, 0.5)
    status.staleness = "" if behind is None else f"{behind:g} updates"
    if now.total("shoal_ps_up") == 0:
        status.why = "failed"
    if queued := now.total("shoal_ps_queued_bytes"):
        status.notes["queued_bytes"] = queued


def _serve(status: Status, now: Reading, before: Reading | None) -> None:
    status.rows, status.bytes = now.total("shoal_serving_table_rows"), now.total("shoal_serving_table_bytes")
    _rates(status, now, before, "shoal_serving_requests_total", "shoal_serving_failed_total")
    count, seconds = now.total("shoal_serving_latency_seconds_count"), now.total("shoal_serving_latency_seconds_sum")
    if count and seconds is not None:
        status.notes["mean_ms"] = round(1e3 * seconds / count, 3)
    status.lag_s = now.largest("shoal_serving_lag_seconds")
    since = now.largest("shoal_serving_since_push_seconds")
    status.staleness = "" if since is None else f"{since:.1f} s since the last push"
    if pushed := now.total("shoal_serving_pushed_rows_total"):
        status.notes["pushed_rows"] = pushed


def _sync(status: Status, now: Reading, before: Reading | None) -> None:
    _rates(status, now, before, "parameter_sync_fid_count_total", "parameter_sync_failed_rounds_total")
    count = now.total("parameter_sync_freshness_seconds_count")
    seconds = now.total("parameter_sync_freshness_seconds_sum")
    if before is not None and count is not None and seconds is not None:
        news = count - (before.total("parameter_sync_freshness_seconds_count") or 0)
        if news > 0:
            count, seconds = news, seconds - (before.total("parameter_sync_freshness_seconds_sum") or 0)
    status.lag_s = seconds / count if count and seconds is not None else None
    waiting = now.total("parameter_sync_waiting_rows")
    status.staleness = f"{waiting:,.0f} rows wait" if waiting else ""
    status.notes["replicas"] = now.total("parameter_sync_replicas")


def _join(status: Status, now: Reading, before: Reading | None) -> None:
    status.rows, status.bytes = now.total("join_open_impressions"), now.total("join_memory_bytes")
    _rates(status, now, before, _JOIN_EVENTS, _JOIN_WRONG)
    status.lag_s = now.largest("join_watermark_lag_s")
    status.notes["samples"] = now.total("join_samples")


_JOIN_EVENTS = re.compile(r"join_(impressions|actions)_total")
_JOIN_WRONG = re.compile(r"join_(late|broken|excess)_(impressions|actions)_total|join_lost_records_total")
_WRONG = re.compile(r".*(errors?|failed|failures|bad_rows|dropped)(_\w+)?_total")
_ROWS = re.compile(r".*_rows")


def _any(status: Status, now: Reading, before: Reading | None) -> None:
    names = [sample.name for sample in now.samples]
    status.rows = now.total(_ROWS) if any(map(_ROWS.fullmatch, names)) else None
    for word in ("samples", "examples", "requests", "batches", "steps"):
        found = sorted({name for name in names if re.fullmatch(rf".*{word}_total", name)})
        if found:
            _rates(status, now, before, found[0], _WRONG)
            break
    else:
        status.errors = now.total(_WRONG)
    for name in ("auc", "loss", "logloss", "step", "epoch"):
        for sample in now.samples:
            if re.fullmatch(rf"(shoal_)?train(er)?_(\w+_)?{name}", sample.name):
                status.notes[name] = round(sample.value, 5)
    for name in ("resident_memory_bytes", "memory_bytes"):
        for sample in now.samples:
            if sample.name.endswith(name):
                status.bytes = sample.value


def _train(status: Status, now: Reading, before: Reading | None) -> None:
    _any(status, now, before)
    for sample in now.samples:
        if sample.name == "shoal_train_guard_tripped" and sample.value:
            status.why = f"guard: {sample.labels.get('reason', 'pushes are stopped')}"


_KINDS = (
    ("shoal_ps_", "ps", _ps),
    ("shoal_serving_", "serve", _serve),
    ("shoal_train", "train", _train),
    ("parameter_sync_", "sync", _sync),
    ("join_", "join", _join),
)
