"""Growing directories of TFRecord and Parquet files: read when complete, resumed at any record, damage told once."""

import json
import os
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import Schema, make_format
from shoal.data.live import LiveStream, open_reader
from shoal.data.live.growing import GrowingReader
from shoal.errors import ConfigError
from tests.data.live.test_sources import take
from tests.data.test_records import frame, tf_example

SCHEMA = Schema(label="click", dense=("age",), sparse=("user",))
COLUMNS = ["click", "age", "user"]


def rows(first, last):
    return [{"click": i % 2, "age": float(i), "user": f"u{i}"} for i in range(first, last)]


def write_parquet(path, first, last, group=4, **more):
    """As a writer should: under a name that is not read, then renamed."""
    table = pa.Table.from_pylist(rows(first, last))
    for name, values in more.items():
        table = table.append_column(name, pa.array(values))
    pq.write_table(table, f"{path}.tmp", row_group_size=group)
    os.rename(f"{path}.tmp", path)


def example(click, age, user):
    return tf_example(click=[click], age=[age], user=[user.encode()])


def write_records(path, first, last):
    path.write_bytes(b"".join(frame(example(**one)) for one in rows(first, last)))


def parquet_reader(folder, positions=None, **more):
    return open_reader(f"dir:{folder}", positions, framing="parquet", columns=COLUMNS, **more)


def record_reader(folder, positions=None):
    return open_reader(f"dir:{folder}", positions, framing="records")


def decoded(records):
    return [json.loads(one) for one in records]


def test_rows_come_once_in_order_and_resume_at_any_row(tmp_path):
    write_parquet(tmp_path / "a.parquet", 0, 10)
    write_parquet(tmp_path / "b.parquet", 10, 13)
    reader = parquet_reader(tmp_path)
    records, positions = take(reader, 13)
    assert decoded(records) == rows(0, 13)
    assert reader.lag().records == 0
    for at in range(12):
        reader.open(positions[at])
        assert reader.positions() == positions[at]
        assert decoded(take(reader, 12 - at)[0]) == rows(at + 1, 13)
    write_parquet(tmp_path / "c.parquet", 13, 15)
    assert decoded(take(reader, 2)[0]) == rows(13, 15)
    reader.close()


