"""Streams read by the workers of a DataLoader: every sample once, for any number of files, workers and ranks."""

import json
import multiprocessing
import pickle

import pytest
from torch.utils.data import DataLoader, IterableDataset

from shoal.data import Schema, Stream, make_format
from shoal.errors import DataError

SCHEMA = Schema(label="y", sparse=("u",))
ROWS = list(range(300))
DEADLINE_S = 250
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than CPUs


@pytest.fixture
def folder(tmp_path):
    for number, (begin, end) in enumerate(((0, 120), (120, 121), (121, 220), (220, 300))):
        lines = [f"{i}\tu{i}" for i in range(begin, end)]
        (tmp_path / f"part-{number}.tsv").write_text("y\tu\n" + "\n".join(lines) + "\n")
    return tmp_path


def stream(folder, pattern="part-*.tsv", part_bytes=300, **options):
    form = make_format("tsv", SCHEMA, part_bytes=part_bytes)
    return Stream([str(folder / pattern)], form, SCHEMA, **{"batch_size": 8, **options})


def loader(one, workers, **options):
    timeout = DEADLINE_S if workers else 0
    return DataLoader(one, batch_size=None, num_workers=workers, timeout=timeout, **options)


def labels(batches):
    return [int(value) for batch in batches for value in batch.samples.label.tolist()]


def test_a_stream_is_an_iterable_dataset():
    assert issubclass(Stream, IterableDataset)


@pytest.mark.parametrize(("workers", "shuffle_rows"), [(0, 0), (1, 64), (2, 0), (3, 64)])
def test_workers_share_the_files_out(folder, workers, shuffle_rows):
    one = stream(folder, shuffle_rows=shuffle_rows, epochs=2)
    found = labels(loader(one, workers))
    assert sorted(found) == sorted(ROWS * 2)
    assert found == labels(loader(one, workers))  # in the same order every time


def test_fewer_files_than_workers(folder):
    one = stream(folder, "part-0.tsv", part_bytes=1 << 20)  # one unit, from which workers take batches in turn
    assert sorted(labels(loader(one, 3))) == ROWS[:120]
    two = stream(folder, "part-1.tsv")  # one line
    assert labels(loader(two, 3)) == [120]


def test_workers_of_ranks(folder):
    parts = [labels(loader(stream(folder, rank=rank, world=2, shuffle_rows=50), 2)) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == ROWS
    assert min(map(len, parts)) > 60


def test_workers_that_stay_read_everything_in_every_pass(folder):
    kept = loader(stream(folder), 2, persistent_workers=True)
    passes = [labels(kept) for _ in range(3)]
    assert [sorted(one) for one in passes] == [ROWS] * 3


def test_workers_that_are_not_forked(folder):
    one = pickle.loads(pickle.dumps(stream(folder, shuffle_rows=64)))
    assert labels(one) == labels(stream(folder, shuffle_rows=64))
    if "forkserver" in multiprocessing.get_all_start_methods():
        assert sorted(labels(loader(one, 1, multiprocessing_context="forkserver"))) == ROWS


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part_bytes", [300, 1 << 20], ids=["units", "stripes"])
def test_a_run_is_resumed_behind_any_batch_in_the_same_order(folder, part_bytes):
    options = {"shuffle_rows": 40, "epochs": 2, "part_bytes": part_bytes}
    one = stream(folder, **options)
    whole = list(one.through(loader(one, 2)))
    for cut in (1, 37, 50, len(whole)):
        other = stream(folder, **options)
        other.restart(json.loads(json.dumps(whole[cut - 1].state)))
        assert labels(other.through(loader(other, 2))) == labels(whole[cut:])
    assert whole[-1].state["rows"] == 600


@pytest.mark.parametrize(("before", "after", "shuffle_rows"), [(2, 3, 40), (3, 1, 0), (2, 0, 40), (0, 2, 40)])
def test_a_run_is_resumed_with_another_number_of_workers(folder, before, after, shuffle_rows):
    one = stream(folder, shuffle_rows=shuffle_rows)
    batches = one.through(loader(one, before))
    first = [next(batches) for _ in range(15)]
    batches.close()
    other = stream(folder, shuffle_rows=shuffle_rows)
    other.restart(json.loads(json.dumps(first[-1].state)))
    rest = list(other.through(loader(other, after)))
    assert sorted(labels(first) + labels(rest)) == ROWS
    again = stream(folder, shuffle_rows=shuffle_rows)
    again.restart(rest[3].state)  # resumed again, after a batch of a resumed run
    assert sorted(labels(again.through(loader(again, after)))) == sorted(labels(rest[4:]))


@pytest.mark.parametrize(("world", "workers"), [(2, 2), (3, 2), (1, 3)])
def test_a_run_is_resumed_by_other_ranks_and_workers(folder, world, workers):
    states, read = [], []
    for rank in range(2):
        one = stream(folder, rank=rank, world=2, shuffle_rows=40)
        batches = one.through(loader(one, 2))
        taken = [next(batches) for _ in range(5 * rank)]  # the first rank has not begun
        batches.close()
        read += labels(taken)
        states.append(taken[-1].state if taken else one.state)
    for rank in range(world):
        one = stream(folder, rank=rank, world=world, shuffle_rows=40)
        one.restart(one.dealt(states))
        read += labels(one.through(loader(one, workers)))
    assert sorted(read) == ROWS


def test_positions_that_cannot_be_resumed_from_say_why(folder):
    one = stream(folder, rank=0, world=2)
    alone = next(iter(loader(one, 2)))
    text = r"only that of worker 0 of 2; use the states of the batches of stream\.through"
    with pytest.raises(DataError, match=text):
        one.restart(alone.state)
    batch = next(one.through(loader(one, 2)))
    one.restart(batch.state)
    with pytest.raises(DataError, match="2 workers of rank 0, but there are 3 now"):
        list(one.through([*loader(one, 3)]))
