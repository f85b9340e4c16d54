"""A shard on several servers: decisions as pure functions, then servers in this process, then killed processes."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal.errors import ConfigError, DataError, PeerError
from shoal.serving import DirectoryRegistry
from shoal.serving.cluster.discovery.leaders import RegistryBoard, group_addresses
from shoal.sharded import Engine, ParameterServer, PsClient, Shard, ps_table
from shoal.sharded.ps.protocol import Op, Request
from shoal.sharded.ps.replica import replication as replication_module
from shoal.sharded.ps.replica import transfer
from shoal.sharded.ps.replica.board import FollowingBoard, LoneBoard, ShardState, claim, handed_over, joined, without
from shoal.sharded.ps.replica.feed import Feed, Follower
from shoal.sharded.ps.replica.log_reader import LogReader, RecordsGone, records
from shoal.sharded.ps.replica.peer import Peer
from shoal.sharded.ps.replica.replication import Replication, Role, server_name
from shoal.sharded.ps.replica.terms import Terms, differs
from shoal.sharded.ps.server.log import Log
from shoal.sharded.ps.server.server import StartAgain
from tests.sharded.helpers import LONG, told

T = torch.tensor
WITHIN_S = 60.0
SESSION_S = 30.0
SHORT = timedelta(seconds=2)
"""A leader's patience where a follower has to fall out of sync."""


def eventually(check, within_s=WITHIN_S):
    until = time.monotonic() + within_s
    while not (found := check()):
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)
    return found


# --- decisions --------------------------------------------------------------------------------------------------------


def test_the_first_server_of_a_shard_leads():
    after, why = claim(None, "a", {"a": "x"})
    assert after == ShardState(term=1, leader="a", in_sync=("a",))
    assert why


def test_only_a_server_with_everything_leads_when_the_leader_has_gone():
    state = ShardState(term=3, leader="a", in_sync=("a", "b"))
    assert claim(state, "b", {"a": "x", "b": "y"})[0] is None
    assert claim(state, "b", {"b": "y", "c": "z"})[0] == ShardState(term=4, leader="b", in_sync=("b",))
    after, why = claim(state, "c", {"b": "y", "c": "z"})
    assert after is None
    assert "does not have all acknowledged writes" in why
    assert "--force-lead" in why
    assert claim(without(state, "b"), "b", {"b": "y"})[0] is None


def test_a_leader_that_comes_back_first_leads_in_a_new_term():
    state = ShardState(term=3, leader="a", in_sync=("a", "b"))
    assert claim(state, "a", {"a": "x"})[0] == ShardState(term=4, leader="a", in_sync=("a",))


def test_followers_join_leave_and_take_over():
    state = ShardState(term=3, leader="b", in_sync=("b",))
    both = joined(state, "a")
    assert both.in_sync == ("a", "b")
    assert joined(both, "a") == both
    assert handed_over(both, "a") == ShardState(term=4, leader="a", in_sync=("a",))
    assert ShardState.decode(both.encode()) == both
    with pytest.raises(DataError, match="damaged"):
        ShardState.decode(b"{}")


@pytest.mark.parametrize(
    ("mine", "last", "leader", "leader_last", "why"),
    [
        ([], 0, [(1, 1)], 10, ""),
        ([(1, 1)], 5, [(1, 1)], 10, ""),
        ([(1, 1)], 11, [(1, 1)], 10, "up to 11"),
        ([(1, 1)], 8, [(1, 1), (2, 7)], 10, "ended at record 6"),
        ([(1, 1)], 6, [(1, 1), (2, 7)], 10, ""),
        ([(1, 1), (2, 7)], 9, [(1, 1), (3, 7)], 10, "no term 2"),
        ([(1, 1), (2, 7)], 6, [(1, 1), (3, 7)], 10, ""),
        ([], 6, [(1, 1)], 10, "before this server was part"),
    ],
)
def test_a_log_that_went_another_way_is_noticed(mine, last, leader, leader_last, why):
    found = differs(Terms(tuple(mine)), last, Terms(tuple(leader)), leader_last)
    assert (why in found) if why else not found


