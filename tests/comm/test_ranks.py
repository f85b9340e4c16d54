"""The rules of every `Ranks`: threads first, then real ranks on gloo, with and without shared memory."""

import os
import threading

import pytest
import torch

from shoal.comm import InProcessRanks
from shoal.comm.ranks.ranks import HEAD_WORDS, Carried, SingleRank, as_ranks, padded
from shoal.errors import ConfigError, DeadlineError, PeerError
from shoal.testing import run_ranks

pytestmark = pytest.mark.timeout(600)

T = torch.tensor


def everything(ranks):
    """Calls of all kinds; raises where one does not do what it says."""
    rank, world = ranks.rank, ranks.world_size
    assert ranks.gather_ints([rank, 7 * rank]) == [[r, 7 * r] for r in range(world)]
    assert ranks.gather_totals(rank + 5) == [r + 5 for r in range(world)]
    ranks.barrier()
    assert ranks.broadcast(T([[rank, 2.5]]), world - 1).tolist() == [[world - 1, 2.5]]
    make = torch.Generator().manual_seed(5)
    for dtype in (torch.int64, torch.float32, torch.float16, torch.int32, torch.uint8):
        lengths = torch.randint(0, 3000, (world, world), generator=make)
        lengths[0] = 0  # rank 0 has nothing to send
        flat = (torch.arange(int(lengths[rank].sum())) % 100 + rank).to(dtype)
        send, recv = lengths[rank].tolist(), lengths[:, rank].tolist()
        want = []
        for r in range(world):
            theirs = (torch.arange(int(lengths[r].sum())) % 100 + r).to(dtype)
            want.append(theirs.split(lengths[r].tolist())[rank])
        assert torch.equal(ranks.all_to_all(flat, send, recv), torch.cat(want))
        assert torch.equal(ranks.all_to_all(flat, send), torch.cat(want))
        into = torch.empty(sum(recv), dtype=dtype)
        came, heads = ranks.exchange(flat, send, recv, [3, 4], into)
        assert came is into or torch.equal(came, into)
        assert torch.equal(into, torch.cat(want))
        assert heads == [padded([3, 4])] * world
    with ranks.turn:
        assert torch.equal(ranks.exchange(flat, send, recv, None)[0], torch.cat(want))
    differ(ranks)
    expect_too_much(ranks)
    assert ranks.gather_totals(1) == [1] * world  # the ranks still communicate
    return True


def differ(ranks):
    """Ranks in different calls, with lengths of their own, are told and may go on."""
    if ranks.world_size == 1:
        return
    for n in (1, 5, 200_000):
        mine = n if ranks.rank else 2 * n
        flat = torch.full((mine * ranks.world_size,), ranks.rank)
        each = [mine] * ranks.world_size
        came, heads = ranks.exchange(flat, each, each, [10 + ranks.rank, 0, 0, 0, 99])
        assert came is None
        assert [head[0] for head in heads] == [10 + r for r in range(ranks.world_size)]
        assert {head[4] for head in heads} == {99}
    with pytest.raises(PeerError, match="same calls in the same order"):
        ranks.barrier() if ranks.rank else ranks.gather_ints([1, 2, 3])


def expect_too_much(ranks):
    """A rank that expects more from itself than it sends gets nothing, and the others get their data."""
    flat, each = torch.full((2 * ranks.world_size,), ranks.rank), [2] * ranks.world_size
    expected = [5, *each[1:]] if ranks.rank == 0 else each
    came, _ = ranks.exchange(flat, each, expected, [7])
    assert came is None if ranks.rank == 0 else came.tolist() == [r for r in range(ranks.world_size) for _ in range(2)]


def refuse_bad_counts(ranks):
    flat, each = torch.zeros(2 * ranks.world_size), [2] * ranks.world_size
    for send, recv in ((each, [*each, 0]), (each, each[1:]), ([*each, 0], each), (each, [-1, *each[1:]])):
        with pytest.raises(ConfigError, match="must be one number >= 0 for each of"):
            ranks.exchange(flat, send, recv, [1])
    with pytest.raises(ConfigError, match="must add up to"):
        ranks.exchange(flat[1:], each, each, [1])


def threads(world, fn, timeout_s=60.0):
    found = [None] * world

    def work(ranks):
        try:
            found[ranks.rank] = fn(ranks)
        except BaseException as error:
            found[ranks.rank] = error

    group = InProcessRanks.create_group(world, timeout_s=timeout_s)
    running = [threading.Thread(target=work, args=[ranks], daemon=True) for ranks in group]
    [thread.start() for thread in running]
    [thread.join(100) for thread in running]
    return found


