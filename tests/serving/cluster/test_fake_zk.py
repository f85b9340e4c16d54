"""The fake ZooKeeper client behaves as kazoo's does against a real server: one suite for both."""

import threading
import time
import uuid

import pytest

from shoal.serving import FakeKazooClient
from shoal.serving.cluster.zookeeper import NodeExistsError, NoNodeError, NotEmptyError
from tests.serving.helpers import eventually

pytestmark = pytest.mark.timeout(600)  # starts a ZooKeeper, next to other tests


@pytest.fixture(params=["fake", "zookeeper"])
def registry(request):
    """Makes started clients of one tree, under a path of the test's own."""
    tree, made = FakeKazooClient().tree, []
    server = request.getfixturevalue("zookeeper") if request.param == "zookeeper" else None

    def make():
        client = FakeKazooClient(tree=tree) if server is None else server.client()
        client.start(60)
        made.append(client)
        return client

    make.root = f"/test-{uuid.uuid4().hex[:8]}"
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