def test_answers_wait_for_a_follower_that_is_quick_or_comes_no_nearer():
    replication = Replication(LoneBoard("a", 0), name="a", follower_timeout=timedelta(seconds=2))
    replication._last = lambda: 5000
    assert replication._is_near(Follower(after=4990, round_s=0.01), 10.0)
    slow = Follower(after=4990, round_s=1.0, near_since=10.0)
    assert not replication._is_near(slow, 11.0)
    assert replication._is_near(slow, 12.5)
    far = Follower(after=100, round_s=1.0, near_since=0.0)
    assert not replication._is_near(far, 12.5)
    assert far.near_since == 12.5


def test_a_follower_that_has_gone_is_not_in_sync_once_the_writes_that_waited_for_it_are_answered():
    board, seen = LoneBoard("a", 1), []
    replication = Replication(board, name="a")
    replication.role, replication.term = Role.LEADER, 1
    replication._engine = SimpleNamespace(shard=SimpleNamespace(index=0))
    replication.feed = SimpleNamespace(
        followers={}, counted={"b", "c"}, wake=lambda: seen.append(replication.info()["in_sync"])
    )
    replication.feed.lag = dict
    both = ShardState(term=1, leader="a", in_sync=("a", "b", "c"))
    assert board.change(board.read(), both)
    replication._state = both
    replication._keep_leading(both)
    assert seen == [["a", "c"], ["a"]]


def test_a_follower_may_come_while_writes_are_answered(tmp_path):
    feed = Feed(tmp_path, None, last=lambda: 9, terms=Terms, may_answer=lambda: True, ack="follower")

    class Followers(dict):
        def __getitem__(self, name):
            feed.counted.add("c")  # as another thread does
            return super().__getitem__(name)

    feed.followers, feed.counted = Followers(a=Follower(after=5), b=Follower(after=7), c=Follower(after=1)), {"a", "b"}
    assert feed.acknowledged() == 5


def test_terms_are_kept_in_a_file(tmp_path):
    terms = Terms().begin(1, 1).begin(2, 1).begin(4, 9)
    assert terms.spans == ((2, 1), (4, 9))
    assert (terms.last_of(2), terms.last_of(4), terms.newest, 2 in terms) == (8, None, 4, True)
    terms.write(tmp_path)
    assert Terms.read(tmp_path) == terms
    (tmp_path / "terms.json").write_text("[[2, 1], [1, 5]]")
    with pytest.raises(DataError, match="must rise"):
        Terms.read(tmp_path)


def test_a_log_is_read_while_it_grows_over_several_files(tmp_path):
    log, reader = Log(tmp_path), LogReader(tmp_path)
    for n in range(1, 6):
        log.append([b"h%d" % n, bytes(8), b"v" * n])
    got = list(records(memoryview(reader.read(0, 5, 100)), 1))
    assert got[0][:2] == (1, b"h1")
    assert len(got) < 5
    log.rotate()
    log.append([b"h6"])
    after = got[-1][0]
    rest = [*records(memoryview(reader.read(after, 6, 1 << 20)), after + 1)]
    assert [number for number, *_ in rest] == list(range(after + 1, 7))
    assert [r[1] for r in records(memoryview(LogReader(tmp_path).read(5, 6, 1)), 6)] == [b"h6"]
    log.drop_before(6)
    with pytest.raises(RecordsGone):
        LogReader(tmp_path).read(2, 6, 1)
    damaged = bytearray(LogReader(tmp_path).read(5, 6, 1))
    damaged[-1] ^= 1
    with pytest.raises(DataError, match="damaged"):
        list(records(memoryview(damaged), 6))
    log.close()


# --- servers in this process ------------------------------------------------------------------------------------------


