"""ZeroMQ's protocol as a server reads it: bytes in pieces of any size, limits, peers that misbehave."""

import contextlib
import random
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
import torch
import zmq

from shoal.sharded import ClientKeys, Engine, Limits, ParameterServer, PsClient, ServerKeys, Shard, ps_table
from shoal.sharded.ps.protocol import Op, Request, Status, parse_reply
from shoal.sharded.ps.security import generate
from shoal.sharded.ps.server import plain_router, zmtp
from tests.sharded.helpers import LONG

T = torch.tensor
READY = zmtp.ready(b"DEALER")


def wire(*messages):
    return zmtp.GREETING + READY + b"".join(bytes(part) for frames in messages for part in zmtp.message(frames))


def feed(reader, data, sizes, scratch=1 << 10):
    """Gives a reader its bytes as a socket would, in pieces."""
    whole, at, scratch = [], 0, memoryview(bytearray(scratch))
    while at < len(data):
        buffer = reader.buffer(scratch)
        n = min(next(sizes), len(buffer), len(data) - at)
        buffer[:n] = data[at : at + n]
        whole += [[bytes(f) for f in frames] for frames in reader.received(buffer[:n])]
        at += n
    return whole


def constantly(n):
    while True:
        yield n


MESSAGES = [[b"a"], [b"", b"x" * 255, b"y" * 256], [b"z" * 5000, b"", b"q"], [b"w" * 3000]]


@pytest.mark.parametrize("piece", [1, 2, 7, 64, 65, 500, 10**6])
def test_messages_come_out_whole_however_the_bytes_come(piece):
    reader = zmtp.Reader(10_000, 20_000)
    assert feed(reader, wire(*MESSAGES), constantly(piece)) == MESSAGES
    assert reader.pending_bytes == 0
    assert reader.replies == [zmtp.ready(b"ROUTER")]


@pytest.mark.parametrize("seed", range(5))
def test_messages_come_out_whole_in_random_pieces(seed):
    rng = random.Random(seed)
    messages = [[rng.randbytes(rng.choice([0, 1, 300, 4000])) for _ in range(rng.randrange(1, 8))] for _ in range(30)]

    def sizes():
        while True:
            yield rng.choice([1, 3, 50, 3000])

    assert feed(zmtp.Reader(10_000, 50_000), wire(*messages), sizes(), scratch=512) == messages


def test_a_heartbeat_is_answered_with_its_context():
    reader = zmtp.Reader(100, 100)
    ping = zmtp.command(b"PING", b"\0\x64context")
    assert feed(reader, wire([b"a"]) + ping + ping, constantly(5)) == [[b"a"]]
    assert reader.replies[1:] == [zmtp.command(b"PONG", b"context")] * 2
    assert reader.pending_bytes == 0


BROKEN = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "an old version": b"\xff" + bytes(8) + b"\x7f\x01" + bytes(53),
    "another mechanism": zmtp.GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32),
    "no handshake": zmtp.GREETING + b"\0\1a",
    "another handshake": zmtp.GREETING + zmtp.command(b"HELLO"),
    "flags that are none": zmtp.GREETING + READY + b"\x08\1a",
    "a command with more": zmtp.GREETING + READY + b"\x05\1a",
    "a large frame": zmtp.GREETING + READY + struct.pack(">BQ", 2, 1001),
    "a huge frame": zmtp.GREETING + READY + struct.pack(">BQ", 2, 2**63),
    "a large command": zmtp.GREETING + READY + struct.pack(">BQ", 6, 1 << 20),
    "a large message": zmtp.GREETING + READY + 4 * (struct.pack(">BQ", 3, 1000) + bytes(1000)),
    "frames without end": zmtp.GREETING + READY + b"\1\0" * 9,
    "an error": zmtp.GREETING + READY + zmtp.command(b"ERROR", b"\0"),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("piece", [1, 1000])
def test_what_is_not_allowed_ends_the_connection(data, piece):
    with pytest.raises(zmtp.ProtocolError):
        feed(zmtp.Reader(1000, 2500), data, constantly(piece))


