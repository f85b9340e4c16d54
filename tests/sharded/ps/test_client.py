"""The worker's side of a parameter server: calls that must not hang, and requests that must not be sent."""

import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch

from shoal.errors import ConfigError, DeadlineError, PeerError
from shoal.sharded import ClientKeys, Engine, Limits, ParameterServer, PsClient, ServerKeys, Shard, ps_table
from shoal.sharded.ps.protocol import Op, Request
from shoal.sharded.ps.security import generate
from tests.sharded.helpers import LONG, config, told

T = torch.tensor


def lookup(ids):
    return Request(Op.LOOKUP, counts=[ids.numel()], names=("t",), ids=ids)


def silent():
    """A server that takes connections and never says a word."""
    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    return listener, f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_number_that_cannot_be_sent_does_not_hold_up_what_follows(ps):
    client = ps(2)
    table = ps_table(client, 1, name="t", optimizer="sgd", lr=1.0, initializer="zeros")
    bad = {
        i: Request(Op.ASSIGN, counts=[1], names=("t",), ids=T([i]), values=T([1.0]), req_time=1 << 63) for i in (0, 1)
    }
    with pytest.raises(ConfigError, match="does not fit"):
        client.write(bad)
    with pytest.raises(ConfigError, match="does not fit"):
        client.read({0: Request(Op.LOOKUP, counts=[1 << 63], names=("t",), ids=T([1]))})
    table.apply_gradients(T([0, 1]), torch.ones(2, 1))
    assert table.lookup(T([0, 1])).tolist() == [[-1], [-1]]


def test_what_a_server_would_cut_the_connection_for_is_not_sent(servers):
    small = Limits(max_message_bytes=4096)
    addresses = [server.address for server in servers(2, limits=small)]
    with PsClient(addresses, deadline=LONG) as client:
        table = ps_table(client, 3, name="t", optimizer="sgd", initializer="zeros")
        many = torch.arange(0, 1200)
        begin = time.monotonic()
        with pytest.raises(ConfigError, match="smaller requests"):
            table.lookup(many)
        with pytest.raises(ConfigError, match="smaller requests"):
            table.assign(torch.cat([many[:1], many[1::2]]), torch.ones(601, 3))  # too much for shard 1
        with pytest.raises(ConfigError, match="smaller requests"):
            table.lookup(torch.arange(1000), insert_missing=True)  # the ids fit, the rows do not
        assert time.monotonic() - begin < LONG.total_seconds()
        assert table.size() == 0
        assert table.assign(many[:600], torch.ones(600, 3)).lookup(many[:600]).sum() == 1800


def test_a_deadline_shorter_than_a_tick_is_kept_and_told():
    listener, address = silent()
    with listener, PsClient([address]) as client:
        begin = time.monotonic()
        with pytest.raises(DeadlineError, match=r"parameter server 0 of 1 .* within 0\.02 s"):
            client.info(timedelta(milliseconds=20))
        assert time.monotonic() - begin < 60


@pytest.mark.parametrize("verb", ["read", "write"])
def test_closing_ends_the_waits_of_other_threads(servers, verb):
    [server] = servers(1)
    client = PsClient([server.address])
    table = ps_table(client, 1, name="t")
    release, entered = threading.Event(), threading.Event()
    blocked = server.engine.shard
    plain = getattr(blocked, verb)

    def hold(request):
        if request.op in (Op.LOOKUP, Op.ASSIGN):
            entered.set()
            release.wait(LONG.total_seconds())
        return plain(request)

    setattr(blocked, verb, hold)
    raised = []

    def work():
        try:
            if verb == "read":
                client.read({0: lookup(torch.arange(5000))})
            else:
                table.assign(T([1]), T([[1.0]]))
        except PeerError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert entered.wait(60)
        client.close()
        thread.join(60)
        assert not thread.is_alive()
    finally:
        release.set()
    assert "closed" in str(raised[0])
    with pytest.raises(PeerError, match="closed"):
        client.info()
    client.close()


def test_an_address_that_is_none_leaves_nothing_open():
    with pytest.raises(ConfigError, match="parameter server"):
        PsClient(["127.0.0.1:1", "nowhere"])
    for addresses in ([], "127.0.0.1:7100"):
        with pytest.raises(ConfigError, match="addresses must be a list with the address of every server, got "):
            PsClient(addresses)
    with pytest.raises(ConfigError, match="key file"):
        PsClient(["127.0.0.1:1"], keys=ClientKeys(secret="no such file", server="no such file"))


def test_an_earlier_error_comes_before_the_next_write_is_sent(ps):
    client = ps(1, max_staleness=5)
    table = ps_table(client, 1, name="t", optimizer="sgd", lr=1.0, initializer="zeros")
    table.apply_gradients(T([1]), T([[float("nan")]]))
    with pytest.raises(ValueError, match="NaN"):
        table.assign_add(T([1]), T([[1.0]]))
    assert table.lookup(T([1])).item() == 0
    table.assign_add(T([1]), T([[1.0]]))
    assert table.lookup(T([1])).item() == 1


