"""One shard's writes without a network: requests that should not come, answers given twice, disks that fail."""

import errno
import os

import pytest
import torch

from shoal.errors import ConfigError, DataError
from shoal.sharded import Engine, Shard
from shoal.sharded.ps.client.remote import create_request
from shoal.sharded.ps.protocol import Op, Request, Status
from tests.sharded.helpers import config

T = torch.tensor
WORKER = b"one worker......"


def engine(folder, durability="log"):
    made = Engine(Shard(0, 1), durability, folder)
    made.recover()
    return made


class Worker:
    """Numbers its writes as a client does."""

    def __init__(self, engine, stream=WORKER):
        self.engine, self.stream, self.seq = engine, stream, 0

    def __call__(self, op, seq=None, **fields):
        self.seq = self.seq + 1 if seq is None else seq
        request = Request(op, stream=self.stream, seq=self.seq, acked=self.seq - 1, **fields)
        return self.engine.apply([request])[0]

    def create(self, name="t", dim=2, **options):
        [reply] = self.engine.apply([create_request(config(dim), {"name": name, **options})])
        return reply


def rows(engine, ids):
    return engine.shard.tables["t"].lookup(T(ids)).tolist()


NEVER = {
    "nothing to insert": {"op": Op.INSERT},
    "nothing to apply": {"op": Op.APPLY},
    "an insert before time": {"op": Op.INSERT, "names": ("t",), "counts": [1], "ids": T([9]), "req_time": -1},
    "an insert after time": {"op": Op.INSERT, "names": ("t",), "counts": [1], "ids": T([9]), "req_time": 1 << 32},
    "a fresh row before time": {"op": Op.REINITIALIZE, "names": ("t",), "counts": [1], "ids": T([9]), "req_time": -1},
    "a fresh row after time": {
        "op": Op.REINITIALIZE,
        "names": ("t",),
        "counts": [1],
        "ids": T([9]),
        "req_time": 1 << 62,
    },
    "an eviction before time": {"op": Op.EVICT, "names": ("t",), "counts": [0], "req_time": -1},
    "no rate": {
        "op": Op.APPLY,
        "names": ("t",),
        "counts": [1],
        "ids": T([9]),
        "values": T([1.0, 1]),
        "rates": [float("nan")],
    },
    "no gradient": {
        "op": Op.APPLY,
        "names": ("t",),
        "counts": [1],
        "ids": T([9]),
        "values": T([float("inf"), 1]),
        "rates": [1.0],
    },
}


@pytest.mark.parametrize("request_fields", NEVER.values(), ids=NEVER)
def test_what_should_never_have_come_does_not_keep_a_server_from_coming_back(tmp_path, request_fields):
    first = engine(tmp_path)
    worker = Worker(first)
    worker.create()
    worker(Op.ASSIGN, names=("t",), counts=[1], ids=T([1]), values=T([1.0, 2]))
    reply = worker(**request_fields)
    assert reply.status in (Status.OK, Status.BAD_REQUEST), reply.text()
    worker(Op.ASSIGN, names=("t",), counts=[1], ids=T([2]), values=T([3.0, 4]))
    assert rows(first, [1, 2, 9]) == [[1, 2], [3, 4], [0, 0]]
    again = engine(tmp_path)
    assert rows(again, [1, 2, 9]) == [[1, 2], [3, 4], [0, 0]]
    assert again.shard.version == first.shard.version


def test_a_write_without_a_number_is_refused(tmp_path):
    worker = Worker(engine(tmp_path))
    worker.create()
    fields = {"names": ("t",), "counts": [1], "ids": T([1]), "values": T([1.0, 2])}
    assert worker(Op.ASSIGN, seq=0, **fields).status == Status.BAD_REQUEST
    assert worker.engine.apply([Request(Op.ASSIGN, **fields)])[0].status == Status.BAD_REQUEST
    assert rows(worker.engine, [1]) == [[0, 0]]


@pytest.mark.parametrize(
    "options",
    [{"seed": "x"}, {"filter": [1]}, {"extra_restore_names": 5}, {"extra_restore_names": [5]}, {"strange": 1},
     {"saver_parallel": "q"}, {"saver_parallel": 10**9}, {"name": ""}, {"name": "a\nb"}, {"name": "\ud800"}],
    ids=str,
)  # fmt: skip
def test_a_table_is_refused_before_it_can_harm_a_checkpoint(tmp_path, options):
    worker = Worker(engine(tmp_path))
    assert worker.create(**options).status == Status.BAD_REQUEST
    assert not worker.engine.shard.tables
    assert os.path.isdir(worker.engine.checkpoint())


