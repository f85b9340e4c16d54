"""The status page of an online system: its processes, their metrics, and their restarts and failures."""

from __future__ import annotations

import json
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import DataError
from shoal.observe.endpoint import JSON, Answer, HttpPort, PageHandler, Shown, process_metrics
from shoal.observe.exposition import Family, render
from shoal.observe.history import Figures
from shoal.observe.page import Part, Tone, Unit, chart, link, page, pill, table, tile
from shoal.observe.scrape import Reading, Status, parse_metrics, summarise
from shoal.observe.security import ServerSecurity, token_file
from shoal.up.config import Online

if TYPE_CHECKING:
    from shoal.up.supervisor import Supervisor

EVERY_S = 2.0
TIMEOUT_S = 2.0
_TONES: dict[str, Tone] = {"ready": "good", "done": "good", "failed": "bad", "waiting": "warn", "starting": "warn"}

KINDS = ("server", "joiner", "trainer", "replica")
_COLUMNS: list[str | tuple[str, Unit]] = [
    "process", "phase", ("for", "s"), ("restarts", "n"), ("rows", "n"), ("memory", "bytes"), ("rate", "per_s"),
    ("lag", "s"), ("errors", "n"), "reason",
]  # fmt: skip


def open_page(supervisor: Supervisor, online: Online) -> HttpPort | None:
    """Serve a system's page at ``[up] page``; None if that is off."""
    rules = online.up
    if rules.page == "off":
        return None
    names = (rules.tls_cert, rules.tls_key, rules.tls_client_ca, rules.tokens)
    certificate, key, client_ca, tokens = (None if name is None else Path(online.path(name)) for name in names)
    security = ServerSecurity(
        certificate=certificate, key=key, client_ca=client_ca, allow_insecure=rules.insecure,
        tokens=token_file(tokens) if tokens is not None else {},
    )  # fmt: skip
    security.check_bind(rules.page, "[up] tls_cert, tls_key, and tokens or tls_client_ca, or insecure = true")
    return SystemPort(rules.page, System(supervisor, online), security, SystemHandler).start()


class SystemHandler(PageHandler):
    """Also serves /targets.json: the processes, for Prometheus."""

    def get(self, path: str, identity: str) -> Answer:
        if path != "/targets.json":
            return super().get(path, identity)
        shown: System = self.panel.shown  # pyrefly: ignore
        return JSON, json.dumps(shown.targets(self.headers.get("Host", ""))).encode()


class SystemPort(HttpPort):
    """Reads the metrics of the processes for as long as the page is served."""

    def start(self) -> SystemPort:
        self.panel.shown.watch.start()  # pyrefly: ignore
        super().start()
        return self

    def stop(self) -> None:
        super().stop()
        self.panel.shown.watch.stop()  # pyrefly: ignore