def test_a_parquet_file_that_is_written_in_place_is_waited_for(tmp_path):
    write_parquet(tmp_path / "whole", 0, 6)
    content = (tmp_path / "whole").read_bytes()
    (tmp_path / "whole").unlink()
    reader = parquet_reader(tmp_path)
    for size in (4, len(content) // 2, len(content) - 1):
        (tmp_path / "a.parquet").write_bytes(content[:size])
        assert reader.poll(10, 0.0) == []
    (tmp_path / "a.parquet").write_bytes(content)
    assert decoded(take(reader, 6)[0]) == rows(0, 6)
    reader.close()


def test_what_is_no_parquet_file_when_the_next_one_is_there_is_told_once(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    write_parquet(tmp_path / "b.parquet", 0, 3)
    reader = parquet_reader(tmp_path)
    (chunk,) = reader.poll(10, 5.0)
    assert chunk.damaged == "the file is not a complete Parquet file"
    position = {chunk.partition: chunk.positions[0]}
    assert decoded(take(reader, 3)[0]) == rows(0, 3)
    reader.open(position)
    assert decoded(take(reader, 3)[0]) == rows(0, 3)
    reader.close()
    end = parquet_reader(tmp_path, {"files": ["b.parquet", 3]})
    assert end.poll(10, 0.0) == []
    end.close()
    late = open_reader(f"dir:{tmp_path}?from=end", framing="parquet", columns=COLUMNS)
    assert late.poll(10, 0.0) == []
    write_parquet(tmp_path / "c.parquet", 3, 5)
    assert decoded(take(late, 2)[0]) == rows(3, 5)
    late.close()


def test_a_parquet_file_with_two_columns_of_one_name_is_told_and_skipped(tmp_path):
    write_parquet(tmp_path / "a.parquet", 0, 2, age=["again"] * 2)
    write_parquet(tmp_path / "b.parquet", 2, 5)
    reader = parquet_reader(tmp_path)
    (chunk,) = reader.poll(10, 5.0)
    assert "column names must be unique, got 'age' 2 times" in chunk.damaged
    assert decoded(take(reader, 3)[0]) == rows(2, 5)
    reader.close()


def test_frames_of_a_file_that_grows_and_resume_at_any_record(tmp_path):
    write_records(tmp_path / "a.tfrecord", 0, 5)
    reader = record_reader(tmp_path)
    records, positions = take(reader, 5)
    assert records == [example(**one) for one in rows(0, 5)]
    more = frame(example(**rows(5, 6)[0]))
    with (tmp_path / "a.tfrecord").open("ab") as file:
        file.write(more[:7])
        file.flush()
        assert reader.poll(10, 0.0) == []
        file.write(more[7:])
    assert take(reader, 1)[0] == [example(**rows(5, 6)[0])]
    for at in range(5):
        reader.open(positions[at])
        assert take(reader, 5 - at)[0] == [example(**one) for one in rows(at + 1, 6)]
    reader.close()


def test_damaged_frames_are_told_once_and_the_next_file_is_read(tmp_path):
    first, second, third = (frame(example(**one)) for one in rows(0, 3))
    torn = bytearray(second)
    torn[-6] ^= 1  # in the part that the checksum covers
    (tmp_path / "a.tfrecord").write_bytes(first + bytes(torn) + third + b"not a frame at all, but long enough")
    write_records(tmp_path / "b.tfrecord", 3, 4)
    reader = record_reader(tmp_path)
    chunks = []
    while sum(map(len, chunks)) < 5:
        chunks += reader.poll(10, 5.0)
    assert [chunk.damaged.split(" (")[0] for chunk in chunks] == [
        "", "the record's checksum does not match", "", "the file is damaged", "",
    ]  # fmt: skip
    reader.open({"files": chunks[3].positions[0]})
    assert take(reader, 1)[0] == [example(**rows(3, 4)[0])]
    reader.close()


@pytest.mark.parametrize("kind", ["parquet", "tfrecord"])
def test_batches_resume_exactly_and_damage_is_a_dead_letter(tmp_path, kind):
    write = write_parquet if kind == "parquet" else write_records
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "a", 0, 10)
    (folder / "b").write_bytes(b"neither one nor the other")
    write(folder / "c", 10, 18)

    def stream():
        return LiveStream(
            [f"dir:{folder}"], make_format(kind, SCHEMA), SCHEMA, format_name=kind, batch_size=4, idle_s=0.2,
            dead_letters=str(tmp_path / "letters"),
        )  # fmt: skip

    one = stream()
    batches = [batch for batch in one if len(batch)]
    ages = [age for batch in batches for age in batch.samples.dense.view(-1).tolist()]
    assert ages == list(map(float, range(18)))
    assert one.bad_rows == 1
    one.close()
    (letter,) = map(json.loads, (tmp_path / "letters").read_text().splitlines())
    assert letter["position"][0] == "b"
    for at, batch in enumerate(batches[:-1]):
        again = stream()
        again.restart(batch.state)
        assert [age for rest in again if len(rest) for age in rest.samples.dense.view(-1).tolist()] == list(
            map(float, range(4 * at + 4, 18))
        )
        again.close()
    assert len((tmp_path / "letters").read_text().splitlines()) == 1


def test_a_read_that_took_too_long_does_not_end_a_stream_that_has_more(tmp_path, monkeypatch):
    """As when the machine had no time for this process: nothing is found, though the time is over."""
    write_records(tmp_path / "a", 0, 3)
    poll, stalls = GrowingReader.poll, [0.5]

    def stalled(self, most, timeout_s):
        if stalls:
            time.sleep(stalls.pop())
            return []
        return poll(self, most, timeout_s)

    monkeypatch.setattr(GrowingReader, "poll", stalled)
    stream = LiveStream(
        [f"dir:{tmp_path}"], make_format("tfrecord", SCHEMA), SCHEMA, format_name="tfrecord", batch_size=2, idle_s=0.4
    )
    assert sum(map(len, stream)) == 3
    stream.close()


def test_a_file_of_other_columns_or_types_is_bad_and_the_next_one_is_read(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(pa.table({"click": [1], "age": [3.0]}), folder / "a")
    pq.write_table(pa.table({"click": ["yes", "no"], "age": [3.0, 4.0], "user": ["x", "y"]}), folder / "b")
    write_parquet(folder / "c", 0, 2)
    stream = LiveStream(
        [f"dir:{folder}"], make_format("parquet", SCHEMA), SCHEMA, format_name="parquet", batch_size=2, idle_s=0.2,
        dead_letters=str(tmp_path / "letters"),
    )  # fmt: skip
    assert sum(map(len, stream)) == 2
    assert stream.bad_rows == 3
    stream.close()
    letters = [json.loads(line)["why"] for line in (tmp_path / "letters").read_text().splitlines()]
    assert "no column 'user'" in letters[0]
    assert "must be a number" in letters[1]


def test_parquet_is_of_directories_alone():
    with pytest.raises(ConfigError, match="growing directories"):
        LiveStream(["redis://localhost/x"], make_format("parquet", SCHEMA), SCHEMA, format_name="parquet", batch_size=2)
