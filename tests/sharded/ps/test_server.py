"""The parameter server in this process: malformed requests, exactly once, staleness, limits, keys, metrics, disks."""

import contextlib
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from datetime import timedelta

import pytest
import torch
import zmq

from shoal.errors import ConfigError, DataError, DeadlineError, PeerError
from shoal.sharded import (
    ClientKeys,
    Engine,
    Limits,
    ParameterServer,
    PsClient,
    RemoteHashTable,
    ServerKeys,
    Shard,
    ps_table,
)
from shoal.sharded.ps.protocol import Op, Reply, Request, Status, error_reply, parse_reply, parse_request
from shoal.sharded.ps.security import generate
from shoal.sharded.ps.server.streams import Answer, Streams, Verdict
from tests.sharded.helpers import LONG, adagrad, config, told

T = torch.tensor


def get(server, path):
    with urllib.request.urlopen(f"http://{server.http_address}{path}", timeout=60) as reply:
        return reply.status, reply.read().decode()


# --- messages ---------------------------------------------------------------------------------------------------------


def test_requests_survive_the_wire():
    request = Request(
        Op.APPLY, request=7, stream=bytes(range(16)), seq=9, acked=8, flags=2, global_step=-3, req_time=5,
        read_version=11, deadline_ms=4, counts=(2, 0), rates=(0.5, 0.25), names=("a", "ü"), ids=T([1, 2]),
        values=T([1.0, 2.0]),
    )  # fmt: skip
    assert len(Request(Op.INFO).frames()) == 1
    back = parse_request(*(memoryview(f) for f in request.frames()))
    for name in ("op", "request", "stream", "seq", "acked", "flags", "global_step", "req_time", "read_version",
                 "deadline_ms", "counts", "rates", "names"):  # fmt: skip
        assert getattr(back, name) == getattr(request, name), name
    assert back.ids_tensor().tolist() == [1, 2]
    assert back.values_tensor().tolist() == [1, 2]
    reply = parse_reply(Reply(Status.GAP, 3, 4, [b"text"]).frames())
    assert (reply.status, reply.request, reply.version, reply.text()) == (Status.GAP, 3, 4, "text")


@pytest.mark.parametrize("size", range(0, 96, 5))
def test_a_cut_header_is_refused(size):
    whole = Request(Op.LOOKUP, counts=[1], names=("abc",), ids=T([1])).header()
    with pytest.raises(DataError):
        parse_request(whole[:size], T([1]).numpy())


def test_streams_judge_writes():
    streams = Streams(capacity=2)
    assert streams.judge(b"a", 1, 0) is Verdict.NEW
    streams.remember(b"a", 1, Answer(Status.OK, [b"x"]))
    assert streams.judge(b"a", 1, 0) is Verdict.DONE
    assert streams.answer(b"a", 1).payload == [b"x"]
    assert streams.judge(b"a", 3, 1) is Verdict.GAP
    assert streams.judge(b"a", 3, 2) is Verdict.NEW  # write 2 was refused and answered
    assert streams.judge(b"new", 7, 6) is Verdict.NEW
    streams.remember(b"b", 1, Answer())
    streams.remember(b"c", 1, Answer(Status.OK, [T([1, 0], dtype=torch.int32)]))
    assert streams.forgotten == 1
    other = Streams()
    other.load(*json.loads(json.dumps([streams.dump(), streams.dump_answers()])))
    assert other.judge(b"c", 1, 0) is Verdict.DONE
    assert (other.answer(b"b", 1), other.answer(b"c", 1).payload) == (Answer(), (b"\1\0\0\0\0\0\0\0",))


def test_every_answer_is_kept_until_the_worker_has_it():
    refused, freshened = Answer(Status.BAD_REQUEST, [b"NaN"]), Answer(Status.OK, [b"\1\0\0\0"])
    streams = Streams()
    streams.remember(b"a", 1, refused, acked=0)
    streams.remember(b"a", 2, Answer(Status.OK, []), acked=0)
    streams.remember(b"a", 3, freshened, acked=0)
    streams.remember(b"a", 4, Answer(), acked=0)
    loaded = Streams()
    loaded.load(*json.loads(json.dumps([streams.dump(), streams.dump_answers()])))
    for known in (streams, loaded):
        told_again = [known.answer(b"a", seq) for seq in (1, 2, 3, 4)]
        assert [answer.status for answer in told_again] == [Status.BAD_REQUEST, Status.OK, Status.OK, Status.OK]
        assert [list(answer.payload) for answer in told_again] == [[b"NaN"], [], [b"\1\0\0\0"], []]
        known.remember(b"a", 5, Answer(), acked=3)
        assert known.answer(b"a", 4).status == Status.OK
        assert known.answer(b"a", 1).status == Status.INTERNAL  # the worker has confirmed it
        assert "no longer" in bytes(known.answer(b"a", 1).payload[0]).decode()


