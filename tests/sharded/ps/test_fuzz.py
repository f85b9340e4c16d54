"""Random requests and connections, from fixed seeds: all are answered or closed, and good ones still succeed."""

import json
import random
import socket
import struct

import pytest
import torch
import zmq

from shoal.sharded import Engine, Limits, PsClient, Shard, ps_table
from shoal.sharded.ps.protocol import Op, Request, parse_reply
from shoal.sharded.ps.server import zmtp
from tests.sharded.helpers import LONG, config

T = torch.tensor
ROUNDS = 80
EDGES = (0, 1, 2, 0x7F, 0x80, 0xFF)


def good_requests(rng, seq):
    """One request of every kind."""
    stream = {"stream": b"w" * 16, "seq": seq, "acked": seq - 1}
    ids = T([rng.randrange(-(1 << 63), 1 << 63) for _ in range(3)])
    rows = {"names": ("t",), "counts": [3], "ids": ids}
    made = config(2).table_config.SerializeToString()
    options = json.dumps({"name": "other", "filter": {"type": "sliding_hash_filter", "capacity": 100}}).encode()
    return [
        Request(Op.INFO), Request(Op.SIZES), Request(Op.LOOKUP, **rows), Request(Op.CONTAINS, **rows),
        Request(Op.ENTRIES, **rows), Request(Op.CHECKPOINT, values=b'["run-1", []]'),
        Request(Op.ASSIGN, values=torch.randn(3, 2), **rows, **stream),
        Request(Op.ASSIGN_ADD, values=torch.randn(3, 2), **rows, **stream),
        Request(Op.APPLY, values=torch.randn(3, 2), rates=[0.1], **rows, **stream),
        Request(Op.REINITIALIZE, **rows, **stream), Request(Op.INSERT, **rows),
        Request(Op.CREATE, ids=made, values=options), Request(Op.CLEAR, names=("t",), counts=[0], **stream),
        Request(Op.EVICT, names=("t",), counts=[0]), Request(Op.ERASE, **rows, **stream),
        Request(Op.RESTORE, names=("t",), counts=[0], values=b"run-1", **stream),
    ]  # fmt: skip


def damage(rng, data):
    """Bytes with something wrong about them."""
    data = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        how = rng.randrange(5)
        at = rng.randrange(len(data) + 1)
        if how == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif how == 1 and data:
            data[at % len(data)] = rng.choice(EDGES)
        elif how == 2:
            del data[at : at + rng.randrange(1, 20)]
        elif how == 3:
            data[at:at] = rng.randbytes(rng.randrange(1, 20))
        elif len(data) >= 8:  # a number at a sensitive place
            value = rng.choice([1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
            struct.pack_into("<Q", data, at % (len(data) - 7), value)
    return bytes(data)


def damaged_frames(rng, request):
    frames = [bytes(memoryview(f)) for f in request.frames()]
    how = rng.randrange(6)
    if how == 0:
        frames = frames[: rng.randrange(1, len(frames) + 1)]
    elif how == 1:
        frames += [rng.randbytes(rng.randrange(0, 9)) for _ in range(rng.randrange(1, 4))]
    elif how == 2:
        rng.shuffle(frames)
    chosen = rng.randrange(len(frames))
    frames[chosen] = damage(rng, frames[chosen])
    return frames


@pytest.mark.parametrize("seed", range(4))
def test_every_damaged_request_is_answered_and_the_next_good_one_succeeds(servers, tmp_path, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    [server] = servers(1, "log", tmp_path, limits=Limits(max_ids=1 << 16, max_message_bytes=1 << 20))
    with PsClient([server.address], deadline=LONG) as client, zmq.Context() as context:
        table = ps_table(client, 2, name="mine", optimizer="sgd", initializer="zeros")
        ps_table(client, 2, name="t", optimizer="sgd", initializer="zeros")
        with context.socket(zmq.DEALER) as raw:
            raw.linger = 0
            raw.connect(server.address)
            for number in range(1, ROUNDS + 1):
                sent = [damaged_frames(rng, request) for request in good_requests(rng, number)]
                for frames in sent:
                    raw.send_multipart(frames)
                for _ in sent:  # as many answers as requests, in any order
                    assert raw.poll(60_000), f"a request of round {number} has no answer; they were {sent}"
                    parse_reply(raw.recv_multipart())
                if number % 10 == 0:
                    table.assign(T([number]), T([[float(number), 1.0]]))
                    assert table.lookup(T([number])).tolist() == [[number, 1]]
    assert server.fatal is None
    server.stop()
    again = Engine(Shard(0, 1), "log", tmp_path / "shard-0")  # the log can be read again
    again.recover()
    assert again.shard.tables["mine"].size() == ROUNDS // 10
    assert again.shard.version == server.engine.shard.version


@pytest.mark.parametrize("seed", range(4))
def test_every_damaged_connection_is_served_or_cut_and_the_next_good_one_succeeds(servers, seed):
    rng = random.Random(seed)
    [server] = servers(1, limits=Limits(max_message_bytes=1 << 20))
    host, port = server.address.removeprefix("tcp://").rsplit(":", 1)
    good = [zmtp.GREETING, zmtp.ready(b"DEALER")]
    good += [b"".join(map(bytes, zmtp.message(request.frames()))) for request in good_requests(rng, 1)]
    good.append(zmtp.command(b"PING", b"\0\0x"))
    with PsClient([server.address], deadline=LONG) as client:
        table = ps_table(client, 2, name="t", optimizer="sgd", initializer="zeros")
        for number in range(1, ROUNDS + 1):
            parts = list(good)
            for _ in range(rng.randrange(1, 4)):
                chosen = rng.randrange(len(parts))
                parts[chosen] = damage(rng, parts[chosen])
            with socket.create_connection((host, int(port)), timeout=60) as peer:
                data = b"".join(parts)
                try:
                    while data:
                        n = rng.randrange(1, 400)
                        peer.sendall(data[:n])
                        data = data[n:]
                    peer.shutdown(socket.SHUT_WR)
                    while peer.recv(1 << 16):  # until the server has closed it, too
                        pass
                except TimeoutError:
                    raise
                except OSError:
                    pass
            if number % 10 == 0:
                table.assign(T([number]), T([[float(number), 1.0]]))
                assert table.lookup(T([number])).tolist() == [[number, 1]]
    assert server.fatal is None
