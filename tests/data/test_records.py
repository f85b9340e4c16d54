"""Files of records: tf.Example without TensorFlow, Example and ExampleBatch messages, and damaged frames."""

import gzip
import struct
from contextlib import closing

import pytest
import torch

from shoal import _core
from shoal.data import Schema, make_format, text_fid
from shoal.errors import ConfigError
from shoal.fid import make_v2
from shoal.proto.example_pb2 import Example, ExampleBatch, FeatureListType
from tests.data.helpers import labels, read_all

SCHEMA = Schema(label="y", dense=("a",), sparse=("u", "v"))


def varint(value):
    value &= (1 << 64) - 1
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number, payload):
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def feature(value):
    """A tf.Feature of texts, floats or integers, as TensorFlow writes it."""
    if isinstance(value[0], bytes):
        return field(1, b"".join(field(1, text) for text in value))
    if isinstance(value[0], float):
        return field(2, field(1, struct.pack(f"<{len(value)}f", *value)))
    return field(3, field(1, b"".join(map(varint, value))))


def tf_example(**features):
    entries = (field(1, field(1, name.encode()) + field(2, feature(v))) for name, v in features.items())
    return field(1, b"".join(entries))


def frame(payload):
    def crc(data):
        value = _core.crc32c(data)
        return struct.pack("<I", (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF)

    head = struct.pack("<Q", len(payload))
    return head + crc(head) + payload + crc(payload)


GOOD = tf_example(y=[1.0], a=[2.5], u=[b"x", b"yy"], v=[7], other=[b"?"])


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_tf_examples_are_read_by_name(tmp_path, pack):
    path = tmp_path / "a.tfrecord"
    second = tf_example(y=[0], a=[3], v=[-1])
    path.write_bytes(pack(frame(GOOD) + frame(second)))
    (part,), bad = read_all(make_format("tfrecord", SCHEMA), path)
    assert not bad
    assert part.label.tolist() == [1, 0]
    assert part.dense.tolist() == [[2.5], [3.0]]
    assert part.ids.tolist() == [text_fid("x", 1), text_fid("yy", 1), text_fid("7", 2), text_fid("-1", 2)]
    assert part.offsets.tolist() == [0, 2, 3, 3, 4]


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (tf_example(a=[1.0]), "it has no label 'y'"),
        (tf_example(y=[b"1"]), "'y' must be a finite number"),
        (tf_example(y=[float("nan")]), "'y' must be a finite number"),
        (tf_example(y=[1.0], u=[1.0]), "'u' must hold ids, got floats"),
        (GOOD[:-3], "cut off"),
        (b"\x0b\x0b", "not a tf.Example"),
        (b"\x08" + b"\xff" * 11, "more than 64 bits"),
    ],
)
def test_a_bad_example_is_left_out_and_told_with_its_number(tmp_path, payload, why):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(frame(GOOD) + frame(payload) + frame(GOOD))
    parts, bad = read_all(make_format("tfrecord", SCHEMA), path)
    assert labels(parts) == [1, 1]
    assert bad[0].where() == f"{path}, record 2"
    assert why in bad[0].why


def test_a_damaged_payload_costs_one_record_and_a_damaged_header_the_rest(tmp_path):
    path = tmp_path / "a.tfrecord"
    one = frame(GOOD)
    flipped = bytearray(one * 5)
    flipped[len(one) + 20] ^= 1
    path.write_bytes(bytes(flipped))
    parts, bad = read_all(make_format("tfrecord", SCHEMA), path)
    assert len(labels(parts)) == 4
    assert ["checksum" in row.why for row in bad] == [True]
    flipped[2 * len(one) + 1] ^= 1
    path.write_bytes(bytes(flipped))
    parts, bad = read_all(make_format("tfrecord", SCHEMA), path)
    assert len(labels(parts)) == 1
    assert bad[-1].rest
    path.write_bytes(one * 3 + one[:-1])
    parts, bad = read_all(make_format("tfrecord", SCHEMA), path)
    assert len(labels(parts)) == 3
    assert "ends inside a record" in bad[0].why


def example(label, **ids):
    message = Example()
    for name, values in {"y": [] if label is None else [label], **ids}.items():
        one = message.named_feature.add(name=name)
        one.feature.fid_v2_list.value.extend(make_v2(9, value) for value in values)
    return message.SerializeToString()


