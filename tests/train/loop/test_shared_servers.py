"""Several trainers on the same parameter servers, killed and given other partitions: each record is learnt once.

Every row counts the records with its id (`tests.train.loop.counting`), which shows a record that is lost or learnt
twice on one of the servers.
"""

import collections
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.data.live import open_writer, parse_address
from shoal.data.live.by_partition import ByPartition
from shoal.data.live.numbering import Start, numbering_of, start_of, where_to_begin
from shoal.data.live.protocol import Chunk
from shoal.data.schema import text_fid
from shoal.errors import DataError
from shoal.fid import shard_of
from shoal.sharded import PsClient
from shoal.sharded.placement.local import LocalServers
from shoal.testing.commands import Command
from tests.brokers import mock_kafka, redis_server  # noqa: F401

pytest.importorskip("zmq")

DEADLINE_S = 180
BATCH = 32
UNIT = 0.5 / BATCH  # what one sample subtracts from a row
RECORDS = 2000


# --- plain values -----------------------------------------------------------------------------------------------------


def test_where_a_trainer_begins():
    assert start_of(100, [140, 120], {120, 140}) is None
    assert start_of(100, [100, 0], ()) is None
    assert start_of(None, [100, 0], ()) == Start(100)
    assert start_of(100, [150, 140, 150], {140}) == Start(140, (150,))


def test_positions_are_numbers():
    redis = numbering_of(parse_address("redis://h/clicks"))
    for entry in ("0-0", "5-0", "1790000000000-7"):
        assert redis.position(redis.number(entry)) == entry
    assert redis.number("5-1") < redis.number("6-0")
    assert redis.name("clicks") == "redis://h:6379/clicks#clicks"
    with pytest.raises(DataError, match="sequence number"):
        redis.number("1-99999999")
    assert numbering_of(parse_address("dir:x")) is None


class Known:
    """Servers that have learnt something."""

    def __init__(self, **numbers):
        self.numbers = numbers

    def learnt(self, partitions):
        return {name: self.numbers[name.rpartition("#")[2]] for name in partitions}


def test_a_journal_of_a_partition_that_is_somebody_elses_now_is_not_replayed():
    numbering = numbering_of(parse_address("kafka://h/t"))
    kept = {"t": {"0": 64, "1": 64}}
    journal = [(1, [("t", "0", 32, 96)]), (2, [("t", "1", 32, 96)])]

    def begin(here, servers):
        return where_to_begin(here, kept, {"t": numbering}, journal, servers)

    both = begin({"t": {"0": 64, "1": 64}}, Known(**{"0": [96, 64], "1": [96, 96]}))
    assert both == ({("t", "0"): None, ("t", "1"): None}, True)
    left = begin({"t": {"0": 64}}, Known(**{"0": [96, 64]}))
    assert left == ({("t", "0"): Start(64, (96,))}, False)
    more = begin({"t": {"0": 64, "1": 64, "2": 0}}, Known(**{"0": [96, 64], "1": [96, 96], "2": [40, 40]}))
    assert more == ({("t", "0"): Start(64, (96,)), ("t", "1"): Start(96), ("t", "2"): Start(40)}, False)


def test_batches_are_of_one_partition_and_end_at_cuts():
    queues = ByPartition(4, 1.0)
    queues.follow("s", "0", int, [3])
    queues.follow("s", "1", int)
    queues.add("s", Chunk("0", [b""] * 5, [1, 2, 3, 4, 5]), 0.0)
    queues.add("s", Chunk("1", [b""] * 3, [1, 2, 3]), 0.1)
    assert queues.room == 0
    assert [chunk.positions for chunk in queues.take(0.2, False)[1]] == [[1, 2, 3]]
    assert queues.take(0.2, False) is None
    queues.add("s", Chunk("0", [b""] * 2, [6, 7]), 0.3)
    assert [chunk.positions for chunk in queues.take(0.3, False)[1]] == [[4, 5], [6, 7]]
    assert queues.wait_s(1.0) == pytest.approx(0.1)
    assert [chunk.positions for chunk in queues.take(1.2, False)[1]] == [[1, 2, 3]]
    assert len(queues) == 0


# --- processes --------------------------------------------------------------------------------------------------------


def records(partition, count):
    """Records of a partition; some users are in all of them."""
    return [json.dumps({"click": 0, "user": f"u{(i * 7 + partition) % 97}", "n": i}).encode() for i in range(count)]


def expected(partitions, count):
    return collections.Counter(
        json.loads(record)["user"] for partition in range(partitions) for record in records(partition, count)
    )


