"""Ranks that stop counting are lost; a rank that was frozen itself blames no other (no threads, a store in memory)."""

import pytest

from shoal.comm.ranks import collectives
from shoal.comm.ranks.restarts import pulse
from shoal.comm.ranks.watch import Watch
from shoal.errors import ConfigError, PeerError


class Counting(pulse.Pulse):
    """A pulse whose beats the test makes."""

    def beat(self, store=True):
        self._count += 1
        if store:
            self._exchange()
        self.judge()


@pytest.fixture
def ranks():
    store = collectives.local_store()
    return [Counting(store, rank, 3, lost_after_s=3, leaves=False) for rank in range(3)]


def test_a_rank_that_stands_still_is_lost_and_named(ranks):
    for _ in range(5):
        for one in ranks:
            one.beat()
    assert all(not one.lost for one in ranks)
    for _ in range(4):  # rank 2 counted once more after the others had looked
        ranks[0].beat()
        ranks[1].beat()
        assert not ranks[0].lost
    ranks[0].beat()
    ranks[1].beat()
    assert (ranks[0].lost, ranks[1].lost) == ((2,), (2,))
    assert ranks[0].why == "rank(s) [2] have not been heard from for 3 s"


def test_a_rank_that_was_frozen_itself_blames_nobody(ranks):
    for one in ranks:
        one.beat()
    for _ in range(10):  # rank 2 is frozen: it neither counts nor judges
        ranks[0].beat()
        ranks[1].beat()
    ranks[2].beat()
    assert ranks[2].lost == ()


def test_a_rank_that_ended_is_not_missed(ranks):
    for one in ranks:
        one.beat()
    ranks[2]._leave()
    for _ in range(10):
        ranks[0].beat()
    assert 2 not in ranks[0].lost


def test_a_store_that_does_not_answer_is_the_first_ranks(ranks):
    ranks[1].beat()
    for _ in range(4):
        ranks[1].beat(store=False)
    assert ranks[1].lost == (0,)
    assert "the store of the ranks has not answered for 3 s" in ranks[1].why


def test_calls_end_with_the_names_of_the_lost(ranks):
    class Group:
        pass

    group = Group()
    watch = Watch(group, collectives.local_store(), 0, 3)
    watch.pulse = ranks[0]
    watch.check()
    ranks[0].lost, ranks[0].why = (2,), "rank(s) [2] have not been heard from for 3 s"
    assert watch.another_gave_up()
    with pytest.raises(PeerError, match=r"rank\(s\) \[2\] have not been heard from") as caught:
        watch.check()
    assert caught.value.ranks == (2,)


@pytest.mark.parametrize("error", [None, "connection closed"])
def test_a_collective_that_ends_just_after_a_slice_of_its_wait_is_no_timeout(error):
    class Ended:
        waits = 0

        def wait(self, timeout=None):
            self.waits += 1
            if self.waits == 1:
                raise RuntimeError("Operation timed out!")
            if error:
                raise RuntimeError(error)

        def is_completed(self):
            return True

    class Group:
        pass

    group, work = Group(), Ended()
    watch = Watch(group, collectives.local_store(), 0, 1)
    if error is None:
        watch.wait("all_gather", work, 30.0)
        assert work.waits == 2
        assert not watch.broken
        return
    with pytest.raises(PeerError, match=r"all_gather failed \(connection closed\)"):
        watch.wait("all_gather", work, 30.0)


def test_it_is_on_where_ranks_are_started_again(monkeypatch):
    monkeypatch.delenv("SHOAL_RANK_LOST_S", raising=False)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert pulse.pulse_wanted() == 0
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert pulse.pulse_wanted() == 10
    monkeypatch.setenv("SHOAL_RANK_LOST_S", "25")
    assert pulse.pulse_wanted() == 25
    monkeypatch.setenv("SHOAL_RANK_LOST_S", "-1")
    with pytest.raises(ConfigError, match="SHOAL_RANK_LOST_S must be >= 0, got -1"):
        pulse.pulse_wanted()
