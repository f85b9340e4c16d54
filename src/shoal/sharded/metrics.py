"""Timings of lookups per parameter server, sent to the metrics collector of this process."""

from __future__ import annotations

from typing import Protocol

from shoal.table.export_mode import is_exporting


class Sink(Protocol):
    """A collector of measurements; ``tags`` is ``key=value|key=value``. Called from any thread; must not block."""

    def emit_timer(self, name: str, value: float, tags: str) -> None: ...


_sink: Sink | None = None
_model_name = ""


def set_lookup_metrics(sink: Sink | None, model_name: str = "") -> None:
    """Send the timer ``embedding_lookup`` (seconds, tags ``model_name`` and ``ps``) of every lookup to ``sink``.

    `shoal.serving` has a sink for Prometheus. None, the default, turns timing off.
    """
    global _sink, _model_name
    _sink, _model_name = sink, model_name


def model_name() -> str:
    return _model_name


def lookup_timer(ps: int, seconds: float) -> None:
    """Record one lookup at one parameter server; does nothing during an export."""
    if _sink is not None and not is_exporting():
        _sink.emit_timer("embedding_lookup", seconds, f"model_name={_model_name}|ps={ps}")
