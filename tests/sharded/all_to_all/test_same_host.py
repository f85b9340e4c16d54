"""Shared memory between ranks of one machine: rings in this process first, then real ranks."""

import mmap
import os
import random
import signal
import subprocess
import threading

import numpy as np
import pytest
import torch

from shoal import _core
from shoal.comm.ranks import same_host
from shoal.errors import PeerError
from shoal.sharded import AllToAllHashTable, ProcessGroup
from tests.sharded.helpers import run_ranks

pytestmark = pytest.mark.timeout(600)


def rings(ranks, ring_bytes=64):
    memory = np.zeros(_core.Rings.bytes(ranks, ring_bytes) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory, [_core.Rings(memory.ctypes.data + start, r, ranks, ring_bytes) for r in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("ring_bytes", [64, 4096])
def test_bytes_arrive_in_order_whatever_the_ring_holds(ranks, ring_bytes):
    rng = random.Random(ranks)
    memory, all_rings = rings(ranks, ring_bytes)
    rounds = 30
    sizes = [[[rng.choice([0, 1, 7, 8, 63, 64, 65, 1000]) for _ in range(ranks)] for _ in range(ranks)]
             for _ in range(rounds)]  # fmt: skip
    data = [[[rng.randbytes(n) for n in row] for row in of_round] for of_round in sizes]
    failed = []

    def work(r):
        for k in range(rounds):
            mine = np.frombuffer(b"".join(data[k][r]) or b"\0", np.uint8)
            recv = [sizes[k][p][r] for p in range(ranks)]
            out = np.zeros(max(1, sum(recv)), np.uint8)
            all_rings[r].start(mine.ctypes.data, sizes[k][r], out.ctypes.data, recv)
            while not all_rings[r].run(60.0):
                failed.append(f"rank {r} stands in round {k}")
                return
            if out.tobytes()[: sum(recv)] != b"".join(data[k][p][r] for p in range(ranks)):
                failed.append(f"rank {r} got other bytes in round {k}")

    threads = [threading.Thread(target=work, args=(r,)) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not failed
    assert memory is not None


def test_ranks_that_disagree_are_told():
    _memory, (a, b) = rings(2, 256)
    data, out = np.zeros(100, np.uint8), np.zeros(100, np.uint8)
    a.start(data.ctypes.data, [0, 10], out.ctypes.data, [0, 10])
    assert not a.run(0.01)
    b.start(data.ctypes.data, [12, 0], out.ctypes.data, [11, 0])
    assert b.run(0.01)
    assert a.run(0.01)
    assert b.differences() == [(0, 10, 11)]
    assert a.differences() == [(1, 12, 10)]
    with pytest.raises(ValueError, match="must send itself"):
        a.start(data.ctypes.data, [1, 0], out.ctypes.data, [2, 0])
    with pytest.raises(ValueError, match="multiple of 64"):
        _core.Rings(64, 0, 1, 65)


def exchange(rank, world, shared):
    os.environ["SHOAL_SHARED_MEMORY"] = "1" if shared else "0"
    backend = ProcessGroup()
    generator = torch.Generator().manual_seed(7)
    found = []
    for dtype in (torch.int64, torch.float32, torch.float16, torch.int32):
        lengths = torch.randint(0, 3000, (world, world), generator=generator)
        lengths[0] = 0  # rank 0 has nothing to send
        flat = (torch.arange(int(lengths[rank].sum())) + 1000 * rank).to(dtype)
        known = backend.all_to_all(flat, lengths[rank].tolist(), lengths[:, rank].tolist())
        unknown = backend.all_to_all(flat, lengths[rank].tolist())
        assert torch.equal(known, unknown)
        found.append(known)
    return (backend._rings_of() is not None), backend.gather_totals(rank + 5), found


def test_shared_memory_and_gloo_give_the_same():
    ours, theirs = run_ranks(3, exchange, True), run_ranks(3, exchange, False)
    for (shared, totals, found), (plain, expected_totals, expected) in zip(ours, theirs, strict=True):
        assert shared
        assert not plain
        assert totals == expected_totals == [5, 6, 7]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def ended_pid():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize("gave", [True, False])
def test_a_peer_may_end_once_it_has_given_what_the_others_need(monkeypatch, gave):
    """Rank 1 has ended; rank 0 waits for rank 2, which is slow, and looks around meanwhile."""
    memory = mmap.mmap(-1, _core.Rings.bytes(3, same_host.RING_BYTES))
    pids = [os.getpid(), ended_pid(), os.getpid()]
    ranks = [same_host.Rings(memory, rank, pids) for rank in range(3)]
    looked, raised, outs = threading.Event(), [], [torch.zeros(3, dtype=torch.int64) for _ in range(3)]
    plain = same_host.Rings._check_peers

    def look(self, until, timeout_s):
        plain(self, until, timeout_s)
        looked.set()

    monkeypatch.setattr(same_host.Rings, "_check_peers", look)

    def exchange(rank):
        try:
            ranks[rank].exchange(outs[rank], torch.arange(3) + 10 * rank, [1] * 3, [1] * 3, [], 60.0, lambda: False)
        except PeerError as error:
            raised.append(str(error))
            looked.set()

    if gave:
        flat = torch.arange(3) + 10
        ranks[1]._native.start(flat.data_ptr(), [8] * 3, outs[1].data_ptr(), [8] * 3)
        assert not ranks[1]._native.run(0.0)
    threads = [threading.Thread(target=exchange, args=(rank,)) for rank in (0, 2)]
    threads[0].start()
    assert looked.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    if gave:
        assert raised == []
        assert [out.tolist() for out in (outs[0], outs[2])] == [[0, 10, 20], [2, 12, 22]]
    else:
        assert len(raised) == 2
        assert all("rank 1 (process" in text for text in raised)


def alone(rank, world):
    table = AllToAllHashTable(4, optimizer="sgd", initializer="zeros")
    table.lookup(torch.arange(10))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    table.lookup(torch.arange(20))


def test_a_rank_that_died_is_noticed():
    with pytest.raises(Exception, match=r"rank 1|killed|SIGKILL"):
        run_ranks(2, alone)


def mixed(rank, world):
    """A rank without ids, all ids of one shard, repeated and negative ids, one after another."""
    local = AllToAllHashTable(3, optimizer="sgd", lr=1.0, initializer="zeros")
    for ids in ([], [2, 2, 2], [-1, -1, 5], [0, 2, 4, 6] * 500):
        ids = torch.tensor(ids if rank != 1 else [], dtype=torch.int64)
        assert local.lookup(ids).shape == (ids.numel(), 3)
        local.apply_gradients(ids, torch.ones(ids.numel(), 3))
    return local.lookup(torch.tensor([2, -1, 5, 0])).tolist()


def test_ranks_without_ids_take_part():
    assert run_ranks(2, mixed)[1] == [[-503.0] * 3, [-2.0] * 3, [-1.0] * 3, [-500.0] * 3]
