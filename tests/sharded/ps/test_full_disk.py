"""A parameter server on a disk that is really full: a small file system in a separate mount namespace."""

import shutil
import subprocess
import sys

import pytest

pytest.importorskip("zmq")

SCRIPT = r"""
import errno, faulthandler, json, os, re, sys, time, urllib.request
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from shoal.errors import DeadlineError, PeerError
from shoal.sharded import Engine, ParameterServer, PsClient, Shard, ps_table
from shoal.sharded.ps.client.remote import create_request
from shoal.table import HashTable

faulthandler.dump_traceback_later(300, exit=True)
T, LONG, SETTINGS = torch.tensor, timedelta(minutes=3), {"optimizer": "sgd", "initializer": "zeros"}
disk = Path(sys.argv[1])
folder, filler = disk / "shard", disk / "filler"


def fill():
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC


def health(server):
    with urllib.request.urlopen(f"http://{server.http_address}/healthz", timeout=60) as reply:
        return json.loads(reply.read())


def until(happened):
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def refused(client, call, match):
    for seconds in (3, 10, 60):  # why it is refused is what was heard by the deadline
        client.deadline = timedelta(seconds=seconds)
        with pytest.raises(DeadlineError) as caught:
            call()
        if re.search(match, str(caught.value)):
            client.deadline = LONG
            return
    raise AssertionError(str(caught.value))


def fill_the_log(table):
    for _ in range(100):
        table.assign(torch.arange(1000, 2000), torch.ones(1000, 1))


with ParameterServer(Engine(Shard(0, 1), "log", folder)) as server, PsClient([server.address], deadline=LONG) as client:
    ps_table(client, 1, name="t", **SETTINGS).assign(T([1]), T([[5.0]]))

fill()
own = create_request(HashTable(1, name="own", **SETTINGS).config, {"name": "own"})
with ParameterServer(Engine(Shard(0, 1), "log", folder), tables=[own]) as server:
    with PsClient([server.address], deadline=LONG) as client:
        told = health(server)
        assert told["state"] == "read-only", told
        assert f"{folder} has no room" in told["why"], told
        client.verify()
        from shoal.sharded import RemoteHashTable
        table = RemoteHashTable(client, 0, "t", HashTable(1, name="x", **SETTINGS).config, create=False)
        assert table.lookup(T([1])).item() == 5
        refused(client, lambda: table.assign(T([2]), T([[6.0]])), f"{folder} has no room for its log.*No space left")
        with pytest.raises(PeerError, match=f"{folder} has no room"):
            server.checkpoint()
        assert table.lookup(T([1, 2])).view(-1).tolist() == [5, 0]
        filler.unlink()
        until(lambda: health(server)["state"] == "serving")
        table.assign(T([3]), T([[7.0]]))
        assert "own" in client.info()[0]["tables"]

        fill()  # while it serves: writers wait, reads go on
        refused(client, lambda: fill_the_log(table), f"cannot write its log in {folder}.*No space left")
        assert table.lookup(T([3])).item() == 7
        told = health(server)
        assert told["state"] == "read-only", told
        assert server.gauges()["read_only"] == 1
        filler.unlink()
        table.assign(T([4]), T([[8.0]]))
        until(lambda: health(server)["state"] == "serving" and not server.gauges()["read_only"])

again = Engine(Shard(0, 1), "log", folder)
again.recover()
assert again.shard.tables["t"].lookup(T([1, 3, 4])).view(-1).tolist() == [5, 7, 8]
print("done")
"""


def test_a_server_on_a_full_disk_serves_reads_and_goes_on_when_there_is_room(tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = f"mount -t tmpfs -o size=1m shoal-test {disk}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mounted], capture_output=True, timeout=60).returncode:
        pytest.skip("file systems cannot be mounted here")
    command = ["unshare", "-rm", "sh", "-c", f'{mounted} && exec "$@"', "sh", sys.executable, "-c", SCRIPT, str(disk)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "done\n"
