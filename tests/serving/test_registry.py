"""One conformance suite for registry clients: the fake, the directory of files, a real ZooKeeper."""

import threading
import time
import uuid

import pytest

from shoal.serving import DirectoryClient, FakeKazooClient
from shoal.serving.cluster.zk_types import NodeExistsError, NoNodeError, NotEmptyError, make_zk_client
from tests.serving.helpers import ZooKeeper, eventually

pytestmark = pytest.mark.timeout(600)  # a ZooKeeper is started, in the midst of other work


class Fakes:
    def __init__(self, request, tmp_path):
        self.tree = FakeKazooClient().tree

    def make(self):
        return FakeKazooClient(tree=self.tree)

    def expire(self, client):
        client.expire_session()


class Directories:
    def __init__(self, request, tmp_path):
        self.root = tmp_path / "registry"

    def make(self):
        return DirectoryClient(self.root, session_timeout=60.0, poll_interval=0.02)

    def expire(self, client):
        client.expire_session()
        client._beat()  # the next one, which notices; its own turn comes once in a quarter of the timeout


class Real:
    def __init__(self, request, tmp_path):
        self.server = request.getfixturevalue("zookeeper")

    def make(self):
        return self.server.client()

    def expire(self, client):
        """A second connection takes the session over and closes it, which is how ZooKeeper's own tests expire one.

        The client may take it back before it is closed, so this goes on until the client has lost it.
        """
        from kazoo.client import KazooClient, KazooState

        session, lost = client.client_id, threading.Event()

        def listen(state):
            if state == KazooState.LOST:
                lost.set()

        def steal():
            thief = KazooClient(self.server.hosts, client_id=session)
            thief.start(60)
            thief.stop()
            thief.close()
            return lost.wait(2)

        client.add_listener(listen)
        eventually(steal, 100, "the session to be lost")
        client.remove_listener(listen)


@pytest.fixture(params=[Fakes, Directories, Real], ids=["fake", "directory", "zookeeper"])
def registry(request, tmp_path):
    """Makes started clients of one registry, under a path of the test's own."""
    backend = request.param(request, tmp_path)
    made = []

    def make():
        client = backend.make()
        client.start(60)
        made.append(client)
        return client

    make.root = f"/test-{uuid.uuid4().hex[:8]}"
    make.expire = backend.expire
    yield make
    for client in made:
        client.stop()
        client.close()


def test_nodes_are_made_read_changed_and_deleted(registry):
    zk, path = registry(), f"{registry.root}/a/b"
    with pytest.raises(NoNodeError):
        zk.create(path, b"x")
    assert zk.create(path, b"x", makepath=True) == path
    with pytest.raises(NodeExistsError):
        zk.create(path, b"y")
    assert zk.get(path)[0] == b"x"
    zk.set(path, b"z")
    assert zk.get(path)[0] == b"z"
    assert zk.exists(path)
    assert zk.get_children(f"{registry.root}/a") == ["b"]
    with pytest.raises(NotEmptyError):
        zk.delete(f"{registry.root}/a")
    zk.delete(f"{registry.root}/a", recursive=True)
    assert not zk.exists(path)
    for missing in (
        lambda: zk.get(path),
        lambda: zk.set(path, b""),
        lambda: zk.delete(path),
        lambda: zk.get_children(path),
    ):
        with pytest.raises(NoNodeError):
            missing()


def test_names_with_colons_and_semicolons_survive(registry):
    zk = registry()
    name = "ps_0:psm;dc1;blue:pod:7"
    zk.create(f"{registry.root}/{name}", b"1", makepath=True)
    assert zk.get_children(registry.root) == [name]


def test_sequence_names_count_up_with_ten_digits(registry):
    zk = registry()
    zk.ensure_path(registry.root)
    first = zk.create(f"{registry.root}/0", b"", ephemeral=True, sequence=True)
    second = zk.create(f"{registry.root}/0", b"", ephemeral=True, sequence=True)
    assert first == f"{registry.root}/00000000000"
    assert second == f"{registry.root}/00000000001"


def test_ephemeral_nodes_go_with_their_client(registry):
    one, two = registry(), registry()
    one.create(f"{registry.root}/e", b"", ephemeral=True, makepath=True)
    assert eventually(lambda: two.exists(f"{registry.root}/e"))
    one.stop()
    eventually(lambda: not two.exists(f"{registry.root}/e"))
    assert two.exists(registry.root)


def test_data_watches_see_create_change_and_delete(registry):
    one, two = registry(), registry()
    one.ensure_path(registry.root)
    path, seen = f"{registry.root}/d", []
    one.create(path, b"0")
    two.DataWatch(path, lambda data, stat, event: seen.append((data, event.type if event else None)))
    assert seen == [(b"0", None)]
    one.set(path, b"1")
    eventually(lambda: seen[-1] == (b"1", "CHANGED"))
    one.delete(path)
    eventually(lambda: seen[-1] == (None, "DELETED"))
    one.create(path, b"2")
    eventually(lambda: seen[-1] == (b"2", "CREATED"))


def test_children_watches_see_every_change_and_stop_on_false(registry):
    one, two = registry(), registry()
    one.ensure_path(registry.root)
    seen = []

    def changed(children):
        seen.append(sorted(children))
        return len(children) < 2

    two.ChildrenWatch(registry.root, changed)
    assert seen == [[]]
    one.create(f"{registry.root}/a", b"")
    eventually(lambda: seen[-1] == ["a"])
    one.create(f"{registry.root}/b", b"")
    eventually(lambda: seen[-1] == ["a", "b"])
    one.create(f"{registry.root}/c", b"")
    time.sleep(0.2)
    assert seen[-1] == ["a", "b"]


