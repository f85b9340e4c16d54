"""The durable log by itself: what is written is read back, a torn end is cut, and losses are reported."""

import os
import random

import pytest

from shoal.errors import DataError
from shoal.sharded.ps.server.log import Log, log_files, replay


def records(directory, after=0):
    return [(n, h, bytes(i), bytes(v)) for n, h, i, v in replay(directory, after)]


def write(directory, count, seed=0):
    rng = random.Random(seed)
    log = Log(directory)
    expected = []
    for _ in range(count):
        frames = [rng.randbytes(rng.randrange(1, 90)), rng.randbytes(rng.randrange(0, 50)), rng.randbytes(7)]
        expected.append((log.append(frames), *frames))
        log.sync()
    log.close()
    return expected


def test_records_come_back_in_order(tmp_path):
    expected = write(tmp_path, 20)
    assert records(tmp_path) == expected
    assert records(tmp_path, after=12) == expected[12:]


def test_no_record_is_no_record(tmp_path):
    Log(tmp_path).close()
    assert records(tmp_path) == []
    assert records(tmp_path / "nothing") == []


def test_a_log_cut_at_any_byte_gives_the_records_before_the_cut(tmp_path):
    expected = write(tmp_path, 5)
    [(_, path)] = log_files(tmp_path)
    whole = path.read_bytes()
    ends = []
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        found = records(tmp_path)
        assert found == expected[: len(found)]
        ends.append(len(found))
        if size >= 16:
            assert path.stat().st_size <= size
            assert records(tmp_path) == found  # after the cut the file is complete
    assert ends[-1] == 5
    assert ends == sorted(ends)


def test_a_damaged_last_record_is_a_torn_tail(tmp_path):
    expected = write(tmp_path, 4)
    [(_, path)] = log_files(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert records(tmp_path) == expected[:3]


def test_damage_to_what_was_durable_is_refused_and_not_cut(tmp_path):
    write(tmp_path, 4)
    [(_, path)] = log_files(tmp_path)
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="record 1 at byte 16 is damaged"):
        records(tmp_path)
    assert path.read_bytes() == bytes(data)


def test_rotation_and_dropping_leave_no_gap(tmp_path):
    log = Log(tmp_path)
    for i in range(9):
        log.append([bytes([i]), b"", b""])
        if i % 3 == 2:
            log.rotate()
    log.close()
    assert [first for first, _ in log_files(tmp_path)] == [1, 4, 7, 10]
    assert [n for n, *_ in records(tmp_path)] == list(range(1, 10))
    log = Log(tmp_path, next_number=10)
    log.drop_before(5)
    log.close()
    assert [first for first, _ in log_files(tmp_path)] == [4, 7, 10]
    assert [n for n, *_ in records(tmp_path, after=5)] == [6, 7, 8, 9]
    with pytest.raises(DataError, match="starts at record 4"):
        records(tmp_path, after=1)
    os.unlink(log_files(tmp_path)[1][1])
    with pytest.raises(DataError, match="record 7 is missing"):
        records(tmp_path, after=5)


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path, monkeypatch):
    log = Log(tmp_path)
    log.append([b"one", b"", b""])
    real = os.pwritev

    def full(fd, parts, offset):
        real(fd, [memoryview(parts[0])[:5]], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space"):
        log.append([b"two", b"", b""])
    monkeypatch.undo()
    assert log.append([b"three", b"", b""]) == 2
    log.close()
    assert [h for _, h, _, _ in records(tmp_path)] == [b"one", b"three"]
