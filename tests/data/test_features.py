"""Definitions of features: the same ids from every kind of file and from raw values."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shoal import _core
from shoal.data import Feature, Number, Schema, Stream, make_format, make_inputs, text_fid
from shoal.data.features import definition, to_json
from shoal.errors import ConfigError

MASK = (1 << 64) - 1
ODD = 0x9E3779B97F4A7C15


def mix(x):
    for _ in range(2):
        x ^= x >> 32
        x = x * 0xD6E8FEB86659FD93 & MASK
    return x ^ x >> 32


def reference_fid(text, slot):
    """The hash as docs/features.md describes it."""
    data = text.encode()
    state = (len(data) + 1) * ODD & MASK
    while len(data) > 8:
        state = (mix(state ^ int.from_bytes(data[:8], "little")) + ODD) & MASK
        data = data[8:]
    return slot << 48 | mix(state ^ int.from_bytes(data, "little")) & (1 << 48) - 1


def reference_cross(ids, slot):
    state = (len(ids) + 1) * ODD & MASK
    for one in ids:
        state = (mix(state ^ one & MASK) + ODD) & MASK
    return slot << 48 | mix(state) & (1 << 48) - 1


@pytest.mark.parametrize("text", ["", "a", "68fd1e64", "123456789", "é" * 9, "x" * 1000])
def test_the_text_hash_is_what_the_docs_say(text):
    assert text_fid(text, 5) == reference_fid(text, 5)


def test_the_docs_have_test_vectors_that_hold():
    page = (Path(__file__).parents[2] / "docs" / "features.md").read_text()
    vectors = re.findall(r"^\| `(.*?)` \| (\d+) \| (-?\d+) \|$", page, re.MULTILINE)
    assert len(vectors) >= 5
    for text, slot, want in vectors:
        assert text_fid(text, int(slot)) == int(want) == reference_fid(text, int(slot))
    (cross,) = re.findall(r"cross of ids (\d+) and (\d+) in slot (\d+) is (\d+)", page)
    first, second, slot, want = map(int, cross)
    assert _core.cross_fid([first, second], slot) == reference_cross([first, second], slot) == want


SCHEMA = Schema(
    label="click",
    dense=("price", "plain"),
    sparse=("user", "age_group", "size", "country", "tags", "user_x_country", "user_x_tags"),
    definitions={
        "user": Feature(),
        "price": Number(log=True, default=3.0, low=0.0, high=100.0, mean=1.0, std=2.0),
        "age_group": Feature(kind="bucket", column="age", boundaries=(18, 25, 65), default=30),
        "size": Feature(kind="log", steps=4),
        "country": Feature(kind="vocabulary", words=("de", "fr", "us"), default="us"),
        "tags": Feature(separator="|", max_length=3),
        "user_x_country": Feature(kind="cross", of=("user", "country")),
        "user_x_tags": Feature(kind="cross", of=("user", "tags"), max_length=2),
    },
)
RAW = {
    "click": [1, 0, 1, 0],
    "price": [10.5, None, 1e6, 0.0],
    "plain": [1.0, 2.0, None, -4.5],
    "user": ["u1", "", "u3", "u1"],
    "age": [17, 18, None, 99],
    "size": [0.0, 1.0, 1000.0, None],
    "country": ["de", "xx", None, "us"],
    "tags": ["a|b", "", "a|b|c|d", None],
}


def n(value, slot):
    return text_fid(str(value), slot)


def want_rows():
    users = [n("u1", 1), n("", 1), n("u3", 1), n("u1", 1)]
    ages = [n(0, 2), n(1, 2), n(2, 2), n(3, 2)]
    sizes = [n(0, 3), n(4, 3), n(int(4 * math.log2(1001)), 3), n("", 3)]
    countries = [n(0, 4), n(3, 4), n(2, 4), n(2, 4)]
    tags = [[n("a", 5), n("b", 5)], [], [n("a", 5), n("b", 5), n("c", 5)], []]
    out = []
    for i in range(4):
        crossed = [reference_cross([users[i], countries[i]], 6)]
        listed = [reference_cross([users[i], tag], 7) for tag in tags[i][:2]]
        out.append([[users[i]], [ages[i]], [sizes[i]], [countries[i]], tags[i], crossed, listed])
    return out


def rows_of(ids, offsets, features):
    bags = [ids[a:b].tolist() for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    return [bags[i : i + features] for i in range(0, len(bags), features)]


def want_dense():
    price = [math.log1p(10.5), math.log1p(3), math.log1p(100), 0]
    return torch.tensor([[(p - 1) / 2, x] for p, x in zip(price, [1.0, 2.0, 0.0, -4.5], strict=True)])


def read(path, name, schema=SCHEMA, **options):
    bad = []
    stream = Stream([str(path)], make_format(name, schema, **options), schema, batch_size=100, on_bad=bad.append)
    batches = [batch.samples for batch in stream]
    return batches[0] if batches else None, bad


def write_csv(path):
    names = list(RAW)
    cell = lambda value: "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)  # noqa: E731
    lines = [",".join(names)] + [",".join(cell(RAW[name][i]) for name in names) for i in range(4)]
    path.write_text("\n".join(lines) + "\n")


def test_a_csv_file_gives_what_the_definitions_say(tmp_path):
    write_csv(tmp_path / "a.csv")
    samples, bad = read(tmp_path / "a.csv", "csv")
    assert not bad
    assert rows_of(samples.ids, samples.offsets, 7) == want_rows()
    torch.testing.assert_close(samples.dense, want_dense())


def test_raw_values_give_what_the_reader_gives_to_the_last_bit(tmp_path):
    write_csv(tmp_path / "a.csv")
    samples, _ = read(tmp_path / "a.csv", "csv")
    made = make_inputs(SCHEMA, RAW)
    assert torch.equal(made.ids, samples.ids)
    assert torch.equal(made.offsets, samples.offsets)
    assert torch.equal(made.dense, samples.dense)
    lists = {**RAW, "tags": [["a", "b"], [], ("a", "b", "c", "d"), None]}
    assert torch.equal(make_inputs(SCHEMA, lists).ids, samples.ids)


@pytest.mark.parametrize("dictionary", [False, True])
def test_a_parquet_file_gives_the_same(tmp_path, dictionary):
    table = pa.table(RAW)
    if dictionary:
        for name in ("user", "country"):
            column = table.column(name).combine_chunks().dictionary_encode()
            table = table.set_column(table.schema.get_field_index(name), name, column)
    pq.write_table(table, tmp_path / "a.parquet")
    samples, bad = read(tmp_path / "a.parquet", "parquet")
    assert not bad
    rows = want_rows()
    assert rows_of(samples.ids, samples.offsets, 7) == rows
    torch.testing.assert_close(samples.dense, want_dense())


def test_tf_examples_give_the_same(tmp_path):
    from tests.data.test_records import frame, tf_example

    rows = []
    for i in range(4):
        row = {name: RAW[name][i] for name in RAW if RAW[name][i] not in (None, "")}
        row = {name: value.encode() if isinstance(value, str) else value for name, value in row.items()}
        rows.append({name: value.split(b"|") if name == "tags" else [value] for name, value in row.items()})
    (tmp_path / "a.tfrecord").write_bytes(b"".join(frame(tf_example(**row)) for row in rows))
    samples, bad = read(tmp_path / "a.tfrecord", "tfrecord")
    assert not bad
    assert rows_of(samples.ids, samples.offsets, 7) == want_rows()
    torch.testing.assert_close(samples.dense, want_dense())


def test_features_that_have_one_id_stay_a_matrix():
    schema = Schema(
        label="y",
        sparse=("user", "ad", "both"),
        definitions={"both": Feature(kind="cross", of=("user", "ad"))},
    )
    made = make_inputs(schema, {"user": ["a", "b"], "ad": [7, 8]})
    assert made.offsets is None
    assert made.ids.tolist() == [
        [n("a", 1), n(7, 2), reference_cross([n("a", 1), n(7, 2)], 3)],
        [n("b", 1), n(8, 2), reference_cross([n("b", 1), n(8, 2)], 3)],
    ]


def test_missing_columns_count_as_missing_values():
    schema = Schema(label="y", dense=("x",), sparse=("user", "ad"), definitions={"ad": Feature(default="none")})
    made = make_inputs(schema, {"user": ["a"]})
    assert made.ids.tolist() == [[n("a", 1), n("none", 2)]]
    assert made.dense.tolist() == [[0.0]]
    assert make_inputs(schema, {"user": []}).ids.shape == (0, 2)
    assert make_inputs(schema, {}).ids.shape == (0, 2)


def test_unknown_words_are_hashed_shared_or_dropped():
    for unknown, want in (("hash", [n(0, 1), n("new", 1)]), ("one", [n(0, 1), n(2, 1)]), ("drop", [n(0, 1)])):
        feature = Feature(kind="vocabulary", words=("old", "b"), unknown=unknown, list=True)
        schema = Schema(label="y", sparse=("w",), definitions={"w": feature})
        assert make_inputs(schema, {"w": [["old", "new"]]}).ids.tolist() == want


def test_slots_and_ids_are_as_given():
    schema = Schema(
        label="y", sparse=("a", "b", "raw"), definitions={"b": Feature(slot=1), "raw": Feature(kind="id", default=-1)}
    )
    made = make_inputs(schema, {"a": ["x"], "b": ["x"], "raw": [1 << 60]})
    assert made.ids.tolist() == [[n("x", 1), n("x", 1), 1 << 60]]
    assert make_inputs(schema, {"a": ["x"], "b": ["x"], "raw": [None]}).ids[0, 2] == -1


def test_a_schema_survives_json():
    again = Schema.from_json(json.loads(json.dumps(SCHEMA.to_json())))
    assert again == SCHEMA
    assert torch.equal(make_inputs(again, RAW).ids, make_inputs(SCHEMA, RAW).ids)


def test_a_definition_is_read_from_a_section(tmp_path):
    (tmp_path / "words.txt").write_text("de\nfr\n")
    feature = definition("country", {"kind": "vocabulary", "file": str(tmp_path / "words.txt")})
    assert feature == Feature(kind="vocabulary", words=("de", "fr"))
    assert definition("country", to_json(feature)) == feature
    assert definition("price", {"kind": "number", "log": True}) == Number(log=True)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"kind": "txt"}, "did you mean 'text'"),
        ({"kind": "nmber"}, "kind must be one of text, id, .*, cross, number, got 'nmber' .did you mean 'number'"),
        ({"fil": "words.txt"}, "has no setting 'fil' .did you mean 'file'"),
        ({"boundries": [1]}, "did you mean 'boundaries'"),
        ({"kind": "bucket"}, "boundaries must be given"),
        ({"kind": "bucket", "boundaries": [2, 1]}, "must be finite numbers in ascending order"),
        ({"kind": "cross", "of": ["a"]}, "at least two"),
        ({"kind": "vocabulary", "words": ["a", "a"]}, "'a' twice"),
        ({"kind": "vocabulary", "file": "nowhere.txt"}, "cannot be read"),
        ({"kind": "number", "std": 0}, "std above 0"),
        ({"kind": "number", "low": 1, "high": 1}, "low must be below high"),
        ({"kind": "bucket", "boundaries": [1], "default": "x"}, "must be a number"),
        ({"max_length": 3}, "only for lists"),
        ({"separator": "ab"}, "one ASCII character"),
        ({"slot": 40000}, "slot must be"),
        ({"kind": "id", "default": 2**64}, "must be a 64-bit integer"),
    ],
)
def test_definitions_that_make_no_sense_are_refused_with_their_section(values, match):
    with pytest.raises(ConfigError, match=match) as caught:
        definition("f", values)
    assert "[features.f]" in str(caught.value)


def test_schemas_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="before it, got 'b'"):
        Schema(label="y", sparse=("a", "x", "b"), definitions={"x": Feature(kind="cross", of=("a", "b"))})
    with pytest.raises(ConfigError, match="sparse must name it"):
        Schema(label="y", sparse=("a",), definitions={"b": Feature()})
    with pytest.raises(ConfigError, match="dense must name it"):
        Schema(label="y", sparse=("a",), definitions={"a": Number()})


def test_raw_values_that_do_not_fit_are_named():
    schema = Schema(
        label="y", dense=("x",), sparse=("age",), definitions={"age": Feature(kind="bucket", boundaries=(1,))}
    )
    with pytest.raises(ConfigError, match="sample 1: feature 'age' must be a number, got 'old'"):
        make_inputs(schema, {"age": ["3", "old"]})
    with pytest.raises(ConfigError, match="did you mean 'age'"):
        make_inputs(schema, {"aeg": [1]})
    with pytest.raises(ConfigError, match="one value or list per sample"):
        make_inputs(schema, {"age": [1], "x": [1.0, 2.0]})
    for wrong in (3, torch.tensor(3), np.array(3)):
        with pytest.raises(ConfigError, match="must be a list"):
            make_inputs(schema, {"age": wrong})
    for slot in ("1", True, 1.0):
        with pytest.raises(ConfigError, match="slot must be"):
            Feature(slot=slot)
    assert make_inputs(schema, {"x": torch.tensor([1.5], dtype=torch.bfloat16)}).dense.tolist() == [[1.5]]
    with pytest.raises(ConfigError, match="finite"):
        make_inputs(schema, {"age": [1], "x": [math.inf]})
    with pytest.raises(ConfigError, match="sample 0: feature 'age' must have one value, got 2"):
        make_inputs(schema, {"age": [[1, 2]]})


def test_a_cell_that_does_not_fit_is_a_bad_row(tmp_path):
    schema = Schema(label="y", sparse=("age",), definitions={"age": Feature(kind="bucket", boundaries=(1,))})
    (tmp_path / "a.csv").write_text("y,age\n1,2\n0,old\n1,\n")
    samples, bad = read(tmp_path / "a.csv", "csv", schema)
    assert len(samples) == 2
    assert "column 2 must be a number, got 'old'" in str(bad[0])


def test_many_samples_are_the_same_in_parts_and_at_once():
    schema = SCHEMA
    raw = {name: values * 700 for name, values in RAW.items()}
    whole = make_inputs(schema, raw)
    assert rows_of(whole.ids, whole.offsets, 7) == want_rows() * 700


def test_example_records_take_no_definitions():
    with pytest.raises(ConfigError, match="features must have no definitions"):
        make_format("example", Schema(label="y", sparse=("a",), definitions={"a": Feature(default="x")}))


def test_the_logarithm_is_exact_to_the_precision_of_float():
    schema = Schema(label="y", dense=("x",), definitions={"x": Number(log=True)})
    small = torch.logspace(-30, -3, 500, dtype=torch.float64)
    x = torch.cat([small, -small, torch.logspace(-3, 30, 5000, dtype=torch.float64), torch.zeros(1)]).float()
    want = torch.copysign(torch.log1p(x.double().abs()), x.double())
    ours = make_inputs(schema, {"x": x}).dense[:, 0]
    torch.testing.assert_close(ours.double(), want, rtol=1.2e-7, atol=0)


def test_numbers_beyond_float32_are_bad_in_every_format_and_tiny_ones_are_zero(tmp_path):
    schema = Schema(label="y", dense=("x",), sparse=("u",))
    values = ["1e300", "-1e39", "1e-300", "1e-60", "2.5", "3.4e38"]
    (tmp_path / "a.csv").write_text("y,x,u\n" + "".join(f"1,{x},u\n" for x in values) + "1e300,1,u\n")
    (tmp_path / "a.json").write_text(
        "".join(f'{{"y": 1, "x": {x}, "u": "u"}}\n' for x in values) + '{"y": 1e300, "x": 1, "u": "u"}\n'
    )
    floats = [*map(float, values), 1.0]
    pq.write_table(pa.table({"y": [1.0] * 6 + [1e300], "x": floats, "u": ["u"] * 7}), tmp_path / "a.parquet")
    for name in ("csv", "json", "parquet"):
        samples, bad = read(tmp_path / f"a.{name}", name, schema)
        assert samples.dense.view(-1).tolist() == torch.tensor([0, 0, 2.5, 3.4e38]).tolist()
        assert len(bad) == 3
    for x in floats[:2]:
        with pytest.raises(ConfigError, match="number 'x' must be finite in float32"):
            make_inputs(schema, {"x": [x], "u": ["u"]})
    assert make_inputs(schema, {"x": floats[2:6], "u": ["u"] * 4}).dense.view(-1).tolist()[:2] == [0, 0]
