"""The byte layer: values and threads first, then processes, then mpirun."""

import gc
import random
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shoal.comm import InProcessTransport, ProcessGroupTransport, Transport
from shoal.comm.ranks.process_group import BARRIER_TAG
from shoal.comm.ranks.transport import Deadline
from shoal.errors import ConfigError, DistributedError, TransportError
from shoal.testing import mpi_unavailable, run_mpi, run_ranks, run_threads
from tests.comm import conformance as suite

pytestmark = pytest.mark.timeout(900)


def eventually(true, seconds=200):
    """Waits until ``true()``, which happens at once unless the machine stands still."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("case", suite.CASES, ids=suite.NAMES)
def test_in_process_transport_keeps_the_rules(case):
    run_threads(suite.WORLD, case, timeout_s=suite.PATIENCE_S)


def test_process_group_transport_keeps_the_rules():
    assert run_ranks(suite.WORLD, suite.process_ranks, timeout_s=300) == [suite.NAMES] * suite.WORLD


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

    run_threads(world, work, timeout_s=300)
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
        if t.rank == 0:
            eventually(lambda: t._group.generation.entered == {1})
        try:
            t.barrier(timeout=0.1 if t.rank == 0 else 200)
        except TransportError as error:
            return error.kind, error.peer
        return None

    assert run_threads(3, work, transports=group, timeout_s=300)[:2] == [("timeout", 2), ("peer_lost", 0)]
    with pytest.raises(TransportError) as caught:
        group[2].barrier()
    assert caught.value.kind == "peer_lost"
    group[1].reset()
    run_threads(3, lambda t: t.barrier(timeout=200), transports=group, timeout_s=300)


def test_closing_wakes_those_who_wait():
    a, b = InProcessTransport.create_group(2)
    kinds = []
    waits = [
        threading.Thread(target=lambda: kinds.append(suite.kind(lambda: a.recv(1)))),
        threading.Thread(target=lambda: kinds.append(suite.kind(lambda: b.barrier()))),
    ]
    [w.start() for w in waits]
    eventually(lambda: a._receiving and b._group.generation.entered)
    a.close()
    [w.join(200) for w in waits]
    assert sorted(kinds) == ["closed", "peer_lost"]


def test_sixty_four_threads_exchange_with_everybody():
    def work(t):
        for dest in range(t.world_size):
            t.send(dest, bytes([t.rank]))
        got = [t.recv(src)[0] for src in range(t.world_size)]
        t.barrier()
        return got

    assert run_threads(64, work, timeout_s=300) == [list(range(64))] * 64


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
    t = ProcessGroupTransport(default_timeout_s=200, max_message_bytes=1 << 20)
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
    t = ProcessGroupTransport(default_timeout_s=200)
    if rank == 0:
        dist.send(torch.tensor([0, 0]), 1)
        dist.send(torch.tensor([0, 2]), 1)
        return
    assert t.recv(0) == b""
    assert suite.kind(lambda: t.recv(0)) == "protocol"
    return


def negative_length(rank, world):
    t = ProcessGroupTransport(default_timeout_s=200)
    if rank == 0:
        dist.send(torch.tensor([-5, 0]), 1)
    else:
        assert suite.kind(lambda: t.recv(0)) == "protocol"


@pytest.mark.parametrize("fn", [forged_headers, sequence_gap, negative_length], ids=lambda f: f.__name__)
def test_forged_headers_are_refused_before_anything_is_allocated(fn):
    run_ranks(2, fn, timeout_s=300)


def barrier_faults(rank, world, hasty):
    """Rank 2 is late. Of the others, ``hasty`` gives up soon, once the patient one is in the barrier."""
    t = ProcessGroupTransport(default_timeout_s=200)
    t.barrier()
    seen = []
    store = dist.distributed_c10d._get_default_store()
    if rank != 2:
        if rank == hasty == 0:
            t._barrier_inboxes[1].ask()
            eventually(lambda: t._barrier_inboxes[1].ready)
        elif rank == hasty:
            t._store.wait(["in/1/0"], timedelta(seconds=200))
        try:
            t.barrier(timeout=0.5 if rank == hasty else 250)
        except TransportError as error:
            seen.append((error.kind, error.peer))
        store.set(f"gave up/{rank}", "1")
    else:
        store.wait(["gave up/0", "gave up/1"], timedelta(seconds=200))
        seen.append(suite.kind(lambda: t.barrier()))
    t.barrier()
    for _ in range(20):
        t.barrier()
    return seen


@pytest.mark.parametrize("hasty", [0, 1])
def test_a_late_rank_is_named_and_the_next_barrier_works(hasty):
    *others, late = run_ranks(3, barrier_faults, hasty, timeout_s=300)
    assert others == [[("timeout", 2)] if rank == hasty else [("peer_lost", 2)] for rank in range(2)]
    assert late == ["peer_lost"]


def dies(rank, world, where):
    import os
    import signal

    t = ProcessGroupTransport(default_timeout_s=200)
    t.barrier()
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    what = (lambda: t.recv(1)) if where == "recv" else t.barrier
    got = suite.kind(what)
    time.sleep(0.2)
    if where == "recv":
        assert suite.kind(lambda: [t.send(1, bytes(100)) or time.sleep(0.05) for _ in range(2000)]) == "peer_lost"
    return got, time.monotonic() - began < 150


@pytest.mark.parametrize("where", ["recv", "barrier"])
def test_a_killed_rank_is_lost_to_the_others(where):
    results = run_ranks(3, dies, where, timeout_s=300, lost=(1,))
    assert results[0] == results[2] == ("peer_lost", True)


def full_queue(rank, world):
    """Rank 0 sends more than may wait for rank 1, which takes none of it and closes."""
    from shoal.comm.ranks import mailboxes

    mailboxes.QUEUED_BYTES = 1000
    store = dist.distributed_c10d._get_default_store()
    t = ProcessGroupTransport(default_timeout_s=200)
    if rank == 1:
        assert t.recv(0) == b"begin"
        store.wait(["full"], timedelta(seconds=200))
        time.sleep(0.3)  # so that rank 0 is probably waiting for room by now
        t.close()
        dist.barrier()
        return "closed"
    t.send(1, b"begin")
    t.send(1, bytes(900))
    store.set("full", "1")
    with pytest.raises(TransportError) as caught:
        t.send(1, bytes(900))
    dist.barrier()
    return caught.value.kind


def test_a_send_that_waits_for_room_sees_that_the_peer_closed():
    assert run_ranks(2, full_queue, timeout_s=300) == ["peer_lost", "closed"]


def second_transport(rank, world):
    for i in range(3):
        with ProcessGroupTransport(default_timeout_s=200) as t:
            t.send(1 - rank, bytes([i]))
            assert t.recv(1 - rank) == bytes([i])
            t.barrier()


def test_a_group_may_have_one_transport_after_another():
    run_ranks(2, second_transport, timeout_s=300)


def closed_and_dropped(rank, world):
    """Whether a transport that was used and closed is gone without the garbage collector, and the group with it."""
    gc.disable()
    t = ProcessGroupTransport(default_timeout_s=200)
    t.send(1 - rank, b"x")
    t.recv(1 - rank)
    t.barrier()
    t.close()
    gone = weakref.ref(t)
    del t

    def own_threads():
        return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("shoal-"))

    eventually(lambda: gone() is None and not own_threads())  # a thread lives a moment longer than what it works on
    return own_threads()


def test_a_closed_transport_keeps_neither_threads_nor_its_group():
    assert run_ranks(2, closed_and_dropped, timeout_s=300) == [[], []]


def last_message(rank, world):
    t = ProcessGroupTransport(default_timeout_s=200)
    if rank == 0:
        t.send(1, b"x" * 1000)
        t.close()
        return None
    time.sleep(1.0)
    return t.recv(0)


def test_a_message_sent_just_before_the_process_ends_arrives():
    assert run_ranks(2, last_message, timeout_s=300)[1] == b"x" * 1000


def slow_last_message(rank, world):
    """Rank 0 closes while half of its last message is on its way."""
    store = dist.distributed_c10d._get_default_store()
    t = ProcessGroupTransport(default_timeout_s=200)
    if rank == 0:
        dist.send(torch.tensor([3, 0]), 1)
        t._outbox(1).sequence = 1
        t.close()
        store.wait(["looked"], timedelta(seconds=200))
        dist.send(torch.tensor([7, 8, 9], dtype=torch.uint8), 1)
        return None
    kinds = [suite.kind(lambda: t.recv(0, timeout=0.5)) for _ in range(2)]
    eventually(lambda: 0 in t._closed_peers())
    kinds.append(suite.kind(lambda: t.recv(0, timeout=0.5)))
    store.set("looked", "1")
    return kinds, t.recv(0), suite.kind(lambda: t.recv(0))


def test_a_message_that_is_on_its_way_when_its_sender_closes_still_arrives():
    want = (["timeout"] * 3, b"\7\x08\x09", "peer_lost")
    assert run_ranks(2, slow_last_message, timeout_s=300)[1] == want


def closes_after_barrier(rank, world):
    """Rank 0 passes the barrier and closes; rank 1 gets its mark later than the news of that."""
    store = dist.distributed_c10d._get_default_store()
    t = ProcessGroupTransport(default_timeout_s=200)
    if rank == 0:
        group, held = t.group, []

        class Holding:
            def send(self, tensors, dest, tag):
                held.append((tensors, dest, tag))

        t._collect(t._barrier_inboxes, 0, Deadline(200))
        t.group = Holding()
        outbox = t._outbox(1, BARRIER_TAG)
        outbox.reaping = True  # nothing was sent yet
        outbox.put(memoryview(bytes(8)), Deadline(200))
        outbox.pending.clear()
        t.group, t._barriers_passed = group, 1
        t.close()
        store.wait(["looked"], timedelta(seconds=200))
        [group.send(*message).wait() for message in held]
        return None
    passed = threading.Thread(target=t.barrier)
    passed.start()
    eventually(lambda: 0 in t._gone)
    passed.join(0.5)
    still = passed.is_alive()
    store.set("looked", "1")
    passed.join(200)
    return still, passed.is_alive(), t._barriers_passed, suite.kind(t.barrier)


def test_a_rank_that_closes_after_the_barrier_is_not_missed_in_it():
    assert run_ranks(2, closes_after_barrier, timeout_s=300)[1] == (True, False, 1, "peer_lost")


def store_gone(rank, world):
    """The store does not answer while rank 0's last message is on its way."""
    from shoal.comm.ranks import process_group

    process_group.STORE_GRACE_S = 200
    store = dist.distributed_c10d._get_default_store()
    t = ProcessGroupTransport(default_timeout_s=250)
    if rank == 0:
        store.wait(["looked"], timedelta(seconds=200))
        t.send(1, b"last words")
        return None

    class Gone:
        def check(self, keys):
            store.set("looked", "1")
            raise RuntimeError("gone")

    t._store = Gone()
    return t.recv(0)


def test_a_message_that_is_on_its_way_when_the_stores_process_ends_still_arrives():
    assert run_ranks(2, store_gone, timeout_s=300)[1] == b"last words"


# mpirun


@pytest.mark.skipif(mpi_unavailable() is not None, reason=str(mpi_unavailable()))
def test_mpi_transport_keeps_the_rules_under_mpirun():
    assert run_mpi(suite.WORLD, suite.mpi_ranks, timeout_s=300) == [suite.NAMES] * suite.WORLD
