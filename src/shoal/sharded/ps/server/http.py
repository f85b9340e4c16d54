"""Health and metrics over plain HTTP: ``/healthz`` and ``/metrics``."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from shoal.errors import ConfigError

MAX_CONNECTIONS = 16  # at a time; one more is closed at once


class _Server(ThreadingHTTPServer):
    """A thread for every connection, and no more than a few."""

    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class StatusServer:
    """Serves ``health()`` (what to tell, and whether all is well) and ``metrics()`` until `close`."""

    def __init__(
        self, host: str, port: int, health: Callable[[], tuple[bool, dict[str, Any]]], metrics: Callable[[], str]
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 10
            server_version = "shoal"

            def do_GET(self) -> None:
                try:
                    if self.path == "/healthz":
                        well, text = health()
                        self._answer(200 if well else 503, "application/json", json.dumps(text))
                    elif self.path == "/metrics":
                        self._answer(200, "text/plain; version=0.0.4", metrics())
                    else:
                        self._answer(404, "text/plain", "there are /healthz and /metrics\n")
                except (BrokenPipeError, ConnectionResetError):
                    pass  # who asked has gone

            def _answer(self, code: int, kind: str, text: str) -> None:
                body = text.encode()
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        try:
            self._server = _Server((host, port), Handler)
        except OSError as error:
            raise ConfigError(f"cannot serve health and metrics on {host}:{port}: {error}") from error
        self.address = "{}:{}".format(*self._server.server_address[:2])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="ps-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