def test_keys_on_one_side_alone_are_told(tmp_path):
    public, secret = generate(tmp_path, "server")
    _, mine = generate(tmp_path, "worker")
    keys = ClientKeys(secret=mine, server=public)
    for server_keys, client_keys in ((ServerKeys(secret=secret), None), (None, keys)):
        with (
            ParameterServer(Engine(Shard(0, 1)), keys=server_keys) as server,
            PsClient([server.address], keys=client_keys) as client,
        ):
            told(client.info, "CURVE keys|is that its public key")


def test_a_server_with_another_key_is_suspected(tmp_path):
    _, secret = generate(tmp_path, "server")
    other, _ = generate(tmp_path, "other")
    _, mine = generate(tmp_path, "worker")
    with (
        ParameterServer(Engine(Shard(0, 1)), keys=ServerKeys(secret=secret)) as server,
        PsClient([server.address], keys=ClientKeys(secret=mine, server=other)) as client,
    ):
        told(client.info, "is that its public key")


def test_workers_with_seeds_of_their_own_share_the_tables_of_a_factory(servers):
    from shoal.sharded import create_native_multi_hash_table

    addresses = [server.address for server in servers(2)]
    for seed in (1, 2):
        torch.manual_seed(seed)
        with PsClient(addresses, deadline=LONG) as client:
            table = create_native_multi_hash_table(2, {"a": config(2), "b": config(3)}, None, client=client)
            table.assign_add({"a": (T([1, 2]), torch.ones(2, 2))})
            assert table.lookup({"a": T([1, 2])})["a"].tolist() == [[seed, seed]] * 2
            assert table.size() == 2
            alone = create_native_multi_hash_table(0, {"c": config(2)}, None, client=client)
            alone.assign_add({"c": (T([1]), torch.ones(1, 2))})
            assert alone.lookup({"c": T([1])})["c"].tolist() == [[seed, seed]]  # the next table finds it on the server


def test_the_command_line_asks_servers_with_keys_too(tmp_path, capsys):
    from shoal.cli.main import main

    public, secret = generate(tmp_path, "server")
    _, mine = generate(tmp_path, "worker")
    with ParameterServer(Engine(Shard(0, 1)), keys=ServerKeys(secret=secret)) as server:
        status = ["ps", "status", server.address, "--timeout"]
        assert main([*status, "60", "--keys", mine, "--server", public, "--json"]) == 0
        assert '"shard": 0' in capsys.readouterr().out
        for seconds in ("2", "60"):  # it must close a connection twice before the client gives up
            assert main([*status, seconds]) == 1
            said = capsys.readouterr().err
            if "CURVE keys" in said:
                break
        assert "CURVE keys" in said
        assert main([*status, "0"]) == 2
        assert "--timeout must be > 0" in capsys.readouterr().err
        assert main(["ps", "status", server.address, "--keys", mine]) == 2
        assert "must be given together" in capsys.readouterr().err
    assert main(["ps", "status"]) == 2
    assert main(["ps", "--clients", str(tmp_path)]) == 2
    assert "--clients needs --keys" in capsys.readouterr().err
    assert main(["ps", "--checkpoint-every", "5x"]) == 2


@pytest.mark.parametrize("option", ["deadline", "half_open_after"])
@pytest.mark.parametrize("value", [3, 0.5, "3s", timedelta(0), timedelta(seconds=-1)], ids=str)
def test_a_duration_that_is_none_is_refused_at_once(option, value):
    with pytest.raises(ConfigError, match=f"{option} must be"):
        PsClient(["127.0.0.1:1"], **{option: value})


def test_a_calls_own_deadline_is_checked_too(ps):
    client = ps(1)
    with pytest.raises(ConfigError, match=r"deadline must be a datetime\.timedelta"):
        client.info(3)
    assert client.info()[0]["shard"] == 0


DROPPED = """
import faulthandler, gc, sys
import torch, zmq
from datetime import timedelta
from shoal.sharded import PsClient, ps_table
faulthandler.dump_traceback_later(200, exit=True)
for used in (False, True, True):
    client = PsClient([sys.argv[1]], deadline=timedelta(seconds=60))
    if used:
        table = ps_table(client, 1, name="t", optimizer="sgd", initializer="zeros")
        table.lookup(torch.tensor([1]))
        del table
    client.cycle = client  # as an exception's traceback makes one
    del client
    gc.collect()
left = [thing for thing in gc.get_objects() if type(thing) in (zmq.Socket, zmq.Context) and not thing.closed]
print("open:", len(left))
PsClient([sys.argv[1]])  # left to the end of the process
print("done", flush=True)
"""


def test_a_client_that_is_dropped_without_close_does_not_freeze_the_process(servers):
    [server] = servers(1)
    command = [sys.executable, "-c", DROPPED, server.address]
    ended = subprocess.run(command, timeout=280, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["open: 0", "done"]