def test_a_children_watch_on_a_missing_node_ends_at_once(registry):
    zk, seen = registry(), []
    zk.ChildrenWatch(f"{registry.root}/missing", seen.append)
    zk.ensure_path(f"{registry.root}/missing/child")
    time.sleep(0.2)
    assert seen == []


def test_listeners_see_loss_and_return_and_ephemeral_nodes_vanish(registry):
    zk, other = registry(), registry()
    states = []
    zk.add_listener(lambda state: states.append(str(state)) and None)
    zk.create(f"{registry.root}/e", b"", ephemeral=True, makepath=True)
    registry.expire(zk)
    eventually(lambda: "LOST" in states and "CONNECTED" in states[states.index("LOST") :], what="the session's return")
    eventually(lambda: not other.exists(f"{registry.root}/e"))
    zk.create(f"{registry.root}/e", b"again", ephemeral=True)
    assert other.get(f"{registry.root}/e")[0] == b"again"


def test_a_stopped_client_can_be_restarted(registry):
    zk = registry()
    zk.ensure_path(registry.root)
    zk.restart()
    assert zk.exists(registry.root)
    zk.retry(zk.set, registry.root, b"r")
    assert zk.get(registry.root)[0] == b"r"


def test_watches_rest_while_their_client_is_away_and_catch_up(registry):
    one, two = registry(), registry()
    one.create(f"{registry.root}/d", b"0", makepath=True)
    children, data = [], []
    two.ChildrenWatch(registry.root, lambda found: children.append(sorted(found)))
    two.DataWatch(f"{registry.root}/d", lambda value, stat: data.append(value))
    two.stop()
    one.create(f"{registry.root}/e", b"")
    one.set(f"{registry.root}/d", b"1")
    assert (children, data) == ([["d"]], [b"0"])
    two.start()
    eventually(lambda: children[-1] == ["d", "e"] and data[-1] == b"1")


def test_many_clients_write_at_once(registry):
    clients = [registry() for _ in range(3)]
    clients[0].ensure_path(registry.root)

    def work(zk, n):
        for i in range(10):
            zk.create(f"{registry.root}/{n}-{i}", b"", ephemeral=True)

    threads = [threading.Thread(target=work, args=(zk, n)) for n, zk in enumerate(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(clients[0].get_children(registry.root)) == 30


# --- what only some have ----------------------------------------------------------------------------------------------


def test_a_session_without_heartbeat_loses_its_nodes_in_a_directory(tmp_path):
    one = DirectoryClient(tmp_path, session_timeout=60, poll_interval=0.02)
    two = DirectoryClient(tmp_path, session_timeout=0.4, poll_interval=0.02)
    one.start()
    one.create("/e", b"", ephemeral=True)
    one._stop.set()  # what a killed process does
    one._thread.join(60)
    two.start()
    eventually(lambda: not two.exists("/e"))
    two.close()


def test_a_node_that_goes_while_it_is_looked_at_is_told_as_missing(tmp_path, monkeypatch):
    zk = DirectoryClient(tmp_path, poll_interval=0.02)
    zk.start()
    zk.create("/a", b"1")
    look, seen = zk._look, []

    def slow(watch):
        found = look(watch)
        if zk.exists("/a"):
            zk.delete("/a")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(zk, "_look", slow)
        zk.DataWatch("/a", lambda data, stat: seen.append(data))
    assert seen == [None]
    zk.create("/a", b"2")
    eventually(lambda: seen[-1] == b"2")
    zk.stop()


def test_a_path_cannot_leave_the_directory(tmp_path):
    zk = DirectoryClient(tmp_path / "root")
    zk.start()
    with pytest.raises(ValueError, match=r"\.\."):
        zk.create("/../evil", b"", makepath=True)
    zk.create("/a%2F..%2Fb", b"1")
    assert zk.get_children("/") == ["a%2F..%2Fb"]
    zk.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_the_registry_url_chooses_the_client(tmp_path):
    assert isinstance(make_zk_client(f"dir:{tmp_path}"), DirectoryClient)
    assert type(make_zk_client("127.0.0.1:1")).__name__ == "KazooClient"


def test_credentials_go_to_the_client_and_nowhere_else(monkeypatch, caplog):
    monkeypatch.setenv("ZK_AUTH", "user:secret")
    client = make_zk_client("127.0.0.1:1")
    assert ("digest", "user:secret") in client.auth_data
    assert "secret" not in caplog.text


def test_a_killed_and_restarted_zookeeper_keeps_sessions_and_watches(zookeeper, tmp_path):
    own = ZooKeeper(tmp_path / "zk").start()
    one, two = own.client(), own.client()
    try:
        one.start(60)
        two.start(60)
        one.ensure_path("/w")
        seen = []
        two.ChildrenWatch("/w", lambda children: seen.append(sorted(children)))
        one.create("/w/before", b"", ephemeral=True)
        eventually(lambda: seen[-1] == ["before"])
        own.kill()
        own.start()
        eventually(lambda: one.connected and two.connected)
        one.retry(one.create, "/w/after", b"", ephemeral=True)
        eventually(lambda: seen[-1] == ["after", "before"])
    finally:
        for client in (one, two):
            client.stop()
            client.close()
        own.kill()
