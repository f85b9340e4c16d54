"""The rules of every live source (add a new source to `place`), and the tests of each one."""

import gzip
import math
import os
import threading
import time
from contextlib import closing

import pytest

from shoal.data import Schema, make_format
from shoal.data.live import LiveStream, growing, is_live, open_reader, open_writer, parse_address
from shoal.data.live.protocol import Lag
from shoal.data.source import open_bytes
from shoal.errors import ConfigError, DataError, PeerError

LIMIT_S = 100


@pytest.fixture(params=["redis", "kafka", "dir"])
def place(request, tmp_path):
    """An address with one partition, and that partition's name for writers."""
    name = f"t{abs(hash(request.node.name)) % 10**9}"
    if request.param == "redis":
        return request.getfixturevalue("redis_server").address(name), name
    if request.param == "kafka":
        return request.getfixturevalue("mock_kafka").address(name) + "?partitions=2", "2"
    folder = tmp_path / name
    folder.mkdir()
    return f"dir:{folder}", None


def append(place, records, **options):
    with closing(open_writer(place[0])) as writer:
        writer.append(records, partition=place[1], **options)


def take(reader, count):
    """Exactly so many records, and their positions."""
    records, positions, deadline = [], [], time.monotonic() + LIMIT_S
    while len(records) < count and time.monotonic() < deadline:
        for chunk in reader.poll(count - len(records), 1.0):
            records += chunk.records
            positions += [{chunk.partition: one} for one in chunk.positions]
    assert len(records) == count
    return records, positions


def numbered(first, last):
    return [b'{"n": %d}' % i for i in range(first, last)]


# --- rules of every source --------------------------------------------------------------------------------------------


def test_records_come_once_in_order_and_a_position_continues_behind_its_record(place):
    append(place, numbered(0, 50))
    reader = open_reader(place[0])
    records, positions = take(reader, 20)
    assert records == numbered(0, 20)
    assert reader.positions() == positions[-1]
    there = reader.positions()
    assert take(reader, 30)[0] == numbered(20, 50)
    assert reader.poll(10, 0.0) == []
    reader.open(positions[4])
    assert take(reader, 45)[0] == numbered(5, 50)
    reader.close()
    other = open_reader(place[0], there)
    assert take(other, 30)[0] == numbered(20, 50)
    other.close()


def test_an_empty_source_gives_nothing_then_what_arrives(place):
    append(place, [b"first"])
    reader = open_reader(place[0] + ("&" if "?" in place[0] else "?") + "from=end")
    begun = time.monotonic()
    assert reader.poll(10, 0.3) == []
    assert time.monotonic() - begun < LIMIT_S
    assert reader.lag().records == 0
    assert not reader.ended
    positions = reader.positions()
    append(place, [b"second"])
    assert take(reader, 1)[0] == [b"second"]
    reader.open(positions)
    assert take(reader, 1)[0] == [b"second"]
    reader.acknowledge(reader.positions())
    reader.close()


def test_a_poll_ends_as_soon_as_there_is_something(place):
    append(place, [b"x"])
    reader = open_reader(place[0])
    take(reader, 1)
    later = threading.Timer(0.2, append, (place, [b"y"]))
    later.start()
    begun = time.monotonic()
    assert [list(chunk.records) for chunk in reader.poll(1000, LIMIT_S)] == [[b"y"]]
    assert time.monotonic() - begun < LIMIT_S / 2
    later.join()
    reader.close()


def test_a_writer_that_repeats_itself_by_number_stores_each_record_once(place):
    writer = open_writer(place[0])
    writer.append(numbered(0, 10), partition=place[1], at=0)
    writer.append(numbered(5, 20), partition=place[1], at=5)
    writer.append(numbered(5, 20), partition=place[1], at=5)
    assert writer.written(place[1]) == 20
    with pytest.raises(DataError, match="one writer"):
        writer.append(numbered(0, 3), partition=place[1], at=0)
    with pytest.raises(DataError, match="one writer"):
        writer.append(numbered(0, 3), partition=place[1], at=21)
    writer.append([], partition=place[1])
    writer.close()
    reader = open_reader(place[0])
    assert take(reader, 20)[0] == numbered(0, 20)
    reader.close()


