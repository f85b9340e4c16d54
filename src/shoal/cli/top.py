"""`shoal top`: a live view of trainers, servers and replicas, from their metrics."""

from __future__ import annotations

import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.cli.shared.arguments import parse
from shoal.cli.shared.console import make_console, print_json, show_bytes
from shoal.errors import ConfigError, DataError, UsageError
from shoal.observe.finite import finite
from shoal.observe.scrape import Reading, Status, parse_metrics, summarise
from shoal.observe.security import bearer_token

DESCRIPTION = """Watch running trainers, parameter servers, replicas and sync processes: rows, rates, lag, errors.

Each ADDRESS is the host:port (or URL) of a /metrics endpoint: --http-port of `shoal ps`, --rest-port of `shoal serve`,
--metrics-port of `shoal sync`, or any endpoint in Prometheus text format. --discover takes addresses from the JSON
files of a directory (the output of `shoal ps --json` and `shoal serve --json`), --registry from the registry of `shoal
serve --registry`, --up from a running `shoal up`; all are read again each time. Processes that do not answer are
shown as down.

examples:
  shoal top 127.0.0.1:8001 127.0.0.1:8501
  shoal top --up online.toml
  shoal top --discover /run/shoal --once --json

Exit codes with --once: 0 all processes are up, 1 some are down, 2 wrong usage. Ctrl-C ends the live view."""

_LIMIT = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of `shoal top`."""

    address: tuple[str, ...] = ()
    """host:port or URL of each endpoint."""
    discover: Path | None = None
    """A directory of JSON files, each with "http", "rest" or "metrics": the address of an endpoint."""
    registry: str | None = None
    """host:port,... of ZooKeeper, or dir:/path, where replicas register."""
    up: Path | None = None
    """The file of a `shoal up`: all its processes, with their names and restarts."""
    bzid: str = "shoal"
    """Business id in the registry."""
    interval: float = 2.0
    """Seconds between readings."""
    timeout: float = 2.0
    """Seconds after which an endpoint counts as down."""
    once: bool = False
    """Take two readings, --interval apart, then exit."""
    token_file: Path | None = None
    """File with the endpoints' bearer token."""
    tls_ca: Path | None = None
    """CA (PEM) to verify https endpoints with."""
    json: bool = False
    """Print one line of JSON per reading; with --once, indented."""


def main(argv: list[str]) -> int:
    options = parse(Options, argv, "top", DESCRIPTION, positional="address")
    if not options.address and options.discover is None and options.registry is None and options.up is None:
        raise UsageError(
            "give the addresses of /metrics endpoints, --discover DIR, --registry or --up; see shoal top --help"
        )
    if options.interval <= 0 or options.timeout <= 0:
        raise ConfigError(f"--interval and --timeout must be > 0, got {options.interval:g} and {options.timeout:g}")
    if options.registry is not None:
        from shoal.serving.cluster.registry import check_directory

        check_directory(options.registry)
    watch = Watch(options)
    if options.once:
        return _once(options, watch)
    return _live(options, watch)


class Watch:
    """Reads all endpoints; keeps the previous readings, from which rates are computed."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._before: dict[str, Reading] = {}
        self._headers = {}
        if options.token_file is not None:
            self._headers["Authorization"] = f"Bearer {bearer_token(options.token_file)}"
        try:
            self._tls = ssl.create_default_context(cafile=options.tls_ca)
        except OSError as error:
            raise ConfigError(f"--tls-ca {options.tls_ca}: {error}") from None

    def addresses(self) -> list[str]:
        found = list(self.options.address)
        if self.options.discover is not None:
            found += discover(self.options.discover)
        if self.options.registry is not None:
            found += registered(self.options.registry, self.options.bzid)
        return list(dict.fromkeys(found))

    def read(self) -> list[Status]:
        """Return the current status of every endpoint."""
        watched = supervised(self.options.up) if self.options.up is not None else {}
        addresses = list(dict.fromkeys([*watched, *self.addresses()]))
        if not addresses:
            return []
        with ThreadPoolExecutor(min(32, len(addresses)), "shoal-top") as pool:
            found = list(pool.map(self._one, addresses))
        for status in found:
            if status.address in watched:
                _add_process(status, watched[status.address])
        return found

    def _one(self, address: str) -> Status:
        try:
            text = self._fetch(url_of(address))
            reading = Reading(at=time.monotonic(), samples=parse_metrics(text))
        except (OSError, ValueError, DataError) as error:
            self._before.pop(address, None)
            return Status(address=address, why=_plain(error))
        status = summarise(address, reading, self._before.get(address))
        self._before[address] = reading
        return status

    def _fetch(self, url: str) -> str:
        request = urllib.request.Request(url, headers=self._headers)
        tls = self._tls if url.startswith("https:") else None
        with urllib.request.urlopen(request, timeout=self.options.timeout, context=tls) as answer:
            data = answer.read(_LIMIT + 1)
        if len(data) > _LIMIT:
            raise DataError(f"its answer is larger than {_LIMIT >> 20} MiB")
        return data.decode("utf-8", "replace")


def _plain(reason: Any) -> str:
    if isinstance(reason, urllib.error.HTTPError):
        return f"HTTP {reason.code} {reason.reason}"
    if isinstance(reason, urllib.error.URLError):
        return _plain(reason.reason)
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror.lower()
    return str(reason)


def url_of(address: str) -> str:
    """Return the URL of an endpoint: ``host:port`` means ``http://host:port/metrics``."""
    if "://" not in address:
        address = f"http://{address}"
    scheme, _, rest = address.partition("://")
    if scheme not in ("http", "https") or not rest or any(c.isspace() for c in rest):
        raise ConfigError(f"an address must be host:port or an http(s) URL, got {address!r}")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host}/{path if slash and path else 'metrics'}"