# --- servers ----------------------------------------------------------------------------------------------------------


def connect(server, data=zmtp.GREETING + READY):
    host, port = server.address.removeprefix("tcp://").rsplit(":", 1)
    peer = socket.create_connection((host, int(port)), timeout=60)
    peer.sendall(data)
    return peer


def is_cut(peer):
    """Reads until the other side ends the connection."""
    try:
        while peer.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    peer.close()
    return True


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_broken_peer_is_cut_and_others_are_served(servers, data):
    [server] = servers(1, limits=Limits(max_message_bytes=1000))
    with PsClient([server.address], deadline=LONG) as client:
        table = ps_table(client, 1, name="t", optimizer="sgd", initializer="zeros")
        assert is_cut(connect(server, data))
        assert table.assign(T([1]), T([[2.0]])).lookup(T([1])).item() == 2
        assert server._sockets.cut_connections == 1


def test_a_peer_that_falls_silent_is_asked_and_then_cut(servers, monkeypatch):
    monkeypatch.setattr(plain_router, "PING_S", 0.1)
    monkeypatch.setattr(plain_router, "SILENT_S", 1.0)
    [server] = servers(1)
    begun, greeted = connect(server, zmtp.GREETING[:5]), connect(server)
    got = b""
    while zmtp.command(b"PING", bytes(2)) not in got:
        got += greeted.recv(1 << 10)
    assert got.startswith(zmtp.GREETING + zmtp.ready(b"ROUTER"))
    assert is_cut(begun)
    assert is_cut(greeted)


def test_a_peer_that_reads_no_answers_is_cut(servers):
    [server] = servers(1, limits=Limits(max_queued_bytes=16 << 20))
    with PsClient([server.address], deadline=LONG) as client:
        table = ps_table(client, 64, name="t", optimizer="sgd", initializer="zeros")
        asking = [
            bytes(p)
            for p in zmtp.message(Request(Op.LOOKUP, counts=[8000], names=("t",), ids=torch.arange(8000)).frames())
        ]
        peer = connect(server)
        with pytest.raises(ConnectionError):
            peer.sendall(b"".join(asking) * 2000)
        peer.close()
        assert server._sockets.cut_connections == 1
        assert table.assign(T([1]), torch.ones(1, 64)).lookup(T([1])).sum() == 64


def test_messages_that_are_not_whole_are_bounded_over_all_connections(servers):
    [server] = servers(1, limits=Limits(max_message_bytes=8 << 20, max_queued_bytes=20 << 20))
    with PsClient([server.address], deadline=LONG) as client:
        table = ps_table(client, 1, name="t", optimizer="sgd", initializer="zeros")
        peers = [connect(server) for _ in range(5)]
        for number, peer in enumerate(peers):  # 4, 5, 6, 7 and 8 MiB of a message that never ends
            peer.settimeout(60)
            with contextlib.suppress(ConnectionError):
                peer.sendall(struct.pack(">BQ", 3, 8 << 20) + bytes((4 + number) << 20))
        end = time.monotonic() + 60
        while server._sockets.cut_connections < 2 and time.monotonic() < end:
            time.sleep(0.02)
        assert table.assign(T([1]), T([[2.0]])).lookup(T([1])).item() == 2
        assert 1 <= server._sockets.cut_connections < 5
        for peer in peers:
            peer.close()


def test_writes_go_on_when_more_wait_than_may(servers):
    [server] = servers(1, limits=Limits(max_queued_bytes=1))
    with PsClient([server.address], deadline=LONG, max_staleness=8) as client:
        table = ps_table(client, 4, name="t", optimizer="sgd", lr=1.0, initializer="zeros")
        for step in range(100):
            table.apply_gradients(torch.arange(3000), torch.ones(3000, 4), step)
        table.as_op()
        assert table.lookup(T([5])).tolist() == [[-100.0] * 4]