def test_large_records_and_bytes_that_are_no_text(place):
    records = [b"\x00\xff\xfe" * 100_000, b"", b"\xf0\x9f\x90\x9f", b"a" * 900_000]
    append(place, records)
    reader = open_reader(place[0])
    assert take(reader, 4)[0] == records
    reader.close()


def test_a_position_of_another_kind_is_refused(place):
    append(place, [b"x"])
    reader = open_reader(place[0])
    partition = next(iter(reader.positions()))
    with pytest.raises(DataError, match="position must be"):
        reader.open({partition: {"no": 1}})
    reader.close()


# --- addresses --------------------------------------------------------------------------------------------------------


def test_addresses_hide_passwords_and_say_what_is_wrong():
    one = parse_address("redis://me:s3cret@h:7000/3/clicks?group=ctr")
    assert (str(one), one.user, one.password, one.db) == ("redis://h:7000/3/clicks", "me", "s3cret", 3)
    assert "s3cret" not in repr(one)
    assert str(parse_address("kafka://a,b:9093/t?security.protocol=SSL")) == "kafka://a:9092,b:9093/t"
    assert str(parse_address("-")) == "stdin:"
    assert [is_live(one) for one in ("-", "dir:x", "kafka://h/t", "days/*.csv", "C:/x.csv")] == [1, 1, 1, 0, 0]
    # As documented: a + stays a +, also if it is written as %2B.
    for text in ("2026-11-01T12:00:00+01:00", "2026-11-01T12:00:00%2B01:00"):
        assert parse_address(f"kafka://h/t?from={text}").options["from"] == "2026-11-01T12:00:00+01:00"
    for text, why in (
        ("redis://h:7000/", "redis://HOST:PORT/STREAM"),
        ("kafka://h/t?from=yesterday", "an offset, got 'yesterday'"),
        ("redis://u:pw@h/x?from=2026-13-01", "the id of the entry .* got '2026-13-01'"),
        ("redis://u:pw@h/x?group=", "NAME=VALUE, each once, got 'group='"),
        ("redis://h/x?group=a&group=b", "each once, got 'group=b'"),
        ("redis://h/x?maxlen=many", "maxlen must be a number >= 0, got 'many'"),
        ("redis://u:pw@h:70000/x", "HOST or HOST:PORT"),
        ("kafka://h/t?grop=1", "did you mean 'group'"),
        ("kafka://h/t?away_s=-1", "away_s must be"),
        ("redis://h/x?lost=maybe", "lost must be"),
        ("dir:", "dir:PATH"),
        ("http://x", "must begin with"),
    ):
        with pytest.raises(ConfigError, match=why) as error:
            parse_address(text)
        assert "pw" not in str(error.value)


# --- Redis ------------------------------------------------------------------------------------------------------------


def test_redis_that_is_killed_is_waited_for_and_nothing_is_lost(redis_server):
    place = redis_server.address("killed"), None
    append(place, numbered(0, 30))
    reader, writer = open_reader(place[0]), open_writer(place[0])
    take(reader, 10)
    redis_server.kill()
    assert reader.poll(10, 0.2) == []
    restart = threading.Timer(0.3, redis_server.start)
    restart.start()
    writer.append(numbered(25, 40), at=25)
    restart.join()
    assert take(reader, 30)[0] == numbered(10, 40)
    reader.close()
    writer.close()


def test_a_stream_does_not_end_while_redis_is_away(redis_server):
    place, schema = (redis_server.address("away"), None), Schema(label="click", sparse=("user",))
    append(place, [b'{"click": 1, "user": ["a"]}'] * 3)
    stream = LiveStream(
        [place[0]],
        make_format("json", schema),
        schema,
        format_name="json",
        batch_size=3,
        max_wait_s=math.inf,
        idle_s=0.3,
    )
    batches = iter(stream)
    try:
        assert len(next(batch for batch in batches if len(batch))) == 3
        redis_server.kill()
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            assert len(next(batches)) == 0  # it would have ended
        redis_server.start()
        append(place, [b'{"click": 0, "user": ["b"]}'] * 4)
        assert [len(batch) for batch in batches if len(batch)] == [3, 1]
    finally:
        stream.close()


