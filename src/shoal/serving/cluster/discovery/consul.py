"""Discovery through a Consul agent's HTTP interface, either stock Consul's or the one with ``/v1/lookup/name``."""

import http.client
import json
import logging
import os
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from shoal.errors import PeerError
from shoal.serving.cluster.discovery.base import ServiceDiscovery
from shoal.switches import env_int

log = logging.getLogger(__name__)

UNIX_SOCKET = Path("/opt/tmp/sock/consul.sock")
KEEP_ALIVE_SECS = 30.0
SOCKET_TRIES = 5
OLD_ENTRY_TRIES = 100
SOCKET_SLEEP_SECS = 5.0


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class ConsulClient:
    """A Consul agent: ``CONSUL_HTTP_HOST``, else ``TCE_HOST_IP``, else a unix socket, else 127.0.0.1."""

    timeout = 10.0

    def __init__(self) -> None:
        self._host = os.environ.get("CONSUL_HTTP_HOST") or os.environ.get("TCE_HOST_IP")
        self._port = env_int("CONSUL_HTTP_PORT", 2280)
        self._socket = UNIX_SOCKET if self._host is None and UNIX_SOCKET.is_socket() else None

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON answer, or None if it is empty. Socket errors are retried; five attempts in all."""
        for attempt in range(SOCKET_TRIES):
            try:
                return self._once(method, path, body)
            except _HttpError:  # Consul answered
                raise
            except OSError as error:
                if attempt + 1 == SOCKET_TRIES:
                    raise
                log.warning("consul %s %s failed (%r); retrying", method, path.partition("?")[0], error)
                time.sleep(random.uniform(0, SOCKET_SLEEP_SECS))
        raise AssertionError("unreachable")

    def _once(self, method: str, path: str, body: Any) -> Any:
        if self._socket is not None:
            connection: http.client.HTTPConnection = _UnixConnection(self._socket, self.timeout)
        else:
            connection = http.client.HTTPConnection(self._host or "127.0.0.1", self._port, timeout=self.timeout)
        try:
            payload = json.dumps(body).encode() if body is not None else None
            connection.request(method, path, payload, {"Content-Type": "application/json"} if payload else {})
            response = connection.getresponse()
            data = response.read(16 * 1024 * 1024)
        finally:
            connection.close()
        if response.status != 200:
            text = f"consul answered {response.status} to {method} {path.partition('?')[0]}: {data[:200]!r}"
            raise _HttpError(text, response.status)
        return json.loads(data) if data.strip() else None


class _HttpError(PeerError):
    """An answer with a status other than 200."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ConsulServiceDiscovery(ServiceDiscovery):
    """Services under one Consul id; index, name and host are stored as tags.

    Args:
        consul_id: the service id.
        retry_time_secs: wait between checks for the removal of an old entry.
        visible_tries: how many times to check for the new entry.
        visible_wait_secs: wait between these checks.
        legacy_lookup: query ``/v1/lookup/name`` instead of stock Consul's health endpoint.
    """

    def __init__(
        self,
        consul_id: str,
        retry_time_secs: float = 3.0,
        visible_tries: int = 36,
        visible_wait_secs: float = 5.0,
        *,
        legacy_lookup: bool = False,
    ) -> None:
        self._id = consul_id
        self._retry_secs = retry_time_secs
        self._visible_tries, self._visible_secs = visible_tries, visible_wait_secs
        self._legacy = legacy_lookup
        self._client = ConsulClient()
        self._alive: dict[int, threading.Event] = {}
        self._lock = threading.Lock()

    def register(self, name: str, index: int, addr: str) -> None:
        """Register, and wait until queries return the entry.

        Raises:
            ValueError: ``addr`` is not ``host:port``.
            OSError: an older entry was not removed, or the new one never became visible, as on a blacklisted machine.
        """
        host, port = _split(addr)
        self._remove_old(name, index)
        service = f"{self._id}-{port}"
        body = {
            "id": service,
            "name": self._id,
            "port": port,
            "check": {"ttl": "60s"},
            "tags": [f"index:{index}", f"name:{name}", f"ip:{host}"],
        }
        self._client.request("PUT", "/v1/agent/service/register", body)
        self._keep_alive(port, service)
        for attempt in range(self._visible_tries):
            if self.query(name).get(index) == addr:
                return
            if attempt + 1 < self._visible_tries:
                time.sleep(self._visible_secs)
        self._end_keep_alive(port)
        raise OSError(
            f"{name} {index} at {addr} was registered but is not listed after {self._visible_tries} tries; "
            "this machine may be blacklisted by consul"
        )

    def _remove_old(self, name: str, index: int) -> None:
        for attempt in range(OLD_ENTRY_TRIES):
            old = self.query(name).get(index)
            if old is None:
                return
            if attempt:
                time.sleep(self._retry_secs)
            self._deregister(_split(old)[1])
        raise OSError(
            f"{name} {index} is still registered as {old} after {OLD_ENTRY_TRIES} tries to deregister it; "
            "deregister it at its own consul agent"
        )

    def deregister(self, name: str, index: int, addr: str) -> None:
        """Remove a registration; has no effect if the agent does not know it."""
        _, port = _split(addr)
        self._deregister(port)

    def _deregister(self, port: int) -> None:
        self._end_keep_alive(port)
        try:
            self._client.request("PUT", f"/v1/agent/service/deregister/{self._id}-{port}")
        except _HttpError as error:
            if error.status != 404:
                raise

    def _keep_alive(self, port: int, service: str) -> None:
        self._end_keep_alive(port)
        stop = threading.Event()
        with self._lock:
            self._alive[port] = stop

        def beat() -> None:
            while True:
                try:
                    self._pass_check(f"/v1/agent/check/pass/service:{service}")
                except Exception as error:
                    log.error("consul check of %s failed: %r", service, error)
                if stop.wait(KEEP_ALIVE_SECS):
                    return

        threading.Thread(target=beat, name="shoal-consul", daemon=True).start()

    def _pass_check(self, path: str) -> None:
        try:
            self._client.request("GET", path)
        except _HttpError as error:
            if error.status != 405:
                raise
            self._client.request("PUT", path)  # required by stock Consul since version 1

    def _end_keep_alive(self, port: int) -> None:
        with self._lock:
            stop = self._alive.pop(port, None)
        if stop is not None:
            stop.set()

    def query(self, name: str) -> dict[int, str]:
        found: dict[int, str] = {}
        for tags, port in self._entries():
            if tags.get("name") == name and tags.get("index", "").isdecimal() and "ip" in tags:
                found[int(tags["index"])] = f"{tags['ip']}:{port}"
        return found

    def _entries(self) -> list[tuple[dict[str, str], int]]:
        if self._legacy:
            path = f"/v1/lookup/name?name={quote(self._id)}&addr-family=dual-stack"
            return [
                ({key: str(value) for key, value in entry["Tags"].items()}, int(entry["Port"]))
                for entry in self._client.request("GET", path) or ()
            ]
        answer = self._client.request("GET", f"/v1/health/service/{quote(self._id)}?passing=true") or ()
        entries = []
        for entry in answer:
            service = entry["Service"]
            tags = dict(tag.partition(":")[::2] for tag in service.get("Tags") or ())
            entries.append((tags, int(service["Port"])))
        return entries

    def close(self) -> None:
        """End the keep-alive threads; registrations expire after their TTL."""
        with self._lock:
            ports = list(self._alive)
        for port in ports:
            self._end_keep_alive(port)


def _split(addr: str) -> tuple[str, int]:
    parts = addr.split(":")
    if len(parts) != 2 or not parts[1].isdecimal():
        raise ValueError(f"a consul address must be host:port, got {addr!r}")
    return parts[0], int(parts[1])