def discover(directory: Path) -> list[str]:
    """Return the endpoints that the JSON files of a directory name; half-written files are skipped."""
    if not directory.is_dir():
        raise ConfigError(f"--discover {directory}: there is no such directory")
    found = []
    for path in sorted(directory.iterdir()):
        if not path.is_file():
            continue
        try:
            lines = path.read_text().strip().splitlines()
            content = json.loads(lines[0] if lines else "")
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            found += [content[key] for key in ("metrics", "http", "rest") if isinstance(content.get(key), str)][:1]
    return found


def supervised(file: Path) -> dict[str, dict[str, Any]]:
    """Return the state of each process of a `shoal up`, by endpoint."""
    from shoal.up.config import load_online
    from shoal.up.files import holder, read_state

    folder = load_online(file).dir
    runs = holder(folder) is not None
    rows = read_state(folder)["processes"]
    return {row["metrics"]: row if runs else row | {"phase": "stopped", "reason": ""} for row in rows}


def _add_process(status: Status, row: dict[str, Any]) -> None:
    status.notes = {"process": row["name"], **status.notes}
    if row["restarts"]:
        status.notes["restarts"] = row["restarts"]
    if not status.up:
        status.why = f"{row['name']} {row['phase']}{': ' if row['reason'] else ''}{row['reason']}"


def registered(registry: str, bzid: str) -> list[str]:
    """Return the HTTP addresses of the replicas in a registry."""
    from shoal.serving.cluster.zk_backend import ZKBackend

    backend = ZKBackend(bzid, registry)
    backend.start()
    try:
        clusters = backend.bzid_info()["container_info"]
    finally:
        backend.stop()
    found = []
    for container in (each for cluster in clusters.values() for each in cluster.values()):
        try:
            info = json.loads(container.get("service_info", ""))
        except ValueError:
            continue
        if isinstance(info, dict) and info.get("http"):
            found.append(info["http"])
    return sorted(found)


def _once(options: Options, watch: Watch) -> int:
    watch.read()
    time.sleep(options.interval)
    statuses = watch.read()
    if options.json:
        print_json([asdict(status) for status in statuses])
    else:
        make_console().print(view(statuses))
    return 0 if all(status.up for status in statuses) else 1


def _live(options: Options, watch: Watch) -> int:
    try:
        if options.json or not sys.stdout.isatty():
            while True:
                statuses = watch.read()
                if options.json:
                    print(json.dumps(finite([asdict(status) for status in statuses]), default=str), flush=True)
                else:
                    make_console().print(view(statuses))
                time.sleep(options.interval)
        from rich.live import Live

        with Live(console=make_console(), screen=True, auto_refresh=False) as live:
            while True:
                live.update(view(watch.read()), refresh=True)
                time.sleep(options.interval)
    except KeyboardInterrupt:  # the normal end of the view
        return 0


def view(statuses: list[Status]) -> Any:
    """Make a rich table of the statuses."""
    from rich.table import Table
    from rich.text import Text

    down = sum(not status.up for status in statuses)
    title = f"shoal top · {time.strftime('%H:%M:%S')} · {len(statuses) - down} up, {down} down"
    table = Table(title=title, title_justify="left", expand=False)
    for column in ("process", "kind", "state", "rows", "memory", "per s", "p99", "lag", "staleness", "errors", "notes"):
        numbers = ("rows", "memory", "per s", "p99", "lag", "errors")
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for status in sorted(statuses, key=lambda s: (s.kind, s.address)):
        state = Text("up", "green") if status.up else Text("down", "bold red")
        if status.up and status.why:
            state = Text(status.why, "bold red")
        errors = _number(status.errors)
        if status.errors_per_second:
            errors += f" (+{status.errors_per_second:.3g}/s)"
        notes = " ".join(f"{key} {_number(value)}" for key, value in status.notes.items() if value is not None)
        table.add_row(
            status.address, status.kind if status.up else "-", state, _number(status.rows),
            "" if status.bytes is None else show_bytes(status.bytes), _number(status.per_second),
            "" if status.p99_s is None else f"{1e3 * status.p99_s:.3g} ms",
            "" if status.lag_s is None else f"{status.lag_s:.2f} s", status.staleness,
            Text(errors, "red" if status.errors_per_second else ""), notes if status.up else status.why,
        )  # fmt: skip
    return table


def _number(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float | int):
        return str(value)
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"