def test_redis_that_stays_away_is_an_error_after_away_s(tmp_path):
    pytest.importorskip("redis")
    with pytest.raises(PeerError, match=r"did not answer for 0\.3 s"):
        open_reader("redis://127.0.0.1:1/x?away_s=0.3")


def test_redis_consumers_of_a_group_share_entries_and_acknowledged_ones_do_not_come_again(redis_server):
    place = redis_server.address("shared"), None
    append(place, numbered(0, 20))
    address = place[0] + "?group=ctr&consumer="
    a, b = open_reader(address + "a"), open_reader(address + "b")
    mine, positions = take(a, 8)
    theirs, _ = take(b, 12)
    assert sorted(mine + theirs) == sorted(numbered(0, 20))
    a.acknowledge(positions[2])
    a.close()  # as if it were killed: 3 of 8 were acknowledged, 5 are in its checkpoint
    again = open_reader(address + "a", positions[4])
    append(place, numbered(20, 22))
    assert take(again, 5)[0] == [*numbered(5, 8), *numbered(20, 22)]
    again.acknowledge(again.positions())
    again.close()
    last = open_reader(address + "a")
    assert last.poll(10, 0.0) == []
    last.close()
    b.close()


def test_redis_entries_that_were_trimmed_before_they_were_read_are_an_error_or_skipped_when_told(redis_server):
    redis = pytest.importorskip("redis")
    place = redis_server.address("trimmed"), None
    append(place, numbered(0, 10))
    reader = open_reader(place[0])
    _, positions = take(reader, 5)
    reader.close()
    client = redis.Redis(port=redis_server.port)
    client.xtrim("trimmed", maxlen=2, approximate=False)
    with pytest.raises(DataError, match=r"trimmed.*\n?.*add lost=skip"):
        open_reader(place[0], positions[-1])
    kept = open_reader(place[0] + "?lost=skip", positions[-1])
    assert take(kept, 2)[0] == numbered(8, 10)
    kept.close()
    client.set("text", "x")
    client.close()
    with pytest.raises(ConfigError, match="not a stream"):
        open_reader(redis_server.address("text"))
    with pytest.raises(ConfigError, match="from must be"):
        open_reader(place[0] + "?from=yesterday")
    with pytest.raises(ConfigError, match="group=NAME"):
        open_reader(place[0], world=2)


def test_redis_begins_at_a_time_and_takes_entries_of_several_fields_as_json(redis_server):
    redis = pytest.importorskip("redis")
    client = redis.Redis(port=redis_server.port)
    for at_ms in (1_000, 2_000, 3_000):
        client.xadd("timed", {"user": f"u{at_ms}", "click": 1}, id=f"{at_ms}-1")
    client.close()
    reader = open_reader(redis_server.address("timed") + "?from=1970-01-01T00:00:02")
    assert take(reader, 2)[0] == [b'{"user": "u2000", "click": "1"}', b'{"user": "u3000", "click": "1"}']
    assert reader.lag().records == 0
    reader.close()
    one = open_reader(redis_server.address("timed") + "?field=user&from=2000-1")
    assert take(one, 1)[0] == [b"u3000"]
    one.close()


# --- Kafka ------------------------------------------------------------------------------------------------------------


def test_kafka_partitions_are_shared_by_ranks_and_a_group_begins_where_it_committed(mock_kafka):
    address = mock_kafka.address("shared") + "?group=ctr"
    writer = open_writer(address)
    for partition in range(4):
        writer.append(numbered(partition * 10, partition * 10 + 10), partition=str(partition))
    assert writer.written() == 40
    writer.close()
    readers = [open_reader(address, rank=rank, world=2) for rank in range(2)]
    assert [sorted(one.positions()) for one in readers] == [["0", "2"], ["1", "3"]]
    got = [take(one, 20)[0] for one in readers]
    assert sorted(got[0] + got[1]) == sorted(numbered(0, 40))
    readers[0].acknowledge({"0": 7, "2": 4})
    for one in readers:
        one.close()
    again = open_reader(address)
    assert again.positions() == {"0": 7, "1": 0, "2": 4, "3": 0}
    assert again.lag().records == 29
    again.close()
    with pytest.raises(ConfigError, match="5 ranks"):
        open_reader(address, rank=0, world=5)
    with pytest.raises(ConfigError, match="partitions must be some of"):
        open_reader(address + "&partitions=9")


