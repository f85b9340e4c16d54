"""Connections: their threads, idle and slow ones, where servers listen and tokens are sent."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from shoal.errors import ConfigError
from shoal.observe import pool as http_pool
from shoal.observe.pool import PooledHandler, PooledHttpServer
from shoal.serving import (
    AgentConfig,
    AgentDataProvider,
    AgentService,
    ClientSecurity,
    HeartBeatRequest,
    HeartBeatResponse,
    ModelServer,
    set_client_security,
)
from shoal.serving.security import open_channel
from tests.serving.cluster.test_agent import rpc
from tests.serving.helpers import eventually

HOST = "127.83.12.5"  # loopback; a client of an earlier server with this port does not come back to this address


def threads():
    return len(os.listdir("/proc/self/task"))


class Echo(PooledHandler):
    """Answers GET with its path; /wait waits for the gate."""

    protocol_version = "HTTP/1.1"
    gate = threading.Event()
    inside = threading.Semaphore(0)

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        self.reading_since = None
        if self.path == "/wait":
            self.inside.release()
            assert self.gate.wait(60)
        body = self.path.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def pooled(monkeypatch):
    monkeypatch.setattr(http_pool, "IDLE_SECS", 300.0)  # a machine that stalls closes no connection
    with contextlib.ExitStack() as stack:
        made = []

        def start(**fields):
            server = PooledHttpServer((HOST, 0), Echo, **fields)
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            made.append((server, thread))

            def connect():
                connection = stack.enter_context(socket.create_connection((HOST, server.port), timeout=60))
                connection.settimeout(60)
                return connection

            return connect

        Echo.gate.clear()
        Echo.inside = threading.Semaphore(0)
        yield start
        Echo.gate.set()
        for server, thread in made:
            server.stop()
            thread.join(60)
            server.close()


def ask(connection, path="/x"):
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
    return answer(connection)


def answer(connection):
    """The body of the next answer, or its first line where that is not OK; "" at the end."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        if not byte:
            return ""
        head += byte
    if b" 200 " not in head.splitlines()[0]:
        return head.splitlines()[0].decode()
    size = int(next(line for line in head.splitlines() if line.startswith(b"Content-Length")).split()[1])
    body = b""
    while len(body) < size:
        body += connection.recv(size - len(body))
    return body.decode()


def test_idle_connections_take_no_threads_and_requests_are_answered_between_them():
    server = ModelServer(rest_address="127.0.0.1:0").start()
    before = threads()
    with contextlib.ExitStack() as stack:
        try:
            idle = [
                stack.enter_context(socket.create_connection(("127.0.0.1", server.rest_port), timeout=60))
                for _ in range(300)
            ]
            for connection in idle[::3]:
                connection.settimeout(60)
                assert ask(connection, "/healthz") == "ok\n"
            assert ask(idle[0], "/healthz") == "ok\n"  # the connection was kept
            assert threads() <= before + http_pool.THREADS
        finally:
            server.stop(0)


def test_the_agent_takes_no_thread_per_connection():
    service = AgentService(AgentDataProvider(dict), AgentConfig(), 0).start()
    before = threads()
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", service.port), timeout=60))
        assert rpc(service.port, "HeartBeat", HeartBeatRequest(), HeartBeatResponse) is not None
        assert threads() <= before + 20
    service.stop(0)


def test_requests_beyond_the_threads_wait_and_connections_stay(pooled):
    connect = pooled(threads=2)
    waiting = [connect() for _ in range(5)]
    for connection in waiting:
        connection.sendall(b"GET /wait HTTP/1.1\r\n\r\n")
    Echo.gate.set()
    assert [answer(connection) for connection in waiting] == ["/wait"] * 5
    assert [ask(connection, f"/{index}") for index, connection in enumerate(waiting)] == ["/0", "/1", "/2", "/3", "/4"]


def test_requests_that_were_sent_at_once_are_all_answered(pooled):
    connection = pooled()()
    connection.sendall(b"GET /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\n\r\nGET /c HT")
    assert (answer(connection), answer(connection)) == ("/a", "/b")
    connection.sendall(b"TP/1.1\r\n\r\n")
    assert answer(connection) == "/c"


