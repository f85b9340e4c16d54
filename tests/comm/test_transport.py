"""The byte layer: values and threads first, then processes, then mpirun."""

import random
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shoal.comm import InProcessTransport, ProcessGroupTransport, Transport
from shoal.errors import ConfigError, DistributedError, TransportError
from shoal.testing import mpi_unavailable, run_mpi, run_ranks, run_threads
from tests.comm import conformance as suite


@pytest.mark.parametrize("case", suite.CASES, ids=suite.NAMES)
def test_in_process_transport_keeps_the_rules(case):
    run_threads(suite.WORLD, case, timeout_s=30)


def test_process_group_transport_keeps_the_rules():
    assert run_ranks(suite.WORLD, suite.process_ranks, timeout_s=100) == [suite.NAMES] * suite.WORLD


def test_a_group_of_one_works_and_none_is_refused():
    (t,) = InProcessTransport.create_group(1)
    t.send(0, b"self")
    assert t.recv(0) == b"self"
    t.barrier()
    with pytest.raises(ConfigError):
        InProcessTransport.create_group(0)


def test_transport_error_carries_kind_and_peer_and_survives_pickling():
    import pickle

    a, _ = InProcessTransport.create_group(2)
    with pytest.raises(TransportError) as caught:
        a.recv(1, timeout=0)
    assert (caught.value.kind, caught.value.peer) == ("timeout", 1)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.kind, again.peer, str(again)) == ("timeout", 1, str(caught.value))
    assert issubclass(TransportError, DistributedError)
    assert issubclass(DistributedError, RuntimeError)


def test_barrier_stress_never_lets_a_rank_through_early():
    rounds, world = 1000, 8
    entered = [[0.0] * rounds for _ in range(world)]
    left = [[0.0] * rounds for _ in range(world)]

    def work(t):
        rng = random.Random(t.rank)
        for g in range(rounds):
            if rng.random() < 0.02:
                time.sleep(rng.random() * 0.004)
            entered[t.rank][g] = time.perf_counter()
            t.barrier()
            left[t.rank][g] = time.perf_counter()

    run_threads(world, work, timeout_s=100)
    for g in range(rounds):
        latest = max(entered[r][g] for r in range(world))
        assert min(left[r][g] for r in range(world)) >= latest
        if g + 1 < rounds:
            assert min(entered[r][g + 1] for r in range(world)) >= latest


def test_a_missing_rank_breaks_the_barrier_and_reset_mends_it():
    group = InProcessTransport.create_group(3)

    def work(t):
        if t.rank == 2:
            return None
        try:
            t.barrier(timeout=0.2 if t.rank == 0 else 10)
        except TransportError as error:
            return error.kind, error.peer
        return None

    assert run_threads(3, work, transports=group)[:2] == [("timeout", 2), ("peer_lost", 0)]
    with pytest.raises(TransportError) as caught:
        group[2].barrier()
    assert caught.value.kind == "peer_lost"
    group[1].reset()
    run_threads(3, lambda t: t.barrier(timeout=5), transports=group)


def test_closing_wakes_those_who_wait():
    a, b = InProcessTransport.create_group(2)
    kinds = []
    waits = [
        threading.Thread(target=lambda: kinds.append(suite.kind(lambda: a.recv(1)))),
        threading.Thread(target=lambda: kinds.append(suite.kind(lambda: b.barrier()))),
    ]
    [w.start() for w in waits]
    time.sleep(0.1)
    a.close()
    [w.join(5) for w in waits]
    assert sorted(kinds) == ["closed", "peer_lost"]


def test_sixty_four_threads_exchange_with_everybody():
    def work(t):
        for dest in range(t.world_size):
            t.send(dest, bytes([t.rank]))
        got = [t.recv(src)[0] for src in range(t.world_size)]
        t.barrier()
        return got

    assert run_threads(64, work) == [list(range(64))] * 64


class MinimalTransport(Transport):
    def __init__(self, inner):
        self.rank, self.world_size, self.inner = inner.rank, inner.world_size, inner

    def send(self, dest, data):
        self.inner.send(dest, data)

    def recv(self, src, timeout=None):
        return self.inner.recv(src, timeout)

    def barrier(self, timeout=None):
        self.inner.barrier(timeout)

    def close(self):
        self.inner.close()


def test_a_users_transport_needs_only_the_four_methods():
    t = MinimalTransport(InProcessTransport.create_group(1)[0])
    assert not t.collectives
    with pytest.raises(TypeError):
        Transport()


# Processes


def forged_headers(rank, world):
    t = ProcessGroupTransport(default_timeout_s=40, max_message_bytes=1 << 20)
    if rank == 0:
        dist.send(torch.tensor([1 << 30, 0]), 1)
        return
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert suite.kind(lambda: t.recv(0)) == "too_large"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    assert suite.kind(lambda: t.recv(0)) == "too_large"
    return