def test_answers_that_no_worker_takes_are_bounded_and_never_told_as_ok():
    streams = Streams(max_answer_bytes=100_000)
    for seq in range(1, 1000):
        streams.remember(b"a", seq, Answer(Status.BAD_REQUEST, [b"x" * 1000]), acked=0)
        streams.remember(b"b", seq, Answer(Status.BAD_REQUEST, [b"x" * 1000]), acked=0)
    answers = [streams.answer(stream, seq) for stream in (b"a", b"b") for seq in range(1, 1000)]
    assert 50 < sum(answer.payload == [b"x" * 1000] for answer in answers) <= 100
    assert all(answer.status != Status.OK for answer in answers)
    assert streams.answer(b"b", 999).payload == [b"x" * 1000]


def test_what_version_0_1_kept_of_streams_is_read():
    streams = Streams()
    streams.load({b"a".hex(): 3, b"b".hex(): 1}, {b"a".hex(): [1, ["eA=="]]})
    assert streams.answer(b"a", 3) == Answer(Status.BAD_REQUEST, (b"x",))
    assert (streams.last(b"b"), streams.answer(b"b", 1)) == (1, Answer())


# --- serving ----------------------------------------------------------------------------------------------------------


def test_a_malformed_message_is_an_error_to_its_sender_and_nothing_else(servers):
    [server] = servers(1)
    client = PsClient([server.address], deadline=LONG)
    table = ps_table(client, 2, name="t", optimizer="sgd", initializer="zeros")
    context = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.linger = 0
    raw.connect(server.address)
    good = Request(Op.LOOKUP, request=5, counts=[1], names=("t",), ids=T([1]))
    header = good.header()
    broken = [
        [b""],
        [b"hello"],
        [header],
        [header, b"123"],
        [header, b"12345678", b"", b"more"],
        [b"XXXX" + header[4:], b"12345678"],
        [header[:4] + b"\x09\x00" + header[6:], b"12345678"],
        [header[:6] + b"\xff\xff" + header[8:], b"12345678"],
        [os.urandom(200), os.urandom(8)],
        Request(
            Op.APPLY, request=5, counts=[1], names=("t",), ids=T([1]), values=T([1.0]), seq=1, stream=b"s" * 16
        ).frames(),
        Request(Op.APPLY, request=5, counts=[1], names=("t",), ids=T([1]), values=T([1.0, 2.0])).frames(),
        Request(Op.CREATE, request=5, ids=b"\xff\xff", values=b"{").frames(),
        Request(Op.LOOKUP, request=5, counts=[2**62], names=("t",), ids=T([1])).frames(),
    ]
    for frames in broken:
        raw.send_multipart(frames)
        assert raw.poll(60000), frames
        reply = parse_reply(raw.recv_multipart())
        assert reply.status in (Status.BAD_REQUEST, Status.INTERNAL), frames
        assert reply.text()
    raw.send_multipart(Request(Op.LOOKUP, request=6, counts=[1], names=("nobody",), ids=T([1])).frames())
    assert parse_reply(raw.recv_multipart()).status == Status.UNKNOWN_TABLE
    table.assign(T([1]), T([[3.0, 4]]))
    assert table.lookup(T([1])).tolist() == [[3, 4]]
    raw.close()
    context.term()
    client.close()
    assert "shoal_ps_bad_messages_total" in get(server, "/metrics")[1]