def test_one_rank_needs_nobody():
    assert everything(SingleRank())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_in_threads(world):
    assert threads(world, everything) == [True] * world


class Network:
    """A user's own: two methods."""

    def __init__(self, ranks):
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.all_to_all, self.gather_totals = ranks.all_to_all, ranks.gather_totals


def test_ranks_over_a_network_of_the_users_own():
    assert threads(2, lambda ranks: everything(as_ranks(Network(ranks)))) == [True] * 2
    ranks = SingleRank()
    assert as_ranks(ranks) is ranks
    assert isinstance(as_ranks(Network(ranks)), Carried)


def test_a_rank_that_does_not_come_is_named():
    first, second, third = threads(3, lambda ranks: ranks.barrier() if ranks.rank == 1 else None, timeout_s=0.2)
    assert (first, third) == (None, None)
    assert isinstance(second, DeadlineError)
    assert "for rank(s) [0, 2]" in str(second)


def test_a_rank_that_closed_is_named():
    first, second = threads(2, lambda ranks: ranks.barrier() if ranks.rank == 0 else ranks.close())
    assert second is None
    assert isinstance(first, PeerError)
    assert "rank(s) [1]" in str(first)


def test_what_cannot_be_sent_is_refused():
    (ranks,) = InProcessRanks.create_group(1)
    refuse_bad_counts(ranks)
    with pytest.raises(ValueError, match="at most"):
        padded([0] * (HEAD_WORDS + 1))
    with pytest.raises(ConfigError, match="at least 1"):
        InProcessRanks.create_group(0)


# --- processes --------------------------------------------------------------------------------------------------------


def over_gloo(rank, world, shared):
    os.environ["SHOAL_SHARED_MEMORY"] = shared
    from shoal.comm.ranks.torch_ranks import ProcessGroup, default_ranks

    assert default_ranks() is default_ranks()
    assert default_ranks().key == ProcessGroup().key
    refuse_bad_counts(default_ranks())
    backends_own = ProcessGroup()
    backends_own._messages = False  # as with NCCL
    assert everything(backends_own)
    return everything(default_ranks()) and values(default_ranks())


@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared memory", "gloo"])
def test_ranks_in_processes(shared):
    assert run_ranks(3, over_gloo, shared, timeout_s=240) == [True] * 3


def late(rank, world, shared):
    os.environ["SHOAL_SHARED_MEMORY"] = shared
    from shoal.comm.ranks.torch_ranks import ProcessGroup

    ranks = ProcessGroup()
    ranks.barrier()
    if rank == 0:
        ranks.timeout_s = 1.0
        with pytest.raises(DeadlineError, match=r"rank\(s\) \[1\]"):
            ranks.barrier()
        with pytest.raises(PeerError, match="an earlier exchange failed"):
            ranks.barrier()
    torch.distributed.distributed_c10d._get_default_store().set(f"done/{rank}", "1")
    torch.distributed.distributed_c10d._get_default_store().wait(["done/0"])
    return True


@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared memory", "gloo"])
def test_a_process_that_does_not_come_is_named(shared):
    assert run_ranks(2, late, shared, timeout_s=240) == [True] * 2


def values(ranks):
    """Sums, and values as JSON."""
    rank, world = ranks.rank, ranks.world_size
    for n in (0, 1, world, 1000):
        whole = torch.arange(n) + rank
        assert ranks.sum(whole) is whole
        assert torch.equal(whole, world * torch.arange(n) + sum(range(world)))
    assert torch.equal(ranks.sum(torch.full((2, 3), 0.5)), torch.full((2, 3), 0.5 * world))
    assert ranks.gather({"rank": rank, "text": "ü" * rank}) == [{"rank": r, "text": "ü" * r} for r in range(world)]
    assert ranks.from_first([rank, "x" * 1000 * (rank + 1)]) == [0, "x" * 1000]
    assert ranks.together(lambda: rank) == list(range(world))
    assert ranks.first == (rank == 0)
    for fails, kind in ((ConfigError, ConfigError), (ValueError, PeerError)):
        with pytest.raises(fails if rank == world - 1 else kind) as raised:
            ranks.together(lambda fails=fails: fail(fails) if rank == world - 1 else None)
        assert str(raised.value) == ("no" if rank == world - 1 else f"rank {world - 1}: no")
    return True


def fail(kind):
    raise kind("no")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_and_values(world):
    assert threads(world, values) == [True] * world


def test_a_sum_of_other_shapes_is_refused():
    first, second = threads(2, lambda ranks: ranks.sum(torch.ones(4 + ranks.rank)))
    assert isinstance(first, PeerError)
    assert isinstance(second, PeerError)
    assert "sum" in str(first)
