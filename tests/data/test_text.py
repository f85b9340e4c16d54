"""Criteo and CSV text: good lines, bad lines, and files of another kind."""

import gzip
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import CRITEO, Schema, Stream, make_format, text_fid
from shoal.errors import ConfigError
from shoal.fid import slot_v2
from tests.data.helpers import labels, read_all

SMALL = Schema(label="y", dense=("a", "b"), sparse=("u", "v"))


def fid_reference(text, slot):
    """The documented hash, in Python's integers."""
    mask, odd, factor = (1 << 64) - 1, 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93

    def mix(x):
        x = ((x ^ (x >> 32)) * factor) & mask
        x = ((x ^ (x >> 32)) * factor) & mask
        return x ^ (x >> 32)

    value, rest = ((len(text) + 1) * odd) & mask, text
    while len(rest) > 8:
        value = (mix(value ^ int.from_bytes(rest[:8], "little")) + odd) & mask
        rest = rest[8:]
    return (slot << 48) | (mix(value ^ int.from_bytes(rest, "little")) & ((1 << 48) - 1))


@given(st.binary(max_size=40), st.integers(0, 32767))
def test_an_id_is_the_documented_hash(text, slot):
    assert text_fid(text, slot) == fid_reference(text, slot)
    assert slot_v2(text_fid(text, slot)) == slot


def test_a_criteo_line_becomes_label_counts_and_ids(tmp_path):
    path = tmp_path / "a.tsv"
    words = [f"{i:08x}" for i in range(26)]
    path.write_text("\t".join(["1", *map(str, range(-1, 12)), *words]) + "\n" + "\t".join(["0", *[""] * 39]) + "\n")
    (part,), bad = read_all(make_format("criteo", CRITEO), path)
    assert not bad
    assert part.label.tolist() == [1, 0]
    assert part.dense.tolist() == [[float(i) for i in range(-1, 12)], [0.0] * 13]
    assert part.ids[0].tolist() == [text_fid(word, i + 1) for i, word in enumerate(words)]
    assert part.ids[1].tolist() == [text_fid("", i + 1) for i in range(26)]