def test_a_write_that_is_sent_again_is_applied_once(servers):
    [server] = servers(1)
    client = PsClient([server.address], deadline=LONG)
    table = ps_table(client, 1, name="t", optimizer="sgd", lr=1.0, initializer="zeros")
    context = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.linger = 0
    raw.connect(server.address)

    def send(seq, acked):
        request = Request(
            Op.APPLY, request=seq, stream=b"w" * 16, seq=seq, acked=acked, counts=[1], names=("t",), ids=T([1]),
            values=T([1.0]), rates=[1.0],
        )  # fmt: skip
        raw.send_multipart(request.frames())
        return parse_reply(raw.recv_multipart()).status

    assert [send(1, 0), send(1, 0), send(2, 1), send(2, 1), send(1, 0)] == [Status.OK] * 5
    assert table.lookup(T([1])).item() == -2
    assert send(5, 2) == Status.GAP
    assert table.lookup(T([1])).item() == -2
    assert send(5, 4) == Status.OK
    assert table.lookup(T([1])).item() == -3
    raw.close()
    context.term()
    client.close()


def test_a_refused_write_is_told_as_refused_when_the_connection_is_cut_after_a_later_one(servers, tmp_path):
    """The worker sends three writes ahead, the first is refused, and no answer reaches the worker."""
    [server] = servers(1, "log", tmp_path)
    with PsClient([server.address], deadline=LONG, max_staleness=5) as client, zmq.Context() as context:
        table = ps_table(client, 1, name="t", optimizer="sgd", lr=1.0, initializer="zeros")

        def send(raw, seq, value):
            request = Request(
                Op.APPLY, request=seq, stream=b"w" * 16, seq=seq, acked=0, counts=[1], names=("t",), ids=T([1]),
                values=T([value]), rates=[1.0],
            )  # fmt: skip
            raw.send_multipart(request.frames())

        def all_three():
            with context.socket(zmq.DEALER) as raw:
                raw.linger, raw.rcvtimeo = 0, 60_000
                raw.connect(server.address)
                for seq, value in ((1, float("nan")), (2, 1.0), (3, 1.0)):
                    send(raw, seq, value)
                return [parse_reply(raw.recv_multipart()) for _ in range(3)]

        first, again = all_three(), all_three()
        server.checkpoint()
        assert [reply.status for reply in first] == [Status.BAD_REQUEST, Status.OK, Status.OK]
        assert [(reply.status, reply.text()) for reply in again] == [(reply.status, reply.text()) for reply in first]
        assert table.lookup(T([1])).item() == -2
        server.stop()
    recovered = Engine(Shard(0, 1), "log", tmp_path / "shard-0")
    recovered.recover()
    assert recovered.streams.answer(b"w" * 16, 1).status == Status.BAD_REQUEST
    assert recovered.streams.answer(b"w" * 16, 2).status == Status.OK


def test_bad_values_are_refused_whole(ps):
    client = ps(2)
    table = ps_table(client, 2, name="t", optimizer="sgd", initializer="zeros")
    with pytest.raises(ValueError, match="NaN"):
        table.apply_gradients(T([1, 2, 3]), T([[1.0, 1], [float("nan"), 0], [1, 1]]))
    with pytest.raises(ValueError, match="must be"):
        table.assign(T([1]), torch.zeros(3))
    with pytest.raises(ValueError, match="dim is 2, not 3"):
        ps_table(client, 3, name="t")
    table.apply_gradients(T([1]), T([[1.0, 1]]))  # the stream goes on after a refusal
    assert table.lookup(T([1])).abs().sum() > 0


def test_limits_bound_a_request(servers):
    [server] = servers(1, limits=Limits(max_ids=10))
    with PsClient([server.address], deadline=LONG) as client:
        table = ps_table(client, 1, name="t")
        assert table.lookup(torch.arange(10)).shape == (10, 1)
        with pytest.raises(ValueError, match="10 ids"):
            table.lookup(torch.arange(11))


def test_several_workers_at_once(servers):
    started = servers(2)
    errors = []

    def work(number):
        try:
            with PsClient([s.address for s in started], deadline=LONG, max_staleness=number % 3) as client:
                table = ps_table(client, 4, name="t", optimizer="sgd", lr=1.0, initializer="zeros")
                for step in range(20):
                    ids = torch.arange(64)
                    table.lookup(ids)
                    table.apply_gradients(ids, torch.full((64, 4), 1.0), step)
                table.as_op()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG.total_seconds())
    assert errors == []
    with PsClient([s.address for s in started]) as client:
        table = ps_table(client, 4, name="t", optimizer="sgd", lr=1.0, initializer="zeros")
        assert table.lookup(torch.arange(64)).tolist() == [[-80.0] * 4] * 64
    text = get(started[0], "/metrics")[1]
    assert 'shoal_ps_requests_total{op="APPLY",status="OK"} 80' in text
    assert "shoal_ps_staleness_updates_count" in text


