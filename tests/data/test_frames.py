"""Frames and datasets as sources: each kind gives the same samples as a Parquet file with the same columns."""

import json

import pytest
from torch.utils.data import DataLoader

from shoal.data import Schema, Stream, make_format, stream_frames
from shoal.errors import ConfigError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
SCHEMA = Schema(label="click", dense=("age",), sparse=("user", "tags"), time="at")
N = 120
DATA = {
    "click": [i % 3 == 0 for i in range(N)],
    "age": [None if i % 10 == 9 else i / 2 for i in range(N)],
    "user": [f"u{i % 17}" for i in range(N)],
    "tags": [[f"t{j}" for j in range(i % 4)] for i in range(N)],
    "at": list(range(N)),
    "unused": ["x"] * N,
}


def polars_frame(data):
    return pytest.importorskip("polars").DataFrame(data)


def categories(data):
    pl = pytest.importorskip("polars")
    return pl.DataFrame(data).with_columns(pl.col("user").cast(pl.Categorical))


def lazy(data):
    return polars_frame(data).lazy()


def pandas_frame(data):
    return pytest.importorskip("pandas").DataFrame(data)


def dataset(data):
    return pytest.importorskip("datasets").Dataset.from_dict(data)


def chosen(data):
    """With rows that are told by their numbers, as after ``shuffle``."""
    return dataset({name: values[::-1] for name, values in data.items()}).select(range(len(data["at"]) - 1, -1, -1))


def iterable(data):
    return dataset(data).to_iterable_dataset(num_shards=3)


KINDS = [pa.table, polars_frame, categories, lazy, pandas_frame, dataset, chosen, iterable]


def sample_lists(batches):
    found = []
    for batch in batches:
        samples, features = batch.samples, len(SCHEMA.sparse)
        bags = [one.tolist() for one in samples.ids.tensor_split(samples.offsets[1:-1])]
        each = zip(samples.time.tolist(), samples.label.tolist(), samples.dense.view(-1).tolist(), strict=True)
        found += [(*one, bags[i * features : (i + 1) * features]) for i, one in enumerate(each)]
    return found


def stream(kind, **options):
    return stream_frames(kind(DATA), SCHEMA, **{"batch_size": 16, "lists": True, "part_rows": 50, **options})


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    path = tmp_path_factory.mktemp("parquet") / "a.parquet"
    parquet.write_table(pa.table(DATA), path)
    return sample_lists(Stream([str(path)], make_format("parquet", SCHEMA, lists=True), SCHEMA, batch_size=16))


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_a_parquet_file(kind, expected):
    assert len(expected) == N
    assert sample_lists(stream(kind)) == expected
    shuffled = sample_lists(stream(kind, shuffle_rows=40, epochs=2))
    assert shuffled != expected * 2
    assert sorted(shuffled) == sorted(expected * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_them_out_and_each_is_resumed_behind_any_batch(kind, expected):
    read = []
    for rank in range(2):
        options = {"rank": rank, "world": 2, "shuffle_rows": 32, "epochs": 2}
        whole = list(stream(kind, **options))
        read += sample_lists(whole)
        for cut in (1, 4, len(whole) - 1):
            rest = stream(kind, **options)
            rest.restart(json.loads(json.dumps(whole[cut - 1].state)))
            assert sample_lists(rest) == sample_lists(whole[cut:])
    assert sorted(read) == sorted(expected * 2)


@pytest.mark.parametrize("kind", [polars_frame, dataset, iterable])
def test_workers_share_them_out(kind, expected):
    one = stream(kind)
    assert sorted(sample_lists(DataLoader(one, batch_size=None, num_workers=2, timeout=250))) == sorted(expected)


def test_several_frames(expected):
    halves = [polars_frame(DATA)[:70], pandas_frame(DATA)[70:]]
    one = stream_frames(halves, SCHEMA, batch_size=16, lists=True)
    assert sample_lists(one) == expected
    assert one.files == ["frame 0 (polars.DataFrame)", "frame 1 (pandas.DataFrame)"]


def test_rows_that_cannot_be_read_are_told_of():
    bad = []
    broken = polars_frame({**DATA, "click": [None if i == 75 else 1 for i in range(N)]})
    one = stream_frames(broken, SCHEMA, batch_size=16, lists=True, part_rows=50, on_bad=bad.append)
    assert len(sample_lists(one)) == N - 1
    assert str(bad[0]).startswith("frame 0 (polars.DataFrame), row 76: the label 'click'")


def test_what_is_not_a_frame_says_what_may_be_given():
    with pytest.raises(ConfigError, match=r"a frame must be a Polars DataFrame.*got builtins\.dict"):
        stream_frames(DATA, SCHEMA, batch_size=1)
    splits = pytest.importorskip("datasets").DatasetDict({"train": dataset(DATA)})
    with pytest.raises(ConfigError, match=r"choose one of its splits, such as \['train'\]"):
        stream_frames(splits, SCHEMA, batch_size=1)
    for kind in (polars_frame, lazy, pandas_frame, dataset, iterable):
        with pytest.raises(ConfigError, match="'usr'"):
            stream_frames(kind(DATA), Schema(label="click", sparse=("usr",)), batch_size=1)
    with pytest.raises(ConfigError, match="there must be at least one frame"):
        stream_frames([], SCHEMA, batch_size=1)
