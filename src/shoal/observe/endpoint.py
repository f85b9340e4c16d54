"""The HTTP port of a process: status page, status as JSON, metrics and health, over plain HTTP or TLS."""

import base64
import binascii
import ipaddress
import json
import logging
import ssl
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from shoal import __version__
from shoal.errors import ConfigError, missing_extra
from shoal.observe.finite import finite
from shoal.observe.history import Figures, History
from shoal.observe.page import Part
from shoal.observe.pool import PooledHandler, PooledHttpServer
from shoal.observe.recent import RecentErrors, forget_log, watch_log
from shoal.observe.security import ServerSecurity, is_loopback, split_address

log = logging.getLogger(__name__)

PAGE = (Path(__file__).parent / "page.html").read_bytes()
HTML, JSON, TEXT = "text/html; charset=utf-8", "application/json", "text/plain"
Answer = tuple[str, bytes]
"""Content type and body."""


class HttpError(Exception):
    """An answer other than 200; ``text`` is the message."""

    def __init__(self, status: int, text: str, kind: str = JSON) -> None:
        super().__init__(text)
        self.status, self.text, self.kind = status, text, kind


class Shown:
    """The status of a process, for its HTTP port. Any thread may call any method; each must be fast."""

    counters: ClassVar[Collection[str]] = ()
    """Figures that only increase; their history holds the increase per second."""

    def __init__(self) -> None:
        self.errors = RecentErrors()
        """Recent errors and warnings, both logged ones and those passed to ``note``."""

    def status(self) -> dict[str, Any]:
        """The status as plain values, for /status.json."""
        return {}

    def figures(self) -> Figures:
        """The figures that the history keeps, by name."""
        return {}

    def page(self) -> Part:
        """The content of the status page; see `shoal.observe.page`."""
        raise NotImplementedError

    def metrics(self) -> bytes:
        """Metrics in Prometheus' text format; by default those of this process."""
        return process_metrics()

    def health(self) -> tuple[bool, str, bytes]:
        """(whether it is alive, content type, body); visible without credentials."""
        return True, TEXT, b"ok\n"

    def ready(self) -> str:
        """Why the process is not ready for requests; "" if it is."""
        return ""


def process_metrics() -> bytes:
    """The metrics of this process's registry."""
    try:
        import prometheus_client
    except ImportError:
        raise missing_extra("prometheus-client", "server") from None
    return prometheus_client.generate_latest()


class Panel:
    """The status of a process, the history of its figures (from `start` to `close`), and its last errors."""

    def __init__(self, shown: Shown) -> None:
        self.shown = shown
        self.started_at = time.time()
        self.history = History(shown.figures, shown.counters)
        self.errors = shown.errors

    def start(self) -> "Panel":
        watch_log(self.errors)
        self.history.start()
        return self

    def close(self) -> None:
        self.history.close()
        forget_log(self.errors)

    def status(self) -> dict[str, Any]:
        """The content of /status.json."""
        base = {"version": __version__, "uptime_s": time.time() - self.started_at}
        return {**base, **self.shown.status(), "errors": self.errors.read()}

    def page(self, span: str) -> dict[str, Any]:
        """The data of the status page."""
        shown = self.shown.page()
        about = [f"version {__version__}", f"up {_duration(time.time() - self.started_at)}", shown["about"]]
        shown["about"] = ", ".join(filter(None, about))
        return {"now": time.time(), "page": shown, "history": self.history.read(span), "errors": self.errors.read()}


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


