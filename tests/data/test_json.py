"""Lines of JSON: values by name, lists, bad objects, parts of files, and the same ids as from CSV."""

import json

import pytest

from shoal.data import Feature, Number, Samples, Schema, Stream, make_format
from shoal.data.live.messages import decoder
from shoal.errors import ConfigError
from tests.data.helpers import labels, read_all

SCHEMA = Schema(label="click", dense=("price",), sparse=("user", "item"), time="at")


def write(path, lines):
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return str(path)


def test_json_gives_the_samples_that_csv_gives(tmp_path):
    rows = [{"click": i % 2, "price": i / 2, "user": f"ü{i}", "item": i * 7, "at": 100 + i} for i in range(40)]
    rows[3] |= {"price": None, "click": True}
    rows[4] |= {"other": {"deep": [1, "}", {"x": []}]}, "item": "28"}
    ours = make_format("json", SCHEMA)
    parts, bad = read_all(ours, write(tmp_path / "x.json", rows))
    text = [
        f"{int(r['click'])},{'' if r['price'] is None else r['price']},{r['user']},{r['item']},{r['at']}" for r in rows
    ]
    (tmp_path / "x.csv").write_text("\n".join(["click,price,user,item,at", *text]))
    theirs, _ = read_all(make_format("csv", SCHEMA), tmp_path / "x.csv")
    assert bad == []
    for name in ("label", "dense", "ids", "time"):
        assert getattr(Samples.join(parts), name).tolist() == getattr(Samples.join(theirs), name).tolist()


def test_an_object_without_a_time_is_bad():
    form = make_format("json", Schema(label="y", sparse=("u",), time="at"))
    samples, bad = form.decode([b'{"y":1,"at":5}', b'{"y":1}', b'{"y":1,"at":[]}', b'{"y":1,"at":null}'])
    assert samples.time.tolist() == [5]
    assert [number for number, _ in bad] == [1, 2, 3]
    assert "no time 'at'" in bad[0][1]


def test_lists_texts_with_escapes_and_missing_values():
    schema = Schema(
        label="y", dense=("a",), sparse=("tags", "user"),
        definitions={"tags": Feature(list=True), "a": Number(default=7.0)},
    )  # fmt: skip
    form = make_format("json", schema)
    samples, bad = form.decode(
        [b'{"y": "1", "tags": ["\\u00fc\\ud83d\\udc1f", "b\\n"], "user": "\\"x"}',
         b' {"y":0,"tags":[],"user":null,"a":2} ',
         b'{"y": 0.5, "tags": "one", "user": 3, "a": "", "tags": ["two", "two"]}']
    )  # fmt: skip
    assert bad == []
    assert samples.offsets.tolist() == [0, 2, 3, 3, 4, 6, 7]
    assert samples.dense.view(-1).tolist() == [7, 2, 7]
    plain, _ = make_format("json", Schema(label="y", sparse=("t", "u"))).decode(
        ['{"y":1,"t":"üb","u":"\\"x"}'.encode()]
    )
    other, _ = make_format("json", Schema(label="y", sparse=("t", "u"))).decode([b'{"y":1,"t":"\\u00fcb","u":"\\"x"}'])
    assert plain.ids.tolist() == other.ids.tolist()
    assert form.decode([])[0].offsets.tolist() == [0]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"", "must have '{'"),
        (b"[1]", "must have '{'"),
        (b'{"click": 1', "must have '}'"),
        (b'{"click": 1} x', "has text after its end"),
        (b'{"user": "a"}', "has no label 'click'"),
        (b'{"click": "many"}', "is the label"),
        (b'{"click": null}', "is the label and must be a number, got 'null'"),
        (b'{"click": [1]}', "is the label and must be a number, got a list"),
        (b'{"click": 1, "price": [2]}', "must be a finite number, got a list"),
        (b'{"click": 1, "user": {"x": 1}}', "got an object"),
        (b'{"click": 1, "user": ["a", "b"]}', "feature 'user'"),
        (b'{"click": 1, "user": 1.5}', "whole number"),
        (b'{"click": 1, "price": "dear"}', "finite number"),
        (b'{"click": 1, "price": NaN}', "not JSON"),
        (b'{"click": 1, "at": -1}', "seconds since 1970"),
        (b'{"click": 1, "user": "\\ud83d"}', "surrogate"),
        (b'{"click": 1, "x": ' + b"[" * 300, "nested"),
        (b'{"click": 1, "user": "a', "ends inside a text"),
        (b"\xff\xfe\x00", "must have '{'"),
    ],
)  # fmt: skip
def test_a_bad_object_is_left_out_and_told_with_its_line(tmp_path, line, why):
    good = {"click": 1, "price": 1, "user": "u", "item": 1, "at": 1}
    samples, bad = make_format("json", SCHEMA).decode([json.dumps(good).encode(), line])
    assert len(samples) == 1
    assert [number for number, _ in bad] == [1]
    assert why in bad[0][1]
    if line.strip() and b"\x00" not in line:
        path = write(tmp_path / "x.json", [good, line, good])
        parts, told = read_all(make_format("json", SCHEMA), path)
        assert (labels(parts), [one.line for one in told]) == ([1, 1], [2])


def test_pieces_of_a_file_and_a_resumed_reader_give_every_line_once(tmp_path):
    path = write(tmp_path / "x.json", [{"click": 0, "price": i, "user": "u" * (i % 9), "item": 1} for i in range(100)])
    schema = Schema(label="click", dense=("price",), sparse=("user", "item"))
    form = make_format("json", schema, part_bytes=333)
    parts, bad = read_all(form, path, rows=3)
    assert (sorted(sum((one.dense.view(-1).tolist() for one in parts), [])), bad) == (list(range(100)), [])  # noqa: RUF017
    stream = Stream([path], form, schema, batch_size=7)
    batches = list(stream)
    again = Stream([path], form, schema, batch_size=7)
    again.restart(batches[4].state)
    assert [one.samples.dense.tolist() for one in again] == [one.samples.dense.tolist() for one in batches[5:]]


def test_text_messages_are_lines_and_one_that_is_not_spoils_no_other():
    schema = Schema(label="y", sparse=("u",))
    form = make_format("csv", schema, columns=["y", "u"])
    decode = decoder(form, "csv")
    samples, bad = decode([b"1,a", b"0,b"])
    assert (samples.label.tolist(), bad) == ([1, 0], [])
    samples, bad = decode([b"1,a", b'0,"b', b"", b"1,c\n1,d", b"x,e", b"0,f"])
    assert samples.label.tolist() == [1, 0]
    assert [number for number, _ in bad] == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match="columns"):
        decoder(make_format("csv", schema), "csv")