class Server:
    """One server of a group that starts again as a follower where it has to, as `shoal ps` does."""

    def __init__(self, folder, board, *, ack="follower", follower_timeout=LONG, **options):
        self.folder, self._board, self._ack = folder, board, ack
        self._options = {"follower_timeout": follower_timeout, **options}
        self._ended = threading.Event()
        self.server, self.port, self.reasons = None, 0, []
        self._start()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _start(self):
        self.replication = Replication(self._board(), name=server_name(self.folder), ack=self._ack, **self._options)
        engine = Engine(Shard(0, 1), "log", self.folder)
        try:
            self.server = ParameterServer(engine, port=self.port, replication=self.replication).start()
        except StartAgain:
            self._start()
        self.port = int(self.server.address.rpartition(":")[2])

    def _watch(self):
        while not self._ended.wait(0.01):
            if self.server.wait(0):
                assert self.replication.rebuild, self.server.fatal
                self.reasons.append(self.replication.rebuild)
                self.server.stop(drain=timedelta(0))
                self._start()

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    @property
    def leads(self):
        return self.replication.role is Role.LEADER

    def stop(self):
        self._ended.set()
        self._thread.join(WITHIN_S)
        self.server.stop(drain=timedelta(0))

    def rows(self, ids):
        table = self.server.engine.shard.tables["t"]
        return table.lookup(ids)


@pytest.fixture
def group(tmp_path):
    """Makes servers of one shard that find each other in a directory; none is lost because the machine stalls."""
    made = []

    def board():
        return RegistryBoard(DirectoryRegistry(tmp_path / "registry", SESSION_S, 0.05), "g", 0, SESSION_S)

    def make(name, **options):
        server = Server(tmp_path / name, board, **options)
        made.append(server)
        return server

    make.registry = f"dir:{tmp_path / 'registry'}"
    yield make
    for server in made:
        server.stop()


def in_sync(leader, *followers):
    names = {leader.replication.name, *(one.replication.name for one in followers)}
    return eventually(lambda: set(leader.server.info()["group"]["in_sync"]) == names)


def table_of(client):
    return ps_table(client, 2, name="t", optimizer="sgd", lr=1.0, initializer="zeros")


def refused(client, call, match):
    """Has ``call()`` raise, with a deadline that suffices to hear why."""

    def within(deadline):
        client.deadline = deadline
        call()

    told(within, match)


def test_a_follower_has_every_row_and_answers_no_write(group):
    leader = group("a")
    eventually(lambda: leader.leads)
    follower = group("b")
    in_sync(leader, follower)
    with PsClient([f"{follower.address}|{leader.address}"], deadline=LONG) as client:  # the follower first
        table = table_of(client)
        for step in range(5):
            table.apply_gradients(T([1, 2]), torch.ones(2, 2), step)
        client.flush()
        assert table.lookup(T([1, 2, 3])).tolist() == [[-5, -5], [-5, -5], [0, 0]]
    assert torch.equal(follower.rows(T([1, 2])), leader.rows(T([1, 2])))
    told = follower.server.info()["group"]
    assert (told["role"], told["leader"]) == ("follower", f"tcp://{leader.address}")
    assert told["lag_s"] < WITHIN_S
    assert leader.server.info()["group"]["follower_lag"] == {follower.replication.name: 0}


def test_a_leader_without_contact_to_the_registry_answers_no_read(group, monkeypatch):
    """Another server may lead by then, and have newer rows."""
    leader = group("a", stale_reads=timedelta(seconds=60))
    eventually(lambda: leader.leads)
    with PsClient([leader.address], deadline=LONG) as client:
        table = table_of(client)
        table.assign(T([1]), torch.ones(1, 2))
        monkeypatch.setattr(leader.replication, "in_contact", lambda: False)
        for ids in (T([1]), torch.arange(100_000)):  # small and large reads are answered by different threads
            refused(client, lambda ids=ids: table.lookup(ids), "lost contact with the registry")
        monkeypatch.undo()
        client.deadline = LONG
        assert table.lookup(T([1])).tolist() == [[1, 1]]


def test_a_follower_leads_when_the_leader_has_gone_and_nothing_is_lost_or_doubled(group):
    leader = group("a")
    eventually(lambda: leader.leads)
    follower = group("b")
    in_sync(leader, follower)
    with PsClient([f"{leader.address}|{follower.address}"], deadline=LONG) as client:
        table = table_of(client)
        table.apply_gradients(T([1]), torch.ones(1, 2), 0)
        leader.stop()
        for step in range(1, 4):
            table.apply_gradients(T([1]), torch.ones(1, 2), step)
        client.flush()
        assert table.lookup(T([1])).tolist() == [[-4, -4]]
    assert follower.leads
    assert follower.replication.term == 2
    assert group_addresses(group.registry, "g") == [f"tcp://{follower.address}"]