class PageHandler(PooledHandler):
    """Answers GET requests for a panel. Subclasses add routes."""

    panel: Panel
    security: ServerSecurity
    local: bool
    """Whether only this machine can reach the port."""
    protocol_version = "HTTP/1.1"
    server_version = "shoal"
    sys_version = ""

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    def do_GET(self) -> None:
        self.answer(self._get)

    # --- responses --------------------------------------------------------------------------------------------------

    def answer(self, make: Callable[[], Answer]) -> None:
        """Send the result of ``make``, or the error that it raises."""
        try:
            status, kind, body = 200, *make()
        except Exception as error:
            status, kind, text = self.error_of(error)
            body = json.dumps({"error": text}).encode() if kind == JSON else text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        if kind.startswith("text/html"):
            self.send_header("Content-Security-Policy", "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'")
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
            self.send_header("WWW-Authenticate", 'Basic realm="any name, and a token as the password"')
        if status == 429:
            self.send_header("Retry-After", "1")
        has_body = "Transfer-Encoding" in self.headers or self.headers.get("Content-Length", "0") != "0"
        unread = status >= 400 or (has_body and self.command == "GET")
        if unread:  # what is left of the body must not be taken for the next request
            self.close_connection = True
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.refused = unread and has_body

    def error_of(self, error: Exception) -> tuple[int, str, str]:
        """(HTTP status, content type, text) of an exception raised by a route."""
        if isinstance(error, HttpError):
            return error.status, error.kind, error.text
        if isinstance(error, ImportError):
            return 501, JSON, str(error)
        log.exception("%s failed", self.path)
        return 500, JSON, str(error)

    def identify(self) -> str:
        """The caller's identity; raises HttpError if access is denied."""
        if self.local and not self.security.authenticates and not _is_local_name(self.headers.get("Host", "")):
            # Against DNS rebinding: a web page whose name resolves to 127.0.0.1 could read this port.
            raise HttpError(403, "the Host header must be localhost or an IP address on a port without tokens")
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        bearer = given if scheme == "Bearer" else _basic_password(given) if scheme == "Basic" else ""
        name = ""
        if isinstance(self.connection, ssl.SSLSocket) and (certificate := self.connection.getpeercert()):
            subject = dict(pair for group in certificate.get("subject", ()) for pair in group)  # pyrefly: ignore
            name = subject.get("commonName", "")
        identity = self.security.identify(bearer, name)
        if identity is None:
            raise HttpError(401, "the token is missing or unknown; send Authorization: Bearer …")
        return identity

    # --- routes -----------------------------------------------------------------------------------------------------

    def _get(self) -> Answer:
        self.reading_since = None
        url = urlsplit(self.path)
        shown = self.panel.shown
        if url.path == "/healthz":
            alive, kind, body = shown.health()
            try:
                self.identify()
            except HttpError:  # callers without access learn only whether it is alive
                kind, body = TEXT, b"ok\n" if alive else b"unavailable\n"
            if not alive:
                raise HttpError(503, body.decode(), kind)
            return kind, body
        if url.path == "/readyz":
            if why := shown.ready():
                try:
                    self.identify()
                except HttpError:
                    why = "not ready\n"
                raise HttpError(503, why)
            return TEXT, b"ready\n"
        identity = self.identify()
        if url.path == "/":
            return HTML, PAGE
        if url.path == "/status.json":
            return JSON, _json(self.panel.status())
        if url.path == "/page.json":
            return JSON, _json(self.panel.page(parse_qs(url.query).get("span", ["recent"])[0]))
        if url.path == "/metrics":
            return "text/plain; version=0.0.4; charset=utf-8", shown.metrics()
        return self.get(url.path, identity)

    def get(self, path: str, identity: str) -> Answer:
        """Handle any other path."""
        raise HttpError(404, f"there is no route {path}; routes are /, /status.json, /metrics, /healthz and /readyz")


class HttpPort:
    """The HTTP port of a process, open from `start` to `stop`.

    Args:
        address: ``host:port``; port 0 picks a free one.
        security: the credentials that callers must present; without TLS and tokens it may listen only on loopback.
        handler: answers the requests; ``fields`` become its class attributes.

    Raises:
        ConfigError: the address cannot be bound, or must not be bound without TLS and tokens.
    """

    def __init__(
        self,
        address: str,
        shown: Shown,
        security: ServerSecurity | None = None,
        handler: type[PageHandler] = PageHandler,
        *,
        threads: int = 4,
        max_connections: int = 256,
        **fields: Any,
    ) -> None:
        security = security or ServerSecurity()
        security.check_bind(address)
        host, port = split_address(address)
        self.panel = Panel(shown)
        made = type("Handler", (handler,), {
            "panel": self.panel, "security": security, "local": is_loopback(address), **fields
        })  # fmt: skip
        try:
            self._http = PooledHttpServer((host, port), made, security.tls_context(), threads, max_connections)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}: {error.strerror or error}") from None
        self.port = self._http.port
        self.address = f"{address.rpartition(':')[0]}:{self.port}"
        self.url = f"{'http' if security.certificate is None else 'https'}://{self.address}/"
        self._thread = threading.Thread(target=self._http.serve_forever, name="shoal-http", daemon=True)

    def start(self) -> "HttpPort":
        self.panel.start()
        self._thread.start()
        return self

    def stop(self) -> None:
        if self._thread.is_alive():
            self._http.stop()
            self._thread.join(timeout=10)
        self._http.close()
        self.panel.close()


def _json(value: Any) -> bytes:
    return json.dumps(finite(value), default=str).encode()


def _basic_password(given: str) -> str:
    """The password of a browser's basic authentication, which is the token."""
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _is_local_name(host: str) -> bool:
    """Whether a Host header is localhost or an IP address, not a domain name that a web page could control."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name.lower() in ("", "localhost") or name.lower().endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