def test_staleness_is_bounded_and_measured(ps):
    client = ps(1, max_staleness=3)
    table = ps_table(client, 8, name="t", optimizer="sgd", initializer="zeros", lr=1.0)
    for step in range(10):
        ids = torch.arange(5000)
        table.lookup(ids)
        table.apply_gradients(ids, torch.ones(5000, 8), step)
        assert client.unanswered <= 3
    table.as_op()
    assert client.unanswered == 0
    assert table.lookup(T([4])).tolist() == [[-10.0] * 8]
    assert client.staleness.count >= 10


def test_an_error_of_a_write_under_way_comes_later(ps):
    client = ps(1, max_staleness=2)
    table = ps_table(client, 1, name="t")
    table.apply_gradients(T([1]), T([[float("inf")]]))
    with pytest.raises(ValueError, match="infinity"):
        table.as_op()
    table.apply_gradients(T([1]), T([[1.0]]))
    table.as_op()


def test_health_and_drain(servers):
    [server] = servers(1)
    code, text = get(server, "/healthz")
    assert (code, json.loads(text)["state"]) == (200, "serving")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(server, "/else")
    server._draining.set()
    with pytest.raises(urllib.error.HTTPError, match="503"):
        get(server, "/healthz")
    with PsClient([server.address]) as client:
        told(client.info, r"parameter server 0 of 1 .* shutting down")


def test_idle_connections_take_few_threads(servers):
    [server] = servers(1)
    host, port = server.http_address.rsplit(":", 1)
    before = threading.active_count()
    with contextlib.ExitStack() as idle:
        for _ in range(60):
            idle.enter_context(socket.create_connection((host, int(port)), timeout=60))
        for _ in range(3):
            assert get(server, "/healthz")[0] == 200  # idle connections do not occupy all threads
        assert threading.active_count() - before <= 16
    assert get(server, "/healthz")[0] == 200


def test_addresses_must_be_in_the_order_of_shards(servers):
    first, second = servers(2)
    with (
        PsClient([second.address, first.address], deadline=LONG) as client,
        pytest.raises(ValueError, match="is shard 1 of 2"),
    ):
        client.verify()


def test_a_server_that_is_not_there_is_named():
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))  # but not listening
        address = f"tcp://127.0.0.1:{port.getsockname()[1]}"
        begin = time.monotonic()
        with (
            PsClient([address], deadline=timedelta(seconds=0.5)) as client,
            pytest.raises(DeadlineError, match=f"parameter server 0 of 1 \\({address}\\) did not answer"),
        ):
            client.info()
        assert time.monotonic() - begin < 60


def test_beyond_this_machine_keys_are_needed():
    with pytest.raises(ValueError, match="without keys"):
        ParameterServer(Engine(Shard(0, 1)), host="0.0.0.0")
    ParameterServer(Engine(Shard(0, 1)), host="0.0.0.0", insecure=True)


@pytest.mark.parametrize("name", ["", "../worker", "folder/worker"])
def test_keys_are_written_to_their_folder_only(tmp_path, name):
    with pytest.raises(ConfigError, match="the name of a key must be a file name without a folder"):
        generate(tmp_path / "keys", name)
    assert not any(tmp_path.iterdir())


def test_keys_let_in_whom_they_name(tmp_path):
    public, secret = generate(tmp_path, "server")
    _, alice = generate(tmp_path / "clients", "alice")
    _, mallory = generate(tmp_path / "others", "mallory")
    assert os.stat(secret).st_mode & 0o77 == 0
    keys = ServerKeys(secret=secret, clients=tmp_path / "clients")
    with ParameterServer(Engine(Shard(0, 1)), keys=keys, host="0.0.0.0") as server:
        address = server.address.replace("0.0.0.0", "127.0.0.1")
        with PsClient([address], keys=ClientKeys(secret=alice, server=public), deadline=LONG) as client:
            assert client.info()[0]["shard"] == 0
        for keys in (ClientKeys(secret=mallory, server=public), None):
            with (
                PsClient([address], keys=keys, deadline=timedelta(seconds=1)) as client,
                pytest.raises((PeerError, DeadlineError)),
            ):
                client.info()
    with pytest.raises(ValueError, match="exists"):
        generate(tmp_path, "server")


# --- disks ------------------------------------------------------------------------------------------------------------


def engine(folder, durability="log"):
    result = Engine(Shard(0, 1), durability, folder)
    result.recover()
    return result