def test_csv_takes_columns_by_name_in_any_order_with_quotes_and_windows_newlines(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfv,y,zz,a,u,b\r\n"a,""b""\n",1,?,2.5,7,-3e2\r\nx,0,?,,8,+1\r\n')
    (part,), bad = read_all(make_format("csv", SMALL), path)
    assert not bad
    assert part.dense.tolist() == [[2.5, -300.0], [0.0, 1.0]]
    assert part.ids.tolist() == [
        [text_fid("7", 1), text_fid('a,"b"\n', 2)],
        [text_fid("8", 1), text_fid("x", 2)],
    ]


def test_cells_may_hold_many_values_or_none(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("y,u,v\n1,a|b|a,\n0,,c\n")
    (part,), _ = read_all(make_format("csv", Schema(label="y", sparse=("u", "v")), separator="|"), path)
    a, b, c = text_fid("a", 1), text_fid("b", 1), text_fid("c", 2)
    assert part.ids.tolist() == [a, b, a, c]
    assert part.offsets.tolist() == [0, 3, 3, 3, 4]


def test_raw_ids_are_taken_as_they_are_and_slots_are_shared(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("y,u,v\n1,-5,18446744073709551615\n0,7,x\n")
    parts, bad = read_all(make_format("csv", Schema(label="y", sparse=("u", "v"), raw=True)), path)
    assert parts[0].ids.tolist() == [[-5, -1]]
    assert "column 3 must be a 64-bit id, got 'x'" in bad[0].why
    shared = Schema(label="y", sparse=("u", "v"), slots={"v": 1})
    path.write_text("y,u,v\n1,q,q\n")
    (part,), _ = read_all(make_format("csv", shared), path)
    assert part.ids[0, 0] == part.ids[0, 1]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("1,2,3,u", "the line must have 5 columns, got 4"),
        ("1,2,3,u,v,w", "the line must have 5 columns, got more"),
        (",2,3,u,v", "column 1 is the label"),
        ("1,x,3,u,v", "column 2 must be a number or empty, got 'x'"),
        ("1,nan,3,u,v", "column 2 must be a number or empty, got 'nan'"),
        ("inf,1,3,u,v", "column 1 is the label"),
        ("1,1e99,3,u,v", "column 2"),
        ('1,2,3,"u,v', "quote that is not closed"),
        ('1,2,3,"u"x,v', "must end at its closing quote, got 'x,v' after it"),
    ],
)
def test_a_bad_line_is_left_out_and_told_with_its_number(tmp_path, line, why):
    path = tmp_path / "a.csv"
    path.write_text(f"y,a,b,u,v\n1,1,1,u,v\n\n{line}\n0,1,1,u,v\n")
    parts, bad = read_all(make_format("csv", SMALL), path)
    assert labels(parts) == [1, 0]
    assert len(bad) == 1
    assert bad[0].where() == f"{path}, line 4"
    assert why in bad[0].why


def test_the_line_number_of_a_bad_row_is_counted_where_reading_began_in_the_middle(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("y\ta\tb\tu\tv\n" + "1\t1\t1\tu\tv\n" * 500 + "1\tbad\t1\tu\tv\n" + "0\t1\t1\tu\tv\n" * 500)
    parts, bad = read_all(make_format("tsv", SMALL, part_bytes=100), path)
    assert len(labels(parts)) == 1000
    assert [row.where() for row in bad] == [f"{path}, line 502"]


@pytest.mark.parametrize("part_bytes", [1, 7, 64, 1000, 1 << 20])
@pytest.mark.parametrize("newline_at_end", [True, False])
def test_every_line_is_in_exactly_one_part_of_a_file(tmp_path, part_bytes, newline_at_end):
    path = tmp_path / "a.tsv"
    lines = [f"{i}\t{i % 7}\t\t{'x' * (i % 30)}\tv" for i in range(60)]
    path.write_text("y\ta\tb\tu\tv\n" + "\n".join(lines) + "\n" * newline_at_end)
    form = make_format("tsv", SMALL, part_bytes=part_bytes)
    parts, bad = read_all(form, path)
    assert not bad
    assert labels(parts) == list(range(60))
    assert len(form.units(str(path))) == max(1, -(-path.stat().st_size // part_bytes))


def test_gzip_is_known_by_its_content(tmp_path):
    path = tmp_path / "packed.data"
    path.write_bytes(gzip.compress(b"y,a,b,u,v\n" + b"1,1,1,u,v\n" * 5000))
    parts, bad = read_all(make_format("csv", SMALL), path)
    assert (len(labels(parts)), bad) == (5000, [])


def test_a_cut_off_gzip_gives_what_it_has_and_tells(tmp_path):
    path = tmp_path / "a.csv.gz"
    body = b"".join(b"1,%d,%d,u%d,v\n" % (i, i * 7 % 1000, i * i % 99991) for i in range(400_000))
    path.write_bytes(gzip.compress(b"y,a,b,u,v\n" + body, 1)[:-200_000])
    parts, bad = read_all(make_format("csv", SMALL), path, rows=10_000)
    assert 0 < len(labels(parts)) < 400_000
    assert bad[0].rest
    assert "damaged" in bad[0].why
    broken = bytearray(gzip.compress(b"y,a,b,u,v\n" + b"1,1,1,u,v\n" * 100))
    broken[30:40] = b"\xff" * 10
    path.write_bytes(bytes(broken))
    parts, bad = read_all(make_format("csv", Schema(label="y", sparse=("u",)), columns=["y", "u"]), path)
    assert labels(parts) == []
    assert "damaged" in bad[-1].why


def test_a_gzip_whose_header_cannot_be_read_is_told_and_skipped(tmp_path):
    bad, good = [], tmp_path / "b.csv"
    good.write_bytes(b"y,a,b,u,v\n1,1,1,u,v\n")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"y,a,b,u,v\n1,1,1,u,v\n")[:12])
    stream = Stream([str(tmp_path)], make_format("csv", SMALL), SMALL, batch_size=4, on_bad=bad.append)
    assert [len(batch) for batch in stream] == [1]
    assert (len(bad), bad[0].rest, bad[0].where()) == (1, True, f"{tmp_path / 'a.csv.gz'}, line 1")
    assert "the file is damaged" in bad[0].why


@pytest.mark.parametrize("cut", [1, 8, 40, 200])
def test_all_whole_lines_before_the_cut_of_a_small_gzip_are_read_and_no_part_of_one(tmp_path, cut):
    path = tmp_path / "a.csv.gz"
    body = "".join(f"1,0.5,{i},u{i * i % 9973},v\n" for i in range(300))
    path.write_bytes(gzip.compress(b"y,a,b,u,v\n" + body.encode())[:-cut])
    parts, bad = read_all(make_format("csv", SMALL), path)
    numbers = [row[1] for part in parts for row in part.dense.tolist()]
    assert numbers == list(range(len(numbers)))
    assert 50 < len(numbers) <= 300
    assert [row.line for row in bad] == [len(numbers) + 2]
    assert bad[0].rest


def test_a_byte_order_mark_is_no_part_of_the_first_cell(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbf1,u\n0,v\n")
    parts, bad = read_all(make_format("csv", Schema(label="y", sparse=("u",)), columns=["y", "u"]), path)
    assert (labels(parts), bad) == ([1.0, 0.0], [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("y,a,b,u,v,u\n1,1,1,u,v,u\n", "column names must be unique, got 'u' 2 times"),
        ("y,a,b,u,V\r1,1,1,u,v\r", "its first line is not a header"),
        ("y,a,b,u,w\n1,1,1,u,v\n", "there is no column 'v'"),
    ],
)
def test_a_header_that_does_not_fit_is_told_before_anything_is_read(tmp_path, text, message):
    path = tmp_path / "a.csv"
    path.write_text(text, newline="")
    with pytest.raises(ConfigError, match=message):
        make_format("csv", SMALL).units(str(path))


@pytest.mark.parametrize("name", ["csv", "tsv", "criteo", "tfrecord"])
@pytest.mark.parametrize(
    ("begin", "kind"),
    [
        (b"PAR1\x15\x04\x15\x10", "a Parquet file, not"),
        (gzip.compress(b"PAR1\x15\x04\x15\x10"), "a Parquet file, not"),
        (b"PK\x03\x04\x14", "a zip archive"),
        (b"\x28\xb5\x2f\xfd\x04", "packed with zstd"),
        ("y,a,b\n".encode("utf-16"), "UTF-16 text"),
    ],
    ids=["parquet", "parquet in gzip", "zip", "zstd", "utf-16"],
)
def test_a_file_of_another_kind_is_named_and_none_of_it_is_shown(tmp_path, name, begin, kind):
    (tmp_path / "a").write_bytes(begin + bytes(range(256)) * 4 if begin[:2] != b"\x1f\x8b" else begin)
    schema = CRITEO if name == "criteo" else Schema(label="y", sparse=("u",))
    with pytest.raises(ConfigError, match=kind) as caught:
        make_format(name, schema).units(str(tmp_path / "a"))
    assert str(caught.value).isprintable()


def test_a_header_that_is_not_text_is_refused_and_one_that_looks_like_a_magic_number_is_not(tmp_path):
    (tmp_path / "a").write_bytes(b"\x00\x01binary,\x02\n1,2\n")
    with pytest.raises(ConfigError, match="its first line is not text"):
        make_format("csv", SMALL).units(str(tmp_path / "a"))
    (tmp_path / "b").write_text("PAR1,u\n1,x\n")
    parts, bad = read_all(make_format("csv", Schema(label="PAR1", sparse=("u",))), tmp_path / "b")
    assert (labels(parts), bad) == ([1.0], [])


def test_a_huge_line_is_one_bad_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(
        b"y,a,b,u,v\n1,1,1,u,v\n" + b"z" * 5_000_000 + b"\n0,1,1,u,v\n" + b"1,1,1," + b"w" * 5000 + b",v\n"
    )
    parts, bad = read_all(make_format("csv", SMALL, quote="", max_line_bytes=4000), path)
    assert labels(parts) == [1, 0]
    assert [row.where() for row in bad] == [f"{path}, line 3", f"{path}, line 5"]
    assert all("more than 4000" in row.why for row in bad)


def test_a_stray_quote_spoils_its_own_line_alone(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('y,a,b,u,v\n1,1,1,u,v\n1,1,1,"u,v\n' + "0,1,1,u,v\n" * 50)
    parts, bad = read_all(make_format("csv", SMALL), path)
    assert (len(labels(parts)), len(bad)) == (51, 1)


def test_an_empty_file_has_no_units_and_one_with_a_header_alone_no_samples(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("")
    assert make_format("csv", SMALL).units(str(path)) == []
    path.write_text("y,a,b,u,v\n")
    assert read_all(make_format("csv", SMALL), path) == ([], [])


def test_wrong_columns_and_options_are_refused_with_what_is_allowed(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("y,a,u,v\n1,1,u,v\n")
    form = make_format("csv", SMALL)
    with pytest.raises(ConfigError, match=r"there is no column 'b'; the columns are 'y', 'a', 'u', 'v'"):
        read_all(form, path)
    with pytest.raises(ConfigError, match="cannot read"):
        form.units(str(tmp_path / "none.csv"))
    with pytest.raises(ConfigError, match="delimiter must be one ASCII character, got 'ab'"):
        make_format("csv", SMALL, delimiter="ab")
    with pytest.raises(ConfigError, match="format 'csv' does not take lists; its options are"):
        make_format("csv", SMALL, lists=True)
    with pytest.raises(ConfigError, match="format must be one of criteo, csv"):
        make_format("xml", SMALL)
    with pytest.raises(ConfigError, match="'u' has several"):
        Schema(label="y", dense=("u",), sparse=("u",))
    with pytest.raises(ConfigError, match=r"slot of 'u' must be 0\.\.32767, got 40000"):
        Schema(label="y", sparse=("u",), slots={"u": 40000})


@given(st.binary(max_size=400), st.sampled_from(["", '"']), st.sampled_from(["", "|"]), st.integers(1, 60))
def test_no_bytes_break_the_parser(text, quote, separator, max_line):
    form = make_format(
        "csv", SMALL, columns=["y", "a", "b", "u", "v"], quote=quote, separator=separator, max_line_bytes=max_line
    )
    parser = form.parser(form.columns, "x")
    block = parser.parse(text, 0, True, 1000, 1 << 40)
    blank = block.lines - block.rows - len(block.bad)
    assert block.consumed == len(text)
    assert blank >= 0
    for threads in (False, True):
        again = parser.parse(b"," + text, 1, False, 1000, 1 << 40, threads)
        assert again.consumed <= len(text)
        assert again.lines <= block.lines + 1


def test_cursors_go_on_where_another_was(tmp_path):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"y,a,b,u,v\n" + b"".join(b"%d,1,1,u,v\n" % i for i in range(1000))))
    form = make_format("csv", SMALL)
    (unit,) = form.units(str(path))
    with closing(form.open(unit, None, pytest.fail)) as cursor:
        cursor.read(123)
        with closing(form.open(unit, cursor.state(), pytest.fail)) as again:
            assert torch.equal(again.read(50).label, torch.arange(123.0, 173.0))
