"""Parquet files: types, nulls, lists, row groups, damage."""

import pytest
import torch

from shoal.data import Schema, make_format, text_fid
from shoal.errors import ConfigError
from tests.data.helpers import labels, read_all

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SCHEMA = Schema(label="y", dense=("a",), sparse=("u", "v"))


def write(path, group=1000, **columns):
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_texts_have_the_ids_that_csv_gives_them(tmp_path, kind):
    words = ["x", None, "a longer category", ""]
    array = pa.array(words, pa.string()).cast(kind)
    path = write(tmp_path / "a.parquet", y=[1, 0, 1, 0], a=[1.5, None, 3, 4], u=array, v=[7, -8, None, 9])
    (part,), bad = read_all(make_format("parquet", SCHEMA), path)
    assert not bad
    assert part.ids[:, 0].tolist() == [text_fid(word or "", 1) for word in words]
    assert part.ids[:, 1].tolist() == [text_fid(text, 2) for text in ("7", "-8", "", "9")]
    assert part.dense.view(-1).tolist() == [1.5, 0, 3, 4]


def test_slices_of_a_row_group_and_many_groups(tmp_path):
    n = 1000
    path = write(
        tmp_path / "a.parquet", group=300, y=list(range(n)), a=[0.0] * n, u=[f"u{i}" for i in range(n)], v=range(n)
    )
    form = make_format("parquet", SCHEMA)
    assert len(form.units(str(path))) == 4
    parts, _ = read_all(form, path, rows=7)
    assert labels(parts) == list(range(n))
    assert torch.cat([part.ids[:, 0] for part in parts]).tolist() == [text_fid(f"u{i}", 1) for i in range(n)]


def test_lists_are_bags_and_nulls_are_empty(tmp_path):
    path = write(tmp_path / "a.parquet", y=[1, 0, 1], a=[0, 0, 0], u=[["p", "q"], None, []], v=[5, None, 6])
    (part,), _ = read_all(make_format("parquet", SCHEMA, lists=True), path)
    assert part.offsets.tolist() == [0, 2, 3, 3, 3, 3, 4]
    assert part.ids.tolist() == [text_fid("p", 1), text_fid("q", 1), text_fid("5", 2), text_fid("6", 2)]


def test_raw_integers_are_ids(tmp_path):
    path = write(tmp_path / "a.parquet", y=[True, False], u=[5, -6])
    (part,), _ = read_all(make_format("parquet", Schema(label="y", sparse=("u",), raw=True)), path)
    assert (part.label.tolist(), part.ids.view(-1).tolist()) == ([1, 0], [5, -6])


def test_rows_without_a_label_are_bad(tmp_path):
    path = write(tmp_path / "a.parquet", group=2, y=[1, 0, None, 1.0, float("nan")], a=[1] * 5, u=["u"] * 5, v=[1] * 5)
    parts, bad = read_all(make_format("parquet", SCHEMA), path)
    assert labels(parts) == [1, 0, 1]
    assert [row.where() for row in bad] == [f"{path}, row 3", f"{path}, row 5"]


def test_rows_without_a_time_are_bad(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"y": [0, 1, 1], "u": ["a", "b", "c"], "t": [5, None, 7]}), path)
    parts, bad = read_all(make_format("parquet", Schema(label="y", sparse=("u",), time="t")), path)
    assert [time for part in parts for time in part.time.tolist()] == [5, 7]
    assert [row.line for row in bad] == [2]
    assert "'t'" in bad[0].why


def test_a_damaged_file_is_told_and_a_missing_one_or_column_refused(tmp_path):
    path = write(tmp_path / "a.parquet", y=[1] * 5000, a=[1] * 5000, u=[f"{i}" for i in range(5000)], v=[1] * 5000)
    form = make_format("parquet", SCHEMA)
    data = bytearray(path.read_bytes())
    path.write_bytes(bytes(data[: len(data) // 2]))
    parts, bad = read_all(form, path)
    assert (parts, bad[0].rest) == ([], True)
    assert "damaged" in bad[0].why
    with pytest.raises(ConfigError, match="cannot read"):
        form.units(str(tmp_path / "none.parquet"))
    (tmp_path / "text.parquet").write_text("y,a,u,v\n1,2,3,4\n")
    with pytest.raises(ConfigError, match=r"text\.parquet is not a Parquet file"):
        form.units(str(tmp_path / "text.parquet"))
    write(path, y=[1], a=[1], u=["u"])
    with pytest.raises(ConfigError, match="there is no column 'v'"):
        form.units(str(path))
    write(path, y=["1"], a=[1], u=["u"], v=["v"])
    with pytest.raises(ConfigError, match="column 'y' must be a number, got string"):
        read_all(form, path)
    write(path, y=[1], a=[1], u=[["u"]], v=["v"])
    with pytest.raises(ConfigError, match="set lists = true"):
        read_all(form, path)


def test_a_time_that_rows_cannot_have_is_bad(tmp_path):
    path = tmp_path / "a.parquet"
    times = [5.0, -1.0, 9e30, 2.0**32, float("nan"), 2.0**32 - 1]
    pq.write_table(pa.table({"y": [1] * 6, "u": ["a"] * 6, "t": times}), path)
    parts, bad = read_all(make_format("parquet", Schema(label="y", sparse=("u",), time="t")), path)
    assert [time for part in parts for time in part.time.tolist()] == [5, 2**32 - 1]
    assert [row.line for row in bad] == [2, 3, 4, 5]
    assert "'t' must be in seconds since 1970, 0..4294967295" in bad[0].why


def test_lists_of_fixed_size_are_read_like_others_and_a_column_of_nulls_as_missing(tmp_path):
    path, schema = tmp_path / "a.parquet", Schema(label="y", dense=("d",), sparse=("u", "v"))
    lists = [["a", "b"], None, ["c", None]]
    found = []
    for kind in (pa.list_(pa.string()), pa.list_(pa.string(), 2)):
        columns = {"y": [1, 0, 1], "d": pa.nulls(3), "u": pa.array(lists, kind), "v": pa.nulls(3)}
        pq.write_table(pa.table(columns), path)
        (part,), bad = read_all(make_format("parquet", schema, lists=True), path)
        assert not bad
        assert part.dense.tolist() == [[0.0]] * 3
        found.append((part.ids.tolist(), part.offsets.tolist()))
    assert found[0] == found[1]


def test_two_columns_of_one_name_and_nested_lists_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([1])] * 3, names=["y", "u", "u"]), path)
    with pytest.raises(ConfigError, match="column names must be unique, got 'u' 2 times"):
        read_all(make_format("parquet", Schema(label="y", sparse=("u",))), path)
    pq.write_table(pa.table({"y": [1], "u": [[["a"]]]}), path)
    with pytest.raises(ConfigError, match="must hold texts, numbers or lists of these, got list"):
        read_all(make_format("parquet", Schema(label="y", sparse=("u",)), lists=True), path)