def test_kafka_begins_at_a_time(mock_kafka):
    """librdkafka's broker has no index of times and answers that nothing is that new, so records are searched."""
    import confluent_kafka

    producer = confluent_kafka.Producer({"bootstrap.servers": mock_kafka.bootstrap})
    first_ms = 1_790_000_000_000  # 2026-09-21T14:13:20Z
    for i in range(40):
        producer.produce("times", b"%d" % i, partition=0, timestamp=first_ms + i * 60_000)
        if i % 7 == 0:
            producer.flush(LIMIT_S)
    producer.flush(LIMIT_S)
    address = mock_kafka.address("times") + "?partitions=0&from="
    for text, expected in (
        ("2026-09-21", 0), ("2026-09-21T14:13:20Z", 0), ("2026-09-21T14:13:20.001Z", 1), ("2026-09-21T14:30:20", 17),
        ("2026-09-21T16:30:20+02:00", 17), ("2026-09-21T16:30:20%2B02:00", 17), ("2026-09-21T14:52:20", 39),
        ("2026-09-22", 40),
    ):  # fmt: skip
        reader = open_reader(address + text)
        assert reader.positions() == {"0": expected}, text
        if expected < 40:
            assert take(reader, 1)[0] == [b"%d" % expected]
        reader.close()
    reader = open_reader(mock_kafka.address("times") + "?partitions=0")
    with closing(confluent_kafka.Consumer(reader._settings | {"enable.partition.eof": True})) as consumer:
        assert reader._produced_ms(consumer, 0, 40) is None  # it does not wait for a record that does not exist
    reader.close()


def test_kafka_offsets_that_do_not_exist_are_an_error_or_skipped_when_told(mock_kafka):
    address = mock_kafka.address("gone") + "?partitions=0"
    append((address, "0"), numbered(0, 5))
    with pytest.raises(DataError, match=r"another topic; .*lost=skip"):
        open_reader(address, {"0": 99})
    reader = open_reader(address + "&lost=skip", {"0": 99})
    assert take(reader, 5)[0] == numbered(0, 5)
    reader.close()
    at = open_reader(address + "&from=3")
    assert take(at, 2)[0] == numbered(3, 5)
    at.close()
    with pytest.raises(ConfigError, match="from must be"):
        open_reader(address + "&from=soon")
    with pytest.raises(ConfigError, match=r"no\.such"):
        open_reader(address + "&no.such=1")


# --- directories and standard input -----------------------------------------------------------------------------------


def test_a_directory_is_read_in_the_order_of_names_and_a_line_without_end_is_waited_for(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"3\n4\n5")
    (tmp_path / "a.txt").write_bytes(b"1\n2")
    (tmp_path / ".hidden").write_bytes(b"no\n")
    (tmp_path / "c.tmp").write_bytes(b"no\n")
    reader = open_reader(f"dir:{tmp_path}")
    assert take(reader, 4)[0] == [b"1", b"2", b"3", b"4"]
    assert reader.poll(5, 0.0) == []
    position = reader.positions()
    with open(tmp_path / "b.txt", "ab") as file:
        file.write(b"5\n6")
    assert take(reader, 1)[0] == [b"55"]
    (tmp_path / "c.txt").write_bytes(b"7\n")
    assert take(reader, 2)[0] == [b"6", b"7"]
    assert reader.lag().records == 0
    (tmp_path / "aa.txt").write_bytes(b"late\n")
    reader.open(position)
    assert take(reader, 3)[0] == [b"55", b"6", b"7"]
    reader.close()
    with pytest.raises(ConfigError, match="no directory"):
        open_reader(f"dir:{tmp_path / 'none'}")


def test_a_file_that_is_deleted_just_before_it_is_opened_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"1\n")
    (tmp_path / "b.txt").write_bytes(b"2\n")

    def late(path):
        (tmp_path / "a.txt").unlink(missing_ok=True)
        return open_bytes(path)

    monkeypatch.setattr(growing, "open_bytes", late)
    reader = open_reader(f"dir:{tmp_path}")
    assert take(reader, 1)[0] == [b"2"]
    reader.close()