IDS = Schema(label="y", sparse=("u", "v"))


def test_example_records_bring_their_ids(tmp_path):
    path = tmp_path / "a.records"
    path.write_bytes(frame(example(1, u=[3, 4], v=[5])) + frame(example(0, v=[6])) + frame(example(None, u=[1])))
    (part,), bad = read_all(make_format("example", IDS), path)
    assert part.label.tolist() == [1, 0]
    assert part.ids.tolist() == [make_v2(9, i) for i in (3, 4, 5, 6)]
    assert part.offsets.tolist() == [0, 2, 3, 3, 4]
    assert "no label 'y'" in bad[0].why
    path.write_bytes(frame(example(1, u=[3])) + frame(b"\x0a\xff") + frame(example(0, u=[3])))
    parts, bad = read_all(make_format("example", IDS), path)
    assert (labels(parts), len(bad)) == ([1, 0], 1)
    assert bad[0].where().endswith("record 2")


def example_batch(begin, size):
    message = ExampleBatch(batch_size=size)
    label = message.named_feature_list.add(name="y")
    u = message.named_feature_list.add(name="u")
    for i in range(begin, begin + size):
        label.feature.add().fid_v2_list.value.append(i)
        u.feature.add().fid_v2_list.value.extend([i, i + 1])
    shared = message.named_feature_list.add(name="v", type=FeatureListType.SHARED)
    shared.feature.add().fid_v2_list.value.append(77)
    return message.SerializeToString()


def test_example_batches_are_read_a_few_rows_at_a_time_and_resume_inside_a_batch(tmp_path):
    path = tmp_path / "a.records"
    path.write_bytes(frame(example_batch(0, 10)) + frame(example_batch(10, 5)))
    form = make_format("example_batch", IDS)
    (unit,) = form.units(str(path))
    with closing(form.open(unit, None, pytest.fail)) as cursor:
        assert cursor.read(4).label.tolist() == [0, 1, 2, 3]
        state = cursor.state()
    seen = []
    with closing(form.open(unit, state, pytest.fail)) as rest:
        while (part := rest.read(4)) is not None:
            seen += part.label.tolist()
            assert part.ids[2::3].tolist() == [77] * len(part)
    assert seen == list(range(4, 15))


def test_example_records_hold_no_numbers():
    with pytest.raises(ConfigError, match="ids and no numbers, but dense names a"):
        make_format("example", SCHEMA)


def test_a_resumed_cursor_reads_the_same_as_one_that_was_not(tmp_path):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(b"".join(frame(tf_example(y=[float(i)], u=[i])) for i in range(100)))
    form = make_format("tfrecord", Schema(label="y", sparse=("u",)))
    (unit,) = form.units(str(path))
    with closing(form.open(unit, None, pytest.fail)) as cursor:
        cursor.read(33)
        with closing(form.open(unit, cursor.state(), pytest.fail)) as again:
            assert torch.equal(again.read(10).label, torch.arange(33.0, 43.0))


def test_records_without_a_time_that_rows_can_have_are_bad(tmp_path):
    path = tmp_path / "a.records"
    timed = Schema(label="y", sparse=("u",), time="t")
    records = [tf_example(y=[1], t=[5]), tf_example(y=[1]), tf_example(y=[1], t=[2**32]), tf_example(y=[0], t=[7])]
    path.write_bytes(b"".join(map(frame, records)))
    parts, bad = read_all(make_format("tfrecord", timed), path)
    assert [time for part in parts for time in part.time.tolist()] == [5, 7]
    assert [(row.line, "time" in row.why) for row in bad] == [(2, True), (3, True)]
    records = [example(1, t=[5]), example(1), example(1, t=[2**32]), example(None), example(0, t=[2**32 - 1])]
    path.write_bytes(b"".join(map(frame, records)))
    parts, bad = read_all(make_format("example", timed), path)
    assert [time for part in parts for time in part.time.tolist()] == [5, 2**32 - 1]
    assert [row.line for row in bad] == [2, 3, 4]
    for row, why in zip(bad, ("no time 't'", "seconds since 1970, 0..4294967295", "no label 'y'"), strict=True):
        assert why in row.why
