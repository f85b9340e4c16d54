"""Streams: order, shuffling, ranks, and resuming at the exact position."""

import json
import random
import threading

import pytest
import torch

from shoal.data import CRITEO, CriteoLike, Prefetch, Samples, Schema, Stream, make_format, write_criteo
from shoal.errors import ConfigError, DataError

SCHEMA = Schema(label="y", sparse=("u",))


@pytest.fixture
def files(tmp_path):
    """Three files with the labels 0..999 and a few bad lines."""
    paths = []
    for number, (begin, end) in enumerate(((0, 400), (400, 401), (401, 1000))):
        lines = [f"{i}\tu{i}" if i % 100 != 50 else "bad" for i in range(begin, end)]
        path = tmp_path / f"part-{number}.tsv"
        path.write_text("y\tu\n" + "\n".join(lines) + "\n")
        paths.append(str(path))
    (tmp_path / "part-9.tsv").write_text("")
    return str(tmp_path / "part-*.tsv")


def stream(files, part_bytes=700, **options):
    options = {"batch_size": 32, **options}
    return Stream([files], make_format("tsv", SCHEMA, part_bytes=part_bytes), SCHEMA, **options)


GOOD = [i for i in range(1000) if i % 100 != 50]


def all_labels(batches):
    return [int(value) for batch in batches for value in batch.samples.label.tolist()]


def test_without_shuffling_samples_come_in_the_order_of_the_files(files):
    one = stream(files)
    batches = list(one)
    assert all_labels(batches) == GOOD
    assert {len(batch) for batch in batches[:-1]} == {32}
    assert one.bad_rows == 10
    assert batches[-1].state["bad"] == 10


def test_shuffling_keeps_every_sample_and_depends_on_seed_and_epoch(files):
    first = all_labels(stream(files, shuffle_rows=256, epochs=2))
    assert sorted(first[:990]) == sorted(first[990:]) == GOOD
    assert first[:990] != first[990:]
    assert first == all_labels(stream(files, shuffle_rows=256, epochs=2))
    assert first != all_labels(stream(files, shuffle_rows=256, epochs=2, seed=1))