def test_gzip_that_is_still_written_is_read_as_it_grows(tmp_path):
    place, packed = f"dir:{tmp_path}", gzip.compress(b"".join(b"%d\n" % i for i in range(50_000)))
    (tmp_path / "a.gz").touch()
    with closing(open_reader(place)) as reader:
        assert reader.poll(10, 0.1) == []
        (tmp_path / "a.gz").write_bytes(packed[: len(packed) // 2])
        records, positions = take(reader, 1000)
        records += (rest := reader.poll(100_000, 1.0))[0].records
        while rest := reader.poll(100_000, 0.1):
            records += rest[0].records
        assert 1000 < len(records) < 50_000
        assert reader.lag().records is None
        with open(tmp_path / "a.gz", "ab") as file:
            file.write(packed[len(packed) // 2 :])
        records += take(reader, 50_000 - len(records))[0]
        assert records == [b"%d" % i for i in range(50_000)]
        assert reader.poll(1, 0.1) == []
        assert reader.lag() == Lag(0, 0.0)
        with gzip.open(tmp_path / "a.gz", "ab") as file:  # another member
            file.write(b"more\n")
        assert take(reader, 1)[0] == [b"more"]
    with closing(open_reader(place)) as again:
        again.open(positions[-1])
        assert take(again, 49_001)[0] == [*(b"%d" % i for i in range(1000, 50_000)), b"more"]
    with closing(open_reader(f"{place}?from=end")) as last:
        assert last.poll(1, 0.1) == []


@pytest.mark.parametrize("damage", ["ends early", "wrong checksum"])
def test_damaged_gzip_is_one_damaged_record_when_the_next_file_is_there(tmp_path, damage):
    packed = gzip.compress(b"".join(b"%d\n" % i for i in range(50_000)))
    (tmp_path / "a.gz").write_bytes(
        packed[:-8] + bytes(8) if damage == "wrong checksum" else packed[: len(packed) // 2]
    )
    with closing(open_reader(f"dir:{tmp_path}")) as reader:
        read = []
        while chunks := reader.poll(100_000, 0.1):
            read += chunks[0].records
        assert read == [b"%d" % i for i in range(len(read))]
        assert len(read) > 1000
        (tmp_path / "b").write_bytes(b"next\n")
        (chunk,) = reader.poll(10, LIMIT_S)
        assert "its rest is skipped" in chunk.damaged
        assert take(reader, 1)[0] == [b"next"]


def test_a_line_that_a_killed_writer_left_half_written_is_removed(tmp_path):
    append((f"dir:{tmp_path}", None), [b"1", b"2"])
    with open(tmp_path / "part-00000000.txt", "ab") as file:
        file.write(b"torn")
    append((f"dir:{tmp_path}", None), [b"2", b"3"], at=1)
    assert (tmp_path / "part-00000000.txt").read_bytes() == b"1\n2\n3\n"
    with pytest.raises(ConfigError, match="newline"):
        append((f"dir:{tmp_path}", None), [b"a\nb"])


def test_a_folder_with_files_of_others_is_not_written_to(tmp_path):
    (tmp_path / "clicks.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"got 'clicks.jsonl'; name an empty folder"):
        open_writer(f"dir:{tmp_path}")


def test_standard_input_ends_and_a_file_behind_it_is_read_from_a_position(tmp_path):
    from shoal.data.live.standard_input import StdinReader

    ours, theirs = os.pipe()
    reader = StdinReader(ours)
    assert reader.poll(5, 0.0) == []
    os.write(theirs, b"1\n2\n3")
    assert take(reader, 2)[0] == [b"1", b"2"]
    os.close(theirs)
    assert take(reader, 1)[0] == [b"3"]
    assert reader.poll(1, 0.1) == []
    assert reader.ended
    os.close(ours)
    (tmp_path / "x").write_bytes(b"1\n2\n3\n")
    with open(tmp_path / "x", "rb") as file:
        again = StdinReader(file.fileno())
        again.open({"stdin": 2})
        assert take(again, 2)[0] == [b"2", b"3"]
