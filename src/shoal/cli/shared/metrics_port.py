"""``--metrics-port``: the status page and the metrics of a process over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from shoal.errors import ConfigError
from shoal.observe.endpoint import HttpPort, Shown
from shoal.observe.history import Figures
from shoal.observe.page import Part, Unit, chart, page, tile
from shoal.observe.security import ServerSecurity


class Counted(Shown):
    """A status page and metrics from a few figures.

    Args:
        title: the page's title.
        read: returns the current figures by name.
        counters: figures that only increase.
        wrong: figures that should be 0; shown as warnings if they are not.
        units: units of figures that are not plain counts.
    """

    def __init__(
        self,
        title: str,
        read: Callable[[], Mapping[str, Any]],
        *,
        counters: tuple[str, ...] = (),
        wrong: Collection[str] = (),
        units: Mapping[str, Unit] | None = None,
    ) -> None:
        super().__init__()
        self._title, self._read, self._wrong, self._units = title, read, wrong, dict(units or {})
        self.counters = counters  # pyrefly: ignore

    def status(self) -> dict[str, Any]:
        return dict(self._read())

    def figures(self) -> Figures:
        return {name: value for name, value in self._read().items() if isinstance(value, int | float)}

    def page(self) -> Part:
        found = self.figures()
        shown = [name for name in found if name not in self._wrong or found[name]]
        return page(
            self._title,
            tiles=[
                tile(_words(name), found[name], self._units.get(name, "n"), "warn" if name in self._wrong else "")
                for name in shown
            ],
            charts=[
                chart(_words(name), {name: name}, "per_s" if name in self.counters else self._units.get(name, "n"))
                for name in shown
            ],
        )


def _words(name: str) -> str:
    for ending in ("_s", "_bytes"):
        name = name.removesuffix(ending)
    return name.replace("_", " ")


def serve_metrics(
    port: int | None, shown: Shown, security: ServerSecurity, *, as_json: bool, at: str | None = None
) -> Callable[[], None]:
    """Serve on ``port`` of 127.0.0.1, or ``at`` a host:port, if one is given; return the function that stops it."""
    if at is None and port is None:
        return lambda: None
    if at is not None and not at.rpartition(":")[0]:
        raise ConfigError(f"--metrics must be HOST:PORT, got {at!r}")
    if port is not None and not 0 <= port < 1 << 16:
        raise ConfigError(f"--metrics-port must be in 0..65535 (0 picks a free port), got {port}")
    served = HttpPort(at if at is not None else f"127.0.0.1:{port}", shown, security).start()
    print(json.dumps({"metrics": served.address}) if as_json else f"status page {served.url}", flush=True)
    return served.stop