def test_an_old_leader_follows_when_it_comes_back(group, tmp_path):
    leader = group("a")
    eventually(lambda: leader.leads)
    follower = group("b")
    in_sync(leader, follower)
    with PsClient([f"{leader.address}|{follower.address}"], deadline=LONG) as client:
        table = table_of(client)
        table.apply_gradients(T([1]), torch.ones(1, 2), 0)
        leader.stop()
        table.apply_gradients(T([1]), torch.ones(1, 2), 1)
        back = group("a")
        in_sync(follower, back)
        table.apply_gradients(T([1]), torch.ones(1, 2), 2)
    assert back.replication.role is Role.FOLLOWER
    assert back.rows(T([1])).tolist() == [[-3, -3]]


def test_a_follower_hears_from_the_leader_that_it_leads_now(group, monkeypatch):
    leader = group("a")
    eventually(lambda: leader.leads)
    follower = group("b")
    in_sync(leader, follower)
    monkeypatch.setattr(replication_module, "TICK_S", 2 * WITHIN_S)  # no server polls the registry
    time.sleep(0.3)
    with PsClient([f"{leader.address}|{follower.address}"], deadline=LONG) as client:
        name = client.info()[0]["group"]["name"]
        assert leader.replication.hand_over() == follower.replication.name != name
        eventually(lambda: follower.leads)
        monkeypatch.undo()
        eventually(lambda: client.info()[0]["group"]["role"] == "leader")


def test_a_leader_that_joins_again_answers_no_read_before_it_knows_who_leads(group, monkeypatch):
    leader = group("a")
    eventually(lambda: leader.leads)
    follower = group("b")
    in_sync(leader, follower)
    with PsClient([leader.address], deadline=LONG) as client:
        table_of(client).apply_gradients(T([1]), torch.ones(1, 2), 0)
    board, looked, may_look = leader.replication.board, threading.Event(), threading.Event()

    def away(*_):
        raise ConnectionError("the registry is away")

    def read():
        looked.set()
        assert may_look.wait(LONG.total_seconds())
        return RegistryBoard.read(board)

    monkeypatch.setattr(board, "join", away)
    board._registry.expire_session()
    eventually(lambda: follower.leads)
    with PsClient([follower.address], deadline=LONG) as client:
        table_of(client).apply_gradients(T([1]), torch.ones(1, 2), 1)
    monkeypatch.setattr(board, "read", read)
    monkeypatch.delattr(board, "join")
    try:
        assert looked.wait(WITHIN_S)  # it has joined, but not read the state yet
        eventually(lambda: not leader.replication.may_answer())
        asked = {0: Request(Op.LOOKUP, counts=(1,), names=("t",), ids=T([1]))}
        with PsClient([leader.address], deadline=LONG) as client:
            told(lambda deadline: client.read(asked, deadline), "lost contact with the registry")
    finally:
        may_look.set()
    monkeypatch.undo()
    in_sync(follower, leader)
    assert leader.rows(T([1])).tolist() == [[-2, -2]]


def test_a_log_that_nobody_acknowledged_is_set_aside(group, tmp_path):
    leader = group("a")
    eventually(lambda: leader.leads)
    with PsClient([leader.address], deadline=LONG) as client:
        table = table_of(client)
        table.apply_gradients(T([1]), torch.ones(1, 2), 0)
    follower = group("b")
    in_sync(leader, follower)
    leader.stop()
    eventually(lambda: follower.leads)
    log = Log(tmp_path / "a", leader.server.engine.log.next_number)  # as if it had died before a follower got this
    log.append(
        Request(
            Op.APPLY, stream=bytes(15) + b"x", seq=1, counts=(1,), names=("t",), ids=T([1]), values=T([1.0, 1.0])
        ).frames()
    )
    log.close()
    with PsClient([follower.address], deadline=LONG) as client:
        table_of(client).apply_gradients(T([1]), torch.full((1, 2), 10.0), 1)
        back = group("a")
        in_sync(follower, back)
    assert back.rows(T([1])).tolist() == [[-11, -11]]
    (aside,) = (tmp_path / "a").glob("superseded-*")
    assert "cannot continue its own log" in (aside / "why.txt").read_text()


