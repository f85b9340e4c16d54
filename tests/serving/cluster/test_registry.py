"""One conformance suite for registries: over a fake client, in a directory of files, in a real ZooKeeper."""

import os
import threading
import time
import uuid
from pathlib import Path

import pytest

from shoal.errors import ConfigError, DeadlineError
from shoal.serving import DirectoryClient, DirectoryRegistry, FakeKazooClient, KazooRegistry, open_registry
from shoal.serving.cluster.registry import registry_of
from shoal.serving.cluster.zookeeper import ConnectionClosedError, NotEmptyError
from shoal.testing.zookeeper import ZooKeeper
from tests.serving.helpers import eventually

pytestmark = pytest.mark.timeout(600)  # starts a ZooKeeper, next to other tests


class Fakes:
    def __init__(self, request, tmp_path):
        self.tree = FakeKazooClient().tree

    def make(self):
        return KazooRegistry(FakeKazooClient(tree=self.tree))

    def expire(self, registry):
        registry.client.expire_session()


class Directories:
    def __init__(self, request, tmp_path):
        self.root = tmp_path / "registry"

    def make(self):
        return DirectoryRegistry(self.root, session_timeout=60.0, poll_interval=0.02)

    def expire(self, registry):
        registry.expire_session()


class Real:
    def __init__(self, request, tmp_path):
        self.server = request.getfixturevalue("zookeeper")

    def make(self):
        client = self.server.client()
        client.start(60)
        return KazooRegistry(client)

    def expire(self, registry):
        """A second connection takes the session over and closes it, which is how ZooKeeper's own tests expire one.

        The client may take it back before it is closed, so this goes on until the client has lost it.
        """
        from kazoo.client import KazooClient, KazooState

        client = registry.client
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
    """Makes started sessions of one registry, under a path of the test's own."""
    backend = request.param(request, tmp_path)
    made = []

    def make():
        session = backend.make()
        session.start()
        made.append(session)
        return session

    make.root = f"/test-{uuid.uuid4().hex[:8]}"
    make.expire = backend.expire
    yield make
    for session in made:
        session.stop()


def test_values_are_written_read_overwritten_and_deleted(registry):
    tree, path = registry(), f"{registry.root}/a/b"
    assert tree.get(path) is None
    assert tree.children(path) == []
    assert tree.put(path, b"x") == path
    assert tree.get(path) == b"x"
    tree.put(path, b"")
    assert tree.get(path) == b""
    assert tree.children(f"{registry.root}/a") == ["b"]
    with pytest.raises(NotEmptyError):
        tree.delete(f"{registry.root}/a")
    tree.delete(path)
    tree.delete(path)  # a missing one is ignored
    assert tree.get(path) is None
    assert tree.children(f"{registry.root}/a") == []


def test_a_value_is_swapped_only_where_it_is_what_was_expected(registry):
    tree, path = registry(), f"{registry.root}/state/leader"
    assert not tree.swap(path, b"x", b"y")
    assert tree.swap(path, None, b"x")
    assert not tree.swap(path, None, b"y")
    assert not tree.swap(path, b"y", b"z")
    assert tree.swap(path, b"x", b"y")
    assert tree.get(path) == b"y"