class Watch:
    """The metrics of a system's processes, read from their /metrics every two seconds in a background thread."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._before: dict[str, Reading] = {}
        self.found: dict[str, Status] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def _run(self) -> None:
        with ThreadPoolExecutor(8, "shoal-scrape") as pool:
            while not self._stop.wait(EVERY_S):
                self.found = dict(pool.map(self._one, self._supervisor.processes))

    def _one(self, process: Any) -> tuple[str, Status]:
        try:
            tls = ssl._create_unverified_context() if process.page.startswith("https:") else None  # our own process
            with urllib.request.urlopen(f"{process.page}metrics", timeout=TIMEOUT_S, context=tls) as answer:
                text = answer.read().decode("utf-8", "replace")
            reading = Reading(at=time.monotonic(), samples=parse_metrics(text))
        except (OSError, ValueError, DataError) as error:
            self._before.pop(process.name, None)
            return process.name, Status(address=process.metrics, why=str(getattr(error, "reason", error)))
        status = summarise(process.metrics, reading, self._before.get(process.name))
        self._before[process.name] = reading
        return process.name, status


class System(Shown):
    """The content of a system's status page."""

    counters = ("restarts",)

    def __init__(self, supervisor: Supervisor, online: Online) -> None:
        super().__init__()
        self._supervisor, self._online = supervisor, online
        self.watch = Watch(supervisor)
        self._noted = 0

    def _of(self, kind: str, figure: str) -> list[float]:
        """A figure from all processes of a kind that report it."""
        names = {process.name for process in self._supervisor.processes if process.kind == kind}
        found = [getattr(status, figure) for name, status in self.watch.found.items() if name in names]
        return [each for each in found if each is not None]

    def status(self) -> dict[str, Any]:
        rows = self._supervisor.rows()
        for row in rows:
            status = self.watch.found.get(row["name"])
            if status is not None:
                row |= {
                    "rows": status.rows, "bytes": status.bytes, "per_second": status.per_second, "lag_s": status.lag_s,
                    "errors": status.errors, "says": status.why,
                }  # fmt: skip
        return {
            "file": self._online.file, "model": self._online.model, "registry": self._online.registry_url,
            "ready": all(row["phase"] in ("ready", "done") for row in rows), "processes": rows,
            "events": list(self._supervisor.events),
        }  # fmt: skip

    def figures(self) -> Figures:
        self._note_events()
        states = self._supervisor.states
        steps = [status.notes["step"] for status in self.watch.found.values() if "step" in status.notes]
        return {
            "samples": _sum(self._of("trainer", "per_second")),
            "requests": _sum(self._of("replica", "per_second")),
            "server_requests": _sum(self._of("server", "per_second")),
            "errors": _sum([each for kind in KINDS for each in self._of(kind, "errors_per_second")]),
            "rows": _sum(self._of("server", "rows") or self._of("trainer", "rows")),
            "lag": max(self._of("replica", "lag_s"), default=None),
            "step": max(steps, default=None),
            "restarts": sum(state.restarts for state in states.values()),
            "not_ready": sum(state.phase not in ("ready", "done") for state in states.values()),
        }  # fmt: skip

    def _note_events(self) -> None:
        """Record failures and restarts as the system's errors."""
        for event in list(self._supervisor.events):
            if event["at"] > self._noted:
                self._noted = event["at"]
                if event["event"] in ("failed", "restart", "kill"):
                    level = "error" if event["event"] == "failed" else "warning"
                    self.errors.note(event["text"], where=event["name"], level=level)

    def page(self) -> Part:
        self._note_events()
        found, figures = self.status(), self.figures()
        rows = found["processes"]
        failed = [row["name"] for row in rows if row["phase"] == "failed"]
        state = pill(f"{', '.join(failed)} failed", "bad") if failed else (
            pill("all ready", "good") if found["ready"] else pill("not all ready", "warn")
        )  # fmt: skip
        return page(
            f"Shoal system, {found['model']}",
            about=found["file"],
            state=state,
            tiles=[
                tile("processes ready", f"{len(rows) - int(figures['not_ready'] or 0)} of {len(rows)}", ""),
                tile("samples per second", figures["samples"]),
                tile("requests to replicas per second", figures["requests"]),
                tile("sync lag, worst replica", figures["lag"], "s"),
                tile("model step", figures["step"]),
                tile("rows", figures["rows"]),
                tile("restarts", sum(row["restarts"] for row in rows), tone="warn" if figures["restarts"] else ""),
            ],
            charts=[
                chart("samples learnt", {"samples": "samples"}, "per_s"),
                chart("requests", {"replicas": "requests", "servers": "server_requests"}, "per_s"),
                chart("sync lag, worst replica", {"lag": "lag"}, "s"),
                chart("model step", {"step": "step"}),
                chart("rows", {"rows": "rows"}),
                chart("errors", {"errors": "errors"}, "per_s"),
            ],
            tables=[
                table("Processes", _COLUMNS, [
                    [link(row["name"], row["page"]), pill(row["phase"], _TONES.get(row["phase"], "")),
                     time.time() - row["since"], row["restarts"], row.get("rows"), row.get("bytes"),
                     row.get("per_second"), row.get("lag_s"), row.get("errors"), row["reason"] or row.get("says", "")]
                    for row in rows
                ]),
                table("Events", [("when", "ago"), "process", "event", "text"], [
                    [time.time() - event["at"], event["name"] or "shoal up", event["event"], event["text"]]
                    for event in reversed(found["events"][-30:])
                ]),
            ],
        )  # fmt: skip

    def targets(self, own: str) -> list[dict[str, Any]]:
        """All processes, for Prometheus' HTTP service discovery; ``own`` is the host and port of this page."""
        found = [{"targets": [own], "labels": {"name": "up", "role": "up"}}] if own else []
        for process in self._supervisor.processes:
            labels = {"name": process.name, "role": process.kind, "__scheme__": process.page.partition(":")[0]}
            found.append({"targets": [process.metrics], "labels": labels})
        return found

    def metrics(self) -> bytes:
        return process_metrics() + render(self._families())

    def _families(self) -> Iterator[Family]:
        labels = ("process", "kind")
        ready = Family("shoal_up_process_ready", "gauge", "1 while a process is ready, or done", labels)
        failed = Family("shoal_up_process_failed", "gauge", "1 if a process failed and is not restarted", labels)
        restarts = Family("shoal_up_restarts", "counter", "Number of restarts of a process", labels)
        for row in self._supervisor.rows():
            ready.add(int(row["phase"] in ("ready", "done")), row["name"], row["kind"])
            failed.add(int(row["phase"] == "failed"), row["name"], row["kind"])
            restarts.add(row["restarts"], row["name"], row["kind"])
        yield from (ready, failed, restarts)


def _sum(values: list[float]) -> float | None:
    return sum(values) if values else None