def damage(folder):
    for path in folder.glob("log-*"):
        data = bytearray(path.read_bytes())
        data[40] ^= 1  # in a synced record
        path.write_bytes(data)


def test_a_server_whose_directory_is_damaged_takes_the_leaders_rows_under_a_new_name(group, tmp_path):
    leader = group("a", follower_timeout=SHORT)
    eventually(lambda: leader.leads)
    with PsClient([leader.address], deadline=LONG) as client:
        table = table_of(client)
        table.apply_gradients(T([1, 2]), torch.ones(2, 2), 0)
        follower = group("b")
        in_sync(leader, follower)
        table.apply_gradients(T([1]), torch.ones(1, 2), 1)
        name = follower.replication.name
        follower.stop()
        damage(tmp_path / "b")
        back = group("b")
        in_sync(leader, back)
    assert back.replication.name != name  # the old name may still be in sync in the registry
    assert back.rows(T([1, 2])).tolist() == [[-2, -2], [-1, -1]]
    (aside,) = (tmp_path / "b").glob("superseded-*")
    assert "is damaged" in (aside / "why.txt").read_text()
    assert (aside / "name").read_text() == name


def test_a_damaged_directory_is_kept_where_nobody_else_has_the_rows(group, tmp_path):
    others = set(threading.enumerate())
    leader = group("a")
    eventually(lambda: leader.leads)
    with PsClient([leader.address], deadline=LONG) as client:
        table = table_of(client)
        for step in range(3):
            table.apply_gradients(T([1]), torch.ones(1, 2), step)
    leader.stop()
    damage(tmp_path / "a")
    with pytest.raises(DataError, match="damaged although it had been on the disk"):
        group("a")
    assert not list((tmp_path / "a").glob("superseded-*"))
    left = set(threading.enumerate()) - others
    assert not [thread for thread in left if thread.name == "shoal-directory"]  # it has left the group


def test_a_follower_whose_disk_is_full_waits_for_room(group, monkeypatch):
    leader = group("a", follower_timeout=SHORT)
    eventually(lambda: leader.leads)
    follower = group("b")
    in_sync(leader, follower)
    real, full = Log.append, False

    def append(log, frames):
        if log is follower.server.engine.log and full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(log, frames)

    monkeypatch.setattr(Log, "append", append)
    with PsClient([leader.address], deadline=LONG) as client:
        table = table_of(client)
        client.flush()
        in_sync(leader, follower)
        full = True
        table.apply_gradients(T([1]), torch.ones(1, 2), 0)  # once it no longer waits for the follower
        eventually(lambda: len(leader.server.info()["group"]["in_sync"]) == 1)
        full = False
        in_sync(leader, follower)
    assert follower.rows(T([1])).tolist() == [[-1, -1]]
    assert follower.reasons == []


def test_a_server_with_an_empty_disk_takes_the_leaders_checkpoint(group, tmp_path):
    leader = group("a")
    eventually(lambda: leader.leads)
    with PsClient([leader.address], deadline=LONG) as client:
        table = table_of(client)
        table.apply_gradients(torch.arange(1000), torch.ones(1000, 2), 0)
        for _ in range(3):  # the beginning of the log is removed
            client.checkpoint()
            table.apply_gradients(T([5]), torch.ones(1, 2), 1)
        client.checkpoint(keep_as="run-best")
        follower = group("b")
        in_sync(leader, follower)
        assert torch.equal(follower.rows(torch.arange(1000)), leader.rows(torch.arange(1000)))
        client.checkpoint(keep_as="run-last", others=["run-best"])
        eventually(lambda: (tmp_path / "b" / "kept-run-last").is_dir())
        table.apply_gradients(T([5]), torch.ones(1, 2), 2)
        client.restore("t", "run-best")
        eventually(lambda: follower.rows(T([5])).tolist() == [[-4, -4]])


