"""Real server processes that are killed, frozen and drained while workers train."""

import threading
import time
from datetime import timedelta

import pytest
import torch

from shoal.errors import DeadlineError
from shoal.sharded import PsClient, ps_table
from shoal.sharded.placement.local import LocalServers
from shoal.sharded.ps.reshard import load_shard, reshard_servers
from tests.sharded.helpers import LONG, HashTable

T = torch.tensor
SETTINGS = {"optimizer": "adam", "initializer": "uniform", "lr": 0.01}


@pytest.mark.timeout(900)
def test_killed_servers_come_back_and_workers_never_notice_but_by_waiting(tmp_path, forked_servers):
    judge = HashTable(8, seed=1, name="judge", **SETTINGS)
    options = ["--durability", "log", "--dir", str(tmp_path), "--checkpoint-every", "0.5s"]
    with LocalServers(2, options) as servers:
        client = PsClient(servers.addresses, deadline=LONG)
        table = ps_table(client, 8, name="t", seed=1, **SETTINGS)
        stop = threading.Event()

        def kill():
            for i in (0, 1):
                if stop.wait(0.3):
                    return
                before = servers.restarts
                servers.kill(i)
                while servers.restarts == before and not stop.wait(0.05):
                    pass

        killer = threading.Thread(target=kill)
        killer.start()
        torch.manual_seed(0)
        steps = 0
        while killer.is_alive() or steps < 30:
            ids = torch.randint(0, 500, (200,))
            assert torch.equal(table.lookup(ids), judge.lookup(ids))
            grads = torch.randn(200, 8)
            table.apply_gradients(ids, grads, steps, req_time=steps)
            judge.apply_gradients(ids, grads, steps, enable_dedup=True, req_time=steps)
            steps += 1
        stop.set()
        killer.join(60)
        assert servers.restarts >= 2
        ids = torch.arange(500)
        assert torch.equal(table.lookup(ids), judge.lookup(ids))
        for shard, part in enumerate(table.tables):
            assert part.lookup_entry(ids[shard::2]) == judge.lookup_entry(ids[shard::2])
        client.close()
    # drained: the disk has everything, for any number of shards and for a local table
    assert reshard_servers(tmp_path, tmp_path / "three", 3) == {"t": judge.size()}
    local = load_shard(HashTable(8, seed=1, name="again", **SETTINGS), tmp_path / "three", "t")
    assert local.lookup_entry(ids) == judge.lookup_entry(ids)
    part = load_shard(HashTable(8, seed=1, name="part", **SETTINGS), tmp_path, "t", (1, 4))
    assert torch.equal(part.contains(ids), judge.contains(ids) & (ids % 4 == 1))


@pytest.mark.timeout(600)
def test_a_frozen_server_is_waited_for_until_the_deadline():
    with (
        LocalServers(1, restart=False) as servers,
        PsClient(servers.addresses, deadline=LONG, half_open_after=timedelta(seconds=1)) as client,
    ):
        table = ps_table(client, 2, name="t", optimizer="sgd", lr=1.0, initializer="zeros")
        table.assign(T([1]), T([[1.0, 2]]))
        servers.pause(0)
        client.deadline = timedelta(seconds=1.5)
        with pytest.raises(DeadlineError, match="parameter server 0 of 1"):
            table.lookup(T([1]))
        client.deadline = LONG
        begin = time.monotonic()
        threading.Timer(1.5, servers.resume, [0]).start()
        table.apply_gradients(T([1]), T([[1.0, 1]]))  # waits while the server is frozen, and is applied once
        assert time.monotonic() - begin > 1
        assert table.lookup(T([1])).tolist() == [[0, 1]]
        # a worker that disappears in the middle affects no other
        gone = PsClient(servers.addresses, max_staleness=8)
        other = ps_table(gone, 2, name="t", optimizer="sgd", lr=1.0, initializer="zeros")
        for _ in range(5):
            other.apply_gradients(torch.arange(20000), torch.ones(20000, 2))
        gone.close()
        assert table.lookup(T([1])).shape == (1, 2)
