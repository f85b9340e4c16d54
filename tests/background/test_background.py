"""Work in other threads: elements that are read ahead, and lanes that work in order. Plain values, then threads."""

import gc
import threading
import time
import traceback

import pytest

from shoal.background.ahead import ReadAhead
from shoal.background.lane import Lane
from shoal.errors import CancelledError

DEADLINE_S = 60


def names():
    return {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_elements_come_in_order_and_end(depth):
    with ReadAhead(range(10), depth) as ahead:
        assert list(ahead) == list(range(10))
        assert next(ahead, None) is None


def test_no_more_than_the_depth_and_one_are_made_ahead():
    made, room = [], threading.Semaphore(0)

    def source():
        for number in range(10):
            made.append(number)
            room.release()
            yield number

    with ReadAhead(source(), 2, name="bounded") as ahead:
        for _ in range(3):  # two wait, and the thread holds one
            assert room.acquire(timeout=DEADLINE_S)
        assert not room.acquire(timeout=0.05)
        assert next(ahead) == 0
        assert room.acquire(timeout=DEADLINE_S)
        assert made == [0, 1, 2, 3]


def test_an_error_comes_after_the_elements_before_it_with_its_own_traceback():
    def broken_source():
        yield 1
        yield 2
        raise ValueError("a broken file")

    with ReadAhead(broken_source(), 4) as ahead:
        assert [next(ahead), next(ahead)] == [1, 2]
        with pytest.raises(ValueError, match="broken file") as caught:
            next(ahead)
    assert "broken_source" in "".join(traceback.format_exception(caught.value))


def test_closing_and_dropping_end_the_thread_and_the_generator():
    ended = threading.Event()

    class Source:
        def __iter__(self):
            try:
                while True:
                    yield 1
            finally:
                ended.set()

    ahead = ReadAhead(Source(), 1, name="closed")
    assert next(ahead) == 1
    ahead.close()
    assert ended.is_set()
    assert "closed" not in names()
    ended.clear()
    ahead = ReadAhead(Source(), 1, name="dropped")
    assert next(ahead) == 1
    del ahead
    gc.collect()
    assert ended.wait(DEADLINE_S)


def test_an_iterator_that_came_as_such_is_not_closed():
    numbers = (n for n in range(100))
    with ReadAhead(numbers, 1) as ahead:
        next(ahead)
    assert next(numbers) > 0


def test_a_lane_works_in_order_and_gives_results():
    done = []
    lane = Lane("in-order")
    futures = [lane.submit(lambda n=n: done.append(n) or n * n) for n in range(20)]
    assert [future.result(DEADLINE_S) for future in futures] == [n * n for n in range(20)]
    assert done == list(range(20))
    assert lane.run(lambda: (lane.here, lane.run(lambda: 7))) == (True, 7)
    assert not lane.here
    lane.settle()
    lane.close()
    assert "in-order" not in names()


def test_nothing_is_done_after_a_failure_and_everybody_hears_of_it():
    done, go = [], threading.Event()
    lane = Lane("failing")

    def fails():
        assert go.wait(DEADLINE_S)
        raise ValueError("no such row")

    first = lane.submit(fails)
    second = lane.submit(lambda: done.append(1))
    go.set()
    for wait in (first.result, second.result, lane.settle, lambda: lane.submit(print), lambda: lane.run(print)):
        with pytest.raises(ValueError, match="no such row") as caught:
            wait()
    assert "fails" in "".join(traceback.format_exception(caught.value))
    assert done == []
    lane.close()


def test_a_lane_is_closed_with_or_without_what_waits():
    for finish in (True, False):
        done, started, go = [], threading.Event(), threading.Event()
        lane = Lane("closing")
        lane.submit(lambda: started.set() or go.wait(DEADLINE_S))  # noqa: B023
        waiting = lane.submit(lambda: done.append(1))  # noqa: B023
        assert started.wait(DEADLINE_S)
        closing = threading.Thread(target=lane.close, kwargs={"finish": finish})
        closing.start()
        end = time.monotonic() + DEADLINE_S
        while not (lane._closed if finish else lane.error):  # the running task ends only then
            assert time.monotonic() < end
            time.sleep(0.001)
        assert closing.is_alive()  # it waits for the running task
        go.set()
        closing.join(DEADLINE_S)
        if finish:
            assert done == [1]
        else:
            with pytest.raises(CancelledError):
                waiting.result(DEADLINE_S)
        with pytest.raises((CancelledError, RuntimeError)):
            lane.submit(print)