def test_workers_that_chose_no_seed_share_a_table(tmp_path):
    worker = Worker(engine(tmp_path))
    assert worker.create(seed=1, default_seed=True).status == Status.OK
    assert worker.create(seed=2, default_seed=True).status == Status.OK
    assert worker.create(seed=1).status == Status.OK
    assert worker.create(seed=2).status == Status.BAD_REQUEST
    assert worker.create(dim=3, seed=1, default_seed=True).status == Status.BAD_REQUEST
    assert engine(tmp_path).shard.specs == worker.engine.shard.specs


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_repeated_write_is_answered_as_it_was_even_after_a_restart(tmp_path, checkpoint):
    first = engine(tmp_path)
    worker, other = Worker(first), Worker(first, b"another worker..")
    worker.create()
    worker(Op.ASSIGN, names=("t",), counts=[1], ids=T([1]), values=T([1.0, 2]))
    fresh = {"op": Op.REINITIALIZE, "names": ("t",), "counts": [3], "ids": T([1, 2, 1])}
    bad = {
        "op": Op.APPLY,
        "names": ("t",),
        "counts": [1],
        "ids": T([1]),
        "values": T([1.0, float("nan")]),
        "rates": [1.0],
    }
    answers = [worker(**fresh), other(**bad)]
    assert bytes(answers[0].payload[0].numpy()) == T([1, 0, 1], dtype=torch.int32).numpy().tobytes()
    assert answers[1].status == Status.BAD_REQUEST
    if checkpoint:
        first.checkpoint()
    for server in (first, engine(tmp_path)):
        worker.engine = other.engine = server
        repeated = [worker(**fresh, seq=worker.seq), other(**bad, seq=other.seq)]
        for now, then in zip(repeated, answers, strict=True):
            assert now.status == then.status
            assert [bytes(memoryview(f)) for f in now.frames()[1:]] == [bytes(memoryview(f)) for f in then.frames()[1:]]
        assert server.duplicates == 2


def test_a_log_is_not_forgotten_when_its_server_goes_on_without_one(tmp_path):
    worker = Worker(engine(tmp_path))
    worker.create()
    worker(Op.ASSIGN, names=("t",), counts=[1], ids=T([1]), values=T([1.0, 2]))
    worker(Op.APPLY, names=("t",), counts=[1], ids=T([1]), values=T([float("nan"), 2]), rates=[1.0])
    worker(Op.ASSIGN_ADD, names=("t",), counts=[1], ids=T([1]), values=T([1.0, 1]))
    worker.engine = second = engine(tmp_path, "checkpoint")
    assert rows(second, [1]) == [[2, 3]]
    worker(Op.ASSIGN_ADD, names=("t",), counts=[1], ids=T([1]), values=T([1.0, 1]))
    second.checkpoint()
    for durability in ("checkpoint", "log", "log"):
        assert rows(engine(tmp_path, durability), [1]) == [[3, 4]]


def test_a_log_that_cannot_start_a_new_file_goes_on_in_the_old_one(tmp_path, monkeypatch):
    first = engine(tmp_path)
    worker = Worker(first)
    worker.create()
    worker(Op.ASSIGN, names=("t",), counts=[1], ids=T([1]), values=T([1.0, 2]))
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            first.checkpoint()
    worker(Op.ASSIGN, names=("t",), counts=[1], ids=T([2]), values=T([3.0, 4]))
    assert rows(engine(tmp_path), [1, 2]) == [[1, 2], [3, 4]]
    second = engine(tmp_path)
    second.checkpoint()
    second.checkpoint()  # nothing has been written since
    assert rows(engine(tmp_path), [1, 2]) == [[1, 2], [3, 4]]


def test_a_reply_is_bounded(tmp_path):
    worker = Worker(engine(tmp_path))
    worker.create()
    shard = worker.engine.shard
    shard.max_reply_bytes = 80
    ten, eleven = torch.arange(10), torch.arange(11)
    assert shard.read(Request(Op.LOOKUP, names=("t",), counts=[10], ids=ten))[0].numel() == 20
    assert shard.lookup_one(b"t", memoryview(ten.numpy()).cast("B"), 10) is not None
    assert shard.lookup_one(b"t", memoryview(eleven.numpy()).cast("B"), 11) is None
    with pytest.raises(ConfigError, match="smaller requests"):
        shard.read(Request(Op.LOOKUP, names=("t",), counts=[11], ids=eleven))
    assert worker(Op.INSERT, names=("t",), counts=[11], ids=eleven).status == Status.BAD_REQUEST
    assert shard.tables["t"].size() == 0


def test_an_operation_that_is_none_is_an_error():
    with pytest.raises(DataError):
        Shard(0, 1).read(Request(Op.CLEAR))