def write(target, seq, op=Op.APPLY, stream=b"w" * 16, **fields):
    fields.setdefault("rates", [0.1] if op == Op.APPLY else ())
    request = Request(op, stream=stream, seq=seq, acked=seq - 1, names=("t",), **fields)
    return target.apply([request])[0]


def make(target, table_config):
    options = json.dumps({"name": "t", "seed": 4}).encode()
    assert (
        target.apply([Request(Op.CREATE, ids=table_config.table_config.SerializeToString(), values=options)])[0].status
        == 0
    )


def entries(target):
    ids = torch.arange(-5, 60)
    table = target.shard.tables["t"]
    return table.lookup_entry(ids), table.max_update_time, table.size()


def test_log_and_checkpoint_bring_back_every_bit(tmp_path):
    from shoal.table import AdamOptimizer, RandomUniformInitializer, StochasticRoundingFloat16OptimizerWrapper

    torch.manual_seed(5)
    rounded = StochasticRoundingFloat16OptimizerWrapper(AdamOptimizer())
    table_config = config(3, optimizer=rounded, initializer=RandomUniformInitializer())
    judge, subject = engine(None, "none"), engine(tmp_path)
    for target in (judge, subject):
        make(target, table_config)
    for seq in range(1, 40):
        ids = torch.randint(-5, 60, (20,))
        values = torch.randn(20, 3)
        op = [Op.APPLY, Op.APPLY, Op.ASSIGN_ADD, Op.INSERT, Op.REINITIALIZE, Op.ERASE][seq % 6]
        ids = ids[:3] if op == Op.ERASE else ids
        fields = {"values": values} if op in (Op.APPLY, Op.ASSIGN_ADD) else {}
        for target in (judge, subject):
            assert (
                write(target, seq, op, counts=[ids.numel()], ids=ids, req_time=seq, global_step=seq, **fields).status
                == 0
            )
        if seq in (13, 26):
            subject.checkpoint()
        if seq % 5 == 0:
            subject.log.sync()  # as after a kill: nothing is closed
            subject = engine(tmp_path)
            assert entries(subject) == entries(judge)
    assert write(subject, 39, counts=[1], ids=T([1]), values=T([1.0, 1, 1])).status == Status.OK  # known: not repeated
    assert entries(subject) == entries(judge)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2


def test_what_a_filter_counted_comes_back(tmp_path):
    from shoal.table import SlotOccurrenceThresholdConfig

    thresholds = SlotOccurrenceThresholdConfig(default_occurrence_threshold=2).SerializeToString().hex()
    judge, subject = engine(None, "none"), engine(tmp_path)
    options = {"name": "t", "filter": {"type": "sliding_hash_filter", "capacity": 1000, "config": thresholds}}
    message = adagrad(1).table_config.SerializeToString()
    sizes = []
    for target in (judge, subject):
        assert target.apply([Request(Op.CREATE, ids=message, values=json.dumps(options).encode())])[0].status == 0
    for seq in range(1, 6):
        for target in (judge, subject):
            write(target, seq, counts=[2], ids=T([7, 10 + seq]), values=T([1.0, 1.0]))
        if seq == 2:
            subject.checkpoint()
        subject.log.sync()
        subject = engine(tmp_path)
        sizes.append(subject.shard.tables["t"].size())
        assert entries(subject) == entries(judge)
    assert sizes == [0, 0, 1, 1, 1]


def test_checkpoints_alone_bring_back_the_last_one(tmp_path):
    subject = engine(tmp_path, "checkpoint")
    make(subject, adagrad(1))
    write(subject, 1, counts=[1], ids=T([1]), values=T([1.0]))
    subject.checkpoint()
    saved = entries(subject)
    write(subject, 2, counts=[1], ids=T([1]), values=T([1.0]))
    again = engine(tmp_path, "checkpoint")
    assert entries(again) == saved
    assert again.apply([Request(Op.APPLY, stream=b"w" * 16, seq=1, names=("t",), counts=[1], ids=T([1]),
                                values=T([1.0]), rates=[0.1])])[0].status == Status.OK  # fmt: skip
    assert entries(again) == saved


def test_a_checkpoint_of_another_shard_is_refused(tmp_path):
    subject = engine(tmp_path)
    make(subject, adagrad(1))
    subject.checkpoint()
    with pytest.raises(ValueError, match="shard 0 of 1"):
        Engine(Shard(1, 2), "log", tmp_path).recover()