def test_a_connection_too_many_replaces_the_one_that_is_idle_for_longest(pooled):
    connect = pooled(max_connections=3, threads=1)  # the one thread releases a connection before it takes the next
    first, second, third = connect(), connect(), connect()
    assert [ask(each) for each in (second, third, first)] == ["/x"] * 3
    fourth = connect()
    assert ask(fourth) == "/x"
    assert second.recv(1) == b""  # closed
    assert [ask(each) for each in (first, third)] == ["/x"] * 2


def test_when_all_connections_are_busy_a_new_one_is_told_so(pooled):
    connect = pooled(max_connections=2, threads=2)
    busy = [connect(), connect()]
    for connection in busy:
        connection.sendall(b"GET /wait HTTP/1.1\r\n\r\n")
        assert Echo.inside.acquire(timeout=60)
    assert "503" in answer(connect())
    Echo.gate.set()
    assert [answer(connection) for connection in busy] == ["/wait"] * 2
    eventually(lambda: ask(connect()) == "/x", what="a connection to count as idle")  # shortly after its answer


def test_requests_that_never_end_do_not_hold_threads_for_ever(pooled, monkeypatch):
    monkeypatch.setattr(http_pool, "IDLE_SECS", 0.5)
    connect = pooled(threads=2)
    slow = [connect() for _ in range(4)]
    stop = threading.Event()

    def trickle():
        while not stop.wait(0.1):
            for connection in slow:
                with contextlib.suppress(OSError):
                    connection.sendall(b"G")

    thread = threading.Thread(target=trickle)
    thread.start()

    def answered():
        with contextlib.suppress(OSError):  # it may be so late itself that it is closed
            return ask(connect(), "/good") == "/good"

    try:
        eventually(answered, what="a thread")
    finally:
        stop.set()
        thread.join(60)


def test_an_idle_connection_is_closed_after_a_while(pooled, monkeypatch):
    monkeypatch.setattr(http_pool, "IDLE_SECS", 0.2)
    connection = pooled()()
    begin = time.monotonic()
    assert connection.recv(1) == b""
    assert time.monotonic() - begin < 30


# --- addresses --------------------------------------------------------------------------------------------------------


def listening_addresses(port):
    """Local addresses of this machine's listening sockets on a port, as the kernel writes them."""
    found = set()
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(name) as file:
            for line in file.readlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                    found.add(local.rpartition(":")[0])
    return found


def test_an_agent_without_an_address_listens_on_loopback_only():
    service = AgentService(AgentDataProvider(dict), AgentConfig(), 0).start()
    mapped = "0000000000000000FFFF00000100007F"  # 127.0.0.1 as an IPv6 address
    assert listening_addresses(service.port) <= {"0100007F", mapped}
    assert listening_addresses(service.port)
    service.stop(0)
    with pytest.raises(ConfigError, match="allow_insecure"):
        AgentService(AgentDataProvider(dict), AgentConfig(), address="0.0.0.0:0")


def test_a_token_leaves_this_machine_by_tls_only_unless_asked_for():
    security = ClientSecurity(token="secret")
    for address in ("10.0.0.1:5", "example.org:5", "[2001:db8::1]:5"):
        with pytest.raises(ConfigError, match="without TLS") as caught:
            open_channel(address, security=security)
        assert "secret" not in str(caught.value)
        open_channel(address, security=ClientSecurity(token="secret", allow_insecure=True)).close()
    for address in ("127.0.0.1:5", "localhost:5", "[::1]:5", "unix:/tmp/x"):
        open_channel(address, security=security).close()
    open_channel("example.org:5", security=ClientSecurity()).close()
    set_client_security(security)
    try:
        with pytest.raises(ConfigError, match=r"example\.org"):
            open_channel("example.org:5")
    finally:
        set_client_security(None)


def test_checks_of_what_a_user_gives_are_there_under_optimisation():
    code = """
from shoal.serving import get_global_step
from shoal.serving.cluster.replica_meta import ReplicaMeta
from shoal.serving.cluster.replica_watcher import ReplicaWatcherSync
for call in (lambda: ReplicaWatcherSync(None).get_sync_targets("entry_0"),
             lambda: ReplicaWatcherSync(None).get_sync_targets("ps_x"),
             lambda: ReplicaMeta().get_address(False, "ipv5"),
             lambda: get_global_step("/a/ckpt-3")):
    try:
        call()
    except AssertionError as error:
        print(error)
"""
    got = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=120)
    assert len(got.stdout.splitlines()) == 4, got.stdout + got.stderr
    assert "'entry_0'" in got.stdout