def test_a_server_with_an_empty_disk_replays_no_long_log(group, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "MANY", 5)
    leader = group("a")
    eventually(lambda: leader.leads)
    with PsClient([leader.address], deadline=LONG) as client:
        table = table_of(client)
        for step in range(10):
            table.apply_gradients(T([1]), torch.ones(1, 2), step)
        follower = group("b")
        in_sync(leader, follower)
        (first,) = (tmp_path / "b").glob("checkpoint-*")
        for step in range(10):
            table.apply_gradients(T([1]), torch.ones(1, 2), step)
        third = group("c")  # the leader's checkpoint is far behind by now
        in_sync(leader, follower, third)
        (second,) = (tmp_path / "c").glob("checkpoint-*")
    assert second.name > first.name
    assert third.rows(T([1])).tolist() == follower.rows(T([1])).tolist() == [[-20, -20]]


def test_a_hand_over_is_not_noticed_by_a_worker(group):
    leader = group("a")
    eventually(lambda: leader.leads)
    follower = group("b")
    in_sync(leader, follower)
    done, n = threading.Event(), 0
    with PsClient([f"{leader.address}|{follower.address}"], deadline=LONG) as client:
        table = table_of(client)

        def work():
            nonlocal n
            while not done.is_set():
                table.apply_gradients(T([1]), torch.ones(1, 2), n)
                n += 1

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        eventually(lambda: n > 5)
        context = client.zmq.Context()
        peer = Peer(context, leader.address)
        assert bytes(peer.ask(Op.HANDOVER, {}, WITHIN_S).payload[0]).decode() == follower.replication.name
        peer.close()
        context.term()
        eventually(lambda: follower.leads)
        before = n
        eventually(lambda: n > before + 5)
        done.set()
        worker.join(WITHIN_S)
        assert table.lookup(T([1])).tolist() == [[-n, -n]]
    in_sync(follower, leader)
    assert leader.rows(T([1])).tolist() == [[-n, -n]]
    with pytest.raises(PeerError, match="cannot hand over"):
        leader.replication.hand_over()


def test_writes_wait_for_a_follower_that_is_in_sync_and_not_for_one_that_has_gone(group):
    leader = group("a")
    eventually(lambda: leader.leads)
    follower = group("b")
    in_sync(leader, follower)
    with PsClient([leader.address], deadline=LONG) as client:
        table = table_of(client)
        table.apply_gradients(T([1]), torch.ones(1, 2), 0)
        assert leader.replication.feed.followers[follower.replication.name].after >= 2
        follower.stop()
        leader.replication._follower_timeout_s = SHORT.total_seconds()
        table.apply_gradients(T([1]), torch.ones(1, 2), 1)
        assert leader.server.info()["group"]["in_sync"] == [leader.replication.name]


def test_a_follower_answers_reads_with_rows_of_a_stated_age(group):
    leader = group("a", ack="local")
    eventually(lambda: leader.leads)
    follower = group("b", ack="local", stale_reads=timedelta(seconds=WITHIN_S))
    in_sync(leader, follower)
    with PsClient([leader.address], deadline=LONG) as client:
        table_of(client).apply_gradients(T([1]), torch.ones(1, 2), 0)
    eventually(lambda: "t" in follower.server.info()["tables"])
    with PsClient([follower.address], deadline=LONG) as client:
        table = table_of(client)
        eventually(lambda: table.lookup(T([1])).tolist() == [[-1, -1]])
        assert client.info()[0]["group"]["lag_s"] <= WITHIN_S
        refused(client, lambda: table.apply_gradients(T([1]), torch.ones(1, 2), 1), "is a follower")
        refused(client, lambda: ps_table(client, 2, name="another"), "is a follower")