def test_a_half_written_checkpoint_is_never_picked_up(tmp_path):
    subject = engine(tmp_path)
    make(subject, adagrad(1))
    write(subject, 1, counts=[1], ids=T([1]), values=T([1.0]))
    saved = entries(subject)
    (tmp_path / "draft-0000000000000099-1").mkdir()
    (tmp_path / "checkpoint-0000000000000098").mkdir()
    assert entries(engine(tmp_path)) == saved
    assert not list(tmp_path.glob("draft-*"))


def test_a_full_disk_makes_writers_wait_and_nothing_is_lost(servers, tmp_path, monkeypatch):
    [server] = servers(1, "log", tmp_path)
    with PsClient([server.address], deadline=LONG) as client:
        table = ps_table(client, 1, name="t", optimizer="sgd", lr=1.0, initializer="zeros")
        real, full, refused = os.pwritev, threading.Event(), []
        full.set()

        def pwritev(fd, parts, offset):
            if full.is_set():
                refused.append(offset)
                raise OSError(28, "No space left on device")
            return real(fd, parts, offset)

        monkeypatch.setattr(os, "pwritev", pwritev)
        begin = time.monotonic()
        threading.Timer(0.6, full.clear).start()
        table.apply_gradients(T([1]), T([[1.0]]))
        assert time.monotonic() - begin > 0.4
        assert table.lookup(T([1])).item() == -1
        full.set()

        def apply_within(deadline):
            client.deadline = deadline
            table.apply_gradients(T([1]), T([[1.0]]))

        told(apply_within, "No space left")
        before, end = len(refused), time.monotonic() + 60
        waiting = threading.Thread(target=apply_within, args=[LONG])
        waiting.start()
        while len(refused) < before + 2:  # the abandoned write may be under way once more, the next one comes after it
            assert time.monotonic() < end
            time.sleep(0.005)
        full.clear()
        waiting.join(60)
        assert table.lookup(T([1])).item() == -2  # abandoned writes were never applied


def test_a_failed_sync_ends_the_server_without_an_answer(servers, tmp_path, monkeypatch):
    [server] = servers(1, "log", tmp_path)
    client = PsClient([server.address], deadline=LONG)
    table = RemoteHashTable(client, 0, "t", adagrad(1))

    def broken(fd):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    ended = []

    def work():
        try:
            ended.append(table.assign(T([1]), T([[1.0]])))
        except PeerError as error:
            ended.append(str(error))

    worker = threading.Thread(target=work)
    worker.start()
    assert server.wait(60)
    assert "Input/output error" in server.fatal
    monkeypatch.undo()
    server.stop()
    assert ended == []  # the worker waits for the server to return
    client.close()
    worker.join(60)
    assert ended == ["this parameter-server client is closed"]


def test_nobody_waits_for_a_checkpoint_of_a_server_that_has_stopped(tmp_path):
    server = ParameterServer(Engine(Shard(0, 1), "log", tmp_path)).start()
    server.stop()
    with pytest.raises(PeerError, match="has stopped"):
        server.checkpoint()


def test_a_refusal_is_told_also_where_the_next_answer_never_comes():
    raised = []
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger, router.rcvtimeo = 0, 60_000
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with PsClient([f"127.0.0.1:{port}"]) as client:
            call = client._writers[0].send(Request(Op.INFO), 3600)

            def wait():
                try:
                    call.result()
                except DeadlineError as error:
                    raised.append(str(error))

            waiting = threading.Thread(target=wait)
            waiting.start()
            who, header = router.recv_multipart()
            refusal = error_reply(parse_request(header).request, Status.UNAVAILABLE, "come back later")
            router.send_multipart([who, *refusal.frames()])
            assert router.recv_multipart()[0] == who  # it was sent again
            call.until = time.monotonic()
            waiting.join(60)
    assert "it last said: come back later" in raised[0]