@pytest.mark.parametrize("shuffle_rows", [0, 100, 5000])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("part_bytes", [700, 1 << 20])
def test_a_stream_goes_on_behind_any_batch(files, shuffle_rows, rank, part_bytes):
    options = {"shuffle_rows": shuffle_rows, "epochs": 2, "rank": rank, "world": 2, "part_bytes": part_bytes}
    whole = list(stream(files, **options))
    for cut in (0, 1, 2, len(whole) // 2, len(whole) - 2, len(whole) - 1):
        rest = stream(files, **options)
        rest.restart(whole[cut].state)
        again = list(rest)
        assert all_labels(again) == all_labels(whole[cut + 1 :])
        if again:
            assert again[-1].state == whole[-1].state


@pytest.mark.parametrize("world", [2, 3, 7])
@pytest.mark.parametrize("part_bytes", [300, 1 << 20])
@pytest.mark.parametrize("shuffle_rows", [0, 64])
def test_ranks_share_out_all_samples(files, world, part_bytes, shuffle_rows):
    parts = [
        all_labels(stream(files, rank=r, world=world, part_bytes=part_bytes, shuffle_rows=shuffle_rows))
        for r in range(world)
    ]
    assert sorted(label for part in parts for label in part) == GOOD
    assert max(map(len, parts)) < 2 * len(GOOD) / world + 64


def together(streams, epoch, steps):
    """Takes batches as ranks that step together do, at most ``steps``; labels by epoch, states, and the epoch then."""
    sources = [iter(one) for one in streams]
    held, states, taken = [next(one, None) for one in sources], [one.state for one in streams], {}
    while steps and any(held):
        ready = [rank for rank, batch in enumerate(held) if batch is not None and batch.state["epoch"] == epoch]
        if not ready:
            epoch += 1
            continue
        steps -= 1
        for rank in ready:
            taken.setdefault(epoch, []).extend(all_labels([held[rank]]))
            states[rank] = json.loads(json.dumps(held[rank].state))
            held[rank] = next(sources[rank], None)
    return taken, states, epoch


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("part_bytes", [300, 1500, 1 << 20], ids=["small units", "units", "stripes"])
def test_every_sample_is_read_once_in_each_epoch_while_the_number_of_ranks_changes(files, part_bytes, seed):
    rng = random.Random(seed)
    options = {"part_bytes": part_bytes, "epochs": 3, "batch_size": rng.choice((7, 32)),
               "shuffle_rows": rng.choice((0, 40, 100))}  # fmt: skip
    read, states, epoch = {}, None, 0
    for _ in range(200):
        world = rng.randint(1, 5)
        streams = [stream(files, rank=rank, world=world, **options) for rank in range(world)]
        if states is not None:
            for one, state in zip(streams, [one.dealt(states) for one in streams], strict=True):
                one.restart(state)
        taken, states, epoch = together(streams, epoch, rng.choice((1, 4, 9)))
        if not taken:
            break
        for number, labels in taken.items():
            read.setdefault(number, []).extend(labels)
    assert {number: sorted(labels) for number, labels in read.items()} == dict.fromkeys(range(3), GOOD)
    assert sum(state["rows"] for state in states) == 3 * len(GOOD)


def test_what_nobody_has_begun_is_shared_out_evenly(files):
    old = [stream(files, rank=rank, world=4, part_bytes=300, shuffle_rows=32) for rank in range(4)]
    taken, states, _ = together(old, 0, 2)
    new = [stream(files, rank=rank, world=3, part_bytes=300, shuffle_rows=32) for rank in range(3)]
    for one, state in zip(new, [one.dealt(states) for one in new], strict=True):
        one.restart(state)
    shares = [len(all_labels(one)) for one in new]
    assert sum(shares) == len(GOOD) - len(taken[0])
    assert max(shares) < 1.3 * sum(shares) / 3


def test_bad_rows_are_told_and_may_stop_the_stream(files):
    told = []
    list(stream(files, on_bad=told.append))
    assert len(told) == 10
    assert str(told[0]).endswith("part-0.tsv, line 52: column 1 is the label and must be a number, got 'bad'")

    def stop(row):
        raise DataError(str(row))

    with Prefetch(stream(files, on_bad=stop)) as batches, pytest.raises(DataError, match="line 52"):
        list(batches)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_reading_ahead_changes_nothing_and_ends_its_thread(files, depth):
    before = set(threading.enumerate())
    with Prefetch(stream(files), depth) as batches:
        assert all_labels(batches) == GOOD
    with Prefetch(stream(files), depth) as batches:
        next(iter(batches))
    assert not any(thread.name == "shoal-read" for thread in set(threading.enumerate()) - before)


class Counting:
    """A format that counts its cursors."""

    def __init__(self, form):
        self.form, self.ragged, self.units = form, form.ragged, form.units
        self.opened, self.closed = 0, 0

    def open(self, unit, state, bad):
        cursor = self.form.open(unit, state, bad)
        self.opened += 1
        close = cursor.close

        def closing():
            self.closed += 1
            close()

        cursor.close = closing
        return cursor


def test_a_file_stays_open_from_window_to_window_and_is_closed_at_the_end_and_in_the_middle(files):
    form = Counting(make_format("tsv", SCHEMA))
    one = Stream([files], form, SCHEMA, batch_size=8, shuffle_rows=16, epochs=2)
    assert len(all_labels(one)) == 2 * 990
    assert (form.opened, form.closed) == (6, 6)  # there are many more windows than that
    batches = iter(one)
    next(batches)
    batches.close()
    assert (form.opened, form.closed) == (7, 7)


def test_files_of_nothing_give_no_batches(tmp_path):
    (tmp_path / "a.tsv").write_text("y\tu\n")
    (tmp_path / "b.tsv").write_text("")
    assert list(stream(str(tmp_path / "*.tsv"), epochs=3, shuffle_rows=10)) == []


def test_wrong_arguments_are_refused(files, tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        stream(str(tmp_path / "none-*"))
    with pytest.raises(ConfigError, match="batch_size must be at least 1, got 0"):
        stream(files, batch_size=0)
    with pytest.raises(ConfigError, match=r"rank must be 0..1, got 2"):
        stream(files, rank=2, world=2)
    with pytest.raises(DataError, match="missing: bad, batch"):
        stream(files).restart({"epoch": 0})


def test_bags_are_taken_joined_and_cut():
    def bags(*lists):
        lengths = torch.tensor([0, *(len(x) for x in lists)])
        ids = torch.tensor([i for x in lists for i in x], dtype=torch.int64)
        return Samples(label=torch.arange(len(lists) / 2), dense=torch.empty(len(lists) // 2, 0), ids=ids,
                       offsets=lengths.cumsum(0))  # fmt: skip

    one, two = bags([1, 2], [], [3], [4, 5]), bags([], [6])
    both = Samples.join([one, two])
    assert (both.ids.tolist(), both.offsets.tolist()) == ([1, 2, 3, 4, 5, 6], [0, 2, 2, 3, 5, 5, 6])
    taken = both.take(torch.tensor([2, 0, 2]))
    assert (taken.ids.tolist(), taken.offsets.tolist()) == ([6, 1, 2, 6], [0, 0, 1, 3, 3, 3, 4])
    part = both.part(1, 3)
    assert (part.ids.tolist(), part.offsets.tolist()) == ([3, 4, 5, 6], [0, 1, 3, 3, 4])


def test_generated_lines_are_criteo_lines_and_repeatable(tmp_path):
    path = tmp_path / "a.tsv.gz"
    write_criteo(path, CriteoLike(rows=20_000, seed=3))
    one = Stream([str(path)], make_format("criteo", CRITEO), CRITEO, batch_size=20_000)
    (batch,) = one
    assert one.bad_rows == 0
    assert 0.1 < float(batch.samples.label.mean()) < 0.4
    assert len(torch.unique(batch.samples.ids)) > 20_000
    assert b"".join(CriteoLike(rows=20_000, seed=3).chunks()) == b"".join(CriteoLike(rows=20_000, seed=3).chunks())
    assert next(CriteoLike(rows=10, seed=3).chunks()) != next(CriteoLike(rows=10, seed=3, first_row=20_000).chunks())
    with pytest.raises(ConfigError, match="must be >= 0, got -1"):
        CriteoLike(rows=-1)
