"""Discovery in the training cluster: host lists, environment, registries, Consul over HTTP."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlparse

import pytest

from shoal.errors import ConfigError, DeadlineError
from shoal.serving import (
    ConsulServiceDiscovery,
    FakeKazooClient,
    MLPServiceDiscovery,
    ServiceDiscoveryType,
    TfConfigServiceDiscovery,
    ZKServiceDiscovery,
    get_service_discovery,
    wait_for_cluster,
)
from shoal.serving.cluster.discovery import consul
from tests.serving.cluster.test_registry import Directories, Fakes, Real, registry  # noqa: F401  (the fixture)
from tests.serving.helpers import eventually

pytestmark = pytest.mark.timeout(600)  # starts a ZooKeeper, next to other tests

TF_CONFIG = {
    "cluster": {"chief": ["c:1"], "worker": ["w:1", "w:2"], "ps": ["p:1", "p:2"]},
    "task": {"type": "worker", "index": 1},
}


def test_a_host_list_is_fixed():
    found = TfConfigServiceDiscovery(json.dumps(TF_CONFIG))
    found.register("ps", 5, "x:1")
    found.deregister("ps", 0, "p:1")
    assert found.query("ps") == {0: "p:1", 1: "p:2"}
    assert found.query("worker") == {0: "c:1", 1: "w:1", 2: "w:2"}
    with pytest.raises(ValueError, match="chief"):
        found.query("chief")
    assert (found.server_type, found.addr, found.index) == ("worker", "w:2", 2)
    chief = TfConfigServiceDiscovery({**TF_CONFIG, "task": {"type": "chief", "index": 0}})
    assert (chief.server_type, chief.index, chief.addr) == ("worker", 0, "c:1")
    found.close()


def test_types_and_the_choice_by_configuration():
    assert [int(each) for each in ServiceDiscoveryType] == [1, 2, 3, 4]
    assert get_service_discovery(SimpleNamespace(is_local=True)) is None
    config = SimpleNamespace(
        discovery_type=ServiceDiscoveryType.PRIMUS, tf_config=TF_CONFIG, server_type=None, index=None
    )
    assert isinstance(get_service_discovery(config), TfConfigServiceDiscovery)
    assert (config.server_type, config.index) == ("worker", 2)


# --- environment ------------------------------------------------------------------------------------------------------


@pytest.fixture
def mlp(monkeypatch):
    values = {
        "MLP_PS_NUM": "2", "MLP_WORKER_NUM": "2", "MLP_ROLE": "ps", "MLP_ROLE_INDEX": "1", "MLP_PORT": "9001",
        "MLP_PS_0_HOST": "h0", "MLP_PS_0_PORT": "9000", "MLP_PS_1_PRIMARY_HOST": '" h1 "', "MLP_PS_1_HOST": "no",
        "MLP_PS_1_PORT": "9001", "MLP_WORKER_0_HOST": "w0", "MLP_WORKER_0_PORT": "7000", "MLP_WORKER_1_HOST": "w1",
        "MLP_WORKER_1_PORT": "7001",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    return monkeypatch


def test_the_environment_names_everybody(mlp):
    found = MLPServiceDiscovery()
    assert (found.server_type, found.index, found.port, found.addr) == ("ps", 1, 9001, "h1:9001")
    assert found.query("ps", skip_port_check=True) == {0: "h0:9000", 1: "h1:9001"}
    assert found.query("worker") == {0: "w0:7000", 1: "w1:7001"}
    found.deregister("worker", 0, "w0:7000")
    assert found.query("worker") == {1: "w1:7001"}
    found.register("ps", 1, "h1:9001")
    found.register("worker", 0, "w0:7000")  # a role that this process does not have
    assert found.query("worker") == {0: "w0:7000", 1: "w1:7001"}
    found.deregister("ps", 0, "h0:9000")
    assert found.query("ps", skip_port_check=True) == {1: "h1:9001"}
    for claim in (("worker", 0, "h1:9001"), ("ps", 2, "h1:9001"), ("ps", 0, "h1:9001"), ("x", 0, "h")):
        for change in (found.register, found.deregister):
            with pytest.raises(ConfigError, match="MLP"):
                change(*claim)
    assert found.query("ps", skip_port_check=True) == {1: "h1:9001"}
    found.deregister_all()
    assert found.query_all() == {"ps": {}, "worker": {}, "chief": {}}


def test_under_mpi_every_rank_is_a_worker_of_its_node(mlp):
    mlp.setenv("MLP_ROLE", "worker")
    mlp.setenv("OMPI_COMM_WORLD_RANK", "3")
    mlp.setenv("OMPI_COMM_WORLD_SIZE", "4")
    mlp.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    found = MLPServiceDiscovery()
    assert (found.index, found.port, found.addr) == (3, 9004, "w1:7003")
    assert found.query("worker") == {0: "w0:7000", 1: "w0:7001", 2: "w1:7002", 3: "w1:7003"}


def test_waiting_for_a_ps_port_has_a_deadline(mlp, refused):
    mlp.setenv("MLP_PS_0_HOST", "127.0.0.1")
    mlp.setenv("MLP_PS_0_PORT", refused().rpartition(":")[2])
    mlp.setattr(MLPServiceDiscovery, "port_wait_secs", 0.05)
    with pytest.raises(DeadlineError, match="ps 127"):
        MLPServiceDiscovery().query("ps")


# --- registries -------------------------------------------------------------------------------------------------------


def test_registrations_are_seen_changed_and_removed(registry):  # noqa: F811
    job = registry.root[1:]
    clients = [registry(), registry()]
    one, two = (ZKServiceDiscovery(job, zk_client=client) for client in clients)
    try:
        one.register("ps", 0, "a:1")
        one.register("worker", 0, "w:1")
        eventually(lambda: two.query("ps") == {0: "a:1"} and two.query("worker") == {0: "w:1"})
        two.query("ps").clear()
        assert two.query("ps")
        one.register("ps", 0, "a:2")
        eventually(lambda: two.query("ps") == {0: "a:2"})
        one.deregister("ps", 0, "a:2")
        one.deregister("ps", 9, "unknown")
        eventually(lambda: two.query("ps") == {})
        one.register("ps", 1, "b:1")
        eventually(lambda: two.query("ps") == {1: "b:1"})
        registry.expire(clients[0])
        eventually(lambda: clients[1].get(f"/monolith/{job}/ps.1") and two.query("ps") == {1: "b:1"})
        eventually(lambda: two.query("worker") == {0: "w:1"})
    finally:
        one.close()
        two.close()
    assert one.query("ps") == one.query("ps")


def test_children_that_were_read_before_a_registration_do_not_hide_it():
    found = ZKServiceDiscovery("job", zk_client=FakeKazooClient())
    found.register("ps", 0, "a:1")
    found._on_children([])  # a late watch
    assert found.query("ps") == {0: "a:1"}
    found.deregister("ps", 0, "a:1")
    assert found.query("ps") == {}
    found.close()


def test_the_node_holds_the_address():
    zk = FakeKazooClient()
    found = ZKServiceDiscovery("job", zk_client=zk)
    found.register("ps", 3, "h:1")
    assert zk.get("/monolith/job/ps.3")[0] == b"h:1"
    assert zk.get("/monolith/job/ps.3")[1].ephemeralOwner
    found.close()


def test_a_registration_is_tried_again():
    class Flaky(FakeKazooClient):
        left = 2

        def create(self, path, *args, **kwargs):
            if "/ps." in path and self.left:
                self.left -= 1
                raise RuntimeError("no")
            return super().create(path, *args, **kwargs)

    found = ZKServiceDiscovery("job", max_tries=3, delay=0.01, zk_client=Flaky())
    found.register("ps", 0, "a:1")
    assert found.query("ps") == {0: "a:1"}
    found.close()


def test_a_cluster_is_assembled_in_order_of_index():
    zk = FakeKazooClient()
    found = ZKServiceDiscovery("job", zk_client=zk)
    found.register("ps", 1, "b:1")
    with pytest.raises(DeadlineError, match=r"ps \[0\]"):
        wait_for_cluster(found, 2, timeout=0.05, poll_secs=0.01)
    threading.Timer(0.1, lambda: (found.register("ps", 0, "a:1"), found.register("worker", 0, "c:1"))).start()
    assert wait_for_cluster(found, 2, index=1, timeout=60, poll_secs=0.01) == {"ps": ["a:1", "b:1"], "chief": ["c:1"]}
    found.close()


# --- Consul -----------------------------------------------------------------------------------------------------------


class ConsulAgent(BaseHTTPRequestHandler):
    """The agent's HTTP interface, stock paths and the original's lookup."""

    services, calls, visible = {}, [], True

    def log_message(self, *args): ...

    def answer(self, content=None):
        body = json.dumps(content).encode() if content is not None else b""
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.calls.append(("PUT", self.path, json.loads(body) if body else None))
        if self.path == "/v1/agent/service/register":
            self.services[json.loads(body)["id"]] = json.loads(body)
        else:
            self.services.pop(self.path.rpartition("/")[2], None)
        self.answer()

    def do_GET(self):
        self.calls.append(("GET", self.path, None))
        url = urlparse(self.path)
        if url.path.startswith("/v1/agent/check/pass/"):
            return self.answer()
        found = list(self.services.values()) if self.visible else []
        if url.path == "/v1/lookup/name":
            assert parse_qs(url.query)["addr-family"] == ["dual-stack"]
            return self.answer(
                [{"Port": s["port"], "Tags": dict(tag.split(":", 1) for tag in s["tags"])} for s in found]
            )
        assert self.path == "/v1/health/service/job?passing=true"
        return self.answer([{"Service": {"Port": s["port"], "Tags": s["tags"]}} for s in found])


@pytest.fixture
def consul_agent(monkeypatch):
    handler = type("Handler", (ConsulAgent,), {"services": {}, "calls": [], "visible": True})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("CONSUL_HTTP_HOST", "127.0.0.1")
    monkeypatch.setenv("CONSUL_HTTP_PORT", str(server.server_address[1]))
    yield handler
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("legacy", [False, True])
def test_consul_registers_keeps_alive_and_finds(consul_agent, legacy):
    found = ConsulServiceDiscovery("job", retry_time_secs=0.01, visible_wait_secs=0.01, legacy_lookup=legacy)
    found.register("ps", 2, "10.0.0.1:700")
    assert consul_agent.services["job-700"] == {
        "id": "job-700", "name": "job", "port": 700, "check": {"ttl": "60s"},
        "tags": ["index:2", "name:ps", "ip:10.0.0.1"],
    }  # fmt: skip
    eventually(lambda: ("GET", "/v1/agent/check/pass/service:job-700", None) in consul_agent.calls)
    assert found.query("ps") == {2: "10.0.0.1:700"}
    assert found.query("worker") == {}
    found.register("ps", 2, "10.0.0.1:701")  # the older entry of (ps, 2) is removed first
    assert list(consul_agent.services) == ["job-701"]
    found.deregister("ps", 2, "10.0.0.1:701")
    assert consul_agent.services == {}
    found.close()


def test_a_stock_agent_wants_checks_put_and_does_not_know_what_is_gone(consul_agent):
    def refuse(self, status):
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    get, put = consul_agent.do_GET, consul_agent.do_PUT

    def do_get(self):
        return refuse(self, 405) if self.path.startswith("/v1/agent/check/pass/") else get(self)

    def do_put(self):
        if self.path.startswith("/v1/agent/service/deregister/") and self.path[30:] not in self.services:
            return refuse(self, 404)
        return put(self)

    consul_agent.do_GET, consul_agent.do_PUT = do_get, do_put
    found = ConsulServiceDiscovery("job", retry_time_secs=0.01, visible_wait_secs=0.01)
    found.register("ps", 0, "h:1")
    eventually(lambda: ("PUT", "/v1/agent/check/pass/service:job-1", None) in consul_agent.calls)
    consul_agent.services.clear()
    found.deregister("ps", 0, "h:1")
    found.close()


def test_an_older_entry_that_does_not_go_is_an_oserror(consul_agent, monkeypatch):
    monkeypatch.setattr(consul, "OLD_ENTRY_TRIES", 3)
    monkeypatch.setattr(consul_agent, "do_PUT", lambda self: self.answer())
    consul_agent.services["job-7"] = {"port": 7, "tags": ["index:0", "name:ps", "ip:h"]}
    consul_agent.services["job-8"] = {"port": 8, "tags": ["index:x", "name:ps", "ip:h"]}
    found = ConsulServiceDiscovery("job", retry_time_secs=0.01)
    assert found.query("ps") == {0: "h:7"}
    with pytest.raises(OSError, match="is still registered as"):
        found.register("ps", 0, "h:1")


def test_an_entry_that_never_shows_is_an_oserror(consul_agent):
    consul_agent.visible = False
    found = ConsulServiceDiscovery("job", visible_tries=2, visible_wait_secs=0.01)
    with pytest.raises(OSError, match="blacklisted"):
        found.register("ps", 0, "h:1")
    for bad in ("h", "h:1:2", "[::1]:5"):
        with pytest.raises(ValueError, match="host:port"):
            found.register("ps", 0, bad)


def test_socket_errors_are_tried_again(monkeypatch, refused):
    monkeypatch.setattr(consul, "SOCKET_SLEEP_SECS", 0.01)
    monkeypatch.setenv("CONSUL_HTTP_HOST", "127.0.0.1")
    monkeypatch.setenv("CONSUL_HTTP_PORT", refused().rpartition(":")[2])
    tries = []
    once = consul.ConsulClient._once
    monkeypatch.setattr(consul.ConsulClient, "_once", lambda *args: tries.append(1) or once(*args))
    with pytest.raises(OSError, match="refused"):
        ConsulServiceDiscovery("job").query("ps")
    assert len(tries) == 5
