"""The conformance suite of transports. Each case is a function of one rank's transport, so that it can run in
threads, in processes and under mpirun; `judge` checks what a case returns."""

import os
import queue
import threading
import time

from shoal.errors import TransportError

WORLD = 3
PATIENCE_S = 200  # for events that happen at once unless the machine stalls


def kind(call):
    try:
        call()
    except TransportError as error:
        return error.kind
    return None


def in_two_threads(call):
    """A queue that gets what each of two calls at once raised."""
    ended = queue.Queue()
    for _ in range(2):
        threading.Thread(target=lambda: ended.put(kind(call)), daemon=True).start()
    return ended


def order(t):
    """Messages of each pair arrive complete, once and in order, zero-length and odd sizes among them."""
    sizes = [0, 1, 7, 64, 0, 5000, 65536, 3]
    for dest in range(t.world_size):
        for i, size in enumerate(sizes):
            t.send(dest, bytes([(t.rank * 31 + i) % 251]) * size)
    for src in range(t.world_size):
        for i, size in enumerate(sizes):
            assert t.recv(src) == bytes([(src * 31 + i) % 251]) * size
    t.barrier()


def reuse(t):
    """A buffer may be changed as soon as send is back."""
    data = bytearray(b"a" * 1000)
    t.send((t.rank + 1) % t.world_size, data)
    data[:] = b"b" * 1000
    assert t.recv((t.rank - 1) % t.world_size, timeout=float("inf")) == b"a" * 1000
    t.barrier()


def big(t):
    """A few megabytes each way; typed and non-contiguous buffers are sent as their bytes."""
    import numpy as np

    values = np.arange(600_000, dtype=np.float64)
    t.send((t.rank + 1) % t.world_size, values)
    assert np.array_equal(np.frombuffer(t.recv((t.rank - 1) % t.world_size)), values)
    t.send(t.rank, memoryview(values)[::2])
    assert np.array_equal(np.frombuffer(t.recv(t.rank)), values[::2])
    t.barrier()


def bad_rank(t):
    assert kind(lambda: t.send(t.world_size, b"")) == "bad_rank"
    assert kind(lambda: t.send(-1, b"")) == "bad_rank"
    assert kind(lambda: t.recv(t.world_size)) == "bad_rank"
    assert kind(lambda: t.recv(-1, timeout=0.1)) == "bad_rank"
    t.barrier()


def timeout(t):
    """A receive that timed out leaves the pair usable, and the message is not lost."""
    peer, src = (t.rank + 1) % t.world_size, (t.rank - 1) % t.world_size
    began = time.monotonic()
    assert kind(lambda: t.recv(src, timeout=0.2)) == "timeout"
    assert kind(lambda: t.recv(t.rank, timeout=0.01)) == "timeout"
    assert 0.15 < time.monotonic() - began < PATIENCE_S
    t.barrier()
    t.send(peer, b"late")
    t.send(peer, b"later")
    assert t.recv(src) == b"late"
    assert t.recv(src) == b"later"
    t.barrier()


def too_large(t):
    peer, src = (t.rank + 1) % t.world_size, (t.rank - 1) % t.world_size
    limit, t.max_message_bytes = t.max_message_bytes, 1000
    assert kind(lambda: t.send(peer, bytes(1001))) == "too_large"
    t.max_message_bytes = limit
    t.send(peer, bytes(1001))
    t.send(peer, b"small")
    t.max_message_bytes = 1000
    assert kind(lambda: t.recv(src)) == "too_large"
    assert t.recv(src) == b"small"
    t.max_message_bytes = limit
    t.barrier()


def one_reader(t):
    """A second thread that receives from the same source is told so."""
    src = (t.rank - 1) % t.world_size
    ended = in_two_threads(lambda: t.recv(src, timeout=PATIENCE_S))
    assert ended.get(timeout=PATIENCE_S) == "protocol"
    t.barrier()
    t.send((t.rank + 1) % t.world_size, b"x")
    assert ended.get(timeout=PATIENCE_S) is None
    t.barrier()


def one_in_the_barrier(t):
    """So is a second thread that enters the barrier."""
    if t.rank == 0:
        ended = in_two_threads(lambda: t.barrier(timeout=PATIENCE_S))
        assert ended.get(timeout=PATIENCE_S) == "protocol"
        for peer in range(1, t.world_size):
            t.send(peer, b"come in")
        assert ended.get(timeout=PATIENCE_S) is None
    else:
        assert t.recv(0, timeout=PATIENCE_S) == b"come in"
        t.barrier()
    t.barrier()


def threads(t):
    """One thread per peer, both ways at once."""
    errors = []

    def talk(peer):
        try:
            for i in range(50):
                t.send(peer, i.to_bytes(2, "little"))
                assert t.recv(peer) == i.to_bytes(2, "little")
        except BaseException as error:
            errors.append(error)

    pool = [threading.Thread(target=talk, args=(p,)) for p in range(t.world_size)]
    [p.start() for p in pool]
    [p.join() for p in pool]
    assert not errors
    t.barrier()


def stats(t):
    peer, src = (t.rank + 1) % t.world_size, (t.rank - 1) % t.world_size
    before = {k: dict(v) for k, v in t.stats.items()}
    t.send(peer, bytes(10))
    t.send(peer, b"")
    t.recv(src)
    t.recv(src)
    t.send(t.rank, b"me")
    t.recv(t.rank)
    for who, key, want in [
        (peer, "bytes_sent", 10),
        (peer, "messages_sent", 2),
        (src, "bytes_received", 10),
        (src, "messages_received", 2),
        (t.rank, "bytes_sent", 2),
        (t.rank, "messages_received", 1),
    ]:
        assert t.stats[who][key] - before.get(who, {}).get(key, 0) == want
    t.barrier()


def closed(t):
    """The last case, since it ends the transports: messages before a close arrive, then the peer is lost."""
    t.barrier()
    if t.rank == 0:
        t.send(1, b"last words")
        t.close()
        t.close()
        assert kind(lambda: t.send(1, b"")) == "closed"
        assert kind(lambda: t.recv(1)) == "closed"
        assert kind(lambda: t.barrier()) == "closed"
        return
    began = time.monotonic()
    if t.rank == 1:
        time.sleep(0.3)
        assert t.recv(0) == b"last words"
    assert kind(lambda: t.recv(0, timeout=2 * PATIENCE_S)) == "peer_lost"
    assert kind(lambda: t.barrier(timeout=2 * PATIENCE_S)) == "peer_lost"
    assert kind(lambda: t.send(0, b"too late")) == "peer_lost"
    assert time.monotonic() - began < PATIENCE_S


CASES = [order, reuse, big, bad_rank, timeout, too_large, one_reader, one_in_the_barrier, threads, stats, closed]


def run_all(t):
    """Every case, in order; the names of those that passed."""
    passed = []
    for case in CASES:
        case(t)
        passed.append(case.__name__)
    return passed


NAMES = [case.__name__ for case in CASES]


def process_ranks(rank, world):
    from shoal.comm import ProcessGroupTransport

    return run_all(ProcessGroupTransport(default_timeout_s=PATIENCE_S))


def mpi_ranks(rank, world):
    from shoal.comm import MpiTransport

    t = MpiTransport(default_timeout_s=PATIENCE_S)
    assert (t.rank, t.world_size) == (rank, world)
    assert "OMPI_COMM_WORLD_RANK" in os.environ
    return run_all(t)