def sequence_gap(rank, world):
    t = ProcessGroupTransport(default_timeout_s=40)
    if rank == 0:
        dist.send(torch.tensor([0, 0]), 1)
        dist.send(torch.tensor([0, 2]), 1)
        return
    assert t.recv(0) == b""
    assert suite.kind(lambda: t.recv(0)) == "protocol"
    return


def negative_length(rank, world):
    t = ProcessGroupTransport(default_timeout_s=40)
    if rank == 0:
        dist.send(torch.tensor([-5, 0]), 1)
    else:
        assert suite.kind(lambda: t.recv(0)) == "protocol"


@pytest.mark.parametrize("fn", [forged_headers, sequence_gap, negative_length], ids=lambda f: f.__name__)
def test_forged_headers_are_refused_before_anything_is_allocated(fn):
    run_ranks(2, fn, timeout_s=100)


def barrier_faults(rank, world):
    t = ProcessGroupTransport(default_timeout_s=60)
    t.barrier()
    seen = []
    store = dist.distributed_c10d._get_default_store()
    if rank != 2:  # rank 2 is late
        began = time.monotonic()
        try:
            t.barrier(timeout=2)
        except TransportError as error:
            seen.append((error.kind, error.peer))
        assert time.monotonic() - began < 20
        store.set(f"gave up/{rank}", "1")
    else:
        store.wait(["gave up/0", "gave up/1"], timedelta(seconds=40))
        seen.append(suite.kind(lambda: t.barrier()))
    t.barrier()
    for _ in range(20):
        t.barrier()
    return seen


def test_a_late_rank_is_named_and_the_next_barrier_works():
    first, second, late = run_ranks(3, barrier_faults, timeout_s=100)
    assert {first[0][0], second[0][0]} <= {"timeout", "peer_lost"}
    assert "timeout" in (first[0][0], second[0][0])
    assert first[0][1] == 2
    assert second[0][1] == 2
    assert late == ["peer_lost"]


def dies(rank, world, where):
    import os
    import signal

    t = ProcessGroupTransport(default_timeout_s=60)
    t.barrier()
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    what = (lambda: t.recv(1)) if where == "recv" else t.barrier
    got = suite.kind(what)
    time.sleep(0.2)
    if where == "recv":
        assert suite.kind(lambda: [t.send(1, bytes(100)) or time.sleep(0.05) for _ in range(50)]) == "peer_lost"
    return got, time.monotonic() - began < 40


@pytest.mark.parametrize("where", ["recv", "barrier"])
def test_a_killed_rank_is_lost_to_the_others(where):
    results = run_ranks(3, dies, where, timeout_s=100, lost=(1,))
    assert results[0] == results[2] == ("peer_lost", True)


def full_queue(rank, world):
    """Rank 0 sends more than may wait for rank 1, which takes none of it and closes."""
    from shoal.comm import mailboxes

    mailboxes.QUEUED_BYTES = 1000
    t = ProcessGroupTransport(default_timeout_s=40)
    if rank == 1:
        assert t.recv(0) == b"begin"
        time.sleep(0.5)
        t.close()
        dist.barrier()
        return "closed"
    t.send(1, b"begin")
    t.send(1, bytes(900))
    with pytest.raises(TransportError) as caught:
        t.send(1, bytes(900))
    dist.barrier()
    return caught.value.kind


def test_a_send_that_waits_for_room_sees_that_the_peer_closed():
    assert run_ranks(2, full_queue, timeout_s=100) == ["peer_lost", "closed"]


def second_transport(rank, world):
    for i in range(3):
        with ProcessGroupTransport(default_timeout_s=40) as t:
            t.send(1 - rank, bytes([i]))
            assert t.recv(1 - rank) == bytes([i])
            t.barrier()


def test_a_group_may_have_one_transport_after_another():
    run_ranks(2, second_transport, timeout_s=100)


def last_message(rank, world):
    t = ProcessGroupTransport(default_timeout_s=60)
    if rank == 0:
        t.send(1, b"x" * 1000)
        t.close()
        return None
    time.sleep(1.0)
    return t.recv(0)


def test_a_message_sent_just_before_the_process_ends_arrives():
    assert run_ranks(2, last_message, timeout_s=100)[1] == b"x" * 1000


# mpirun


@pytest.mark.skipif(mpi_unavailable() is not None, reason=str(mpi_unavailable()))
def test_mpi_transport_keeps_the_rules_under_mpirun():
    assert run_mpi(suite.WORLD, suite.mpi_ranks, timeout_s=100) == [suite.NAMES] * suite.WORLD