def commands():
    """The command lines of all rank processes of this machine."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = place.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if " shoal train " in text:
                yield text


class Trainer:
    """`shoal train` on some sources.

    Its pipe is the smallest there is, so that however late we are, it is at most a few steps ahead of us.
    """

    def __init__(self, out, sources, servers, *more, launch=0):
        settings = {
            "data.format": "json", "data.label": "click", "data.sparse": ["user"],
            "data.max_wait_s": 0.2, "data.prefetch": 0, "table.dim": 1, "table.optimizer": "sgd", "table.lr": 1.0,
            "table.initializer": "zeros", "model.name": "tests.train.loop.counting:Counting", "train.batch_size": BATCH,
            "train.threads": 1, "train.ps": list(servers), "train.ps_restore": False, "out.every_s": 0.5,
            "out.log_steps": 1,
        }  # fmt: skip
        flags = [text for name, value in settings.items() for text in ("--set", f"{name}={json.dumps(value)}")]
        self.arguments = ["train", "--train", *sources, "--out", str(out), "--json", *flags, *more]
        self.launch = launch
        self.process = None

    def start(self):
        if self.launch:
            env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
            shell = [sys.executable, "-m", "shoal", "launch", "-n", str(self.launch), "-m", "shoal", *self.arguments]
            self.process = subprocess.Popen(shell, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)
        else:
            self.process = Command(*self.arguments, stdout=subprocess.PIPE)
        fcntl.fcntl(self.process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        return self

    def until(self, steps):
        """Reads what it says until it has learnt so many steps."""
        seen = 0
        with open(self.process.stdout.fileno(), "rb", buffering=0, closefd=False) as lines:
            while line := lines.readline():
                seen += b'"event": "progress"' in line  # lines are labelled with the rank
                if seen >= steps:
                    return
        raise AssertionError("it ended")

    def kill(self):
        if self.launch:
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        self.process.stdout.close()

    def finish(self):
        """Lets it learn all there is."""
        self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0


IDLE = ("--set", "data.idle_s=1.0")


@pytest.fixture
def servers(tmp_path, forked_servers):
    options = ["--threads", "1", "--durability", "log", "--dir", str(tmp_path / "ps")]
    with LocalServers(2, options, env={"OMP_NUM_THREADS": "1"}) as started:
        yield started


def counts(servers):
    """How often each shard has learnt each user."""
    with PsClient(servers.addresses) as client:
        found = {
            int(key): -float(row[0]) / UNIT
            for ids, rows in client.scan("features")
            for key, row in zip(ids, rows, strict=True)
        }
    users = [f"u{i}" for i in range(97)]
    assert {int(shard_of(key, 2)) for key in found} == {0, 1}
    return {user: round(found.get(text_fid(user, 1), 0.0), 3) for user in users}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["redis", "kafka"])
def test_partitions_move_between_trainers_that_are_killed(kind, request, servers, tmp_path):
    broker = request.getfixturevalue("redis_server" if kind == "redis" else "mock_kafka")
    count = RECORDS if kind == "redis" else 1500  # the mock broker keeps few records

    def source(*partitions):
        if kind == "redis":
            return [broker.address(f"part-{partition}") for partition in partitions]
        return [broker.address("moves") + f"?partitions={','.join(map(str, partitions))}"]

    def fill(first, last):
        for partition in range(4):
            address = broker.address(f"part-{partition}") if kind == "redis" else broker.address("moves")
            writer = open_writer(address)
            writer.append(records(partition, count)[first:last], partition=None if kind == "redis" else str(partition))
            writer.close()

    fill(0, count // 2)
    a = Trainer(tmp_path / "a", source(0, 1), servers.addresses).start()
    b = Trainer(tmp_path / "b", source(2, 3), servers.addresses).start()
    a.until(8), b.until(5)
    a.kill()  # b takes over one of its partitions
    b.until(6)
    b.kill()
    c = Trainer(tmp_path / "c", source(0), servers.addresses).start()
    b = Trainer(tmp_path / "b", source(1, 2, 3), servers.addresses).start()
    c.until(4), b.until(4)
    servers.kill(1)
    c.until(2)
    c.kill(), b.kill()
    fill(count // 2, count)
    a = Trainer(tmp_path / "a", source(1, 0), servers.addresses, *IDLE).start()  # with an old checkpoint
    b = Trainer(tmp_path / "b", source(2, 3), servers.addresses, *IDLE).start()
    a.finish(), b.finish()
    assert counts(servers) == expected(4, count)


@pytest.mark.timeout(900)
def test_ranks_of_another_number_take_over_what_others_did_not_finish(redis_server, servers, tmp_path):  # noqa: F811
    address = redis_server.address("group")
    writer = open_writer(address)
    writer.append(records(0, RECORDS))
    writer.close()
    shared = [f"{address}?group=ctr"]
    first = Trainer(tmp_path / "out", shared, servers.addresses, launch=2).start()
    first.until(12)
    first.kill()
    end = time.monotonic() + DEADLINE_S
    while any(str(tmp_path) in command for command in commands()):  # until its ranks have ended
        assert time.monotonic() < end
        time.sleep(0.05)
    Trainer(tmp_path / "out", shared, servers.addresses, *IDLE).start().finish()
    assert counts(servers) == expected(1, RECORDS)