MEMORY = """
import sys, time
from shoal.sharded import Engine, ParameterServer, Shard
with ParameterServer(Engine(Shard(0, 1))) as server:
    print(server.address, flush=True)
    sys.stdin.readline()
    lines = open("/proc/self/status").read().splitlines()
    print(next(line.split()[1] for line in lines if line.startswith("VmHWM")), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(
    "flood",
    [b"\1\0" * 500_000, (struct.pack(">BQ", 3, 1 << 20) + bytes(1 << 20)) * 4],
    ids=["frames of nothing", "frames of a mebibyte"],
)
def test_a_message_without_end_takes_no_memory_and_others_are_served(flood):
    """Three seconds, or three gigabytes, of frames that all say that another one follows."""
    with subprocess.Popen(
        [sys.executable, "-c", MEMORY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        address = process.stdout.readline().strip()
        sent = []

        def attack():
            host, port = address.removeprefix("tcp://").rsplit(":", 1)
            until = time.monotonic() + 3
            while time.monotonic() < until and sum(sent) < 3 << 30:
                with socket.create_connection((host, int(port)), timeout=60) as peer:
                    try:
                        peer.sendall(zmtp.GREETING + READY)
                        while time.monotonic() < until and sum(sent) < 3 << 30:
                            peer.sendall(flood)
                            sent.append(len(flood))
                    except ConnectionError:
                        sent.append(len(flood))

        try:
            with PsClient([address], deadline=LONG) as client:
                table = ps_table(client, 4, name="t", optimizer="sgd", lr=1.0, initializer="zeros")
                table.lookup(torch.arange(1000))
                baseline = high_water(process)
                attacker = threading.Thread(target=attack)
                attacker.start()
                steps = 0
                while attacker.is_alive() or steps < 10:
                    table.apply_gradients(torch.arange(1000), torch.ones(1000, 4), steps)
                    steps += 1
                attacker.join()
                assert table.lookup(T([5])).tolist() == [[-float(steps)] * 4]
            process.stdin.write("\n")
            process.stdin.flush()
            grown = int(process.stdout.readline()) - baseline
            assert grown < 100 << 10, f"{grown} KiB more for {sum(sent)} bytes"
        finally:
            process.stdin.close()


def high_water(process):
    with open(f"/proc/{process.pid}/status") as file:
        return int(next(line.split()[1] for line in file if line.startswith("VmHWM")))


def test_with_keys_a_message_beyond_measure_is_cut_and_others_are_served(tmp_path):
    """What libzmq reads is watched: a message of 1 GiB, in frames that are each allowed."""
    public, secret = generate(tmp_path, "server")
    _, mine = generate(tmp_path, "worker")
    limits = Limits(max_message_bytes=1 << 20)
    server = ParameterServer(Engine(Shard(0, 1)), keys=ServerKeys(secret=secret), limits=limits)
    keys = ClientKeys(secret=mine, server=public)
    with server, PsClient([server.address], deadline=LONG, keys=keys) as client, zmq.Context() as context:
        table = ps_table(client, 4, name="t", optimizer="sgd", lr=1.0, initializer="zeros")
        with context.socket(zmq.DEALER) as raw:
            from zmq.auth import load_certificate

            raw.linger = 0
            raw.curve_publickey, raw.curve_secretkey = load_certificate(mine)
            raw.curve_serverkey = load_certificate(public)[0]
            raw.connect(server.address)
            raw.send_multipart(Request(Op.INFO).frames())
            assert raw.poll(60_000)
            assert parse_reply(raw.recv_multipart()).status == Status.OK
            part = bytes(1 << 20)
            raw.send_multipart([part] * 1024, copy=False)
            end = time.monotonic() + 120
            steps = 0
            while server._sockets.cut_connections == 0 and time.monotonic() < end:
                table.apply_gradients(torch.arange(1000), torch.ones(1000, 4), steps)
                steps += 1
        assert server._sockets.cut_connections >= 1
        assert table.lookup(T([5])).tolist() == [[-float(steps)] * 4]