def test_of_many_that_swap_at_once_one_succeeds(registry):
    path, sessions, won = f"{registry.root}/state", [registry() for _ in range(3)], []
    sessions[0].put(path, b"0")

    def work(tree, n):
        for turn in range(5):
            if tree.swap(path, str(turn).encode(), str(turn + 1).encode()):
                won.append(turn)
            deadline = time.monotonic() + 60
            while int(tree.get(path)) <= turn and time.monotonic() < deadline:
                time.sleep(0.001)

    threads = [threading.Thread(target=work, args=(tree, n)) for n, tree in enumerate(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(won) == [0, 1, 2, 3, 4]


def test_names_with_colons_and_semicolons_survive(registry):
    tree = registry()
    name = "ps_0:psm;dc1;blue:pod:7"
    tree.put(f"{registry.root}/{name}", b"1")
    assert tree.children(registry.root) == [name]


def test_numbered_names_count_up_with_ten_digits(registry):
    tree = registry()
    first = tree.put(f"{registry.root}/0", b"", ephemeral=True, numbered=True)
    second = tree.put(f"{registry.root}/0", b"", ephemeral=True, numbered=True)
    assert (first, second) == (f"{registry.root}/00000000000", f"{registry.root}/00000000001")


def test_ephemeral_values_go_with_their_session(registry):
    one, two = registry(), registry()
    one.put(f"{registry.root}/e", b"", ephemeral=True)
    eventually(lambda: two.get(f"{registry.root}/e") is not None)
    one.stop()
    eventually(lambda: two.get(f"{registry.root}/e") is None)
    assert two.get(registry.root) is not None


def test_an_ephemeral_value_belongs_to_the_session_that_wrote_it_last(registry):
    one, two = registry(), registry()
    path = f"{registry.root}/e"
    one.put(path, b"1", ephemeral=True)
    two.put(path, b"2", ephemeral=True)
    one.stop()
    assert two.get(path) == b"2"
    two.put(path, b"3", ephemeral=True)
    assert two.get(path) == b"3"


def test_an_ephemeral_value_has_no_children(registry):
    tree = registry()
    tree.put(f"{registry.root}/e", b"", ephemeral=True)
    with pytest.raises(Exception, match=r"(?i)ephemeral|^$"):
        tree.put(f"{registry.root}/e/child", b"")
    tree.put(f"{registry.root}/p/child", b"")
    with pytest.raises(NotEmptyError):
        tree.put(f"{registry.root}/p", b"", ephemeral=True)


def test_watches_see_create_change_and_delete(registry):
    one, two = registry(), registry()
    path, seen = f"{registry.root}/d", []
    one.put(path, b"0")
    two.watch(path, lambda value, event: seen.append((value, event)))
    assert seen == [(b"0", None)]
    one.put(path, b"1")
    eventually(lambda: seen[-1] == (b"1", "CHANGED"))
    one.delete(path)
    eventually(lambda: seen[-1] == (None, "DELETED"))
    one.put(path, b"2")
    eventually(lambda: seen[-1] == (b"2", "CREATED"))


def test_watches_of_children_see_every_change_and_stop_on_false(registry):
    one, two = registry(), registry()
    seen = []

    def changed(children):
        seen.append(sorted(children))
        return len(children) < 2

    two.watch_children(registry.root, changed, ensure=True)
    assert seen == [[]]
    one.put(f"{registry.root}/a", b"")
    eventually(lambda: seen[-1] == ["a"])
    one.put(f"{registry.root}/b", b"")
    eventually(lambda: seen[-1] == ["a", "b"])
    one.put(f"{registry.root}/c", b"")
    time.sleep(0.2)
    assert seen[-1] == ["a", "b"]


def test_a_watch_of_the_children_of_a_missing_path_ends_at_once(registry):
    tree, seen = registry(), []
    tree.watch_children(f"{registry.root}/missing", seen.append)
    tree.put(f"{registry.root}/missing/child", b"")
    time.sleep(0.2)
    assert seen == []


def test_ensuring_a_path_keeps_its_value(registry):
    tree, seen = registry(), []
    tree.put(registry.root, b"kept")
    tree.watch_children(registry.root, seen.append, ensure=True)
    assert (seen, tree.get(registry.root)) == ([[]], b"kept")


def test_listeners_see_loss_and_return_and_ephemeral_values_vanish(registry):
    tree, other = registry(), registry()
    states, ended = [], []
    tree.listen(lambda state: states.append(str(state)) and None)
    unlisten = tree.listen(lambda state: ended.append(str(state)) and None)
    unlisten()
    tree.put(f"{registry.root}/e", b"", ephemeral=True)
    registry.expire(tree)
    eventually(lambda: "LOST" in states and "CONNECTED" in states[states.index("LOST") :], what="the session's return")
    eventually(lambda: other.get(f"{registry.root}/e") is None)
    tree.put(f"{registry.root}/e", b"again", ephemeral=True)
    assert other.get(f"{registry.root}/e") == b"again"
    assert ended == []


def test_a_session_can_be_restarted(registry):
    tree = registry()
    tree.put(registry.root, b"r")
    tree.restart()
    assert tree.get(registry.root) == b"r"


def test_a_registry_that_is_stopped_says_so(registry):
    tree = registry()
    tree.stop()
    with pytest.raises(ConnectionClosedError):
        tree.get(registry.root)
    tree.start()
    assert tree.get(registry.root) is None


def test_watches_rest_while_their_session_is_over_and_catch_up(registry):
    one, two = registry(), registry()
    one.put(f"{registry.root}/d", b"0")
    children, values = [], []
    two.watch_children(registry.root, lambda found: children.append(sorted(found)))
    two.watch(f"{registry.root}/d", lambda value, event: values.append(value))
    two.stop()
    one.put(f"{registry.root}/e", b"")
    one.put(f"{registry.root}/d", b"1")
    assert (children, values) == ([["d"]], [b"0"])
    two.start()
    eventually(lambda: children[-1] == ["d", "e"] and values[-1] == b"1")


def test_many_sessions_write_at_once(registry):
    sessions = [registry() for _ in range(3)]

    def work(tree, n):
        for i in range(10):
            tree.put(f"{registry.root}/{n}-{i}", b"", ephemeral=True)

    threads = [threading.Thread(target=work, args=(tree, n)) for n, tree in enumerate(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(sessions[0].children(registry.root)) == 30


# --- features of some registries --------------------------------------------------------------------------------------


def test_a_session_without_heartbeat_loses_its_values_in_a_directory(tmp_path):
    one = DirectoryRegistry(tmp_path, session_timeout=0.4, poll_interval=0.02)
    slow = DirectoryRegistry(tmp_path, session_timeout=600, poll_interval=0.02)
    two = DirectoryRegistry(tmp_path, session_timeout=0.2, poll_interval=0.02)
    for each, path in ((one, "/e"), (slow, "/slow")):
        each.start()
        each.put(path, b"", ephemeral=True)
        each._stop.set()  # as if the process were killed
        each._thread.join(60)
    two.start()
    eventually(lambda: two.get("/e") is None)
    assert two.get("/slow") is not None  # each session has its own timeout
    two.stop()


def test_a_session_without_a_timeout_in_its_file_has_that_of_the_reader(tmp_path):
    (tmp_path / "=sessions").mkdir()
    (tmp_path / "=sessions" / "of-0.1").touch()
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "=data").touch()
    (tmp_path / "e" / "=owner").write_text("of-0.1")
    two = DirectoryRegistry(tmp_path, session_timeout=0.4, poll_interval=0.02)
    two.start()
    eventually(lambda: two.get("/e") is None)
    two.stop()


def test_a_value_that_is_written_while_it_is_read_is_told_once(tmp_path, monkeypatch):
    registry = DirectoryRegistry(tmp_path, session_timeout=60, poll_interval=60)
    registry.start()
    registry.put("/d", b"0")
    seen, stat, fstat = [], Path.stat, os.fstat
    registry.watch("/d", lambda value, event: seen.append(value))
    (watch,) = registry._watches

    def then_written(look, *arguments):
        monkeypatch.undo()
        found = look(*arguments)
        registry.put("/d", b"1")
        return found

    monkeypatch.setattr(Path, "stat", lambda path: then_written(stat, path))
    monkeypatch.setattr(os, "fstat", lambda file: then_written(fstat, file))
    for _ in range(3):
        registry._check_watch(watch)
    registry.stop()
    assert seen == [b"0", b"1"]


def test_a_path_cannot_leave_the_directory(tmp_path):
    tree = DirectoryRegistry(tmp_path / "root")
    tree.start()
    with pytest.raises(ValueError, match=r"\.\."):
        tree.put("/../evil", b"")
    tree.put("/a%2F..%2Fb", b"1")
    assert tree.children("/") == ["a%2F..%2Fb"]
    tree.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_the_address_chooses_the_registry(tmp_path):
    assert isinstance(open_registry(f"dir:{tmp_path}"), DirectoryRegistry)
    assert type(open_registry("127.0.0.1:1").client).__name__ == "KazooClient"
    assert DirectoryClient is DirectoryRegistry


@pytest.mark.parametrize("address", ["dir:", "dir://", "host:port", "zk://host:port"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match=r"a registry .*must be dir:PATH"):
        open_registry(address)


def test_a_zookeeper_that_does_not_answer_is_named(monkeypatch):
    registry = open_registry("127.0.0.1:1")
    start = registry.client.start
    monkeypatch.setattr(registry.client, "start", lambda: start(timeout=0.2))
    with pytest.raises(DeadlineError, match=r"no ZooKeeper server answered at 127\.0\.0\.1:1; is it running"):
        registry.start()


def test_a_registry_of_the_users_own_is_taken_as_it_is():
    own = object()
    assert registry_of(own) is own
    assert isinstance(registry_of(FakeKazooClient()), KazooRegistry)


def test_credentials_go_to_the_client_and_nowhere_else(monkeypatch, caplog):
    monkeypatch.setenv("ZK_AUTH", "user:secret")
    client = open_registry("127.0.0.1:1").client
    assert ("digest", "user:secret") in client.auth_data
    assert "secret" not in caplog.text


def test_a_killed_and_restarted_zookeeper_keeps_sessions_and_watches(zookeeper, tmp_path):
    own = ZooKeeper(tmp_path / "zk", sessions_ms=(40000, 60000)).start()
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


def test_a_directory_that_is_away_is_told_once_and_again_when_it_is_back(tmp_path, caplog):
    registry = DirectoryRegistry(tmp_path / "registry", session_timeout=0.04, poll_interval=0.01)
    beats, real = [], registry._beat
    registry._beat = lambda: (beats.append(1), real())
    registry.start()
    try:
        (tmp_path / "registry").rename(tmp_path / "away")
        eventually(lambda: "could not poll" in caplog.text)
        more = len(beats) + 5
        eventually(lambda: len(beats) > more)
        assert caplog.text.count("could not poll") == 1
        (tmp_path / "away").rename(tmp_path / "registry")
        eventually(lambda: "works again" in caplog.text)
    finally:
        registry.stop()
