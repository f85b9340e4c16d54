"""Queues, stages and hooks: everything comes out once and in order, and they end."""

import threading
import time
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch

from shoal.ragged import Ragged
from shoal.sharded import (
    AsyncFunctionMgr,
    AsyncPushHook,
    EndOfInput,
    EnqueueHook,
    Stage,
    StructureQueue,
    enqueue_dicts_with_queue_return,
)

T = torch.tensor


def test_data_comes_out_unchanged():
    ragged = Ragged.from_lists([[1, 2], [], [3]])
    pair = namedtuple("Pair", "x y")(T(1.0), [T([[1.0, 2]])])
    given = {"scalar": T(3), "nested": {"m": torch.eye(2), "r": ragged}, "pair": pair, "list": [T([1.0]), "text", None]}
    found, queue = enqueue_dicts_with_queue_return(given)
    assert queue is not None
    assert queue.size() == 0
    assert found is not given
    assert found["nested"] is not given["nested"]
    assert found["nested"]["r"].to_list() == [[1, 2], [], [3]]
    assert type(found["pair"]) is type(pair)
    assert found["list"][1:] == ["text", None]
    assert torch.equal(found["nested"]["m"], torch.eye(2))
    assert list(found) == list(given)


def test_dictionaries_of_every_type_keep_their_type_and_are_copied():
    given = defaultdict(list, a=T(1), b=OrderedDict(z=T(2), y=T(3)))
    found, _ = enqueue_dicts_with_queue_return({"given": given})
    found = found["given"]
    assert type(found) is defaultdict
    assert found["new"] == []
    assert list(given) == ["a", "b"]
    assert type(found["b"]) is OrderedDict
    assert list(found["b"]) == ["z", "y"]
    assert found["b"] is not given["b"]


def test_no_capacity_is_no_queue():
    given = {"a": T(1)}
    found, queue = enqueue_dicts_with_queue_return(given, capacity=0)
    assert found is given
    assert queue is None


def test_strange_objects_are_refused():
    for bad in (object(), 1.5, {"a": {1, 2}}):
        with pytest.raises(ValueError, match="nested lists"):
            enqueue_dicts_with_queue_return(bad)
    with pytest.raises(ValueError, match="doubly"):
        enqueue_dicts_with_queue_return(Ragged.from_lists([[[1], [2]], [[3]]]))
    parameter = torch.nn.Parameter(T(1.0))
    assert enqueue_dicts_with_queue_return([parameter, True, 3])[0] == [parameter, True, 3]


def test_capacity_bounds_and_order_is_kept():
    queue = StructureQueue(4)
    for i in range(4):
        queue.enqueue({"i": T(i)})
    assert queue.size() == 4
    with pytest.raises(TimeoutError):
        queue.enqueue({"i": T(4)}, timeout=0.01)
    assert [int(queue.dequeue()["i"]) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(TimeoutError):
        queue.dequeue(timeout=0.01)


def test_twenty_elements_then_the_end():
    numbers = iter(range(20))
    _, queue = enqueue_dicts_with_queue_return([T(0)], capacity=3)
    hook = EnqueueHook(queue, lambda: {"x": T(next(numbers))})
    hook.begin()
    assert [int(queue.dequeue()["x"]) for _ in range(20)] == list(range(20))
    for _ in range(2):
        with pytest.raises(EndOfInput):
            queue.dequeue()
    hook.end()


def test_a_hook_without_a_producer_leaves_the_enqueueing_to_the_loop():
    queue = StructureQueue(2)
    hook = EnqueueHook(queue)
    hook.begin()
    queue.enqueue({"x": T(1)})
    hook.end()
    assert queue.dequeue()["x"] == 1
    with pytest.raises(EndOfInput):
        queue.dequeue()


def test_an_error_of_the_producer_reaches_the_consumer():
    calls = iter([T(1), T(2)])

    def produce():
        try:
            return next(calls)
        except StopIteration:
            raise RuntimeError("the disk burns") from None

    stage = Stage(produce, 2)
    assert [int(stage.get()), int(stage.get())] == [1, 2]
    with pytest.raises(RuntimeError, match="burns"):
        stage.get()


def test_a_stage_runs_ahead_but_not_further_than_its_capacity():
    made = []

    def produce():
        made.append(len(made))
        return made[-1]

    with Stage(produce, 2, "ahead") as stage:
        deadline = time.monotonic() + 60
        while len(made) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert made == [0, 1, 2]  # two wait, and the thread holds one
        assert stage.get() == 0
    assert not any(thread.name == "ahead-producer" for thread in threading.enumerate())


@pytest.mark.parametrize("with_argument", [True, False])
def test_an_asynchronous_function_runs_one_step_late(with_argument):
    total = [0]

    def add(x=1):
        total[0] += int(x)

    args = {"args": (T(1),)} if with_argument else {}
    for is_async, expected in ((True, [0, 1, 2]), (False, [1, 2, 3])):
        total[0] = 0
        manager = AsyncFunctionMgr(is_async=is_async)
        seen = []
        for _ in range(3):
            for hook in manager.hooks:
                hook.before_run()
            manager.add_async_function(add, **args)
            for hook in manager.hooks:
                hook.after_run()
            seen.append(total[0])
        assert seen == expected
        for hook in manager.hooks:
            hook.end()
        assert total[0] == 3


def test_without_a_loop_nothing_blocks_and_nothing_is_lost():
    done = []
    manager = AsyncFunctionMgr()
    for i in range(5):
        manager.add_async_function(done.append, [i], queue_name="q")
    assert done == [0, 1, 2, 3]
    assert len(manager.hooks) == 1
    manager.flush()
    assert done == [0, 1, 2, 3, 4]


def test_a_target_may_not_wait_for_itself():
    manager = AsyncFunctionMgr()
    manager.add_async_function(lambda: manager.add_async_function(print), queue_name="async_queue")
    with pytest.raises(ValueError, match="its own effect"):
        manager.hooks[0].end()
    assert manager.add_async_function(lambda: 7, is_async=False) == 7


def test_a_push_hook_waits_for_the_first_element():
    queue, done = StructureQueue(2), []
    hook = AsyncPushHook(queue, lambda: done.append(queue.dequeue()))
    hook.before_run()
    hook.after_run()
    queue.put(1)
    hook.before_run()
    assert done == []
    hook.after_run()
    hook.before_run()
    assert done == [1]
