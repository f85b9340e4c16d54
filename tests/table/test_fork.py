"""Processes that are forked while other threads use a table: the child can always use it."""

import os
import signal
import threading
import time
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import shoal
from shoal.nn import HashEmbeddingBag, SparseOptimizer
from shoal.table import SlotOccurrenceThresholdConfig, TouchedKeySet, create_hash_filter

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
SECONDS = 60.0
"""How long a child may take before it counts as stuck."""


class Busy:
    """Runs a call again and again in other threads."""

    def __init__(self, call, threads=2):
        self._call, self._stop = call, threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]
        self.calls = 0

    def _run(self):
        while not self._stop.is_set():
            self._call()
            self.calls += 1

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + SECONDS
        while not self.calls and time.monotonic() < deadline:
            time.sleep(0.001)
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(SECONDS)


def in_child(work):
    """Whether ``work`` ends well in a forked child; a child that is stuck is ended, and fails."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # as in workers of a DataLoader: torch's threads do not survive a fork
            status = 0 if work() else 2
        finally:
            os._exit(status)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail(f"the child was still at work after {SECONDS:.0f} s")


def uses(table):
    """All that a child may want of a table."""

    def work():
        ids = torch.arange(20_000)
        found = table.lookup(ids)
        table.assign(ids, torch.full((20_000, 4), 3.0))
        table.apply_gradients(ids[:1000], torch.zeros(1000, 4))
        table.evict()
        return found.shape == (20_000, 4) and bool((table.lookup(ids[1000:]) == 3).all()) and table.size() >= 20_000

    return work


@pytest.fixture(params=[1, 4], ids=["one thread", "four threads"])
def native_threads(request):
    before = shoal.num_threads()
    shoal.set_num_threads(request.param)
    yield
    shoal.set_num_threads(before)


def test_a_child_uses_a_table_that_threads_of_the_parent_were_writing(native_threads):
    table = shoal.HashTable(dim=4, optimizer=shoal.Sgd(lr=1.0))
    ids = torch.arange(30_000)

    def write():
        table.assign(ids, torch.rand(30_000, 4))
        table.lookup(ids)
        table.erase(ids[:100])

    with Busy(write) as busy:
        for _ in range(20):
            assert in_child(uses(table))
        before = busy.calls
        deadline = time.monotonic() + SECONDS
        while busy.calls == before and time.monotonic() < deadline:
            time.sleep(0.001)
        assert busy.calls > before  # the parent continued


def test_rows_in_a_child_are_whole():
    table = shoal.HashTable(dim=64, optimizer=shoal.Sgd(lr=1.0))
    ids = torch.arange(3000)
    table.assign(ids, torch.zeros(3000, 64))
    numbers = iter(range(1, 1 << 30))

    def write():
        table.assign(ids, torch.full((3000, 64), float(next(numbers))))

    def work():
        rows = table.lookup(ids)
        return bool((rows == rows[:, :1]).all())

    with Busy(write, threads=1):
        assert all(in_child(work) for _ in range(10))


def test_filters_and_touched_keys_are_usable_in_a_child():
    thresholds = SlotOccurrenceThresholdConfig(default_occurrence_threshold=1).SerializeToString()
    hash_filter = create_hash_filter(1_000_000, 7, thresholds)
    table = shoal.HashTable(dim=4, optimizer=shoal.Sgd(lr=1.0), hash_filter=hash_filter)
    touched = TouchedKeySet()
    ids = torch.arange(5000)

    def write():
        table.apply_gradients(torch.randint(0, 1 << 40, (5000,)), torch.zeros(5000, 4))
        touched.insert(ids)

    def work():
        table.apply_gradients(ids, torch.zeros(5000, 4))
        touched.insert(ids)
        return touched.steal().numel() >= 5000 and table.contains(ids) is not None

    with Busy(write):
        for _ in range(20):
            assert in_child(work)


def test_a_module_is_usable_in_a_child_while_the_parent_trains():
    bag = HashEmbeddingBag(shoal.HashTable(dim=4, optimizer=shoal.Sgd(lr=0.1)))
    optimizer = SparseOptimizer(bag)

    def train():
        bag([[1, 2, 3]]).sum().backward()
        optimizer.gradients()
        optimizer.zero_grad()

    def work():
        train()
        return bag([[1, 2]]).shape == (1, 4)

    with Busy(train):
        for _ in range(20):
            assert in_child(work)


class Rows(Dataset):
    """A dataset whose samples are rows of a table."""

    def __init__(self, table):
        self.table = table

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.table.lookup(torch.arange(index * 1000, index * 1000 + 1000)).sum(0)


def test_loader_workers_read_a_table_that_the_parent_is_writing():
    table = shoal.HashTable(dim=4, optimizer=shoal.Sgd(lr=1.0))
    ids = torch.arange(8000)
    table.assign(ids, torch.ones(8000, 4))
    with Busy(lambda: table.assign(ids, torch.ones(8000, 4))), warnings.catch_warnings():
        for _ in range(3):
            loader = DataLoader(
                Rows(table), batch_size=4, num_workers=2, timeout=SECONDS, multiprocessing_context="fork"
            )
            assert torch.cat(list(loader)).tolist() == [[1000.0] * 4] * 8
