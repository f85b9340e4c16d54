"""Timings of lookups by parameter server, for whoever collects metrics in this process."""

from __future__ import annotations

from typing import Any, Protocol

from shoal.table.export_mode import is_exporting


class Sink(Protocol):
    """Takes measurements; ``tags`` is ``key=value|key=value``. Called from any thread; must not block."""

    def emit_timer(self, name: str, value: float, tags: str) -> None: ...


_sink: Sink | None = None
_model_name = ""


def set_lookup_metrics(sink: Sink | None, model_name: str = "") -> None:
    """Sends the timer ``embedding_lookup`` (seconds, tags ``model_name`` and ``ps``) of every lookup to ``sink``.

    `shoal.serving` has a sink for Prometheus. None, as it is at first, measures nothing.
    """
    global _sink, _model_name
    _sink, _model_name = sink, model_name


def model_name() -> str:
    return _model_name


def lookup_timer(ps: int, seconds: float) -> None:
    """One lookup at one parameter server; nothing while exporting."""
    if _sink is not None and not is_exporting():
        _sink.emit_timer("embedding_lookup", seconds, f"model_name={_model_name}|ps={ps}")


def emit(kind: str, name: str, value: Any, tags: str = "") -> None:
    """Anything else that a sink may take."""
    if _sink is not None and hasattr(_sink, f"emit_{kind}"):
        getattr(_sink, f"emit_{kind}")(name, value, tags)
