"""The ranks of one start find each other in a store with entries of earlier starts (threads)."""

import json
import threading

import pytest

from shoal.comm.ranks import collectives
from shoal.comm.ranks.restarts import roster
from shoal.errors import DeadlineError


def met(store, ranks, world, timeout_s=30.0):
    """What some ranks of a world get, by rank: a name, or the error."""
    got = {}

    def come(rank):
        try:
            got[rank] = roster.meet(store, rank, world, timeout_s)
        except DeadlineError as error:
            got[rank] = error

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return got


@pytest.mark.parametrize("orders", [[0, 1, 2], [2, 1, 0], [1, 0, 2]], ids=str)
def test_each_start_has_a_name_of_its_own_which_all_its_ranks_know(orders):
    store = collectives.local_store()
    names = []
    for _ in range(3):
        got = met(store, orders, 3)
        assert len(set(got.values())) == 1
        names.append(got[0])
    assert len(set(names)) == 3


def test_ranks_that_ended_before_all_had_come_are_not_waited_for():
    store = collectives.local_store()
    missing = met(store, [0, 1], 3, timeout_s=0.2)
    assert "waited 0.2 s for rank(s) [1, 2] to start" in str(missing[0]) or "[2]" in str(missing[0])
    assert 2 in missing[0].ranks
    assert isinstance(missing[1], DeadlineError)
    assert len(set(met(store, [0, 1, 2], 3).values())) == 1


def test_another_number_of_ranks_meets_in_the_same_store():
    store = collectives.local_store()
    for world in (3, 2, 4, 1):
        assert len(set(met(store, range(world), world).values())) == 1


def test_a_rank_that_comes_again_is_on_the_next_list():
    store = collectives.local_store()
    store.set("shoal.hello/1", "of a process that has ended")
    first = threading.Thread(target=roster.meet, args=(store, 0, 2, 30.0))
    first.start()
    while not store.check(["shoal.roster"]):  # rank 0 has found the rank that will never agree
        pass
    stale = json.loads(store.get("shoal.roster"))
    name = roster.meet(store, 1, 2, 30.0)
    first.join(60)
    assert name != stale["name"]