def test_checkpoints_are_taken_while_others_write(servers, tmp_path):
    [server] = servers(1, "log", tmp_path, checkpoint_every=timedelta(seconds=0.1))
    with PsClient([server.address], deadline=LONG, max_staleness=2) as client:
        table = ps_table(client, 4, name="t", optimizer="sgd", lr=1.0, initializer="zeros")
        end = time.monotonic() + 1.5
        steps = 0
        while time.monotonic() < end or steps < 5:
            table.apply_gradients(torch.arange(100), torch.ones(100, 4), steps)
            steps += 1
        table.as_op()
        assert client.checkpoint()[0].startswith(str(tmp_path))
    server.stop()
    again = Engine(Shard(0, 1), "log", tmp_path / "shard-0")
    again.recover()
    assert again.shard.tables["t"].lookup(T([7])).tolist() == [[-float(steps)] * 4]
    assert len(list((tmp_path / "shard-0").glob("checkpoint-*"))) <= 2


def test_eviction_goes_through_the_log(servers, tmp_path):
    [server] = servers(1, "log", tmp_path, evict_every=timedelta(seconds=0.1))
    with PsClient([server.address], deadline=LONG) as client:
        table = ps_table(client, 1, name="t", expire_after="1d")
        table.assign(T([1, 2]), T([[1.0], [2.0]]), req_time=10)
        table.assign(T([3]), T([[3.0]]), req_time=10 + 86400)
        end = time.monotonic() + 60
        while table.size() > 1 and time.monotonic() < end:
            time.sleep(0.05)
        assert table.contains(T([1, 2, 3])).tolist() == [False, False, True]
    server.stop()
    again = Engine(Shard(0, 1), "log", tmp_path / "shard-0")
    again.recover()
    assert again.shard.tables["t"].size() == 1


# --- servers that must not start --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 70000}, "port must be 0"),
        ({"port": -3}, "port must be 0"),
        ({"http_port": 1 << 20}, "http_port must be 0"),
        ({"read_threads": 0}, "at least 1 thread"),
    ],
    ids=str,
)
def test_options_that_would_serve_nobody_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ParameterServer(Engine(Shard(0, 1)), **options)


def test_limits_of_nothing_are_refused():
    with pytest.raises(ValueError, match="max_ids must be at least 1, got 0"):
        Limits(max_ids=0)


def test_a_folder_without_clients_would_keep_everyone_out(tmp_path):
    _, secret = generate(tmp_path, "server")
    for folder in (tmp_path / "nowhere", tmp_path / "empty"):
        with pytest.raises(ValueError, match="has no public key"):
            ParameterServer(Engine(Shard(0, 1)), keys=ServerKeys(secret=secret, clients=folder))
        (tmp_path / "empty").mkdir(exist_ok=True)


@pytest.mark.parametrize("taken", ["port", "http_port"])
def test_a_server_that_cannot_listen_leaves_nothing_behind(servers, tmp_path, taken):
    [first] = servers(1)
    address = first.address if taken == "port" else first.http_address
    options = {taken: int(address.rsplit(":", 1)[1])}
    for _ in range(2):  # the directory is free again after the first
        with pytest.raises(ValueError, match="cannot"):
            ParameterServer(Engine(Shard(0, 1), "log", tmp_path), **options).start()
    with ParameterServer(Engine(Shard(0, 1), "log", tmp_path)) as server:
        assert get(server, "/healthz")[0] == 200


def test_one_directory_is_served_by_one_process(servers, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.sharded.ps.server.directory_lock.WAIT_S", 0.1)
    servers(1, "log", tmp_path)
    with pytest.raises(ValueError, match="another process serves from"):
        ParameterServer(Engine(Shard(0, 1), "log", tmp_path / "shard-0")).start()


def test_a_server_goes_also_where_its_last_checkpoint_fails(tmp_path, monkeypatch):
    server = ParameterServer(Engine(Shard(0, 1), "log", tmp_path)).start()
    with PsClient([server.address], deadline=LONG) as client:
        ps_table(client, 1, name="t", optimizer="sgd", initializer="zeros").assign(T([1]), T([[5.0]]))
    real = os.open

    def full(path, flags, *args, **kwargs):
        if str(path).endswith(".shlog") and flags & os.O_CREAT:
            raise OSError(28, "No space left on device")
        return real(path, flags, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        with pytest.raises(PeerError, match="No space left"):
            server.stop(checkpoint=True)
    assert server.wait(0)
    again = Engine(Shard(0, 1), "log", tmp_path)
    again.recover()
    assert again.shard.tables["t"].lookup(T([1])).item() == 5


def test_a_server_may_listen_on_ipv6(servers):
    try:
        [server] = servers(1, host="::1")
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    with PsClient([server.address], deadline=LONG) as client:
        assert client.info()[0]["shard"] == 0