def test_a_follower_takes_checkpoints_of_its_own(group, tmp_path):
    leader = group("a")
    eventually(lambda: leader.leads)
    follower = group("b")
    in_sync(leader, follower)
    with PsClient([leader.address], deadline=LONG) as client:
        table_of(client).apply_gradients(T([1]), torch.ones(1, 2), 0)
    with PsClient([follower.address], deadline=LONG) as client:
        (path,) = client.checkpoint()
        told(lambda deadline: client.checkpoint(deadline, keep_as="run-1"), "is a follower")
    assert Path(path).parent == tmp_path / "b"
    follower.stop()
    (tmp_path / "alone").mkdir()
    shutil.copytree(path, tmp_path / "alone" / Path(path).name)
    engine = Engine(Shard(0, 1), "checkpoint", tmp_path / "alone")
    engine.recover()
    assert engine.shard.tables["t"].lookup(T([1])).tolist() == [[-1, -1]]
    engine.close()


def test_a_follower_without_a_registry_copies_and_never_leads(tmp_path):
    leader = Server(tmp_path / "a", lambda: LoneBoard(server_name(tmp_path / "a"), 0))
    follower = None
    try:
        eventually(lambda: leader.leads)
        follower = Server(tmp_path / "b", lambda: FollowingBoard(leader.address))
        in_sync(leader, follower)
        with PsClient([leader.address], deadline=LONG) as client:
            table_of(client).apply_gradients(T([1]), torch.ones(1, 2), 0)
        leader.stop()
        assert follower.rows(T([1])).tolist() == [[-1, -1]]
        assert not follower.leads
    finally:
        if follower is not None:
            follower.stop()


def test_a_group_needs_a_log(tmp_path):
    replication = Replication(LoneBoard("a", 0), name="a")
    with pytest.raises(ConfigError, match="durability 'log'"):
        ParameterServer(Engine(Shard(0, 1), "none", tmp_path / "a"), replication=replication).start()


# --- processes --------------------------------------------------------------------------------------------------------


def spawn(tmp_path, name, port=0):
    command = [
        sys.executable, "-m", "shoal", "ps", "--durability", "log", "--dir", str(tmp_path / name), "--json", "--ack",
        "follower", "--registry", f"dir:{tmp_path / 'registry'}", "--session-timeout", "2s", "--port", str(port),
    ]  # fmt: skip
    with open(tmp_path / f"{name}.log", "a") as told:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, text=True)
    timer = threading.Timer(LONG.total_seconds(), process.kill)
    timer.start()
    place = json.loads(process.stdout.readline())
    timer.cancel()
    process.stdout.close()
    return process, place["address"]


@pytest.mark.timeout(900)
def test_killed_leaders_lose_nothing_even_with_their_disks(tmp_path):
    (tmp_path / "registry").mkdir()
    servers = {name: spawn(tmp_path, name) for name in ("a", "b")}
    ports = {name: int(address.rpartition(":")[2]) for name, (_, address) in servers.items()}
    try:
        both = "|".join(address for _, address in servers.values())
        with PsClient([both], deadline=LONG) as client:
            table = table_of(client)
            n = 0
            for _ in range(2):
                for _ in range(10):
                    table.apply_gradients(T([1, n + 100]), torch.ones(2, 2), n)
                    n += 1
                eventually(lambda: len(client.info()[0]["group"]["in_sync"]) == 2)
                told = client.info()[0]["group"]["name"]
                leader = next(name for name in servers if server_name(tmp_path / name / "shard-00000") == told)
                os.kill(servers[leader][0].pid, signal.SIGKILL)
                servers[leader][0].wait(WITHIN_S)
                shutil.rmtree(tmp_path / leader)
                table.apply_gradients(T([1]), torch.ones(1, 2), n)
                n += 1
                servers[leader] = spawn(tmp_path, leader, ports[leader])
            assert table.lookup(T([1])).tolist() == [[-n, -n]]
            assert (table.lookup(torch.arange(100, 110)) == -1).all()
        servers["a"][0].send_signal(signal.SIGTERM)
        assert servers["a"][0].wait(WITHIN_S) == 0
    finally:
        for process, _ in servers.values():
            process.kill()
            process.wait(WITHIN_S)
